"""An engine on a simulated clock: groups share its speed, weights change between two tokens, and each token has its version."""

import math
from dataclasses import dataclass
from heapq import heappop, heappush

from open_instruct.rollouts.prompt_ledger import IssuedPrompt

Spans = tuple[tuple[int, float], ...]
"""Versions, oldest first, and how many tokens each of them sampled."""


@dataclass(frozen=True)
class Group:
    """A group inside an engine."""

    prompt: IssuedPrompt
    length: float
    """Tokens of its longest response."""
    begun: float
    """Progress of the engine when it began; it ends `length` later."""

    @property
    def end(self) -> float:
        return self.begun + self.length


class SimulatedEngine:
    """Time is counted in progress: tokens that a sequence which ran all the time would have. So nothing is touched at each token.

    Args:
        tokens_per_s: of each group's longest response, while no more than `saturated_at` groups run; more share that speed.
    """

    def __init__(self, number: int, places: int, tokens_per_s: float, saturated_at: float = math.inf) -> None:
        self.number = number
        self.places = places
        self.version = 0
        self.is_alive = True
        self.is_closed = False
        """Takes nothing new: an update waits until nothing runs."""
        self.running: dict[str, Group] = {}
        self.schedule = 0
        """Changes when the next end may have changed."""
        self.expected = -1
        """The schedule whose next end is on the calendar."""
        self.num_tokens = 0.0
        self.num_possible_tokens = 0.0
        """What it could have sampled while it was alive, had its places been taken."""
        self._tokens_per_s = tokens_per_s
        self._saturated_at = min(float(places), saturated_at)
        self._progress = 0.0
        self._counted_until = 0.0
        self._paused_until = 0.0
        self._ends: list[tuple[float, str]] = []
        self._swaps: list[tuple[float, int]] = [(0.0, 0)]

    @property
    def capacity(self) -> float:
        """Tokens per second with every place taken."""
        return self._tokens_per_s * self._saturated_at

    @property
    def has_room(self) -> bool:
        return self.is_alive and not self.is_closed and len(self.running) < self.places

    def advance(self, now: float) -> None:
        """Nothing began or ended since the last call."""
        seconds = max(0.0, now - max(self._counted_until, min(self._paused_until, now)))
        if self.is_alive and seconds:
            tokens = self._rate() * seconds
            self._progress += tokens
            self.num_tokens += tokens * len(self.running)
            self.num_possible_tokens += self.capacity * seconds
        self._counted_until = now

    def _rate(self) -> float:
        return self._tokens_per_s * min(1.0, self._saturated_at / max(len(self.running), 1))

    def begin(self, prompt: IssuedPrompt, length: float, now: float) -> Group:
        self.advance(now)
        group = Group(prompt, length, self._progress)
        self.running[prompt.prompt_id] = group
        heappush(self._ends, (group.end, prompt.prompt_id))
        self.schedule += 1
        return group

    def next_end(self) -> tuple[float, Group] | None:
        """The group that ends next, and when it does if nothing else happens before."""
        while self._ends:
            end, prompt_id = self._ends[0]
            group = self.running.get(prompt_id)
            if group is None or group.end != end:
                heappop(self._ends)
                continue
            start = max(self._counted_until, self._paused_until)
            return start + max(0.0, end - self._progress) / self._rate(), group
        return None

    def end(self, group: Group, now: float) -> Spans:
        """Take a group out, complete or not."""
        self.advance(now)
        del self.running[group.prompt.prompt_id]
        self.schedule += 1
        spans = []
        upper = min(group.end, self._progress)
        for start, version in reversed(self._swaps):
            if (tokens := upper - max(start, group.begun)) > 0:
                spans.append((version, tokens))
                upper = start
            if start <= group.begun:
                break
        return tuple(reversed(spans)) or ((self.version, 0.0),)

    def swap(self, version: int, now: float, pause_s: float) -> None:
        """New weights between two tokens: what runs goes on after the pause."""
        self.advance(now)
        self.version = version
        self.is_closed = False
        self._swaps.append((self._progress, version))
        if pause_s and self.running:
            self._paused_until = max(self._paused_until, now + pause_s)
            self.schedule += 1

    def die(self, now: float) -> list[Group]:
        """What ran in it."""
        self.advance(now)
        self.is_alive = False
        lost = list(self.running.values())
        self.running.clear()
        self._ends.clear()
        self.schedule += 1
        return lost

    def come_back(self, version: int, now: float) -> None:
        self.advance(now)
        self.is_alive = True
        self._paused_until = now
        self.swap(version, now, 0.0)
