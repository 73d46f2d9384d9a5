"""What the conversations of a step cost and came to."""

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from open_instruct.data_types import GenerationResult, TokenStatistics
from open_instruct.workflows.conversations.conversation import Account
from open_instruct.workflows.conversations.metrics import conversation_metrics


def result(*accounts: dict[str, Any]) -> GenerationResult:
    notes = [asdict(Account(**account)) for account in accounts]
    return GenerationResult([], 0, "train-0", 0, 0, TokenStatistics(0, 0, 0.0, 0.0), notes=notes)


def test_means_are_over_conversations_and_rates_over_calls() -> None:
    with_calls: dict[str, Any] = {
        "num_turns": 3,
        "num_steps": 2,
        "num_policy_tokens": 30,
        "num_tool_tokens": 8,
        "num_prompt_tokens": 90,
        "calls": {"search": [1.0, 1.0, 4.0], "python": [1.0, 0.0, 0.5]},
        "metrics": {"game": {"guesses": 5.0}},
        "turn_rewards": [0.0, 1.0],
        "ended_by": "answer",
    }
    without: dict[str, Any] = {"num_turns": 1, "num_policy_tokens": 10, "num_prompt_tokens": 10, "ended_by": "length"}
    metrics = conversation_metrics([result(with_calls), result(without, without)])
    expected = {
        "conversations/turns": 5 / 3,
        "conversations/steps": 2 / 3,
        "conversations/policy_tokens": 50 / 3,
        "conversations/tool_tokens": 8 / 3,
        "conversations/prompt_tokens_per_policy_token": 110 / 50,
        "conversations/ended_by_answer": 1 / 3,
        "conversations/ended_by_length": 2 / 3,
        "conversations/turn_reward": 0.5,
        "conversations/tool_s": 4.5 / 3,
        "conversations/tool_ms_per_policy_token": 90.0,
        "tools/search/failure_rate": 1.0,
        "tools/python/failure_rate": 0.0,
        "tools/aggregate/failure_rate": 0.5,
        "tools/aggregate/avg_calls_per_rollout": 2 / 3,
        "tools/aggregate/avg_runtime": 2.25,
        "tools/search/max_runtime": 4.0,
        "env/game/guesses": 5.0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert metrics["conversations/slowest_environment"] == "search"


def test_without_a_conversation_nothing_is_said() -> None:
    assert conversation_metrics([result()]) == {}
    assert conversation_metrics([]) == {}


def test_conversations_without_tools_have_no_metrics_of_tools() -> None:
    metrics = conversation_metrics([result({"num_turns": 1, "num_policy_tokens": 4, "ended_by": "answer"})])
    assert not [name for name in metrics if name.startswith(("tools/", "env/", "conversations/slowest"))]
    assert np.isfinite(list(metrics.values())).all()
