"""Engines of a teacher that are played in this process, and the part of Ray that waits for them."""

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray

from open_instruct.data_types import TeacherLogprobs

TOP_K = 2


def said_of(response: np.ndarray) -> TeacherLogprobs:
    """What the played teacher says: it depends on each token alone, so that a test can tell whose answer it is."""
    ids = response.astype(np.int32)
    logprobs = (-0.001 * ids).astype(np.float32)
    return TeacherLogprobs(np.stack([ids, ids + 1], 1), np.stack([logprobs, logprobs - 1], 1), logprobs)


@dataclass(eq=False)
class Call:
    """A reference to an answer."""

    responses: list[np.ndarray]
    process_id: int
    error: Exception | None = None
    is_done: bool = False


@dataclass(eq=False)
class PlayedTeacher:
    """Answers at once, or when told."""

    answers: bool = True
    process_id: int = 1
    calls: list[Call] = field(default_factory=list)

    @property
    def score(self) -> Any:
        return SimpleNamespace(remote=self._ask)

    def _ask(self, sequences: Sequence[tuple[np.ndarray, np.ndarray]]) -> Call:
        call = Call([response for _, response in sequences], self.process_id, is_done=self.answers)
        self.calls.append(call)
        return call


class PlayedRay:
    """`ray.wait` and `ray.get` for these calls."""

    exceptions = ray.exceptions

    def __init__(self) -> None:
        self.pause = threading.Event()

    def wait(self, refs: list[Call], *, num_returns: int, timeout: float, **_: Any) -> tuple[list[Call], list[Call]]:
        done = [ref for ref in refs if ref.is_done]
        if not done:
            self.pause.wait(timeout)
        return done, [ref for ref in refs if not ref.is_done]

    def get(self, ref: Call, *, timeout: float) -> tuple[int, list[TeacherLogprobs]]:
        if ref.error is not None:
            raise ref.error
        return ref.process_id, [said_of(response) for response in ref.responses]


def drained(waiting: "queue.SimpleQueue[Any]", number: int, timeout_s: float) -> list[Any]:
    return [waiting.get(timeout=timeout_s) for _ in range(number)]
