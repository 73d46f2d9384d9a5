# ruff: noqa: F811 - fixtures are imported
"""The controller has the weights evaluated."""

from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from controller_stage import (  # noqa: F401 - fixtures
    NUM_PROMPTS,
    QUIET_S,
    TIMEOUT_S,
    MakePlay,
    all_samples_of,
    broken_off,
    datasets,
    identities,
    ids,
    make_play,
    rows_of_two_verifiers,
    tokenizer,
)

from open_instruct.data.prompt_dataset import PromptDataset
from open_instruct.verifiers.scoring_processes import Scored


def test_an_evaluation_comes_before_training_prompts_and_needs_none_of_them(make_play: MakePlay) -> None:
    play = make_play().start()
    play.deliver(*(play.answer(request) for request in play.receive(NUM_PROMPTS)))
    play.batch(1)
    play.controller.commit(1)
    play.version = 1
    play.controller.start_evaluation(1)
    play.controller.set_version(1)
    requests = play.receive(3 + NUM_PROMPTS)
    assert [request.is_eval for request in requests] == [True] * 3 + [False] * NUM_PROMPTS
    assert ids(requests[:3]) == ["eval-1-0", "eval-1-1", "eval-1-2"]
    play.deliver(*(play.answer(request, [score]) for request, score in zip(requests[:3], (1, 0, 1), strict=True)))
    metrics = play.controller.get_evaluation(TIMEOUT_S)  # not one training result has come
    assert metrics["eval/pass_at_1"] == pytest.approx(2 / 3)


def test_evaluation_results_never_enter_a_batch(make_play: MakePlay) -> None:
    play = make_play()
    play.controller.start_evaluation(0)
    play.start()
    held_out, training = play.receive(3 + NUM_PROMPTS)[:3], play.received[3:]
    assert [request.is_eval for request in play.received] == [True] * 3 + [False] * NUM_PROMPTS
    results = [play.answer(request) for request in (*training[:2], *held_out, *training[2:])]
    play.deliver(*results[:3])
    play.deliver(*results[3:])
    assert play.prompts_in(play.batch(1)) == all_samples_of(*training)
    metrics = play.controller.get_evaluation(TIMEOUT_S)
    assert metrics["eval/pass_at_1"] == 1.0
    assert (metrics["eval/model_step_min"], metrics["eval/model_step_max"]) == (0, 0)
    assert play.controller.status()["prompts"]["issued"] == NUM_PROMPTS


@pytest.mark.parametrize(("limit", "number"), [(2, 2), (-1, 3), (0, 0)])
def test_answers_of_an_evaluation_are_handed_over(make_play: MakePlay, limit: int, number: int) -> None:
    play = make_play(eval_completions=limit)
    play.controller.start_evaluation(0)
    play.start()
    requests = play.receive(3 + NUM_PROMPTS)[:3]
    play.deliver(*(play.answer(request) for request in requests))
    play.controller.get_evaluation(TIMEOUT_S)
    rows = play.controller.take_evaluation().get("sample_completions", [])
    assert len(rows) == number * len(play.answer(requests[0]).samples)
    for row in rows:
        assert set(row) == {
            *("set", "row", "source", "sample", "prompt", "response", "scores"),
            *("ground_truth", "right_answers", "dataset", "finish_reason", "num_tokens"),
        }
        assert row["prompt"]
    held_out = play.datasets[True]
    places = [held_out.places[request.index] for request in requests]
    assert [(row["row"], row["sample"]) for row in rows] == [(place, 0) for place in places[: len(rows)]]
    assert all(row["row"].startswith(f"{row['source']} ") for row in rows)


def test_two_evaluations_ask_the_same_with_the_same_seeds(make_play: MakePlay) -> None:
    play = make_play()
    asked = []
    for number in (3 + NUM_PROMPTS, 3):
        play.controller.start_evaluation(0)
        if not asked:
            play.start()
        asked.append([request for request in play.receive(number) if request.is_eval])
        play.deliver(*(play.answer(request) for request in asked[-1]))
        play.controller.get_evaluation(TIMEOUT_S)
    assert identities(asked[0]) == identities(asked[1])


def test_results_of_another_evaluation_are_ignored(make_play: MakePlay) -> None:
    play = make_play()
    play.controller.start_evaluation(0)
    play.start()
    requests = play.receive(3 + NUM_PROMPTS)[:3]
    late = [play.answer(request, [0]) for request in requests]
    play.deliver(*(play.answer(request) for request in requests))
    play.controller.get_evaluation(TIMEOUT_S)
    play.deliver(*late)
    play.controller.start_evaluation(1)
    play.version = 1
    requests = play.receive(3)
    play.deliver(*late)
    with pytest.raises(
        TimeoutError, match=r"0 of 3 results after 0.15 s; 3 prompts are not back from the engines \(eval-1-0,"
    ):
        play.controller.get_evaluation(QUIET_S)
    play.deliver(*(play.answer(request) for request in requests))
    assert play.controller.get_evaluation(TIMEOUT_S)["eval/pass_at_1"] == 1.0


def test_evaluation_results_are_taken_in_while_the_message_queue_is_full(make_play: MakePlay) -> None:
    """The driver waits for the evaluation then, and takes nothing from the message queue."""
    play = make_play(async_steps=2, ready_steps=1)
    play.controller.start_evaluation(0)
    play.start()
    requests = play.receive(3 + 3 * NUM_PROMPTS)
    held_out, training = requests[:3], requests[3:]
    play.deliver(*(play.answer(request) for request in (*training, *held_out)))
    assert play.controller.get_evaluation(TIMEOUT_S)["eval/pass_at_1"] == 1.0
    for training_step in (1, 2, 3):
        assert play.batch(training_step).num_samples == 4 * NUM_PROMPTS


def test_evaluation_prompt_that_is_broken_off_each_time_counts_as_wrong_and_is_counted(
    make_play: MakePlay, caplog: pytest.LogCaptureFixture
) -> None:
    play = make_play(max_generation_attempts=2)
    play.controller.start_evaluation(0)
    play.start()
    [slow, *others] = play.receive(3 + NUM_PROMPTS)[:3]
    play.deliver(*(play.answer(request) for request in others), broken_off(play.answer(slow)))
    [again] = play.receive(1)
    # Another seed would prefer the answers that are short enough.
    assert identities([again]) == identities([slow])
    play.deliver(broken_off(play.answer(again)))
    metrics = play.controller.get_evaluation(TIMEOUT_S)
    assert metrics["eval/pass_at_1"] == pytest.approx(2 / 3)
    assert metrics["eval/num_given_up"] == 1
    assert metrics["eval/stop_rate"] == 1.0  # of the two that have an end
    assert "evaluation of version 0: 1 of 3 prompts given up after 2 attempts, counted as wrong" in caplog.text
    assert "(generation_timeout: over 1 s: 1)" in caplog.text
    statistics = play.controller.get_statistics()
    assert (statistics["generation_errors"], statistics["generation_timeouts"]) == (2, 0)
    assert play.no_more_comes()


def test_evaluation_prompt_that_is_given_up_counts_as_wrong_for_each_of_its_verifiers(
    make_play: MakePlay, rows_of_two_verifiers: PromptDataset
) -> None:
    play = make_play(max_generation_attempts=1, held_out=rows_of_two_verifiers)
    play.controller.start_evaluation(0)
    play.start()
    [slow, *others] = play.receive(10 + NUM_PROMPTS)[:10]
    play.deliver(*(play.answer(request) for request in others), broken_off(play.answer(slow)))
    metrics = play.controller.get_evaluation(TIMEOUT_S)
    for name in ("verifiable", "gsm8k", "max_length"):
        assert metrics[f"eval/objective/{name}_correct_rate"] == 0.9
    assert not [name for name in metrics if " + " in name]


def test_evaluation_that_took_too_long_is_given_up_before_that_of_another_version(make_play: MakePlay) -> None:
    play = make_play(eval_timeout_s=QUIET_S)
    play.start()
    play.deliver(*(play.answer(request) for request in play.receive(NUM_PROMPTS)))
    with pytest.raises(TimeoutError, match="0 of 3 results"):
        play.controller.eval(0)
    late = play.receive(3)
    with pytest.raises(TimeoutError, match=r"3 prompts are not back from the engines .* raise --eval_timeout_s$"):
        play.controller.eval(0)  # the same one goes on
    play.batch(1)
    play.finish_step(1)
    play.receive(NUM_PROMPTS)
    play.deliver(*(play.answer(request, [0]) for request in late))  # by the new weights, which ends no thread
    play.controller._args.eval_timeout_s = TIMEOUT_S
    with ThreadPoolExecutor(1) as caller:
        evaluation = caller.submit(play.controller.eval, 1)
        requests = play.receive(3)
        assert ids(requests) == ["eval-1-0", "eval-1-1", "eval-1-2"]
        play.deliver(*(play.answer(request, [0], version=0) for request in late))
        play.deliver(*(play.answer(request) for request in requests))
        evaluation.result(TIMEOUT_S)
    metrics = play.controller.take_evaluation()
    assert (metrics["eval/model_step_min"], metrics["eval/pass_at_1"]) == (1, 1.0)
    assert play.controller.status()["prompts"]["issued"] == 2 * NUM_PROMPTS


def test_whoever_waits_for_an_evaluation_that_is_given_up_is_told_at_once(make_play: MakePlay) -> None:
    """Each call that waits keeps a thread of the controller, and it has 16."""
    play = make_play(eval_timeout_s=1000 * TIMEOUT_S)
    play.start()
    with ThreadPoolExecutor(1) as caller:
        evaluation = caller.submit(play.controller.eval, 0)
        play.deliver(play.answer(next(request for request in play.receive(3 + NUM_PROMPTS) if request.is_eval)))
        play.controller.give_up_evaluation()
        with pytest.raises(TimeoutError, match=r"^evaluation: [01] of 3 results when it was given up; .* issued$"):
            evaluation.result(TIMEOUT_S)
    play.controller.start_evaluation(0)


def test_evaluation_of_another_version_begins_without_new_weights_for_training(make_play: MakePlay) -> None:
    """A loop of the user's own may evaluate what it never trains on."""
    play = make_play(eval_timeout_s=QUIET_S)
    play.start()
    for version in (3, 5):
        with pytest.raises(TimeoutError):
            play.controller.eval(version)
    evaluation = play.controller._evaluations.current
    assert evaluation is not None
    assert evaluation.version == 5


def test_evaluation_prompt_that_an_engine_took_with_it_uses_up_no_attempt(make_play: MakePlay) -> None:
    play = make_play(max_generation_attempts=1)
    play.controller.start_evaluation(0)
    play.start()
    requests = play.receive(3 + NUM_PROMPTS)
    for _ in range(3):
        play.controller.take_back_prompts()
        assert play.controller.recover_lost(prompt_ids=ids(requests[1:])) == 1
        assert identities(play.receive(1)) == identities(requests[:1])
    play.deliver(*(play.answer(request) for request in requests[:3]))
    metrics = play.controller.get_evaluation(TIMEOUT_S)
    assert (metrics["eval/pass_at_1"], metrics["eval/num_given_up"]) == (1.0, 0)


def test_evaluation_result_that_is_being_scored_is_not_lost_with_an_engine(
    make_play: MakePlay, monkeypatch: pytest.MonkeyPatch
) -> None:
    play = make_play()
    play.controller.start_evaluation(0)
    play.start()
    requests = play.receive(3 + NUM_PROMPTS)
    scoring: Future[list[Scored]] = Future()
    monkeypatch.setattr(play.controller._scoring.verifiers, "submit", lambda *_args: scoring)
    play.deliver(play.answer(requests[0], [1]))
    evaluation = play.controller._evaluations.current
    assert evaluation is not None
    play.wait_for(lambda: "1 prompt is being scored" in evaluation.describe_missing())
    play.controller.take_back_prompts()
    assert play.controller.recover_lost(prompt_ids=ids(requests[1:])) == 0
