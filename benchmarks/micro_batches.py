"""What a micro-batch costs a learner, by its length and its attention; how long a learner takes to fall asleep and to wake up.

    python benchmarks/micro_batches.py                                   # less than a minute on two cores
    python scripts/data/build_random_model.py --output_dir out/model     # on a GPU, of Qwen3-0.6B's shape
    python benchmarks/micro_batches.py --model out/model --response_length 512 --pack_lengths 2048 8192

One learner's parts in this process: four prompts of 24 tokens with 8 responses each. Times are medians of at most four
micro-batches after one to warm up. `queued` is when the program has handed everything to the GPU: where that is nearly all of
the time, the GPU waits for the program, and longer micro-batches cost no more. On CPU nothing is queued. What stands behind `--`
are options of the run: `-- --compile_model`, or `-- --gradient_checkpointing False`.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.report import print_table, write_json  # noqa: E402

Layout = Literal["padded", "packed"]
NUM_PROMPTS, PROMPT_LENGTH, RESPONSES = 4, 24, 8
IDS = 3, 300
"""Tokens are drawn from this range, which every vocabulary has."""
ON_ONE_RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29611"}


class OneLearner:
    """The engine of DeepSpeed, the loss, and what moves states off the device."""

    def __init__(self, model: str, response_length: int, pack_length: int, options: Sequence[str] = ()) -> None:
        from open_instruct.config.cli import parse_args
        from open_instruct.config.grpo_config import GRPOConfig
        from open_instruct.device import current_device

        kind = current_device().kind
        words = ["--model_name_or_path", model, "--dataset_mixer_list", "reasoning_gym/chain_sum?size=20&seed=7", "1.0"]
        words += ["--response_length", response_length, "--pack_length", pack_length, "--max_prompt_token_length", 64]
        words += ["--gradient_checkpointing", "--deepspeed_stage", 2, "--load_ref_policy", "False", "--beta", 0.0]
        self.args = parse_args([str(word) for word in [*words, "--device_type", kind, *options]], GRPOConfig)
        self.device = self.args.device
        os.environ.update(ON_ONE_RANK | self.device.learner_env)
        self._build()

    def _build(self) -> None:
        import deepspeed

        from open_instruct.learners.models import build_engine
        from open_instruct.learners.policy_loss import PolicyLoss
        from open_instruct.learners.state_offload import StateOffload

        deepspeed.init_distributed(dist_backend=self.device.collective_backend, auto_mpi_discovery=False)
        self.engine = build_engine(self.args, self.device, world_size=1)
        self.loss = PolicyLoss(self.args, self.engine, None, self.device.learner_device)
        self.states = StateOffload(self.device, self.engine)

    def times(self, micro_batch: Any, *, is_last: bool = False) -> list[float]:
        """Seconds until the forward pass is queued and done, and the same of the backward pass."""
        self.engine.set_gradient_accumulation_boundary(is_last)
        start = time.perf_counter()
        loss = self.loss.compute(micro_batch, None).loss
        queued = time.perf_counter()
        self.device.synchronize()
        done = time.perf_counter()
        self.engine.backward(loss, scale_wrt_gas=False)
        backward_queued = time.perf_counter()
        self.device.synchronize()
        return [queued - start, done - start, backward_queued - done, time.perf_counter() - done]


def micro_batches(learner: OneLearner, pack_length: int, layout: Layout, *, share: bool) -> list[Any]:
    import numpy as np

    from open_instruct.config.model_checks import pairs_per_token
    from open_instruct.data_types import TrainingSample
    from open_instruct.rollouts.packing import prepare_collated_data_for_workers

    rng, length = np.random.default_rng(0), learner.args.response_length
    prompts = [rng.integers(*IDS, PROMPT_LENGTH).astype(np.int32) for _ in range(NUM_PROMPTS)]
    samples = [
        TrainingSample(
            query=prompt, response=rng.integers(*IDS, length).astype(np.int32), mask=np.ones(length, bool),
            logprobs=np.full(length, -5.0, np.float32), advantage=1.0,
        )
        for prompt in prompts for _ in range(RESPONSES)
    ]  # fmt: skip
    [[mini_batch]] = prepare_collated_data_for_workers(
        samples, dp_world_size=1, pack_length=pack_length, rows=1, layout=layout,
        pad_token_id=0, pairs_per_token=pairs_per_token(learner.args) if share else None,
    )  # fmt: skip
    return list(mini_batch.micro_batches)


def measure(learner: OneLearner, implementation: str, pack_length: int, *, share: bool) -> dict[str, Any]:
    learner.engine.module.attend_by(implementation)
    batches = micro_batches(learner, pack_length, "padded" if implementation == "sdpa" else "packed", share=share)
    learner.times(batches[0])
    columns = [median(column) for column in zip(*(learner.times(batch) for batch in batches[:4]), strict=True)]
    names = ("forward queued", "forward ms", "backward queued", "backward ms")
    where = {"attention": implementation, "pack_length": pack_length, "shared": share, "micro-batches": len(batches)}
    return where | {name: 1000 * seconds for name, seconds in zip(names, columns, strict=True)}


def sleep_and_wake(learner: OneLearner, batch: Any) -> list[dict[str, Any]]:
    """After a step, so that the optimizer has its moments."""
    learner.times(batch, is_last=True)
    learner.engine.step()
    rows = []
    for number in (1, 2, 3):
        start = time.perf_counter()
        num_bytes = learner.states.offload()
        asleep = time.perf_counter()
        learner.states.reload()
        rows.append(
            {
                "sleep": number,
                "GiB": num_bytes / 2**30,
                "falls asleep s": asleep - start,
                "wakes s": time.perf_counter() - asleep,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "assets/tiny_model"))
    parser.add_argument("--response_length", type=int, default=64)
    parser.add_argument("--pack_lengths", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--json", help="file for the tables")
    parser.add_argument("options", nargs="*", metavar="-- OPTION", help="of grpo_fast.py")
    args = parser.parse_args()
    import torch

    learner = OneLearner(args.model, args.response_length, args.pack_lengths[0], args.options)
    attentions = ["sdpa", *["flash_attention_2"] * (learner.device.kind == "cuda")]
    table = [
        measure(learner, attention, pack_length, share=share)
        for pack_length in args.pack_lengths
        for attention in attentions
        for share in (False, True)
    ]
    print_table(table)
    sleeps = sleep_and_wake(learner, micro_batches(learner, args.pack_lengths[0], "padded", share=False)[0])
    print_table(sleeps)
    write_json(args.json, table + sleeps)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
