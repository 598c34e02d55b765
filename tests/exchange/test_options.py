"""Options of both sides: what they are by default, and that wrong ones are refused by name when they are made."""

from __future__ import annotations

from typing import Any

import pytest

from dfm_async.exchange.options import AgentOptions, ExecutorOptions
from dfm_async.exchange.task import Model, Task

NOT_TIMES: list[Any] = [-1, -0.5, float("nan"), float("inf"), "5", True, None, [1]]


def refused(kind: type, name: str, value: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=name):
        kind(**{name: value})


def test_defaults_of_the_agent_are_those_that_are_documented() -> None:
    options = AgentOptions()
    assert (options.heartbeat_interval, options.heartbeat_timeout) == (5, 60)
    assert (options.resend_interval, options.max_resends) == (2, 3)
    assert options.submit_result_timeout == 60
    assert options.streaming_idle_timeout == 600
    assert options.download_complete_timeout == 1800
    assert options.launch_once is None


def test_defaults_of_the_executor_are_those_that_are_documented() -> None:
    options = ExecutorOptions()
    assert (options.heartbeat_interval, options.heartbeat_timeout) == (5, 60)
    assert (options.resend_interval, options.max_resends) == (2, 3)
    assert options.launch_timeout is None
    assert options.external_pre_init_timeout == 60
    assert options.peer_read_timeout == 60
    assert options.task_wait_timeout is None
    assert options.last_result_transfer_timeout == 300
    assert options.streaming_idle_timeout == 600
    assert not options.train_with_evaluation
    assert options.task_names == ("train", "validate", "submit_model")


@pytest.mark.parametrize("kind", [AgentOptions, ExecutorOptions])
def test_options_cannot_be_changed_or_misspelt(kind: type) -> None:
    with pytest.raises(AttributeError):
        kind().heartbeat_interval = 1
    with pytest.raises(TypeError, match="heartbeat_intervall"):
        kind(heartbeat_intervall=1)


@pytest.mark.parametrize(
    ("kind", "name", "none_allowed", "zero_allowed"),
    [
        (AgentOptions, "heartbeat_interval", False, False),
        (AgentOptions, "heartbeat_timeout", False, True),
        (AgentOptions, "resend_interval", False, False),
        (AgentOptions, "submit_result_timeout", False, False),
        (AgentOptions, "streaming_idle_timeout", False, False),
        (AgentOptions, "download_complete_timeout", False, False),
        (AgentOptions, "connect_timeout", False, False),
        (ExecutorOptions, "heartbeat_interval", False, False),
        (ExecutorOptions, "heartbeat_timeout", False, True),
        (ExecutorOptions, "resend_interval", False, False),
        (ExecutorOptions, "streaming_idle_timeout", False, False),
        (ExecutorOptions, "launch_timeout", True, False),
        (ExecutorOptions, "external_pre_init_timeout", False, True),
        (ExecutorOptions, "peer_read_timeout", True, False),
        (ExecutorOptions, "task_wait_timeout", True, False),
        (ExecutorOptions, "last_result_transfer_timeout", False, True),
        (ExecutorOptions, "deferred_stop_timeout", False, True),
    ],
)
def test_a_time_that_is_none_is_refused_by_name(kind: type, name: str, none_allowed: bool, zero_allowed: bool) -> None:
    for value in NOT_TIMES:
        if value is None and none_allowed:
            kind(**{name: value})
        else:
            refused(kind, name, value)
    if zero_allowed:
        assert getattr(kind(**{name: 0}), name) == 0
    else:
        refused(kind, name, 0)


@pytest.mark.parametrize("kind", [AgentOptions, ExecutorOptions])
def test_the_heartbeat_timeout_must_be_larger_than_the_interval(kind: type) -> None:
    for timeout in (5, 4):
        with pytest.raises(ValueError, match=r"heartbeat_timeout .* must be larger than heartbeat_interval"):
            kind(heartbeat_interval=5, heartbeat_timeout=timeout)
    kind(heartbeat_interval=5, heartbeat_timeout=5.1)
    kind(heartbeat_interval=500, heartbeat_timeout=0)


@pytest.mark.parametrize("kind", [AgentOptions, ExecutorOptions])
def test_the_number_of_resends_is_checked(kind: type) -> None:
    for value in (-1, 1.5, "3", True):
        refused(kind, "max_resends", value)
    for allowed in (0, 1, None):
        assert kind(max_resends=allowed).max_resends == allowed


@pytest.mark.parametrize("value", [0, -1, 1.5, "3", None, True])
def test_the_size_of_the_metric_queue_is_checked(value: Any) -> None:
    refused(AgentOptions, "metric_queue", value)


@pytest.mark.parametrize("value", [0, 1, "yes", 1.0])
def test_what_must_be_a_boolean_is_checked(value: Any) -> None:
    refused(AgentOptions, "launch_once", value)
    refused(ExecutorOptions, "train_with_evaluation", value)
    refused(ExecutorOptions, "end_with_metrics", value)


@pytest.mark.parametrize("name", ["train_task_name", "evaluate_task_name", "submit_model_task_name"])
def test_names_of_tasks_are_checked(name: str) -> None:
    for value in ("", None, 3):
        refused(ExecutorOptions, name, value)
    changed: dict[str, Any] = {name: "fit"}
    assert ExecutorOptions(**changed).allows("fit")


def test_names_of_tasks_must_be_different() -> None:
    with pytest.raises(ValueError, match=r"evaluate_task_name must be another name than train_task_name"):
        ExecutorOptions(evaluate_task_name="train")


@pytest.mark.parametrize("value", ["fit", ["fit"], ("fit", 3), ("",), None])
def test_other_tasks_must_be_a_tuple_of_names(value: Any) -> None:
    refused(ExecutorOptions, "other_tasks", value)


def test_other_tasks_are_allowed_beside_the_usual_ones() -> None:
    options = ExecutorOptions(other_tasks=("fit",))
    assert [options.allows(name) for name in ("train", "fit", "other")] == [True, True, False]
    assert ExecutorOptions(other_tasks=("*",)).allows("anything")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("round", ["1", 1.0, True, [1]]),
        ("total_rounds", ["1", 1.0, True, [1]]),
        ("name", ["", None, 3]),
        ("id", ["", "a.b", "a/b", 3]),
    ],
)
def test_tasks_are_checked_where_they_are_made(name: str, values: list[Any]) -> None:
    """The program could not read them, and would take the connection for broken."""
    for value in values:
        with pytest.raises((TypeError, ValueError), match=name):
            Task(**{"name": "train", name: value})


def test_every_task_has_an_id_of_its_own() -> None:
    assert Task("train").id != Task("train").id


def test_a_model_is_whole_or_a_difference() -> None:
    with pytest.raises(ValueError, match="params_type"):
        Model(params_type="HALF")  # type: ignore[arg-type]
