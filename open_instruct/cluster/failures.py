"""The errors that end a run when a part of it fails."""

import re

import ray

from open_instruct.system.work_threads import ThreadFailed

DO_NOT_FIT = "the weights that were sent do not fit the engine's model"
"""Start of the message of an engine that cannot place a tensor, or got no tensor for a parameter. A retry would fail too."""

NUM_MEMORY_USERS = 2
"""Processes that the message about full memory names."""


class ComponentDied(RuntimeError):
    """An actor of the run died or failed; the message names it and the cause."""


class WeightsDiffer(RuntimeError):
    """An engine does not have the weights that the learners hold, or computes something else with them; the message says what."""


def root_cause(error: BaseException) -> str:
    """One line on the original cause of an error that Ray passed on."""
    while isinstance(error, ray.exceptions.RayTaskError) and error.cause is not None:
        error = error.cause
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        return _memory_cause(str(error))
    text = str(error).strip().splitlines() or [""]
    meaningful = [line.strip() for line in text if line.strip()]
    last = meaningful[-1] if meaningful else "no message"
    return (last if isinstance(error, ThreadFailed) else f"{type(error).__name__}: {last}")[:500]


def _memory_cause(message: str) -> str:
    """One line on the death of a process that Ray 2.60 has ended because a machine's memory was nearly full. Ray's own message
    lists the processes that hold most, and ends with a paragraph on Ray's settings."""
    amounts = re.search(r"Memory usage (\d+)B exceeded threshold of \d+B \([\d.]+% of (\d+)B limit\)", message)
    if amounts is None:
        return "Ray ended it, because main memory ran out"
    used, total = (f"{int(amount) / 2**30:.1f} GiB" for amount in amounts.groups())
    users = re.findall(r"^\d+\t([\d.]+)\t(\S+)", message, re.MULTILINE)[:NUM_MEMORY_USERS]
    shares = ", ".join(f"{name} held {size} GiB" for size, name in users)
    return f"Ray ended it, because main memory ran out: {used} of {total} were in use{f' ({shares})' if shares else ''}"


def failure_of(subject: str, error: BaseException) -> str:
    """One line that names what failed, and the original cause of the error."""
    cause = root_cause(error)
    return cause if cause.startswith(f"{subject} failed: ") else f"{subject} failed: {cause}"
