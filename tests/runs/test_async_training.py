"""Asynchronous runs as a user starts them: the bound over a whole run, a YAML file with a user's own classes, learning."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY_MODEL
from whole_runs import EVALUATION, SUMS, Process, assert_ledger_balances, command, rows, shared_memory

SCRIPT = Path(__file__).parents[2] / "open_instruct" / "fully_async_main.py"
HOOKS = """
import numpy as np, ray
from open_instruct.run.fully_async_trainer import FullyAsyncTrainer
from open_instruct.rollouts.controller import Rollouter
from dataclasses import replace

class CustomFullyAsyncTrainer(FullyAsyncTrainer):
    def _compute_custom_metrics(self, batch):
        return {"custom/batches_seen": batch.number + 1}

class CustomRollouter(Rollouter):
    def _custom_generation_logic(self, batch):
        return [replace(r, generation_config=replace(r.generation_config, max_tokens=7)) for r in batch]

def custom_monitor(trainer_stats, rollouter_stats):
    return {"lead": rollouter_stats["total_generated_samples"] - trainer_stats["processed_samples"]}
"""
DOCUMENTED_METRICS = [
    "global_steps",
    "processed_samples",
    "current_param_version",
    "param_sync_count",
    "sync_failures",
    "total_generated_samples",
    "dropped_stale_samples",
    "generation_errors",
    "param_sync_requests",
    "avg_sample_age",
    "max_sample_age",
    "stale_samples_ratio",
    "queue_size",
    "total_produced",
    "total_consumed",
    "dropped_samples",
    "freshness/avg_sample_age",
    "freshness/max_sample_latency",
    "queue/size",
    "queue/total_produced",
    "queue/total_consumed",
    "queue/dropped_samples",
    "training/global_step",
    "training/param_version",
    "training/param_sync_count",
    "agent_loop/generate_sequences/max",
    "agent_loop/tool_calls/mean",
    "agent_loop/compute_score/min",
    "agent_loop/slowest/prompt_id",
    "agent_loop/slowest/engine_id",
    "val/rho_weight",
    "val/rho_clipfrac",
    "val/ratio_var",
    "debug/vllm_vs_local_logprob_diff_mean",
    "time/weight_sync",
    "time/weight_sync_max",
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A streamed run of eight steps from a YAML file, with a user's classes and monitor."""
    directory = tmp_path_factory.mktemp("door")
    (directory / "hooks_of_a_user.py").write_text(HOOKS)
    overrides = [
        f"model.model_name_or_path={TINY_MODEL}",
        f"data.dataset_mixer_list=['{SUMS}&size=200&seed=7','1.0']",
        f"data.dataset_mixer_eval_list=['{EVALUATION[0]}','1.0']",
        "data.max_prompt_token_length=64",
        "data.pack_length=96",
        "rollout.response_length=16",
        "rollout.num_unique_prompts_rollout=8",
        "rollout.num_samples_per_prompt_rollout=4",
        "rollout.n_gpus_per_node=1",
        "rollout.vllm_enforce_eager=true",
        "rollout.cls=hooks_of_a_user.CustomRollouter",
        "trainer.cls=hooks_of_a_user.CustomFullyAsyncTrainer",
        "trainer.n_gpus_per_node=2",
        "trainer.nnodes=1",
        "trainer.deepspeed_stage=2",
        "trainer.learning_rate=1e-4",
        f"trainer.total_episodes={32 * 8}",
        "trainer.output_dir=out",
        "async_training.monitor=hooks_of_a_user.custom_monitor",
        "async_training.statistics_interval_s=0.1",
        "async_training.alerts={max_sample_age: 1}",
        "async_training.staleness_threshold=2",
        "async_training.max_staleness_allowed=2",
        "async_training.batch_generation_interval=0.0",
    ]
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    words = [sys.executable, str(SCRIPT), *overrides]
    done = subprocess.run(words, cwd=directory, env=env, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    return directory / "out", done.stderr


@pytest.mark.extended
def test_the_yaml_door_runs_to_its_end_with_a_user_s_classes(finished: tuple[Path, str]) -> None:
    out, _ = finished
    metrics = [row for row in rows(out / "metrics.jsonl") if "scores" in row]
    assert [row["training_step"] for row in metrics] == list(range(1, 9))
    assert_ledger_balances(out)
    assert all(row["custom/batches_seen"] == row["batch/num_partial_batches"] for row in metrics)
    assert max(row["batch/num_partial_batches"] for row in metrics) > 1  # it did come in parts
    assert all(row["queue/max_memory_bytes"] > 0 for row in metrics)
    assert all(row["val/sequence_lengths_max"] <= 7 for row in metrics)
    missing = [name for name in DOCUMENTED_METRICS if name not in metrics[-1]]
    assert not missing


@pytest.mark.extended
def test_the_log_is_found_by_the_documented_greps(finished: tuple[Path, str]) -> None:
    out, terminal = finished
    lines = (out / "fully_async_training.log").read_text().splitlines()

    def grep(text: str) -> list[str]:
        return [line for line in lines if text in line]

    assert len(grep("Parameter sync completed in ")) >= 9
    assert all(
        "Trainer: " in line and "Rollouter: " in line and "Queue: " in line for line in grep("Component Statistics")
    )
    assert len(grep("Component Statistics")) >= 3
    assert grep("Rollouter stats - Generated: ")
    assert len(grep("Processing batch: ")) == 8
    assert grep("Custom metric: lead=")
    assert not grep("ERROR")
    date, name, level, _ = grep("Component Statistics")[0].split(" - ", 3)
    assert (len(date), name, level) == (23, "open_instruct.components", "INFO")
    assert "Component Statistics" not in terminal  # the file has it; a terminal has one live line


@pytest.mark.extended
def test_an_alert_marks_the_row_and_is_told(finished: tuple[Path, str]) -> None:
    out, terminal = finished
    marked = [row for row in rows(out / "metrics.jsonl") if row.get("alerts")]
    assert marked
    assert {row["max_sample_age"] for row in marked} == {2}
    assert "max_sample_age is 2, above 1" in terminal


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("bound", [0, 1, 3])
def test_the_bound_holds_over_a_whole_run_and_is_used(tmp_path: Path, bound: int, streaming: bool) -> None:
    out, before = tmp_path / "out", shared_memory()
    process = Process(command(out, total_episodes=16 * 20, async_steps=bound, streaming=streaming, pack_length=128))
    code, output = process.wait(400)
    assert code == 0, output
    ages = [row["max_sample_age"] for row in rows(out / "metrics.jsonl")]
    assert max(ages) == bound
    assert_ledger_balances(out)
    process.assert_nothing_is_left(before)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_over_issuing_on_real_parts_keeps_the_bound(tmp_path: Path) -> None:
    out = tmp_path / "out"
    options: dict[str, Any] = {"async_steps": 1, "max_staleness_allowed": 2, "over_issued_prompts": 4}
    code, output = Process(command(out, total_episodes=16 * 30, straggler_policy="truncate", **options)).wait(400)
    assert code == 0, output
    metrics = rows(out / "metrics.jsonl")
    assert max(row["max_sample_age"] for row in metrics) <= 2
    assert metrics[-1]["over_issue/num_stragglers"] > 0
    assert_ledger_balances(out)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_three_steps_behind_with_correction_learns_like_on_policy(tmp_path: Path) -> None:
    """Held-out accuracy after 100 steps, three seeds each: the means differ by less than 4 points."""
    root = Path(__file__).parents[2]
    final: dict[int, list[float]] = {0: [], 3: []}
    for seed in (1, 2, 3):
        for threshold, accuracies in final.items():
            out = tmp_path / f"{threshold}-{seed}"
            overrides = [
                f"async_training.staleness_threshold={threshold}",
                f"async_training.max_staleness_allowed={threshold}",
                f"trainer.seed={seed}",
                f"trainer.total_episodes={256 * 100}",
                "trainer.checkpoint_state_freq=-1",
                f"trainer.output_dir={out}",
            ]
            words = ["bash", str(root / "scripts/train/debug/cpu_fully_async.sh"), *overrides]
            subprocess.run(words, check=True, capture_output=True, timeout=600)
            accuracies.append(json.loads((out / "summary.json").read_text())["eval_accuracy_after"])
    means = {threshold: sum(accuracies) / 3 for threshold, accuracies in final.items()}
    assert means[0] > 0.9
    assert abs(means[3] - means[0]) < 0.04, final
