# ruff: noqa: F811 - fixtures are imported
"""Pauses, prompts that are lost, and what goes wrong around the controller."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from controller_stage import (  # noqa: F401 - fixtures
    HOPELESS,
    MIXED,
    NUM_PROMPTS,
    NUM_STEPS,
    QUIET_S,
    SOLVED,
    TIMEOUT_S,
    JudgesInThisProcess,
    MakePlay,
    Play,
    all_samples_of,
    broken_off,
    datasets,
    identities,
    ids,
    make_play,
    tokenizer,
)

from open_instruct.record import schema
from open_instruct.record.reader import RunRecord
from open_instruct.rollouts import controller as rollout
from open_instruct.rollouts import result_scoring
from open_instruct.rollouts.prompt_ledger import CONSUMED
from open_instruct.rollouts.prompt_requests import request_seed
from open_instruct.verifiers.pool import VerifierPool
from open_instruct.verifiers.scoring_processes import Scored
from open_instruct.workflows.rc.workflow import ReasoningCache

# --- pausing and loss -------------------------------------------------------------------------------------------------


def test_a_paused_controller_issues_nothing_until_it_is_resumed(make_play: MakePlay) -> None:
    play = make_play()
    play.controller.pause()
    play.start()
    assert play.no_more_comes()
    assert play.controller.get_statistics()["is_paused"]
    play.controller.resume()
    play.receive(NUM_PROMPTS)
    statistics = play.controller.get_statistics()
    assert (statistics["is_paused"], statistics["pause_count"], statistics["resume_count"]) == (False, 1, 1)


def test_results_that_are_being_read_are_not_lost(make_play: MakePlay, monkeypatch: pytest.MonkeyPatch) -> None:
    """They came in one bundle with a result whose verification is slow to begin."""
    play = make_play().start()
    requests = play.receive(NUM_PROMPTS)
    scoring, begins, goes_on = play.controller._preparation.scoring, threading.Event(), threading.Event()
    submit = scoring.submit

    def submit_slowly(*args: Any) -> None:
        begins.set()
        assert goes_on.wait(TIMEOUT_S)
        submit(*args)

    monkeypatch.setattr(scoring, "submit", submit_slowly)
    play.deliver(*map(play.answer, requests))
    assert begins.wait(TIMEOUT_S)
    play.controller.take_back_prompts()
    assert play.controller.recover_lost(prompt_ids=[]) == 0
    goes_on.set()
    assert play.batch(1).num_samples == sum(request.generation_config.n for request in requests)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_feeder_that_failed_leaves_nobody_waiting(make_play: MakePlay, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(bundle: object) -> None:
        raise KeyError("a user's mistake")

    play = make_play()
    monkeypatch.setattr(play.controller._feeder, "_change", fail)
    play.start()
    play.wait_for(lambda: not play.controller._feeder._is_putting.is_set() and bool(play.controller._threads._error))
    assert play.controller.take_back_prompts() == 0


def test_prompts_that_an_engine_took_with_it_are_issued_again(make_play: MakePlay) -> None:
    play = make_play(async_steps=1, room=2).start()
    at_engines = play.receive(2)  # one bundle
    time.sleep(QUIET_S)
    taken_back = play.controller.take_back_prompts()
    assert taken_back >= 2
    assert play.no_more_comes()  # nothing is issued while inventory is taken
    play.deliver(play.answer(at_engines[0]))
    assert play.controller.recover_lost(prompt_ids=[]) == 1
    again = play.receive(2 * NUM_PROMPTS - 1)
    assert at_engines[1].prompt_id in ids(again)
    assert at_engines[0].prompt_id not in ids(again)
    assert play.controller.status()["prompts"]["reissued"] == 1


def test_a_prompt_that_the_engine_gave_up_is_issued_again_and_then_dropped(make_play: MakePlay) -> None:
    play = make_play(max_generation_attempts=2).start()
    requests = play.receive(NUM_PROMPTS)
    failed = broken_off(play.answer(requests[0]))
    play.deliver(failed)
    assert ids(play.receive(1)) == ["train-0"]
    play.deliver(failed)
    [instead] = play.receive(1)
    assert instead.prompt_id == f"train-{NUM_PROMPTS}"
    play.deliver(*(play.answer(request) for request in (*requests[1:], instead)))
    assert play.prompts_in(play.batch(1)) == all_samples_of(*requests[1:], instead)
    play.finish_step(1)
    assert play.controller.status()["prompts"]["dropped"] == {"failed": 1}
    statistics = play.controller.get_statistics()
    assert (statistics["generation_errors"], statistics["generation_timeouts"]) == (2, 2)
    assert statistics["dropped_timeouts"] == 1


def test_step_whose_last_prompt_was_dropped_takes_one_that_has_arrived_already(make_play: MakePlay) -> None:
    """It does not wait for the prompt that is issued instead."""
    play = make_play(max_generation_attempts=1, async_steps=1).start()
    *others, last, early = play.receive_admitted()[: NUM_PROMPTS + 1]
    play.deliver(*(play.answer(request) for request in (*others, early)))
    assert "step 1" in play.nothing_is_ready()
    play.deliver(broken_off(play.answer(last)))
    assert play.prompts_in(play.batch(1)) == all_samples_of(*others, early)


def test_group_that_was_broken_off_is_sampled_again_with_another_seed(make_play: MakePlay) -> None:
    """With the same seed the samples that took too long would take too long again."""
    play = make_play(max_generation_attempts=3).start()
    requests = play.receive(NUM_PROMPTS)
    tried = [requests[0]]
    for _ in range(2):
        play.deliver(broken_off(play.answer(tried[-1])))
        tried += play.receive(1)
    assert len({request.generation_config.seed for request in (*tried, *requests[1:])}) == 2 + NUM_PROMPTS
    assert [request.generation_config.seed for request in requests] == [request_seed(1, i) for i in range(NUM_PROMPTS)]
    assert {request.prompt.tobytes() for request in tried} == {requests[0].prompt.tobytes()}


def test_a_run_of_which_no_prompt_is_answered_any_more_ends(make_play: MakePlay) -> None:
    play = make_play(max_generation_attempts=1).start()
    requests = play.receive(NUM_PROMPTS)
    for _ in range(16):
        play.deliver(broken_off(play.answer(requests.pop())))
        requests += play.receive(1)
    play.controller.status()
    play.deliver(broken_off(play.answer(requests.pop())))
    with pytest.raises(RuntimeError, match=r"the last 17 prompts were dropped one after another.*over 1 s"):
        play.batch(1)


def test_retry_of_a_reasoning_cache_prompt_has_the_plan_of_before_and_one_that_is_dropped_leaves_none(
    make_play: MakePlay,
) -> None:
    options = {"rollout_workflow": "rc", "rc_states_per_problem": 1, "rc_buffer_size": 10, "max_generation_attempts": 2}
    play = make_play(**options).start()
    requests = play.receive(NUM_PROMPTS)
    play.deliver(broken_off(play.answer(requests[0])))
    [retry] = play.receive(1)
    assert retry.task == requests[0].task
    assert retry.generation_config.seed != requests[0].generation_config.seed
    workflow = play.controller._workflow
    assert isinstance(workflow, ReasoningCache)
    planner = workflow._planner
    assert set(planner._out) == set(ids(requests))
    play.deliver(broken_off(play.answer(retry)))
    [instead] = play.receive(1)
    assert set(planner._out) == {*ids(requests[1:]), instead.prompt_id}


def test_seed_of_a_retry_survives_a_dead_engine_and_a_resume(make_play: MakePlay, tmp_path: Path) -> None:
    killed = make_play(max_generation_attempts=2).start()
    requests = killed.receive(NUM_PROMPTS)
    killed.deliver(broken_off(killed.answer(requests[0])))
    [retry] = killed.receive(1)
    killed.controller.take_back_prompts()
    assert killed.controller.recover_lost(prompt_ids=ids(requests[1:])) == 1
    assert identities(killed.receive(1)) == identities([retry])
    resumed = make_play(max_generation_attempts=2)
    killed.controller.save(0, str(tmp_path / "state.npz"))
    resumed.controller.load(0, str(tmp_path / "state.npz"))
    resumed.start()
    assert identities(resumed.receive(NUM_PROMPTS)) == identities([retry, *requests[1:]])


def test_failure_of_a_copy_whose_other_is_being_scored_changes_nothing(
    make_play: MakePlay, monkeypatch: pytest.MonkeyPatch
) -> None:
    play = make_play(max_generation_attempts=1).start()
    requests = play.receive(NUM_PROMPTS)
    scoring: Future[list[Scored]] = Future()
    submit = play.controller._scoring.verifiers.submit
    monkeypatch.setattr(play.controller._scoring.verifiers, "submit", lambda *_args: scoring)
    play.deliver(play.answer(requests[0]), broken_off(play.answer(requests[0])))
    play.wait_for(lambda: play.controller.get_statistics()["generation_errors"] == 1)
    monkeypatch.setattr(play.controller._scoring.verifiers, "submit", submit)
    scoring.set_result([Scored(float(score)) for score in MIXED])
    play.deliver(*(play.answer(request) for request in requests[1:]))
    assert play.prompts_in(play.batch(1)) == all_samples_of(*requests)
    assert {fate["fate"] for fate in play.finish_step(1)} == {CONSUMED}


def test_causes_of_failures_are_told_now_and_then(make_play: MakePlay, caplog: pytest.LogCaptureFixture) -> None:
    play = make_play(max_generation_attempts=9).start()
    request = play.receive(NUM_PROMPTS)[0]
    for _ in range(5):
        play.deliver(broken_off(play.answer(request)))
        [request] = play.receive(1)
    told = [record.getMessage() for record in caplog.records if "generation_timeout" in record.getMessage()]
    assert told == [
        "1 group was given up (generation_timeout: 1). The last is train-0 on engine 0: generation_timeout: over 1 s. It is "
        "sampled again with another seed."
    ]


def test_warnings_reach_the_driver_with_the_status_or_while_it_waits_for_data(make_play: MakePlay) -> None:
    play = make_play(max_generation_attempts=9).start()
    play.deliver(broken_off(play.answer(play.receive(NUM_PROMPTS)[0])))
    play.receive(1)
    [warning] = play.controller.status()["warnings"]
    assert warning.startswith("1 group was given up (generation_timeout: 1).")
    assert play.controller.status()["warnings"] == []
    play.deliver(*(play.answer(request, SOLVED) for request in play.received[:NUM_PROMPTS]))
    play.receive(NUM_PROMPTS)
    progress = play.controller.describe_progress()
    assert progress.startswith("4 of 4 groups are back, 0 can be trained on: mean score 1, all 0: 0, all 1: 4; ")
    assert "; warnings: step 1: in each of 4 groups all responses scored alike" in progress


def say(play: Play, monkeypatch: pytest.MonkeyPatch, *scored: Scored) -> None:
    """The verifiers say this of the next group, and of those after it."""
    said: Future[list[Scored]] = Future()
    said.set_result(list(scored))
    monkeypatch.setattr(play.controller._scoring.verifiers, "submit", lambda *_args: said)


def test_group_that_was_not_scored_is_sampled_again_and_not_trained_on(
    make_play: MakePlay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verifier that hangs says nothing of a response; the one response that is left has nobody to be compared with."""
    play = make_play(max_generation_attempts=2).start()
    requests = play.receive(NUM_PROMPTS)
    with monkeypatch.context() as patch:
        say(play, patch, Scored(1.0), *[Scored(None, "timeout")] * 3)
        play.deliver(play.answer(requests[0]))
        [again] = play.receive(1)
    assert again.index == requests[0].index
    assert again.generation_config.seed != requests[0].generation_config.seed
    play.deliver(*(play.answer(request) for request in (*requests[1:], again)))
    assert play.prompts_in(play.batch(1)) == all_samples_of(*requests[1:], again)
    statistics = play.controller.get_statistics()
    assert (statistics["unscored_groups"], statistics["generation_errors"]) == (1, 0)


def test_response_that_was_not_scored_is_left_out_of_baseline_and_loss(
    make_play: MakePlay, monkeypatch: pytest.MonkeyPatch
) -> None:
    play = make_play(advantage_normalization_type="centered").start()
    requests = play.receive(NUM_PROMPTS)
    with monkeypatch.context() as patch:
        say(play, patch, Scored(None, "timeout"), *[Scored(score) for score in (1.0, 0.0, 0.5)])
        play.deliver(play.answer(requests[0]))
        play.wait_for(lambda: play.controller._flow.ledger[requests[0].prompt_id].arrived)
    play.deliver(*(play.answer(request) for request in requests[1:]))
    batch = play.batch(1)
    assert play.prompts_in(batch) == all_samples_of(*requests)[1:]
    assert batch.metrics["objective/not_scored"] == 1
    assert play.controller.get_statistics()["unscored_groups"] == 0


def test_responses_that_were_not_scored_are_in_the_record_with_why(
    make_play: MakePlay, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of the first group one response is left, so that its prompt is issued again; of the second three."""
    play = make_play(record=True, output_dir=str(tmp_path), num_unique_prompts_rollout=2, total_episodes=16).start()
    first, second = play.receive(2)
    with monkeypatch.context() as patch:
        say(play, patch, Scored(1.0), *[Scored(None, "timeout")] * 3)
        play.deliver(play.answer(first))
        [again] = play.receive(1)
    with monkeypatch.context() as patch:
        say(play, patch, Scored(None, "error: ValueError: no"), *[Scored(score) for score in (1.0, 0.0, 0.5)])
        play.deliver(play.answer(second))
        play.wait_for(lambda: play.controller._flow.ledger[second.prompt_id].arrived)
    play.deliver(play.answer(again))
    play.batch(1)
    play.finish_step(1)
    play.controller._record.flush()
    rows = RunRecord(tmp_path).samples(1).to_pylist()
    kept = [row for row in rows if row["outcome"] == "not_scored"]
    places = [(row["prompt_id"], row["attempt"], row["sample"], row["score"], row["reward"] is None) for row in kept]
    assert sorted(places) == [
        (first.prompt_id, 0, 0, 1.0, False),
        *((first.prompt_id, 0, number, None, True) for number in (1, 2, 3)),
        (second.prompt_id, 0, 3, None, True),
    ]
    reasons = {(row["prompt_id"], verdict["reasoning"]) for row in kept for verdict in row["verdicts"]}
    assert reasons == {
        (first.prompt_id, None),
        (first.prompt_id, "not scored: timeout"),
        (second.prompt_id, "not scored: error: ValueError: no"),
    }
    assert {use for row in kept for use in row["use"]} == {schema.LEFT_OUT}
    assert all(len(row["response_ids"]) == len(row["engine_logprobs"]) > 0 for row in kept)
    scored = [(row["prompt_id"], row["attempt"], row["sample"]) for row in rows if row["outcome"] == CONSUMED]
    taken = [
        *((first.prompt_id, 1, number) for number in range(4)),
        *((second.prompt_id, 0, number) for number in range(3)),
    ]
    assert sorted(scored) == taken


def test_answers_of_an_evaluation_that_were_not_scored_are_in_the_record(
    make_play: MakePlay, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    play = make_play(record=True, output_dir=str(tmp_path), num_samples_per_prompt_rollout=4)
    play.controller.start_evaluation(0)
    play.start()
    [hanging, *others] = play.receive(3 + NUM_PROMPTS)[:3]
    with monkeypatch.context() as patch:
        say(play, patch, *[Scored(None, "timeout")] * hanging.generation_config.n)
        play.deliver(play.answer(hanging))
        evaluation = play.controller._evaluations.current
        assert evaluation is not None
        play.wait_for(lambda: evaluation.num_done == 1)
    play.deliver(*(play.answer(request) for request in others))
    play.controller.eval(0)
    play.controller._record.flush()
    record = RunRecord(tmp_path)
    [file] = record.evaluations()
    rows = record.evaluation(file.version, file.set).to_pylist()
    assert {row["prompt_id"]: row["outcome"] for row in rows} == {
        hanging.prompt_id: "not_scored",
        **{request.prompt_id: "measured" for request in others},
    }
    assert {row["verdicts"][0]["reasoning"] for row in rows if row["outcome"] == "not_scored"} == {
        "not scored: timeout"
    }


ERROR, TIMEOUT = Scored(None, "error: ValueError: no", cost=0.5), Scored(None, "timeout", cost=0.5)


def test_failures_of_verifiers_count_also_where_the_group_is_left_out(
    make_play: MakePlay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the first group 3 responses make the verifier fail, so it is sampled again; of the second 1 does."""
    play = make_play(num_unique_prompts_rollout=2, total_episodes=16).start()
    requests = play.receive(2)
    with monkeypatch.context() as patch:
        say(play, patch, Scored(1.0, cost=0.5), TIMEOUT, ERROR, ERROR)
        play.deliver(replace(play.answer(requests[0]), notes="broken"))
        [again] = play.receive(1)
    with monkeypatch.context() as patch:
        say(play, patch, ERROR, Scored(1.0), Scored(0.0), Scored(1.0))
        play.deliver(replace(play.answer(requests[1]), notes="kept"))
        play.wait_for(lambda: play.controller._flow.ledger[requests[1].prompt_id].arrived)
    play.deliver(replace(play.answer(again), notes="again"))
    monkeypatch.setattr(
        play.controller._workflow, "result_metrics", [lambda results: {"noted": [one.notes for one in results]}]
    )
    first = play.batch(1).metrics
    assert sorted(first["noted"]) == ["again", "broken", "kept"]
    assert (first["objective/not_scored"], first["objective/verifier_failures"]) == (4, 3)
    assert (first["objective/reasoning_gym_not_scored"], first["objective/reasoning_gym_failures"]) == (4, 3)
    assert first["objective/verifier_cost"] == 4 * 0.5 + 0.5
    play.finish_step(1)
    play.deliver(*(play.answer(request) for request in play.receive(2)))
    second = play.batch(2).metrics
    assert (second["objective/not_scored"], second["objective/verifier_failures"]) == (0, 0)
    assert "objective/verifier_cost" not in second


def test_failures_of_verifiers_count_in_groups_that_are_too_old(
    make_play: MakePlay, monkeypatch: pytest.MonkeyPatch
) -> None:
    play = make_play(async_steps=1).start(version=2)
    requests = play.receive_admitted()
    with monkeypatch.context() as patch:
        say(play, patch, ERROR, Scored(1.0), Scored(0.0), Scored(1.0))
        play.deliver(*(play.answer(request, version=0) for request in requests))
        again = play.receive(NUM_PROMPTS)
    play.deliver(*(play.answer(request) for request in again))
    metrics = play.batch(3).metrics
    assert metrics["stale_results_dropped"] == NUM_PROMPTS
    assert metrics["objective/not_scored"] == metrics["objective/verifier_failures"] == NUM_PROMPTS
    assert metrics["objective/verifier_cost"] == 0.5 * NUM_PROMPTS


def test_stragglers_that_are_too_old_count_among_the_groups_that_steps_left(make_play: MakePlay) -> None:
    """Three prompts come back too old, with responses that are long, and are sampled again."""
    options = {"over_issued_prompts": 1, "max_staleness_allowed": 2, "straggler_policy": "drop"}
    play = make_play(async_steps=1, **options).start(version=3)
    requests = play.receive(NUM_PROMPTS)
    old = [play.answer(request, HOPELESS, version=0) for request in requests[:3]]
    play.deliver(*old)
    again = play.receive(3)
    taken = [play.answer(request) for request in (*again, requests[3])]
    play.deliver(*taken)
    metrics = play.batch(4).metrics
    assert (metrics["stale_results_dropped"], metrics["over_issue/num_stragglers"]) == (3, 3)
    lengths = [np.mean([len(one) for result in results for one in result.responses]) for results in (taken, old)]
    assert metrics["over_issue/response_length_taken"] == pytest.approx(lengths[0])
    assert metrics["over_issue/response_length_left"] == pytest.approx(lengths[1])


def test_evaluation_leaves_out_what_was_not_scored(make_play: MakePlay, monkeypatch: pytest.MonkeyPatch) -> None:
    play = make_play()
    play.controller.start_evaluation(0)
    play.start()
    requests = play.receive(3 + NUM_PROMPTS)[:3]
    play.deliver(*(play.answer(request, [1]) for request in requests[:2]))
    hanging: Future[list[Scored]] = Future()
    hanging.set_result([ERROR])
    monkeypatch.setattr(play.controller._workflow, "result_metrics", [lambda results: {"noted": len(results)}])
    play.wait_for(lambda: play.controller._evaluations.current.num_done == 2)  # type: ignore[union-attr]
    monkeypatch.setattr(play.controller._scoring.verifiers, "submit", lambda *_args: hanging)
    play.deliver(play.answer(requests[2], [0]))
    metrics = play.controller.get_evaluation(TIMEOUT_S)
    assert (metrics["eval/pass_at_1"], metrics["eval/num_not_scored"]) == (1.0, 1)
    assert metrics["eval/objective/not_scored"] == metrics["eval/objective/verifier_failures"] == 1
    assert metrics["eval/objective/reasoning_gym_failures"] == 1
    assert metrics["eval/objective/verifier_cost"] == 0.5
    assert metrics["eval/noted"] == 3


def test_verification_that_cannot_be_done_ends_the_run(make_play: MakePlay, monkeypatch: pytest.MonkeyPatch) -> None:
    play = make_play().start()
    failed: Future[list[Scored]] = Future()
    failed.set_exception(ConnectionError("no verifier process could be started"))
    monkeypatch.setattr(play.controller._scoring.verifiers, "submit", lambda *_args: failed)
    play.deliver(play.answer(play.receive(NUM_PROMPTS)[0]))
    with pytest.raises(RuntimeError, match=r"verification of train-0 failed: .*no verifier process could be started"):
        play.controller.watch()


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("thread", ["feed_prompts", "data_preparation_thread", "packing_thread"])
def test_an_error_in_a_thread_is_raised_by_the_next_call(
    make_play: MakePlay, monkeypatch: pytest.MonkeyPatch, thread: str
) -> None:
    play = make_play().start()
    play.receive(NUM_PROMPTS)

    def fail(*_: object, **__: object) -> None:
        raise ConnectionError(f"{thread} lost its queue")

    controller = play.controller
    if thread == "feed_prompts":
        monkeypatch.setattr(play.prompt_queue, "put", fail)
        controller.start_evaluation(0)
    else:
        owner, method = (
            (controller._producer, "_assemble") if thread == "packing_thread" else (controller._preparation, "take")
        )
        monkeypatch.setattr(owner, method, fail)
        play.deliver(play.answer(play.received[0]))
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=f"{thread} lost its queue"):
        controller.watch()
    assert time.monotonic() - started < TIMEOUT_S / 2
    calls: list[Callable[[], object]] = [
        controller.watch,
        lambda: controller.set_version(1),
        lambda: controller.start_evaluation(1),
        controller.status,
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match=f"{thread} lost its queue"):
            call()


def test_a_group_older_than_the_bound_is_never_trained_on(make_play: MakePlay) -> None:
    """Pacing does not let it come to this; what comes all the same is thrown away, counted, and its prompt issued again."""
    play = make_play(async_steps=1).start(version=2)
    play.deliver(*(play.answer(request, version=0) for request in play.receive_admitted()))
    again = play.receive(NUM_PROMPTS)
    assert ids(again) == [f"train-{number}" for number in range(NUM_PROMPTS)]
    play.deliver(*(play.answer(request) for request in again))
    batch = play.batch(3)
    assert batch.metrics["max_sample_age"] == 0
    assert batch.metrics["stale_results_dropped"] == NUM_PROMPTS
    assert play.controller.get_statistics()["dropped_stale_samples"] >= 4 * NUM_PROMPTS


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_evaluation_of_mixed_versions_ends_the_run(make_play: MakePlay) -> None:
    play = make_play()
    play.controller.start_evaluation(0)
    play.start()
    held_out = play.receive(3 + NUM_PROMPTS)[0]
    play.deliver(play.answer(held_out, version=1))
    with pytest.raises(RuntimeError, match=r"eval-0-0 was to measure version 0 but was sampled by \[1\]"):
        play.controller.get_evaluation(TIMEOUT_S)


def test_who_is_waited_for_is_told(make_play: MakePlay) -> None:
    play = make_play().start()
    requests = play.receive(NUM_PROMPTS)
    play.deliver(*(play.answer(requests[i]) for i in (0, 2)))
    assert play.nothing_is_ready() == (
        "2 of 4 groups are back, 2 can be trained on: mean score 0.5, all 0: 0, all 1: 0; step 1 is being put together, prompts "
        "of version 0 are admitted, 2 prompts are not back from the engines "
        "(train-1 (version 0), train-3 (version 0)), 0 groups are being scored, "
        "0 groups are waiting"
    )


def test_the_end_of_a_run_leaves_no_prompt_open(make_play: MakePlay) -> None:
    play = make_play(async_steps=1).start()
    play.run(1, 1)
    play.receive_admitted()
    assert play.controller.close_ledger() == {
        "issued": 3 * NUM_PROMPTS,
        "consumed": NUM_PROMPTS,
        "dropped": {"run_ended": 2 * NUM_PROMPTS},
        "reissued": 0,
        "open": 0,
        "left_out": {},
    }


def test_weight_cost_and_prompt_of_a_verifier_are_used(
    make_play: Callable[..., Play], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout, "VerifierPool", JudgesInThisProcess)
    monkeypatch.setattr(result_scoring, "verifier_weight", lambda dataset: 0.5)
    play = make_play().start()
    [batch] = play.run(1, 1)
    assert batch.metrics["scores"] == 2.5
    assert batch.metrics["objective/verifier_cost"] == 0.25 * 4 * NUM_PROMPTS
    assert {
        row.raw_query for row in map(play.datasets[False].__getitem__, range(len(play.datasets[False])))
    } >= JudgesInThisProcess.queries
    assert len(JudgesInThisProcess.queries) >= NUM_PROMPTS


def test_a_whole_run_with_verifiers_in_their_processes(make_play: MakePlay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout, "VerifierPool", VerifierPool)
    play = make_play(async_steps=1).start()
    batches = play.run(1, NUM_STEPS)
    assert [batch.metrics["scores"] for batch in batches] == [5.0] * NUM_STEPS
    assert sum(batch.metrics["objective/verifier_failures"] for batch in batches) == 0
    assert play.controller.status()["prompts"]["consumed"] == NUM_STEPS * NUM_PROMPTS
