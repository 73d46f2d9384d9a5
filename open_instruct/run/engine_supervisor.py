"""Watches the engines of a run, replaces engines that die, and has their prompts issued again.

check ── a future ended, an engine makes no progress ──► replace ─ its prompts are issued again at once
                                                           │
                 other engines go on                       └──► a new engine in its place: starting ─► ready
                                                                 the synchronizer gives it the current weights ─► serve

Until Ray has noticed that a node is gone it would place a replacement on the dead node, so the replacement waits until Ray
has noticed. On shared devices a replacement waits until the learners have given their memory back.
"""

import logging
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray

from open_instruct.cluster import bundles
from open_instruct.cluster.failures import ComponentDied, root_cause
from open_instruct.cluster.node_watch import LostNode
from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.report.component_log import component_logger
from open_instruct.rollouts.controller import RESULTS_ARRIVE_S
from open_instruct.rollouts.running_evaluation import is_of_evaluation
from open_instruct.run.ray_results import value_of
from open_instruct.system.counted import counted
from open_instruct.system.work_threads import POLL_S

if TYPE_CHECKING:
    from ray.actor import ActorHandle

logger = logging.getLogger(__name__)

ANSWER_S = 10.0
"""Deadline of a call that only asks an engine something."""
CONTROL_S = 60.0
"""Deadline of a call to the controller."""
INVENTORY_EVERY_S = 5.0
"""Seconds between two looks at the progress of the engines."""
MOVE_S = 60.0
"""How long Ray may take to notice a lost node (usually 15 s). After that the replacement is started anyway."""


@dataclass
class _Starting:
    """A replacement that is being loaded."""

    ready: Any
    """A reference that is done when the engine is loaded or its loading has failed."""
    deadline: float


@dataclass
class _Waiting:
    """An engine that cannot be started again yet, because Ray still counts its lost node as alive or learners have its device."""

    lost_node_id: str | None
    cause: str
    deadline: float
    """When the engine is started even if Ray has not noticed the loss of the node."""


class EngineSupervisor:
    """Watches the engines and replaces engines that die, while restarts are left (`--max_engine_restarts`).

    Args:
        engines: all engines, by position. A replacement is put into this list in the place of the engine that died.
        controller: issues lost prompts again.
        start_engine: returns a new actor for a position, or None if no node has room for the actor.
        lost_node: the node with which an engine died, or None. An engine that died with its node does not count as a restart,
            because a node may hold more engines than `--max_engine_restarts` allows.
        may_start: whether the devices are free, because an engine measures free memory when it starts.
    """

    def __init__(
        self,
        args: GRPOConfig,
        engines: "list[ActorHandle]",
        controller: "ActorHandle",
        start_engine: "Callable[[int], ActorHandle | None]",
        *,
        lost_node: Callable[[int], LostNode | None] = lambda _: None,
        may_start: Callable[[], bool] = lambda: True,
    ) -> None:
        self._args = args
        self._engines = engines
        self._controller = controller
        self._start_engine = start_engine
        self._lost_node = lost_node
        self._may_start = may_start
        self.has_begun = False
        """Whether an engine has served or was replaced."""
        self._futures: dict[int, Any] = {}
        """References to `process_queue_continuously` of the engines that serve. A reference is done only when its engine has
        died."""
        self._starting: dict[int, _Starting] = {}
        self._waiting: dict[int, _Waiting] = {}
        self._inventory: dict[int, tuple[Any, float]] = {}
        """Calls of `take_inventory` without an answer yet, and when they were made."""
        self._asked_at = 0.0
        self._updating_at: dict[int, float] = {}
        """When an engine was last seen receiving weights. `--engine_stall_timeout_s` counts from that time."""
        self.needs_weights: set[int] = set()
        """Engines that have prompts to wake up for, but discarded their weights when they fell asleep (level 2)."""
        self.needs_weights_to_evaluate: set[int] = set()
        """The engines in `needs_weights` that have evaluation prompts."""
        self.num_restarts = 0
        self.num_recovered_prompts = 0

    @property
    def serving(self) -> dict[int, "ActorHandle"]:
        return {number: self._engines[number] for number in self._futures}

    @property
    def futures(self) -> list[Any]:
        """A reference for each engine that serves, which is done when the engine has ended."""
        return list(self._futures.values())

    @property
    def loading(self) -> list[Any]:
        """A reference for each replacement, which is done when the engine is loaded or its loading has failed."""
        return [starting.ready for starting in self._starting.values()]

    @property
    def ready(self) -> dict[int, "ActorHandle"]:
        """Replacements that are loaded and wait for weights."""
        loaded = {n for n, starting in self._starting.items() if ray.wait([starting.ready], timeout=0)[0]}
        return {number: self._engines[number] for number in sorted(loaded)}

    def serve(self, numbers: list[int]) -> None:
        """Let engines take prompts. They must have the current weights. Engines that are being started again are skipped."""
        self.has_begun |= bool(numbers)
        for number in numbers:
            if number not in self._starting and number not in self._waiting:
                self._futures[number] = self._engines[number].process_queue_continuously.remote()

    def began(self, number: int) -> None:
        """An engine is loaded, and no engine serves yet. A replacement counts as an original engine from now on."""
        if self._starting.pop(number, None) is not None:
            self.has_begun = False

    def admit_replacement(self, numbers: list[int]) -> None:
        """Let replacements take prompts. They must have received the current weights."""
        for number in numbers:
            del self._starting[number]
        self.serve(numbers)

    def end_loading(self) -> bool:
        """The run ends: kill the replacements that are still being loaded. Returns whether there were any."""
        loading = self._starting.keys() - self.ready.keys()
        for number in loading:
            ray.kill(self._engines[number])
        self._starting.clear()
        self._waiting.clear()
        return bool(loading)

    def check(self) -> None:
        """Find engines that died, hang or did not finish loading in time, and replace them.

        Raises:
            ComponentDied: `--max_engine_restarts` replacements have been made already.
        """
        causes = self._stalled() | self._not_starting()
        if self._futures:
            ended, _ = ray.wait(self.futures, num_returns=len(self._futures), timeout=0)
            for number, future in self._futures.items():
                if future in ended:
                    cause = self._cause(future)
                    causes[number] = f"died: {cause}" if cause else "ended before the run did"
        for number, cause in causes.items():
            self.replace(number, cause)
        self._start_waiting()

    def replace(self, number: int, cause: str) -> None:
        """Take an engine out, issue its prompts again, and start another engine in its place."""
        node = self._lost_node(number)
        self._count_restart(number, cause, node)
        self.has_begun = True
        served = self._futures.pop(number, None) is not None
        self._starting.pop(number, None)
        self._inventory.pop(number, None)
        self._updating_at.pop(number, None)
        self.needs_weights.discard(number)
        self.needs_weights_to_evaluate.discard(number)
        ray.kill(self._engines[number])
        if served:
            self._recover_prompts()
        self._waiting[number] = _Waiting(node.node_id if node else None, cause, time.monotonic() + MOVE_S)
        self._start_waiting()

    def _start_waiting(self) -> None:
        """Start the replacements that no longer have to wait."""
        for number, waiting in list(self._waiting.items()):
            may_be_placed = waiting.lost_node_id is None or not bundles.is_alive(waiting.lost_node_id)
            if (may_be_placed or time.monotonic() > waiting.deadline) and self._may_start():
                del self._waiting[number]
                self._start(number, waiting.cause)

    def _start(self, number: int, cause: str) -> None:
        engine = self._start_engine(number)
        if engine is None:
            self._go_on_without(number, cause)
            return
        self._engines[number] = engine
        self._starting[number] = _Starting(engine.ready.remote(), time.monotonic() + self._args.init_timeout_s)

    def _count_restart(self, number: int, cause: str, node: LostNode | None) -> None:
        """Log why an engine is replaced, and count the restart. Raises `ComponentDied` if no restart is left."""
        if node is not None:
            logger.error("engine %d %s; %s", number, cause, node)
            return
        limit = self._args.max_engine_restarts
        if self.num_restarts >= limit:
            raise ComponentDied(f"engine {number} {cause}")
        self.num_restarts += 1
        component_logger.error("engine %d %s; starting it again (%d of %d)", number, cause, self.num_restarts, limit)

    def _go_on_without(self, number: int, cause: str) -> None:
        num_left = len(self._futures) + len(self._starting) + len(self._waiting)
        if num_left == 0:
            raise ComponentDied(f"engine {number} {cause}, no node has room for another engine, and no engine is left")
        component_logger.error(
            "engine %d is given up: no node has room for it. Going on with %s", number, counted(num_left, "engine")
        )

    @staticmethod
    def _cause(future: Any) -> str:
        """The error of a reference that is done; "" if there was none."""
        try:
            ray.get(future, timeout=ANSWER_S)
        except ray.exceptions.RayError as error:
            return re.sub(r"^engine \d+ failed: ", "", root_cause(error))  # the caller names the engine
        return ""

    def _not_starting(self) -> dict[int, str]:
        """Replacements that failed while they were being loaded, or are not ready in time."""
        causes = {}
        for number, starting in self._starting.items():
            is_done = bool(ray.wait([starting.ready], timeout=0)[0])
            if is_done and (error := self._cause(starting.ready)):
                causes[number] = f"could not be started: {error}"
            elif not is_done and time.monotonic() > starting.deadline:
                causes[number] = f"was not ready {self._args.init_timeout_s:g} s after it was started again"
        return causes

    def _stalled(self) -> dict[int, str]:
        """Engines that do not answer, or that hold prompts and take no step. Asks without waiting for the answers."""
        limit, now = self._args.engine_stall_timeout_s, time.monotonic()
        if now - self._asked_at > min(INVENTORY_EVERY_S, limit / 2):
            self._asked_at = now
            for number, engine in (self.serving | self.ready).items():
                self._inventory.setdefault(number, (engine.take_inventory.remote(), now))
        causes = {}
        for number, (ref, asked_at) in list(self._inventory.items()):
            if ray.wait([ref], timeout=0)[0]:
                del self._inventory[number]
                if cause := self._cause(ref):
                    causes[number] = f"died: {cause}"
                elif cause := self._stall_cause(number, ray.get(ref, timeout=ANSWER_S)):
                    causes[number] = cause
            elif now - asked_at > limit:
                causes[number] = f"did not answer for {now - asked_at:.0f} s"
        return causes

    def _stall_cause(self, number: int, inventory: dict[str, Any]) -> str:
        now = time.monotonic()
        if inventory["state"] == "updating":
            # An engine may take no step during an update, and the update brings weights that the engine may lack. If the update
            # takes too long, the synchronizer replaces the engine.
            self._updating_at[number] = now
            return ""
        if inventory["needs_weights"]:
            self.needs_weights.add(number)
            if any(map(is_of_evaluation, inventory["held"])):
                self.needs_weights_to_evaluate.add(number)
        idle_s = min(inventory["idle_s"], now - self._updating_at.get(number, -math.inf))
        if inventory["held"] and idle_s > self._args.engine_stall_timeout_s:
            return f"holds {len(inventory['held'])} prompts and took no step for {idle_s:.0f} s"
        return ""

    def _recover_prompts(self) -> None:
        """Issue every prompt again that is not in the prompt queue, not inside a living engine and not back yet."""
        value_of(self._controller.take_back_prompts.remote(), "taking prompts back", CONTROL_S)
        time.sleep(
            2 * POLL_S
        )  # longer than an engine's `get`, so an inventory now includes every prompt that was being pulled
        refs = [engine.take_inventory.remote() for engine in self.serving.values()]
        answered, _ = ray.wait(refs, num_returns=len(refs), timeout=ANSWER_S) if refs else ([], [])
        prompt_ids: list[str] = []
        for ref in answered:
            try:
                prompt_ids += ray.get(ref, timeout=ANSWER_S)["held"]
            except ray.exceptions.RayError:
                continue  # this engine has died too; the next check replaces it
        in_time = RESULTS_ARRIVE_S + CONTROL_S  # the controller first waits for results that are on their way
        num_recovered = value_of(self._controller.recover_lost.remote(prompt_ids), "recovering lost prompts", in_time)
        self.num_recovered_prompts += num_recovered
        logger.warning("prompts that were lost with the engine and are issued again: %d", num_recovered)
