"""References: to one object, and lists that are merged; within a file, and to others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dfm_async import Federation
from dfm_async.errors import FederationError
from tests.federation.files.rig import loaded, parameters_of, problems, written

OPERATION = "{parameters: {x: {type: number}}, required: [x], returns: number}"


REFERENCES: dict[str, tuple[str, dict[str, str]]] = {
    "to an object of the same file": (f"operations: {{a.One: {OPERATION}, a.Two: {{$ref: '#/operations/a.One'}}}}", {}),
    "to whole files": ("operations: {a.One: {$ref: one.yaml}, a.Two: {$ref: 'one.yaml#'}}", {"one": OPERATION}),
    "with escapes and numbers": (
        "operations: {a.One: {$ref: 'parts.yaml#/a~1b/~0/%63/1'}, a.Two: {$ref: 'parts.yaml#/a~1b/~0/c/0'}}",
        {"parts": f"a/b: {{'~': {{c: [{OPERATION}, {OPERATION}]}}}}"},
    ),
    "to a merge of merges": (
        "operations: {$ref: ['parts.yaml#/all']}",
        {"parts": f"all: {{$ref: ['#/x', '#/y']}}\nx: {{a.One: {OPERATION}}}\ny: {{a.Two: {OPERATION}}}"},
    ),
}


@pytest.mark.parametrize("kind", REFERENCES)
def test_a_reference_is_followed(kind: str, tmp_path: Path) -> None:
    text, others = REFERENCES[kind]
    operations = loaded(tmp_path, text, **others).operations
    assert list(operations) == ["a.One", "a.Two"]
    assert {str(found.signature.parameters) for found in operations.values()} == {"(x: float) -> int | float"}


def test_paths_begin_at_the_file_that_holds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    federation = loaded(
        tmp_path,
        "operations: {$ref: ['parts/one.yaml#/more']}",
        parts_one="more: {a.One: {$ref: 'two.yaml#/op'}}",
        parts_two=f"op: {OPERATION}",
    )
    assert list(federation.operations) == ["a.One"]


def test_a_path_that_begins_where_the_program_runs_as_in_dfm_is_found_and_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "parts.yaml").write_text(f"op: {OPERATION}")
    (tmp_path / "more.yaml").write_text(f"op: {OPERATION}")
    refs = {"a.One": "parts", "a.Two": "more", "a.Three": "more"}
    text = f"operations: {{{', '.join(f'{name}: {{$ref: {file}.yaml#/op}}' for name, file in refs.items())}}}"
    found = problems(tmp_path / "configs", text)
    assert len(found) == 2, "the same file counts once"
    assert found[0].endswith("the file does not exist. Paths begin at the folder of the file that holds them")
    monkeypatch.chdir(tmp_path)
    assert list(loaded(tmp_path / "configs", text).operations) == ["a.One", "a.Two", "a.Three"]
    (record,) = caplog.records
    assert "write '../parts.yaml'" in record.getMessage()
    assert "1 others in this file" in record.getMessage()


def test_a_file_beside_the_one_that_names_it_is_preferred_to_one_where_the_program_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "parts.yaml").write_text("more: {a.Far: {returns: object}}")
    monkeypatch.chdir(tmp_path)
    text = "operations: {$ref: ['parts.yaml#/more']}"
    federation = loaded(tmp_path / "configs", text, parts="more: {a.Near: {returns: object}}")
    assert list(federation.operations) == ["a.Near"]


def test_what_a_merge_brings_can_be_referred_to(tmp_path: Path) -> None:
    federation = loaded(
        tmp_path,
        """\
        schemas: {$ref: ["parts.yaml#/schemas"]}
        operations:
          a.One: {parameters: {p: {$ref: "#/schemas/m.Pair"}}, returns: object}
          a.Two: {$ref: "#/operations/a.Three"}
          $ref: ["parts.yaml#/operations"]
        """,
        parts=f"schemas: {{m.Pair: {{type: object, properties: {{x: {{}}}}}}}}\noperations: {{a.Three: {OPERATION}}}",
    )
    assert parameters_of(federation, "a.One") == {"p": {"$ref": "#/schemas/m.Pair"}}
    assert list(federation.operations) == ["a.One", "a.Two", "a.Three"]


def test_anchors_and_merge_keys_of_yaml_work(tmp_path: Path) -> None:
    federation = loaded(
        tmp_path,
        """\
        operations:
          a.One: &one {parameters: {x: {type: number}}, returns: number}
          a.Two: *one
          a.Three: {<<: *one, returns: string}
          a.Four: {<<: [{returns: array}, *one]}
        """,
    )
    found = {name: op.declaration.returns for name, op in federation.operations.items() if op.declaration}
    assert found == {"a.One": "number", "a.Two": "number", "a.Three": "string", "a.Four": "array"}
    assert "x" in federation.operations.a.Four.signature.parameters.parameters


def test_keys_beside_the_reference_of_a_parameter_count(tmp_path: Path) -> None:
    federation = loaded(
        tmp_path,
        """\
        schemas: {m.Mode: {enum: [fast, slow]}}
        operations:
          a.One:
            parameters: {p: {$ref: "#/schemas/m.Mode", description: How, default: slow, accepts-node-input: false}}
            returns: object
        """,
    )
    assert parameters_of(federation, "a.One")["p"] == {
        "$ref": "#/schemas/m.Mode",
        "description": "How",
        "default": "slow",
        "accepts_node_input": False,
    }


WRONG = {
    "sites: {a: {$ref: 'none.yaml#/a'}}": "sites.a.$ref: none.yaml cannot be read: the file does not exist",
    "sites: {a: {$ref: '#/nowhere'}}": (
        "sites.a.$ref: '#/nowhere' does not exist: there is no 'nowhere' in federation.dfm"
    ),
    "sites: {a: {$ref: 'https://x.org/a.yaml#/a'}}": "only files can be referred to, by their paths; save it next to",
    "sites: {a: {$ref: ''}}": "a reference is empty",
    "sites: {a: {$ref: '#a'}}": "'#a': a path that begins with / must follow #",
    "sites: {a: {$ref: ['#/b']}}": '$ref must name one object here, such as "parts.yaml#/sites/alpha", not a list',
    "sites: {a: {$ref: '#/sites/b', info: {}}, b: {}}": "$ref must be the only key; remove 'info'",
    "sites: {a: {$ref: '#/sites/a'}}": "sites.a: this reference refers to itself",
    "sites: {a: {$ref: '#/sites/b'}, b: {$ref: '#/sites/a'}}": "this reference refers to itself",
    "sites: {$ref: '#/info'}": (
        "sites.$ref: $ref must be a list here, such as [\"parts.yaml#/operations\"], not '#/info'"
    ),
    "sites: {$ref: ['#/dfm']}": "sites.$ref[0]: '#/dfm' is not a mapping that could be merged, but '1.0.0'",
    "sites: {$ref: [3]}": "sites.$ref[0]: a reference must be text, not 3",
    "sites: {$ref: ['#/sites']}": "sites.$ref: these references refer to themselves",
    "sites: {a: {}, $ref: ['parts.yaml#/sites']}": (
        "parts.yaml:1:12 sites.a: duplicate 'a', first in federation.dfm.yaml:3"
    ),
    "sites: {$ref: ['parts.yaml#/sites', 'parts.yaml#/sites']}": (
        "parts.yaml:1:12 sites.a: duplicate 'a', first in parts"
    ),
    "sites: {$ref: ['broken.yaml#/sites']}": "broken.yaml:1:5 : this is not YAML",
    "schemas: {m.A: {$ref: '#/schemas/m.A'}}": "schemas['m.A']: this reference refers to itself",
    "schemas: {m.A: {$ref: '#/schemas/m.B'}, m.B: {$ref: '#/schemas/m.A'}}": "schemas['m.B']: this reference refers",
    "operations: {a.B: {parameters: {p: {$ref: 'parts.yaml#/loop'}}}}": (
        "this schema contains itself: name it in schemas"
    ),
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_reference_is_a_mistake(text: str, tmp_path: Path) -> None:
    others = {"parts": "sites: {a: {}}\nloop: {items: {$ref: '#/loop'}}", "broken": "a: b: c"}
    found = [problem.replace(f"{tmp_path}{os.sep}", "") for problem in problems(tmp_path, text, **others)]
    assert any(WRONG[text] in problem for problem in found), found


def test_the_same_mistake_is_reported_once_even_if_many_refer_to_it(tmp_path: Path) -> None:
    text = "sites: {a: {$ref: 'parts.yaml#/site'}, b: {$ref: 'parts.yaml#/site'}}"
    assert len(problems(tmp_path, text, parts="site: {wrong: 1}")) == 1


def test_the_application_may_lie_beside_other_folders(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "ops.yaml").write_text(f"a.One: {OPERATION}")
    (tmp_path / "configs").mkdir()
    absolute = tmp_path / "shared" / "ops.yaml"
    for path in ("../shared/ops.yaml", absolute.as_posix()):
        assert list(loaded(tmp_path / "configs", f"operations: {{$ref: ['{path}#/']}}").operations) == ["a.One"]


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    path = written(tmp_path, "sites: {a: {$ref: 'pipe#/a'}, b: {$ref: '/dev/zero#/a'}}")
    with pytest.raises(FederationError, match="pipe is not a file") as caught:
        Federation.from_yaml(path)
    assert "zero is not a file" in str(caught.value)


def test_the_file_of_a_vault_is_found_beside_the_file_that_names_it_wherever_the_program_runs(tmp_path: Path) -> None:
    federation = loaded(
        tmp_path,
        """
        sites:
          a: {secrets_vault: {path: file, args: {path: keys.yaml}}}
          b: {$ref: "parts/more.yaml#/b"}
          c: {secrets_vault: {path: file, args: {path: /run/keys}}}
          d: {secrets_vault: {path: file, args: {path: ~/keys.json}}}
          e: {secrets_vault: {path: pkg.Vault, args: {path: keys.yaml}}}
        """,
        parts_more="b: {secrets_vault: {path: file, args: {path: ../keys}}}",
    )
    paths = {name: site.config("home").vault.args["path"] for name, site in federation.sites.items()}
    folder = tmp_path.resolve()
    assert paths == {
        "a": str(folder / "keys.yaml"),
        "b": str(folder / "keys"),
        "c": "/run/keys",
        "d": "~/keys.json",
        "e": "keys.yaml",
    }
