"""The learner: a DeepSpeed actor that trains.

    RayTrainGroup.async_train(rollout_id, data) ─► PolicyTrainerRayProcess × M, one DeepSpeed rank each
        for each mini-batch (one optimizer step):
            for each micro-batch: forward ─► summed loss over trained tokens / tokens of the mini-batch on all ranks ─► backward
            clip, AdamW, learning rate
        With `--streaming` the data arrives in partial batches, while the rest of the step is still being generated. Then backward
        runs on plain sums, and their gradient is divided once the number of tokens is known.
    RayTrainGroup.async_update_weights(version) ─► rank 0 sends, the other ranks take part in the gathers

The loss is normalised by the exact number of trained tokens over all micro-batches and ranks, so the result of a step does not
depend on how the batch was divided.
"""

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
import torch

from open_instruct.algorithms.denominators import Scales, loss_divisor
from open_instruct.cluster import process_group
from open_instruct.config.extensions import import_extensions
from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.data_types import Box, MiniBatch, RolloutBatch
from open_instruct.device import Device
from open_instruct.engines.weight_update_client import UpdateReport
from open_instruct.learners.cpu_threads import share_cores
from open_instruct.learners.learning_rate import num_updates_per_step, set_rate, take_rates
from open_instruct.learners.lora import ModelWithoutAdapter
from open_instruct.learners.model_files import save_model_files
from open_instruct.learners.models import build_engine, build_reference, hf_model, join_sequence_parallel
from open_instruct.learners.moving_reference import MovingReference
from open_instruct.learners.offload_tags import REFERENCE, TAGS, WEIGHTS
from open_instruct.learners.optimizer_step import apply_gradient, discard_gradient
from open_instruct.learners.policy_loss import MicroBatchLoss, PolicyLoss
from open_instruct.learners.random_state import random_state, seed_everything, set_random_state
from open_instruct.learners.safe_load import data_only
from open_instruct.learners.state_offload import StateOffload
from open_instruct.learners.step_sums import TOKENS, StepSums
from open_instruct.learners.train_actor import POLICY, TrainRayActor
from open_instruct.learners.weight_link import LinkOptions, WeightLink
from open_instruct.learners.weight_sync import DeepSpeedWeightSource
from open_instruct.storage.checkpoints import LEARNER_DIRECTORY, sync_files_of_rank
from open_instruct.storage.output_directory import names_a_full_disk

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from open_instruct.cluster.ray_utils import Lock

FETCH_S = 300.0
"""Deadline for fetching data that already exists somewhere in the cluster."""


class PolicyTrainerRayProcess(TrainRayActor):
    """One DeepSpeed rank. Made a Ray actor by `RayTrainGroup`.

    All ranks have to be called together, because training, weight updates, saving and loading are collective.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.version = 0
        """Number of training steps that are in the weights."""
        self._lock: Lock | None = None
        self._store: torch.distributed.TCPStore | None = None
        self._step: StepSums | None = None
        """The sums of a step that has begun with a partial batch and still waits for its last one; None between steps."""

    def open_rendezvous(self, timeout_s: float) -> tuple[str, int]:
        """On the first rank: listen for the other ranks. Returns the host and port to connect to."""
        self._store = process_group.open_store(self.world_size, timeout_s)
        return self._store.host, self._store.port

    def init(
        self, args: GRPOConfig, device: Device, address: tuple[str, int], *, role: str = POLICY, with_ref: bool = False
    ) -> int:
        """Join the other ranks and load the model. Returns the first `rollout_id`: 0, until a checkpoint is loaded."""
        if role != POLICY:
            raise ValueError(f"role {role!r}: the learners train the policy alone. Use {POLICY!r}.")
        if args.beta > 0 and not with_ref:
            raise ValueError(
                f"with_ref=False, beta {args.beta:g}: a KL penalty needs the reference model. Set with_ref=True."
            )
        self._args, self._device = args, device
        import_extensions(args.algorithm_modules)
        if device.threads_per_learner:
            torch.set_num_threads(device.threads_per_learner)
        timeout = timedelta(minutes=args.backend_timeout)
        process_group.join(device, address, self._store, rank=self.rank, world_size=self.world_size, timeout=timeout)
        seed_everything(args.seed)
        sequence_parallel = join_sequence_parallel(args, device, rank=self.rank, world_size=self.world_size)
        self.engine = build_engine(args, device, world_size=self.world_size, sequence_parallel=sequence_parallel)
        reference = None
        if with_ref and not args.use_peft:
            reference = build_reference(args, device, world_size=self.world_size, sequence_parallel=sequence_parallel)
        self._moving_reference = self._make_moving_reference(reference)
        base = ModelWithoutAdapter(self.engine) if with_ref and args.use_peft else reference
        self._loss = PolicyLoss(args, self.engine, base, device.learner_device)
        seed_everything(args.seed + self.rank)  # all ranks build the same model, then draw different numbers
        self._source = DeepSpeedWeightSource(hf_model(self.engine), zero_stage=args.deepspeed_stage)
        self._link = self._make_link()
        self._cores = share_cores(device, hf_model(self.engine), rank=self.rank)
        self._offload = StateOffload(device, self.engine, reference)
        return self.version

    def _make_link(self) -> WeightLink:
        options = LinkOptions(
            workers_per_engine=self._args.vllm_tensor_parallel_size,
            timeout_s=self._args.weight_sync_timeout_s,
            connect_timeout_s=self._args.init_timeout_s,
            find_address=process_group.free_address,
        )
        return WeightLink(self._source, self._device, rank=self.rank, world_size=self.world_size, options=options)

    def _make_moving_reference(self, reference: torch.nn.Module | None) -> MovingReference | None:
        args = self._args
        if reference is None:
            return None
        return MovingReference(
            reference,
            self.engine,
            every=args.ref_policy_update_freq,
            alpha=args.alpha,
            rank=self.rank,
            is_divided=args.deepspeed_stage == 3,
        )

    # --- training -----------------------------------------------------------------------------------------------------

    def train(self, rollout_id: int, rollout_data_ref: Box | RolloutBatch) -> dict[str, Any] | None:
        """One training step on this rank's share, or one partial batch of it (`--streaming`).

        Each partial batch adds to the gradient. All but the last return None. The last makes the optimizer step and returns sums
        for `merge_step_metrics`, which adds them up over ranks before it divides anything.

        Raises `ValueError` if the data belongs to another rollout.
        """
        self._offload.check_loaded(*TAGS, task="a training step")
        started = time.perf_counter()
        batch, mini_batches = self._fetch(rollout_id, rollout_data_ref)
        step = self._step or StepSums()
        in_parts = self._step is not None or not batch.is_last
        self._step = None if batch.is_last else step
        with self._cores.computing():
            if in_parts:
                self._accumulate(step, mini_batches, batch)
            else:
                self._train_whole(step, mini_batches)
        step.num_tokens += sum(micro.num_tokens for mini in mini_batches for micro in mini.micro_batches)
        step.seconds += time.perf_counter() - started
        if not batch.is_last:
            return None
        self.version = batch.training_step
        if self._moving_reference is not None:
            self._moving_reference.update(self.version)
        return self._report(step, num_epochs=self._args.num_epochs)

    def _report(self, step: StepSums, *, num_epochs: int) -> dict[str, Any]:
        is_counted = self.rank % self._args.sequence_parallel_size == 0  # other ranks of a group have the same rows
        memory = self._device.memory
        in_use, peak = memory.in_use_bytes(), memory.peak_bytes()
        report = step.report(num_epochs, memory_in_use_bytes=in_use, peak_memory_bytes=peak, is_counted=is_counted)
        return report | ({TOKENS: ray.put(step.token_values())} if is_counted and self._args.record else {})

    def _fetch(self, rollout_id: int, rollout_data_ref: Box | RolloutBatch) -> tuple[RolloutBatch, list[MiniBatch]]:
        """The batch, and this rank's share of its data."""
        batch = rollout_data_ref
        if isinstance(batch, Box):
            batch = ray.get(batch.inner, timeout=FETCH_S)
        if batch.training_step != rollout_id + 1:
            raise ValueError(f"data of rollout {batch.training_step - 1} was given for rollout {rollout_id}")
        return batch, ray.get(batch.rank_data[self.rank // self._args.sequence_parallel_size], timeout=FETCH_S)

    @torch.no_grad()
    def eval(self, rollout_id: int, rollout_data_ref: Box | RolloutBatch) -> dict[str, Any]:
        """The sums of `train` for the current weights, without a gradient or a step."""
        self._offload.check_loaded(WEIGHTS, REFERENCE, task="an evaluation")
        _, mini_batches = self._fetch(rollout_id, rollout_data_ref)
        step, started = StepSums(), time.perf_counter()
        with self._cores.computing():
            for mini_batch in mini_batches:
                step.divisor += self._divisor(mini_batch)
                for micro_batch in mini_batch.micro_batches:
                    loss = self._loss.compute(micro_batch, None, scales=self._scales(mini_batch))
                    step.add(loss.sums, loss.mismatch)
                    step.num_tokens += micro_batch.num_tokens
        step.lr, step.seconds = self.engine.get_lr()[0], time.perf_counter() - started
        return self._report(step, num_epochs=1)

    def _train_whole(self, step: StepSums, mini_batches: Sequence[MiniBatch]) -> None:
        """All optimizer steps of a training step whose data is complete."""
        old_logprobs = self._loss.old_logprobs(mini_batches)
        for epoch in range(self._args.num_epochs):
            for number, mini_batch in enumerate(mini_batches):
                if not mini_batch.num_global_tokens:
                    step.num_empty += 1
                    continue
                is_untouched = epoch == 0 and not step.grad_norms  # the learner still has the weights of the engines
                losses = self._train_mini_batch(mini_batch, old_logprobs[number] if old_logprobs else None)
                for loss in losses:
                    step.add(loss.sums, loss.mismatch if is_untouched else None)
                if epoch == 0:
                    step.remember_tokens(losses)
                step.divisor += self._divisor(mini_batch)
                self._update(step, epoch * len(mini_batches) + number, mini_batch.num_global_tokens)

    def _train_mini_batch(self, mini_batch: MiniBatch, old: list[torch.Tensor] | None) -> list[MicroBatchLoss]:
        """Accumulate the gradient of one optimizer step. Returns the losses of the micro-batches."""
        losses = []
        last = len(mini_batch.micro_batches) - 1
        divisor = self._divisor(mini_batch)
        for number, micro_batch in enumerate(mini_batch.micro_batches):
            self.engine.set_gradient_accumulation_boundary(number == last)
            loss = self._loss.compute(micro_batch, old[number] if old else None, scales=self._scales(mini_batch))
            # times world_size, because DeepSpeed averages over ranks and the loss is a sum over ranks
            self.engine.backward(loss.loss * (self.world_size / divisor), scale_wrt_gas=False)
            losses.append(loss.without_graph())
        return losses

    def _accumulate(self, step: StepSums, mini_batches: Sequence[MiniBatch], batch: RolloutBatch) -> None:
        """Forward and backward of one partial batch, and after the last the optimizer step. The denominator is not known before,
        so this is the gradient of plain sums."""
        micro_batches = [micro for mini_batch in mini_batches for micro in mini_batch.micro_batches]
        for number, micro_batch in enumerate(micro_batches):
            self.engine.set_gradient_accumulation_boundary(batch.is_last and number == len(micro_batches) - 1)
            loss = self._loss.compute(micro_batch, None)
            self.engine.backward(loss.loss * self.world_size, scale_wrt_gas=False)
            step.add(loss.sums, loss.mismatch)
            step.remember_tokens([loss.without_graph()])
        if batch.is_last:
            step.divisor = self._divisor(batch)
            self._update(step, 0, batch.num_global_tokens, denominator=step.divisor)

    def _update(self, step: StepSums, number: int, num_tokens: int, *, denominator: float | None = None) -> None:
        """Make optimizer step `number` (from 0) of a training step, but none without trained tokens, because momentum and weight
        decay would move the weights."""
        step.lr = set_rate(self.engine, self._args, self.version * num_updates_per_step(self._args) + number)
        started = time.perf_counter()
        if num_tokens:
            step.note_update(apply_gradient(self.engine, denominator=denominator))
        else:
            discard_gradient(self.engine)
            step.num_empty += 1
        step.optimizer_s += time.perf_counter() - started

    def _divisor(self, data: MiniBatch | RolloutBatch, denominator: float | str | None = None) -> float:
        """The number that divides the summed loss of an optimizer step; `denominator` None: that of the policy loss."""
        return loss_divisor(
            self._args.denominator if denominator is None else denominator,
            num_tokens=data.num_global_tokens,
            num_sequences=data.num_global_sequences,
            response_length=self._args.lengths.response,
        )

    def _scales(self, mini_batch: MiniBatch) -> Scales:
        """The factors of KL and cross-entropy in the sum that `_divisor` divides."""
        divisor = self._divisor(mini_batch)
        return Scales(
            kl=divisor / self._divisor(mini_batch, self._args.denominator_of_kl),
            ce=self._args.ce_coef * divisor / max(mini_batch.num_global_ce_tokens, 1),
        )

    # --- weights ------------------------------------------------------------------------------------------------------

    def connect_rollout_engines(
        self, rollout_engines: "Mapping[int, ActorHandle]", rollout_engine_lock: "Lock | None" = None
    ) -> dict[int, str]:
        """Set up the transport of weights to `rollout_engines` (by position), in place of an earlier transport.

        Returns on the first rank the engines that could not be reached, with the cause; if there are any, no engine is connected.
        Updates hold `rollout_engine_lock`, so that two groups never send to the same engines at once.
        """
        self._lock = rollout_engine_lock
        return self._link.connect(rollout_engines)

    def score(self, sequences: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[np.ndarray]:
        """(R,) float32 log-probs of each response after its prompt, computed one sequence at a time; the same on every rank."""
        self._offload.check_loaded(WEIGHTS, task="scoring tokens")
        with self._cores.computing():
            return [self._loss.score(prompt, response) for prompt, response in sequences]

    def held_version(self) -> int:
        """The version of the weights: the number of training steps that are in them."""
        return self.version

    def update_weights(self, version: int | None = None, engines: Sequence[int] | None = None) -> UpdateReport:
        """Send the weights to these engines (by position; None is all). Returns on the first rank the outcome of the update.

        `version` is the version that the caller expects; None accepts any. Where engines receive in one collective, all connected
        engines get the weights. Raises `ValueError` if the weights are of another version, because the engines would label their
        tokens wrongly.
        """
        if version not in (None, self.version):
            raise ValueError(f"version {version} was to be sent, but these weights are of version {self.version}")
        self._offload.check_loaded(WEIGHTS, task="an update of the engines")
        if self.rank != 0 or self._lock is None:
            return self._link.send(self.version, engines)
        with self._lock.held(self._args.weight_sync_timeout_s):
            return self._link.send(self.version, engines)

    # --- giving the device to others ----------------------------------------------------------------------------------

    def sleep(self, tags: Sequence[str] | None = None) -> int:
        """Move these states (see `state_offload`; None: all) off the device. Returns the bytes released, as measured."""
        return self._offload.offload(tags)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Bring these states back to the device with exactly the same bits."""
        self._offload.reload(tags)

    # --- saving -------------------------------------------------------------------------------------------------------

    def save_model(self, iteration: int, with_optimizer: bool = True, *, directory: str | None = None) -> None:
        """Write a Hugging Face model directory, by default `step_*` under `output_dir`. With LoRA write only the adapter, in
        peft's format, unless `save_merged_lora`.

        With the optimizer, the directory's subdirectory `checkpoint` holds a checkpoint from which training can go on.
        """
        self._offload.check_loaded(WEIGHTS, task="saving the model")
        path = Path(directory or Path(self._args.output_dir) / f"step_{iteration:06d}")
        with names_a_full_disk(path):
            save_model_files(path, self._args, hf_model(self.engine), self._source, rank=self.rank)
        if with_optimizer:
            self.save_checkpoint(str(path / "checkpoint"))

    def save_checkpoint(self, directory: str) -> dict[str, int]:
        """Write weights, optimizer, scheduler and this rank's random state under `directory`.

        Returns the bytes of each file that this rank has written, by path within `directory`. The files are then on disk.
        """
        self._offload.check_loaded(*TAGS, task="saving a checkpoint")
        with names_a_full_disk(Path(directory)):
            self.engine.save_checkpoint(directory, tag=LEARNER_DIRECTORY, exclude_frozen_parameters=self._args.use_peft)
            torch.save(random_state(), Path(directory) / f"random_state_{self.rank}.pt")
            if self._moving_reference is not None:
                self._moving_reference.save(Path(directory))
            return sync_files_of_rank(Path(directory), self.rank)

    def load_checkpoint(self, directory: str, version: int) -> None:
        """Go on from a checkpoint that was written after `version` training steps."""
        self._offload.check_loaded(*TAGS, task="loading a checkpoint")
        with data_only():
            path, _ = self.engine.load_checkpoint(
                directory, tag=LEARNER_DIRECTORY, load_module_strict=not self._args.use_peft
            )
            if path is None:
                raise ValueError(f"{directory} holds no DeepSpeed checkpoint; remove it to start from an older one")
            set_random_state(torch.load(Path(directory) / f"random_state_{self.rank}.pt", weights_only=True))
        take_rates(self.engine, self._args, training_step=version)
        if self._moving_reference is not None:
            self._moving_reference.load(Path(directory))
        self.version = version
