"""Brings the learners' weights to the engines, even while engines die and are replaced.

    sync(version) ─► learners send to every engine ─► each engine confirms the version
                        engines that failed: get the weights again, after a delay, up to `--max_sync_retries` times
                        engines that still lack the version: replaced, and the replacements get it before they serve

An engine serves the old weights or the new weights, never a mixture (see `engines/weight_receiver.py`).
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from open_instruct.cluster.failures import DO_NOT_FIT, WeightsDiffer
from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.engines.weight_update_client import HELD_UP, UpdateReport
from open_instruct.report import component_log
from open_instruct.report.component_log import component_logger
from open_instruct.run.engine_supervisor import EngineSupervisor
from open_instruct.run.weight_agreement import WeightAgreement

CONNECTING_S = 60.0
"""Seconds added to `--init_timeout_s` for making the communication group, so that the engines reach their own limit first."""


@dataclass(frozen=True)
class SyncReport:
    """What one call of `sync` did."""

    version: int
    seconds: float
    pauses_s: list[float]
    """Seconds without generation, per engine."""
    num_failed_attempts: int


class ParameterSynchronizer:
    """Brings every engine that serves to the version that the learners have reached. Only the driver's step loop uses it."""

    def __init__(self, args: GRPOConfig, components: Any, agreement: WeightAgreement | None = None) -> None:
        """`agreement` compares each new engine with the learners before the engine serves. None: engines are not compared."""
        self._args = args
        self._agreement = agreement
        self._components = components
        self._supervisor: EngineSupervisor = components.supervisor
        self._connected: dict[int, Any] = {}
        """The engines to which the learners are connected, by position."""
        self._versions: dict[Any, int] = {}
        """The version that each engine has confirmed. The key is the engine, not its position, because a replacement at the same
        position has confirmed nothing."""
        self.current_param_version = 0
        self.param_sync_count = 0
        self.sync_failures = 0
        self.last_sync_time = 0.0
        """Unix time at which the last sync ended."""
        self._reports: list[SyncReport] = []

    @property
    def sync_group_initialized(self) -> bool:
        """Whether the learners are connected to all current engines."""
        return bool(self._connected) and self._connected == self._members()

    @property
    def versions(self) -> dict[int, int]:
        """The version that each engine serves, by position."""
        return {n: self._versions[engine] for n, engine in self._members().items() if engine in self._versions}

    def sync(self, version: int) -> SyncReport:
        """Bring `version`, which the learners hold now, to every engine. Loaded replacements get it too and begin to serve.

        When `sync` returns, every engine that serves has confirmed `version`.

        Raises:
            ComponentDied: an engine does not take the version and no restart is left.
            Interrupted: a signal came. Signals are checked before and after an attempt, not during it, because learners cannot
                save their state while they send weights.
        """
        self._components.signals.raise_if_received()
        started = time.perf_counter()
        component_logger.info(component_log.syncing(version))
        if self._agreement is not None and version == 0:
            self._agreement.note_loaded(self._members())
        with self._components.sharing.weight_update():
            pauses_s, num_failed_attempts = self._update(version)
        self._compare(version)
        self._supervisor.admit_replacement([n for n in self._supervisor.ready if self.versions.get(n) == version])
        assert all(self.versions.get(number) == version for number in self._supervisor.serving), self.versions
        seconds = time.perf_counter() - started
        self.current_param_version = version
        self.param_sync_count += 1
        self.last_sync_time = time.time()
        component_logger.info(component_log.sync_completed(seconds, version))
        report = SyncReport(version, seconds, pauses_s, num_failed_attempts)
        self._reports.append(report)
        return report

    def give_weights_to_replacements(self) -> int | None:
        """Send weights to loaded replacements, which then begin to serve, and to engines that discarded their weights in sleep.

        These engines get the weights that the learners hold, under the version of those weights. Example: with
        `trigger_parameter_sync_step` 2 the learners may hold version 5 while the last `sync` sent version 4; then all engines get
        version 5. Returns the version that every engine serves now, or None if no engine needed weights.
        """
        if not self._supervisor.ready and not self._supervisor.needs_weights:
            return None
        for number in self._supervisor.needs_weights:
            self._versions.pop(self._members().get(number), None)
        self._supervisor.needs_weights.clear()
        self._supervisor.needs_weights_to_evaluate.clear()
        if self._components.sharing.is_exclusive:  # every engine will sleep, and level-2 sleep discards weights
            self._versions.clear()
        return self.sync(self._held_version()).version

    def _held_version(self) -> int:
        """The version that the learners hold, counted in whole steps. Learners answer after the batch that they are working
        on."""
        versions = self._components.wait(
            self._components.learners.async_held_version(),
            subject="the version of the learners' weights",
            timeout_s=self._args.progress_timeout_s,
            limit="progress_timeout_s",
            interruptible=True,
        )
        assert len(set(versions)) == 1, f"learners hold weights of different versions: {versions}"
        return versions[0]

    def _members(self) -> dict[int, Any]:
        """The engines that can take weights now: engines that serve and replacements that are loaded; at the start, all
        engines."""
        members = self._supervisor.serving | self._supervisor.ready
        if not members and not self._supervisor.has_begun:
            return dict(enumerate(self._components.rollouts.rollout_engines))
        return dict(sorted(members.items()))

    def _behind(self, version: int, members: dict[int, Any]) -> list[int]:
        return [number for number, engine in members.items() if self._versions.get(engine) != version]

    def _update(self, version: int) -> tuple[list[float], int]:
        """Send until every engine has `version`, and replace the engines that fail to take it. Returns the seconds for which
        engines paused, and the number of failed attempts."""
        pauses_s: list[float] = []
        causes: dict[Any, str] = {}
        """Cause by engine that failed. The key is not the position, because replacements take over positions."""
        for attempt in range(1, self._args.max_sync_retries + 2):
            members = self._members()
            report = self._attempt(version, members)
            pauses_s += report.pauses_s.values()
            if not report.failures:
                return pauses_s, attempt - 1
            self.sync_failures += 1
            for number, cause in report.failures.items():
                causes[members[number]] = cause
                # This engine may have had the version already, and taken part only because all engines receive in one
                # collective. After an update that broke off, it generates nothing until it has received a whole update.
                self._versions.pop(members[number], None)
            raise_if_weights_do_not_fit(report.failures)
            component_logger.warning(component_log.sync_attempt_failed(attempt, report.failures))
            self._components.signals.raise_if_received()
            self._components.health.check()  # replaces dead engines, so that the next attempt leaves them out
            if not self._behind(version, self._members()):
                return pauses_s, attempt
            if attempt <= self._args.max_sync_retries:
                component_logger.info(component_log.retrying_sync(self._args.sync_retry_delay))
                time.sleep(self._args.sync_retry_delay)
        component_logger.error(component_log.all_sync_attempts_failed(self.sync_failures))
        return pauses_s + self._replace_those_behind(version, causes), self._args.max_sync_retries + 1

    def _replace_those_behind(self, version: int, causes: dict[Any, str]) -> list[float]:
        """Replace the engines that failed and lack `version`. Engines that failed only because another engine of the collective
        failed get the weights once more, without that other engine. A replacement that became ready only now, and has received
        no weights yet, gets them later. Returns the seconds for which engines paused."""
        members = self._members()
        failed = {n: causes[members[n]] for n in self._behind(version, members) if members[n] in causes}
        held_up = [number for number, cause in failed.items() if cause == HELD_UP]
        for number, cause in failed.items():
            if number not in held_up:
                self._supervisor.replace(number, f"did not take version {version}: {cause}")
        if held_up and set(held_up) <= set(self._behind(version, self._members())):
            return self._update(version)[0]
        for number in held_up:  # no engine serves yet, so there is no collective without the engines that failed
            self._supervisor.replace(number, f"did not take version {version}: {HELD_UP}")
        return []

    def _compare(self, version: int) -> None:
        """Compare each new engine that took the weights with the learners. Raises `WeightsDiffer`."""
        if self._agreement is None:
            return

        def send_again() -> None:
            self._versions.clear()
            self._update(version)

        confirmed = {n: engine for n, engine in self._members().items() if self._versions.get(engine) == version}
        self._agreement.check(confirmed, send_again=send_again)

    def _attempt(self, version: int, members: dict[int, Any]) -> UpdateReport:
        """Send once to all of `members` that lack `version`. The communication group is made again after a failure and when its
        members have changed."""
        behind = self._behind(version, members)
        if not behind:
            return UpdateReport()
        if members != self._connected and (unreachable := self._connect(members)):
            return UpdateReport(failures=dict.fromkeys(behind, HELD_UP) | unreachable)
        reports = self._components.wait(
            self._components.learners.async_update_weights(version, behind),
            subject=f"weights of version {version}",
            timeout_s=2 * self._args.weight_sync_timeout_s + 60.0,
            limit="weight_sync_timeout_s",
        )
        self._versions |= {members[number]: confirmed for number, confirmed in reports[0].confirmed.items()}
        if reports[0].failures:
            self._connected = {}
        return reports[0]

    def _connect(self, members: dict[int, Any]) -> dict[int, str]:
        """Make the communication group of learners and `members`. Returns the engines that were not reached, with the cause."""
        self._connected = {}
        [unreachable, *_] = self._components.wait(
            self._components.learners.async_init_weight_update_connections(self._components.rollouts, members),
            subject="the connection of learners and engines",
            timeout_s=self._args.init_timeout_s + CONNECTING_S,
            limit="init_timeout_s",
        )
        if not unreachable:
            self._connected = members
        return unreachable

    def take_metrics(self) -> dict[str, float]:
        """Metrics of the syncs since the last call: the sum of their seconds (`time/weight_sync`) and its distribution over syncs
        (all learners send for the same time), and the seconds for which engines paused (`time/engine_pause_*`)."""
        reports, self._reports = self._reports, []
        if not reports:
            return {}
        pauses = [pause for report in reports for pause in report.pauses_s] or [0.0]
        seconds = [report.seconds for report in reports]
        return {
            "time/weight_sync": sum(seconds),
            **_distribution("time/weight_sync", seconds),
            **_distribution("time/engine_pause", pauses),
        }

    def get_statistics(self) -> dict[str, Any]:
        """Counts since the start of this process, under the names of the fully async policy."""
        return {
            "current_param_version": self.current_param_version,
            "param_sync_count": self.param_sync_count,
            "sync_failures": self.sync_failures,
            "engine_restarts": self._supervisor.num_restarts,
        }


def _distribution(name: str, values: Sequence[float]) -> dict[str, float]:
    return {
        f"{name}_mean": statistics.fmean(values),
        f"{name}_min": min(values),
        f"{name}_max": max(values),
        f"{name}_median": statistics.median(values),
    }


def raise_if_weights_do_not_fit(failures: Mapping[int, str]) -> None:
    """Raise `WeightsDiffer` if a tensor does not fit an engine's model, because every attempt and every engine would fail."""
    for number, failure in failures.items():
        if DO_NOT_FIT in failure:
            raise WeightsDiffer(f"engine {number}: {failure}")
