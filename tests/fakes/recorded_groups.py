"""Groups as a record gets them, for tests."""

from pathlib import Path
from typing import Any

from open_instruct.record.samples import RecordedGroup
from open_instruct.scored_groups import ScoredGroup

WRITTEN_S = 60.0
"""Longest time that a writer has to write everything."""
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "record.md"


def entry(group: ScoredGroup, outcome: str = "consumed", step: int = 1, **fields: Any) -> RecordedGroup:
    """The group with rewards of 10 for a right response."""
    place = {"row": "train.jsonl line 7", "source": "train.jsonl", "ground_truth": "42"}
    values: dict[str, Any] = {**place, "outcome": outcome, "attempt": 0, "step": step, "arrived": 200.0, **fields}
    return RecordedGroup(group=group, rewards=10.0 * group.scores, **values)
