"""The benchmark of a step beside bare vLLM and bare torch: that it runs, and compares the same tokens."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.extended
@pytest.mark.parametrize("further", [[], ["--per_core"]], ids=["one of each", "per core"])
def test_bare_parts_compute_the_tokens_of_the_pipeline(tmp_path: Path, further: list[str]) -> None:
    file = tmp_path / "rows.json"
    options = ["--num_runs", "1", "--num_steps", "2", "--num_prompts", "4", "--json", str(file), *further]
    words = [sys.executable, "benchmarks/step_breakdown.py", *options]
    done = subprocess.run(words, cwd=ROOT, check=True, timeout=400, capture_output=True, text=True)
    [row] = json.loads(file.read_text())["rows"]
    assert row["ratio"] == pytest.approx(row["step_s"] / (row["bare_sampling_s"] + row["bare_training_s"]))
    assert row["tokens_per_step"] == row["bare_tokens_per_step"]
    assert f"step / (bare sampling + bare training) = {row['ratio']:.2f}" in done.stdout
