"""The files of `examples/` as a user runs them: by the command at their top, with fewer steps."""

import ast
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from whole_runs import assert_ledger_balances, rows

ROOT = Path(__file__).parents[2]
SHORT = "--total_episodes 384 --eval_on_step_0 False --local_eval_every 3 --async_steps 0 --output_dir out"
"""Three steps, strictly on policy."""


def commands(example: str) -> str:
    """The commands of an example's docstring, one a line."""
    docstring = ast.get_docstring(ast.parse((ROOT / "examples" / f"{example}.py").read_text()), clean=False)
    assert docstring is not None
    (block,) = re.findall(r"(?:^    .*\n)+", docstring, re.MULTILINE)[:1]
    return textwrap.dedent(block).replace("\\\n", " ")


def run(example: str, directory: Path) -> list[dict[str, Any]]:
    """The metrics of the training steps of the example's run, in a directory where the project's folders are at hand."""
    for name in ("assets", "conf", "examples", "open_instruct"):
        (directory / name).symlink_to(ROOT / name)
    script = re.sub(r"(grpo_fast\.py .*)", rf"\1 {SHORT}", commands(example))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euc", script],
        cwd=directory,
        env=os.environ | {"PATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert_ledger_balances(directory / "out")
    steps = [row for row in rows(directory / "out" / "metrics.jsonl") if row["training_step"] > 0]
    assert len(steps) == 3
    assert max(row["debug/vllm_vs_local_logprob_diff_max"] for row in steps) < 1e-4  # masks and positions are right
    assert "eval/scores" in steps[-1]
    return steps


@pytest.mark.extended
@pytest.mark.parametrize(
    ("example", "metric", "low", "high"),
    [
        ("own_reward", "rewards/right/mean", 0.1, 0.9),
        ("own_verifier", "objective/near_correct_rate", 0.1, 0.9),
        ("own_loss", "policy/topr_weight_avg", 0.9, 1.0),
        ("own_environment", "env/tries/tries", 1.0, 2.0),
        ("own_workflow", "from_the_middle/given_tokens", 0.5, 16.0),
    ],
)
def test_the_command_of_an_example_trains(example: str, metric: str, low: float, high: float, tmp_path: Path) -> None:
    for row in run(example, tmp_path):
        assert low < row[metric] <= high, (metric, row[metric])
        assert -4 < row["scores"] < 1
