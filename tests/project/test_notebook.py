"""The notebook `examples/first_run.ipynb`: git holds it without outputs, and all of it runs."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "first_run.ipynb"


def outputs(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [output for cell in notebook["cells"] if cell["cell_type"] == "code" for output in cell["outputs"]]


def test_git_holds_the_notebook_without_outputs() -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    assert outputs(notebook) == []
    assert {cell["execution_count"] for cell in notebook["cells"] if cell["cell_type"] == "code"} == {None}


@pytest.mark.extended
@pytest.mark.timeout(1100)
def test_the_notebook_runs_from_its_first_cell_to_its_last(tmp_path: Path) -> None:
    """An error in any cell fails."""
    out = tmp_path / "out.ipynb"
    words = ["bash", str(ROOT / "scripts" / "run_notebook.sh"), str(NOTEBOOK), str(out)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=1000, env=dict(os.environ))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    given = outputs(json.loads(out.read_text()))
    assert any("image/png" in output.get("data", {}) for output in given)
    assert any("in step 10" in "".join(output.get("text", "")) for output in given)
