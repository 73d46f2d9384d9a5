"""How much an engine actor takes in."""

import threading

import numpy as np
import pytest

from open_instruct.data_types import Moment, PromptRequest, SamplingConfig, TokenStatistics
from open_instruct.engines.request_tracker import RequestTracker
from open_instruct.workflows.runner import Answer

GROUP = SamplingConfig(n=4, max_tokens=1000)
PROMPT = np.zeros(20, np.int32)


def taken_in(work: RequestTracker, most: int = 100) -> int:
    """Takes groups in until there is no room, or `most` of them."""
    number = 0
    while work.has_room() and number < most:
        work.take_in([PromptRequest(PROMPT, GROUP, 0, f"p{number}", 0)])
        work.submit(f"p{number}/", PROMPT, GROUP)
        number += 1
    return number


def finish_all(work: RequestTracker, length: int, error: str = "") -> None:
    while (held := work.admit()) is not None:
        work.hand_over(held, Answer([], TokenStatistics(20, 4 * length, 1.0, 0.0), error))
    work._rollouts.clear()


@pytest.mark.parametrize(("length", "num_groups"), [(30, 25), (980, 2), (2000, 2)])
def test_responses_are_expected_to_be_as_long_as_the_last_ones(length: int, num_groups: int) -> None:
    work = RequestTracker(threading.Condition(), max_num_seqs=256, max_tokens=5000)
    assert taken_in(work) == 2  # 4 * (20 + 1000) tokens each; nothing is known yet
    finish_all(work, length=5, error="generation_timeout")
    assert taken_in(work) == 2  # a request that was broken off says nothing
    finish_all(work, length)
    assert taken_in(work) == num_groups
    assert work.num_outstanding_tokens == num_groups * 4 * 1020


def test_no_more_sequences_than_the_engine_has_room_for() -> None:
    work = RequestTracker(threading.Condition(), max_num_seqs=16, max_tokens=5000)
    taken_in(work)
    finish_all(work, length=1)
    assert taken_in(work) == 4


def test_a_request_that_is_given_up_leaves_the_account_at_once() -> None:
    work = RequestTracker(threading.Condition(), max_num_seqs=8, max_tokens=5000)
    replies = [work.submit(f"p{number}/", PROMPT, GROUP) for number in range(3)]
    admitted = work.admit()
    assert admitted is not None
    assert not work.has_room()
    replies[0].cancel()
    replies[1].cancel()
    assert work.num_outstanding_tokens == 4 * 1020
    assert work.has_room()
    assert work.take_given_up() == ["p0/"]  # the engine has only this one
    assert work.take_given_up() == []
    [last] = iter(work.admit, None)
    assert last.request_id == "p2/"


def test_an_answer_that_comes_when_its_request_is_given_up_is_dropped() -> None:
    work = RequestTracker(threading.Condition(), max_num_seqs=8, max_tokens=5000)
    reply = work.submit("p0/", PROMPT, GROUP)
    held = work.admit()
    assert held is not None
    reply.cancel()
    work.hand_over(held, Answer([], TokenStatistics(20, 4, 1.0, 0.0)))
    assert reply.cancelled()
    assert not work.has_requests


def test_an_id_that_is_in_the_engine_cannot_come_again() -> None:
    """The answer to the first request would go to the second."""
    work = RequestTracker(threading.Condition(), max_num_seqs=8, max_tokens=5000)
    work.submit("p0/", PROMPT, GROUP)
    with pytest.raises(AssertionError, match="p0/"):
        work.submit("p0/", PROMPT, GROUP)


def test_time_in_which_the_engine_stood_still_does_not_count_towards_the_limit_of_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work = RequestTracker(threading.Condition(), max_num_seqs=8, max_tokens=5000)
    work.stood_still_s = 1000.0  # before it came
    work.submit("p0/", PROMPT, GROUP)
    held = work.admit()
    assert held is not None
    monkeypatch.setattr(Moment, "elapsed_s", lambda _: 50.0)
    work.stood_still_s += 30.0
    assert work.later_than(15.0) == [held]
    assert work.later_than(25.0) == []
