"""`--dry_run` as a user runs it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import TINY_MODEL, make_args

from open_instruct.device import Device
from open_instruct.device_memory import DeviceMemory
from open_instruct.engines.engine_memory import EngineMemory
from open_instruct.learners.memory import LearnerMemory
from open_instruct.run.dry_run import _shortage

ROOT = Path(__file__).parents[2]
SUMS = "reasoning_gym/chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=1&size=64&seed=7"
GIB = 2**30


def test_everything_is_said_and_nothing_is_written(tmp_path: Path) -> None:
    words = ["--model_name_or_path", str(TINY_MODEL), "--dataset_mixer_list", SUMS, "1.0", "--dry_run"]
    words += ["--output_dir", str(tmp_path / "out"), "--num_unique_prompts_rollout", "4", "--total_episodes", "64"]
    words += ["--max_prompt_token_length", "64", "--response_length", "32", "--pack_length", "128"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "open_instruct/grpo_fast.py"), *words],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said = {
        line.strip().partition("   ")[0]: line.strip().partition("   ")[2].strip() for line in done.stdout.splitlines()
    }
    assert said["training steps"] == "4"
    assert said["samples per step"] == "16 (4 prompts × 4)"
    assert said["tokens per step"] == f"{16 * 96:,} at most"
    assert said["learners"].startswith("1 on ")
    assert said["workers of engines"].startswith("1 on ")
    assert "memory of each learner" in said
    assert said["key-value cache"].endswith("tokens")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("kind", "total_gib", "options", "problem"),
    [
        ("cpu", 9, {}, ""),
        ("cpu", 7, {}, "This run needs 8,192 MiB on a machine that has 7,168 MiB."),
        ("cpu", 11, {"num_learners_per_node": [2]}, "This run needs 13.0 GiB on a machine that has 11.0 GiB."),
        ("cuda", 6, {}, ""),
        ("cuda", 4, {}, "This run needs 5,120 MiB on a GPU that has 4,096 MiB."),
        ("cuda", None, {}, ""),
        ("cuda", 7, {"single_gpu_mode": True}, "This run needs 8,192 MiB on a GPU"),
    ],
)
def test_what_does_not_fit_is_said(
    monkeypatch: pytest.MonkeyPatch, kind: str, total_gib: int | None, options: dict[str, object], problem: str
) -> None:
    monkeypatch.setattr(DeviceMemory, "total_bytes", lambda self: total_gib and total_gib * GIB)
    args = make_args(**options)
    monkeypatch.setattr(type(args), "device", Device(kind, "float32", "sdpa"))  # type: ignore[arg-type]
    learner = LearnerMemory(weights=5 * GIB, gradients=0, optimizer=0, reference=0, activations=0, program=0)
    engine = EngineMemory(weights=GIB, cache=GIB, num_cached_tokens=1, program=GIB)
    said = _shortage(args, learner, engine)
    assert said.startswith(problem)
    assert bool(said) == bool(problem)
