"""What only a store in PostgreSQL does: leases, outages of the server, several machines."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import socket
from collections.abc import AsyncIterator, Collection, Iterator
from pathlib import Path

import psycopg
import pytest

from dfm_async.errors import StoreError
from dfm_async.model.status import JobStatus
from dfm_async.store import open_store
from dfm_async.store.base import Entry
from dfm_async.store.postgres import PostgresStore
from tests.chaos.relay import Relay
from tests.flare.namespaces import Network
from tests.store.backends import LEASE, PostgresBackend
from tests.store.helpers import Child, entry, everything, found, new_job, row
from tests.support.postgres import PostgresServer, running_server
from tests.support.processes import ROOT, run_python
from tests.support.waiting import PROMPT


@pytest.fixture
def backend(postgres: PostgresServer) -> PostgresBackend:
    return PostgresBackend(postgres)


@pytest.fixture
async def store(backend: PostgresBackend) -> AsyncIterator[PostgresStore]:
    store = backend.make()
    await store.open()
    yield store
    await store.close()


@pytest.fixture(scope="module")
def own_server() -> Iterator[PostgresServer]:
    """A server that a test may stop."""
    with running_server() as server:
        yield server


# opening


@pytest.mark.parametrize("scheme", ["postgres", "postgresql"])
def test_urls_of_libpq_are_accepted_and_shown_without_the_password(scheme: str) -> None:
    store = open_store(f"{scheme}://ann:secret@db.example:5433/jobs?sslmode=require")
    assert isinstance(store, PostgresStore)
    assert store.path == "postgresql://ann@db.example:5433/jobs"
    assert store.checkpoints != open_store(f"{scheme}://ann@db.example/other").checkpoints


async def test_a_server_that_is_not_there_is_reported_without_the_password(tmp_path: Path) -> None:
    store = PostgresStore(f"postgresql://ann:secret@/jobs?host={tmp_path}")
    with pytest.raises(StoreError, match="the server cannot be reached") as caught:
        await store.open()
    assert "secret" not in str(caught.value)


async def test_a_database_that_does_not_exist_is_reported(postgres: PostgresServer) -> None:
    with pytest.raises(StoreError, match='database "nothing" does not exist'):
        await PostgresStore(postgres.url("nothing")).open()


async def test_a_server_without_free_connections_is_reported(backend: PostgresBackend) -> None:
    await backend.execute("CREATE ROLE limited LOGIN CONNECTION LIMIT 1")
    try:
        await backend.execute(
            "DO $$ BEGIN EXECUTE format('GRANT CREATE ON DATABASE %I TO limited', current_database()); END $$"
        )
        store = PostgresStore(backend.url.replace("test@", "limited@"))
        with pytest.raises(StoreError, match="too many connections"):
            await asyncio.wait_for(store.open(), 60)
    finally:
        await backend.execute("DROP OWNED BY limited CASCADE")
        await backend.execute("DROP ROLE limited")


def test_invalid_urls_schemas_and_leases_are_refused() -> None:
    with pytest.raises(StoreError, match="Write postgresql://user@host/database") as caught:
        open_store("postgresql://ann:secret@host/jobs?colour=red")
    assert "secret" not in str(caught.value)
    with pytest.raises(ValueError, match="schema must be a name of lower-case letters"):
        PostgresStore("postgresql:///jobs", schema="x; DROP TABLE jobs")
    with pytest.raises(ValueError, match="lease must be a number of seconds above 0, not 0"):
        PostgresStore("postgresql:///jobs", lease=0)


async def test_a_schema_of_others_is_refused_and_left_alone(backend: PostgresBackend) -> None:
    await backend.execute("CREATE SCHEMA theirs")
    with pytest.raises(StoreError, match="schema 'theirs' exists, but is not a store of jobs"):
        await PostgresStore(backend.url, schema="theirs").open()
    assert await backend.execute("SELECT count(*) FROM pg_tables WHERE schemaname = 'theirs'") == [(0,)]


async def test_schemas_of_one_database_are_separate_stores(backend: PostgresBackend, store: PostgresStore) -> None:
    other = PostgresStore(backend.url, schema="other")
    await other.open()
    try:
        await store.create(new_job("j"))
        assert await other.jobs() == []
        assert await other.create(new_job("j"))
    finally:
        await other.close()


def test_store_without_its_extra_names_what_to_install() -> None:
    code = """
import sys

sys.modules["psycopg"] = None
from dfm_async.errors import StoreError
from dfm_async.store import open_store

try:
    open_store("postgresql://ann:secret@host/jobs")
except StoreError as error:
    print(error)
"""
    done = run_python("-c", code, cwd=ROOT)
    expected = "a store in PostgreSQL needs psycopg. pip install '.[postgres]' in a checkout of dfm_async"
    assert done.stdout.strip() == f"store postgresql://...: {expected}"


# values


async def test_text_that_postgresql_cannot_hold(store: PostgresStore) -> None:
    with pytest.raises(StoreError, match="characters that PostgreSQL cannot hold"):
        await store.create(new_job("a\0b"))
    assert await store.find("a\0b") is None
    await store.create(new_job("j"))
    store.update("j", status=JobStatus.FAILED, reason="a\0b\udc80")
    await store.flush()
    assert (await found(store)).reason == "a\N{SYMBOL FOR NULL}b\\udc80"


async def test_a_batch_larger_than_one_statement(store: PostgresStore) -> None:
    await store.create(new_job("j"))
    entries = [Entry(offset, 1, 0, b"", bytes([offset]) * (5 << 20)) for offset in range(8)]
    for item in entries:
        store.append("j", item)
    store.add_params("j", 0, [bytes(9 << 20), bytes(9 << 20), b""])
    await store.flush()
    assert await everything(store) == entries
    assert [len(data) for data in (await store.params("j", range(3))).values()] == [9 << 20, 9 << 20, 0]


# leases


async def test_an_owner_that_is_stopped_loses_its_jobs_and_cannot_write_them(
    backend: PostgresBackend, store: PostgresStore
) -> None:
    child = await Child.start(backend.url)
    try:
        await child.tell("create j")
        await child.tell("append j 3")
        fence = (await found(store)).owner.fence
        child.process.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(LEASE + 20), store.follow(fence) as follower:
            while await follower.changed():
                pass
        assert (await found(store)).status is JobStatus.INTERRUPTED
        assert (await store.take_over("j")).end == 3
        store.append("j", entry(3))
        await store.flush()
        child.process.send_signal(signal.SIGCONT)
        assert await child.tell("append j 5") == "ok"
        assert (await found(store)).end == 4, "what it wrote was left out"
    finally:
        child.process.send_signal(signal.SIGCONT)
        await child.end()


async def test_a_lease_is_renewed_while_nothing_is_written(backend: PostgresBackend, store: PostgresStore) -> None:
    other = backend.make(lease=0.6)
    await other.open()
    try:
        await other.create(new_job("j"))
        async with store.follow(other.fence) as follower:
            assert await follower.changed()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(follower.changed(), 2.0)
        assert (await found(store)).owner.alive
    finally:
        await other.close()
    assert (await found(store)).status is JobStatus.INTERRUPTED


# notifications


async def test_other_stores_are_notified_of_the_jobs_of_every_commit(
    backend: PostgresBackend, store: PostgresStore
) -> None:
    other = backend.make()
    await other.open()
    try:
        notified: asyncio.Queue[Collection[str] | None] = asyncio.Queue()
        store.on_change = other.on_change = notified.put_nowait
        names = ['an "id" of \u00e9 words', "j", *("k" * 1000 + str(number) for number in range(9))]
        async with asyncio.timeout(PROMPT), store.follow(other.fence) as follower:
            assert await follower.changed()
            assert follower.jobs() is None, "anything may have been committed before"
            for name in names[:2]:
                await other.create(new_job(name))
                assert await notified.get() == [name]
            assert await follower.changed()
            assert set(follower.jobs() or ()) == set(names[:2])
            assert follower.jobs() == set()
            await asyncio.gather(*(other.create(new_job(name)) for name in names[2:]))
            while await notified.get() is not None:  # they are too large for one notification
                pass
            assert await follower.changed()
            assert follower.jobs() is None
    finally:
        await other.close()


# outages


async def terminate_connections(backend: PostgresBackend) -> None:
    await backend.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )


async def test_connections_that_break_at_any_moment_lose_and_repeat_nothing(
    backend: PostgresBackend, store: PostgresStore
) -> None:
    random_ = random.Random(4)
    await store.create(new_job("j"))
    stop = asyncio.Event()

    async def interrupt() -> None:
        while not stop.is_set():
            await asyncio.sleep(random_.random() * 0.05)
            await terminate_connections(backend)

    interrupting = asyncio.create_task(interrupt())
    for number in range(300):
        store.append("j", entry(2 * number, 2), done=1)
        store.add_params("j", number, [row(number)])
        if number % 20 == 0:
            await store.flush()
        await asyncio.sleep(0.002)
    stop.set()
    await interrupting
    await store.flush()
    job = await found(store)
    assert (job.end, job.frames, job.done) == (600, 300, 300)
    assert await everything(store) == [entry(2 * number, 2) for number in range(300)]


async def test_jobs_are_created_once_although_their_commit_is_repeated(
    backend: PostgresBackend, store: PostgresStore
) -> None:
    """The connection breaks behind the commit and before its answer."""
    assert store._ownership is not None
    commit = store._ownership.commit

    async def commit_and_break(connection: object, *arguments: object) -> None:
        await commit(connection, *arguments)  # type: ignore[arg-type]
        store._ownership.commit = commit  # type: ignore[union-attr, method-assign]
        await connection.close()  # type: ignore[attr-defined]
        raise psycopg.OperationalError("the connection is lost")

    store._ownership.commit = commit_and_break  # type: ignore[method-assign, assignment]
    assert await store.create(new_job("j"))
    store.append("j", entry(0))
    store._ownership.commit = commit_and_break  # type: ignore[method-assign, assignment]
    await store.flush()
    assert await everything(store) == [entry(0)]


async def test_a_restart_of_the_server_delays_commits_and_reads(own_server: PostgresServer) -> None:
    store = PostgresBackend(own_server).make()
    await store.open()
    try:
        await store.create(new_job("j"))
        await asyncio.to_thread(own_server.stop)
        store.append("j", entry(0))
        flushing, reading = asyncio.create_task(store.flush()), asyncio.create_task(store.find("j"))
        await asyncio.to_thread(own_server.start)
        await asyncio.gather(flushing, reading)
        assert await everything(store) == [entry(0)]
    finally:
        await store.close()


async def test_a_server_that_stays_away_is_reported(own_server: PostgresServer) -> None:
    store = PostgresBackend(own_server).make(lease=0.5)
    await store.open()
    reported: list[StoreError] = []
    store.on_error = reported.append
    await store.create(new_job("j"))
    await asyncio.to_thread(own_server.stop)
    try:
        store.append("j", entry(0))
        with pytest.raises(StoreError, match="the server cannot be reached"):
            await store.flush()
        with pytest.raises(StoreError, match="the server cannot be reached"):
            await store.find("j")
        assert reported
        assert store.discard("j")
        await store.close()
    finally:
        await asyncio.to_thread(own_server.start)


async def test_a_network_that_drops_packets_is_noticed_within_two_leases(postgres: PostgresServer) -> None:
    async with Network.up(["database", "replica"]) as network:
        with network.entered("database"):
            relay = Relay(postgres.socket, socket.create_server((network.address("database"), 5432)))
        async with relay.running():
            with network.entered("replica"):
                await _cut_off_and_back(network, f"{network.address('database')}/{postgres.new_database()}")


async def _cut_off_and_back(network: Network, database: str) -> None:
    store, lease = PostgresStore(f"postgresql://test@{database}", lease=2), 2
    await store.open()
    try:
        await store.create(new_job("j"))
        await network.cut("replica")
        store.append("j", entry(0))
        for waiting in (store.flush(), store.find("j"), store.find("j")):
            async with asyncio.timeout(2 * lease + PROMPT):
                with pytest.raises(StoreError, match="the server cannot be reached"):
                    await waiting
        await network.heal("replica")
        async with asyncio.timeout(2 * lease + PROMPT):
            while True:  # it may wait for the next attempt to connect
                with contextlib.suppress(StoreError):
                    assert await store.find("j") is not None
                    break
        assert store.discard("j")
    finally:
        await store.close()


def test_timeouts_of_connections_follow_the_lease_unless_the_url_has_them() -> None:
    def timeouts(url: str, lease: float) -> dict[str, object]:
        found = psycopg.conninfo.conninfo_to_dict(PostgresStore(url, lease=lease)._conninfo)
        return {name: value for name, value in found.items() if "timeout" in name or "keepalives" in name}

    assert timeouts("postgresql://db.example/jobs", 10) == {
        "connect_timeout": "10",
        "tcp_user_timeout": "10000",
        "keepalives_idle": "5",
        "keepalives_interval": "2",
        "keepalives_count": "2",
    }
    given = "connect_timeout=3&tcp_user_timeout=0&keepalives_idle=60&keepalives_interval=9&keepalives_count=4"
    found = timeouts(f"postgresql://db.example/jobs?{given}", 1e300)
    assert "&".join(f"{name}={value}" for name, value in sorted(found.items())) == "&".join(sorted(given.split("&")))
    assert timeouts("postgresql://db.example/jobs", 0.5)["tcp_user_timeout"] == "500"
    assert timeouts("postgresql://db.example/jobs", 1e300)["tcp_user_timeout"] == "3600000"
