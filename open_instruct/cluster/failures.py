"""The errors that end a run when a part of it fails."""

import ray

from open_instruct.system.work_threads import ThreadFailed

DO_NOT_FIT = "the weights that were sent do not fit the engine's model"
"""Start of the message of an engine that cannot place a tensor, or got no tensor for a parameter. A retry would fail too."""


class ComponentDied(RuntimeError):
    """An actor of the run died or failed; the message names it and the cause."""


class WeightsDiffer(RuntimeError):
    """An engine does not have the weights that the learners hold, or computes something else with them; the message says what."""


def root_cause(error: BaseException) -> str:
    """One line on the original cause of an error that Ray passed on."""
    while isinstance(error, ray.exceptions.RayTaskError) and error.cause is not None:
        error = error.cause
    text = str(error).strip().splitlines() or [""]
    meaningful = [line.strip() for line in text if line.strip()]
    last = meaningful[-1] if meaningful else "no message"
    return (last if isinstance(error, ThreadFailed) else f"{type(error).__name__}: {last}")[:500]


def failure_of(subject: str, error: BaseException) -> str:
    """One line that names what failed, and the original cause of the error."""
    cause = root_cause(error)
    return cause if cause.startswith(f"{subject} failed: ") else f"{subject} failed: {cause}"
