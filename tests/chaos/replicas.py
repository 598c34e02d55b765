"""Services on one PostgreSQL database, clients that talk to any of them, and what goes wrong meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2

from tests.chaos.histories import JobHistory, Outcome, Seen
from tests.support.postgres import PostgresServer
from tests.support.processes import ROOT

LEASE = 2.0
REPLICAS = 3
PATIENCE = 5.0
"""After how many seconds a client asks another replica."""
PAUSE = 0.02


class Replica:
    """One service, which may be dead or stopped."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._process: asyncio.subprocess.Process | None = None
        self.address = ""

    async def start(self) -> None:
        command = [sys.executable, "-m", "tests.chaos.replica", self._url, str(LEASE)]
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
        self.rng = random.Random(f"replicas {seed}")
        self.jobs: dict[str, JobHistory] = {}
        self.faults: list[str] = []
        self._server = server
        self._database = server.new_database()
        self._replicas = [Replica(server.url(self._database)) for _ in range(REPLICAS)]
        self._http = httpx2.AsyncClient(timeout=PATIENCE)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        try:
            await asyncio.gather(*(replica.start() for replica in self._replicas))
            yield
        finally:
            await self._http.aclose()
            await asyncio.gather(*(replica.kill() for replica in self._replicas))

    def any_address(self) -> str:
        return self.rng.choice(self._replicas).address

    def unended(self) -> dict[str, JobHistory]:
        """Return the jobs whose end no client has reported."""
        done = Outcome.DONE
        return {name: job for name, job in self.jobs.items() if done not in (*job.stopped, *job.cancelled)} or self.jobs

    # what goes wrong

    async def disturb(self, faults: int) -> None:
        """Inject faults; in the end everything runs again."""
        for _ in range(faults):
            await asyncio.sleep(self.rng.uniform(0.1, 0.8))
            at = self.rng.randrange(REPLICAS)
            replica = self._replicas[at]
            match self.rng.choice(["kill", "pause", "cut"]):
                case "kill":
                    self.faults.append(f"kill {at}")
                    await replica.kill()
                    await asyncio.sleep(self.rng.choice([0.0, 0.5]))
                    await replica.start()
                case "pause":
                    seconds = self.rng.choice([0.2, LEASE * 0.9, LEASE * 1.5])
                    self.faults.append(f"pause {at} for {seconds:g} s")
                    replica.signal(signal.SIGSTOP)
                    await asyncio.sleep(seconds)
                    replica.signal(signal.SIGCONT)
                case "cut":
                    share = self.rng.choice([0.3, 1.0])
                    self.faults.append(f"cut {share:.0%}")
                    await asyncio.to_thread(
                        self._server.execute,
                        self._database,
                        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                        "WHERE datname = current_database() AND pid <> pg_backend_pid() AND random() < %s",
                        share,
                    )

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

    async def live(self, name: str) -> None:
        """Submit a job, send it parameter sets, read it, and end it; a client for each."""
        rng, job = self.rng, self.jobs.setdefault(name, JobHistory())
        job.submitted = Outcome.UNKNOWN
        while job.submitted is not Outcome.DONE:
            job.submitted, _ = await self.post("/pipelines/steps/jobs", job_id=name, open=True, params=None)
        readers = [asyncio.create_task(self._read(name, job)) for _ in range(2)]
        numbers = iter(range(1000))
        senders = [self._send(name, job, numbers, rng.randint(2, 6)) for _ in range(2)]
        await asyncio.gather(*senders)
        cancel = rng.random() < 0.3
        outcomes, path = (job.cancelled, "cancel") if cancel else (job.stopped, "finish")
        while Outcome.DONE not in outcomes:
            outcome, _ = await self.post(f"/jobs/{name}/{path}")
            outcomes.append(outcome)
            if outcome is not Outcome.DONE:
                await asyncio.sleep(0.1)
        await asyncio.gather(*readers)

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
                await asyncio.sleep(0.1)

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
        for _ in range(REPLICAS * 2):  # connections of killed replicas are still in the pool
            with contextlib.suppress(httpx2.RemoteProtocolError, httpx2.ReadError):
                return (await self._http.get(url)).json()
        raise AssertionError(f"{url} does not answer")

    async def settle(self) -> None:
        """Add the ends of all jobs at all replicas to their histories."""
        for replica in self._replicas:
            for name, job in self.jobs.items():
                info = await self._get(f"{replica.address}/jobs/{name}")
                job.ends.append(info.get("status", str(info)))
                log: list[Seen] = []
                while True:
                    query = f"?limit=1000&after={log[-1].offset if log else -1}"
                    page = (await self._get(f"{replica.address}/jobs/{name}/events{query}"))["events"]
                    if not page:
                        break
                    log += map(seen, page)
                job.logs.append(log)


def seen(event: dict[str, Any]) -> Seen:
    """Return an event as the checker compares it."""
    result = tuple(event["value"]) if event["event"] == "result" else None
    return Seen(event["offset"], json.dumps(event, sort_keys=True), result)
