"""Statistics of a run of reasoning-cache rollouts: counts by cycle, throughput over a window, summary and table. No I/O."""

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from open_instruct.report.live_line import format_duration
from open_instruct.report.run_summary import format_table
from open_instruct.workflows.rc.types import REASONING, RolloutResult, TrainingText


@dataclass
class CycleCounts:
    """Counts of one cycle (the k-th reasoning turn and the k-th summary) over all trajectories."""

    num_scored: int = 0
    """Reasoning turns with a reward. Rewards that a rollout policy gives to summaries do not count, as they rate no answer."""
    total_reward: float = 0.0
    num_right: int = 0
    """Reasoning turns with a reward of 1."""
    num_reasoning_turns: int = 0
    num_reasoning_tokens: int = 0
    num_summaries: int = 0
    num_summary_tokens: int = 0
    num_at_limit: int = 0
    """Turns, of both kinds, that were cut at their token limit."""
    num_empty_summaries: int = 0

    def add(self, turn: TrainingText) -> None:
        num_tokens = len(turn.response_ids)
        self.num_at_limit += not turn.finished
        if turn.metadata["turn_type"] == REASONING:
            self.num_reasoning_turns += 1
            self.num_reasoning_tokens += num_tokens
            self._add_reward(turn.reward)
        else:
            self.num_summaries += 1
            self.num_summary_tokens += num_tokens
            self.num_empty_summaries += turn.metadata.get("empty_summary", False)

    def _add_reward(self, reward: float | None) -> None:
        if reward is not None:
            self.num_scored += 1
            self.total_reward += reward
            self.num_right += reward >= 1.0

    def to_json(self) -> dict[str, Any]:
        """As JSON values. Means are over turns of their kind, and None if there was no such turn."""
        return {
            "accuracy": _share(self.num_right, self.num_scored),
            "mean_reward": _share(self.total_reward, self.num_scored),
            "tokens_per_reasoning": _share(self.num_reasoning_tokens, self.num_reasoning_turns),
            "tokens_per_summary": _share(self.num_summary_tokens, self.num_summaries),
            "turns_at_limit": self.num_at_limit,
            "empty_summaries": self.num_empty_summaries,
        }


def _share(part: float, whole: int) -> float | None:
    return part / whole if whole else None


class Throughput:
    """Rates over the last `window` trajectories that arrived: their turns and tokens divided by the wall time in which they
    arrived."""

    def __init__(self, window: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._arrivals: deque[tuple[float, int, int]] = deque(maxlen=window + 1)
        self._arrivals.append((clock(), 0, 0))

    def add(self, num_turns: int, num_tokens: int) -> None:
        self._arrivals.append((self._clock(), num_turns, num_tokens))

    def rates(self) -> dict[str, float]:
        """Per second of wall time; 0 before the first arrival."""
        (start, _, _), *arrivals = self._arrivals
        elapsed = arrivals[-1][0] - start if arrivals else 0.0
        if elapsed <= 0:
            return {"trajectories_per_second": 0.0, "turns_per_second": 0.0, "tokens_per_second": 0.0}
        return {
            "trajectories_per_second": len(arrivals) / elapsed,
            "turns_per_second": sum(turns for _, turns, _ in arrivals) / elapsed,
            "tokens_per_second": sum(tokens for _, _, tokens in arrivals) / elapsed,
        }


@dataclass
class RolloutStatistics:
    """Counts over the trajectories of a run. After a resumption, trajectories that were written earlier count too; retries,
    requeues and drops from before the resumption do not."""

    num_trajectories: int = 0
    num_long_turns: int = 0
    """Controls. They count as turns but belong to no cycle."""
    num_turns: int = 0
    num_tokens: int = 0
    """Sampled tokens."""
    num_retries: int = 0
    num_requeues: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """Dropped trajectories by reason."""
    cycles: defaultdict[int, CycleCounts] = field(default_factory=lambda: defaultdict(CycleCounts))
    """Counts by number of the cycle, from 1."""

    def add(self, trajectory: Sequence[TrainingText]) -> None:
        """Count a complete trajectory, or the single turn of a control."""
        self.num_turns += len(trajectory)
        self.num_tokens += sum(len(turn.response_ids) for turn in trajectory)
        if trajectory[0].is_control:
            self.num_long_turns += 1
            return
        self.num_trajectories += 1
        for turn in trajectory:
            self.cycles[turn.metadata["turn_number"]].add(turn)

    def add_events(self, result: RolloutResult) -> None:
        """Count the retries and requeues that a trajectory needed, and whether it was dropped."""
        self.num_retries += result.num_retries
        self.num_requeues += result.num_requeues
        if result.dropped:
            self.dropped[result.dropped] += 1

    @property
    def num_done(self) -> int:
        """Trajectories and controls that are complete or dropped."""
        return self.num_trajectories + self.num_long_turns + self.dropped.total()

    def last_accuracy(self) -> tuple[int, float] | None:
        """The latest cycle that has been scored, and its accuracy."""
        scored = [number for number, counts in self.cycles.items() if counts.num_scored]
        if not scored:
            return None
        counts = self.cycles[max(scored)]
        return max(scored), counts.num_right / counts.num_scored

    def summary(self, *, wall_seconds: float, tokens_of_this_run: int) -> dict[str, Any]:
        """The content of `summary.json`. `wall_seconds` is the time of this process, without its start-up. If it is 0, because
        all trajectories were already written before, `tokens_per_second` is None."""
        return {
            "trajectories": self.num_trajectories,
            "one_long_turns": self.num_long_turns,
            "turns": self.num_turns,
            "tokens": self.num_tokens,
            "rc/dropped_trajectories": self.dropped.total(),
            "dropped": dict(self.dropped),
            "retries": self.num_retries,
            "requeues": self.num_requeues,
            "turns_at_limit": sum(counts.num_at_limit for counts in self.cycles.values()),
            "wall_seconds": wall_seconds,
            "tokens_per_second": tokens_of_this_run / wall_seconds if wall_seconds > 0 else None,
            "cycles": {str(number): self.cycles[number].to_json() for number in sorted(self.cycles)},
        }


@dataclass(frozen=True)
class RolloutProgress:
    """Values that the live line shows.

    `rates` is `Throughput.rates()`, and `last_accuracy` is `RolloutStatistics.last_accuracy()`.
    """

    step: int
    """Trajectories that are complete or dropped."""
    rates: dict[str, float]
    num_dropped: int
    num_retries: int
    last_accuracy: tuple[int, float] | None

    def __str__(self) -> str:
        parts = [f"{self.rates['tokens_per_second']:,.0f} tok/s", f"{self.rates['turns_per_second']:.1f} turns/s"]
        if self.last_accuracy is not None:
            cycle, accuracy = self.last_accuracy
            parts.append(f"cycle {cycle} {accuracy:.0%} right")
        parts += [f"{self.num_retries} retries"] if self.num_retries else []
        parts += [f"{self.num_dropped} dropped"] if self.num_dropped else []
        return "  ".join(parts)


def format_rollout_table(summary: dict[str, Any]) -> str:
    """The summary for a terminal or a job log."""
    head = ("cycle", "accuracy", "reasoning tok", "summary tok", "at limit")
    rows = [
        (
            number,
            _percent(counts["accuracy"]),
            _number(counts["tokens_per_reasoning"]),
            _number(counts["tokens_per_summary"]),
            str(counts["turns_at_limit"]),
        )
        for number, counts in summary["cycles"].items()
    ]
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(summary["dropped"].items()))
    counts = (
        f"{summary['trajectories']:,} trajectories, {summary['turns']:,} turns, {summary['tokens']:,} tokens in "
        f"{format_duration(summary['wall_seconds'])} ({_number(summary['tokens_per_second'])} tok/s); "
        f"{summary['retries']} retries, {summary['rc/dropped_trajectories']} dropped{f' ({reasons})' if reasons else ''}"
    )
    return f"{format_table([head, *rows], '>>>>>')}\n{counts}"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"
