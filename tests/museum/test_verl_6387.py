# ruff: noqa: F811 - fixtures are imported
"""A failure on the rollout side looks like the end of the data."""

from collections.abc import Callable
from typing import Any

import pytest
from controller_stage import (  # noqa: F401 - fixtures
    NUM_PROMPTS,
    MakePlay,
    Play,
    datasets,
    make_play,
    tokenizer,
)
from exhibit import Exhibit

EXHIBIT = Exhibit(
    reports=("verl-project/verl #6387", "verl-project/verl #6395"),
    subject="prompts and resuming",
    happened="An exception in the rollout process put None into the queue to the trainer, which is also what marks the end"
    " of the data: the run could end as if it were complete.",
    here="An error in any thread of the controller ends the call that the driver waits on, and each later call, with "
    "the same error (`rollouts/controller.py`).",
)
Outcome = Callable[[Play, Exception], str]
"""What the trainer learns when the rollout side fails with an error."""


def check(play: Play, outcome: Outcome) -> None:
    play.receive(NUM_PROMPTS)
    assert "no memory" in outcome(play, MemoryError("no memory"))


def theirs(play: Play, error: Exception) -> str:
    queue: list[object] = []
    try:
        raise error
    except Exception:
        queue.append(None)
    return "the data are at their end" if queue.pop() is None else "a sample"


def ours(play: Play, error: Exception) -> str:
    def fail(*_: Any) -> None:
        raise error

    play.controller._preparation.take = fail  # type: ignore[method-assign]
    play.deliver(play.answer(play.received[0]))
    with pytest.raises(RuntimeError) as told:
        play.controller.watch()
    with pytest.raises(RuntimeError, match="no memory"):
        play.controller.set_version(1)
    return str(told.value)


def test_failure_that_looks_like_the_end_is_caught(make_play: MakePlay) -> None:
    with pytest.raises(AssertionError):
        check(make_play().start(), theirs)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_failure_of_the_rollout_side_ends_the_run_here(make_play: MakePlay) -> None:
    check(make_play().start(), ours)
