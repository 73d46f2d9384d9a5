"""What the log says of a batch that is not ready."""

import pytest
from driver_fakes import batch_progress


@pytest.mark.parametrize(
    ("known", "text"),
    [
        ({}, "no group came back for this step yet; 0 prompts are not back from the engines"),
        (
            {"num_back": 1, "num_usable": 1, "first_waited_for": ["train-3 (version 0)"]},
            "1 group came back for this step, 1 can be trained on; 1 prompt is not back from the engines; the first is "
            "train-3 (version 0)",
        ),
        (
            {"num_back": 20, "num_usable": 11, "num_masked": 2, "mean_score": 0.5},
            "20 groups came back for this step, 11 can be trained on (scored alike: 7, cut off and masked: 2); 0 prompts are not "
            "back from the engines",
        ),
        (
            {"evaluation": "evaluation of version 0: 12 of 64 done"},
            "no group came back for this step yet; evaluation of version 0: 12 of 64 done; 0 prompts are not back from the "
            "engines",
        ),
    ],
)
def test_the_brief_line_begins_with_what_came_back(known: dict, text: str) -> None:
    assert batch_progress(**known).brief == text


def test_the_brief_line_is_bounded_and_the_error_has_all_details() -> None:
    progress = batch_progress(
        num_back=1_000_000,
        num_usable=1,
        num_masked=400_000,
        mean_score=0.123456,
        num_waited_for=100,
        first_waited_for=[f"train-{number} (version 1000)" for number in range(1_000_000, 1_000_008)],
        num_being_scored=100_000,
        of_teacher=" (5 of them by the teacher)",
        pauses=["an engine is loaded again, and that takes its time", "asked for"],
        evaluation="evaluation of version 1000: 12,345 of 64,000 done",
    )
    assert len(f"batch 100000 is not ready: {progress.brief}") <= 200
    assert progress.brief.startswith("1,000,000 groups came back for this step, 1 can be trained on")
    details = str(progress)
    for part in ("train-1000007 (version 1000)", "(5 of them by the teacher)", "paused: an engine", "12,345 of 64,000"):
        assert part in details


def test_a_wait_needs_a_warning_where_something_may_be_wrong() -> None:
    before = batch_progress(num_results=5)
    assert not before.needs_a_warning(None)
    assert not batch_progress(num_results=6).needs_a_warning(before)
    assert batch_progress(num_results=5).needs_a_warning(before)
    assert batch_progress(num_results=6, pauses=("asked for",)).needs_a_warning(before)
    assert batch_progress(num_back=8, num_results=6, mean_score=0.0).needs_a_warning(before)
    assert not batch_progress(num_back=8, num_usable=1, num_results=6).needs_a_warning(before)
