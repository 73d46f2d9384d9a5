# ruff: noqa: F811 - fixtures are imported
"""A resumed run sees the data from their beginning again."""

from collections.abc import Callable
from pathlib import Path

import pytest
from controller_stage import (  # noqa: F401 - fixtures
    NUM_PROMPTS,
    MakePlay,
    datasets,
    identities,
    make_play,
    tokenizer,
)
from exhibit import Exhibit

EXHIBIT = Exhibit(
    reports=("allenai/open-instruct #1523",),
    subject="prompts and resuming",
    happened="The checkpoint held the state of the process that prepares data, and nothing read it on a resume: the "
    "loaders began anew, and the run trained on the same prompts a second time.",
    here="The controller's state is loaded before it issues anything, and its ledger must add up: issued = consumed + "
    "dropped + open (`rollouts/controller.py`, `rollouts/prompt_ledger.py`).",
)
Resume = Callable[[MakePlay, Path], list[tuple[object, ...]]]
"""From the state after step 1: what is issued for step 2."""


def check(make_play: MakePlay, path: Path, resume: Resume) -> None:
    unbroken = make_play().start()
    unbroken.run(1, 1)
    unbroken.controller.save(0, str(path))
    step_2 = identities(unbroken.receive(NUM_PROMPTS))
    assert resume(make_play, path) == step_2


def theirs(make_play: MakePlay, path: Path) -> list[tuple[object, ...]]:
    assert path.exists()
    return identities(make_play().start(1).receive(NUM_PROMPTS))


def ours(make_play: MakePlay, path: Path) -> list[tuple[object, ...]]:
    play = make_play()
    play.controller.load(0, str(path))
    requests = play.start(1).receive(NUM_PROMPTS)
    assert play.controller.status()["prompts"]["issued"] == 2 * NUM_PROMPTS
    return identities(requests)


def test_state_that_is_not_read_is_caught(make_play: MakePlay, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        check(make_play, tmp_path / "state.npz", theirs)


def test_resumed_run_goes_on_with_the_next_prompts_here(make_play: MakePlay, tmp_path: Path) -> None:
    check(make_play, tmp_path / "state.npz", ours)
