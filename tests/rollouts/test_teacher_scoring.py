"""Groups go to the teacher and come back with what it says; engines that die or stand still end the run and are named."""

import logging
import queue
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray
from group_fakes import make_result
from played_teachers import PlayedRay, PlayedTeacher, drained, said_of

from open_instruct.data_types import TokenStatistics
from open_instruct.rollouts import teacher_scoring
from open_instruct.rollouts.teacher_scoring import TeacherScoring
from open_instruct.scored_groups import ScoredGroup
from open_instruct.system.work_threads import WorkThreads

TIMEOUT_S = 20.0


def group(number: int) -> ScoredGroup:
    result = make_result(
        responses=[np.arange(number, number + 3, dtype=np.int32), np.arange(7, 9, dtype=np.int32)],
        logprobs=[np.zeros(3, dtype=np.float32), np.zeros(2, dtype=np.float32)],
        finish_reasons=["stop"] * 2,
        version_spans=[[(0, 3)], [(0, 2)]],
        index=0,
        prompt_id=f"train-{number}",
        issue_version=0,
        engine_id=0,
        token_statistics=TokenStatistics(3, 5, 0.0, 0.0),
    )
    return ScoredGroup(result, dataset="sums", scores=np.array([1, 0], dtype=np.float32))


class Class:
    """`TeacherScoring` with its thread, and what came out of it."""

    def __init__(self, *teachers: PlayedTeacher, timeout_s: float = TIMEOUT_S) -> None:
        self.threads = WorkThreads("the class")
        self.taught: queue.SimpleQueue[ScoredGroup] = queue.SimpleQueue()
        actors: Any = teachers
        self.scoring = TeacherScoring(actors, self.threads, self.taught.put, timeout_s=timeout_s)
        self.threads.start(self.scoring.teaching_thread)

    def failure(self) -> str:
        """What ended the thread."""
        with pytest.raises(RuntimeError) as failed:
            self.threads.wait_for(lambda: False, TIMEOUT_S)
        return str(failed.value)


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(teacher_scoring, "ray", PlayedRay())
    begun: list[Class] = []

    def make(*teachers: PlayedTeacher, **options: float) -> Class:
        begun.append(Class(*teachers, **options))
        return begun[-1]

    yield make
    for one in begun:
        one.threads.stop()
        one.threads.join(5.0)


def test_every_sample_gets_what_the_teacher_says_of_it(begin: Any) -> None:
    teachers = PlayedTeacher(), PlayedTeacher()
    school = begin(*teachers)
    for number in range(6):
        school.scoring.submit(group(number))
    taught = drained(school.taught, 6, TIMEOUT_S)
    assert {one.result.prompt_id for one in taught} == {f"train-{number}" for number in range(6)}
    for one in taught:
        for sample in one.samples:
            expected = said_of(sample.response_ids)
            np.testing.assert_array_equal(sample.teacher.top_ids, expected.top_ids)
            np.testing.assert_array_equal(sample.teacher.logprobs, expected.logprobs)
    assert school.scoring.num_asked == 0


def test_the_engine_with_least_to_do_is_asked(begin: Any) -> None:
    slow, fast = PlayedTeacher(answers=False), PlayedTeacher()
    school = begin(slow, fast)
    for number in range(5):
        school.scoring.submit(group(number))
        deadline = time.monotonic() + TIMEOUT_S
        while school.scoring.num_asked > 1 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert (len(slow.calls), len(fast.calls)) == (1, 4)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_answers_nothing_ends_the_run_and_is_named(begin: Any) -> None:
    school = begin(PlayedTeacher(answers=False), PlayedTeacher(), timeout_s=0.3)
    school.scoring.submit(group(0))
    school.scoring.submit(group(1))
    assert "engine 0 of the teacher has 1 group and answered none for" in school.failure()


def test_an_engine_that_answers_now_and_then_may_take_its_time(begin: Any) -> None:
    slow = PlayedTeacher(answers=False)
    school = begin(slow, timeout_s=0.6)
    for number in range(4):
        school.scoring.submit(group(number))
    for call in slow.calls:  # all four together take longer than the limit
        time.sleep(0.3)
        call.is_done = True
    drained(school.taught, 4, TIMEOUT_S)
    school.threads.raise_error()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_dies_for_good_ends_the_run(begin: Any) -> None:
    teacher = PlayedTeacher(answers=False)
    school = begin(teacher)
    school.scoring.submit(group(0))
    teacher.calls[0].error = ray.exceptions.ActorDiedError()
    teacher.calls[0].is_done = True
    assert "engine 0 of the teacher failed: " in school.failure()


def test_an_engine_that_was_started_again_is_told(begin: Any, caplog: pytest.LogCaptureFixture) -> None:
    teacher = PlayedTeacher()
    school = begin(teacher)
    school.scoring.submit(group(0))
    drained(school.taught, 1, TIMEOUT_S)
    assert not caplog.records
    teacher.process_id = 2
    with caplog.at_level(logging.WARNING):
        school.scoring.submit(group(1))
        drained(school.taught, 1, TIMEOUT_S)
    assert caplog.messages == ["engine 0 of the teacher died and was started again"]
