"""What users give: federations, pipelines and parameters; what is wrong with it is said in plain words."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from dfm_async import Federation, Pipeline, PlaceParam, Yield
from dfm_async.cli.command_runner import BadInput
from dfm_async.cli.params import ParameterFile, parse_params
from dfm_async.cli.references import find_federation, find_pipeline
from tests.cli.rig import STATIONS, invoked


@pytest.fixture(autouse=True)
def own_imports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """What a test imports from its folder is not there for the next one."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def write(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o600)
    return str(path)


HEAD = "from dfm_async import Federation, Pipeline, PlaceParam, Yield\n"


def test_a_federation_is_found_in_a_file_a_module_or_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "alone_fed.py", f"{HEAD}fed = Federation('alone')\nalias = fed\n")
    write(tmp_path, "two_feds.py", f"{HEAD}one = Federation('first')\ntwo = Federation('second')\n")
    write(tmp_path, "packed/__init__.py", "")
    write(tmp_path, "packed/inner.py", f"from .other import name\n{HEAD}fed = Federation(name)\n")
    write(tmp_path, "packed/other.py", "name = 'inner'\n")
    found = ["alone_fed.py", "alone_fed", "alone_fed:fed", "two_feds.py:two", "two_feds:second", "packed/inner.py"]
    names = [find_federation(reference)[0].name for reference in [*found, "packed.inner"]]
    assert names == ["alone", "alone", "alone", "second", "second", "inner", "inner"]
    module = find_federation("packed/inner.py")[1]
    assert module is not None
    assert module.__name__ == "packed.inner"


def test_a_pipeline_is_found_by_its_variable_its_name_its_file_or_as_json(tmp_path: Path) -> None:
    path = write(tmp_path, "pipes.py", f"{HEAD}first = Pipeline('one')\nsecond = Pipeline('a name')\n")
    write(tmp_path, "only_pipe.py", f"{HEAD}it = Pipeline('only')\n")
    Pipeline("stored").save_to_file(tmp_path / "stored.json")
    federation = write(tmp_path, "some_fed.py", f"{HEAD}fed = Federation('f')\nfrom pipes import first, second\n")
    _, module = find_federation(federation)
    references = ["first", "a name", f"{path}:second", str(tmp_path / "only_pipe.py"), str(tmp_path / "stored.json")]
    names = [find_pipeline(reference, module).name for reference in references]
    assert names == ["one", "a name", "a name", "only", "stored"]


UNGUARDED = f"""{HEAD}
from dfm_async.sync import Session

fed = Federation("unguarded")


@fed.site("site").operation
def one() -> int:
    return 1


with Session(fed) as session:
    session.call(one)
"""

WRONG: list[tuple[list[str], str]] = [
    (["run", "missing.py"], "there is no file missing.py"),
    (["run", "."], "there is no file ."),
    (["run", "no.such.module"], "there is no module 'no.such.module'"),
    (["run", "broken_syntax.py"], "SyntaxError"),
    (["run", "raising.py"], "raising.py:2: 1 / 0"),
    (["run", "leaving.py"], "cannot be imported: SystemExit: 3"),
    (["run", "unguarded.py"], "runs jobs when it is imported"),
    (["run", "empty_file.py"], "empty_file.py has no federation"),
    (["run", "two_feds.py"], "has several federations (one, two): name one, as in 'two_feds.py:one'"),
    (["run", "two_feds.py:three"], "has no federation 'three'; it has: one, two"),
    (["run", "two_feds.py:text"], "'text' of two_feds.py is a value of type str, not a Federation"),
    (["run", "json.py"], "another module of that name"),
    (["run", STATIONS], "has several pipelines (pipeline, waiting"),
    (["run", STATIONS], "name one, as in 'stations.py pipeline'"),
    (["run", f"{STATIONS}:pipeline"], f"give the pipeline after the federation, as in '{STATIONS} pipeline'"),
    (["run", STATIONS, "nothing"], "has no pipeline 'nothing'; it has: pipeline, waiting"),
    (["run", STATIONS, "bad.json"], "unknown"),
    (["run", STATIONS, "none.json"], "none.json: No such file or directory"),
    (["run", STATIONS, "squares"], "missing parameter 'x'"),
    (["run", STATIONS, "squares", "-p", "x=two"], "parameter 'x': Input should be a valid integer"),
    (["run", STATIONS, "squares", "-p", "x"], "--param takes name=value, not 'x'"),
    (["run", STATIONS, "squares", "-p", "x=1", "-p", "x=2"], "--param x is given twice"),
    (["run", STATIONS, "squares", "-p", "x=1", "-p", "y=2"], "unknown parameter 'y' (the pipeline has: 'x')"),
    (["run", STATIONS, "squares", "-p", "x=1", "--place", "nowhere"], "no place 'nowhere'; it has: yield"),
    (["run", STATIONS, "squares", "--params", "none.json"], "none.json: No such file or directory"),
    (["run", STATIONS, "squares", "--params", "none.jsonl"], "none.jsonl: No such file or directory"),
    (["run", STATIONS, "squares", "--params", "sets.json"], "item 1 is not an object of parameters, but a value of"),
    (["run", STATIONS, "squares", "-p", "x=1", "--output", "raising.py"], "--output raising.py: "),
    (["run", STATIONS, "squares", "-p", "x=1", "--trace", "no/file"], "--trace no/file: No such file or directory"),
    (["run", STATIONS, "squares", "-p", "x=1", "--job-id", ""], "job_id must be a non-empty string"),
    (["run", STATIONS, "-", "--params", "-"], "standard input cannot be both"),
    (["serve", STATIONS, "--host", "0.0.0.0"], "clients need a token"),
    (["serve", STATIONS, "--token-file", "short.txt"], "the token has 5 characters"),
    (["serve", STATIONS, "--token-file", "none.txt"], "--token-file none.txt: No such file or directory"),
    (["serve", STATIONS, "nothing"], "has no pipeline 'nothing'"),
    (["serve", "only_sites.py"], "there is no pipeline that clients could run: write one in 'only_sites'"),
    (["jobs", "--url", "127.0.0.1:8000"], "--url: invalid service URL '127.0.0.1:8000'"),
    (["graph", STATIONS, "squares", "-o", "no/such/folder.txt"], "no/such/folder.txt: No such file"),
    (["explain", "good.json"], "name the federation before it"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[message for _, message in WRONG])
def test_invalid_input_is_2_with_a_plain_message(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "broken_syntax.py", "def\n")
    write(tmp_path, "raising.py", "x = 1\n1 / 0\n")
    write(tmp_path, "leaving.py", "raise SystemExit(3)\n")
    write(tmp_path, "unguarded.py", UNGUARDED)
    write(tmp_path, "empty_file.py", "")
    write(tmp_path, "json.py", f"{HEAD}fed = Federation('f')\n")
    write(tmp_path, "two_feds.py", f"{HEAD}one = Federation('first')\ntwo = Federation('second')\ntext = ''\n")
    write(tmp_path, "only_sites.py", f"{HEAD}fed = Federation('f')\n")
    write(tmp_path, "bad.json", '{"unknown": 1}')
    write(tmp_path, "sets.json", '[{"x": 1}, 2]')
    write(tmp_path, "short.txt", "short")
    with Pipeline("good") as good:
        Yield(PlaceParam("x"))
    good.save_to_file(tmp_path / "good.json")
    done = invoked(*arguments)
    assert done.exit_code == 2, done.output
    assert message in done.output
    assert "Traceback" not in done.output


@pytest.mark.parametrize("token", ["tök" * 10, "two words " * 3, "two\nlines" * 3])
def test_an_invalid_token_is_refused_from_every_source(token: str, tmp_path: Path) -> None:
    file = write(tmp_path, "token.txt", token)
    by_file, by_name = ["--token-file", str(file)], {"DFM_TOKEN": token}
    for command in (["jobs", "--url", "http://127.0.0.1:9"], ["serve", STATIONS, "--port", "0"]):
        for done in (invoked(*command, *by_file), invoked(*command, env=by_name)):
            assert (done.exit_code, done.stdout) == (2, "")
            assert "token" in done.stderr


def test_values_are_json_if_the_type_wants_that_and_text_otherwise() -> None:
    types: dict[str, list[Any]] = {"text": [str], "number": [int], "day": [date], "either": [str, Any]}
    types["all"] = [list[int]]
    given = ["text=5", "number=5", "day=2024-02-29", "either=null", "all=[1]", "free=true", "equals=a=b", "empty="]
    found = parse_params(given, types)
    assert list(found) == [text.partition("=")[0] for text in given]
    assert list(found.values()) == ["5", 5, "2024-02-29", "null", [1], True, "a=b", ""]
    assert parse_params(['text="5"'], types) == {"text": "5"}


async def test_a_file_has_one_set_a_list_or_lines_and_common_values_fill_it_up(tmp_path: Path) -> None:
    one = write(tmp_path, "one.json", '{\n"x": 1\n}')
    several = write(tmp_path, "list.json", '[{"x": 1}, {"x": 2, "y": 3}]')
    many = write(tmp_path, "many.jsonl", '{"x": 1}\n\n{"x": 2, "y": 3}')
    assert await ParameterFile(one, {"y": 0}).sets() == [{"x": 1, "y": 0}]
    expected = [{"x": 1, "y": 0}, {"x": 2, "y": 3}]
    assert await ParameterFile(several, {"y": 0}).sets() == expected
    found = await ParameterFile(many, {"y": 0}).sets()
    assert not isinstance(found, list)
    assert [row async for row in found] == expected


async def test_an_invalid_line_is_reported_with_its_number(tmp_path: Path) -> None:
    file = ParameterFile(write(tmp_path, "many.jsonl", '{"x": 1}\n[]\n'), {})
    found = await file.sets()
    assert not isinstance(found, list)
    with pytest.raises(BadInput, match="line 2 is not an object of parameters, but a value of type list"):
        assert [row async for row in found] == []
    assert file.problem is not None


def test_a_federation_is_not_a_pipeline(tmp_path: Path) -> None:
    federation, module = find_federation(STATIONS)
    assert isinstance(federation, Federation)
    with pytest.raises(BadInput, match="is a value of type Federation, not a Pipeline"):
        find_pipeline("fed", module)
