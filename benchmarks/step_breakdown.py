"""Where the wall time of a training step goes, beside bare vLLM sampling and bare torch training of the same tokens.

    python benchmarks/step_breakdown.py                        # three runs in turn, strictly on-policy
    python benchmarks/step_breakdown.py --num_runs 1 --async_steps 1
    python benchmarks/step_breakdown.py --per_core             # as many learners and engines as cores, with a thread each

The learning rate is 0: the weights stay what they are, so bare sampling with the same seeds draws the same tokens. Bare training
computes every sequence whole, in micro-batches of the pipeline's size; the pipeline computes a prompt once for its responses.
Both are one process each with as many threads as one engine and one learner have (on CPU, strictly on-policy, one per core), and
run in turns with the pipeline. The first steps of each are warm-up and left out. Times are medians over steps, in seconds.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.report import per_core_options, write_json
from open_instruct.config.cli import parse_args
from open_instruct.config.grpo_config import GRPOConfig

ROOT = Path(__file__).resolve().parents[1]
SUMS = "reasoning_gym/chain_sum?min_terms=2&max_terms=2&min_digits=2&max_digits=2&size=8000&seed=7"
NUM_WARM_UP = 5
ARRAYS = ("query_responses", "position_ids", "response_masks", "advantages")
"""What bare training needs of a micro-batch."""
PHASES = {
    "generation": "time/generation",
    "verification (beyond generation)": "time/verification",
    "packing": "time/packing",
    "forward and backward": "time/forward_backward",
    "optimizer": "time/optimizer",
    "weights": "time/weight_sync",
}


def run_options(args: argparse.Namespace, output_dir: Path) -> list[str]:
    """The pipeline's command line: the demo's sizes, without evaluation and checkpoints."""
    options = {
        "model_name_or_path": args.model_name_or_path,
        "num_unique_prompts_rollout": args.num_prompts,
        "num_samples_per_prompt_rollout": args.num_samples,
        "response_length": args.response_length,
        "max_prompt_token_length": 64,
        "pack_length": 2048,
        "total_episodes": args.num_prompts * args.num_samples * (NUM_WARM_UP + args.num_steps),
        "learning_rate": 0.0,
        "async_steps": args.async_steps,
        "filter_zero_std_samples": False,
        "beta": 0.0,
        "load_ref_policy": False,
        "vllm_enforce_eager": True,
        "checkpoint_state_freq": -1,
        "save_freq": -1,
        "seed": 1,
        "output_dir": output_dir,
    }
    flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [*flags, "--dataset_mixer_list", SUMS, "1.0"]


def measure_pipeline(options: list[str], output_dir: Path) -> list[dict[str, Any]]:
    """Rows of `metrics.jsonl` after the warm-up."""
    command = [sys.executable, str(ROOT / "open_instruct" / "grpo_fast.py"), *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=1800)
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()][NUM_WARM_UP:]


def measure_bare(options: list[str]) -> list[dict[str, float]]:
    """In a process of its own: seconds of sampling and of training, and tokens, per step after the warm-up."""
    environment = {**os.environ, **parse_args(options, GRPOConfig).device.actor_env, "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(
        [sys.executable, __file__, "--bare", *options],
        check=True,
        stdout=subprocess.PIPE,
        env=environment,
        timeout=1800,
    )
    return json.loads(done.stdout.splitlines()[-1])[NUM_WARM_UP:]


def bare_steps(options: list[str]) -> list[dict[str, float]]:
    """Sample each step's prompts with vLLM's engine alone, then train on them with torch alone."""
    from open_instruct.data.prompt_order import PromptOrder
    from open_instruct.data.run_inputs import load_inputs

    args = parse_args(options, GRPOConfig)
    inputs, mistakes = load_inputs(args)
    assert inputs is not None, mistakes
    order = PromptOrder(len(inputs.train_dataset), args.seed)
    sampler, trainer = BareSampler(args), BareTrainer(args, inputs.pad_token_id)
    steps = []
    for step in range(args.num_training_steps):
        numbers = range(step * args.num_unique_prompts_rollout, (step + 1) * args.num_unique_prompts_rollout)
        prompts = [inputs.train_dataset[order[number][1]].prompt for number in numbers]
        started = time.perf_counter()
        responses = sampler.sample(prompts, list(numbers))
        sampled = time.perf_counter()
        micro_batches = trainer.collate(prompts, responses)
        collated = time.perf_counter()
        trainer.step(micro_batches)
        trained = time.perf_counter()
        num_tokens = sum(len(response) for group in responses for response in group)
        steps.append({"sampling": sampled - started, "training": trained - collated, "tokens": num_tokens})
    return steps


class BareSampler:
    """vLLM's engine as the pipeline starts it, and nothing around it."""

    def __init__(self, args: Any) -> None:
        from open_instruct.engines.vllm_engine import make_engine
        from open_instruct.run import rollout_manager

        self._args = args
        options = rollout_manager.engine_options(
            args, args.device, seed=args.seed, max_model_len=args.max_sequence_length
        )
        self._engine = make_engine(options, 0)

    def sample(self, prompts: list[Any], numbers: list[int]) -> list[list[list[int]]]:
        from open_instruct.engines.vllm_engine import sampling_params
        from open_instruct.rollouts.prompt_requests import request_seed

        for prompt, number in zip(prompts, numbers, strict=True):
            config = replace(self._args.train_sampling, seed=request_seed(self._args.seed, number))
            self._engine.add_request(str(number), {"prompt_token_ids": prompt.tolist()}, sampling_params(config))
        done: dict[str, list[list[int]]] = {}
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                done[output.request_id] = [list(one.token_ids) for one in output.outputs]
        return [done[str(number)] for number in numbers]


class BareTrainer:
    """The policy gradient's forward, backward and AdamW in plain torch and Transformers, on the pipeline's micro-batches."""

    def __init__(self, args: Any, pad_token_id: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        if args.device.threads_per_learner:
            torch.set_num_threads(args.device.threads_per_learner)
        self._args, self._pad = args, pad_token_id
        self._model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path, dtype=args.device.torch_dtype)
        self._model.to(args.device.learner_device).train()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=0.0, weight_decay=0.0)

    def collate(self, prompts: list[Any], responses: list[list[list[int]]]) -> list[Any]:
        import numpy as np

        from open_instruct.data_types import TrainingSample
        from open_instruct.rollouts.packing import prepare_collated_data_for_workers

        samples = [
            TrainingSample(prompt, np.array(r, np.int32), np.ones(len(r), bool), np.zeros(len(r), np.float32), 1.0)
            for prompt, group in zip(prompts, responses, strict=True)
            for r in group
        ]
        [[mini_batch]] = prepare_collated_data_for_workers(
            samples,
            dp_world_size=1,
            pack_length=self._args.pack_length,
            rows=1,
            layout=self._args.device.collation_layout,
            pad_token_id=self._pad,
        )
        return mini_batch.micro_batches

    def step(self, micro_batches: list[Any]) -> None:
        import torch

        self._optimizer.zero_grad()
        num_tokens = sum(micro_batch.num_tokens for micro_batch in micro_batches)
        for micro_batch in micro_batches:
            arrays = {name: torch.from_numpy(getattr(micro_batch, name).copy()) for name in ARRAYS}
            tensors = {name: array.to(self._args.device.learner_device) for name, array in arrays.items()}
            ids = tensors["query_responses"].long()
            logits = self._model(ids, position_ids=tensors["position_ids"].long(), use_cache=False).logits[:, :-1]
            logprobs = logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
            weight = tensors["advantages"][:, 1:] * tensors["response_masks"][:, 1:]
            (-(logprobs * weight).sum() / num_tokens).backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()


def report(rows: list[dict[str, Any]], bare: list[dict[str, float]]) -> float:
    """Print one run; the ratio of a step to the sum of the bare parts."""
    total = median(row["time/total"] for row in rows)
    sampling, training = median(one["sampling"] for one in bare), median(one["training"] for one in bare)
    phases = {label: median(row[key] for row in rows) for label, key in PHASES.items()}
    rest = total - sum(phases.values())
    print(f"\n{'a step of the pipeline':<36}{total:8.3f} s")
    for label, seconds in phases.items():
        print(f"  {label:<34}{seconds:8.3f} s  {seconds / total:5.0%}")
    print(f"  {'rest (queues, calls, overlap < 0)':<34}{rest:8.3f} s  {rest / total:5.0%}")
    print(f"  {'learner waits for its batch':<34}{median(r['time/trainer_waiting_for_data'] for r in rows):8.3f} s")
    print(f"{'bare vLLM sampling, same tokens':<36}{sampling:8.3f} s")
    print(f"{'bare torch training, same tokens':<36}{training:8.3f} s")
    tokens = median(row["val/num_step_response_tokens"] for row in rows)
    bare_tokens = median(one["tokens"] for one in bare)
    print(f"tokens per step {tokens:.0f} (bare {bare_tokens:.0f}); tokens/s {tokens / total:,.0f}")
    ratio = total / (sampling + training)
    print(f"step / (bare sampling + bare training) = {ratio:.2f}")
    return ratio


def main() -> None:
    if sys.argv[1:2] == ["--bare"]:
        print(json.dumps(bare_steps(sys.argv[2:])))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name_or_path", default=str(ROOT / "assets" / "tiny_model"))
    parser.add_argument("--num_prompts", type=int, default=32)
    parser.add_argument("--num_samples", type=int, default=8)
    parser.add_argument("--response_length", type=int, default=32)
    parser.add_argument("--num_steps", type=int, default=20)
    parser.add_argument("--num_runs", type=int, default=3)
    parser.add_argument("--async_steps", type=int, default=0)
    parser.add_argument("--per_core", action="store_true", help="a learner and an engine for each core")
    parser.add_argument("--json", help="file for the rows")
    args = parser.parse_args()
    ratios, rows = [], []
    for _ in range(args.num_runs):
        with tempfile.TemporaryDirectory() as directory:
            options = run_options(args, Path(directory) / "out")
            bare = measure_bare(options)
            further = per_core_options() if args.per_core else []
            steps = measure_pipeline([*options, *further], Path(directory) / "out")
            ratios.append(report(steps, bare))
            rows.append(
                {
                    "async_steps": args.async_steps,
                    "per_core": args.per_core,
                    "step_s": median(row["time/total"] for row in steps),
                    "bare_sampling_s": median(one["sampling"] for one in bare),
                    "bare_training_s": median(one["training"] for one in bare),
                    "ratio": ratios[-1],
                    "tokens_per_step": median(row["val/num_step_response_tokens"] for row in steps),
                    "bare_tokens_per_step": median(one["tokens"] for one in bare),
                }
            )
    print(f"\nratio over {len(ratios)} runs: median {median(ratios):.2f}, from {min(ratios):.2f} to {max(ratios):.2f}")
    write_json(args.json, rows)


if __name__ == "__main__":
    main()
