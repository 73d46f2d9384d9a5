"""Programs that know nothing of this project read a record with the two lines that the page shows."""

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from group_fakes import make_group
from recorded_groups import PAGE, WRITTEN_S, entry

from open_instruct.record.places import RECORD
from open_instruct.record.writer import RecordWriter

PINS = Path(__file__).parents[2] / "scripts" / "requirements-readers.txt"


def blocks() -> dict[str, str]:
    """The code of the page, by the module that it imports."""
    return {code.split()[1]: code for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)}


def printed(code: str) -> str:
    """The code with its last expression printed row by row."""
    tree = ast.parse(code)
    last = tree.body[-1]
    assert isinstance(last, ast.Expr)
    value = ast.unparse(last.value)
    rows = f"{value}.rows()" if "polars" in code else f"{value}.fetchall()"
    return "\n".join([*map(ast.unparse, tree.body[:-1]), f"print([tuple(row) for row in {rows}])"])


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("packages")
    words = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*words, "--target", str(target), "-r", str(PINS)], check=True, timeout=300)
    return target


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    """Where a run has written `output`: of step 1 three responses and of step 2 two."""
    writer = RecordWriter(tmp_path / "output" / RECORD, 0)
    writer.add(1, entry(make_group([1.0, 0.0, 0.0]), "zero_std", row="train.jsonl line 7"))
    writer.commit(1)
    writer.add(2, entry(make_group([1.0, 1.0], prompt_id="train-1"), "masked", step=2, row="train.jsonl line 9"))
    writer.commit(2)
    writer.close(WRITTEN_S)
    return tmp_path


@pytest.mark.extended
def test_polars_and_duckdb_read_a_record_in_two_lines(packages: Path, run_directory: Path) -> None:
    answers = {}
    for name in ("polars", "duckdb"):
        done = subprocess.run(
            [sys.executable, "-c", printed(blocks()[name])],
            cwd=run_directory,
            env={**os.environ, "PYTHONPATH": str(packages)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        answers[name] = Counter(ast.literal_eval(done.stdout))
    third = 10 / 3
    assert sorted(answers["polars"]) == [(1, "zero_std", 3, pytest.approx(third)), (2, "masked", 2, 10.0)]
    assert sorted(answers["duckdb"]) == [
        ("train.jsonl line 7", 3, pytest.approx(third)),
        ("train.jsonl line 9", 2, 10.0),
    ]
