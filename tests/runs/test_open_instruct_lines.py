"""Launch lines of open-instruct's smallest scripts, with the tiny model and rows of the same format, to their end."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import TINY_MODEL

from open_instruct.config.translate import options_in

ROOT = Path(__file__).parents[2]
LINES = dict(line.split("\t") for line in (ROOT / "tests/config/open_instruct_lines.txt").read_text().splitlines())
SMALLER = {
    "response_length": "32",
    "max_prompt_token_length": "700",
    "pack_length": "1024",
    "total_episodes": "64",
    "num_learners_per_node": "1",
    "actor_num_gpus_per_node": "1",
    "vllm_num_engines": "1",
}
LEFT_OUT = "output_dir", "add_bos", "with_tracking"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "script", ["train/debug/grpo_fast.sh", "train/debug/single_gpu_on_beaker.sh", "train/rlvr/grpo_mini_base_fast.sh"]
)
def test_a_small_script_runs_to_its_end(tmp_path: Path, script: str) -> None:
    rows = [
        {"messages": [{"role": "user", "content": f"{n} + 7 ="}], "ground_truth": str(n + 7), "dataset": "gsm8k"}
        for n in range(100)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "system.txt").write_text("Answer with a number.")
    words = []
    for name, values in options_in(shlex.split(LINES[script])):
        if name.startswith("dataset_mixer") and not name.endswith("splits"):
            values = [str(tmp_path / "rows.jsonl"), values[1]]
        elif name in ("model_name_or_path", "tokenizer_name_or_path"):
            values = [str(TINY_MODEL)]
        elif name == "system_prompt_override_file":
            values = [str(tmp_path / "system.txt")]
        if name not in LEFT_OUT:
            words += [f"--{name}", *([SMALLER[name]] if name in SMALLER else values)]
    words += ["--output_dir", str(tmp_path / "out"), "--filter_zero_std_samples", "False"]
    if "mini_base" in script:
        words += ["--hold_out_eval_prompts", "False"]  # it evaluates on the rows that it trains on
    done = subprocess.run(
        [sys.executable, str(ROOT / "open_instruct/grpo_fast.py"), *words],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "These options are not this project's, and the run goes on without their effect:" in done.stdout
    steps = (tmp_path / "out/metrics.jsonl").read_text().splitlines()
    assert len(steps) >= 1
    assert (tmp_path / "out/model/config.json").is_file()
