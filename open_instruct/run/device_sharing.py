"""Lets learners and engines use the same devices in turns: the side that does not compute gives its memory back.

batch complete ─► engines fall asleep ─► learners wake ─► training step ─► learners keep their weights alone
                                                                                  │
generation ◄── engines: kv_cache ◄── learners sleep ◄── new weights ◄── engines: weights

An update needs of a learner only its weights. So moments, gradients and the reference leave the device before the engines take
memory for their weights; otherwise an update could need more memory than a training step.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from open_instruct.cluster.failures import ComponentDied
from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.data_types import Moment
from open_instruct.engines.engine_sleep import KV_CACHE, WEIGHTS
from open_instruct.learners.actor_group import RayTrainGroup
from open_instruct.learners.offload_tags import GRADIENTS, OPTIMIZER, REFERENCE, TAGS
from open_instruct.learners.offload_tags import WEIGHTS as LEARNER_WEIGHTS
from open_instruct.run.rollout_manager import RolloutManager
from open_instruct.weight_transports import RAY_OBJECT

NOT_SENT = OPTIMIZER, GRADIENTS, REFERENCE
"""What a learner does not need in an update."""
ALL_STATES = frozenset(TAGS)
LEAVING_S = 30.0
"""How long engines may take to give back their memory when the run ends: they finish a step and copy no weights. After that they
are killed."""
KILLED_S = 5.0
"""Time until the memory of a killed engine is free. Its core ends 2 s after its actor."""


@dataclass
class FreeDevices:
    """Which side may take memory on the shared devices now."""

    for_engines: bool
    """Whether engines may be started, because no learner has memory on the devices."""


class DeviceSharing:
    """Learners and engines have separate devices, so nothing is handed over."""

    is_exclusive = False

    def offload_engines(self) -> None:
        """The engines give their memory back; the learners do not take their memory yet."""

    def learners_compute(self) -> None:
        """The engines give their memory back, and the learners take their memory. The engines must have finished generating."""

    @contextmanager
    def weight_update(self) -> Iterator[None]:
        """Inside the block new weights go from the learners to the engines. After the block the engines compute."""
        yield

    @contextmanager
    def learners_only(self) -> Iterator[None]:
        """Inside the block the learners have all of their state. After the block the engines have what they had before the
        block."""
        yield

    def learners_take_over(self) -> None:
        """The run ends: from now on learners have all of their state, and engines generate nothing more."""

    def take_metrics(self) -> dict[str, float]:
        return {}

    def take_sleeps(self) -> list[tuple[float, float]]:
        """Times in which the engines slept and woke since the last call: the begin (Unix time), and seconds."""
        return []


class ExclusiveSharing(DeviceSharing):
    """Engines and learners hand their devices to each other.

    Args:
        wait: waits for references; `Waits.wait`.
        devices: records whether engines may be started.
        timeout_s: deadline of one hand-over.
        loading: references to engines that are being restarted. They do not answer until they are loaded.
        loading_timeout_s: deadline of their loading.
        end_loading: ends the engines that are loading, and returns whether there were any.
    """

    is_exclusive = True

    def __init__(
        self,
        rollouts: RolloutManager,
        learners: RayTrainGroup,
        wait: Any,
        devices: FreeDevices,
        *,
        timeout_s: float,
        loading: Callable[[], list[Any]] = list,
        loading_timeout_s: float = 0.0,
        end_loading: Callable[[], bool] = lambda: False,
    ) -> None:
        self._rollouts = rollouts
        self._learners = learners
        self._wait_for = wait
        self._devices = devices
        self._timeout_s = timeout_s
        self._loading = loading
        self._loading_timeout_s = loading_timeout_s
        self._end_loading = end_loading
        self._metrics: dict[str, float] = defaultdict(float)
        self._engines_are_asleep = False
        self._asleep_since: Moment | None = None
        self._sleeps: list[tuple[float, float]] = []
        self._awake: frozenset[str] = frozenset()
        """The states that the learners have on their devices."""

    def offload_engines(self) -> None:
        self._offload_engines(keep_weights=False)  # each engine gets new weights before it wakes

    def _offload_engines(self, *, keep_weights: bool) -> None:
        self._devices.for_engines = False
        self._wait_for(
            self._loading(),
            subject="engines: start",
            timeout_s=self._loading_timeout_s,
            limit="init_timeout_s",
            without_dead=True,
            interruptible=True,  # leaving loses nothing, and an engine may load for minutes
        )
        refs = self._rollouts.async_offload(keep_weights=keep_weights)
        self._note_released(self._timed("engines_offload", refs, without_dead=True))

    def _note_released(self, released: list[int | None]) -> None:
        self._metrics["memory/engines_offloaded_bytes"] = sum(num_bytes or 0 for num_bytes in released)
        self._engines_are_asleep = True
        self._asleep_since = self._asleep_since or Moment()

    def learners_compute(self) -> None:
        self.offload_engines()
        self._wake_learners()

    @contextmanager
    def weight_update(self) -> Iterator[None]:
        if not self._engines_are_asleep:
            # No step was trained; an engine was replaced, and the other engines keep their weights.
            self._offload_engines(keep_weights=True)
        self._wake_learners([LEARNER_WEIGHTS])
        num_bytes = self._release_what_is_not_sent()
        self._wake_engines([WEIGHTS])
        yield
        self._metrics["memory/learners_offloaded_bytes"] = num_bytes + self._offload_learners()
        self._wake_engines([KV_CACHE])

    @contextmanager
    def learners_only(self) -> Iterator[None]:
        self._offload_engines(keep_weights=True)
        self._wake_learners()
        yield
        self._offload_learners()
        self._wake_engines()

    def learners_take_over(self) -> None:
        """Does not wait for an engine to generate or load, because a scheduler may give the run only a minute."""
        if self._awake == ALL_STATES:
            return  # the engines have released their memory
        self._devices.for_engines = False
        if self._end_loading():
            time.sleep(KILLED_S)
        if self._awake:  # an update was broken off: an engine has taken memory for weights, and may hang in the update
            self._kill_engines()
        else:
            answers = self._rollouts.async_leave_devices()
            try:
                self._note_released(self._timed("engines_offload", answers, without_dead=True, timeout_s=LEAVING_S))
            except (TimeoutError, ComponentDied):  # an engine that fails must not cost the checkpoint
                self._kill_engines()
        self._wake_learners()

    def _kill_engines(self) -> None:
        self._rollouts.kill_engines()
        time.sleep(KILLED_S)

    def take_metrics(self) -> dict[str, float]:
        """Seconds of each hand-over since the last call, and the measured bytes that the last hand-overs gave back."""
        metrics, self._metrics = self._metrics, defaultdict(float)
        return dict(metrics)

    def take_sleeps(self) -> list[tuple[float, float]]:
        sleeps, self._sleeps = self._sleeps, []
        return sleeps

    def _wake_learners(self, tags: Sequence[str] | None = None) -> None:
        self._timed("learners_onload", self._learners.async_onload(tags))
        self._awake |= ALL_STATES if tags is None else frozenset(tags)

    def _release_what_is_not_sent(self) -> int:
        self._awake -= frozenset(NOT_SENT)
        return sum(self._timed("learners_offload", self._learners.async_offload(NOT_SENT)))

    def _offload_learners(self) -> int:
        self._awake = frozenset()
        released = self._timed("learners_offload", self._learners.async_offload())
        self._devices.for_engines = True
        return sum(released)

    def _wake_engines(self, tags: list[str] | None = None) -> None:
        self._engines_are_asleep = False
        self._timed("engines_onload", self._rollouts.async_onload(tags), without_dead=True)
        if self._asleep_since is not None and tags != [WEIGHTS]:  # with weights alone they generate nothing yet
            self._sleeps.append((self._asleep_since.unix, self._asleep_since.elapsed_s()))
            self._asleep_since = None

    def _timed(self, phase: str, refs: list, *, without_dead: bool = False, timeout_s: float | None = None) -> list:
        """Wait for `refs` and count the seconds. With `without_dead` the death of an engine is left to the supervisor, and the
        other engines go on."""
        started = time.perf_counter()
        values = self._wait_for(
            refs,
            subject=phase.replace("_", ": "),
            timeout_s=timeout_s or self._timeout_s,
            limit="weight_sync_timeout_s",
            without_dead=without_dead,
        )
        self._metrics[f"time/{phase}"] += time.perf_counter() - started
        return values


def doubts_about_updates(args: GRPOConfig) -> list[str]:
    """Warnings about how weights will reach the engines, given before anything starts."""
    slow = args.device.kind == "cuda" and args.shares_devices and args.device.weight_transport == RAY_OBJECT
    if not slow or args.weight_transport == RAY_OBJECT:  # a user who chose it knows
        return []
    return [
        f"{args.num_learners} learners and {args.num_engine_workers} workers of engines share GPUs: weights go through main "
        "memory (ray_object), which for 16 GB takes some 30 seconds in every update, while the GPUs wait. Within a GPU they are "
        "copied in about a second, if each learner shares its GPU with one worker: make --vllm_num_engines times "
        f"--vllm_tensor_parallel_size equal to the {args.num_learners} learners."
    ]
