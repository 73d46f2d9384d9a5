"""How busy the engines of a run are."""

import statistics
import time
from collections import defaultdict, deque
from typing import TYPE_CHECKING

import ray

from open_instruct.run.engine_supervisor import ANSWER_S

if TYPE_CHECKING:
    from ray.actor import ActorHandle


NUM_CALLS = 20
"""Calls over which engines are compared. In a single one an engine may finish no group, or several."""


class EngineActivity:
    """Asks engines for their inventories, and computes rates from the differences to the last answers."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[float, float, int]] = {}
        """For each engine, at its last answer: time of the question, seconds inside engine steps, tokens generated."""
        self._newest: defaultdict[int, deque[tuple[float, int]]] = defaultdict(lambda: deque(maxlen=NUM_CALLS))
        """For each engine and each of the last calls: seconds inside engine steps and tokens generated since the call before."""

    def metrics(self, serving: "dict[int, ActorHandle]") -> dict[str, float]:
        """Metrics of the engines that serve. An engine that does not answer is left out.

        `engines/busy_share` is the mean share of time in engine steps since the last call. `engines/tokens_per_second` is the
        number of response tokens in finished groups of all engines per second of wall time since the last call.
        `engines/slowest_share` compares engines that were there in all of the last 20 calls. Since the start of the engines: how
        often and how long the engines slept, and the bytes that their last sleeps gave back.
        """
        refs = {number: engine.take_inventory.remote() for number, engine in serving.items()}
        answered, _ = ray.wait(list(refs.values()), num_returns=len(refs), timeout=1.0) if refs else ([], [])
        now = time.monotonic()
        shares, rates, inventories = [], [], []
        for number, ref in refs.items():
            if ref not in answered:
                continue
            try:
                inventory = ray.get(ref, timeout=ANSWER_S)
            except ray.exceptions.RayError:
                continue  # the engine has died; the supervisor's next check reports it
            inventories.append(inventory)
            asked_at, busy_s, num_tokens = self._last.get(
                number, (now, inventory["busy_s"], inventory["num_generated_tokens"])
            )
            self._last[number] = now, inventory["busy_s"], inventory["num_generated_tokens"]
            more_s, more_tokens = inventory["busy_s"] - busy_s, inventory["num_generated_tokens"] - num_tokens
            if now > asked_at and more_s >= 0 and more_tokens >= 0:  # a new engine counts from 0
                shares.append(more_s / (now - asked_at))
                rates.append(more_tokens / (now - asked_at))
                self._newest[number].append((more_s, more_tokens))
            else:
                self._newest.pop(number, None)  # another engine has its number
        if not shares:
            return {}
        return {
            "engines/busy_share": sum(shares) / len(shares),
            "engines/tokens_per_second": sum(rates),
            **self._slowest(serving),
            "engines/num_sleeps": sum(inventory["num_sleeps"] for inventory in inventories),
            "engines/asleep_s": sum(inventory["asleep_s"] for inventory in inventories),
            "memory/engines_released_bytes": sum(inventory["memory_released_bytes"] for inventory in inventories),
        }

    def _slowest(self, serving: "dict[int, ActorHandle]") -> dict[str, float]:
        """`engines/slowest_share`: tokens per second in engine steps of the slowest engine, divided by the median of the engines;
        empty if fewer than two engines were busy in all of the last calls."""
        sums = [
            (sum(seconds for seconds, _ in calls), sum(tokens for _, tokens in calls))
            for number, calls in self._newest.items()
            if number in serving and len(calls) == NUM_CALLS
        ]
        speeds = [num_tokens / busy_s for busy_s, num_tokens in sums if busy_s > 0]
        median = statistics.median(speeds) if len(speeds) > 1 else 0.0
        return {"engines/slowest_share": min(speeds) / median} if median > 0 else {}
