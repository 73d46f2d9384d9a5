"""On-policy runs on one learner give bitwise the weights that they gave when the numbers below were recorded.

A change that is meant to move the numbers records them anew and says so in the changelog. Another kind of processor has other
kernels and rounds in another way, so there is nothing to compare on one.
"""

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from whole_runs import EVALUATION, SUMS, Process, command

RECORDED: dict[tuple[str, str, int], dict[str, str]] = {
    ("AMD", "AVX512", 2): {"demo": "f59a0f80c5507554", "rc_states": "b1e75a757cb8ac5b", "rc_turns": "2076fcda2fda6565"},
    ("AMD", "AVX2", 2): {"demo": "95059a4f39f03b47", "rc_states": "f5bf91d448c9b7bc", "rc_turns": "fafa01d94ad1bfe4"},
}
"""The hash of each run's weights, by kind of processor and number of cores: phases that take turns use all cores, and a sum
that two cores share rounds in another way than a sum of one."""
DEMO: dict[str, Any] = {
    "dataset_mixer_list": [f"{SUMS}&size=8000&seed=7", "1.0"],
    "response_length": 32,
    "pack_length": 2048,
    "num_unique_prompts_rollout": 32,
    "num_samples_per_prompt_rollout": 8,
    "total_episodes": 10 * 256,
    "learning_rate": 2e-4,
    "seed": 1,
}
"""The first ten steps of `scripts/train/debug/cpu_demo.sh`."""
RC: dict[str, Any] = {
    "rollout_workflow": "rc",
    "rc_reasoning_prompt_template": "{problem}{curr_summary}",
    "rc_summarization_prompt_template": "{problem}{existing_summary}{reasoning}",
    "rc_max_summary_tokens": 16,
    "rc_num_reasoning_steps": 2,
    "filter_zero_std_samples": False,
}
RC_STATES = RC | {
    "rc_buffer_size": 64,
    "rc_max_state_age": 2,
    "weight_decay": 20.0,
    "dataset_mixer_list": [f"{SUMS}&size=8&seed=7", "1.0"],
    "dataset_mixer_eval_list": EVALUATION,
    "local_eval_every": 4,
    "save_traces": True,
}
RC_TURNS = RC | {
    "rc_train_on": "turns",
    "rc_summary_reward": "downstream_mean",
    "rc_turn_weights": ["reasoning:2=2.0", "summarization=0.5"],
    "beta": 0.05,
    "load_ref_policy": True,
}


BUSY = """
import random, time
while True:
    end = time.monotonic() + random.random() / 3
    while time.monotonic() < end:
        pass
    time.sleep(random.random() / 5)
"""


def kind_of_processor() -> tuple[str, str, int]:
    processors = Path("/proc/cpuinfo").read_text()
    vendors = {"GenuineIntel": "Intel", "AuthenticAMD": "AMD"}
    vendor = next((name for mark, name in vendors.items() if mark in processors), "another")
    return vendor, torch.backends.cpu.get_cpu_capability(), len(os.sched_getaffinity(0))


@pytest.fixture
def busy_machine(request: pytest.FixtureRequest) -> Iterator[None]:
    """Other programs on every core, now and then."""
    num_others = (os.cpu_count() or 1) if request.param else 0
    others = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(num_others)]
    yield
    for one in others:
        one.kill()
        one.wait()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "busy_machine"),
    [("demo", DEMO, False), ("demo", DEMO, True), ("rc_states", RC_STATES, False), ("rc_turns", RC_TURNS, False)],
    indirect=["busy_machine"],
)
def test_on_policy_weights_are_bitwise_those_on_record(
    tmp_path: Path, name: str, options: dict[str, Any], busy_machine: None
) -> None:
    recorded = RECORDED.get(kind_of_processor())
    if recorded is None:
        pytest.skip(f"the numbers were recorded on {list(RECORDED)}, this is {kind_of_processor()}")
    code, output = Process(command(tmp_path, async_steps=0, **options)).wait(400)
    assert code == 0, output[-3000:]
    assert hashlib.sha256((tmp_path / "model" / "model.safetensors").read_bytes()).hexdigest()[:16] == recorded[name]
