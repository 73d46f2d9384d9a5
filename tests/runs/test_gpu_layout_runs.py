"""Whole runs in the layout of a GPU: engine cores in processes of their own, weights through vLLM's own classes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from whole_runs import Process, assert_ledger_balances, command, rows, shared_memory

LARGEST_DIFFERENCE = 1e-4
"""Between log-probs of engine and learner, on-policy in fp32."""


@pytest.fixture(autouse=True)
def own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")


def engine_cores(run: Process) -> list[psutil.Process]:
    return [psutil.Process(pid) for pid, title in run.processes() if "EngineCore" in title]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("transport", "stage"), [("gloo", 3), ("gloo", 0), ("shm", 3), ("shm", 2), ("ray_object", 2)])
def test_two_learners_and_two_engines_agree_on_policy(tmp_path: Path, transport: str, stage: int) -> None:
    before = shared_memory()
    words = command(
        tmp_path,
        weight_transport=transport,
        deepspeed_stage=stage,
        num_learners_per_node=2,
        vllm_num_engines=2,
        async_steps=0,
    )
    run = Process(words)
    code, output = run.wait(600)
    assert code == 0, output
    metrics = rows(tmp_path / "metrics.jsonl")
    assert len(metrics) == 4
    assert max(row["debug/vllm_vs_local_logprob_diff_max"] for row in metrics) < LARGEST_DIFFERENCE
    run.assert_nothing_is_left(before)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_weights_come_in_flight_over_a_collective(tmp_path: Path) -> None:
    """Two steps ahead, with responses long enough that most are under way when new weights come."""
    run = Process(
        command(
            tmp_path, weight_transport="gloo", async_steps=2, response_length=48, pack_length=512, vllm_num_engines=2
        )
    )
    code, output = run.wait(600)
    assert code == 0, output
    assert_ledger_balances(tmp_path)
    assert len(rows(tmp_path / "metrics.jsonl")) == 4


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_a_killed_engine_is_replaced_and_leaves_no_core(tmp_path: Path, transport: str) -> None:
    """Killed from outside, again and again: at any moment of a step, an update among them."""
    before = shared_memory()
    run = Process(
        command(tmp_path, weight_transport=transport, vllm_num_engines=2, total_episodes=16 * 30, max_engine_restarts=4)
    )
    for number in (2, 8):
        run.wait_for_rows(tmp_path / "metrics.jsonl", number)
        [victim, *_] = engine_cores(run)
        os.kill(victim.pid if number == 2 else victim.ppid(), signal.SIGKILL)
        time.sleep(0.5)
    code, output = run.wait(600)
    assert code == 0, output
    assert_ledger_balances(tmp_path)
    assert len(rows(tmp_path / "metrics.jsonl")) == 30
    run.assert_nothing_is_left(before)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "tests",
    [
        "learners/test_weight_sync",
        "engines/test_engine_sleep",
        "runs/test_on_policy",
        "scenarios/test_engine_restart",
        "scenarios/test_failures",
    ],
)
def test_what_holds_with_the_core_in_the_actor_holds_with_a_core_of_its_own(tests: str) -> None:
    """The whole file, with the environment of this module."""
    path = Path(__file__).parents[1] / f"{tests}.py"
    words = [sys.executable, "-m", "pytest", "-q", str(path), "-m", "not slow and not gpu", "-p", "no:cacheprovider"]
    done = subprocess.run(words, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout[-4000:]
