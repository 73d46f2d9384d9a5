"""Engines and a learner that answer at once: what is left is what moving and accounting for prompts costs.

`faked_parts` puts them into a run of the real loop; queues, controller, verifiers, message queue and driver stay as they are.
"""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import ray
from ray.util.queue import Empty, Queue

from open_instruct import grpo_fast
from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.data_types import (
    GenerationResult,
    PromptRequest,
    RolloutBatch,
    Sample,
    ShutdownSentinel,
    TokenStatistics,
)
from open_instruct.engines.weight_update_client import UpdateReport
from open_instruct.learners.actor_group import RayTrainGroup
from open_instruct.learners.train_actor import TrainRayActor
from open_instruct.run import rollout_manager, wiring
from open_instruct.run.placement_group import create_placement_groups

ENGINES_PER_PROCESS = 64
TIMEOUT_S = 60.0
POLL_S = 0.5
"""How long a real engine waits for prompts before it looks whether it should stop."""


class FakeEngines:
    """Many engines in one Ray actor, each a thread that serves the queues; the actor's handle stands for each of them."""

    def __init__(self, param_prompt_Q: Queue, inference_results_Q: Queue) -> None:
        self._prompts, self._results = param_prompt_Q, inference_results_Q
        self._version = 0
        self._stopping = threading.Event()

    def ready(self) -> int:
        return 0

    def process_queue_continuously(self) -> None:
        """One engine."""
        while not self._stopping.is_set():
            try:
                bundle = self._prompts.get(timeout=POLL_S)
            except Empty:
                continue
            if isinstance(bundle, ShutdownSentinel):
                return
            self._results.put([answer(request, self._version) for request in bundle], timeout=TIMEOUT_S)

    def set_version(self, version: int) -> None:
        self._version = version

    def take_inventory(self) -> dict[str, Any]:
        return {
            "held": [],
            "idle_s": 0.0,
            "needs_weights": False,
            "busy_s": 0.0,
            "num_generated_tokens": 0,
            "num_sleeps": 0,
            "asleep_s": 0.0,
            "memory_released_bytes": 0,
        }

    def stop(self) -> None:
        self._stopping.set()

    def shutdown(self) -> None:
        """Nothing to give back."""


def answer(request: PromptRequest, version: int) -> GenerationResult:
    """Responses of the asked length, in the shape of a real engine's."""
    config = request.generation_config
    tokens = np.arange(5, 5 + config.max_tokens, dtype=np.int32) % 200
    logprobs = np.full(config.max_tokens, -1.0, dtype=np.float32)
    prompt, spans = np.asarray(request.prompt, np.int32), [(version, config.max_tokens)]
    return GenerationResult(
        samples=[Sample(prompt, tokens.copy(), logprobs.copy(), "stop", spans) for _ in range(config.n)],
        index=request.index,
        prompt_id=request.prompt_id,
        issue_version=request.issue_version,
        engine_id=0,
        token_statistics=TokenStatistics(len(request.prompt), config.n * config.max_tokens, 0.0, time.time()),
    )


def start_fake_engines(num_engines: int, queues: tuple[Queue, Queue]) -> list[Any]:
    """A handle for each; 64 share a process."""
    actor = ray.remote(FakeEngines).options(num_cpus=0, max_concurrency=2 * ENGINES_PER_PROCESS)
    processes = [actor.remote(*queues) for _ in range(-(-num_engines // ENGINES_PER_PROCESS))]
    return [processes[number // ENGINES_PER_PROCESS] for number in range(num_engines)]


class FakeLearner(TrainRayActor):
    """Takes its data and reports; its "weights" are a version that it tells the engines."""

    def __init__(self, rank: int, _world_size: int) -> None:
        self._rank = rank
        self._engines: Mapping[int, Any] = {}
        self._version = 0

    def open_rendezvous(self, timeout_s: float) -> tuple[str, int]:
        return "127.0.0.1", 0  # there is nobody to meet

    def init(self, args: Any, device: Any, address: tuple[str, int], *, role: str, with_ref: bool) -> int:
        return 0

    def connect_rollout_engines(self, rollout_engines: Mapping[int, Any], rollout_engine_lock: Any) -> dict[int, str]:
        self._engines = rollout_engines
        return {}

    def train(self, rollout_id: int, rollout_data_ref: RolloutBatch) -> dict[str, Any]:
        ray.get(rollout_data_ref.rank_data[self._rank], timeout=TIMEOUT_S)
        nothing = dict.fromkeys(("count", "sum", "sum_of_squares", "max", "signed_sum"), 0.0)
        return {
            "sums": {},
            "num_tokens": rollout_data_ref.num_global_tokens,
            "mismatches": [nothing],
            "grad_norm": None,
            "num_nonfinite": 0,
            "num_empty": 0,
            "lr": 0.0,
            "seconds": 0.0,
            "optimizer_s": 0.0,
            "memory_in_use_bytes": 0,
            "peak_memory_bytes": 0,
        }

    eval = train

    def update_weights(self, version: int | None = None, engines: Sequence[int] | None = None) -> UpdateReport:
        assert version is not None
        numbers = list(self._engines) if engines is None else list(engines)
        told = {self._engines[number] for number in numbers}
        ray.get([fleet.set_version.remote(version) for fleet in told], timeout=TIMEOUT_S)
        self._version = version
        return UpdateReport(confirmed=dict.fromkeys(numbers, version))

    def held_version(self) -> int:
        return self._version

    def score(self, sequences: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[np.ndarray]:
        raise NotImplementedError("there is no model that could score tokens")

    def save_model(self, iteration: int, with_optimizer: bool = True, *, directory: str | None = None) -> None:
        """There is no model."""

    def save_checkpoint(self, directory: str) -> dict[str, int]:
        return {}

    def load_checkpoint(self, directory: str, version: int) -> None:
        self._version = version

    def sleep(self, tags: Sequence[str] | None = None) -> int:
        return 0

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """It never slept."""


@contextmanager
def faked_parts() -> Iterator[None]:
    """Runs that start meanwhile get `--vllm_num_engines` fake engines, 64 to a process, and one fake learner."""

    def make_engines(args: GRPOConfig, _pg: Any, *, queues: tuple[Queue, Queue], **_: Any) -> list[Any]:
        return start_fake_engines(args.vllm_num_engines, queues)

    def make_group(args: GRPOConfig, pg: Any, wandb_run_id: str | None) -> RayTrainGroup:
        return RayTrainGroup(1, 1, pg, device=args.device, actor_cls=FakeLearner)

    def make_room(args: GRPOConfig, **_: Any) -> dict[str, Any]:
        """For one engine; the others are there in name only."""
        groups = create_placement_groups(replace(args, vllm_num_engines=1))
        group, [place] = groups["rollout"]
        return {**groups, "rollout": (group, [place] * args.vllm_num_engines)}

    fakes: list[tuple[Any, str, Any]] = [
        (grpo_fast, "create_placement_groups", make_room),
        (grpo_fast, "create_actor_group", make_group),
        (rollout_manager, "create_rollout_engines", make_engines),
        (wiring, "WeightAgreement", lambda args, components: None),  # fake engines have no weights to agree on
    ]
    real = [(module, name, getattr(module, name)) for module, name, _ in fakes]
    try:
        for module, name, fake in fakes:
            setattr(module, name, fake)
        yield
    finally:
        for module, name, function in real:
            setattr(module, name, function)
