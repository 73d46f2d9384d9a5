"""What may be wrong with the options of rewards."""

from typing import Any

import pytest
from conftest import make_args

from open_instruct.config.reward_checks import something_is_rewarded

NO_SCORES = {"apply_verifiable_reward": False}
AGENT = {"rollout_workflow": "agent_program", "agent_command": "python agent.py"}


def mistakes_of(**options: Any) -> list[str]:
    return list(something_is_rewarded(make_args(**NO_SCORES | options)))


@pytest.mark.parametrize(
    "options",
    [
        {"apply_r1_style_format_reward": True},
        {"overlong_buffer_len": 16},
        AGENT | {"agent_prints_reward": True},
        {"rollout_workflow": "conversation"},  # its rows name environments
        {"rollout_workflow": "a_game_of_ones_own"},
        {"apply_verifiable_reward": True},
    ],
)
def test_verifiers_need_not_be_rewarded_where_something_else_is(options: dict[str, Any]) -> None:
    assert mistakes_of(**options) == []


@pytest.mark.parametrize(
    ("options", "cure"),
    [
        ({}, "Set apply_r1_style_format_reward, or leave this out."),
        ({"rollout_workflow": "rc"}, "Set apply_r1_style_format_reward, or leave this out."),
        (AGENT, "Set apply_r1_style_format_reward or agent_prints_reward, or leave this out."),
        ({"apply_r1_style_format_reward": True, "r1_style_format_reward": 0.0}, "Set"),
    ],
)
def test_run_in_which_nothing_is_rewarded_is_refused(options: dict[str, Any], cure: str) -> None:
    [mistake] = mistakes_of(**options)
    assert mistake.startswith("--apply_verifiable_reward False: then no response has a reward.")
    assert cure in mistake
