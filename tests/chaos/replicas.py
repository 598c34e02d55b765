"""Services on one PostgreSQL database, clients that talk to any of them, and what goes wrong meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import psycopg

from dfm_async.store.postgres_queries import jobs_of
from tests.chaos.histories import Commit, Death, JobHistory, Outcome, Seen, SentEvent
from tests.chaos.relay import Relay
from tests.support.postgres import PostgresServer
from tests.support.processes import ROOT

LEASE = 1.0
TAKEOVER = 10.0 + LEASE
"""After how many seconds another replica runs the jobs of one that was killed."""
REPLICAS = 3
LANES = ([0], [1, 2])
"""The replicas that are disturbed one after the other; those of different lanes at the same time."""
PATIENCE = 3.0
"""After how many seconds a client asks another replica."""
SETTLED = 20.0
"""After how many seconds without faults all replicas agree."""
PAUSE = 0.02
_OBSERVER = "observer"


class Replica:
    """One service, which may be dead, stopped, or cut off from the database."""

    def __init__(self, server: PostgresServer, database: str, checkpoints: str) -> None:
        self.relay = Relay(server.socket)
        self._command = [server.url(database, self.relay.folder), str(LEASE), checkpoints]
        self._process: asyncio.subprocess.Process | None = None
        self.address = ""

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        command = [sys.executable, "-m", "tests.chaos.replica", *self._command]
        self._process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
        assert self._process.stdout is not None
        words = (await self._process.stdout.readline()).split()
        assert words[:1] == [b"ready"], "a replica did not start; its log says why"
        self.address = f"http://127.0.0.1:{int(words[1])}"

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    async def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.communicate()


class Cluster:
    """The replicas, and the history of the jobs of a round."""

    def __init__(self, seed: int, server: PostgresServer) -> None:
        self.seed = seed
        self.rng = random.Random(f"replicas {seed}")
        self.jobs: dict[str, JobHistory] = {}
        self.faults: list[str] = []
        self.commits: list[Commit] = []
        self.deaths: list[Death] = []
        self.owners: dict[str, int] = {}
        """The last owner of each job."""
        self.recorded = self.rng.random() < 0.5
        """Whether the calls of all jobs are recorded."""
        self.resuming = self.rng.random() < 0.5
        """Whether clients resume jobs, too, and not services only."""
        self._server = server
        self._database = server.new_database()
        self._replicas: list[Replica] = []
        self._http = httpx2.AsyncClient(timeout=PATIENCE)
        self._clock = asyncio.get_running_loop().time

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="dfm-replicas-"))
            for _ in range(REPLICAS):
                replica = Replica(self._server, self._database, folder)
                await stack.enter_async_context(replica.relay.running())
                stack.push_async_callback(replica.kill)
                self._replicas.append(replica)
            await asyncio.gather(*(replica.start() for replica in self._replicas))
            await stack.enter_async_context(self._http)
            await stack.enter_async_context(self._observed())
            yield

    @asynccontextmanager
    async def _observed(self) -> AsyncIterator[None]:
        """Collect the commits of all replicas."""
        connection = await psycopg.AsyncConnection.connect(
            self._server.url(self._database), autocommit=True, application_name=_OBSERVER
        )
        async with connection:
            await connection.execute("LISTEN dfm_async")
            observing = asyncio.create_task(self._observe(connection))
            yield
            observing.cancel()
            await asyncio.wait([observing])

    async def _observe(self, connection: psycopg.AsyncConnection[Any]) -> None:
        async for notification in connection.notifies():
            fence, what, *jobs = notification.payload.split(" ", 2)
            if what == "commit":
                self.commits.append(Commit(self._clock(), int(fence), jobs_of(jobs[0]) or []))

    async def _execute(self, statement: str, *arguments: Any) -> list[tuple[Any, ...]]:
        return await asyncio.to_thread(self._server.execute, self._database, statement, *arguments)

    def any_address(self) -> str:
        return self.rng.choice(self._replicas).address

    def unended(self) -> dict[str, JobHistory]:
        """Return the jobs whose end no client has reported."""
        done = Outcome.DONE
        return {name: job for name, job in self.jobs.items() if done not in (*job.stopped, *job.cancelled)} or self.jobs

    # what goes wrong

    async def disturb(self, faults: int) -> None:
        """Inject faults, this many in each lane; in the end everything runs again."""
        await asyncio.gather(*(self._disturb(at, lane, faults) for at, lane in enumerate(LANES)))

    async def _disturb(self, number: int, lane: list[int], faults: int) -> None:
        rng = random.Random(f"faults {self.seed} {number}")
        for _ in range(faults):
            await asyncio.sleep(rng.uniform(0.1, 0.8))
            at = rng.choice(lane)
            replica = self._replicas[at]
            seconds = LEASE * rng.choice([0.2, 0.9, 1.5, 2.5])
            match rng.choice(["kill", "pause", "break", "hold"]):
                case "kill":
                    self.faults.append(f"kill {at}")
                    await self._kill(replica)
                    await asyncio.sleep(rng.choice([0.0, 0.5]))
                    await replica.start()
                case "pause":
                    self.faults.append(f"pause {at} for {seconds:g} s")
                    replica.signal(signal.SIGSTOP)
                    await asyncio.sleep(seconds)
                    replica.signal(signal.SIGCONT)
                case "break":
                    share = rng.choice([0.3, 1.0])
                    self.faults.append(f"break {share:.0%} of the connections")
                    await self._execute(
                        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() "
                        "AND pid <> pg_backend_pid() AND application_name <> %s AND random() < %s",
                        _OBSERVER,
                        share,
                    )
                case "hold":
                    drop = rng.random() < 0.5
                    self.faults.append(f"cut {at} off for {seconds:g} s, then {'drop' if drop else 'forward'}")
                    replica.relay.hold()
                    await asyncio.sleep(seconds)
                    await replica.relay.release(drop=drop)

    async def _kill(self, replica: Replica) -> None:
        at, pid = self._clock(), replica.pid
        await replica.kill()
        owned = await self._execute(
            "SELECT fence, array_agg(job_id) FROM jobs JOIN owners USING (fence) "
            "WHERE pid = %s AND status IN ('submitted', 'running') GROUP BY fence",
            pid,
        )
        self.deaths += [Death(at, fence, jobs) for fence, jobs in owned]

    # clients

    async def post(self, path: str, **body: Any) -> tuple[Outcome, dict[str, Any]]:
        """Send one request to some replica."""
        try:
            answer = await self._http.post(f"{self.any_address()}{path}", json=body)
        except httpx2.ConnectError:
            return Outcome.REFUSED, {}
        except httpx2.HTTPError:
            return Outcome.UNKNOWN, {}
        data = answer.json()
        if answer.is_success:
            return Outcome.DONE, data
        refused = answer.status_code in (409, 422, 429) or data.get("error") in ("interrupted", "closed", "draining")
        return Outcome.REFUSED if refused else Outcome.UNKNOWN, data

    async def live(self, name: str, *, waits: bool) -> None:
        """Submit a job, send it parameter sets or an event, read it, and end it; a client for each."""
        rng, job = self.rng, self.jobs.setdefault(name, JobHistory(recorded=self.recorded))
        job.submitted = Outcome.UNKNOWN
        body: dict[str, Any] = {"params": {"x": 0, "pause": PAUSE}} if waits else {"open": True, "params": None}
        body["checkpoint"] = "calls" if self.recorded else "marked"
        while job.submitted is not Outcome.DONE:
            job.submitted, _ = await self.post(f"/pipelines/{'waits' if waits else 'steps'}/jobs", job_id=name, **body)
        if waits:
            job.sent, job.stopped = [(0, Outcome.DONE)], [Outcome.DONE]
        readers = [asyncio.create_task(self._read(name, job)) for _ in range(2)]
        resuming = [asyncio.create_task(self._resume(name, job))] if self.resuming else []
        end = rng.choice(["finish", "finish", "cancel", "cancel early"])
        numbers = itertools.count(1)
        clients = [
            self._send_event(name, job, numbers) if waits else self._send(name, job, numbers, rng.randint(2, 6))
            for _ in range(2)
        ]
        if end == "cancel early":
            clients.append(self._end(name, "cancel", job.cancelled, rng.uniform(0, 3)))
        await asyncio.gather(*clients)
        if not waits and end != "cancel early":
            await self._end(name, end, job.cancelled if end == "cancel" else job.stopped)
        await asyncio.gather(*readers)
        for task in resuming:
            task.cancel()
        await asyncio.gather(*resuming, return_exceptions=True)

    async def _end(self, name: str, path: str, outcomes: list[Outcome], after: float = 0.0) -> None:
        await asyncio.sleep(after)
        while Outcome.DONE not in outcomes:
            outcomes.append(Outcome.UNKNOWN)
            outcomes[-1], _ = await self.post(f"/jobs/{name}/{path}")
            if outcomes[-1] is not Outcome.DONE:
                await asyncio.sleep(0.1)

    async def _send(self, name: str, job: JobHistory, numbers: Any, count: int) -> None:
        for _ in range(count):
            await asyncio.sleep(self.rng.uniform(0, 1))
            number = next(numbers)
            while True:
                at = len(job.sent)
                job.sent.append((number, Outcome.UNKNOWN))
                outcome, _ = await self.post(f"/jobs/{name}/inputs", params={"x": number, "pause": PAUSE})
                job.sent[at] = (number, outcome)
                if outcome is not Outcome.REFUSED:  # what was refused may be repeated, and must not come twice
                    break
                if job.cancelled:
                    return
                await asyncio.sleep(0.1)

    async def _send_event(self, name: str, job: JobHistory, numbers: Any) -> None:
        """Send an event until it is accepted, or another one was taken."""
        await asyncio.sleep(self.rng.uniform(0, 2))
        value = next(numbers)
        while True:
            event = SentEvent(value, self._clock())
            job.events.append(event)
            event.outcome, data = await self.post(f"/jobs/{name}/events/go", value=value)
            event.ended = self._clock()
            over = data.get("error") in ("ended", "parameters") and "interrupted" not in data.get("message", "")
            if event.outcome is Outcome.DONE or over:
                return
            await asyncio.sleep(0.1)

    async def _resume(self, name: str, job: JobHistory) -> None:
        """Resume a job now and then, which services do as well."""
        while True:
            await asyncio.sleep(self.rng.uniform(0.1, 1.5))
            outcome, _ = await self.post(f"/jobs/{name}/resume")
            job.resumed.append(outcome)

    async def _read(self, name: str, job: JobHistory) -> None:
        """Read the events of a job to its end, over as many connections as that takes."""
        read: list[Seen] = []
        job.reads.append(read)
        while True:
            headers = {"last-event-id": str(read[-1].offset)} if read else {}
            url = f"{self.any_address()}/jobs/{name}/stream"
            try:
                async with self._http.stream("GET", url, headers=headers) as answer:
                    if answer.status_code == 204:
                        return
                    if answer.is_success and await self._take(answer, read):
                        return
            except httpx2.HTTPError:
                pass
            await asyncio.sleep(0.05)

    async def _take(self, answer: httpx2.Response, read: list[Seen]) -> bool:
        """Take events from a connection; return whether the last one was the end."""
        name = ""
        async for line in answer.aiter_lines():
            key, _, value = line.partition(": ")
            if key == "event":
                name = value
            elif key == "data" and name == "end":
                return True
            elif key == "data" and name not in ("interrupted", "drain"):
                read.append(seen(json.loads(value)))
        return False

    async def _get(self, url: str) -> Any:
        """Return what a replica answers, which may still have connections that were held."""
        while True:
            with contextlib.suppress(httpx2.HTTPError):
                answer = await self._http.get(url)
                if answer.is_success:
                    return answer.json()
            await asyncio.sleep(0.05)

    async def settle(self) -> None:
        """Add the ends of all jobs at all replicas to their histories."""
        for name, job in self.jobs.items():
            for replica in self._replicas:
                info = {"status": "unknown"}
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(SETTLED):
                        while info["status"] not in ("finished", "failed", "aborted"):
                            info = await self._get(f"{replica.address}/jobs/{name}")
                job.ends.append(info["status"])
                log: list[Seen] = []
                while True:
                    query = f"?limit=1000&after={log[-1].offset if log else -1}"
                    page = (await self._get(f"{replica.address}/jobs/{name}/events{query}"))["events"]
                    if not page:
                        break
                    log += map(seen, page)
                job.logs.append(log)
        self.owners = dict(await self._execute("SELECT job_id, fence FROM jobs"))


def seen(event: dict[str, Any]) -> Seen:
    """Return an event as the checker compares it."""
    text = json.dumps(event, sort_keys=True)
    if event["event"] != "result":
        return Seen(event["offset"], text)
    number, index, drawn, taken = event["value"]
    return Seen(event["offset"], text, (number, index), drawn, taken)
