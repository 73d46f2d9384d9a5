"""Launch scripts pass flags that exist, and let the user's flags win."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from open_instruct.config.cli import make_config, parse_args
from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.fully_async_main import _flatten, compose

ROOT = Path(__file__).parents[2]


def arguments_of(
    script: str, tmp_path: Path, *further: str, door: str = "grpo_fast.py", **environment: str
) -> list[str]:
    """What the script hands to Python after the name of the program."""
    fake = tmp_path / "python"
    fake.write_text('#!/usr/bin/env bash\nprintf "%s\\0" "$@"\n')
    fake.chmod(0o755)
    done = subprocess.run(
        ["bash", str(ROOT / script), *further],
        env=os.environ | {"PYTHON": str(fake), **environment},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    program, *arguments = done.stdout.split("\0")[:-1]
    assert program.endswith(f"open_instruct/{door}")
    return arguments


@pytest.mark.parametrize("script", ["scripts/train/qwen3_8b_gsm8k.sh", "scripts/train/debug/single_gpu.sh"])
def test_gpu_scripts_pass_known_flags_and_the_users_win(script: str, tmp_path: Path) -> None:
    args = parse_args(arguments_of(script, tmp_path, "--seed", "9", "--output_dir", "elsewhere"), GRPOConfig)
    assert (args.seed, args.output_dir) == (9, "elsewhere")
    assert args.num_training_steps > 0


def test_one_node_script_takes_its_surroundings_from_the_environment(tmp_path: Path) -> None:
    script = "scripts/train/qwen3_8b_gsm8k.sh"
    environment = {"OUTPUT_DIR": "/results/run", "WANDB_API_KEY": "x", "WANDB_PROJECT": "p", "RUN_NAME": "r"}
    args = parse_args(arguments_of(script, tmp_path, **environment), GRPOConfig)
    assert (args.output_dir, args.with_tracking, args.wandb_project, args.run_name) == ("/results/run", True, "p", "r")
    assert (args.num_learners, args.vllm_num_engines, args.deepspeed_stage) == (4, 4, 3)


def test_the_streaming_script_passes_known_keys_and_the_users_win(tmp_path: Path) -> None:
    script = "scripts/train/qwen3_8b_transferqueue.sh"
    words = arguments_of(script, tmp_path, "trainer.seed=9", door="fully_async_main.py", WANDB_API_KEY="x")
    written, _, mistakes = _flatten(compose(words), GRPOConfig)
    args = make_config(GRPOConfig, written, mistakes=mistakes)
    assert (args.seed, args.with_tracking, args.streaming) == (9, True, True)
    assert (args.num_learners, args.vllm_num_engines, args.vllm_tensor_parallel_size) == (4, 1, 4)
    assert (args.num_unique_prompts_rollout, args.num_samples_per_prompt_rollout) == (128, 5)


DEMOS = sorted(path.name for path in (ROOT / "scripts/train/debug").glob("cpu_*.sh") if "grpo_fast" in path.read_text())


@pytest.mark.parametrize("demo", DEMOS)
def test_a_demo_passes_known_flags(demo: str) -> None:
    text = (ROOT / "scripts/train/debug" / demo).read_text()
    flags = re.findall(r"^ +--(\w+)", text, flags=re.MULTILINE)
    assert len(flags) > 10
    assert set(flags) <= set(GRPOConfig.__dataclass_fields__)
