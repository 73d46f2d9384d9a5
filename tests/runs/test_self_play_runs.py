"""Self-play as a user starts it: scripts/train/debug/kuhn_poker.py through engine, learner and evaluation."""

import os
import subprocess
from pathlib import Path

import pytest
from whole_runs import Process, assert_ledger_balances, command, rows

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "scripts" / "train" / "debug" / "cpu_self_play.sh"
ASSETS = ROOT / "assets"


@pytest.mark.slow
def test_engine_and_learner_agree_on_both_seats(tmp_path: Path) -> None:
    """On every sampled token, after every update: masks, positions and the texts between turns are right."""
    words = command(
        tmp_path / "out",
        model_name_or_path=ASSETS / "tiny_poker_model",
        dataset_mixer_list=[ASSETS / "kuhn_poker_train.jsonl", "1.0"],
        workflow_modules=[ROOT / "scripts" / "train" / "debug" / "kuhn_poker.py"],
        rollout_workflow="kuhn_poker",
        kuhn_rounds=3,
        max_prompt_token_length=64,
        response_length=400,
        pack_length=1024,
        async_steps=0,
        save_traces=True,
    )
    code, output = Process(words).wait()
    assert code == 0, output[-3000:]
    assert_ledger_balances(tmp_path / "out")
    metrics = [row for row in rows(tmp_path / "out" / "metrics.jsonl") if row["training_step"] > 0]
    assert max(row["debug/vllm_vs_local_logprob_diff_max"] for row in metrics) < 1e-5
    assert all(0 < row["kuhn/valid_moves"] < 1 for row in metrics)
    assert all(0 < row["scores"] < 1 for row in metrics)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_demo_learns_to_make_valid_moves(tmp_path: Path) -> None:
    words = ["bash", str(DEMO), "--output_dir", str(tmp_path / "out")]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=1400, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert_ledger_balances(tmp_path / "out")
    found = [row for row in rows(tmp_path / "out" / "metrics.jsonl") if "eval/kuhn/valid_moves" in row]
    first, last = found[0], found[-1]
    assert last["eval/kuhn/valid_moves"] > first["eval/kuhn/valid_moves"] + 0.1
    assert last["eval/kuhn/lost_by_invalid_moves"] < first["eval/kuhn/lost_by_invalid_moves"]
    assert last["eval/scores"] > first["eval/scores"]
