"""Operations that are external programs, as users declare them."""

from __future__ import annotations

import inspect
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import cloudpickle
import pytest

from dfm_async import Operation, Pipeline, PlaceParam, RetryPolicy, Site, Yield
from dfm_async.errors import ShippingError
from dfm_async.federation import Cost
from dfm_async.federation.operation import CodeKind
from dfm_async.language.statements import CallStatement
from dfm_async.workers.shipping import load_site, ship_site


class Body:
    """Runs no program, and tells what it would pass to one."""

    def __init__(self, program: Program) -> None:
        self.program = program

    async def body(self, context: Any, **arguments: Any) -> Any:
        return [self.program.path, arguments]

    async def aclose(self) -> None:
        pass


@dataclass(frozen=True)
class Program:
    path: str

    @property
    def body_class(self) -> type[Body]:
        return Body


class Wrong:
    body_class = dict


class NotAsync:
    class body_class:
        def body(self) -> None: ...


P = Program("./train")


def declare(site: Site, **options: Any) -> Operation[..., Any]:
    @site.operation(program=P, **options)
    def train(weights: dict[str, float], rate: float = 0.1) -> dict[str, float]:
        """Trains."""
        raise AssertionError("the body of a declaration is never run")

    return train


def test_the_function_declares_and_the_class_of_the_program_is_the_code(site: Site) -> None:
    train = declare(site)
    adapter = site.adapters["train", None]
    assert adapter.code is Body
    assert adapter.per_job
    assert adapter.args == {"program": P}
    assert adapter.kind is CodeKind.ASYNC
    assert list(adapter.signature.parameters.parameters) == ["weights", "rate"]
    assert adapter.signature.types == {"weights": dict[str, float], "rate": float}
    assert adapter.signature.returns == dict[str, float]
    assert adapter.signature.wants_context, "as the body of the class does"
    assert train.signature.types == adapter.signature.types
    assert (train.__doc__, train.name) == ("Trains.", "train")
    assert list(inspect.signature(train).parameters) == ["weights", "rate"]


def test_in_a_pipeline_the_call_is_recorded_and_outside_it_is_refused(site: Site) -> None:
    train = declare(site)
    with Pipeline() as pipeline:
        Yield(train(PlaceParam("weights"), rate=0.5))
    statement = pipeline.body[0]
    assert isinstance(statement, CallStatement)
    assert list(statement.args) == ["weights", "rate"]
    with pytest.raises(TypeError, match="'train' is an external program: it runs only in a pipeline"):
        train({})
    with Pipeline(), pytest.raises(TypeError, match="weights"):
        train()


def test_other_options_work_as_for_others(site: Site) -> None:
    retry = RetryPolicy(attempts=2)
    train = declare(site, name="learn", provider="gpu", retry=retry, deadline=5.0, cost=Cost(fixed_time=2))
    adapter = site.adapter("learn", "gpu")
    assert adapter is not None
    assert (adapter.retry, adapter.deadline, adapter.cost) == (retry, 5.0, Cost(fixed_time=2))
    assert (adapter.operation, adapter.args) == ("learn", {"program": P})
    with pytest.raises(TypeError, match="'learn' is an external program"):
        train({})


def test_another_site_can_offer_the_same_program_or_another_one(site: Site) -> None:
    train = declare(site)
    there, elsewhere = site.federation.site("there"), site.federation.site("elsewhere")
    assert there.operation(train) is train
    assert there.adapters["train", None].args["program"] is P
    other = Program("./other")
    assert elsewhere.operation(train, program=other) is train
    assert elsewhere.adapters["train", None].args["program"] is other
    assert elsewhere.adapters["train", None].signature == site.adapters["train", None].signature


def test_a_program_can_implement_an_operation_and_code_can_implement_that_of_a_program(site: Site) -> None:
    there = site.federation.site("there")

    @site.operation
    def fit(x: int, y: int = 1) -> int:
        return x + y

    @there.implements(fit, program=P, provider="gpu")
    def fit_there(x: int, y: int = 5) -> int:
        raise AssertionError("the body of a declaration is never run")

    adapter = there.adapters["fit", "gpu"]
    assert (adapter.code, adapter.args) == (Body, {"program": P})
    assert adapter.signature.parameters.parameters["y"].default == 5
    assert fit(1) == 2

    train = declare(site)

    @there.implements(train)
    def train_there(weights: dict[str, float], rate: float = 0.1) -> dict[str, float]:
        return weights

    assert there.adapters["train", None].code is train_there
    with pytest.raises(TypeError, match="does not implement train"):
        there.implements(train, program=P)(lambda weights: weights)


# refusals


async def _coroutine(x: int) -> int:
    return x


def _generator(x: int) -> Iterator[int]:
    yield x


async def _flow(x: int) -> AsyncIterator[int]:
    yield x


@pytest.mark.parametrize(
    ("code", "what"),
    [
        (Body, "a class"),
        (Body(P), "an object of Body"),
        (_coroutine, "an async function"),
        (_generator, "a generator"),
        (_flow, "an async generator"),
    ],
    ids=["class", "object", "async", "generator", "async generator"],
)
def test_only_a_plain_function_declares_a_program(site: Site, code: Any, what: str) -> None:
    with pytest.raises(TypeError, match=f"is {what}: with program=, write a plain function"):
        site.operation(code, name="act", program=P)
    operation = site.operation(lambda x: x, name="act")
    with pytest.raises(TypeError, match=f"is {what}: with program="):
        site.federation.site("there").implements(operation, program=P)(code)
    assert list(site.adapters) == [("act", None)]


def test_options_that_make_no_sense_for_a_program_are_refused(site: Site) -> None:
    with pytest.raises(TypeError, match="in_process=True, because it has a process of its own"):
        declare(site, in_process=True)
    with pytest.raises(TypeError, match="args="):
        declare(site, args={})
    wrongs: list[Any] = [Wrong(), NotAsync(), "./train"]
    for wrong in wrongs:
        with pytest.raises(TypeError, match="body_class is a class with an async body"):
            site.operation(lambda x: x, name="act", program=wrong)
    with pytest.raises(TypeError, match=r"instead of \*more"):
        site.operation(lambda x, *more: x, name="act", program=P)
    with pytest.raises(TypeError, match="parameter named 'after'"):
        site.operation(lambda x, after: x, name="act", program=P)
    assert site.federation.operations == {}
    assert site.adapters == {}


# shipping


def test_a_program_is_sent_without_the_function_that_declares_it(site: Site) -> None:
    lock = threading.Lock()

    class Local:
        """A type that cannot travel."""

        held = lock

    @site.operation(program=P, provider="gpu", deadline=3.0)
    def train(weights: Local, rate: float = 0.1, *, steps: int = 10) -> Local:
        raise AssertionError(lock)

    _, (arrived,) = load_site(ship_site(site, "home").data)
    assert (arrived.operation, arrived.provider, arrived.deadline) == ("train", "gpu", 3.0)
    assert (arrived.code, arrived.args) == (Body, {"program": P})
    assert arrived.declared is not None
    parameters = arrived.signature.parameters.parameters.values()
    assert [(p.name, p.default) for p in parameters] == [
        ("weights", inspect.Parameter.empty),
        ("rate", 0.1),
        ("steps", 10),
    ]
    assert arrived.signature.wants_context
    assert (arrived.kind, arrived.per_job) == (CodeKind.ASYNC, True)


def test_what_is_passed_to_the_program_must_be_picklable(site: Site) -> None:
    @site.operation(program=P)
    def train(lock: Any = threading.Lock()) -> None: ...  # noqa: B008 - the fault

    with pytest.raises(ShippingError, match="train"):
        ship_site(site, "home")


def test_code_that_cannot_be_sent_is_reported_with_the_variable(site: Site) -> None:
    scope: dict[str, Any] = {"lock": threading.Lock(), "__name__": "__main__", "site": site}
    code = "def helper(): return [lock for _ in '1']\n\n@site.operation\ndef f(x): return x.site + helper()\n"
    exec(compile(code, "cell", "exec"), scope)
    with pytest.raises(ShippingError) as caught:
        ship_site(site, "home")
    names = "it refers to the global variable 'helper', which refers to the global variable 'lock'"
    assert caught.value.reason == f"{names}: cannot pickle '_thread.lock' object"


def test_an_operation_that_refers_to_a_program_can_be_shipped(site: Site) -> None:
    train = declare(site)

    def outer() -> Any:
        return train({})

    with pytest.raises(TypeError, match="it runs only in a pipeline"):
        cloudpickle.loads(cloudpickle.dumps(outer))()
