# ruff: noqa: F811 - fixtures are imported
"""The trainer waits for a prompt that never ends, and no message names it."""

from collections.abc import Callable

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
    reports=("verl-project/verl #7155",),
    subject="prompts and resuming",
    happened="One prompt of 512 stayed in the state of running, and the trainer asked the replay buffer again and again "
    "without a limit. No line of the log named it; the reporters had to add one to learn what the run waited for.",
    here="A wait for a batch ends after `--progress_timeout_s` with an error that names the prompts that are not back "
    "and counts everything else that is under way (`rollouts/controller.py`, `rollouts/batch_progress.py`).",
)
Wait = Callable[[Play], str]
"""Waits for the batch of step 1; the message with which the wait ends, or "" if it goes on."""


def check(play: Play, wait: Wait) -> None:
    requests = play.receive(NUM_PROMPTS)
    stuck = requests.pop(1)
    play.deliver(*map(play.answer, requests))
    play.wait_for(lambda: all(play.controller._flow.ledger[request.prompt_id].arrived for request in requests))
    message = wait(play)
    assert stuck.prompt_id in message
    assert not any(request.prompt_id in message for request in requests)


def theirs(play: Play) -> str:
    for _ in range(100):  # and so on
        if not play.message_queue.partial_batches.empty():
            break
    return ""


def ours(play: Play) -> str:
    play.controller.message_queue.get = lambda timeout, max_batch_count: None  # type: ignore[method-assign]
    with pytest.raises(TimeoutError) as error:
        play.controller.generate(0)
    return str(error.value)


def test_wait_without_end_is_caught(make_play: MakePlay) -> None:
    with pytest.raises(AssertionError):
        check(make_play().start(), theirs)


def test_prompt_that_is_waited_for_is_named_here(make_play: MakePlay) -> None:
    check(make_play(progress_timeout_s=0.05).start(), ours)
