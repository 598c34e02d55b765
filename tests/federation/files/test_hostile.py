"""Untrusted files give a federation or a FederationError: never a crash, a hang, or an import."""

from __future__ import annotations

import copy
import random
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from dfm_async import Federation
from dfm_async.errors import FederationError
from dfm_async.planning.types import validate
from tests.federation.files.rig import HEAD, described, loaded, problems
from tests.federations import NAMES, ROOT, file_of
from tests.support.damage import spots

PARTS = [path for name in NAMES for path in sorted((ROOT / name).rglob("*.yaml"))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for name in NAMES:  # what reading needs is imported now
        Federation.from_yaml(file_of(name)).to_yaml()
    found = tmp_path_factory.mktemp("hostile")
    (found / "warm.yaml").write_text(f"{HEAD}operations: {{a.B: {{parameters: {{x: {{pattern: a, minimum: 1}}}}}}}}")
    Federation.from_yaml(found / "warm.yaml").to_yaml()
    (found / "parts").mkdir()
    for part in (ROOT / "minifed" / "configs" / "parts").iterdir():
        (found / "parts" / part.name).write_bytes(part.read_bytes())
    return found


def attempt(path: Path) -> Federation | None:
    """Reads a file, and whatever comes of it is one of two things."""
    before = set(sys.modules)
    found: Federation | FederationError
    try:
        found = Federation.from_yaml(path)
    except FederationError as error:
        found = error
    assert set(sys.modules) == before
    if isinstance(found, Federation):
        return found
    assert found.problems
    assert all(problem.message for problem in found.problems)
    return None


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(
        [
            "$ref",
            "#/operations/math.Square",
            "#/schemas/states.State",
            "parts/beta.yaml#/site",
            "os.system",
            "from-operation",
        ]
    ),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.text(max_size=5)
            | st.sampled_from(
                ["$ref", "type", "properties", "items", "const", "from-param", "adapter", "path", "args", "enum"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


WHOLE = yaml.safe_load(file_of("minifed").read_text())


@given(st.lists(st.tuples(st.integers(0, 10_000), json_values), min_size=1, max_size=3))
def test_anything_in_any_place_is_read_or_refused(folder: Path, changes: list[tuple[int, Any]]) -> None:
    data = copy.deepcopy(WHOLE)
    for number, value in changes:
        places = spots(data)
        holder, key = places[number % len(places)]
        holder[key] = copy.deepcopy(value)
    target = folder / "federation.dfm.yaml"
    try:
        target.write_text(yaml.safe_dump(data, allow_unicode=True))
    except UnicodeEncodeError:
        return
    federation = attempt(target)
    if federation is not None:
        again = folder / "again.yaml"
        federation.to_yaml(again)
        assert described(Federation.from_yaml(again)) == described(federation)


@pytest.mark.parametrize("seed", range(60))
def test_files_with_damage_are_read_or_refused(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    data = bytearray(rng.choice(PARTS).read_bytes())
    for _ in range(rng.randint(1, 8)):
        at = rng.randrange(len(data))
        match rng.randrange(4):
            case 0:
                data[at] = rng.randrange(256)
            case 1:
                del data[at : at + rng.randint(1, 40)]
            case 2:
                data[at:at] = rng.choice(
                    [b"[", b"{", b"&a ", b"*a ", b"<<: ", b"!!python/name:os.system ", b"\t", b"? ", b"\n"]
                )
            case _:
                data[at:at] = data[at : at + rng.randint(1, 60)]
    path = folder / "damaged.yaml"
    path.write_bytes(bytes(data))
    attempt(path)


kinds = st.sampled_from(["string", "number", "integer", "boolean", "array", "object", "null", "pkg.mod.Model"])
numbers = st.sampled_from([0, 1, -1, 3, 0.5, 2**31, 10**15, -(10**15)])
counts = st.sampled_from([0, 1, 3, 10**15])
schemas: st.SearchStrategy[Any] = st.deferred(
    lambda: (
        st.fixed_dictionaries(
            {},
            optional={
                "type": kinds | st.lists(kinds, min_size=1, max_size=3),
                "enum": st.lists(json_values, min_size=1, max_size=3),
                "const": json_values,
                "format": st.sampled_from(["date-time", "uuid", "email"]),
                "nullable": st.booleans(),
                "minimum": numbers,
                "exclusiveMaximum": numbers,
                "multipleOf": numbers.filter(lambda number: number > 0),
                "minLength": counts,
                "maxItems": counts,
                "pattern": st.sampled_from(["^a", "[0-9]{3}", "a|b"]),
                "items": schemas,
                "properties": st.dictionaries(st.text(max_size=3) | st.just("class"), schemas, max_size=2),
                "additionalProperties": st.booleans() | schemas,
                "required": st.lists(st.text(max_size=3), max_size=2),
                "anyOf": st.lists(schemas, max_size=2),
                "default": json_values,
            },
        )
        | st.just({"$ref": "#/schemas/m.Named"})
    )
)


@given(schemas, schemas, json_values)
def test_values_are_checked_against_any_schema_without_a_crash(
    folder: Path, schema: Any, named: Any, value: Any
) -> None:
    data = yaml.safe_load(HEAD) | {
        "schemas": {"m.Named": named},
        "operations": {"a.B": {"parameters": {"x": schema}, "required": ["x"], "returns": "object"}},
    }
    path = folder / "schema.yaml"
    try:
        path.write_text(yaml.safe_dump(data, allow_unicode=True))
    except UnicodeEncodeError:
        return
    federation = attempt(path)
    if federation is not None:
        hint = federation.operations.a.B.signature.types.get("x", Any)
        assert validate(hint, value) is not None
        assert len(list(federation.schemas.values())) == 1


@given(st.binary(max_size=200))
@settings(max_examples=40)
def test_any_bytes_are_read_or_refused(folder: Path, data: bytes) -> None:
    path = folder / "bytes.yaml"
    path.write_bytes(HEAD.encode() + data)
    attempt(path)


def test_aliases_that_multiply_are_refused_at_once(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    began = time.perf_counter()
    (found,) = problems(tmp_path, "", head="\n".join(lines))
    assert "the file has more than 400,000 parts, with what its aliases repeat" in found
    assert time.perf_counter() - began < 2


@pytest.fixture
def low_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for very large files, but sooner."""
    monkeypatch.setattr("dfm_async.federation.files.values.LARGEST", 10_000)


@pytest.mark.usefixtures("low_limit")
def test_references_that_multiply_are_refused(tmp_path: Path) -> None:
    wide = "\n".join(f"  n{i}: {{type: number}}" for i in range(100))
    more = "\n".join(f"  a.Op{i}: {{parameters: {{$ref: ['parts.yaml#/wide']}}, returns: object}}" for i in range(100))
    (found,) = problems(tmp_path, f"operations:\n{more}", parts=f"wide:\n{wide}\n")
    assert "the files and their references are together larger than allowed" in found


@pytest.mark.usefixtures("low_limit")
def test_schemas_that_multiply_are_refused(tmp_path: Path) -> None:
    steps = "\n".join(f"s{i}: {{anyOf: [{{$ref: '#/s{i + 1}'}}, {{$ref: '#/s{i + 1}'}}]}}" for i in range(25))
    text = "operations: {a.B: {parameters: {x: {$ref: 'parts.yaml#/s0'}}, returns: object}}"
    (found,) = problems(tmp_path, text, parts=f"{steps}\ns25: {{type: string}}")
    assert "larger than allowed" in found


@pytest.mark.parametrize(
    "deep", ["[" * 100_000, "{a: " * 5_000, "- " * 100_000, "a:\n" + "".join(" " * i + "- \n" for i in range(300))]
)
def test_what_is_nested_too_deep_is_refused_at_once(deep: str, tmp_path: Path) -> None:
    began = time.perf_counter()
    (found,) = problems(tmp_path, "", head=f"provision: {deep}" if not deep.startswith(("-", "a")) else deep)
    assert "nested deeper than 64 levels" in found or "not YAML" in found
    assert time.perf_counter() - began < 2


def test_a_schema_that_is_deep_by_references_is_refused(tmp_path: Path) -> None:
    chain = "\n".join(f"s{i}: {{items: {{$ref: '#/s{i + 1}'}}}}" for i in range(500))
    text = "operations: {a.B: {parameters: {x: {$ref: 'parts.yaml#/s0'}}, returns: object}}"
    (found,) = problems(tmp_path, text, parts=f"{chain}\ns500: {{type: string}}")
    assert "this schema is nested deeper than 64 levels, with what it refers to" in found


@pytest.mark.parametrize("name", NAMES)
def test_files_are_read_alike_where_yaml_has_no_c_library(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = Federation.from_yaml(file_of(name))
    monkeypatch.delattr(yaml, "CSafeLoader")
    monkeypatch.delattr(yaml, "CSafeDumper")
    slow = Federation.from_yaml(file_of(name))
    assert described(slow) == described(quick)
    assert slow.to_yaml()


def test_what_is_nested_too_deep_is_refused_where_yaml_has_no_c_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(yaml, "CSafeLoader")
    (found,) = problems(tmp_path, "", head="a: " + "[" * 100_000)
    assert "nested deeper than 64 levels" in found


def test_a_large_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "large.yaml"
    with path.open("wb") as file:
        file.truncate(64 * 1024**2)
    with pytest.raises(FederationError, match="is larger than 16 MiB"):
        Federation.from_yaml(path)


def test_too_many_files_are_refused(tmp_path: Path) -> None:
    for number in range(300):
        (tmp_path / f"s{number}.yaml").write_text("{}")
    refs = ", ".join(f"s{number}: {{$ref: 's{number}.yaml#'}}" for number in range(300))
    found = problems(tmp_path, f"sites: {{{refs}}}")
    assert "more than 256 files belong together" in found[0]


def test_many_references_to_merged_names_are_fast(tmp_path: Path) -> None:
    operations = "".join(f"  a.Op{i}: {{parameters: {{x: {{$ref: '#/schemas/m.S{i}'}}}}}}\n" for i in range(700))
    schemas = "".join(f"  m.S{i}: {{type: number}}\n" for i in range(700))
    text = f"schemas: {{$ref: ['parts.yaml#/all']}}\noperations:\n{operations}"
    assert len(loaded(tmp_path, text, parts=f"all:\n{schemas}").operations) == 700


def test_dates_stay_text_and_constants_keep_their_types(tmp_path: Path) -> None:
    federation = loaded(
        tmp_path, "provision: {a: 2024-01-01, b: 1_000, c: 0x10, d: 1e3, e: 1.5, f: yes, g: ~, h: '1', i: !!str 1}"
    )
    assert federation.provision == {
        "a": "2024-01-01", "b": 1000, "c": 16, "d": "1e3", "e": 1.5, "f": True, "g": None, "h": "1", "i": "1",
    }  # fmt: skip


def test_a_schema_that_contains_itself_in_an_object_without_a_name_costs_little(tmp_path: Path) -> None:
    inner = {"properties": {"P": {"$ref": "#/schemas/m.Named"}}}
    data = yaml.safe_load(HEAD) | {
        "schemas": {"m.Named": {"anyOf": [inner, {"type": "string"}]}},
        "operations": {
            "a.B": {
                "parameters": {"x": {"properties": {"q": {"$ref": "#/schemas/m.Named"}}}},
                "required": ["x"],
                "returns": "object",
            }
        },
    }
    path = tmp_path / "nested.yaml"
    path.write_text(yaml.safe_dump(data))
    tracemalloc.start()
    federation = attempt(path)
    assert federation is not None
    hint = federation.operations.a.B.signature.types["x"]
    assert validate(hint, {"q": {"P": {"P": "text"}}}) is not None
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000_000
