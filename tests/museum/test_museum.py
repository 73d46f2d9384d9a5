"""The museum of public bug reports: every file tells its report, shows the mistake and the right way, and stands on the page."""

import importlib
import inspect
import re

import pytest
from exhibit import PAGE, SUBJECTS, exhibits, page

EXHIBITS = dict(exhibits())


def test_page_is_made_from_the_files() -> None:
    assert PAGE.read_text() == page(), "run python tests/museum/exhibit.py"


@pytest.mark.parametrize("name", EXHIBITS)
def test_file_tells_its_report_and_shows_both_ways(name: str) -> None:
    exhibit = EXHIBITS[name]
    assert exhibit.reports
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+( #[0-9]+)?", report) for report in exhibit.reports)
    assert exhibit.subject in SUBJECTS
    assert exhibit.happened.endswith(".")
    assert exhibit.here.endswith(".")
    assert "|" not in exhibit.happened + exhibit.here
    module = importlib.import_module(name.removesuffix(".py"))
    tests = [test for member, test in inspect.getmembers(module) if member.startswith("test_")]
    assert any("theirs" in inspect.getsource(test) for test in tests), (
        "no test shows that the check catches the mistake"
    )
    assert any("ours" in inspect.getsource(test) for test in tests), "no test shows that the check passes here"


def test_no_report_stands_in_two_files() -> None:
    reports = [report for exhibit in EXHIBITS.values() for report in exhibit.reports]
    assert len(reports) == len(set(reports))
