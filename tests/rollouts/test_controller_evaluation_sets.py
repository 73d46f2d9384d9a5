# ruff: noqa: F811 - fixtures are imported
"""The controller asks for each evaluation set with its own sampling, and measures it by itself."""

from typing import Any

import pytest
from controller_stage import (  # noqa: F401 - fixtures
    NUM_PROMPTS,
    TIMEOUT_S,
    MakePlay,
    Play,
    broken_off,
    datasets,
    ids,
    make_play,
    tokenizer,
)

from open_instruct.data.dataset_transformation import load_prompts
from open_instruct.data.prompt_dataset import PromptDataset
from open_instruct.verifiers.registry import verifier_names

SUMS = "reasoning_gym/chain_sum?min_terms=2&max_terms=2&min_digits=2&max_digits=2"
PLUS, MINUS = f"{SUMS}&size=2&seed=1000", f"{SUMS}&size=3&seed=2000"
SETS = [f"plus={PLUS}", f"minus={MINUS}"]


@pytest.fixture(scope="module")
def two_sets(tokenizer: Any) -> PromptDataset:
    """Two rows of `plus` and three of `minus`, which the same verifier scores."""
    dataset, _ = load_prompts(
        [PLUS, "1.0", MINUS, "1.0"],
        ["train"],
        tokenizer=tokenizer,
        max_prompt_token_length=64,
        overlong_prompts="error",
        messages_key="messages",
        ground_truths_key="ground_truth",
        known_verifiers=verifier_names(),
    )
    return dataset


def evaluate(play: Play, scores: dict[str, list[list[int]]]) -> dict[str, Any]:
    """Metrics of an evaluation whose responses to the rows of each set in `scores` have these scores."""
    of_rows = [row for of_set in scores.values() for row in of_set]
    requests = [request for request in play.receive(len(of_rows) + NUM_PROMPTS) if request.is_eval]
    play.deliver(*(play.answer(request, row) for request, row in zip(requests, of_rows, strict=True)))
    return play.controller.get_evaluation(TIMEOUT_S)


def play_sets(make_play: MakePlay, held_out: PromptDataset, *words: str, **options: Any) -> Play:
    return make_play(held_out=held_out, dataset_mixer_eval_list=[], eval_sets=[*SETS, *words], **options)


def test_requests_of_a_set_have_its_sampling(make_play: MakePlay, two_sets: PromptDataset) -> None:
    words = ["minus.temperature=0", "minus.response_length=5", "plus.samples=4", "plus.top_p=0.5"]
    play = play_sets(make_play, two_sets, *words, eval_temperature=0.7, response_length=32)
    play.controller.start_evaluation(0)
    play.start()
    requests = [request for request in play.receive(5 + NUM_PROMPTS) if request.is_eval]
    found = [(one.temperature, one.top_p, one.max_tokens, one.n) for one in (two.generation_config for two in requests)]
    assert found == [(0.7, 0.5, 32, 4)] * 2 + [(0.0, 1.0, 5, 1)] * 3


def test_sets_with_one_verifier_have_metrics_of_their_own(make_play: MakePlay, two_sets: PromptDataset) -> None:
    play = play_sets(make_play, two_sets, "plus.samples=2", eval_completions=1)
    play.controller.start_evaluation(0)
    play.start()
    metrics = evaluate(play, {"plus": [[1, 0], [1, 1]], "minus": [[0], [1], [0]]})
    assert metrics["eval/plus/pass_at_1"] == 0.75
    assert metrics["eval/plus/pass_at_2"] == 1.0
    assert metrics["eval/plus/scores"] == 7.5
    assert metrics["eval/plus/num_prompts"] == 2
    assert metrics["eval/minus/pass_at_1"] == pytest.approx(1 / 3)
    assert metrics["eval/minus/num_prompts"] == 3
    (verifier,) = {
        name for name in metrics if name.startswith("eval/minus/objective/reasoning_gym") and "reward" in name
    }
    assert metrics[verifier] == pytest.approx(10 / 3)
    assert metrics["eval/pass_at_1"] == pytest.approx((0.5 + 1 + 0 + 1 + 0) / 5)
    assert "eval/pass_at_2" not in metrics  # the sets have different numbers of responses
    rows = play.controller.take_evaluation()["sample_completions"]
    assert [row["set"] for row in rows] == ["plus", "plus", "minus"]


def test_an_evaluation_of_one_set_has_no_metrics_of_all(make_play: MakePlay, two_sets: PromptDataset) -> None:
    play = play_sets(make_play, two_sets)
    play.controller.start_evaluation(0, ["minus"])
    play.start()
    metrics = evaluate(play, {"minus": [[0], [1], [0]]})
    assert metrics["eval/minus/pass_at_1"] == pytest.approx(1 / 3)
    assert not [name for name in metrics if name.startswith("eval/plus/")]
    assert {"eval/pass_at_1", "eval/scores"}.isdisjoint(metrics)
    assert metrics["eval/model_step_mean"] == 0


def test_a_prompt_that_was_given_up_counts_with_the_responses_of_its_set(
    make_play: MakePlay, two_sets: PromptDataset
) -> None:
    play = play_sets(make_play, two_sets, "plus.samples=4", max_generation_attempts=1)
    play.controller.start_evaluation(0, ["plus"])
    play.start()
    first, second = (request for request in play.receive(2 + NUM_PROMPTS) if request.is_eval)
    play.deliver(play.answer(first, [1, 1, 1, 1]), broken_off(play.answer(second)))
    metrics = play.controller.get_evaluation(TIMEOUT_S)
    assert (metrics["eval/plus/pass_at_1"], metrics["eval/plus/pass_at_4"]) == (0.5, 0.5)
    assert metrics["eval/plus/num_given_up"] == 1


def test_one_set_of_the_mixer_list_has_only_the_metrics_of_all(make_play: MakePlay) -> None:
    play = make_play()
    play.controller.start_evaluation(0)
    play.start()
    metrics = evaluate(play, {"held_out": [[1], [0], [1]]})
    assert metrics["eval/pass_at_1"] == pytest.approx(2 / 3)
    assert not [name for name in metrics if name.startswith("eval/held_out")]
