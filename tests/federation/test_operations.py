"""Operations and adapters as users write them."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
import pickle
import pydoc
import types
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import cloudpickle
import pytest

from dfm_async import Federation, Operation, OperationContext, Pipeline, PlaceParam, Program, RetryPolicy, Site, Yield
from dfm_async.federation import Const, Cost, ExposedParameter
from dfm_async.federation.operation import CodeKind, OperationOptions
from dfm_async.language.statements import CallStatement
from dfm_async.model.call_limits import CallLimits
from dfm_async.testing import Fake

shipped = Federation("shipped")
dock = shipped.site("dock")


def bare(x: int, y: int = 2) -> int:
    return x * y


by_call = dock.operation(bare)


@dock.operation
def decorated(x: int, y: int = 2) -> int:
    """Multiplies."""
    return x * y


class Multiplier:
    def __init__(self, factor: int = 1) -> None:
        self.factor = factor

    def body(self, x: int, y: int = 2) -> int:
        return x * y * self.factor


by_class = dock.operation(Multiplier, name="by_class", args={"factor": 3})
by_object = dock.operation(Multiplier(5), name="by_object")


@pytest.fixture
def act(site: Site) -> Operation[..., Any]:
    @site.operation
    def act(x: int, y: int = 1) -> int:
        return x

    return act


# outside a pipeline


def test_outside_a_pipeline_an_operation_is_a_plain_function() -> None:
    assert decorated(2, y=5) == 10
    assert by_call(4) == 8
    assert by_class(2) == 12
    assert by_object(2, 1) == 10
    name: Any = decorated.__dict__["__name__"]
    assert (name, decorated.__doc__, decorated.__module__) == ("decorated", "Multiplies.", __name__)
    with pytest.raises(TypeError):
        decorated()  # type: ignore[call-overload]


async def test_outside_a_pipeline_async_operations_and_generators_are_what_they_were(site: Site) -> None:
    @site.operation
    async def later(x: int) -> int:
        await asyncio.sleep(0)
        return x + 1

    @site.operation
    def some(n: int) -> Iterator[int]:
        yield from range(n)

    @site.operation
    async def flow(n: int) -> AsyncIterator[int]:
        for i in range(n):
            yield i

    assert await later.code(1) == 2
    assert list(some(3)) == [0, 1, 2]
    assert [i async for i in flow(3)] == [0, 1, 2]


def test_inside_a_pipeline_the_code_does_not_run(site: Site) -> None:
    ran = []

    @site.operation
    def act(x: int) -> int:
        ran.append(x)
        return x

    with Pipeline() as p:
        Yield(act(PlaceParam("x")))
    assert not ran
    assert isinstance(p.body[0], CallStatement)
    assert act(1) == 1
    assert ran == [1]


def test_defaults_of_an_operation_stay_its_own(site: Site) -> None:
    @site.operation
    def act(x: int, *more: int, y: int = 3, **rest: int) -> int:
        return x

    with Pipeline() as p:
        act(1)
        act(1, 2, 3, y=4, z=5)
    short, full = p.body
    assert isinstance(short, CallStatement)
    assert isinstance(full, CallStatement)
    assert list(short.args) == ["x"]
    assert {name: arg.value for name, arg in full.args.items()} == {"x": 1, "more": (2, 3), "y": 4, "z": 5}  # type: ignore[union-attr]


# forms of the decorator


def test_all_forms_of_the_decorator_offer_the_operation(site: Site) -> None:
    @site.operation
    def plain(x: int) -> int:
        return x

    @site.operation()
    def called(x: int) -> int:
        return x

    @site.operation(name="other", provider="gpu", cost=Cost(fixed_time=2), deadline=5.0, retry=RetryPolicy(attempts=2))
    def with_options(x: int) -> int:
        return x

    direct = site.operation(lambda x: x, name="direct", in_process=True)
    for operation in (plain, called, with_options, direct):
        assert isinstance(operation, Operation)
        assert site.federation.operations[operation.name] is operation
    assert [plain.name, called.name, with_options.name] == ["plain", "called", "other"]
    adapter = site.adapter("other", "gpu")
    assert adapter is not None
    assert (adapter.deadline, adapter.retry) == (5.0, RetryPolicy(attempts=2))
    assert adapter.cost == Cost(fixed_time=2)
    assert site.adapters["direct", None].in_process


def test_the_kind_of_code_is_recognised(site: Site) -> None:
    async def coroutine() -> None: ...
    def generator() -> Iterator[int]:
        yield 1

    async def async_generator() -> AsyncIterator[int]:
        yield 1

    @functools.wraps(generator)
    def wrapped() -> Any:
        return generator()

    class Body:
        async def body(self) -> int:
            return 1

    class Callable_:
        async def __call__(self) -> int:
            return 1

    expected: dict[str, tuple[Any, CodeKind]] = {
        "coroutine": (coroutine, CodeKind.ASYNC),
        "generator": (generator, CodeKind.GENERATOR),
        "async_generator": (async_generator, CodeKind.ASYNC_GENERATOR),
        "wrapped": (wrapped, CodeKind.GENERATOR),
        "plain": (lambda: 1, CodeKind.SYNC),
        "partial": (functools.partial(coroutine), CodeKind.ASYNC),
        "class": (Body, CodeKind.ASYNC),
        "object": (Body(), CodeKind.ASYNC),
        "callable": (Callable_(), CodeKind.ASYNC),
    }
    for name, (code, kind) in expected.items():
        site.operation(code, name=name)
        assert site.adapters[name, None].kind is kind, name


def test_a_class_is_an_adapter_that_is_built_per_job_and_an_object_is_used_as_it_is(site: Site) -> None:
    operation = site.operation(Multiplier, args={"factor": 7})
    assert operation.name == "Multiplier"
    assert list(operation.signature.parameters.parameters) == ["x", "y"]
    adapter = site.adapters["Multiplier", None]
    assert adapter.per_job
    assert adapter.args == {"factor": 7}
    assert operation(1, 1) == 7
    one = Multiplier(2)
    site.operation(one, name="object")
    assert not site.adapters["object", None].per_job
    assert site.adapters["object", None].code is one


def test_code_without_a_name_needs_one(site: Site) -> None:
    with pytest.raises(TypeError, match="name="):
        site.operation(Multiplier(1))
    with pytest.raises(TypeError, match="name="):
        site.operation(functools.partial(bare, 1))


def test_a_parameter_named_context_belongs_to_the_engine(site: Site) -> None:
    @site.operation
    def act(x: int, context: OperationContext) -> int:
        return x

    assert act.signature.wants_context
    assert list(act.signature.parameters.parameters) == ["x"]
    with Pipeline():
        act(1)


def test_another_site_takes_over_every_option_of_an_operation(site: Site) -> None:
    given: dict[str, Any] = {
        "retry": RetryPolicy(attempts=3, backoff=0.001),
        "deadline": 5.0,
        "cost": Cost(fixed_time=2.0),
        "in_process": True,
        "spread": True,
        "checkpoint": True,
        "args": {"factor": 7},
    }
    names = {found.name for found in dataclasses.fields(OperationOptions)}
    assert names == {*given, "program", "limits"}, "give the new option a value here; programs have tests of their own"
    operation = site.operation(Multiplier, limit=4, rate="10/s", **given)
    there = site.federation.site("there")
    assert there.operation(operation) is operation
    assert there.adapters["Multiplier", None] == site.adapters["Multiplier", None]
    assert there.adapters["Multiplier", None].per_job, "the class is built once per job there, too"
    elsewhere = site.federation.site("elsewhere")
    elsewhere.operation(operation, retry=None, in_process=False, args={"factor": 8}, provider="p", limit=2)
    changed = elsewhere.adapters["Multiplier", "p"]
    assert changed.limits == CallLimits(limit=2, rate="10/s")
    assert (changed.retry, changed.in_process, changed.args) == (None, False, {"factor": 8})
    assert (changed.deadline, changed.cost) == (given["deadline"], given["cost"])


def test_annotations_that_cannot_be_evaluated_declare_nothing(site: Site) -> None:
    def act(x: OnlyForCheckers, y: int = 2) -> OnlyForCheckers:  # type: ignore[name-defined]  # noqa: F821
        return x

    class Act:
        def body(self, x: OnlyForCheckers) -> OnlyForCheckers:  # type: ignore[name-defined]  # noqa: F821
            return x

    function, built = site.operation(act), site.operation(Act)
    program = site.operation(act, name="train", program=Program(argv=["true"]))
    assert list(function.signature.parameters.parameters) == ["x", "y"]
    assert list(built.signature.parameters.parameters) == ["x"]
    assert list(program.signature.parameters.parameters) == ["x", "y"]
    assert function.signature.types == built.signature.types == {}
    assert function(1) == built(1) == 1
    Fake.of(act).check(function)


# implements


def test_another_site_can_implement_an_operation_with_other_code(site: Site, act: Operation[..., Any]) -> None:
    other = site.federation.site("there")

    @other.implements(act, provider="gpu", cost=Cost(fixed_time=1))
    async def act_there(x: int, y: int = 1, context: Any = None) -> int:
        return x + 100

    adapter = other.adapter("act", "gpu")
    assert adapter is not None
    assert adapter.code is act_there
    assert adapter.kind is CodeKind.ASYNC
    assert inspect.iscoroutinefunction(act_there), "the code stays what it was"
    assert site.federation.operations["act"] is act
    assert act(1) == 1
    assert other.adapter("act", None) is adapter, "the only provider serves those who ask for none"
    assert other.adapter("act", "cpu") is None


def test_code_with_other_parameters_does_not_implement_an_operation(site: Site, act: Operation[..., Any]) -> None:
    other = site.federation.site("there")
    for wrong in (lambda y: y, lambda x, y, z: x, lambda: 1, Create):
        with pytest.raises(TypeError, match="does not implement act"):
            other.implements(act)(wrong)
    with pytest.raises(TypeError, match="takes an operation"):
        other.implements(bare)  # type: ignore[arg-type]
    assert other.adapters == {}


def test_of_several_providers_none_is_taken_by_chance(site: Site) -> None:
    operation = site.operation(bare, provider="one")
    site.operation(operation, provider="two")
    assert site.adapter("bare", None) is None
    assert site.adapter("bare", "two") is not None


# refusals


@pytest.mark.parametrize("name", ["site", "provider", "after", "retry", "deadline"])
def test_parameters_with_a_meaning_of_their_own_are_refused(name: str, site: Site) -> None:
    code = eval(f"lambda x, {name}: x")
    with pytest.raises(TypeError, match=f"parameter named '{name}'"):
        site.operation(code, name="act")
    assert site.federation.operations == {}
    assert site.adapters == {}


def test_one_name_is_one_operation(site: Site, act: Operation[..., Any]) -> None:
    other = site.federation.site("there")
    with pytest.raises(ValueError, match=r"operation 'act' already.*@there\.implements"):
        other.operation(lambda x: x, name="act")
    with pytest.raises(ValueError, match="already"):
        site.operation(name="act")(bare)
    assert site.federation.operations["act"] is act
    assert site.adapters["act", None].code is act.code
    assert other.adapters == {}


def test_the_same_source_may_define_an_operation_again(site: Site) -> None:
    """A cell of a notebook that is run a second time."""

    def cell(version: int) -> Operation[..., Any]:
        @site.operation
        def act(x: int) -> int:
            return x + version

        return act

    cell(1)
    second = cell(2)
    assert site.federation.operations["act"] is second
    assert site.adapters["act", None].code(0) == 2


def _generator(n: int) -> Iterator[int]:
    yield from range(n)


async def _flow(n: int) -> AsyncIterator[int]:
    yield n


@pytest.mark.parametrize(
    ("code", "options", "reason"),
    [
        (_generator, {"retry": RetryPolicy()}, "is a generator"),
        (_generator, {"deadline": 1.0}, "is a generator"),
        (_flow, {"retry": RetryPolicy()}, "is a generator"),
        (_flow, {"deadline": 1.0}, "is a generator"),
        (bare, {"deadline": 0}, "positive"),
        (bare, {"deadline": -1.0}, "positive"),
    ],
)
def test_options_that_do_not_fit_the_code_are_refused(
    code: Callable[..., Any], options: dict[str, Any], reason: str, site: Site
) -> None:
    with pytest.raises((TypeError, ValueError), match=reason):
        site.operation(code, **options)
    assert site.federation.operations == {}


def test_names_of_sites_are_identifiers_and_unique() -> None:
    fed = Federation("sites")
    fed.site("a")
    with pytest.raises(ValueError, match="already"):
        fed.site("a")
    for wrong in ("", "a b", "1a", "a#b", "a.b"):
        with pytest.raises(ValueError, match="identifier"):
            fed.site(wrong)
    none: list[dict[str, Any]] = [{"workers": 0}, {"threads": 0}]
    for options in none:
        with pytest.raises(ValueError, match="at least 1"):
            fed.site("b", **options)
    assert list(fed.sites) == ["a"]


def test_federations_and_sites_describe_themselves(site: Site) -> None:
    site.operation(bare)
    assert repr(site) == "<Site 'here' of 'fresh': bare>"
    assert "here(1)" in repr(site.federation)
    assert repr(by_call) == "<Operation bare(x: 'int', y: 'int' = 2) -> 'int'>"


# shipping


@pytest.mark.parametrize("operation", [by_call, decorated, by_class, by_object], ids=lambda o: o.name)
def test_an_operation_can_be_shipped_and_runs_there(operation: Operation[..., Any]) -> None:
    arrived = cloudpickle.loads(cloudpickle.dumps(operation))
    assert isinstance(arrived, Operation)
    assert arrived.name == operation.name
    assert arrived(3, y=4) == operation(3, y=4)
    assert list(arrived.signature.parameters.parameters) == list(operation.signature.parameters.parameters)
    assert arrived.signature.types == operation.signature.types


def test_an_operation_of_an_importable_function_survives_plain_pickle() -> None:
    arrived = pickle.loads(pickle.dumps(by_call))
    assert arrived.code is bare
    assert arrived(3) == 6


def test_an_operation_that_another_one_uses_is_sent_with_it() -> None:
    def outer(x: int) -> int:
        return decorated(x) + 1

    assert cloudpickle.loads(cloudpickle.dumps(outer))(5) == 11


def test_an_operation_can_live_in_a_class() -> None:
    class Tools:
        multiply = decorated

    assert Tools().multiply(2, 4) == 8
    assert Tools.multiply is decorated


# declared operations


class Create:
    def body(self, size: int, fill: float, unit: str) -> list[float]:
        return [fill] * size


def declared_federation() -> Federation:
    federation = Federation("declared")

    def create(size: int, fill: float = 0.0, **more: int) -> list[float]:
        """Makes an array."""
        raise NotImplementedError

    federation.declare("array.Create", create)
    exposed = ExposedParameter(param="unit", type="string", description="the unit")
    federation.site("alpha").adapt("array.Create", Create, bind={"unit": Const("m", expose_as=exposed)})
    federation.site("beta").adapt("array.Create", Create)
    return federation


def documented(operation: object) -> str:
    """What ``help`` prints, in one line: line breaks and quotes in signatures depend on the version of Python."""
    return " ".join(pydoc.plain(pydoc.render_doc(operation)).split()).replace("( ", "(").replace("'", "")


def test_a_declared_operation_shows_what_a_call_may_pass() -> None:
    federation = declared_federation()
    operation = federation.operations.array.Create
    assert operation is federation.operations["array.Create"]
    assert list(inspect.signature(operation).parameters) == ["size", "fill", "unit", "more"]
    assert inspect.signature(operation).parameters["unit"].annotation == str | None
    assert (operation.__name__, operation.__doc__) == ("Create", "Makes an array.")
    assert dir(federation.operations.array)[0] == "Create"
    with pytest.raises(AttributeError, match=r"no operation 'array\.Delete' \(there is: Create\)"):
        _ = federation.operations.array.Delete
    assert "Create(size: int, fill: float = 0.0" in documented(operation)


def test_a_site_shows_its_operations_with_what_it_adds() -> None:
    federation = declared_federation()
    alpha = federation.sites["alpha"].operations.array.Create
    beta = federation.sites["beta"].operations.array.Create
    assert list(inspect.signature(alpha).parameters) == ["size", "fill", "unit", "more"]
    assert list(inspect.signature(beta).parameters) == ["size", "fill", "more"]
    assert alpha.__doc__ == "Makes an array.\n\nOnly at alpha:\n    unit: the unit"
    text = documented(alpha)
    assert "Create(size: int" in text
    assert "unit: the unit" in text
    with Pipeline() as pipeline:
        alpha(3, unit="cm")
    (call,) = pipeline.body
    assert isinstance(call, CallStatement)
    assert (call.operation, call.site, list(call.args)) == ("array.Create", "alpha", ["size", "unit"])
    with pytest.raises(TypeError, match="fixed to its site"):
        alpha(3, site="beta")


def test_an_unknown_argument_is_reported_with_a_similar_one() -> None:
    with Pipeline("wrong"):
        with pytest.raises(TypeError) as caught:
            decorated(xx=1)  # type: ignore[call-overload]
        assert str(caught.value) == (
            "decorated() got an unexpected keyword argument 'xx' (did you mean 'x'?); it takes: x, y"
        )
        with pytest.raises(TypeError, match=r"'dfm_after' \(did you mean 'after'\?\)"):
            decorated(1, dfm_after=None)  # type: ignore[call-overload]
        with pytest.raises(TypeError, match=r"'timeout' \(did you mean 'deadline'\?\)"):
            decorated(1, timeout=3)  # type: ignore[call-overload]
        with pytest.raises(TypeError, match="missing a required argument: 'x'"):
            decorated()  # type: ignore[call-overload]


def test_a_class_that_inherits_from_an_operation_is_told_what_to_do(site: Site) -> None:
    @site.operation
    class Base:
        def body(self, x: int) -> int:
            return x

    @site.operation
    def function(x: int) -> int:
        return x

    prepared = site.operation(functools.partial(bare, y=3), name="prepared")
    advice: list[tuple[Any, str]] = [
        (Base, r"'Base', because it is not a class: define class '.*Base' without the decorator, inherit from it, and"),
        (function, r"'function', because it is not a class: it is made of the function '.*function', which a method"),
        (prepared, r"'prepared', because it is not a class: inherit from a class that is not an operation"),
    ]
    for operation, expected in advice:
        with pytest.raises(TypeError, match=rf"a class cannot inherit from operation {expected}"):
            types.new_class("Derived", (operation,))
        with pytest.raises(TypeError, match=rf"a class cannot inherit from operation {expected}"):

            class Derived(operation):  # type: ignore[misc, valid-type]
                pass

    @site.operation(name="derived")
    class Again(Base.source):  # type: ignore[misc, name-defined]
        pass

    assert Again(4) == 4
