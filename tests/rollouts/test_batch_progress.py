"""What the log says of a step that is being put together."""

import dataclasses

import pytest
from driver_fakes import batch_progress
from group_fakes import make_group

from open_instruct.rollouts.batch_progress import LONG_S, LONGEST_BRIEF, Returned


def returned(*groups: list[float], reason: str = "stop") -> Returned:
    counts = Returned()
    for scores in groups:
        counts = counts.with_group(make_group(scores, reasons=[reason] * len(scores)))
    return counts


@pytest.mark.parametrize(
    ("known", "text"),
    [
        ({}, "none of 8 groups is back yet; 0 prompts are not back from the engines"),
        (
            {
                "num_back": 1,
                "num_usable": 1,
                "returned": returned([1.0, 0.0]),
                "first_waited_for": ["train-3 (version 0)"],
            },
            "1 of 8 groups is back, 1 can be trained on: mean score 0.5, all 0: 0, all 1: 0; 1 prompt is not back from the "
            "engines; the first is train-3 (version 0)",
        ),
        (
            {
                "num_back": 20,
                "num_usable": 11,
                "num_masked": 2,
                "returned": returned([0.0, 0.0], [1.0, 1.0], [0.0, 0.5]),
            },
            "20 of 20 groups are back, 2 of them cut off and masked, 11 can be trained on: mean score 0.417, all 0: 1, all 1: 1; "
            "0 prompts are not back from the engines",
        ),
        (
            {"evaluation": "evaluation of version 0: 12 of 64 done"},
            "none of 8 groups is back yet; evaluation of version 0: 12 of 64 done; 0 prompts are not back from the engines",
        ),
    ],
)
def test_the_brief_line_begins_with_what_came_back(known: dict, text: str) -> None:
    assert batch_progress(**known).brief == text


def test_responses_that_were_cut_off_or_not_scored_are_counted() -> None:
    counts = returned([0.0, 0.0, 0.0], reason="length")
    counts = counts.with_group(dataclasses.replace(make_group([1.0, 1.0]), num_not_scored=2))
    assert str(counts) == "mean score 0.4, all 0: 1, all 1: 1, cut off: 3 of 5 responses, not scored: 2"
    assert batch_progress(num_back=2, returned=counts).shortest == f"step 1: 2/8 groups, {counts}"
    assert batch_progress().shortest == "step 1: 0/8 groups"


def test_the_brief_line_is_bounded_and_the_error_has_all_details() -> None:
    progress = batch_progress(
        num_back=1_000_000,
        num_usable=1,
        num_masked=400_000,
        returned=Returned(500_000, 400_000, 8_000_000, 4_000_000, 1_000_000, 999_999.1),
        num_waited_for=100,
        first_waited_for=[f"train-{number} (version 1000)" for number in range(1_000_000, 1_000_008)],
        num_being_scored=100_000,
        of_teacher=" (5 of them by the teacher)",
        pauses=["an engine is loaded again, and that takes its time", "asked for"],
        evaluation="evaluation of version 1000: 12,345 of 64,000 done",
    )
    assert len(progress.brief) <= LONGEST_BRIEF
    assert progress.brief.startswith(
        "1,000,000 of 1,000,000 groups are back, 400,000 of them cut off and masked, 1 can be"
    )
    details = str(progress)
    for part in ("train-1000007 (version 1000)", "(5 of them by the teacher)", "paused: an engine", "12,345 of 64,000"):
        assert part in details


def test_a_wait_needs_a_warning_where_something_may_be_wrong() -> None:
    assert not batch_progress().needs_a_warning(LONG_S - 1)  # the first responses take their time
    assert batch_progress().needs_a_warning(LONG_S)
    assert batch_progress(pauses=("asked for",)).needs_a_warning(0)
    assert batch_progress(num_back=8).needs_a_warning(0)
    assert not batch_progress(num_back=7).needs_a_warning(0)  # the eighth may be one to train on
    assert not batch_progress(num_back=8, num_usable=1).needs_a_warning(0)
