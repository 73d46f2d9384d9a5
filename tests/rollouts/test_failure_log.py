"""What is counted and told of groups that engines gave up."""

import logging
from dataclasses import replace

import numpy as np
import pytest

from open_instruct.data_types import EVAL, GenerationResult, Moment, PromptRequest, SamplingConfig
from open_instruct.rollouts.failure_log import LOG_INTERVAL_S, NOT_SCORED, GenerationFailures, NothingAnswered

REQUEST = PromptRequest(np.arange(3, dtype=np.int32), SamplingConfig(), 0, "train-0", 0)
TIMEOUT = GenerationResult.given_up(REQUEST, 2, "generation_timeout: over 30 s", Moment())
TURN_TIMEOUT = GenerationResult.given_up(REQUEST, 2, "EngineError: generation_timeout: over 30 s", Moment())
TOO_LONG = GenerationResult.given_up(REQUEST, 1, "PromptTooLong: 600 tokens of 512", Moment())


def test_failures_are_counted_by_what_they_do_to_training() -> None:
    failures = GenerationFailures(9)
    failures.record(TIMEOUT, is_tried_again=True)
    failures.record(TURN_TIMEOUT, is_tried_again=False)
    failures.record(TIMEOUT, is_tried_again=None)
    failures.record(TOO_LONG, is_tried_again=False)
    failures.record(replace(TIMEOUT, marker=EVAL), is_tried_again=False)
    failures.record(replace(TIMEOUT, error=f"{NOT_SCORED}: timeout"), is_tried_again=True)
    assert failures.counts() == {
        "generation_errors": 5,
        "generation_timeouts": 3,
        "dropped_timeouts": 1,
        "unscored_groups": 1,
    }


def test_causes_are_told_once_in_a_while_and_counted_meanwhile(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    failures = GenerationFailures(9, clock=lambda: now)
    caplog.set_level(logging.WARNING)
    for _ in range(3):
        failures.record(TIMEOUT, is_tried_again=True)
    failures.record(TOO_LONG, is_tried_again=True)
    now += LOG_INTERVAL_S
    failures.record(replace(TURN_TIMEOUT, prompt_id="eval-3-9", marker=EVAL), is_tried_again=False)
    assert [record.getMessage() for record in caplog.records] == [
        "1 group was given up (generation_timeout: 1). The last is train-0 on engine 2: generation_timeout: over 30 s. It is "
        "sampled again with another seed.",
        "4 groups were given up (generation_timeout: 3, PromptTooLong: 1). The last is eval-3-9 on engine 2: EngineError: "
        "generation_timeout: over 30 s. It is given up.",
    ]


def test_a_run_of_which_no_prompt_is_answered_any_more_ends() -> None:
    """Prompts that are tried again, those of evaluations, and groups that were not scored do not count."""
    failures = GenerationFailures(2)
    for _ in range(2):
        for _ in range(2):
            failures.record(TOO_LONG, is_tried_again=False)
        failures.record(TOO_LONG, is_tried_again=True)
        failures.record(replace(TOO_LONG, marker=EVAL), is_tried_again=False)
        failures.record(replace(TOO_LONG, error=f"{NOT_SCORED}: timeout"), is_tried_again=False)
        failures.answered()
    for _ in range(2):
        failures.record(TOO_LONG, is_tried_again=False)
    with pytest.raises(NothingAnswered, match=r"the last 3 prompts were dropped .* train-0: PromptTooLong: 600 tokens"):
        failures.record(TOO_LONG, is_tried_again=False)
