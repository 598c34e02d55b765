"""Wrong options are refused where they are written, with what is taken instead."""

from __future__ import annotations

import pickle
from typing import Any

import msgspec
import pytest

from dfm_async import Federation, FlareOptions, LocalOptions, RetryPolicy, Session
from dfm_async.federation import Cost
from dfm_async.model.options import ResultLimits


class Counter:
    pass


def work(x: int) -> int:
    return x


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"retry": 3}, ValueError, "operation 'work': retry= takes a RetryPolicy, not 3"),
        ({"deadline": "x"}, ValueError, "operation 'work': deadline= takes a positive number of seconds, not 'x'"),
        ({"deadline": 0}, ValueError, "operation 'work': deadline= takes a positive number of seconds, not 0"),
        ({"cost": 3}, TypeError, "operation 'work': cost= takes a Cost, not 3"),
        ({"args": 3}, TypeError, "operation 'work': args= takes a dict of constructor arguments, not 3"),
        ({"retries": 3}, TypeError, r"unexpected keyword argument 'retries' \(did you mean 'retry'\?\); it takes: arg"),
        ({"timeout": 3}, TypeError, r"unexpected keyword argument 'timeout' \(did you mean 'deadline'\?\)"),
        ({"limits": 3}, TypeError, r"unexpected keyword argument 'limits' \(did you mean 'limit'\?\)"),
    ],
)
def test_a_wrong_option_of_an_operation_is_refused(options: Any, error: type[Exception], message: str) -> None:
    lab = Federation("wrong").site("lab")
    other = lab.operation(work, name="other")
    with pytest.raises(error, match=message):
        lab.operation(work, **options)
    with pytest.raises(error, match=message.replace("'work'", "'other'")):
        lab.implements(other, **options)(work)
    assert [name for name, _ in lab.adapters] == ["other"]


def test_code_that_cannot_be_called_is_refused() -> None:
    lab = Federation("wrong").site("lab")
    with pytest.raises(TypeError, match="class 'Counter' cannot be an operation, because it has no method 'body'"):
        lab.operation(Counter)
    for code in (3, Counter()):
        with pytest.raises(TypeError, match="function, or of a class or object with a 'body', not of"):
            lab.operation(code, name="x")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="class 'Counter' cannot be an operation"):
        lab.adapt(lab.operation(work), Counter)


@pytest.mark.parametrize(
    ("kind", "names"),
    [(RetryPolicy, "attempts, backoff"), (LocalOptions, "start_method, uvloop"), (Cost, "fixed_time")],
)
def test_options_list_their_names_for_an_unknown_or_unnamed_one(kind: Any, names: str) -> None:
    with pytest.raises(
        TypeError, match=rf"{kind.__name__}\(\) got an unexpected keyword argument 'zzz'; it takes: {names}"
    ):
        kind(zzz=3)
    with pytest.raises(
        TypeError, match=rf"{kind.__name__}\(\) takes its options by name, such as .*; it takes: {names}"
    ):
        kind(3)


def test_an_unknown_option_names_the_one_that_may_be_meant() -> None:
    with pytest.raises(
        TypeError, match=r"LocalOptions\(\) got an unexpected .* 'max_worker' \(did you mean 'max_workers'"
    ):
        LocalOptions(max_worker=3)  # type: ignore[call-arg]
    with pytest.raises(
        TypeError, match=r"FlareOptions\(\) got an unexpected .* 'startup' \(did you mean 'startup_kit'"
    ):
        FlareOptions(startup="x", user="y")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda wrong: RetryPolicy(attempts=wrong), "attempts must be a whole number, from 1 to 1,000,000,000"),
        (lambda wrong: RetryPolicy(on_worker_lost=wrong), "on_worker_lost must be a whole number, from 0"),
        (lambda wrong: RetryPolicy(backoff=wrong), "backoff must be a number that is not negative"),
        (lambda wrong: RetryPolicy(jitter=wrong), "jitter must be a number from 0 to 1"),
        (lambda wrong: Cost(throughput=wrong), "throughput must be a positive number"),
        (lambda wrong: LocalOptions(cancel_grace=wrong), "cancel_grace must be a number that is not negative"),
        (lambda wrong: LocalOptions(unresponsive_after=wrong), "unresponsive_after must be a positive number"),
    ],
)
def test_a_wrong_number_is_refused_with_its_name_and_value(make: Any, message: str) -> None:
    for wrong in ("x", -1, True, float("nan")):
        with pytest.raises(ValueError, match=f"{message}.*, not {wrong!r}"):
            make(wrong)


def test_exceptions_of_a_policy_that_are_not_types_are_refused() -> None:
    for wrong in (OSError, (OSError("x"),), (3,)):
        with pytest.raises(TypeError, match="on must be a tuple of exception types or names, not "):
            RetryPolicy(on=wrong)  # type: ignore[arg-type]


def test_options_are_copied_encoded_and_pickled_as_before() -> None:
    policy = RetryPolicy(attempts=2, on=(OSError,))
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert msgspec.structs.replace(policy, attempts=5).attempts == 5
    assert msgspec.json.decode(msgspec.json.encode(ResultLimits(window=3)), type=ResultLimits).window == 3


async def test_a_wrong_option_of_execute_is_refused_with_its_value() -> None:
    fed = Federation("wrong")
    fed.site("lab").operation(work)
    report = fed.pipeline(name="report")(lambda x: fed.operations.work(x))
    async with Session(fed, target="inline") as session:
        for options, message in (
            ({"concurrency": "2"}, "concurrency must be a whole number, 1 or more, not '2'"),
            ({"deadline": "x"}, "deadline must be a positive number, not 'x'"),
            ({"checkpoint": True}, "checkpoint must be 'marked' or 'calls', not True"),
        ):
            with pytest.raises(ValueError, match=message):
                await session.execute(report, {"x": 1}, **options)
        assert session.jobs() == []
