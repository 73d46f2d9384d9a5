"""Whole runs with a teacher: what it says is about the right tokens, it may die, and a model learns from it alone."""

import os
import signal
import time
from pathlib import Path

import pytest
from conftest import TINY_MODEL
from whole_runs import Process, assert_ledger_balances, command, rows, shared_memory

KL = "objective/teacher_kl_avg"


def teacher_process(run: Process) -> int:
    return next(process_id for process_id, title in run.processes() if title.startswith("ray::TeacherEngine"))


@pytest.mark.extended
def test_a_teacher_equal_to_the_model_agrees_with_it_and_may_die(tmp_path: Path) -> None:
    before = shared_memory()
    options = {"teacher_model_name_or_path": TINY_MODEL, "total_episodes": 16 * 12, "local_eval_every": -1}
    run = Process(command(tmp_path, **options))
    run.wait_for_rows(tmp_path / "metrics.jsonl", 2)
    os.kill(teacher_process(run), signal.SIGKILL)
    code, output = run.wait()
    assert code == 0, output[-3000:]
    assert "engine 0 of the teacher died and was started again" in output
    first, second, *_ = rows(tmp_path / "metrics.jsonl")
    assert abs(first[KL]) < 1e-6  # the weights are the teacher's
    assert first["val/teacher_top_k_mass"] == pytest.approx(1, abs=1e-2)
    assert second[KL] > 1e-4
    assert assert_ledger_balances(tmp_path)["consumed"] == 48
    run.assert_nothing_is_left(before)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["reverse_kl", "forward_kl"])
def test_a_model_learns_from_the_teacher_alone(tmp_path: Path, untied_model: str, loss: str) -> None:
    options = {
        "teacher_model_name_or_path": untied_model,
        "distillation_loss": loss,
        "distillation_top_k": 16,
        "use_task_rewards": False,
        "streaming": True,
        "total_episodes": 16 * 30,
        "local_eval_every": -1,
    }
    code, output = Process(command(tmp_path, **options)).wait()
    assert code == 0, output[-3000:]
    kls = [row[KL] for row in rows(tmp_path / "metrics.jsonl")]
    assert sum(kls[-5:]) < 0.5 * sum(kls[:5])
    assert all(row["val/advantages_max"] == 0 for row in rows(tmp_path / "metrics.jsonl"))


@pytest.mark.slow
def test_a_teacher_that_stands_still_ends_the_run_and_is_named(tmp_path: Path) -> None:
    options = {"teacher_model_name_or_path": TINY_MODEL, "teacher_timeout_s": 5, "total_episodes": 16 * 100}
    run = Process(command(tmp_path, **options))
    run.wait_for_rows(tmp_path / "metrics.jsonl", 1)
    os.kill(teacher_process(run), signal.SIGSTOP)
    started = time.monotonic()
    code, output = run.wait()
    assert code == 1
    assert time.monotonic() - started < 60
    assert "engine 0 of the teacher has" in output
    assert "raise --teacher_timeout_s" in output
