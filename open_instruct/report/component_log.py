"""Log lines about the components of a run, in the documented formats of the fully async policy, and the user's own monitor.

`fully_async_training.log` under the output directory has a line per event: `grep "ERROR"` finds what went wrong,
`grep "Component Statistics"` the state of all components, and `grep "Parameter sync"` the updates of the weights.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from open_instruct.report.log_files import COMPONENTS

component_logger = logging.getLogger(COMPONENTS)
"""Logger for events of components. All of its lines are in the log files; the terminal shows only its warnings and errors."""

LOG_FILE = "fully_async_training.log"


def component_statistics(trainer: Mapping[str, Any], rollouter: Mapping[str, Any], queue: Mapping[str, Any]) -> str:
    """One line about trainer, rollouter and message queue."""
    parts = {"Trainer": trainer, "Rollouter": rollouter, "Queue": queue}
    return "Component Statistics - " + " | ".join(
        f"{name}: " + ", ".join(f"{key}={_short(value)}" for key, value in values.items())
        for name, values in parts.items()
    )


def rollouter_stats(rollouter: Mapping[str, Any], *, queue_size: int) -> str:
    return (
        f"Rollouter stats - Generated: {rollouter['total_generated_samples']}, "
        f"Dropped: {rollouter['dropped_stale_samples']}, Errors: {rollouter['generation_errors']}, "
        f"Queue size: {queue_size}, Param version: {rollouter['current_param_version']}, "
        f"Paused: {rollouter['is_paused']}, Sync requests: {rollouter['param_sync_requests']}"
    )


def generated(num_batches: int, rollouter: Mapping[str, Any]) -> str:
    return (
        f"Generated {num_batches} batches, param_version={rollouter['current_param_version']}, "
        f"errors={rollouter['generation_errors']}"
    )


def dropped_stale(num_samples: int) -> str:
    return f"Dropped stale samples: {num_samples}"


class RolloutMilestones:
    """Makes a log line for every tenth batch that was generated, and for every fifth sample that was too old.

    Args:
        batch_size: samples of one batch.
    """

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._told_batches = self._told_dropped = 0

    def lines(self, rollouter: Mapping[str, Any]) -> list[str]:
        """The lines that are due now. If several milestones were passed since the last call, they share one line."""
        lines = []
        num_batches, num_dropped = (
            rollouter["total_generated_samples"] // self._batch_size,
            rollouter["dropped_stale_samples"],
        )
        if num_batches // 10 > self._told_batches // 10:
            lines.append(generated(num_batches, rollouter))
            self._told_batches = num_batches
        if num_dropped // 5 > self._told_dropped // 5:
            lines.append(dropped_stale(num_dropped))
            self._told_dropped = num_dropped
        return lines


def processing_batch(num_samples: int, *, avg_age: float, max_age: int) -> str:
    return f"Processing batch: {num_samples} samples, avg_age={avg_age:.1f}, max_age={max_age}"


def syncing(version: int) -> str:
    return f"Syncing parameters to rollouter, version: {version}"


def sync_completed(seconds: float, version: int) -> str:
    return f"Parameter sync completed in {seconds:.2f}s, version: {version}"


def sync_attempt_failed(attempt: int, causes: Mapping[int, str]) -> str:
    return f"Sync attempt {attempt} failed: " + "; ".join(
        f"engine {engine}: {cause}" for engine, cause in causes.items()
    )


def retrying_sync(delay_s: float) -> str:
    return f"Retrying sync in {delay_s:g}s..."


def all_sync_attempts_failed(num_failures: int) -> str:
    return f"All sync attempts failed. Total failures: {num_failures}"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def run_monitor(
    monitor: Callable[[dict, dict], object] | None, trainer: Mapping[str, Any], rollouter: Mapping[str, Any]
) -> None:
    """Call the user's `monitor(trainer_stats, rollouter_stats)` and log what it returns. Its errors are logged, not raised."""
    if monitor is None:
        return
    try:
        result = monitor(dict(trainer), dict(rollouter))
    except Exception as error:  # a monitor must never stop the run that it watches
        component_logger.error("the monitor %s failed: %r", getattr(monitor, "__name__", monitor), error)
        return
    values = result if isinstance(result, dict) else {} if result is None else {"": result}
    for name, value in values.items():
        component_logger.info("Custom metric: %s", f"{name}={_short(value)}" if name else _short(value))


def check_alerts(alerts: Sequence[str], row: Mapping[str, Any]) -> dict[str, str]:
    """The metrics of a row that are above their limit (`metric=limit`), each with its alert's text."""
    messages = {}
    for alert in alerts:
        name, _, limit = alert.partition("=")
        value = row.get(name)
        if isinstance(value, int | float) and value > float(limit):
            messages[name] = f"{name} is {_short(value)}, above {limit}"
    return messages
