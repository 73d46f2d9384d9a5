"""What a file of the museum says about a public bug report, and the page that is made from all of them.

    python tests/museum/exhibit.py      writes docs/measurements/bugs_elsewhere.md

Each file holds the mistake in a few lines (`theirs`), what this project does (`ours`), and one check for both: it fails for the
first and passes for the second.
"""

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
PAGE = FOLDER.parents[1] / "docs" / "measurements" / "bugs_elsewhere.md"
INTRODUCTION = """# Bugs elsewhere

Mistakes that other trainers, graders and engines had, from public reports, and how we know that they do not happen here. Each row
has a test of its own in `tests/museum/`: it holds the mistake in a few lines of ours, which the test's check catches, and runs
the same check on this project's code. A report stands for the version that it was written about; many are mended there by now.

    bash scripts/test.sh tests/museum                # all of them
    python tests/museum/exhibit.py                   # writes this page
"""
SUBJECTS = (
    "rewards",
    "data",
    "tokens and turns",
    "loss and advantages",
    "engines and weights",
    "prompts and resuming",
    "evaluation and metrics",
    "options",
)


@dataclass(frozen=True)
class Exhibit:
    """One public report, or several of the same mistake."""

    reports: tuple[str, ...]
    """Each as `owner/name #number`; `owner/name` alone for behaviour that shows in the project itself."""
    subject: str
    """One of `SUBJECTS`."""
    happened: str
    """What went wrong there, and for whom: a sentence or two."""
    here: str
    """Why it does not go wrong here, and which part of the code sees to it: a sentence or two."""


def exhibits() -> Iterator[tuple[str, Exhibit]]:
    """Name of the file and exhibit, of every file in the folder."""
    for path in sorted(FOLDER.glob("test_*.py")):
        if path.stem != "test_museum":
            yield path.name, importlib.import_module(path.stem).EXHIBIT


def page() -> str:
    """The text of `docs/measurements/bugs_elsewhere.md`."""
    rows: dict[str, list[str]] = {subject: [] for subject in SUBJECTS}
    for name, exhibit in exhibits():
        links = ", ".join(map(_link, exhibit.reports))
        rows[exhibit.subject].append(f"| {links} | {exhibit.happened} | {exhibit.here} | `{name}` |")
    tables = [
        f"## {subject.capitalize()}\n\n| report | what happened there | here | test |\n|---|---|---|---|\n"
        + "\n".join(table)
        for subject, table in rows.items()
        if table
    ]
    return "\n".join([INTRODUCTION, "\n\n".join(tables), ""])


def _link(report: str) -> str:
    repository, _, number = report.partition(" #")
    name, place = repository.partition("/")[2], f"https://github.com/{repository}"
    return f"[{name} #{number}]({place}/issues/{number})" if number else f"[{name}]({place})"


if __name__ == "__main__":
    tests = FOLDER.parent
    sys.path[:0] = map(str, (FOLDER, tests / "fakes", tests))  # as pytest has it
    PAGE.write_text(page())
