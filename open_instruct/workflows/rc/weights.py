"""Weights of reasoning-cache turns in the loss, as written on the command line. Pure."""

from collections.abc import Mapping, Sequence

from open_instruct.workflows.rc.types import REASONING, SUMMARIZATION

TurnWeights = Mapping[tuple[str, int | None], float]
"""Weights by (turn type, turn number). None as the number stands for all numbers."""


def parse_turn_weights(entries: Sequence[str]) -> dict[tuple[str, int | None], float]:
    """The entries as a mapping: `reasoning:3=2.0 summarization=0.5` gives the third reasoning turn weight 2 and summaries 0.5.

    Raises:
        ValueError: an entry is wrong; the message says what is wrong with the first such entry.
    """
    weights: dict[tuple[str, int | None], float] = {}
    for entry in entries:
        turn, _, weight = entry.partition("=")
        turn_type, _, number = turn.partition(":")
        is_good = turn_type in (REASONING, SUMMARIZATION) and (not number or (number.isdecimal() and int(number) > 0))
        try:
            value = float(weight)
        except ValueError:
            value = -1.0
        if not is_good or not 0 <= value < float("inf"):
            raise ValueError(
                f"{entry}: write {REASONING}=WEIGHT or {REASONING}:NUMBER=WEIGHT, or {SUMMARIZATION} in its place"
            )
        weights[turn_type, int(number) if number else None] = value
    return weights


def turn_weight(weights: TurnWeights, turn_type: str, turn_number: int) -> float:
    """The weight of this turn if it was given, else the weight of the turn's type, else 1."""
    return weights.get((turn_type, turn_number), weights.get((turn_type, None), 1.0))
