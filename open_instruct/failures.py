"""What a run ends with when a part of it fails."""

import ray


class ComponentDied(RuntimeError):
    """An actor of the run died or failed; the message names it and the cause."""


def root_cause(error: BaseException) -> str:
    """One line on what lies under an error that came through Ray."""
    while isinstance(error, ray.exceptions.RayTaskError) and error.cause is not None:
        error = error.cause
    text = str(error).strip().splitlines() or [""]
    meaningful = [line.strip() for line in text if line.strip()]
    return f"{type(error).__name__}: {meaningful[-1] if meaningful else 'no message'}"[:500]
