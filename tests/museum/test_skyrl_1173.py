# ruff: noqa: F811 - fixtures are imported
"""A group that never comes back leaves the buffer one short of a batch, for ever."""

from collections.abc import Callable

import pytest
from controller_stage import (  # noqa: F401 - fixtures
    NUM_PROMPTS,
    MakePlay,
    Play,
    broken_off,
    datasets,
    make_play,
    tokenizer,
)
from exhibit import Exhibit

EXHIBIT = Exhibit(
    reports=("NovaSky-AI/SkyRL #1173",),
    subject="prompts and resuming",
    happened="Some generation tasks ended without a result. The buffer stood at 125 to 127 of 128 groups, nothing waited "
    "with a limit, and three runs hung for up to 29 hours without a message.",
    here="Every prompt that was issued has an entry in the ledger until a step has trained on it or it is dropped for "
    "a reason. What an engine gave up or took with it is issued again, and another prompt takes the place of one "
    "that fails too often (`rollouts/prompt_ledger.py`, `rollouts/controller.py`).",
)
Recover = Callable[[Play], None]
"""What happens after one result of a step was lost with its engine and another was given up."""


def check(play: Play, recover: Recover) -> None:
    requests = play.receive(NUM_PROMPTS)
    play.deliver(*map(play.answer, requests[2:]))
    recover(play)
    assert len(play.received) == NUM_PROMPTS + 2, "nobody asks for the lost results again"
    batch = play.batch(1)
    assert {prompt for prompt, _ in play.prompts_in(batch)} == {request.prompt_id for request in requests}


def theirs(play: Play) -> None:
    """The task is gone and nobody has noted it."""


def ours(play: Play) -> None:
    lost, given_up = play.received[:2]
    play.deliver(broken_off(play.answer(given_up)))
    play.deliver(*map(play.answer, play.receive(1)))
    play.controller.take_back_prompts()
    play.wait_for(lambda: play.controller.status()["prompts"]["open"] == NUM_PROMPTS)
    play.wait_for(lambda: play.controller._flow.ledger[given_up.prompt_id].arrived)
    assert play.controller.recover_lost(prompt_ids=[]) == 1
    [again] = play.receive(1)
    assert again.prompt_id == lost.prompt_id
    play.deliver(play.answer(again))


def test_results_that_nobody_misses_are_caught(make_play: MakePlay) -> None:
    with pytest.raises(AssertionError):
        check(make_play(max_generation_attempts=2).start(), theirs)


def test_lost_prompts_are_issued_again_here(make_play: MakePlay) -> None:
    check(make_play(max_generation_attempts=2).start(), ours)
