"""The front of the command line: help, missing extras, what it costs to start."""

from __future__ import annotations

import re
from pathlib import Path

import dfm_async
from tests.cli.rig import dfm, invoked
from tests.support.processes import ROOT, run_python

COMMANDS = [
    "attach",
    "cancel",
    "demo",
    "doctor",
    "explain",
    "flare",
    "graph",
    "jobs",
    "logs",
    "new",
    "profile",
    "retry",
    "run",
]
COMMANDS += ["serve", "top", "trace"]
ON_FLARE = ["deploy", "doctor", "down", "probe", "provision", "start", "status", "up"]


def test_a_missing_extra_is_named() -> None:
    code = "import sys; sys.modules['typer'] = None; from dfm_async.cli import main; sys.exit(main())"
    done = run_python("-c", code, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "the command line needs an extra (typer): pip install '.[cli]' in a checkout of dfm_async\n"


def test_help_lists_every_command_and_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom dfm_async.cli import main\nsys.argv = ['dfm-async', '--help']\n"
        "try:\n    main()\nexcept SystemExit as error:\n    assert not error.code\n"
        "heavy = {'rich', 'pydantic', 'msgspec', 'anyio', 'asyncio', 'httpx2', 'starlette', 'dfm_async.session'}\n"
        "print('LOADED', sorted(heavy & set(sys.modules)))"
    )
    done = run_python("-c", code)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("LOADED []\n")
    assert [name for name in COMMANDS if f"\n  {name} " not in done.stdout] == []
    assert "..." not in done.stdout.partition("\nCommands:")[2], "a description is cut off"


def test_the_guide_lists_every_command() -> None:
    guide = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    assert [name for name in COMMANDS if f"| `dfm-async {name}` |" not in guide] == []
    assert [name for name in ON_FLARE if f"| `dfm-async flare {name}` |" not in guide] == []


def test_the_module_is_the_same_program_as_the_script() -> None:
    module = run_python("-m", "dfm_async", "--version")
    assert module.stdout == dfm("--version").stdout == f"dfm-async {dfm_async.__version__}\n"


def test_every_command_has_help() -> None:
    for words in [*([name] for name in COMMANDS), *(["flare", name] for name in ON_FLARE)]:
        done = invoked(*words, "--help")
        assert done.exit_code == 0, done.output
        assert f" {' '.join(words)} " in done.output
        options = done.output.partition("\nOptions:")[2]
        assert re.findall(r"<(?:str|path|int|float|list).*>", options) == [], "what is given has a name, not a type"


def test_the_demo_draws_a_year() -> None:
    done = dfm("demo")
    assert done.returncode == 0
    assert "JobStatus.FINISHED: 2,400 readings through three sites" in done.stdout
    shown = [line.split()[1] for line in done.stdout.splitlines() if line.startswith(("jan ", "jul "))]
    assert shown == ["-2.26", "21.99"]


def test_pipelines_are_completed_without_running_their_file(tmp_path: Path) -> None:
    file = tmp_path / "weather.py"
    file.write_text(
        "raise SystemExit('nobody runs this')\n"
        "with Pipeline('means') as first:\n    pass\n"
        "with dfm.Pipeline() as maximum:\n    pass\n"
        "other = Pipeline('other')\nmoon = Federation('moon')\n"
    )
    env = {
        "_DFM_ASYNC_COMPLETE": "complete_bash",
        "COMP_WORDS": f"dfm-async run {file} m",
        "COMP_CWORD": "3",
        "_TYPER_COMPLETE_TESTING": "1",
    }
    assert dfm(env=env).stdout.split() == ["means", "maximum"]
