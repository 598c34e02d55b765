"""Operations of files have types: schemas are checked, and are models for those who write values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pydantic
import pytest

from dfm_async import Federation, Pipeline, PipelineError, PlaceParam, Yield
from dfm_async.planning.prepare import parameter_types, prepare
from dfm_async.planning.types import validate
from tests.federation.files.rig import loaded, parameters_of
from tests.federations import file_of


def hint(folder: Path, schema: str, *, schemas: str = "{}") -> Any:
    federation = loaded(
        folder,
        f"schemas: {schemas}\noperations: {{a.B: {{parameters: {{x: {schema}}}, required: [x], returns: object}}}}",
    )
    return federation.operations.a.B.signature.types.get("x", Any)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ("{type: string}", ["a"], [1, None]),
        ("{type: number}", [1, 1.5], ["a", None]),
        ("{type: integer}", [1], [1.5, "a"]),
        ("{type: boolean}", [True, False], ["maybe", 7]),
        ("{type: 'null'}", [None], [1]),
        ("{type: null}", [None], [1]),
        ("{type: array}", [[], [1, "a"], (1, 2)], [3]),
        ("{type: array, items: {type: integer}, minItems: 1}", [[1]], [[], ["a"]]),
        ("{type: object}", [{}, 3, object(), None], []),
        ("{}", [{}, 3, None], []),
        ("{description: anything}", [{}, 3, None], []),
        ("{type: [string, integer]}", ["a", 1], [None, [1]]),
        ("{type: [number, pkg.mod.Model]}", [1, "a", object()], []),
        ("{type: pkg.mod.Model}", [1, "a", object()], []),
        ("{type: string, nullable: true}", ["a", None], [1]),
        ("{enum: [a, 1, null]}", ["a", 1, None], ["b", 2]),
        ("{enum: [[1], a]}", [[1], "b"], []),
        ("{const: a}", ["a"], ["b"]),
        ("{type: number, minimum: 0, exclusiveMaximum: 1}", [0, 0.5], [-1, 1]),
        ("{type: integer, multipleOf: 3}", [3, 9], [4]),
        ("{type: string, minLength: 2, maxLength: 3, pattern: '^a'}", ["ab"], ["a", "bb", "abcd"]),
        ("{type: string, format: date}", ["2024-01-01"], [3]),
        ("{anyOf: [{type: string}, {type: 'null'}]}", ["a", None], [1]),
        ("{oneOf: [{type: string}, {type: array}]}", ["a", []], [1]),
        ("{allOf: [{type: string}]}", ["a"], [1]),
        ("{type: object, additionalProperties: {type: integer}}", [{"a": 1}], [{"a": "b"}, 3]),
        ("{type: object, properties: {a: {type: integer}}, required: [a]}", [{"a": 1}, {"a": 1, "b": 2}], [{}, 3]),
        ("{type: object, properties: {a: {}}, additionalProperties: false}", [{"a": 1}], [{"b": 1}]),
    ],
)
def test_a_schema_decides_which_values_fit(schema: str, good: list[Any], bad: list[Any], tmp_path: Path) -> None:
    found = hint(tmp_path, schema)
    assert [value for value in good if validate(found, value, convert=False)[1] is not None] == []
    assert [value for value in bad if validate(found, value, convert=False)[1] is None] == []


def test_what_is_required_comes_first_and_the_rest_has_defaults(tmp_path: Path) -> None:
    federation = loaded(
        tmp_path,
        """\
        operations:
          a.B:
            parameters: {a: {type: string}, b: {type: number, default: 2.5}, c: {type: integer}, d: {}}
            required: [c]
            returns: array
        """,
    )
    expected = "(c: int, *, a: str | None = None, b: float | None = 2.5, d=None) -> list"
    assert str(federation.operations.a.B.signature.parameters) == expected


def test_names_that_calls_use_can_be_parameters_of_a_declared_operation(tmp_path: Path) -> None:
    federation = loaded(
        tmp_path,
        """\
        operations: {a.B: {parameters: {retry: {type: integer}, deadline: {type: number}}, returns: object}}
        sites: {s: {interface: {"#/operations/a.B": {adapter: pkg.B, args: from-operation}}}}
        """,
    )
    with Pipeline() as pipeline:
        Yield(federation.operations.a.B(retry=3, deadline=1.5, site="s"))
    assert "retry=3" in str(pipeline)
    assert "deadline=1.5" in str(pipeline)


def test_schemas_are_models_that_refer_to_each_other() -> None:
    schemas = Federation.from_yaml(file_of("minifed")).schemas
    state = schemas.states.State(value=1, mode="quick", history=[{"value": 2}])
    assert state.history[0].value == 2.0
    assert type(state.history[0]) is schemas.states.State
    assert schemas.states.State.__doc__ == "Where a calculation is"
    assert issubclass(schemas["states.Limits"], pydantic.BaseModel)
    with pytest.raises(pydantic.ValidationError, match="mode"):
        schemas.states.State(value=1, mode="slow")
    with pytest.raises(pydantic.ValidationError, match="high"):
        schemas.states.Limits(low=1)
    with pytest.raises(AttributeError, match=r"no schema 'states\.Nothing'"):
        _ = schemas.states.Nothing
    assert str(schemas.states.Mode) == "typing.Literal['careful', 'quick']"


def test_schemas_of_other_files_may_have_another_name_and_refer_to_themselves(tmp_path: Path) -> None:
    federation = loaded(
        tmp_path,
        """\
        schemas:
          m.Again: {$ref: "#/schemas/m.Tree"}
          m.Tree: {$ref: "trees.yaml#/tree"}
        operations:
          a.B: {parameters: {tree: {$ref: "trees.yaml#/tree"}, again: {$ref: "#/schemas/m.Again"}}}
        """,
        trees="tree: {properties: {name: {type: string}, branches: {type: array, items: {$ref: '#/tree'}}}}",
    )
    tree = federation.schemas.m.Tree(name="a", branches=[{"name": "b", "branches": [{"name": "c"}]}])
    assert tree.branches[0].branches[0].name == "c"
    assert federation.schemas.m.Again is federation.schemas.m.Tree
    assert parameters_of(federation, "a.B") == {
        "tree": {"$ref": "#/schemas/m.Tree"},
        "again": {"$ref": "#/schemas/m.Again"},
    }
    for found in federation.operations.a.B.signature.types.values():
        assert validate(found, {"branches": [{"name": "b"}]})[1] is None
        assert validate(found, {"branches": [{"name": 3}]})[1] is not None


def test_a_parameter_with_a_schema_takes_dicts_and_objects_of_the_model_and_gives_dicts() -> None:
    federation = Federation.from_yaml(file_of("minifed"))
    found = federation.operations.states.Step.signature.types["state"]
    state = federation.schemas.states.State(value=1, history=[{"value": 2}])
    for value in (state, {"value": 1, "history": [{"value": 2}]}):
        assert validate(found, value) == ({"value": 1.0, "history": [{"value": 2.0}]}, None)
    assert "['history'][0]['value']" in str(validate(found, {"value": 1, "history": [{"value": "x"}]})[1])


def test_objects_of_a_model_are_plain_data_in_a_pipeline() -> None:
    federation = Federation.from_yaml(file_of("minifed"))
    with Pipeline() as pipeline:
        Yield(federation.operations.states.Step(federation.schemas.states.State(value=1)))
    assert Pipeline.model_validate(pipeline.model_dump()) == pipeline


def test_prepare_checks_values_against_schemas() -> None:
    federation = Federation.from_yaml(file_of("minifed"))
    operations = federation.operations
    with Pipeline() as pipeline:
        step = operations.states.Step({"value": "far"}, mode="sideways")
        Yield(operations.math.Square(operations.text.Label("a")))
        Yield(step)
    with pytest.raises(PipelineError) as caught:
        prepare(pipeline, federation, "home")
    text = str(caught.value)
    assert "state: ['value']: Input should be a valid number" in text
    assert "mode: Input should be 'careful' or 'quick', not 'sideways'" in text
    assert "x is declared float, but" in text


def test_schemas_with_strange_names_are_models(tmp_path: Path) -> None:
    federation = loaded(
        tmp_path,
        """\
        schemas:
          m.Odd:
            properties:
              class: {type: integer}
              copy: {type: integer}
              _hidden: {type: integer}
              model_config: {type: integer}
              "a b": {type: object, properties: {c: {type: string}}}
            required: [class]
        """,
    )
    data = {"class": 1, "copy": 2, "_hidden": 3, "model_config": 4, "a b": {"c": "d"}}
    odd = federation.schemas.m.Odd.model_validate(data)
    assert odd.copy_ == 2
    assert odd.model_dump(by_alias=True) == data


def test_schemas_that_grow_without_end_declare_nothing_from_some_depth(tmp_path: Path) -> None:
    twice = ", ".join(
        f"m.S{i}: {{anyOf: [{{type: array, items: {{$ref: '#/schemas/m.S{i + 1}'}}}}, "
        f"{{$ref: '#/schemas/m.S{i + 1}'}}]}}"
        for i in range(40)
    )
    schemas = (
        f"{{{twice}, m.S40: {{type: string}}, m.Self: {{anyOf: [{{$ref: '#/schemas/m.Self'}}, {{type: string}}]}}}}"
    )
    found = hint(tmp_path, "{$ref: '#/schemas/m.S0'}", schemas=schemas)
    assert validate(found, [["a"]])[1] is None
    assert validate(hint(tmp_path, "{$ref: '#/schemas/m.Self'}", schemas=schemas), "a")[1] is None


def test_long_chains_of_models_do_not_end_the_process(tmp_path: Path) -> None:
    chain = ", ".join(f"m.S{i}: {{properties: {{n: {{$ref: '#/schemas/m.S{(i + 1) % 500}'}}}}}}" for i in range(500))
    federation = loaded(
        tmp_path, f"schemas: {{{chain}}}\noperations: {{a.B: {{parameters: {{x: {{$ref: '#/schemas/m.S0'}}}}}}}}"
    )
    assert validate(federation.operations.a.B.signature.types["x"], {"n": {"n": {}}})[1] is None


def test_a_place_parameter_has_the_type_of_its_schema() -> None:
    federation = Federation.from_yaml(file_of("minifed"))
    with Pipeline() as pipeline:
        Yield(federation.operations.data.Range(PlaceParam("count")))
    plan = prepare(pipeline, federation, "home")
    (found,) = parameter_types(plan, federation)["count"]
    assert validate(found, 3)[1] is None
    assert validate(found, -3)[1] is not None
