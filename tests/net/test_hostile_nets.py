"""Nets that no planner has written: what they may read, and what they can break."""

from __future__ import annotations

import asyncio
import functools
import sys
import types
from collections import deque, namedtuple
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dfm_async import ForEach, If, Pipeline, PlaceParam, Repeat, TryFromCache, Yield, collect, gather
from dfm_async.model.events import ErrorRecord
from dfm_async.model.ids import JobId, Location
from dfm_async.model.job_spec import JobSpec
from dfm_async.net import spec
from dfm_async.net.checking import check_net
from dfm_async.net.compiled_net import compile_formula
from dfm_async.net.tokens import CacheMiss
from dfm_async.planning.prepare import prepare
from dfm_async.runtime.callees import OperationTable
from dfm_async.runtime.shared_resources import SiteResources
from dfm_async.runtime.site_runtime import SiteRuntime, decode_net, encode_net
from dfm_async.wire import messages as msg
from dfm_async.wire.codec import Codec
from tests.net.table import a, at_a, at_b, b, fed
from tests.support.damage import spots

codec = Codec.for_untrusted()


def read(value: Any, *path: tuple[bool, Any]) -> Any:
    """Reads a field of a value, as a net would."""
    return compile_formula(spec.Field(spec.Slot(0), path), ())([value])


def attribute(name: str) -> tuple[bool, Any]:
    return (True, name)


def item(key: Any) -> tuple[bool, Any]:
    return (False, key)


Pair = namedtuple("Pair", ["left", "right"])


class Struct(msgspec.Struct):
    inner: Any


@dataclass
class River:
    name: str
    gauges: list[int] = field(default_factory=list)
    code: Any = None

    @property
    def longest(self) -> int:
        return max(self.gauges)

    def flow(self) -> int:
        return 1

    @functools.cached_property
    def total(self) -> int:
        return sum(self.gauges)


class Table:
    """As a data frame: has items, but is no container by its class."""

    def __getitem__(self, key: str) -> str:
        return key.upper()


@pytest.mark.parametrize(
    "name", ["__class__", "__init__", "__globals__", "__dict__", "_data", "_", "__reduce__", "", "a b", 3, None]
)
def test_names_that_are_not_fields_are_refused_when_a_net_is_compiled(name: Any) -> None:
    with pytest.raises(ValueError, match=r"not a field|not the name of a field"):
        read(None, attribute("fine"), attribute(name))


@pytest.mark.parametrize("key", [(1,), [1], {"a": 1}, b"x", slice(1)])
def test_only_what_json_has_chooses_an_item(key: Any) -> None:
    with pytest.raises(ValueError, match=r"is chosen by a string or a number"):
        read(None, item(key))


def _generator() -> Any:
    yield 1


OUTSIDE: list[tuple[Any, tuple[bool, Any]]] = [
    (types.SimpleNamespace(os=sys), attribute("os")),
    (sys, attribute("modules")),
    ({"sys": sys}, item("sys")),
    ([River], item(0)),
    (River, attribute("name")),
    (River("a"), attribute("flow")),
    (River("a", code=River.flow), attribute("code")),
    (River("a", code=print), attribute("code")),
    (River("a", code=functools.partial(print)), attribute("code")),
    (functools.partial(print), attribute("func")),
    ([], attribute("append")),
    ("text", attribute("format")),
    (_generator(), attribute("gi_frame")),
    (River.flow, attribute("f")),
    (list, item(0)),
    (River.flow.__code__, attribute("co_consts")),
    (CacheMiss("ticket"), attribute("ticket")),
    (types.SimpleNamespace(), item("a")),
]


@pytest.mark.parametrize(("value", "step"), OUTSIDE)
def test_no_step_leads_from_data_into_the_interpreter(value: Any, step: tuple[bool, Any]) -> None:
    with pytest.raises(TypeError, match=r"not data|no fields|not subscriptable"):
        read(value, step)


def test_fields_of_data_are_read() -> None:
    numpy = pytest.importorskip("numpy")
    pydantic = pytest.importorskip("pydantic")
    model = pydantic.create_model("Model", depth=(float, 1.5))()
    river = River("Elbe", [3, 5])
    assert read(river, attribute("name")) == "Elbe"
    assert read(river, attribute("gauges"), item(-1)) == 5
    assert read(river, attribute("longest")) == 5
    assert read(river, attribute("total")) == 8
    assert read(model, attribute("depth")) == 1.5
    assert read(Pair(1, {"a": (2, 3)}), attribute("right"), item("a"), item(1)) == 3
    assert read(Pair(1, 2), item(0)) == 1
    assert read(Struct({"x": [4]}), attribute("inner"), item("x"), item(0)) == 4
    assert read(numpy.arange(6).reshape(2, 3), item(1), item(2)) == 5
    assert read(numpy.arange(6), attribute("T"), item(2)) == 2
    assert read(numpy.zeros(2, dtype=[("a", "i4")]), item("a"), item(0)) == 0
    assert read(range(4), item(2)) == 2
    assert read("text", item(0)) == "t"
    assert read(deque([1, 2]), item(1)) == 2
    assert read(types.MappingProxyType({"a": 1}), item("a")) == 1
    assert read(Table(), item("a")) == "A"
    assert read(3 + 4j, attribute("imag")) == 4


def nets() -> list[spec.Net]:
    """Nets with everything that there is."""
    with Pipeline("all") as pipeline:
        x = PlaceParam("x", multiuse=True)
        with ForEach([1, 2, x]) as element:
            with If(element > 1) as branch:
                at_b(element.real)
            with branch.otherwise():
                at_a(element)
            gathered = at_a(at_b(element))
        Yield(collect(gathered))
        with Repeat(x, times=3) as current:
            current.next(at_a(at_b(current)))
        with TryFromCache(("k", x)) as found:
            found.store(at_a(current))
        Yield({"found": found, "pair": (x, ~(x == 1))}, place="more")
    with Pipeline("contained") as contained:
        with Repeat(at_a(PlaceParam("x")), times=2) as model:
            replies = gather([at_b(model, at_b(model)), at_b(1, fallback=2)])
            model.next(at_a(replies))
        Yield(model)
    return [*prepare(pipeline, fed, "a").nets, prepare(contained, fed, "a").nets[0]]


NETS = nets()
DATA = [msgspec.msgpack.decode(encode_net(net, codec)) for net in NETS]


def test_what_the_planner_writes_is_in_order() -> None:
    for net in NETS:
        check_net(net)
        assert decode_net(encode_net(net, codec), codec) == net


def forged(which: int, where: int, number: int) -> bytes:
    """A net with one number changed."""
    data = msgspec.msgpack.decode(msgspec.msgpack.encode(DATA[which % len(DATA)]))
    numbers = [(holder, key) for holder, key in spots(data) if type(holder[key]) is int or holder[key] is None]
    holder, key = numbers[where % len(numbers)]
    holder[key] = number
    return msgspec.msgpack.encode(data)


class Watched(SiteRuntime):
    """A runtime that keeps what it says."""

    def __init__(self) -> None:
        self.said: list[msg.Message] = []
        self.changed = asyncio.Event()
        adapters = [adapter for site in (a, b) for adapter in site.adapters.values()]
        table = OperationTable("a", adapters)
        send = lambda _address, message: self._say(message)  # noqa: E731
        super().__init__(SiteResources("a", table, codec, report=self._say, send=send, threads=1))

    def _say(self, message: msg.Message) -> None:
        self.said.append(message)
        self.changed.set()

    def of(self, kind: type[Any], job: int) -> list[Any]:
        return [message for message in self.said if type(message) is kind and message.job == job]  # type: ignore[union-attr]


def start(job: int, plan: str, at: int, params: int) -> msg.StartJob:
    payload = codec.dumps([[7] * params])
    return msg.StartJob(
        job=job,
        at=at,
        spec=JobSpec(job_id=JobId(f"job {job}")),
        plan=plan,
        routes=("home", "home"),
        first=0,
        count=1,
        payload=payload,
        last=True,
    )


CALL = spec.Call(operation="at_a", provider=None, args={"x": spec.Slot(0)}, output=1)
GOOD = spec.Net(
    location=0,
    locations=(Location("a"),),
    scopes=(spec.Scope(0, None, None),),
    places=(spec.Place(0, 0, "x"), spec.Place(1, 0, "called")),
    loops=(),
    transitions=(
        spec.Transition("call", 0, (spec.Input(0),), CALL),
        spec.Transition("out", 0, (spec.Input(1),), spec.Emit(0, spec.Slot(0))),
    ),
    params=(("x", 0),),
    points=(spec.YieldPoint("out", "n"),),
)


LOST = ErrorRecord(
    id="", site="b", operation="", node="", frame=(), attempt=1, type_name="WorkerLost", message="gone", traceback=""
)


async def finish(runtime: Watched, job: int) -> None:
    """Lets a job run to its end."""
    while not runtime.of(msg.ResultBatch, job):
        runtime.changed.clear()
        await runtime.changed.wait()


@given(st.integers(0, 2), st.integers(0, 500), st.integers(-3, 30) | st.sampled_from([2**31, 2**62, -(2**40)]))
def test_a_forged_net_breaks_its_own_job_at_most(which: int, where: int, number: int) -> None:
    data, which_net, which = forged(which, where, number), which, which % 2

    async def main() -> None:
        async with Watched() as runtime:
            runtime.receive(msg.SendNet("forged", which, data))
            runtime.receive(msg.SendNet("good", 0, msgspec.msgpack.encode(GOOD)))
            runtime.receive(start(1, "forged", which, len(NETS[which_net].params)))
            for place in NETS[which_net].places:
                runtime.receive(msg.Tokens(1, which, [(place.index, (0,), 0)], codec.dumps([1])))
                runtime.receive(msg.Tokens(1, which, [(place.index, (0, 1), 0)], codec.dumps([1])))
            runtime.receive(msg.LoopEnded(1, which, 0, (0,), 2, 0, None))
            runtime.receive(msg.ElementDone(1, which, 0, [(0, 0), (0, 1)]))
            runtime.receive(msg.LocationLost(1, which, 1, 1, LOST))
            runtime.receive(msg.LocationBack(1, which, 1, 1, "home", [0]))
            runtime.receive(msg.RestoreJob(1, which, [0], [], 1, 1))
            runtime.receive(start(2, "good", 0, 1))
            await finish(runtime, 2)
            assert not runtime.of(msg.JobBroken, 2)
            (results,) = runtime.of(msg.ResultBatch, 2)
            assert codec.loads_batch(results.payload) == [7]
            runtime.receive(msg.CancelJob(1, which))

    asyncio.run(main())


def replaced(net: spec.Net, **changes: Any) -> spec.Net:
    return msgspec.structs.replace(net, **changes)


def transition(action: spec.Action, inputs: tuple[spec.Input, ...] = (spec.Input(0),)) -> spec.Net:
    return replaced(GOOD, transitions=(spec.Transition("t", 0, inputs, action),))


def loop(*, control: int, members: tuple[int, ...], limit: int) -> spec.Loop:
    return spec.Loop(
        index=0, label="loop", scope=1, control=control, members=members, element=None, enter=None, limit=limit
    )


def nested(depth: int) -> spec.Formula:
    found: spec.Formula = spec.Slot(0)
    for _ in range(depth):
        found = spec.Not(found)
    return found


def called(**changes: Any) -> spec.ContainedCall:
    call = spec.ContainedCall(label="c", operation="at_b", scope=0, inputs=(spec.Input(0),), output=5)
    return msgspec.structs.replace(call, **changes)


def contained(**changes: Any) -> spec.Net:
    found = msgspec.structs.replace(spec.Contained(location=1, calls=(called(),)), **changes)
    return replaced(GOOD, locations=(Location("a"), Location("b")), contains=(found,))


WRONG: dict[str, spec.Net] = {
    "location": replaced(GOOD, location=1),
    "no scope": replaced(GOOD, scopes=()),
    "a scope that is its own parent": replaced(GOOD, scopes=(spec.Scope(0, 0, None),)),
    "two scopes with one number": replaced(GOOD, scopes=(spec.Scope(0, None, None),) * 2),
    "a scope without a loop": replaced(GOOD, scopes=(spec.Scope(0, None, None), spec.Scope(1, 0, 3))),
    "two places with one number": replaced(GOOD, places=(spec.Place(0, 0, "x"),) * 2),
    "a route to nowhere": replaced(GOOD, places=(spec.Place(0, 0, "x", (4,)), spec.Place(1, 0, "y"))),
    "a route to itself": replaced(GOOD, places=(spec.Place(0, 0, "x", (0,)), spec.Place(1, 0, "y"))),
    "a parameter without a place": replaced(GOOD, params=(("x", 9),)),
    "an input without a place": transition(spec.Emit(0, spec.Slot(0)), (spec.Input(5),)),
    "an input twice": transition(spec.Emit(0, spec.Slot(0)), (spec.Input(0), spec.Input(0))),
    "a slot that is not there": transition(spec.Emit(0, spec.Slot(1))),
    "a negative slot": transition(spec.Emit(0, spec.Slot(-1))),
    "a literal that is not there": transition(spec.Emit(0, spec.NetLiteral(0))),
    "a point that is not there": transition(spec.Emit(1, spec.Slot(0))),
    "a loop that is not there": transition(spec.Iterate(0, spec.Slot(0))),
    "a step outside a loop": transition(spec.Step(0, spec.Slot(0), None)),
    "a gather outside a loop": transition(spec.Gather(0, 0, spec.Slot(0))),
    "a private attribute": transition(spec.Emit(0, spec.Field(spec.Slot(0), ((True, "__class__"),)))),
    "a deep formula": transition(spec.Emit(0, nested(500))),
    "a loop of another location": replaced(
        transition(spec.Iterate(0, spec.Slot(0))),
        locations=(Location("a"), Location("b")),
        loops=(loop(control=1, members=(1,), limit=1),),
    ),
    "a loop without a limit": replaced(
        transition(spec.Iterate(0, spec.Slot(0))), loops=(loop(control=0, members=(), limit=0),)
    ),
    "a contained location that is not there": contained(location=7),
    "a contained location that is its own": contained(location=0),
    "a contained call in no scope": contained(calls=(called(scope=4),)),
    "a contained call with an unknown input": contained(calls=(called(inputs=(spec.Input(9),)),)),
    "a contained call with a fallback that is not there": contained(calls=(called(fallback=spec.NetLiteral(3)),)),
    "a contained call with a computed fallback": contained(calls=(called(fallback=spec.Slot(0)),)),
    "a contained location in an unknown loop": contained(loops=(3,)),
    "a store without a lookup": transition(spec.Store(spec.Slot(0), 1), ()),
}


@pytest.mark.parametrize("name", WRONG)
async def test_a_net_that_cannot_be_played_is_an_error_of_its_job(name: str) -> None:
    with pytest.raises(ValueError, match=r"invalid net|not a field"):
        check_net(WRONG[name])
    async with Watched() as runtime:
        runtime.receive(msg.SendNet("wrong", 0, msgspec.msgpack.encode(WRONG[name])))
        runtime.receive(start(1, "wrong", 0, 1))
        (broken,) = runtime.of(msg.JobBroken, 1)
        assert "invalid net" in broken.error.message or "not a field" in broken.error.message


async def test_a_net_that_is_not_known_is_an_error_of_its_job() -> None:
    async with Watched() as runtime:
        runtime.receive(start(1, "nobody has sent it", 0, 1))
        (broken,) = runtime.of(msg.JobBroken, 1)
        assert "not known here" in broken.error.message


async def test_a_net_does_not_read_the_environment_of_its_site(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SITE_PASSWORD", "hunter2")
    internals = map(attribute, ["__class__", "__init__", "__globals__"])
    path = (*internals, item("sys"), attribute("modules"), item("os"), attribute("environ"))
    literal = msgspec.msgpack.Ext(13, msgspec.msgpack.encode(["tests.net.test_hostile_nets:River", {"name": "x"}]))
    net = replaced(transition(spec.Emit(0, spec.Field(spec.NetLiteral(0), path))), literals=(literal,))
    async with Watched() as runtime:
        runtime.receive(msg.SendNet("hostile", 0, msgspec.msgpack.encode(net)))
        runtime.receive(start(1, "hostile", 0, 1))
        assert runtime.of(msg.JobBroken, 1)
    assert "hunter2" not in repr(runtime.said)
