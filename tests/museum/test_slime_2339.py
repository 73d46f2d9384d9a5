# ruff: noqa: F811 - fixtures are imported
"""Asynchronous training and evaluation exclude each other."""

from collections.abc import Callable

import pytest
from controller_stage import (  # noqa: F401 - fixtures
    NUM_PROMPTS,
    TIMEOUT_S,
    MakePlay,
    Play,
    datasets,
    make_play,
    tokenizer,
)
from exhibit import Exhibit

EXHIBIT = Exhibit(
    reports=("THUDM/slime #2339",),
    subject="evaluation and metrics",
    happened="The rollout function of fully asynchronous training refused to evaluate, so no evaluation could run while "
    "training samples were generated.",
    here="Evaluation prompts travel with those of training to the same engines. A result of any other version than the"
    " one to be measured is an error, and training goes on meanwhile (`rollouts/controller.py`, "
    "`rollouts/running_evaluation.py`).",
)
Evaluate = Callable[[Play], dict[str, float]]
NUM_HELD_OUT = 3


def check(play: Play, evaluate: Evaluate) -> None:
    """While the training prompts of version 0 are with the engines, one answer of three is right."""
    metrics = evaluate(play)
    assert metrics["eval/pass_at_1"] == pytest.approx(1 / 3)
    assert metrics["eval/model_step_min"] == metrics["eval/model_step_max"] == 0
    training = [request for request in play.received if not request.is_eval]
    play.deliver(*map(play.answer, training))
    assert {prompt for prompt, _ in play.prompts_in(play.batch(1))} == {request.prompt_id for request in training}


def theirs(play: Play) -> dict[str, float]:
    raise AssertionError("fully asynchronous rollouts cannot evaluate")


def ours(play: Play) -> dict[str, float]:
    play.controller.start_evaluation(0)
    play.start()
    requests = [request for request in play.receive(NUM_HELD_OUT + NUM_PROMPTS) if request.is_eval]
    play.deliver(*(play.answer(request, [score]) for request, score in zip(requests, (0, 1, 0), strict=True)))
    return play.controller.get_evaluation(TIMEOUT_S)


def test_refusal_to_evaluate_is_caught(make_play: MakePlay) -> None:
    with pytest.raises(AssertionError, match="cannot evaluate"):
        check(make_play(), theirs)


def test_evaluation_runs_beside_training_here(make_play: MakePlay) -> None:
    check(make_play(), ours)
