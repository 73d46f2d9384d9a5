# ruff: noqa: F811 - `make_stage` is a fixture
"""Rollouts inside the engine actor: the actor is real, vLLM's engine is played, token by token."""

import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from engine_stage import MAX_MODEL_LEN, NUM_TOKENS, RC_OPTIONS, TIMEOUT_S, MakeStage, PlayedVLLM, Stage, make_stage  # noqa: F401

from open_instruct.data_types import PromptRequest, SamplingConfig
from open_instruct.engines import generation_loop
from open_instruct.engines.engine_cleanup import cleanup_processes
from open_instruct.engines.engine_sleep import SleepOptions
from open_instruct.engines.request_tracker import RequestTracker
from open_instruct.workflows.base import SINGLE_TURN, WorkflowSpec
from open_instruct.workflows.rc.types import REASONING, RCPlan
from open_instruct.workflows.runner import MOST_ERRORS_IN_A_ROW


def comes_true(condition: Callable[[], bool]) -> bool:
    ends_at = time.monotonic() + TIMEOUT_S
    while not condition() and time.monotonic() < ends_at:
        time.sleep(0.005)
    return condition()


def rollouts_in_order(stage: Stage) -> list[str]:
    return [request_id.partition("/")[0] for request_id in stage.vllm.came]


def test_two_rollouts_take_turns_in_one_slot(make_stage: MakeStage) -> None:
    stage = make_stage(slots=1)
    stage.vllm.waits_for = 2  # so that neither is at its second turn before the other has begun
    stage.put(RCPlan("1 + 1", num_cycles=3), RCPlan("2 + 2", num_cycles=3))
    results = stage.get(2)
    assert [len(result.responses) for result in results] == [3, 3]
    assert rollouts_in_order(stage) == ["train-0", "train-1"] * 5
    assert stage.vllm.most_running == 1


def test_the_first_step_takes_all_prompts_of_a_bundle(make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although an engine that has nothing to do hears of the first of them before the others."""
    submit = RequestTracker.submit

    def slowly(self: RequestTracker, *request: Any) -> Any:
        answer = submit(self, *request)
        time.sleep(0.002)
        return answer

    monkeypatch.setattr(RequestTracker, "submit", slowly)
    monkeypatch.setattr(generation_loop, "FIRST_REQUESTS_S", TIMEOUT_S)
    stage = make_stage(workflow=WorkflowSpec(SINGLE_TURN))
    at_steps: list[int] = []
    stage.vllm.before_step = lambda: at_steps.append(len(stage.vllm.came))
    stage.put(None, None, None, None)
    stage.get(4)
    assert at_steps[0] == 4


def test_an_engine_does_not_wait_long_for_a_rollout_that_asks_late(make_stage: MakeStage) -> None:
    stage = make_stage(workflow=WorkflowSpec(SINGLE_TURN))
    late = PromptRequest(np.arange(8, dtype=np.int32), SamplingConfig(max_tokens=64, n=1, seed=1), 0, "train-late", 0)
    stage.actor._work.take_in([late])  # and makes no request
    stage.put(None)
    [result] = stage.get()
    assert result.prompt_id == "train-0"


def test_a_result_is_whole(make_stage: MakeStage) -> None:
    stage = make_stage()
    stage.put(RCPlan("1 + 1", states=(0, 1), num_cycles=2), n=3)
    [result] = stage.get()
    assert [(sample.kind, sample.number, sample.group) for sample in result.samples] == [
        *[(REASONING, 1, 0)] * 3,
        *[(REASONING, 2, 1)] * 3,
    ]
    assert [len(one) for one in result.responses] == [len(one) for one in result.logprobs] == [NUM_TOKENS] * 6
    assert [state["number"] for state in result.notes] == [1]
    assert result.token_statistics.num_response_tokens == 8 * NUM_TOKENS
    assert (result.index, result.prompt_id, result.issue_version, result.error) == (0, "train-0", 0, "")


def test_room_for_longer_evaluations_is_no_room_for_longer_turns(make_stage: MakeStage) -> None:
    """A prompt of 10 tokens, a response of 64 and two summaries of 64 are all that samples of a training prompt may have."""
    stage = make_stage(max_prompt_tokens=10)
    stage.put(RCPlan("1 + 1 " * 60, num_cycles=2))
    [result] = stage.get()
    assert "tokens of 202 that the model takes" in result.error
    assert MAX_MODEL_LEN > 202


def test_each_turn_has_the_versions_that_sampled_it(make_stage: MakeStage) -> None:
    """New weights come in the middle of the first turn, and again before the last."""
    stage = make_stage(slots=1)
    steps = 0

    def new_weights() -> None:
        nonlocal steps
        steps += 1
        stage.vllm.version = 3 if steps > 2 * NUM_TOKENS else int(steps > 2)

    stage.vllm.before_step = new_weights
    stage.put(RCPlan("1 + 1", num_cycles=2, num_summaries=1))
    [result] = stage.get()
    assert result.version_spans == [[(0, 2), (1, 4)], [(1, 6)], [(3, 6)]]
    assert (result.oldest_version, result.newest_version) == (0, 3)


def test_turns_on_the_way_do_not_age_a_sample(make_stage: MakeStage) -> None:
    """They are its prompt: what is trained on was sampled by the weights of the last turn alone."""
    stage = make_stage(slots=8)
    steps = 0

    def new_weights() -> None:
        nonlocal steps
        steps += 1
        stage.vllm.version = int(steps > 2 * NUM_TOKENS)

    stage.vllm.before_step = new_weights
    stage.put(RCPlan("1 + 1", states=(1,), num_cycles=2), n=2)
    [result] = stage.get()
    assert (result.oldest_version, result.newest_version) == (1, 1)
    assert [state["version"] for state in result.notes] == [0]


def test_weights_can_come_between_two_turns(make_stage: MakeStage) -> None:
    """Without in-flight updates what is being generated is finished first: a turn, not a whole rollout."""
    stage = make_stage(slots=1, inflight_updates=False)
    stage.vllm.before_step = lambda: time.sleep(0.01)
    stage.put(RCPlan("1 + 1", num_cycles=6))
    while not stage.vllm.came:
        time.sleep(0.005)
    stage.actor.start_weight_update()
    assert not stage.vllm.has_unfinished_requests()
    assert len(stage.vllm.came) < 11
    stage.actor.finish_weight_update(1)
    [result] = stage.get()
    assert {len(spans) for spans in result.version_spans} == {1}
    assert result.version_spans[-1] == [(1, 6)]


def test_a_prompt_that_comes_before_its_weights_waits_for_them(make_stage: MakeStage) -> None:
    """Its rollout has not begun meanwhile, so no time limit runs; the engine is not taken for one that hangs."""
    stage = make_stage(workflow=WorkflowSpec(SINGLE_TURN))
    stage.put(None, None, version=1)
    assert comes_true(lambda: stage.actor._work.num_waiting_for_version == 2)
    time.sleep(0.05)
    inventory = stage.actor.take_inventory()
    assert (inventory["held"], inventory["idle_s"], inventory["needs_weights"]) == (["train-0", "train-1"], 0.0, False)
    direct = stage.actor.generate_with_single_engine([np.arange(8, dtype=np.int32)], SamplingConfig(max_tokens=64))
    assert direct[0].version_spans == [[(0, NUM_TOKENS)]]
    stage.actor.start_weight_update()
    stage.actor.finish_weight_update(1)
    assert [result.version_spans for result in stage.get(2)] == [[[(1, NUM_TOKENS)]]] * 2


def test_a_direct_call_that_is_late_leaves_nothing_in_the_engine(make_stage: MakeStage) -> None:
    stage = make_stage()
    stage.vllm.waits_for = 2  # so that the one request gets no token
    with pytest.raises(TimeoutError):
        stage.actor.generate_with_single_engine(
            [np.arange(8, dtype=np.int32)], SamplingConfig(max_tokens=64), timeout_s=0.2
        )
    assert stage.actor.take_inventory()["num_outstanding_tokens"] == 0
    assert comes_true(lambda: not stage.vllm.has_unfinished_requests())


def test_an_engine_falls_asleep_after_an_update_and_not_within_it(make_stage: MakeStage) -> None:
    stage = make_stage(sleep=SleepOptions(after_s=0.5))
    stage.actor.start_weight_update()
    time.sleep(1.0)
    assert stage.actor.take_inventory()["num_sleeps"] == 0
    stage.actor.finish_weight_update(1)
    assert comes_true(lambda: stage.actor.take_inventory()["state"] == "asleep")


def test_prompts_that_come_early_keep_no_engine_awake() -> None:
    """They neither have it wait for their first requests, nor have it ask for weights."""
    work = RequestTracker(threading.Condition(), max_num_seqs=8, max_tokens=1e9, version=3)
    config = SamplingConfig(max_tokens=64)
    old, new, newer = (PromptRequest(np.arange(8, dtype=np.int32), config, 0, f"of-{v}", v) for v in (3, 4, 5))
    assert work.take_in([new, newer]) == []
    assert not work.will_submit
    assert work.num_waiting_for_version == len(work.prompt_ids) == 2
    assert work.take_in([old]) == [old]
    assert work.will_submit
    assert work.set_version(4) == [new]
    assert work.set_version(6) == [newer]
    assert work.num_waiting_for_version == 0


def test_a_rollout_is_inside_until_its_result_is_out(make_stage: MakeStage) -> None:
    stage = make_stage(slots=1)
    stage.vllm.before_step = lambda: time.sleep(0.01)
    stage.put(RCPlan("1 + 1", num_cycles=3))
    while not stage.actor.take_inventory()["held"]:
        time.sleep(0.005)
    while stage.results.empty():
        assert "train-0" in stage.actor.take_inventory()["held"] or not stage.results.empty()
    stage.get()


def test_a_turn_over_its_time_gives_the_prompt_up(make_stage: MakeStage) -> None:
    stage = make_stage(generation_timeout=0.3)
    stage.vllm.before_step = lambda: time.sleep(0.2)
    stage.put(RCPlan("1 + 1", num_cycles=2))
    [result] = stage.get()
    assert "generation_timeout" in result.error
    assert result.responses == []
    stage.vllm.before_step = lambda: None
    stage.put(RCPlan("1 + 1", num_cycles=2))
    assert stage.get()[0].error == ""


def test_an_update_does_not_count_towards_the_time_of_a_request(make_stage: MakeStage) -> None:
    """In a collective one all engines stand still from its begin to its end."""
    stage = make_stage(generation_timeout=2.0, weight_transport="gloo")
    stage.vllm.before_step = lambda: time.sleep(0.02)
    stage.put(RCPlan("1 + 1", num_cycles=1))
    while not stage.vllm.running:
        time.sleep(0.005)
    stage.actor.start_weight_update()
    time.sleep(2.2)
    stage.actor.finish_weight_update(1)
    assert stage.get()[0].error == ""


def test_a_problem_that_fills_the_context_is_given_up(make_stage: MakeStage) -> None:
    stage = make_stage()
    stage.put(RCPlan("1 + 1 " * 400, num_cycles=2), RCPlan("1 + 1", num_cycles=2))
    too_long, fine = stage.get(2)
    assert "PromptTooLong" in too_long.error
    assert len(fine.responses) == 2


def test_an_error_of_a_workflow_gives_the_prompt_up_and_many_in_a_row_end_the_engine(make_stage: MakeStage) -> None:
    stage = make_stage()
    broken: Any = "a task that is no plan"
    stage.put(*[broken] * (MOST_ERRORS_IN_A_ROW - 1))
    given_up = stage.get(MOST_ERRORS_IN_A_ROW - 1)
    assert {result.error for result in given_up} == {"AttributeError: 'str' object has no attribute 'problem'"}
    stage.put(RCPlan("1 + 1", num_cycles=1))
    assert stage.get()[0].error == ""
    stage.put(*[broken] * MOST_ERRORS_IN_A_ROW)
    error = stage.ended()
    assert isinstance(error, RuntimeError)
    assert isinstance(error.__cause__, AttributeError)
    assert "no attribute 'problem', in the workflow ReasoningCache (" in str(error)
    assert str(error).endswith(f"); {MOST_ERRORS_IN_A_ROW} rollouts failed one after another")


def test_engine_without_processes_of_its_own_leaves_nobody_to_kill_others(make_stage: MakeStage) -> None:
    """The process that stands by kills what belongs to the engine alone, and not what was there before."""
    bystander = subprocess.Popen(["sleep", "600"])
    try:
        before = list(cleanup_processes)
        make_stage()
        assert cleanup_processes == before
    finally:
        bystander.kill()
        bystander.wait(timeout=TIMEOUT_S)
