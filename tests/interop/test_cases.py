"""The tables of the migration pages are those of the cases, and every test that they name exists."""

from __future__ import annotations

import pytest

from tests.docs.pages import DOCS, ROOT
from tests.interop.cases import TABLES, Case, table


@pytest.mark.parametrize("page", TABLES)
def test_page_has_the_table_of_its_cases(page: str) -> None:
    assert table(TABLES[page]) in (DOCS / page).read_text(encoding="utf-8")


def test_every_test_of_a_case_exists() -> None:
    for test in {test for cases in TABLES.values() for case in cases for test in case.tests}:
        file, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), test


def test_outcome_is_that_of_the_tests_that_have_run() -> None:
    case = Case("a script", "runs", ("a.py::test_one", "a.py::test_two[x]"))
    links = "[one](../tests/a.py), [two](../tests/a.py)"
    one, two, other = "tests/a.py::test_one", "tests/a.py::test_two[x]", "tests/a.py::test_two[y]"
    assert case.row(None) == f"| a script | runs | {links} |"
    assert case.row({one: True, two: True, other: False, f"{one}_more": False}) == f"| a script | runs | {links} |"
    assert case.row({f"{one}[1]": True, f"{one}[2]": False, two: True}) == f"| a script | **fails** | {links} |"
    assert case.row({one: True}) == f"| a script | not run | {links} |"
    assert Case("another", "no test", ()).row({}) == "| another | no test |  |"
