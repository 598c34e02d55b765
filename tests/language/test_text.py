"""Pipelines as people read them."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import HealthCheck, given, settings

from dfm_async import Federation, ForEach, Pipeline, PlaceParam, Yield
from dfm_async.language.statements import walk_statements
from tests.language.test_json import full
from tests.property.random_pipelines import fed as random_federation
from tests.property.random_pipelines import pipelines


def test_text_is_the_python_that_builds_the_pipeline() -> None:
    assert str(full()) == "\n".join(
        [
            "with Pipeline('full') as pipeline:",
            "    n0 = load(x=PlaceParam('x', multiuse=True), y=(1, {'k': [2.5, None]}))",
            "    n1 = load(x=n0['k'][0].name, site=BestOf(['here']), retry=RetryPolicy(attempts=5, backoff=0.5, "
            "max_backoff=9.0, on=('builtins.KeyError', 'x.Y'), on_worker_lost=0, jitter=0.25), "
            "deadline=2.5, after=[n0])",
            "    n2 = load(x={'p': PlaceParam('x', default=[1]).field, (1,): {n0}}, site='here', provider='prov', "
            "fallback={2})",
            "    with If(((n0 > 1) & (~(n1 == 'no'))) | (n0.ok)) as n3:",
            "        Yield(n1, place='p', multiuse=True)",
            "    with n3.otherwise():",
            "        Yield([n0, (n1,)], place='p', multiuse=True, after=[n0, n1])",
            "    n6 = n3.value(n0.x, [n1])",
            "    n7 = gather([n0, n1], at_least=0, within=2)",
            "    with ForEach(n0, concurrency=3) as n8:",
            "        with TryFromCache(key=('k', n8), site='here') as n9:",
            "            n10 = load(x=n8)",
            "            n9.store(n10)",
            "    n11 = collect(n9, errors='keep')",
            "    with Repeat(n11, times=n0) as n12:",
            "        n13 = load(x=n12)",
            "        n12.next(n13)",
            "        n12.until(n13 > 3)",
            "    Yield(n12, place='last')",
        ]
    )


def _run(text: str) -> Pipeline:
    names: dict[str, Any] = {}
    exec("from dfm_async import *", names)
    names.update(random_federation.operations)
    exec(text, names)
    pipeline = names["pipeline"]
    assert isinstance(pipeline, Pipeline)
    return pipeline


def _shape(text: str) -> str:
    """The text with its nodes numbered in the order in which they appear."""
    numbers: dict[str, str] = {}
    return re.sub(r"\bn\d+\b", lambda m: numbers.setdefault(m.group(), f"n{len(numbers)}"), text)


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much])
@given(pipelines())
def test_running_the_text_of_a_pipeline_builds_it_again(pipeline: Pipeline) -> None:
    assert _shape(str(_run(str(pipeline)))) == _shape(str(pipeline))


def test_long_constants_are_cut_in_text() -> None:
    with Pipeline() as p:
        Yield(list(range(1000)))
    assert len(str(p)) < 150
    assert "..." in str(p)


def test_an_empty_pipeline_and_an_empty_block_have_a_text() -> None:
    with Pipeline() as empty:
        pass
    assert str(empty) == "with Pipeline() as pipeline:\n    pass"
    with Pipeline("p") as block, ForEach([1]):
        pass
    assert str(block).splitlines()[1:] == ["    with ForEach([1]) as n0:", "        pass"]


def test_repr_is_short() -> None:
    assert repr(full()) == "<Pipeline 'full': 10 statements>"


def test_mermaid_shows_nodes_blocks_parameters_data_and_order() -> None:
    lines = full().to_mermaid().splitlines()
    assert lines[0] == "flowchart TD"
    stripped = {line.strip() for line in lines}
    assert 'n0["load#0"]' in stripped
    assert 'n2["load#2<br/>here"]' in stripped
    assert 'n4(["Yield p"])' in stripped
    assert 'subgraph b8["ForEach#8"]' in stripped
    assert 'subgraph b3t["then"]' in stripped
    assert 'subgraph b3e["otherwise"]' in stripped
    assert 'p0>"x = [1]"]' in stripped
    assert {
        "n0 --> n1",
        "n0 -.-> n1",
        "p0 --> n0",
        "n1 --> n4",
        "n3 -->|then| b3t",
        "n9 --> n11",
        "n0 --> n7",
    } <= stripped
    assert sum(line.strip().startswith("subgraph") for line in lines) == sum(line.strip() == "end" for line in lines)


def test_mermaid_is_not_broken_by_quotes_and_brackets_in_names() -> None:
    fed = Federation("odd")
    op = fed.site("here").operation(lambda x: x, name='say "<hi>"')
    with Pipeline() as p:
        Yield(op(PlaceParam('a"b')), place='<"p">')
    text = p.to_mermaid()
    for line in text.splitlines():
        assert line.count('"') in (0, 2), line
    assert "<hi>" not in text


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much])
@given(pipelines())
def test_mermaid_shows_every_statement_and_draws_no_arrow_from_or_to_nowhere(pipeline: Pipeline) -> None:
    text = pipeline.to_mermaid()
    drawn = set(re.findall(r"^\s*(?:subgraph )?([nbp]\d+[te]?)[\[({>]", text, re.M))
    assert {f"n{s.id}" for s in walk_statements(pipeline.body)} <= drawn
    for start, end in re.findall(r"^\s*(\w+) (?:-->|-\.->)(?:\|\w+\|)? (\w+)$", text, re.M):
        assert {start, end} <= drawn
