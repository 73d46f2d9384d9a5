"""Gets the values of Ray references, with errors that name the part that failed."""

from typing import Any

import ray

from open_instruct.cluster.failures import ComponentDied, failure_of

FETCH_S = 10.0
"""How long it may take to fetch a value that has been computed."""


def value_of(ref: Any, subject: str, timeout_s: float = FETCH_S) -> Any:
    """The value of `ref`. Raises a `ComponentDied` that names `subject` if the call failed, its actor died, or no answer came
    within `timeout_s` seconds."""
    try:
        return ray.get(ref, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError as error:
        raise ComponentDied(f"{subject}: no answer in {timeout_s:g} s") from error
    except ray.exceptions.RayError as error:
        raise ComponentDied(failure_of(subject, error)) from error


def was_killed(error: ComponentDied) -> bool:
    """Whether an actor's process ended without raising an error: by a signal, or because memory ran out."""
    cause = error.__cause__
    return isinstance(cause, ray.exceptions.ActorDiedError) and not cause.actor_init_failed
