"""Conversations as a user starts them: the whole pipeline with tools and environments."""

import json
import os
import random
import signal
import subprocess
import textwrap
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from whole_runs import Process, assert_ledger_balances, command, rows

from open_instruct.data_types import TrainingSample
from open_instruct.learners.logprobs import LogProbModel
from open_instruct.rollouts.collation import collate_packed

KILLING_S = 300
TALK = '''
    """Talks for a number of turns that the seed draws."""

    import os
    import random

    from open_instruct.environments.base import ENVIRONMENTS, Ending, Environment, Observation, Opening, user_message


    @ENVIRONMENTS.register("talk")
    class Talk(Environment):
        takes_text = True

        async def reset(self, task, seed):
            self.random = random.Random(seed)
            self.num_turns = self.num_letters = 0
            self.last = self.random.randint(1, 12)
            return Opening([user_message("What is 1 + 2?")] if self.random.random() < 0.5 else [])

        async def step(self, turn):
            if random.SystemRandom().random() < float(os.environ.get("TALK_DIES", "0")):  # not again in the next attempt
                os._exit(1)
            self.num_turns += 1
            self.num_letters += len(turn.text)
            text = self.random.choice(["", "<|end|>", "Stra\\u00dfe \\u65e5\\u672c", "And 12 + 34?", " "])
            done = self.num_turns >= self.last
            return Observation([] if done else [user_message(text)], None, done)

        async def finish(self):
            return Ending(self.num_letters % 7 / 7, {"turns": self.num_turns})
'''


@pytest.fixture
def talk(tmp_path: Path) -> dict[str, object]:
    """Options of a run whose conversations have one to twelve turns."""
    (tmp_path / "talk.py").write_text(textwrap.dedent(TALK))
    row = {"dataset": "passthrough", "ground_truth": "-", "env_config": {"env_name": "talk"}}
    lines = [json.dumps({**row, "messages": [{"role": "user", "content": f"Talk {i}."}]}) for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    return {
        "dataset_mixer_list": [tmp_path / "rows.jsonl", "1.0"],
        "environment_modules": [tmp_path / "talk.py"],
        "max_steps": 12,
        "per_turn_max_tokens": 6,
        "response_length": 200,
        "filter_zero_std_samples": False,
    }


@pytest.mark.extended
def test_engine_and_learner_agree_on_conversations_of_one_to_twelve_turns(
    talk: dict[str, object], tmp_path: Path, untied_model: str
) -> None:
    """On every sampled token, after every update, in padded and in packed rows: masks, positions and the tokens between turns are
    right. The model is a random one: the logits of a trained one are larger, and so is what rounding does to them."""
    options = {**talk, "model_name_or_path": untied_model, "async_steps": 0, "save_traces": True, "save_freq": 1}
    out = tmp_path / "out"
    code, output = Process(command(out, **options, pack_length=600)).wait()
    assert code == 0, output[-3000:]
    assert_ledger_balances(out)
    metrics = [row for row in rows(out / "metrics.jsonl") if row["training_step"] > 0]
    assert max(row["debug/vllm_vs_local_logprob_diff_max"] for row in metrics) < 1e-5
    assert min(row["optim/grad_norm"] for row in metrics) > 0
    assert max(row["conversations/turns"] for row in metrics) > 4
    assert all(row["conversations/restarts"] == 0 for row in metrics)
    assert metrics[-1]["env/talk/turns"] > 1
    for step in range(1, 5):
        before = Path(untied_model) if step == 1 else out / f"step_{step - 1:06d}"
        assert packed_difference(before, samples_of(out, step)) < 1e-5
    written = (out / "transcripts" / "step_000001.txt").read_text()
    assert "given       │" in written
    assert "trained v0  │" in written
    assert "1 + 2" in written


def samples_of(out: Path, step: int) -> list[TrainingSample]:
    """What a step trained on, as `save_traces` has written it."""
    (path,) = out.glob(f"rollouts/*_rollouts_{step:06d}.jsonl")
    masks = [np.array(row["batch"]["response_mask"], bool) for row in rows(out / "samples" / f"step_{step:06d}.jsonl")]
    return [
        TrainingSample(
            np.array(row["prompt_tokens"], np.int32),
            np.array(row["response_tokens"], np.int32),
            mask[: len(row["response_tokens"])],
            np.array(row["logprobs"], np.float32),
            row["advantage"],
        )
        for row, mask in zip(rows(path), masks, strict=True)
    ]


def packed_difference(model: Path, samples: list[TrainingSample]) -> float:
    """The largest difference, on trained tokens, between the engine's log-probs and the model's in one packed row."""
    batch = collate_packed(samples, 0)
    assert 0 < batch.num_tokens < sum(len(sample.response) for sample in samples)
    weights = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    inputs = [torch.from_numpy(array).long() for array in (batch.query_responses, batch.position_ids)]
    with torch.no_grad():
        logprobs, _, _ = LogProbModel(weights)(*inputs, 1.0)
    wanted = batch.response_masks[:, 1:]
    return float(np.abs(logprobs.numpy() - batch.vllm_logprobs[:, 1:])[wanted].max())


@pytest.mark.slow
@pytest.mark.parametrize("keeps", [False, True])
def test_keys_and_values_of_older_weights_are_used_or_computed_again(
    talk: dict[str, object], tmp_path: Path, keeps: bool
) -> None:
    """Three steps ahead, so that weights change between the turns of a conversation and within them."""
    options = {**talk, "async_steps": 3, "vllm_keep_prefix_cache": keeps, "vllm_recompute_kv_cache": not keeps}
    words = command(tmp_path / "out", **options, pack_length=600, total_episodes=16 * 10)
    code, output = Process(words).wait()
    assert code == 0, output[-3000:]
    metrics = [row for row in rows(tmp_path / "out" / "metrics.jsonl") if row["training_step"] > 0]
    assert (max(row["kv_age/max"] for row in metrics) > 0) == keeps
    assert max(row["num_steps_off_policy_max"] for row in metrics) <= 3


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_five_minutes_of_killed_environments_lose_and_double_nothing(talk: dict[str, object], tmp_path: Path) -> None:
    """Every half second one of the environments' processes is killed, and every tenth time the process that starts them."""
    num_steps = 1000  # more than five minutes of them
    options = {
        **talk,
        "environment_attempts": 8,
        "async_steps": 2,
        "total_episodes": 16 * num_steps,
        "pack_length": 600,
    }
    run = Process(command(tmp_path / "out", **options))
    run.wait_for_rows(tmp_path / "out" / "metrics.jsonl", 1)
    draw, num_killed, ends_at = random.Random(0), 0, time.monotonic() + KILLING_S
    while run.popen.poll() is None and time.monotonic() < ends_at:
        time.sleep(0.5)
        found = sorted(pid for pid, title in run.processes() if "environments.service" in title)
        if found:
            num_killed += 1
            with suppress(ProcessLookupError):  # a conversation has just ended
                os.kill(found[0] if num_killed % 10 == 0 else draw.choice(found), signal.SIGKILL)
    code, output = run.wait(1200.0)
    assert code == 0, output[-3000:]
    assert not run.left_behind()
    assert num_killed > KILLING_S
    assert assert_ledger_balances(tmp_path / "out")["dropped"].get("failed", 0) == 0
    metrics = [row for row in rows(tmp_path / "out" / "metrics.jsonl") if row["training_step"] > 0]
    assert [row["training_step"] for row in metrics] == list(range(1, num_steps + 1))
    assert sum(row["conversations/restarts"] for row in metrics) > 50


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("demo", "times_better"), [("cpu_tools", 5.0), ("cpu_game", 4 / 3)])
def test_the_demos_learn(tmp_path: Path, demo: str, times_better: float) -> None:
    script = Path(__file__).parents[2] / "scripts" / "train" / "debug" / f"{demo}.sh"
    words = ["bash", str(script), "--output_dir", str(tmp_path / "out")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=1400, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert_ledger_balances(tmp_path / "out")
    found = [row["eval/scores"] for row in rows(tmp_path / "out" / "metrics.jsonl") if "eval/scores" in row]
    assert found[-1] > times_better * found[0]


@pytest.mark.extended
def test_environments_that_die_at_random_lose_nothing_and_score_nothing(
    talk: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TALK_DIES", "0.05")
    words = command(tmp_path / "out", **talk, environment_attempts=4, pack_length=600)
    code, output = Process(words).wait()
    assert code == 0, output[-3000:]
    assert_ledger_balances(tmp_path / "out")
    metrics = [row for row in rows(tmp_path / "out" / "metrics.jsonl") if row["training_step"] > 0]
    assert sum(row["conversations/restarts"] for row in metrics) > 0
    assert min(row["objective/environment_reward"] for row in metrics) > 0
