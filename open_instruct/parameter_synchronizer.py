"""Brings the learners' weights to the engines, whatever happens to an engine meanwhile.

    sync(version) ─► learners send to every engine ─► each confirms the version
                        some failed: try those again, after a delay, `--max_sync_retries` times
                        some still behind: they are taken out, started again, and get the weights before they serve

An engine has the old weights or the new ones, never a mixture: it swaps when all have come (see `weight_sync.py`).
"""

import statistics
import time
from dataclasses import dataclass
from typing import Any

from open_instruct import component_log
from open_instruct.component_log import components
from open_instruct.config import GRPOConfig
from open_instruct.engine_supervisor import EngineSupervisor
from open_instruct.weight_sync import UpdateReport


@dataclass(frozen=True)
class SyncReport:
    """What one call of `sync` did."""

    version: int
    seconds: float
    pauses_s: list[float]
    """Seconds that generation stood still, per engine."""
    num_failed_attempts: int


class ParameterSynchronizer:
    """Keeps every engine that serves at the version that the learners have reached. Used by the driver's step loop alone."""

    def __init__(self, args: GRPOConfig, parts: Any) -> None:
        self._args = args
        self._parts = parts
        self._supervisor: EngineSupervisor = parts.supervisor
        self._connected: set[int] = set()
        self.current_param_version = 0
        self.param_sync_count = 0
        self.sync_failures = 0
        self.last_sync_time = 0.0
        """Unix time of the end of the last one."""
        self._reports: list[SyncReport] = []

    @property
    def sync_group_initialized(self) -> bool:
        """Whether learners and engines are connected, with no engine missing."""
        return bool(self._connected) and self._connected >= set(self._supervisor.serving)

    def sync(self, version: int) -> SyncReport:
        """Bring `version`, which the learners hold now, to every engine; replacements that are ready begin to serve with it.

        When it returns, every engine that serves has confirmed `version`.
        """
        started = time.perf_counter()
        components.info(component_log.syncing(version))
        newcomers = self._supervisor.newly_ready()
        wanted = self._wanted(newcomers)
        report = self._update(version, wanted)
        self._supervisor.serve(newcomers_with_weights := [number for number in newcomers if number in report.confirmed])
        self._connected |= set(newcomers_with_weights)
        seconds = time.perf_counter() - started
        self.current_param_version = version
        self.param_sync_count += 1
        self.last_sync_time = time.time()
        components.info(component_log.sync_completed(seconds, version))
        done = SyncReport(version, seconds, list(report.pauses_s.values()), report.num_failed_attempts)
        self._reports.append(done)
        return done

    def give_weights_to_newcomers(self) -> None:
        """Replacements that became ready while the learners' weights are still those of the last `sync` begin to serve; and an
        engine that dropped its weights in sleep gets them again."""
        if self._supervisor.newly_ready() or self._supervisor.needs_weights:
            self._supervisor.needs_weights = False
            self.sync(self.current_param_version)

    def _wanted(self, newcomers: list[int]) -> list[int]:
        serving = set(self._supervisor.serving)
        if newcomers or not serving:  # the group has changed, or is made for the first time
            self._connect()
        everyone = serving or set(range(len(self._parts.manager.rollout_engines)))
        return sorted(everyone | set(newcomers))

    def _connect(self) -> None:
        """Make the communication group anew, with the engines that are there now."""
        self._parts.wait(
            self._parts.group.async_init_weight_update_connections(self._parts.manager.rollout_engines),
            what="the connection of learners and engines",
            timeout_s=self._args.init_timeout_s,
        )

    def _update(self, version: int, wanted: list[int]) -> "_Outcome":
        outcome, report = _Outcome({}, {}, 0), UpdateReport()
        served_before = set(self._supervisor.serving)
        for attempt in range(1, self._args.max_sync_retries + 2):
            behind = [number for number in wanted if number not in outcome.confirmed]
            report = self._attempt(version, behind)
            outcome.confirmed |= report.confirmed
            outcome.pauses_s |= report.pauses_s
            if not report.failures:
                return outcome
            outcome.num_failed_attempts += 1
            self.sync_failures += 1
            components.warning(component_log.sync_attempt_failed(attempt, report.failures))
            self._parts.check_health()  # a dead engine is replaced, not tried again
            gone = served_before - set(self._supervisor.serving)
            wanted = [number for number in wanted if number not in gone]
            if all(number in outcome.confirmed for number in wanted):
                return outcome
            if attempt <= self._args.max_sync_retries:
                components.info(component_log.retrying_sync(self._args.sync_retry_delay))
                time.sleep(self._args.sync_retry_delay)
        components.error(component_log.all_sync_attempts_failed(self.sync_failures))
        for number in wanted:
            if number not in outcome.confirmed:
                self._supervisor.replace(number, f"did not take version {version}: {report.failures.get(number, '')}")
        return outcome

    def _attempt(self, version: int, engines: list[int]) -> UpdateReport:
        reports = self._parts.wait(
            self._parts.group.async_update_weights(version, engines),
            what=f"weights of version {version}",
            timeout_s=self._args.weight_sync_timeout_s + 60.0,
        )
        return reports[0]

    def take_metrics(self) -> dict[str, float]:
        """Of the syncs since the last call: seconds of the whole (`time/weight_sync`), and how long engines stood still."""
        reports, self._reports = self._reports, []
        if not reports:
            return {}
        pauses = [pause for report in reports for pause in report.pauses_s] or [0.0]
        return {
            "time/weight_sync": sum(report.seconds for report in reports),
            "time/weight_sync_mean": statistics.fmean(pauses),
            "time/weight_sync_min": min(pauses),
            "time/weight_sync_max": max(pauses),
            "time/weight_sync_median": statistics.median(pauses),
        }

    def get_statistics(self) -> dict[str, Any]:
        """Counts since the start of this process, under the names of the fully async policy."""
        return {
            "current_param_version": self.current_param_version,
            "param_sync_count": self.param_sync_count,
            "sync_failures": self.sync_failures,
            "engine_restarts": self._supervisor.num_restarts,
        }


@dataclass
class _Outcome:
    """What the attempts of one sync have come to."""

    confirmed: dict[int, int]
    pauses_s: dict[int, float]
    num_failed_attempts: int
