"""Sums of all ranks become metrics; what is not known is left out, and steps without an update are told."""

import logging
from typing import Any

import pytest

from open_instruct.learners.step_sums import NonfiniteSteps, NonfiniteWatch, StepSums, merge_step_metrics

MISMATCH = {"count": 1.0, "sum": 0.0, "sum_of_squares": 0.0, "max": 0.0, "signed_sum": 0.0}


def report(*, sums: dict[str, float], num_tokens: int, seconds: float = 1.0, **values: Any) -> dict[str, Any]:
    step = StepSums(sums=sums, mismatches=[MISMATCH], num_tokens=num_tokens, seconds=seconds, lr=0.1, **values)
    return step.report(num_epochs=1, memory_in_use_bytes=1, peak_memory_bytes=2)


def test_metrics_are_means_over_the_tokens_of_all_ranks() -> None:
    merged = merge_step_metrics(
        [report(sums={"a": 10.0}, num_tokens=10), report(sums={"a": 2.0}, num_tokens=30, seconds=3.0)]
    )
    assert merged["a"] == pytest.approx(12 / 40)
    assert merged["time/learner_compute"] == 3.0


def test_metrics_of_no_token_and_of_no_update_are_left_out() -> None:
    merged = merge_step_metrics([report(sums={"a": 0.0}, num_tokens=0, num_empty=1)] * 2)
    assert "a" not in merged
    assert "debug/vllm_vs_local_logprob_diff_mean" not in merged
    assert "optim/grad_norm" not in merged
    assert (merged["optim/skipped_steps"], merged["optim/nonfinite_steps"]) == (1, 0)


def test_metrics_count_updates_that_were_left_out() -> None:
    step = StepSums(num_tokens=5, num_empty=1)
    for norm in (1.0, None, 3.0):
        step.note_update(norm)
    merged = merge_step_metrics([step.report(num_epochs=1, memory_in_use_bytes=1, peak_memory_bytes=2)])
    assert merged["optim/grad_norm"] == 2.0
    assert (merged["optim/skipped_steps"], merged["optim/nonfinite_steps"]) == (2, 1)


def metrics_of(num_nonfinite: int) -> dict[str, float]:
    return {"optim/nonfinite_steps": num_nonfinite, "loss/policy_avg": float("nan") if num_nonfinite else 0.5}


def test_nonfinite_steps_in_a_row_end_the_run(caplog: pytest.LogCaptureFixture) -> None:
    watch = NonfiniteWatch(3)
    for training_step, num_nonfinite in enumerate([1, 2, 0, 1, 1], start=1):
        watch.check(training_step, metrics_of(num_nonfinite))
    with pytest.raises(NonfiniteSteps, match=r"in 3 training steps in a row, .* step 6 \(--max_nonfinite_steps\)"):
        watch.check(6, metrics_of(1))


def test_a_nonfinite_step_is_told_with_its_number(caplog: pytest.LogCaptureFixture) -> None:
    watch = NonfiniteWatch(3)
    with caplog.at_level(logging.ERROR):
        watch.check(41, metrics_of(0))
        assert not caplog.records
        watch.check(42, metrics_of(1))
    assert "step 42: the gradient of 1 optimizer steps was not finite" in caplog.text
    assert "Metrics that are not finite: loss/policy_avg" in caplog.text
