"""`--async_steps 0` is a plain synchronous GRPO loop: the same samples, the same weights; on shared devices too."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TIMEOUT_S, TINY_MODEL, make_args
from whole_runs import EVALUATION, assert_ledger_balances, rows

from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.data.prompt_dataset import PromptDataset
from open_instruct.data.prompt_order import PromptOrder
from open_instruct.data_types import GenerationResult

SUMS = "reasoning_gym/chain_sum?min_terms=2&max_terms=2&min_digits=2&max_digits=2&size=100&seed=7"
NUM_STEPS = 3
WITH_EVALUATION = {
    "dataset_mixer_eval_list": EVALUATION,
    "local_eval_every": 2,
    "eval_on_step_0": True,
    "checkpoint_state_freq": 2,
}


@pytest.fixture(scope="module")
def options() -> dict[str, Any]:
    return {
        "model_name_or_path": str(TINY_MODEL),
        "dataset_mixer_list": [SUMS, "1.0"],
        "num_unique_prompts_rollout": 6,
        "num_samples_per_prompt_rollout": 4,
        "response_length": 24,
        "max_prompt_token_length": 64,
        "pack_length": 128,
        "total_episodes": 24 * NUM_STEPS,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "verification_reward": 1.0,
        "max_grad_norm": 1.0,
        "async_steps": 0,
        "beta": 0.0,
        "load_ref_policy": False,
        "vllm_enforce_eager": True,
        "seed": 5,
    }


def load_data(args: GRPOConfig) -> PromptDataset:
    from open_instruct.data.run_inputs import load_inputs

    inputs, mistakes = load_inputs(args)
    assert inputs is not None, mistakes
    return inputs.train_dataset


class PlainLoop:
    """Sample, score, step, send; one thing after another, sequence by sequence in plain torch."""

    def __init__(self, ray: Any, engine: Any, args: GRPOConfig) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from open_instruct.engines.weight_update_client import WeightUpdateClient
        from open_instruct.learners.weight_sync import DeepSpeedWeightSource, RayObjectSender

        self.ray, self.engine, self.args = ray, engine, args
        self.data = load_data(args)
        self.order = PromptOrder(len(self.data), args.seed)
        self.tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
        self.model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.learning_rate, weight_decay=0.0)
        self.client = WeightUpdateClient([engine], workers_per_engine=1, timeout_s=TIMEOUT_S)
        self.sender = RayObjectSender(
            client=self.client, source=DeepSpeedWeightSource(self.model, zero_stage=0), is_sender=True
        )

    def send(self, version: int) -> None:
        self.client.begin(version)
        self.sender.send_weights()
        assert self.client.report().confirmed == {0: version}

    def sample(self, issue_number: int) -> tuple[int, GenerationResult]:
        from dataclasses import replace

        from open_instruct.rollouts.prompt_requests import request_seed

        row = self.order[issue_number][1]
        config = replace(self.args.train_sampling, seed=request_seed(self.args.seed, issue_number))
        prompts = [self.data[row].prompt]
        [result] = self.ray.get(self.engine.generate_with_single_engine.remote(prompts, config), timeout=TIMEOUT_S)
        return row, result

    def scores(self, row: int, result: GenerationResult) -> np.ndarray:
        from open_instruct.verifiers.registry import score_response

        truth = self.data[row]
        texts = self.tokenizer.batch_decode([r.tolist() for r in result.responses], skip_special_tokens=True)
        return np.array([score_response(truth.dataset, truth.ground_truth, [], text).score for text in texts])

    def step(self, training_step: int) -> None:
        self.send(training_step - 1)
        terms, num_tokens = [], 0
        num_prompts = self.args.num_unique_prompts_rollout
        for number in range(num_prompts):
            row, result = self.sample((training_step - 1) * num_prompts + number)
            scores = self.scores(row, result)
            if np.all(scores == scores[0]):
                continue
            for response, score in zip(result.responses, scores, strict=True):
                terms.append((self.data[row].prompt, response, score - scores.mean()))
                num_tokens += len(response)
        assert terms, "the seed gives no group to learn from; choose another"
        self.optimizer.zero_grad()
        for prompt, response, advantage in terms:
            ids = torch.from_numpy(np.concatenate([prompt, response])).long()[None]
            logprobs = self.model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
            (-float(advantage) * logprobs[len(prompt) - 1 :].sum() / num_tokens).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm)
        self.optimizer.step()


def run(options: dict[str, Any], output_dir: Path) -> Path:
    """The directory of a run with these options, which came to its end."""
    words = [sys.executable, str(Path(__file__).parents[2] / "open_instruct" / "grpo_fast.py")]
    for name, value in {**options, "output_dir": output_dir}.items():
        words += [f"--{name}", *(map(str, value) if isinstance(value, list) else [str(value)])]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return output_dir


@pytest.fixture(scope="module")
def beside(options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose learner and engine have devices of their own, with evaluations and checkpoints."""
    return run(options | WITH_EVALUATION, tmp_path_factory.mktemp("beside") / "out")


def difference_from_plain_loop(loop: PlainLoop, model: Path) -> float:
    """How far a run's weights are from those of the plain loop, relative to how far training moved them."""
    from safetensors.torch import load_file

    for training_step in range(1, NUM_STEPS + 1):
        loop.step(training_step)
    start, pipeline = load_file(TINY_MODEL / "model.safetensors"), load_file(model / "model.safetensors")
    off = sum(float((pipeline[name] - p.detach()).double().square().sum()) for name, p in loop.model.named_parameters())
    moved = sum(float((p.detach() - start[name]).double().square().sum()) for name, p in loop.model.named_parameters())
    loop.model.load_state_dict(start, strict=False)
    loop.send(0)  # the engine is shared: leave it as it was
    return (off / moved) ** 0.5


def test_async_steps_0_equals_a_plain_synchronous_loop(
    ray_session: Any, engines: SimpleNamespace, options: dict[str, Any], beside: Path
) -> None:
    assert max(row["batch/num_partial_batches"] for row in rows(beside / "metrics.jsonl") if "scores" in row) == 1
    loop = PlainLoop(ray_session, engines.actors[0], make_args(**options))
    assert difference_from_plain_loop(loop, beside / "model") < 1e-4


@pytest.mark.slow
def test_streaming_on_policy_equals_a_plain_synchronous_loop(
    ray_session: Any, engines: SimpleNamespace, options: dict[str, Any], tmp_path: Path
) -> None:
    out = run(options | {"streaming": True}, tmp_path / "out")
    assert max(row["batch/num_partial_batches"] for row in rows(out / "metrics.jsonl")) > 1
    loop = PlainLoop(ray_session, engines.actors[0], make_args(**options))
    assert difference_from_plain_loop(loop, out / "model") < 1e-4


def test_colocated_run_is_the_on_policy_run(options: dict[str, Any], beside: Path, tmp_path: Path) -> None:
    """The same samples, fates and losses as side by side, evaluations and checkpoints included."""
    out = run(options | WITH_EVALUATION | {"colocate": True}, tmp_path / "out")
    both = rows(beside / "metrics.jsonl"), rows(out / "metrics.jsonl")
    for expected, colocated in zip(*both, strict=True):
        for name in ("scores", "loss/policy_avg", "optim/grad_norm", "eval/pass_at_1"):
            assert colocated.get(name) == pytest.approx(expected.get(name), abs=1e-6), name
    steps = [row for row in both[1] if "time/learners_onload" in row]
    assert len(steps) == NUM_STEPS
    assert all(row["memory/engines_offloaded_bytes"] >= 0 for row in steps)
    assert assert_ledger_balances(out) == json.loads((beside / "summary.json").read_text())["prompts"]
