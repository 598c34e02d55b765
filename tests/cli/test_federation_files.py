"""Federation files and DFM's pipelines on the command line, and typed modules of federations."""

from __future__ import annotations

import ast
import inspect
import json
import shutil
from pathlib import Path

import pytest

from dfm_async import Federation
from dfm_async.federation.operation import Declaration, Signature
from dfm_async.federation.stubs import stubs
from tests.cli.rig import STATIONS, dfm, invoked
from tests.federations import NAMES, ROOT, file_of
from tests.support.processes import ROOT as REPOSITORY
from tests.support.processes import run_python

EXAMPLE = str(file_of("examplefed"))
GREET = str(ROOT / "examplefed" / "apps" / "greet.json")


def test_a_federation_file_runs_a_pipeline_of_dfm(tmp_path: Path) -> None:
    done = dfm("run", EXAMPLE, GREET, "-p", "name=Ann", "--compat", "--quiet", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "yield [0] examplefed has the honour to receive you, Ann.\n"


def test_a_pipeline_of_dfm_comes_from_standard_input_and_is_explained() -> None:
    done = dfm("explain", EXAMPLE, "-", "--json", given=Path(GREET).read_text())
    assert done.returncode == 0
    first = json.loads(done.stdout.splitlines()[0])
    assert (first["node"], first["site"]) == ("users.GreetMe#0", "reception")


def test_what_is_wrong_with_a_file_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "fed.yaml").write_text("dfm: 1.0.0\ninfo: {api-version: 1.0.0, code-package: f}\nsite: {}\n")
    (tmp_path / "p.json").write_text('{"dfm_body": [{}]}')
    wrong = {
        ("run", str(tmp_path / "fed.yaml"), GREET): "'site'",
        ("run", str(tmp_path / "none.yaml"), GREET): "none.yaml: cannot be read: the file does not exist",
        ("run", EXAMPLE): "name a pipeline: give file.py:name",
        ("run", EXAMPLE, "greet"): "'greet' is not a pipeline",
        ("run", EXAMPLE, str(tmp_path / "p.json")): "/dfm_body/0: has no 'dfm_node_id'",
        ("run", STATIONS, "--compat"): "--compat is for federation files",
        ("serve", EXAMPLE): "there is no pipeline that clients could run: name one after the federation",
        ("stubs", STATIONS): "is Python, which is typed already",
        ("stubs", EXAMPLE, "--check"): "name it with --output",
    }
    for arguments, message in wrong.items():
        done = invoked(*arguments)
        assert done.exit_code == 2, (arguments, done.output)
        assert message in done.stderr, (arguments, done.stderr)


# typed modules


@pytest.mark.parametrize("name", NAMES)
def test_a_typed_module_is_python_and_the_same_each_time(name: str) -> None:
    first = invoked("stubs", str(file_of(name)))
    assert first.exit_code == 0
    assert first.stdout == invoked("stubs", str(file_of(name))).stdout
    ast.parse(first.stdout)


def test_a_typed_module_is_checked_with_what_differs(tmp_path: Path) -> None:
    output = tmp_path / "mini.py"
    assert invoked("stubs", str(file_of("minifed")), "-o", str(output), "--check").exit_code == 1
    assert invoked("stubs", str(file_of("minifed")), "-o", str(output)).exit_code == 0
    fresh = invoked("stubs", str(file_of("minifed")), "-o", str(output), "--check")
    assert (fresh.exit_code, fresh.stdout) == (0, "")
    old = output.read_text()
    output.write_text(old.replace("def Square(", "def Cube(", 1))
    stale = invoked("stubs", str(file_of("minifed")), "-o", str(output), "--check")
    assert stale.exit_code == 1
    assert "-            def Cube(\n+            def Square(\n" in stale.stdout
    assert "def Cube(" in output.read_text(), "a check writes nothing"


GOOD = """\
from dfm_async import BestOf, Pipeline, PlaceParam, Yield
from mini import federation, operations, schemas, sites

with Pipeline("typed") as pipeline:
    squared = operations.math.Square(PlaceParam("x"), site="alpha")
    text: str = operations.text.Label(squared)
    sites.alpha.text.Label(3.0, ending="!", after=squared)
    state = schemas.states.State(value=1.5, mode="quick")
    operations.states.Step(state, mode="quick", site=BestOf(["gamma"]))
    operations.states.Step({"value": 1.0}, limits={"low": 0, "high": 1})
    Yield(text)


def mode(found: schemas.states.State) -> schemas.states.Mode | None:
    return found.mode


assert operations.math.Square is federation.operations["math.Square"]
print(len(pipeline.body))
"""
BAD = [
    'operations.math.Square("x")',
    "operations.math.Square()",
    'operations.math.Square(1.0, site="nowhere")',
    "operations.math.Cube(1.0)",
    'operations.math.Square(1.0, colour="red")',
    "operations.math.Square(operations.text.Label(1.0))",
    'operations.text.Label(3.0, ending="!")',
    "sites.alpha.text.Label(3.0, ending=5)",
    "sites.alpha.states.Step({})",
    'operations.states.Step({}, mode="slow")',
]


def checked(folder: Path, *modules: str) -> list[tuple[str, int, str]]:
    """What mypy says of modules: file, line, message."""
    options = ("--strict", "--no-error-summary", "--hide-error-context", "--hide-error-codes")
    files = (folder / f"{name}.py" for name in modules)
    done = run_python("-m", "mypy", *options, *files, cwd=REPOSITORY, check=False)
    assert done.returncode in (0, 1), done.stderr
    lines = (line.split(":", 2) for line in done.stdout.splitlines())
    return [(Path(file).name, int(number), message.strip()) for file, number, message in lines]


def test_code_that_uses_a_typed_module_is_checked_and_runs(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "minifed", tmp_path / "minifed")
    federation = str(tmp_path / "minifed" / "configs" / "federation.dfm.yaml")
    assert invoked("stubs", federation, "-o", str(tmp_path / "mini.py")).exit_code == 0
    (tmp_path / "good.py").write_text(GOOD)
    (tmp_path / "bad.py").write_text("\n".join(["from mini import operations, schemas, sites", *BAD]))
    complaints = checked(tmp_path, "mini", "good", "bad")
    assert [found[:2] for found in complaints if found[2].startswith("error")] == [
        ("bad.py", index + 2) for index in range(len(BAD))
    ], complaints
    ran = run_python("good.py", cwd=tmp_path, check=False)
    assert (ran.stdout, ran.stderr) == ("6\n", "")


AWKWARD = """\
dfm: 1.0.0
info: {api-version: 1.0.0, code-package: awkward}
schemas:
  files.Entry:
    type: object
    properties: {list: {type: array, items: {type: string}}, int: {type: integer}, str: {type: string}}
operations:
  files.list: {parameters: {path: {type: string}, depth: {type: array}}, required: [path], returns: array}
  files.int: {parameters: {entry: {$ref: "#/schemas/files.Entry"}, after: {type: integer}}, returns: string}
  lambda.Get: {parameters: {most: {type: number, default: .inf}}, returns: string}
sites: {here: {interface: {}}}
"""


def test_names_that_mean_something_in_python_do_not_break_a_typed_module(tmp_path: Path) -> None:
    (tmp_path / "federation.dfm.yaml").write_text(AWKWARD)
    assert invoked("stubs", str(tmp_path / "federation.dfm.yaml"), "-o", str(tmp_path / "ops.py")).exit_code == 0
    (tmp_path / "use.py").write_text(
        "from ops import operations, schemas\n"
        "entry = schemas.files.Entry(list=['a'], int=1, str='b')\n"
        "operations.files.int(entry=entry, after=2)\n"
        "found = operations.files.list('/', depth=[1])\n"
        "number: int = found\n"
    )
    ((file, line, message),) = checked(tmp_path, "ops", "use")
    assert (file, line) == ("use.py", 5)
    assert "list[Any]" in message


@pytest.mark.parametrize(
    "text", ['"""', '"', "\\", 'x"""\nimport os\n"""', "a\x00b\r\u2028c", "ends with \\", "{x!r}\n\n  y"]
)
def test_no_text_of_a_federation_file_becomes_code(text: str) -> None:
    federation = Federation("hostile")
    federation.declare("a.Op", Signature.of(_nothing, bound=False), declaration=Declaration(description=text))
    tree = ast.parse(stubs(federation, Path("f'\n.yaml")))
    (function,) = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert ast.get_docstring(function) == inspect.getdoc(federation.operations["a.Op"])
    assert not any(isinstance(node, ast.Import) and node.names[0].name == "os" for node in ast.walk(tree))


def _nothing() -> None: ...
