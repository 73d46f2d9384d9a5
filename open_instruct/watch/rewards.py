"""The reward of a step, and whether its difference from the step before is more than chance."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from open_instruct.record.reader import TornFile
from open_instruct.watch.runs import Run
from open_instruct.watch.samples import ISSUED_AGAIN, SampleRow, ends, groups_of, rows_of, table_of_step

REWARD = "all_groups/scores"
ERRORS = 2.0
"""Chance alone explains a difference of up to so many standard errors."""


@dataclass(frozen=True)
class Reward:
    """The reward of a step."""

    mean: float | None
    """Over conversations; None if there are none."""
    standard_error: float | None
    """Of the mean, from the mean rewards of the groups; None of fewer than two groups."""


def reward_of(rows: Sequence[SampleRow]) -> Reward:
    """The reward of the samples of a step, without groups whose prompts were issued again."""
    conversations = [row for row in ends(rows) if row["outcome"] not in ISSUED_AGAIN]
    rewards = [row["reward"] for row in conversations]
    means = [np.mean([row["reward"] for row in group]) for group in groups_of(conversations).values()]
    return Reward(
        float(np.mean(rewards)) if rewards else None,
        float(np.std(means, ddof=1) / math.sqrt(len(means))) if len(means) > 1 else None,
    )


def compared(run: Run, step: int, own: Reward) -> dict[str, Any] | None:
    """The difference from the step before, its standard error, and how many steps of the run differ as much from the step before
    them; None if there is no such step, or it has no reward."""
    earlier = [number for number in run.steps() if number < step]
    if not earlier or own.mean is None:
        return None
    try:
        path, table = run.path_of(earlier[-1]), table_of_step(run, earlier[-1])
        other = run.cached(path, "reward", lambda: reward_of(rows_of(table)))
    except TornFile:
        return None
    if other.mean is None:
        return None
    difference = own.mean - other.mean
    is_known = own.standard_error is not None and other.standard_error is not None
    error = math.hypot(own.standard_error or 0.0, other.standard_error or 0.0) if is_known else None
    jumps = _jumps(run)
    content = {
        "step": earlier[-1],
        "difference": difference,
        "standard_error": error,
        "num_as_large": sum(jump >= abs(difference) - 1e-6 for jump in jumps),
        "num_steps": len(jumps),
    }
    return {**content, "text": _sentence(**content)}


def _jumps(run: Run) -> list[float]:
    """For each trained step the size of its difference from the step before it."""
    table = run.metrics()
    rewards = dict(zip(table.steps, table.column(REWARD), strict=True)) if REWARD in table.names() else {}
    values = [reward for reward in rewards.values() if not math.isnan(reward)]
    return [abs(after - before) for before, after in itertools.pairwise(values)]


def _sentence(step: int, difference: float, standard_error: float | None, num_as_large: int, num_steps: int) -> str:
    size = f"The reward differs by {difference:+.3g} from that of step {step}"
    if standard_error:
        size += f", {abs(difference) / standard_error:.1f} times the standard error of the difference ({standard_error:.2g}): "
        is_chance = abs(difference) <= ERRORS * standard_error
        size += "chance alone explains that" if is_chance else "more than chance alone explains"
    common = f" {num_as_large:,} of {num_steps:,} steps differ as much from the step before them." if num_steps else ""
    return f"{size}.{common}"
