"""All waits of the driver. Each wait has a deadline, and notices within a second that an actor died or a signal came."""

import logging
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray

from open_instruct.cluster.failures import ComponentDied
from open_instruct.engines.vllm_engine import EngineCoreLost
from open_instruct.run.health import Health
from open_instruct.run.ray_results import value_of
from open_instruct.system.signals import Signals

logger = logging.getLogger(__name__)

HEALTH_POLL_S = 0.5
"""Seconds between two checks of the signals and the parts while the driver waits."""


class Waits:
    """Waits for references, and checks `health` and `signals` while it waits."""

    def __init__(self, health: Health, signals: Signals) -> None:
        self._health = health
        self._signals = signals

    def wait(
        self,
        refs: Any,
        *,
        subject: str,
        timeout_s: float,
        limit: str | None = None,
        interruptible: bool = False,
        without_dead: bool = False,
        checks_health: bool = True,
        watched: Sequence[Any] = (),
        on_poll: Callable[[], None] | None = None,
    ) -> Any:
        """The values of `refs` (one reference or a list). With `without_dead` the value is None for a dead actor, and for an
        engine whose core is dead. Without `checks_health` the death of a part that does not answer here is no failure.

        Does not wait for the references in `watched`, but raises the failure of any of them. `on_poll` is called now and then.

        Raises:
            TimeoutError: no answer in time. Names `subject`, and `limit`, the option that sets `timeout_s`.
            ComponentDied: an actor failed.
            Interrupted: a signal came, and the wait is `interruptible` because nothing is lost by leaving it.
        """
        all_refs = list(refs) if isinstance(refs, list) else [refs]
        values: dict[Any, Any] = {}
        deadline = time.monotonic() + timeout_s
        while pending := [ref for ref in all_refs if ref not in values]:
            if interruptible:
                self._signals.raise_if_received()
            self._notice_signal(subject)
            if checks_health:
                self._health.check()
            if on_poll is not None:
                on_poll()
            failed, _ = ray.wait(list(watched), num_returns=len(watched), timeout=0) if watched else ([], [])
            for ref in failed:
                self._value(ref, subject)
            ready_refs, waiting = ray.wait(pending, num_returns=len(pending), timeout=HEALTH_POLL_S)
            for ref in ready_refs:  # raise at once, because other actors may wait for a failed actor in a collective
                values[ref] = self._value(ref, subject, without_dead=without_dead)
            if waiting and time.monotonic() > deadline:
                advice = f". Where it only takes longer, raise --{limit}" if limit else ""
                raise TimeoutError(
                    f"{subject}: {len(waiting)} of {len(all_refs)} did not answer in {timeout_s:g} s{advice}"
                )
        ordered = [values[ref] for ref in all_refs]
        return ordered if isinstance(refs, list) else ordered[0]

    def _notice_signal(self, subject: str) -> None:
        """After a signal the run ends once this wait is over: log that once, and replace no more engines."""
        if self._signals.received is None:
            return
        self._health.is_ending = True
        if not self._signals.is_told:
            self._signals.is_told = True
            logger.warning("%s came: %s is finished first", signal.Signals(self._signals.received).name, subject)

    def _value(self, ref: Any, subject: str, *, without_dead: bool = False) -> Any:
        """The value of a reference that is done. If an actor died because its node was lost, the error names the node."""
        try:
            return value_of(ref, subject)
        except ComponentDied as error:
            if without_dead and isinstance(error.__cause__, (ray.exceptions.RayActorError, EngineCoreLost)):
                return None
            if nodes := self._health.lost_nodes():
                raise ComponentDied(nodes) from error
            if dead := self._health.name_of_dead(error.__cause__):
                raise ComponentDied(f"{dead} died: {error}") from error.__cause__
            raise
