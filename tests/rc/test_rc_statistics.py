"""Counts by cycle, throughput over a window, summary and table."""

import numpy as np
import pytest

from open_instruct.rc.statistics import RolloutProgress, RolloutStatistics, Throughput, format_rollout_table
from open_instruct.workflows.rc.types import (
    CONTROL,
    ONE_LONG_TURN,
    REASONING,
    SUMMARIZATION,
    RolloutResult,
    TrainingText,
)


def turn(turn_type: str, number: int, reward: float | None, num_tokens: int, *, finished: bool = True) -> TrainingText:
    ids = np.zeros(num_tokens, np.int32)
    metadata = {"turn_type": turn_type, "turn_number": number}
    return TrainingText("x", ids, ids, ids.astype(np.float32), reward, finished, metadata=metadata)


def two_trajectories() -> RolloutStatistics:
    statistics = RolloutStatistics()
    for first, second in ((0.0, 1.0), (0.5, 1.0)):
        statistics.add(
            [
                turn(REASONING, 1, first, 10, finished=False),
                turn(SUMMARIZATION, 1, None, 4),
                turn(REASONING, 2, second, 20),
                turn(SUMMARIZATION, 2, None, 6, finished=False),
            ]
        )
    return statistics


def test_by_cycle() -> None:
    cycles = two_trajectories().summary(wall_seconds=10, tokens_of_this_run=80)["cycles"]
    assert cycles["1"] == {
        "accuracy": 0.0,
        "mean_reward": 0.25,
        "tokens_per_reasoning": 10,
        "tokens_per_summary": 4,
        "turns_at_limit": 2,
        "empty_summaries": 0,
    }
    assert (cycles["2"]["accuracy"], cycles["2"]["turns_at_limit"]) == (1.0, 2)


def test_what_a_policy_gives_for_a_summary_counts_in_no_accuracy() -> None:
    statistics = RolloutStatistics()
    statistics.add([turn(REASONING, 1, 1.0, 10), turn(SUMMARIZATION, 1, 0.25, 4)])
    cycle = statistics.summary(wall_seconds=10, tokens_of_this_run=14)["cycles"]["1"]
    assert (cycle["accuracy"], cycle["mean_reward"]) == (1.0, 1.0)
    assert statistics.last_accuracy() == (1, 1.0)


def test_a_control_counts_as_sampled_and_in_no_cycle() -> None:
    statistics = two_trajectories()
    before = statistics.summary(wall_seconds=10, tokens_of_this_run=80)
    long_turn = turn(REASONING, 1, 1.0, 100)
    long_turn.metadata[CONTROL] = ONE_LONG_TURN
    statistics.add([long_turn])
    after = statistics.summary(wall_seconds=10, tokens_of_this_run=80)
    counted = {"one_long_turns": 1, "turns": before["turns"] + 1, "tokens": before["tokens"] + 100}
    assert after == before | counted
    assert statistics.num_done == 3


def test_events_count_for_kept_and_dropped_ones() -> None:
    statistics = two_trajectories()
    statistics.add_events(RolloutResult("a", [], num_retries=2, num_requeues=1))
    statistics.add_events(RolloutResult("b", [], dropped="rejected", cause="x", num_retries=1))
    summary = statistics.summary(wall_seconds=10, tokens_of_this_run=80)
    assert (summary["retries"], summary["requeues"], summary["dropped"]) == (3, 1, {"rejected": 1})
    assert (summary["trajectories"], summary["turns"], summary["tokens"]) == (2, 8, 80)
    assert summary["tokens_per_second"] == 8.0
    assert statistics.num_done == 3
    table = format_rollout_table(summary)
    assert "100.0%" in table
    assert "1 dropped (rejected 1)" in table


def test_a_run_with_nothing_left_to_do_has_no_speed() -> None:
    summary = two_trajectories().summary(wall_seconds=0.0, tokens_of_this_run=0)
    assert summary["tokens_per_second"] is None
    assert "80 tokens in 0s (– tok/s)" in format_rollout_table(summary)


def test_throughput_is_that_of_the_window() -> None:
    now = [0.0]
    throughput = Throughput(2, clock=lambda: now[0])
    assert throughput.rates()["tokens_per_second"] == 0
    for at, tokens in ((10.0, 100), (11.0, 200), (13.0, 300)):
        now[0] = at
        throughput.add(6, tokens)
    assert throughput.rates() == pytest.approx(
        {"trajectories_per_second": 2 / 3, "turns_per_second": 4.0, "tokens_per_second": 500 / 3}
    )


def test_the_live_line() -> None:
    rates = {"trajectories_per_second": 1.0, "turns_per_second": 6.0, "tokens_per_second": 1234.0}
    text = str(RolloutProgress(3, rates, num_dropped=1, num_retries=2, last_accuracy=(2, 0.5)))
    assert text == "1,234 tok/s  6.0 turns/s  cycle 2 50% right  2 retries  1 dropped"
