"""How busy the engines of a run are."""

import time
from typing import TYPE_CHECKING

import ray

from open_instruct.run.engine_supervisor import ANSWER_S

if TYPE_CHECKING:
    from ray.actor import ActorHandle


class EngineActivity:
    """Asks engines for their inventories, and computes rates from the differences to the last answers."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[float, float, int]] = {}
        """For each engine, at its last answer: time of the question, seconds inside engine steps, tokens generated."""

    def metrics(self, serving: "dict[int, ActorHandle]") -> dict[str, float]:
        """Metrics of the engines that serve. An engine that does not answer is left out.

        `engines/busy_share` is the mean share of time in engine steps since the last call. `engines/tokens_per_second` is the
        number of response tokens in finished groups of all engines per second of wall time since the last call. Since the start
        of the engines: how often and how long the engines slept, and the bytes that their last sleeps gave back.
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
        if not shares:
            return {}
        return {
            "engines/busy_share": sum(shares) / len(shares),
            "engines/tokens_per_second": sum(rates),
            "engines/num_sleeps": sum(inventory["num_sleeps"] for inventory in inventories),
            "engines/asleep_s": sum(inventory["asleep_s"] for inventory in inventories),
            "memory/engines_released_bytes": sum(inventory["memory_released_bytes"] for inventory in inventories),
        }
