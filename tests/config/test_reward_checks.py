"""What may be wrong with the options of rewards."""

from typing import Any

import pytest
from conftest import make_args

from open_instruct.config.reward_checks import something_is_rewarded
from open_instruct.config.sampling_checks import evaluated_responses_differ
from open_instruct.workflows.base import WORKFLOWS
from open_instruct.workflows.single_turn import SingleTurn

NO_SCORES = {"apply_verifiable_reward": False}
AGENT = {"rollout_workflow": "agent_program", "agent_command": "python agent.py"}


@WORKFLOWS.register("game_with_prizes")
class GameWithPrizes(SingleTurn):
    """As a user may write it: it rewards its rollouts itself, and the game draws cards."""

    greedy_responses_are_alike = False

    @classmethod
    def may_reward(cls, args: Any) -> bool:
        return True


def mistakes_of(**options: Any) -> list[str]:
    return list(something_is_rewarded(make_args(**NO_SCORES | options)))


@pytest.mark.parametrize(
    "options",
    [
        {"apply_r1_style_format_reward": True},
        {"overlong_buffer_len": 16},
        AGENT | {"agent_prints_reward": True},
        {"rollout_workflow": "conversation"},  # its rows name environments
        {"rollout_workflow": "game_with_prizes"},
        {"apply_verifiable_reward": True},
    ],
)
def test_verifiers_need_not_be_rewarded_where_something_else_is(options: dict[str, Any]) -> None:
    assert mistakes_of(**options) == []


@pytest.mark.parametrize(
    ("options", "cure"),
    [
        ({}, "Set reward_funcs or apply_r1_style_format_reward, or leave this out."),
        ({"rollout_workflow": "rc"}, "Set reward_funcs or apply_r1_style_format_reward, or leave this out."),
        (AGENT, "Set reward_funcs or apply_r1_style_format_reward or agent_prints_reward, or leave this out."),
        ({"apply_r1_style_format_reward": True, "r1_style_format_reward": 0.0}, "Set"),
    ],
)
def test_run_in_which_nothing_is_rewarded_is_refused(options: dict[str, Any], cure: str) -> None:
    [mistake] = mistakes_of(**options)
    assert mistake.startswith("--apply_verifiable_reward False: then no response has a reward.")
    assert cure in mistake


@pytest.mark.parametrize(("workflow", "is_refused"), [("single_turn", True), ("rc", True), ("game_with_prizes", False)])
def test_greedy_pass_at_k_is_refused_where_the_workflow_says_that_responses_are_alike(
    workflow: str, is_refused: bool
) -> None:
    args = make_args(rollout_workflow=workflow, eval_temperature=0.0, eval_pass_at_k=4)
    assert bool(list(evaluated_responses_differ(args))) is is_refused
