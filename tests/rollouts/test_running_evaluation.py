"""One evaluation in flight: every prompt is issued, counted once, and given up after as many failures as allowed."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import make_args
from group_fakes import make_result
from hypothesis import given, settings
from hypothesis import strategies as st

from open_instruct.data.prompt_dataset import PromptDatasetBuilder
from open_instruct.data.row_places import PlaceInSource
from open_instruct.data_types import EVAL, GenerationResult, Moment, TokenStatistics
from open_instruct.rollouts.evaluation_measures import under_eval
from open_instruct.rollouts.running_evaluation import Evaluation, Evaluations
from open_instruct.scored_groups import ScoredGroup, UnscoredGroup
from open_instruct.system.work_threads import WorkThreads
from open_instruct.workflows.single_turn import SingleTurn

TIMEOUT = "generation_timeout: over 1 s"


def result(row: int, *, version: int = 7, sampled_by: int = 7, error: str = "") -> GenerationResult:
    return make_result(
        responses=[] if error else [np.arange(3, dtype=np.int32)],
        logprobs=[] if error else [np.zeros(3, dtype=np.float32)],
        finish_reasons=[] if error else ["stop"],
        version_spans=[] if error else [[(sampled_by, 3)]],
        index=row,
        prompt_id=f"eval-{version}-{row}",
        issue_version=version,
        engine_id=0,
        token_statistics=TokenStatistics(3, 3, 0.5, 0.0),
        marker=EVAL,
        error=error,
    )


def group(row: int, score: float = 1.0, **options: str) -> ScoredGroup:
    return ScoredGroup(result(row, **options), "sums", np.array([score], dtype=np.float32))  # type: ignore[arg-type]


def issue_all(evaluation: Evaluation) -> list[int]:
    rows = []
    while (row := evaluation.next_row()) is not None:
        rows.append(row)
    return rows


def evaluations_of_one_row(threads: WorkThreads, **options: Any) -> Evaluations:
    builder = PromptDatasetBuilder()
    place = PlaceInSource("line", 1)
    builder.add(
        token_ids=[1], ground_truth="2", dataset="sums", raw_query="1 + 1", source="held_out.jsonl", place=place
    )
    args = make_args(dataset_mixer_eval_list=["held_out.jsonl", "1.0"], **options)
    return Evaluations(args, threads, SingleTurn(None), builder.build())


def come_back(evaluation: Evaluation, row: int) -> None:
    if evaluation.begin_scoring(result(row)):
        evaluation.add(group(row))


def test_evaluation_that_ends_as_another_begins_does_not_end_that_one(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = WorkThreads("a test")
    evaluations = evaluations_of_one_row(threads)
    evaluations.start(7)
    assert evaluations.current is not None
    evaluations.current.leave_out(0, UnscoredGroup("not scored: timeout", 1, 0))

    def another_begins(*_: object) -> bool:
        evaluations.go_on_with(8)
        return True

    monkeypatch.setattr(threads, "wait_for", another_begins)
    assert evaluations.collect(1.0)["eval/model_step_min"] == 7
    assert evaluations.current is not None
    assert evaluations.current.version == 8


@pytest.mark.parametrize("end", ["add", "leave_out", "fail"])
def test_time_of_an_evaluation_ends_with_its_last_result(end: str) -> None:
    """The driver asks for it once the next step is trained."""
    evaluations = evaluations_of_one_row(WorkThreads("a test"), max_generation_attempts=1)
    evaluations.start(7)
    evaluation = evaluations.current
    assert evaluation is not None
    issue_all(evaluation)
    evaluation.began = Moment(_clock=time.monotonic() - 5)
    if end == "add":
        come_back(evaluation, 0)
    elif end == "leave_out":
        evaluation.leave_out(0, UnscoredGroup("not scored: timeout", 1, 0))
    else:
        assert evaluation.fail(group(0, 0.0, error=TIMEOUT)) is False
    evaluation.began = Moment(_clock=time.monotonic() - 500)
    assert 5 <= evaluations.collect(1.0)["time/eval"] < 400


def test_metrics_of_an_evaluation_never_have_the_name_of_training() -> None:
    assert under_eval({"conversations/turns": 2.0, "eval/rc/accuracy": 0.5}) == {
        "eval/conversations/turns": 2.0,
        "eval/rc/accuracy": 0.5,
    }


def test_evaluation_is_complete_when_every_row_came_back_and_gives_them_in_order() -> None:
    evaluation = Evaluation(7, range(3), max_attempts=3)
    assert issue_all(evaluation) == [0, 1, 2]
    for row in (2, 0, 0):
        come_back(evaluation, row)
    assert not evaluation.is_complete
    assert (
        "1 prompt is not back from the engines (eval-7-1), 0 prompts are being scored" in evaluation.describe_missing()
    )
    come_back(evaluation, 1)
    assert evaluation.is_complete
    assert [one.result.index for one in evaluation.outcomes().groups] == [0, 1, 2]
    assert evaluation.num_given_up == 0


def test_evaluation_gives_a_prompt_up_after_so_many_failures() -> None:
    evaluation = Evaluation(7, range(2), max_attempts=3)
    issue_all(evaluation)
    come_back(evaluation, 0)
    for _ in range(2):
        assert evaluation.fail(group(1, 0.0, error=TIMEOUT)) is True
        assert issue_all(evaluation) == [1]
    assert evaluation.fail(group(1, 0.0, error=TIMEOUT)) is False
    assert issue_all(evaluation) == []
    assert evaluation.is_complete
    assert [float(one.scores[0]) for one in evaluation.outcomes().groups] == [1.0, 0.0]
    assert evaluation.why_given_up().startswith(
        "evaluation of version 7: 1 of 2 prompts given up after 3 attempts, counted as wrong (generation_timeout: over 1 s: 1)"
    )


def test_evaluation_counts_no_failure_of_a_prompt_that_came_back() -> None:
    evaluation = Evaluation(7, range(1), max_attempts=1)
    issue_all(evaluation)
    assert evaluation.begin_scoring(result(0))
    assert evaluation.fail(group(0, 0.0, error=TIMEOUT)) is None
    evaluation.add(group(0))
    assert evaluation.fail(group(0, 0.0, error=TIMEOUT)) is None
    assert (evaluation.is_complete, evaluation.num_given_up) == (True, 0)


def test_evaluation_issues_again_what_was_lost_and_nothing_else() -> None:
    evaluation = Evaluation(7, range(5), max_attempts=1)
    for _ in range(4):
        evaluation.next_row()
    come_back(evaluation, 0)
    evaluation.begin_scoring(result(1))
    assert evaluation.recover(present={"eval-7-2"}) == 1
    assert issue_all(evaluation) == [4, 3]
    assert evaluation.recover(present={"eval-7-2", "eval-7-3", "eval-7-4"}) == 0


def test_evaluation_does_not_issue_what_came_after_it_was_given_up_for_lost() -> None:
    evaluation = Evaluation(7, range(2), max_attempts=1)
    issue_all(evaluation)
    evaluation.recover(present=())
    come_back(evaluation, 0)
    assert issue_all(evaluation) == [1]


def test_evaluation_refuses_tokens_of_another_version_and_ignores_other_evaluations() -> None:
    evaluation = Evaluation(7, range(1), max_attempts=1)
    issue_all(evaluation)
    with pytest.raises(AssertionError, match=r"eval-7-0 was to measure version 7 but was sampled by \[6\]"):
        evaluation.begin_scoring(result(0, sampled_by=6))
    assert not evaluation.measures(result(0, version=6))
    assert evaluation.measures(result(0))


@settings(deadline=None)
@given(data=st.data(), num_rows=st.integers(1, 5), max_attempts=st.integers(1, 3))
def test_evaluation_ends_whatever_happens_in_whatever_order(
    data: st.DataObject, num_rows: int, max_attempts: int
) -> None:
    """Copies, losses and failures; each row is issued at most once more for each failure or loss."""
    evaluation = Evaluation(7, range(num_rows), max_attempts=max_attempts)
    issued: list[int] = []
    happenings: list[Callable[[int], object]] = [
        lambda row: come_back(evaluation, row),
        lambda row: evaluation.fail(group(row, 0.0, error=TIMEOUT)),
        lambda row: evaluation.recover(present=[f"eval-7-{other}" for other in range(num_rows) if other != row]),
    ]
    happened = data.draw(st.lists(st.tuples(st.sampled_from(happenings), st.integers(0, num_rows - 1))))
    for happening, row in happened:
        issued += issue_all(evaluation)
        happening(row)
    assert len(issued) <= num_rows + len(happened)
    issue_all(evaluation)
    for row in range(num_rows):
        come_back(evaluation, row)
    assert evaluation.is_complete
    assert issue_all(evaluation) == []
    scores = [float(one.scores[0]) for one in evaluation.outcomes().groups]
    assert scores.count(0.0) == evaluation.num_given_up
