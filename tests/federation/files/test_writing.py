"""A federation can be written as a file, and what is read from there is the same federation."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dfm_async import Federation, RetryPolicy
from dfm_async.errors import FederationError
from dfm_async.federation import (
    CacheConfig,
    ClassPath,
    Const,
    Cost,
    ExposedParameter,
    FromParam,
    FromProvider,
    FromSecrets,
    FromSite,
    SendCost,
    VaultConfig,
)
from tests.federation.files.rig import described, parameters_of
from tests.federations import NAMES, file_of


class Options(pydantic.BaseModel):
    depth: int


class Add:
    """Adds."""

    def __init__(self, bias: int = 0) -> None:
        self.bias = bias

    async def body(self, x: float, y: float = 2.0, tags: list[str] | None = None) -> float:
        """Adds two numbers."""
        return x + y + self.bias


class Count:
    def body(self, options: Options, many: list[Options], anything: object = None) -> Iterator[int]:
        yield from range(options.depth)


class Here:
    pass


@pytest.mark.parametrize("name", NAMES)
def test_what_was_written_is_the_same_federation(name: str, tmp_path: Path) -> None:
    federation = Federation.from_yaml(file_of(name))
    text = federation.to_yaml(tmp_path / "again.yaml")
    again = Federation.from_yaml(tmp_path / "again.yaml")
    assert described(again) == described(federation)
    assert again.to_yaml() == text == (tmp_path / "again.yaml").read_text()


def test_a_federation_of_classes_can_be_written(tmp_path: Path) -> None:
    federation = Federation("classes", api_version="1.2.3", description="Classes of a module")
    lab = federation.site(
        "lab", workers=2, threads=3, impl=Here, info={"where": "north"}, vault=VaultConfig(path="file")
    )
    cache = CacheConfig(protocol="memory", max_age=60)
    federation.site("store", workers=(1, 8), idle_after=30, cache=cache, send_cost={"lab": SendCost(bandwidth=5)})
    lab.operation(
        Add, args={"bias": 1}, cost=Cost(fixed_time=1), deadline=3, retry=RetryPolicy(attempts=2, on=(OSError,))
    )
    lab.operation(Count, name="numbers.Count", provider="acme", in_process=True)
    federation.to_yaml(tmp_path / "classes.yaml")
    again = Federation.from_yaml(tmp_path / "classes.yaml")

    adapter = again.sites["lab"].adapters["Add", None]
    assert adapter.code == ClassPath(f"{__name__}.Add", {"bias": 1})
    assert (adapter.is_async, adapter.bindings, adapter.deadline) == (True, None, 3)
    assert adapter.cost == Cost(fixed_time=1)
    assert adapter.retry == RetryPolicy(attempts=2, on=(OSError,))
    assert str(again.operations.Add.signature.parameters) == (
        "(x: float, *, y: float | None = 2.0, tags: list[str] | None = None) -> int | float"
    )
    assert (again.operations.Add.__doc__ or "").startswith("Adds two numbers.")
    count = again.sites["lab"].adapters["numbers.Count", "acme"]
    assert (count.is_async, count.in_process) == (False, True)
    assert parameters_of(again, "numbers.Count")["options"] == {"type": f"{__name__}.Options"}
    assert again.schemas.types.Options(depth=3).depth == 3
    for site in ("lab", "store"):
        there, here = again.sites[site], federation.sites[site]
        assert (there.workers, there.threads, there.vault) == (here.workers, here.threads, here.vault)
        assert there.idle_after == here.idle_after
        assert (there.cache, there.send_cost, there.info) == (here.cache, here.send_cost, here.info)
    assert again.sites["lab"].impl == ClassPath(f"{__name__}.Here")
    assert again.to_yaml() == federation.to_yaml()


def test_what_cannot_be_written_is_listed_at_once() -> None:
    federation = Federation("not written", api_version="1")
    lab = federation.site("lab", vault=object())

    @lab.operation
    def function(x: int) -> int:
        return x

    @lab.operation
    def many(*numbers: int) -> int:
        return sum(numbers)

    class Local:
        def body(self) -> None: ...

    lab.operation(Local)
    lab.operation(Add(), name="built")
    lab.operation(Add, args={"bias": object()})
    with pytest.raises(FederationError) as caught:
        federation.to_yaml()
    found = {problem.key: problem.message for problem in caught.value.problems}
    assert found == {
        "info.code-package": "the federation's name must be an identifier, not 'not written'",
        "info.api-version": "it must be three numbers, such as 0.1.0, not '1'",
        "operations['many']": "the parameter *numbers: 'int' takes any number of values; in a file, each has a name",
        "sites.lab.secrets_vault": "the vault is an object of object; only VaultConfig(...) can be written",
        "sites.lab['function']": (
            f"{test_what_cannot_be_written_is_listed_at_once.__name__}.<locals>.function is not a class: a file names "
            "classes, with a body, by their modules and names"
        ),
        "sites.lab['many']": (
            f"{test_what_cannot_be_written_is_listed_at_once.__name__}.<locals>.many is not a class: a file names "
            "classes, with a body, by their modules and names"
        ),
        "sites.lab['Local']": (
            "the class is not at the top of a module: a file names classes, with a body, by their modules and names"
        ),
        "sites.lab['built']": (
            "an object of Add is not a class: a file names classes, with a body, by their modules and names"
        ),
        "sites.lab['Add'].args.bias": "object objects cannot be written; text, numbers, lists and dicts can",
    }


names = st.sampled_from(["alpha", "beta_2", "on", "yes", "null", "x", "größe"])
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
positive = st.floats(min_value=0.001, max_value=1e9)
exposed = st.none() | st.builds(
    ExposedParameter, param=names, type=st.sampled_from(["string", "number", ["null", "array"]]), description=texts,
    discoverable=st.booleans(),
)  # fmt: skip
bindings = st.one_of(
    st.builds(FromParam, st.just("p"), texts),
    st.builds(Const, plain, exposed, texts),
    st.builds(FromSecrets, texts.filter(bool), exposed, texts),
    st.builds(FromSite, names, exposed),
    st.builds(FromProvider, st.just("acme"), names, exposed),
)
options = st.fixed_dictionaries(
    {},
    optional={
        "is_async": st.booleans(),
        "description": texts,
        "cost": st.builds(Cost, fixed_time=positive, throughput=st.none() | positive, output_factor=positive),
        "deadline": positive,
        "in_process": st.booleans(),
        "limit": st.integers(1, 99),
        "rate": st.sampled_from(["10/s", "0.5/min", "3/h"]),
        "cpus": st.integers(1, 2),
        "memory": st.integers(1, 10**12) | st.just("1.5GB"),
        "provider": st.just("acme"),
    },
)


def once_each(bound: dict[str, Any]) -> bool:
    found = [b.expose_as.param for b in bound.values() if not isinstance(b, FromParam) and b.expose_as is not None]
    return len(found) == len(set(found))


@given(
    description=texts,
    info=st.dictionaries(texts, plain, max_size=2),
    schema=st.sampled_from([{"type": "number"}, {"enum": ["a", 1]}, {"type": "array", "items": {"type": "string"}}]),
    bound=st.none() | st.dictionaries(names, bindings, max_size=4).filter(once_each),
    chosen=options,
    args=st.dictionaries(names, plain, max_size=2),
)
def test_whatever_is_written_is_read_as_the_same(
    tmp_path_factory: pytest.TempPathFactory,
    description: str,
    info: dict[str, Any],
    schema: dict[str, Any],
    bound: dict[str, Any] | None,
    chosen: dict[str, Any],
    args: dict[str, Any],
) -> None:
    path = tmp_path_factory.getbasetemp() / "random.yaml"
    first = Federation.from_yaml(file_of("myfed"))
    first.description = description
    first.info = {name: value for name, value in info.items() if name.replace("-", "_") not in RESERVED}
    first.provision = dict(info)
    first.models.declared["m.Schema"] = dict(schema)
    operation = next(iter(first.operations.values()))
    site = first.site("random", send_cost={"loader": SendCost(fixed_time=1)}, info=info)
    site.provider("acme", ClassPath("pkg.Acme", args), info=info)
    bound = (
        None if bound is None else {n: FromParam("shape") if isinstance(b, FromParam) else b for n, b in bound.items()}
    )
    site.adapt(operation, ClassPath("pkg.Code", args), bind=bound, **chosen)
    first.to_yaml(path)
    assert described(Federation.from_yaml(path)) == described(first)


RESERVED = {"api_version", "code_package", "description"}


def test_writing_imports_nothing_new(tmp_path: Path) -> None:
    federation = Federation.from_yaml(file_of("minifed"))
    federation.to_yaml()
    before = set(sys.modules)
    federation.to_yaml(tmp_path / "again.yaml")
    assert set(sys.modules) == before
