"""Scored groups on their way to a step."""

import queue
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from open_instruct.rollouts import data_preparation
from open_instruct.rollouts.data_preparation import DataPreparation

LONG_S = 30.0


def preparation(*being_scored: str, streaming: bool = False) -> Any:
    """Stands for a `DataPreparation` in which verifiers have these groups, or are done with them."""
    args = SimpleNamespace(streaming=streaming)
    return SimpleNamespace(scored=queue.SimpleQueue(), being_scored=dict.fromkeys(being_scored), _args=args)


def test_groups_that_are_scored_one_after_another_come_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_preparation, "GATHER_S", LONG_S)
    under_way = preparation("a", "b", "c")

    def score() -> None:
        for name in "abc":
            under_way.scored.put(name)
            time.sleep(0.02)

    scoring = threading.Thread(target=score)
    scoring.start()
    assert DataPreparation.next_scored(under_way) == ["a", "b", "c"]
    scoring.join(LONG_S)


def test_a_scored_group_does_not_wait_long_for_another() -> None:
    under_way = preparation("a", "slow")
    under_way.scored.put("a")
    started = time.monotonic()
    assert DataPreparation.next_scored(under_way) == ["a"]
    assert time.monotonic() - started < LONG_S


def test_with_streaming_groups_come_one_by_one() -> None:
    under_way = preparation("a", "b", streaming=True)
    for name in "ab":
        under_way.scored.put(name)
    assert [DataPreparation.next_scored(under_way) for _ in "ab"] == [["a"], ["b"]]


def test_none_is_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_preparation, "POLL_S", 0.01)
    assert DataPreparation.next_scored(preparation("a")) == []
