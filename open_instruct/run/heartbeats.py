"""Asks the queues for signs of life without waiting for the answers."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.util.queue import Queue

from open_instruct.cluster.failures import ComponentDied
from open_instruct.rollouts.message_queue import MessageQueue
from open_instruct.run.ray_results import value_of


class Heartbeats:
    """Asks parts for a sign of life without waiting for the answer. A part that fails or does not answer ends the run."""

    EVERY_S = 1.0
    LIMIT_S = 60.0
    ANSWER_S = 5.0

    def __init__(self, ask: dict[str, Callable[[], Any]]) -> None:
        self._ask = ask
        self._requests: dict[str, tuple[Any, float]] = {}
        self._last_round = 0.0

    @classmethod
    def of_queues(cls, queues: Sequence[Queue], messages: MessageQueue) -> "Heartbeats":
        prompts, results = queues
        return cls(
            {
                "the prompt queue": prompts.actor.qsize.remote,
                "the results queue": results.actor.qsize.remote,
                "the message queue": messages.get_statistics_ref,
            }
        )

    def check(self) -> None:
        now = time.monotonic()
        if now - self._last_round > self.EVERY_S:
            self._last_round = now
            for name, ask in self._ask.items():
                self._requests.setdefault(name, (ask(), now))
        for name, (ref, asked_at) in list(self._requests.items()):
            if ray.wait([ref], timeout=0)[0]:
                value_of(ref, name)
                del self._requests[name]
            elif now - asked_at > self.LIMIT_S:
                raise ComponentDied(f"{name} did not answer for {self.LIMIT_S:g} s")

    def name_the_dead(self) -> None:
        """Raise `ComponentDied` for a part that is dead now. A part that is alive and merely slow to answer is ignored."""
        names = {ask(): name for name, ask in self._ask.items()}
        answered, _ = ray.wait(list(names), num_returns=len(names), timeout=self.ANSWER_S)
        for ref in answered:
            value_of(ref, names[ref])
