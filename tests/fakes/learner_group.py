"""A group of real learner actors, and samples for it to train on."""

import gc
import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from conftest import TIMEOUT_S, make_args

from open_instruct.data_types import Box, RolloutBatch, TrainingSample
from open_instruct.rollouts.packing import prepare_collated_data_for_workers

LEARNING_RATE = 1e-3
RESPONSE_LENGTH = 32  # of `make_args`


def make_samples(num: int, *, seed: int = 0, num_tokens: int = 60) -> list[TrainingSample]:
    """Random token ids of mixed lengths with random advantages."""
    rng = np.random.default_rng(seed)
    samples = []
    for _ in range(num):
        response = rng.integers(3, num_tokens, rng.integers(2, 24)).astype(np.int32)
        samples.append(
            TrainingSample(
                query=rng.integers(3, num_tokens, rng.integers(4, 20)).astype(np.int32),
                response=response,
                mask=np.ones(len(response), dtype=bool),
                logprobs=np.full(len(response), -2.0, dtype=np.float32),
                advantage=float(rng.normal()),
            )
        )
    return samples


_IDLE: dict[int, tuple[Any, Any]] = {}
"""Groups whose test has ended, with their places, by the number of learners. On one machine all nodes are this one."""


class Learners:
    """A group of real learner actors. Their processes serve one test after another, because it takes seconds to import torch."""

    def __init__(self, ray: Any, **options: Any) -> None:
        # The engine's log-probs of `make_samples` are made up: by default they are not corrected for.
        options = {"use_rho_correction": False, **options}
        self.args = make_args(learning_rate=LEARNING_RATE, total_episodes=16 * 4, **options)
        self.ray = ray
        self.group, self._places = _IDLE.pop(self.args.num_learners, None) or self._new_group()
        self.num_steps = 0
        started = self.group.async_init(self.args, with_ref=self.args.load_ref_policy)
        assert ray.get(started, timeout=TIMEOUT_S) == [0] * self.args.num_learners

    def train(
        self, samples: list[TrainingSample], *, pack_length: int = 512, pairs_per_token: float | None = None
    ) -> dict[str, float]:
        from open_instruct.learners.step_sums import merge_step_metrics

        ranks = prepare_collated_data_for_workers(
            samples,
            dp_world_size=self.args.num_data_shares,
            pack_length=pack_length,
            rows=1,
            layout="padded",
            pad_token_id=0,
            num_mini_batches=self.args.num_mini_batches,
            pairs_per_token=pairs_per_token,
        )
        batch = RolloutBatch(self.num_steps + 1, [self.ray.put(batches) for batches in ranks])
        refs = self.group.async_train(self.num_steps, Box(self.ray.put(batch)))
        self.num_steps += 1
        return merge_step_metrics(self.ray.get(refs, timeout=TIMEOUT_S))

    def train_in_pieces(self, pieces: list[list[TrainingSample]], *, pack_length: int = 512) -> dict[str, float]:
        """One step whose data comes in pieces, as with `--streaming`; the last may be empty."""
        from open_instruct.learners.step_sums import merge_step_metrics

        refs = []
        for number, samples in enumerate(pieces):
            ranks = prepare_collated_data_for_workers(
                samples,
                dp_world_size=self.args.num_data_shares,
                pack_length=pack_length,
                rows=1,
                layout="padded",
                pad_token_id=0,
                num_mini_batches=1,
            )
            piece = RolloutBatch(
                self.num_steps + 1,
                [self.ray.put(batches) for batches in ranks],
                is_last=number == len(pieces) - 1,
                num_global_tokens=sum(int(sample.mask.sum()) for piece in pieces for sample in piece),
                num_global_sequences=sum(bool(sample.mask.any()) for piece in pieces for sample in piece),
            )
            refs = self.group.async_train(self.num_steps, piece)
        self.num_steps += 1
        return merge_step_metrics(self.ray.get(refs, timeout=TIMEOUT_S))

    def weights(self, directory: Path) -> dict[str, torch.Tensor]:
        from safetensors.torch import load_file

        self.ray.get(self.group.async_save_model(0, directory=str(directory), with_optimizer=False), timeout=TIMEOUT_S)
        return load_file(directory / "model.safetensors")

    def _new_group(self) -> tuple[Any, Any]:
        from open_instruct.run.placement_group import create_actor_group, create_placement_groups

        end_idle_learners(but=1)  # there is room for two groups beside this one
        places = create_placement_groups(self.args)["actor"]
        return create_actor_group(self.args, places, None), places[0]

    def close(self) -> None:
        self.ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        started_over = [worker.__ray_call__.remote(start_over) for worker in self.group.workers]
        self.ray.get(started_over, timeout=TIMEOUT_S)
        if self.args.num_learners in _IDLE:
            _end(self.group, self._places)
        else:
            _IDLE[self.args.num_learners] = self.group, self._places


def start_over(learner: Any) -> None:
    """Make a learner what it was before `init`, and its process free of what DeepSpeed keeps for all models of a process."""
    import deepspeed

    rank, world_size = learner.rank, learner.world_size
    vars(learner).clear()
    gc.collect()
    torch.distributed.destroy_process_group()
    deepspeed.comm.comm.cdb = None
    importlib.reload(deepspeed.utils.groups)
    learner.__init__(rank, world_size)


def end_idle_learners(*, but: int = 0) -> None:
    """Give back the places of the processes that no test uses, `but` for the groups that were used last."""
    while len(_IDLE) > but:
        _end(*_IDLE.pop(next(iter(_IDLE))))


def _end(group: Any, places: Any) -> None:
    import ray

    group.shut_down()
    ray.util.remove_placement_group(places)


def plain_steps(
    model_path: str, batches: list[list[TrainingSample]], learning_rates: list[float], *, denominator: str = "token"
) -> dict[str, torch.Tensor]:
    """What the steps do to the weights, sequence by sequence in plain torch; the change of each parameter. Every loss takes this
    step, because the ratio is 1; only the denominator differs."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.0)
    for samples, lr in zip(batches, learning_rates, strict=True):
        optimizer.zero_grad()
        num_tokens = sum(len(sample.response) for sample in samples)
        for sample in samples:
            ids = torch.from_numpy(np.concatenate([sample.query, sample.response])).long()[None]
            logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
            # with one update per batch the ratio is 1 and its gradient that of the log-prob
            divisor = {
                "token": num_tokens,
                "sequence": len(samples) * len(sample.response),
                "constant": len(samples) * RESPONSE_LENGTH,
            }[denominator]
            (-sample.advantage * logprobs[len(sample.query) - 1 :].sum() / divisor).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    return {name: p.detach() - before[name] for name, p in model.named_parameters()}


def relative_error(change: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    assert set(change) == set(reference)
    off = sum(float((change[name] - reference[name]).double().square().sum()) for name in reference)
    return (off / sum(float(value.double().square().sum()) for value in reference.values())) ** 0.5


def change_since_start(model_path: str, now: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    start = load_file(Path(model_path) / "model.safetensors")
    return {name: value - start[name] for name, value in now.items()}
