"""A federation on FLARE, simulated event by event; ``flare_scale`` says what, and prints what comes out."""

from __future__ import annotations

import heapq
import random
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

Then = Callable[[], None]
COSTS = Path(__file__).with_name("flare_costs.json")
"""What was measured."""
AT_ONCE = 16
"""How many jobs ran at the same time when it was."""
WINDOW, PACKET, MESSAGES = 4, 1024 * 1024, 4096
"""As in ``dfm_async.targets.flare.link``."""
WAIT = 0.1
"""How long a command waits at the hub."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is simulated.

    Attributes:
        sites: how many sites there are.
        jobs: how many jobs each application keeps running.
        applications: how many there are, each with a host job, a hub and a gateway.
        gateway: whether results come through the gateway.
        locations: at how many sites a job runs.
        tokens: how many go from each location to the next.
        results: how many a job yields.
        operation: how many seconds an operation takes on average.
        network: how many seconds a packet takes between a site and the server.
        server_cores: how many processors the relay and the hubs share.
        one_machine: whether all processes share those.
        rounds: how many jobs end for each that is running at the same time, before it is over.
    """

    sites: int
    jobs: int
    applications: int = 1
    gateway: bool = True
    locations: int = 3
    tokens: int = 100
    results: int = 10
    operation: float = 0.05
    network: float = 0.005
    server_cores: int = 16
    one_machine: bool = False
    rounds: int = 4


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came out."""

    throughput: float
    median: float
    late: float
    packets: float
    busiest: str
    busy: float


class Clock:
    """Runs events in their order."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Then]] = []
        self._count = 0

    def after(self, seconds: float, then: Then) -> None:
        """Has something done later."""
        self._count += 1
        heapq.heappush(self._events, (self.now + seconds, self._count, then))

    def run(self, until: Callable[[], bool]) -> None:
        """Runs until enough has happened."""
        while self._events and not until():
            self.now, _, then = heapq.heappop(self._events)
            then()


class Machine:
    """Some processors."""

    def __init__(self, cores: int) -> None:
        self.free = cores
        self.ready: deque[Process] = deque()


class Process:
    """Does one thing at a time, on a processor of its machine."""

    def __init__(self, clock: Clock, machine: Machine | None = None) -> None:
        self.worked = 0.0
        self._clock = clock
        self._machine = machine or Machine(1)
        self._queue: deque[tuple[float, Then]] = deque()
        self._active = False

    def do(self, seconds: float, then: Then) -> None:
        """Does something when everything before it is done."""
        self._queue.append((seconds, then))
        if not self._active:
            self._active = True
            self._machine.ready.append(self)
            self._next()

    def _next(self) -> None:
        machine = self._machine
        while machine.free and machine.ready:
            machine.free -= 1
            machine.ready.popleft()._begin()

    def _begin(self) -> None:
        seconds, then = self._queue.popleft()
        self.worked += seconds
        self._clock.after(seconds, lambda: self._end(then))

    def _end(self, then: Then) -> None:
        self._machine.free += 1
        if self._queue:
            self._machine.ready.append(self)
        else:
            self._active = False
        self._next()
        then()


class Federation:
    """The processes of a scenario, and the links between them."""

    def __init__(self, scenario: Scenario, costs: Mapping[str, float], seed: int) -> None:
        self.scenario, self.costs = scenario, costs
        self.clock = Clock()
        self.random = random.Random(seed)
        server = Machine(scenario.server_cores)
        shared = server if scenario.one_machine else None
        self.relay = Process(self.clock, server)
        self.sites = [Process(self.clock, shared) for _ in range(scenario.sites)]
        self.lock = Lock()
        self.packets = 0
        self.durations: list[float] = []
        known = costs["packet_send"] + costs["packet_relay"] + costs["packet_receive"]
        self.switch = max(costs["latency"] - known, 0.0) / 4
        """What a packet takes besides processor time and network, on each of its four ways."""
        self._links: dict[tuple[int, int], Link] = {}
        self.applications = [Application(self, server, shared) for _ in range(scenario.applications)]

    def link(self, start: Process, end: Process) -> Link:
        """The link from one process to another."""
        key = (id(start), id(end))
        if key not in self._links:
            self._links[key] = Link(self, start, end)
        return self._links[key]

    def run(self) -> Outcome:
        """Simulates; the first round only warms up."""
        scenario = self.scenario
        running = scenario.jobs * scenario.applications
        for application in self.applications:
            for _ in range(scenario.jobs):
                self.clock.after(self.random.uniform(0, scenario.operation), application.submit)
        self.clock.run(lambda: len(self.durations) >= running)
        began, before, packets = self.clock.now, self._worked(), self.packets
        wanted = running * scenario.rounds
        self.clock.run(lambda: len(self.durations) >= wanted)
        seconds = self.clock.now - began
        share = {name: (worked - before[name]) / seconds for name, worked in self._worked().items()}
        found = self.durations[running:]
        kinds = {name: name.partition(" ")[0] for name in share}
        busiest = max(share, key=lambda name: share[name])
        return Outcome(
            len(found) / seconds,
            statistics.median(found),
            sorted(found)[int(len(found) * 0.95)],
            (self.packets - packets) / len(found),
            kinds[busiest],
            share[busiest],
        )

    def _worked(self) -> dict[str, float]:
        found = {"relay": self.relay.worked, "commands": self.lock.held(self.clock.now)}
        found |= {f"site {i}": site.worked for i, site in enumerate(self.sites)}
        for i, application in enumerate(self.applications):
            found[f"hub {i}"] = application.hub.worked
            found[f"gateway {i}"] = application.gateway.worked
            found[f"application {i}"] = application.process.worked
        return found


class Link:
    """Messages from one process to another, in batches, through the relay."""

    def __init__(self, federation: Federation, start: Process, end: Process) -> None:
        self._federation, self._start, self._end = federation, start, end
        self._waiting: deque[tuple[int, float, Then]] = deque()
        self._under_way = 0
        self._scheduled = False

    def send(self, size: int, cost: float, then: Then) -> None:
        """Sends a message of so many bytes, which costs the other end so many seconds."""
        self._waiting.append((size, cost, then))
        if not self._scheduled:
            self._scheduled = True
            self._start.do(0.0, self._pump)  # what is said before the process comes to it goes along

    def _pump(self) -> None:
        self._scheduled = False
        while self._waiting and self._under_way < WINDOW:
            batch = [self._waiting.popleft()]
            size = batch[0][0]
            while self._waiting and len(batch) < MESSAGES and size + self._waiting[0][0] <= PACKET:
                batch.append(self._waiting.popleft())
                size += batch[-1][0]
            self._under_way += 1
            self._carry(batch, size)

    def _carry(self, batch: Sequence[tuple[int, float, Then]], size: int) -> None:
        federation, costs, clock = self._federation, self._federation.costs, self._federation.clock
        federation.packets += 1
        way = federation.scenario.network + federation.switch

        def cost(kind: str) -> float:
            return costs[f"packet_{kind}"] + size * costs[f"byte_{kind}"]

        def relayed() -> None:
            clock.after(way, lambda: self._end.do(cost("receive") + sum(message[1] for message in batch), arrived))

        def arrived() -> None:
            clock.after(2 * way, acknowledged)
            for _, _, then in batch:
                then()

        def acknowledged() -> None:
            self._under_way -= 1
            if self._waiting and not self._scheduled:
                self._scheduled = True
                self._start.do(0.0, self._pump)

        self._start.do(cost("send"), lambda: clock.after(way, lambda: federation.relay.do(cost("relay"), relayed)))


class Lock:
    """The server's lock around commands: whoever has it keeps it until the hub has answered."""

    def __init__(self) -> None:
        self._waiting: deque[Then] = deque()
        self._since: float | None = None
        self._total = 0.0

    def acquire(self, now: float, then: Then) -> None:
        """Has something done as soon as nobody else has it."""
        if self._since is None:
            self._since = now
            then()
        else:
            self._waiting.append(then)

    def release(self, now: float) -> None:
        """Gives it to the next one."""
        if self._since is not None:
            self._total += now - self._since
        self._since = None
        if self._waiting:
            self._since = now
            self._waiting.popleft()()

    def held(self, now: float) -> float:
        """For how many seconds somebody had it."""
        return self._total + (0.0 if self._since is None else now - self._since)


class Application:
    """One application with its gateway and its hub, and the jobs that it keeps running."""

    def __init__(self, federation: Federation, server: Machine, shared: Machine | None) -> None:
        self._federation = federation
        self._costs, self._clock = federation.costs, federation.clock
        self.process, self.gateway = Process(self._clock, shared), Process(self._clock, shared)
        self.hub = Process(self._clock, server)
        self._sending: list[tuple[float, Then]] = []
        self._answers: list[tuple[float, Then]] = []
        self._commanding = False
        self._answer: Then | None = None

    def submit(self) -> None:
        """Submits a job."""
        Job(self._federation, self).submit()

    def to_hub(self, size: int, cost: float, then: Then) -> None:
        """Sends a message to the hub."""
        if self._federation.scenario.gateway:
            link = self._federation.link(self.gateway, self.hub)
            self.gateway.do(self._costs["event_gateway"], lambda: link.send(size, cost, then))
        else:
            self._sending.append((cost, then))
            self._command()

    def from_hub(self, size: int, events: int, then: Then) -> None:
        """Sends a message to the application."""
        cost = self._costs["event_application"] * events + self._costs["job_application"] / 8
        if self._federation.scenario.gateway:
            passing = self._costs["event_gateway"] * events
            link = self._federation.link(self.hub, self.gateway)
            link.send(size, passing, lambda: self.process.do(cost, then))
            return
        self._answers.append((cost, then))
        if self._answer is not None:
            self._answer()

    # commands

    def _command(self) -> None:
        if self._commanding:
            return
        self._commanding = True
        way = self._federation.scenario.network
        self._clock.after(way, lambda: self._federation.lock.acquire(self._clock.now, self._locked))

    def _locked(self) -> None:
        self._federation.relay.do(self._costs["command_relay"], self._at_hub)

    def _at_hub(self) -> None:
        sending, self._sending = self._sending, []

        def heard() -> None:
            for _, then in sending:
                then()
            if self._answers:
                self._give()
            else:
                answered = False

                def answer() -> None:
                    nonlocal answered
                    if not answered:
                        answered = True
                        self._answer = None
                        self._give()

                self._answer = answer
                self._clock.after(WAIT, answer)

        self.hub.do(self._costs["command_hub"] + sum(cost for cost, _ in sending), heard)

    def _give(self) -> None:
        answers, self._answers = self._answers, []
        self._federation.lock.release(self._clock.now)

        def back() -> None:
            self._commanding = False
            for cost, then in answers:
                self.process.do(cost, then)
            self._command()  # something is expected as long as there are jobs, and there always are

        self._clock.after(self._federation.scenario.network, back)


class Job:
    """One job, from its submission to its last result."""

    def __init__(self, federation: Federation, application: Application) -> None:
        scenario = self._scenario = federation.scenario
        self._federation, self._application, self._costs = federation, application, federation.costs
        self._sites = federation.random.sample(federation.sites, min(scenario.locations, scenario.sites))
        self._unassigned = len(self._sites)
        self._began = federation.clock.now
        self._step = self._costs["job_hub"] / 4
        """The hub's work for a job comes in four parts, for each of its locations."""

    def submit(self) -> None:
        """Begins it."""
        cost = self._step * len(self._sites)
        self._application.process.do(
            self._costs["job_application"] / 2, lambda: self._application.to_hub(2000, cost, self._submitted)
        )

    def _submitted(self) -> None:
        """The application is told, and asks for the job's events; meanwhile the sites take their seats."""
        to, tell = self._application.to_hub, self._application.from_hub
        tell(70, 0, lambda: to(90, 0.0, lambda: tell(120, 0, _nothing)))
        self._seat()

    def _seat(self) -> None:
        for site in self._sites:
            back = self._federation.link(site, self._application.hub)
            self._federation.link(self._application.hub, site).send(
                1500,
                self._costs["job_site"] / 2,
                lambda back=back: back.send(150, self._step, self._assigned),  # type: ignore[misc]
            )

    def _assigned(self) -> None:
        self._unassigned -= 1
        if not self._unassigned:
            self._application.from_hub(100, 1, _nothing)  # it has begun
            for at, site in enumerate(self._sites):
                link = self._federation.link(self._application.hub, site)
                link.send(500, self._costs["job_site"] / 4, (lambda: self._operate(0)) if at == 0 else _nothing)

    def _operate(self, at: int) -> None:
        federation = self._federation
        seconds = federation.random.expovariate(1 / self._scenario.operation)
        federation.clock.after(seconds, lambda: self._operated(at))

    def _operated(self, at: int) -> None:
        site, hub, tokens = self._sites[at], self._application.hub, self._scenario.tokens
        done = self._federation.link(site, hub)
        if at + 1 < len(self._sites):
            site.do(self._costs["job_site"] / 4, lambda: done.send(30, self._step, _nothing))
            link = self._federation.link(site, self._sites[at + 1])
            cost = self._costs["token_receive"] * tokens
            site.do(
                self._costs["token_send"] * tokens,
                lambda: link.send(60 * tokens, cost, lambda: self._operate(at + 1)),
            )
            return
        results = self._scenario.results
        cost = self._costs["event_hub"] * results + 2 * self._step
        site.do(
            self._costs["job_site"] / 4 + self._costs["event_site"] * results,
            lambda: done.send(60 * results, cost, self._yielded),
        )

    def _yielded(self) -> None:
        results = self._scenario.results
        for site in self._sites:
            self._federation.link(self._application.hub, site).send(30, 0.0, _nothing)  # its seat is free
        self._application.from_hub(60 * results, results, self._ended)

    def _ended(self) -> None:
        federation = self._federation
        federation.durations.append(federation.clock.now - self._began)
        self._application.submit()


def _nothing() -> None:
    pass


def simulate(scenario: Scenario, costs: Mapping[str, float], seed: int = 1) -> Outcome:
    """Simulates one scenario; the same seed gives the same outcome."""
    return Federation(scenario, costs, seed).run()
