"""An engine of two workers beside learners that are spread unevenly."""

import os
import signal
from pathlib import Path

import pytest
from whole_runs import Process, assert_ledger_balances, command, rows, shared_memory


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_with_tensor_parallelism_and_uneven_learners(tmp_path: Path) -> None:
    before, out = shared_memory(), tmp_path / "out"
    options = {"vllm_tensor_parallel_size": 2, "num_learners_per_node": [2, 1], "deepspeed_stage": 3, "async_steps": 0}
    process = Process(command(out, **options))
    code, output = process.wait(300)
    assert code == 0, output
    metrics = rows(out / "metrics.jsonl")
    assert [row["training_step"] for row in metrics] == [1, 2, 3, 4]
    assert (
        max(row["debug/vllm_vs_local_logprob_diff_max"] for row in metrics) < 1e-4
    )  # the weights arrive at both workers
    assert_ledger_balances(out)
    process.assert_nothing_is_left(before)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_killed_engine_of_two_workers_is_replaced_and_leaves_nothing(tmp_path: Path) -> None:
    before, out = shared_memory(), tmp_path / "out"
    process = Process(command(out, vllm_tensor_parallel_size=2, total_episodes=16 * 40, checkpoint_state_freq=-1))
    process.wait_for_rows(out / "metrics.jsonl", 2)
    [engine] = [pid for pid, title in process.processes() if title.startswith("ray::LLMRayActor")]
    os.kill(engine, signal.SIGKILL)
    code, output = process.wait(300)
    assert code == 0, output
    assert "starting it again (1 of 3)" in output + (out / "logs" / "driver.log").read_text()
    assert_ledger_balances(out)
    process.assert_nothing_is_left(before)
