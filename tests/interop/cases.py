"""DFM federations and NVFLARE programs that others have written: what becomes of each, and the tests that show it.

``python -m tests.interop.cases`` runs these tests, and prints the tables of the migration pages. Arguments are passed
to pytest. Some tests need the real NVFLARE and the real nv_dfm_core, which are installed when they are first needed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import pytest


@dataclass(frozen=True)
class Case:
    """Something that users bring.

    Attributes:
        name: what it is.
        outcome: what its tests show, if they pass.
        tests: their files below ``tests`` and their names, as pytest writes them.
    """

    name: str
    outcome: str
    tests: tuple[str, ...]

    def row(self, passed: Mapping[str, bool] | None) -> str:
        """Gives its row of a table. ``passed`` are the tests that have run; None for what all of them should show."""
        outcome, verdicts = self.outcome, [_verdict(test, passed or {}) for test in self.tests]
        if passed is not None and not all(verdicts):
            outcome = "**fails**" if False in verdicts else "not run"
        links = dict.fromkeys(f"[{_words(test)}](../tests/{test.partition('::')[0]})" for test in self.tests)
        return f"| {self.name} | {outcome} | {', '.join(links)} |"


def _verdict(test: str, passed: Mapping[str, bool]) -> bool | None:
    """Whether a test has passed, with all its parameters; None if it has not run."""
    whole = f"tests/{test}"
    found = [good for node, good in passed.items() if node == whole or node.startswith(f"{whole}[")]
    return all(found) if found else None


def _words(test: str) -> str:
    return test.partition("::test_")[2].partition("[")[0].replace("_", " ")


def _case(name: str, outcome: str = "no test", *tests: str) -> Case:
    return Case(name, outcome, tests)


DFM: Final = (
    _case(
        "a federation of greetings, as `example-fed`",
        "the same yields as `nv_dfm_core`",
        "interop/test_dfm.py::test_what_nv_dfm_core_runs_yields_the_same_here[examplefed]",
    ),
    _case(
        "a federation of arrays and pictures, as `zero-to-thirty`",
        "the same yields as `nv_dfm_core`",
        "interop/test_dfm.py::test_what_nv_dfm_core_runs_yields_the_same_here[myfed]",
    ),
    _case(
        "a federation as `weather-fed`: `$ref` lists from the root of the repository, `impl` of sites, "
        "`xarray.Dataset`, images, discovery; on `local`",
        "runs",
        "deploy/test_repository_references.py::test_federation_of_a_repository_runs_as_in_its_root[local]",
    ),
    _case(
        "the same federation on FLARE, with adapters that import `nv_dfm_core` installed at its sites",
        "runs",
        "deploy/test_repository_references.py::test_federation_of_a_repository_runs_as_in_its_root[flare]",
    ),
    _case(
        "a federation with providers, vaults, schemas and all bindings",
        "runs",
        "federation/files/test_running.py::test_every_binding_has_its_value_at_the_call",
    ),
    _case(
        "files that `to_yaml` writes",
        "`nv_dfm_core` reads them",
        "interop/test_dfm_files.py::test_nv_dfm_core_reads_the_files_that_we_write",
    ),
    _case(
        "adapters where `nv_dfm_core` is installed",
        "run, and derive from its classes",
        "interop/test_dfm_files.py::test_adapters_run_unmodified_where_nv_dfm_core_is_installed",
    ),
    _case(
        "an application with callbacks, status tokens and arguments",
        "runs unmodified",
        "compat/test_applications.py::test_script_with_sites_callbacks_and_arguments_runs",
        "compat/test_applications.py::test_module_with_several_jobs_and_errors_runs",
    ),
    _case(
        "a pipeline in JSON, on the command line",
        "runs",
        "cli/test_federation_files.py::test_a_federation_file_runs_a_pipeline_of_dfm",
    ),
    _case(
        "both variants of the JSON",
        "are read",
        "federation/dfm_json/test_reading.py::test_what_nv_dfm_core_writes_is_the_pipeline_that_was_meant",
        "federation/dfm_json/test_reading.py::test_the_older_variant_is_read",
    ),
    _case(
        "pipelines that `save_pipeline` writes",
        "`nv_dfm_core` reads them",
        "interop/test_dfm.py::test_what_we_write_nv_dfm_core_reads",
    ),
    _case(
        "`If`, `ForEach` and providers, which `nv_dfm_core` cannot run",
        "yield what plain Python does",
        "federation/dfm_json/test_running.py::test_what_nv_dfm_core_cannot_run_yields_what_plain_python_says",
    ),
    _case(
        "saving to new folders and to URLs",
        "works",
        "federation/dfm_json/test_writing.py::test_pipelines_are_written_into_new_folders_and_to_urls",
    ),
    _case(
        "`None` for an exposed parameter",
        "means that it was not passed",
        "site/test_adapters.py::test_an_exposed_parameter_takes_the_place_of_what_is_bound_unless_it_is_none",
    ),
    _case(
        "callbacks for places that the pipeline lacks",
        "are accepted with `compat`",
        "site/test_shim.py::test_callbacks_may_name_places_that_the_pipeline_lacks",
    ),
    _case(
        "files in `cache_storage()`",
        "are where DFM has them, with `compat`",
        "site/test_shim.py::test_cached_files_are_where_dfm_has_them",
    ),
    _case(
        "names of `nv_dfm_core` that are not provided",
        "refused, with the name",
        "site/test_shim.py::test_a_name_that_is_missing_says_so",
        "site/test_shim.py::test_a_module_that_is_missing_says_so",
    ),
    _case(
        "47 references from the root of the repository",
        "one warning per file",
        "federation/files/test_references.py::test_a_path_that_begins_where_the_program_runs_as_in_dfm_is_found_and_warned_of",
    ),
    _case(
        "a vault that cannot be built",
        "the site does not start",
        "site/test_secrets.py::test_a_vault_that_cannot_be_built_stops_the_site_and_shows_no_configuration",
    ),
    _case(
        "values of your own classes between organisations",
        "arrive with a registered codec",
        "conformance/test_library_values.py::test_values_of_libraries_and_registered_types_arrive_as_they_were",
    ),
    _case(
        "a discovery pipeline that is executed",
        "refused: use `session.discover`",
        "discovery/test_language.py::test_a_pipeline_for_discovery_is_not_executed",
    ),
    _case(
        "adapters that need a GPU or model files; DFM's own proof of concept on NVFLARE 2.6",
    ),
)
NVFLARE: Final = (
    _case(
        "a numpy script for 2.8",
        "runs unmodified",
        "interop/test_nvflare.py::test_an_unmodified_script_of_2_8_trains_under_our_executor",
    ),
    _case(
        "a numpy script for 2.9",
        "runs unmodified",
        "interop/test_nvflare.py::test_an_unmodified_script_of_2_9_trains_under_our_executor",
    ),
    _case(
        "scripts for 2.5, 2.6 and 2.7",
        "their messages are read and written; scripts: not tested",
        "exchange/test_fobs.py::test_what_nvflare_has_written_is_read",
        "exchange/test_fobs.py::test_the_same_bytes_are_written",
    ),
    _case(
        "a script for 2.8 as an operation of a pipeline",
        "runs unmodified",
        "interop/test_nvflare.py::test_a_script_of_2_8_is_an_operation_of_a_pipeline",
    ),
    _case(
        "`flare.is_train()`, `is_evaluate()`, `is_submit_model()`; 2.8 and 2.9",
        "true for the tasks of these operations",
        "interop/test_nvflare.py::test_programs_of_nvflare_train_in_turn_and_evaluate_the_models_of_all_sites",
    ),
    _case(
        "cyclic training; 2.8 and 2.9",
        "runs as a pipeline",
        "interop/test_nvflare.py::test_programs_of_nvflare_train_in_turn_and_evaluate_the_models_of_all_sites",
    ),
    _case(
        "cross-site evaluation; 2.8 and 2.9",
        "runs as a pipeline, with one process per site",
        "interop/test_nvflare.py::test_programs_of_nvflare_train_in_turn_and_evaluate_the_models_of_all_sites",
    ),
    _case(
        "`ParamsType.DIFF` of the script; 2.8 and 2.9",
        'arrives as `params_type="DIFF"`',
        "interop/test_nvflare.py::test_programs_of_nvflare_train_in_turn_and_evaluate_the_models_of_all_sites",
    ),
    _case(
        '`params_transfer_type="DIFF"`; 2.8 and 2.9',
        "NVFLARE's client subtracts",
        "interop/test_nvflare.py::test_programs_of_nvflare_train_in_turn_and_evaluate_the_models_of_all_sites",
    ),
    _case(
        "`SummaryWriter`, `MLflowWriter`, `WandBWriter`; 2.8 and 2.9",
        "all records arrive, with the same names",
        "interop/test_nvflare.py::test_programs_of_nvflare_train_in_turn_and_evaluate_the_models_of_all_sites",
    ),
    _case(
        "sites called `site-1`; 2.8 and 2.9",
        "scripts see that name",
        "interop/test_nvflare.py::test_programs_of_nvflare_train_in_turn_and_evaluate_the_models_of_all_sites",
    ),
    _case(
        "tensors of PyTorch, in a stand-in for it, on 2.9",
        "NVFLARE's client converts them; without the option, the error names it",
        "interop/test_nvflare.py::test_programs_of_nvflare_train_in_turn_and_evaluate_the_models_of_all_sites[nvflare-2.9]",
    ),
    _case(
        "the exchange format of 2.8",
        "is written for the script",
        "exchange/test_nvflare_tasks.py::test_the_gate_of_2_8_writes_the_format_of_parameters",
    ),
    _case(
        "headers: `site_name`, `job_id`, `submit_model_name`, `validate_type`, `start_round`",
        "reach scripts of 2.8",
        "exchange/test_nvflare_tasks.py::test_tasks_have_the_headers_that_nvflare_puts_into_the_meta",
    ),
    _case(
        "operations with other names than `train`",
        "make `train` tasks",
        "exchange/test_nvflare_tasks.py::test_operations_give_tasks_as_the_options_name_them",
        "interop/test_nvflare.py::test_programs_of_nvflare_train_in_turn_and_evaluate_the_models_of_all_sites",
    ),
    _case(
        "a script that is killed",
        "its task fails, and the next one launches it again",
        "interop/test_nvflare.py::test_a_script_of_2_8_that_is_killed_fails_its_task_and_is_launched_again",
        "interop/test_nvflare.py::test_an_unmodified_script_of_2_9_trains_under_our_executor",
    ),
    _case(
        "a script for one task",
        "is launched for each",
        "interop/test_nvflare.py::test_a_script_of_2_8_for_one_task_is_launched_for_each",
    ),
    _case(
        "our agent in jobs of 2.8 (`FilePipe`)",
        "trains; `agent.site` and `agent.job` are set",
        "interop/test_nvflare.py::test_our_agent_trains_in_a_job_of_nvflare[2.8]",
        "interop/test_nvflare.py::test_our_agent_trains_in_a_job_of_nvflare[2.8, a program for each task]",
    ),
    _case(
        "our agent in a job of 2.9",
        "trains; `agent.site` and `agent.job` are set",
        "interop/test_nvflare.py::test_our_agent_trains_in_a_job_of_nvflare[2.9]",
    ),
    _case(
        "our agent in jobs of 2.8 with a `CellPipe`",
        "refused, with the name of the pipe",
        "exchange/test_nvflare_tasks.py::test_a_job_with_another_pipe_than_files_is_refused_by_its_name",
    ),
    _case(
        "structured arrays and arrays of objects, on 2.8",
        "refused, with the type",
        "exchange/test_fobs.py::test_what_cannot_be_sent_is_refused_by_name",
    ),
    _case(
        "PyTorch, Lightning, TensorFlow, Keras and JAX themselves; programs of 2.9 that attach",
    ),
)
TABLES: Final = {"coming-from-dfm.md": DFM, "coming-from-nvflare.md": NVFLARE}
"""The cases of each page."""


def table(cases: Iterable[Case], passed: Mapping[str, bool] | None = None) -> str:
    """Gives a table of Markdown, with a row for each case."""
    return "\n".join(["| case | outcome | tests |", "|---|---|---|", *(case.row(passed) for case in cases)])


class _Verdicts:
    """A plugin of pytest that notes which tests pass."""

    def __init__(self) -> None:
        self.passed: dict[str, bool] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed[report.nodeid] = self.passed.get(report.nodeid, True) and report.passed


def main(arguments: list[str]) -> int:
    """Runs the tests of all cases; prints their tables. Gives 0 if all have passed."""
    tests = dict.fromkeys(f"tests/{test}" for cases in TABLES.values() for case in cases for test in case.tests)
    verdicts = _Verdicts()
    with contextlib.redirect_stdout(sys.stderr):
        status = pytest.main([*arguments, *tests], plugins=[verdicts])
    for page, cases in TABLES.items():
        print(f"{page}\n\n{table(cases, verdicts.passed)}\n")
    return int(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
