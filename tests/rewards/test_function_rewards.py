"""How rewards of functions join the scores of verifiers: sums, what is not scored, metrics, saved states."""

from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import make_args
from group_fakes import make_result

from open_instruct.config.verifier_options import RewardFunctionSpec
from open_instruct.data_types import GenerationResult, TokenStatistics
from open_instruct.rewards.pool import FunctionResult
from open_instruct.rollouts.batch_metrics import response_metrics, scoring_metrics
from open_instruct.rollouts.evaluation_metrics import evaluation_metrics
from open_instruct.rollouts.function_scoring import NO_REWARD
from open_instruct.rollouts.result_scoring import ResultScoring
from open_instruct.rollouts.rollout_state import FinishedGroup, read_state, write_state
from open_instruct.rollouts.running_evaluation import Evaluation
from open_instruct.scored_groups import FunctionRewards, ScoredGroup, UnscoredGroup, said_by_functions, take
from open_instruct.verifiers.scoring_processes import Scored
from open_instruct.workflows.single_turn import SingleTurn

SPECS = (RewardFunctionSpec("a.py:right"), RewardFunctionSpec("a.py:short", 0.5))
ONLY_LOGGED = (RewardFunctionSpec("a.py:right"), RewardFunctionSpec("a.py:length", 0.0))
GIVEN = FunctionResult([1.0] * 3)
FAILED = FunctionResult([None] * 3, "error: short: KeyError: 'x'")


def scored(
    dataset: str, functions: list[FunctionResult], *verified: list[Scored], is_eval: bool = False, specs: Any = SPECS
) -> Any:
    """The group of three responses."""
    result, scoring = result_and_scoring(dataset, is_eval=is_eval, specs=specs)
    return scoring.scored_group(result, list(verified), 0.0, functions=functions)


def result_and_scoring(
    dataset: str, *, is_eval: bool = False, specs: Any = SPECS
) -> tuple[GenerationResult, ResultScoring]:
    result = make_result(
        responses=[np.array([1], np.int32)] * 3,
        logprobs=[np.zeros(1, np.float32)] * 3,
        finish_reasons=["stop"] * 3,
        version_spans=[[(1, 1)]] * 3,
        index=0,
        prompt_id="train-0",
        issue_version=1,
        engine_id=0,
        token_statistics=TokenStatistics(1, 3, 1.0, 0.0),
        marker="EVAL" if is_eval else "TRAIN",
    )
    row = SimpleNamespace(dataset_of=lambda _: dataset)
    functions: Any = SimpleNamespace(specs=specs)
    evaluation_set = SimpleNamespace(sampling=SimpleNamespace(n=3))
    requests: Any = SimpleNamespace(train=row, held_out=row, evaluation_set=lambda _: evaluation_set)
    tokenizer: Any = SimpleNamespace(all_special_tokens=[])
    verifiers: Any = SimpleNamespace()
    return result, ResultScoring(requests, SingleTurn(None), tokenizer, verifiers, functions=functions)


def test_rewards_of_functions_are_summed_by_weight_and_none_adds_nothing() -> None:
    group = scored("passthrough", [FunctionResult([2.0, -1.0, None]), FunctionResult([10.0, None, 4.0])])
    assert group.rewards(verification_reward=10.0).tolist() == [7.0, -1.0, 2.0]
    assert np.isnan(group.functions[0].rewards[2])
    assert group.by_verifier == ()
    assert take(group, [2]).functions[1].rewards.tolist() == [4.0]


def test_a_response_that_no_function_scores_is_left_out() -> None:
    group = scored("passthrough", [FunctionResult([2.0, None, 1.0]), FunctionResult([None] * 3)])
    assert group.rewards(10.0).tolist() == [2.0, 1.0]
    assert group.num_not_scored == 1
    nothing = scored("passthrough", [FunctionResult([None] * 3)] * 2)
    assert isinstance(nothing, UnscoredGroup)
    assert NO_REWARD in nothing.cause


def test_a_function_that_is_only_logged_scores_nothing() -> None:
    results = [FunctionResult([2.0, None, 1.0]), FunctionResult([5.0, 6.0, 7.0])]
    group = scored("passthrough", results, specs=ONLY_LOGGED)
    assert group.rewards(10.0).tolist() == [2.0, 1.0]
    assert scored("gsm8k", results, [Scored(1.0)] * 3, specs=ONLY_LOGGED).rewards(10.0).tolist() == [12.0, 10.0, 11.0]


def test_a_prompt_that_an_engine_gives_up_is_not_known_where_only_functions_score() -> None:
    result, scoring = result_and_scoring("passthrough", is_eval=True)
    group = scoring.all_wrong(replace(result, samples=[]))
    assert isinstance(group, UnscoredGroup)  # 0 may be more than any answer gets
    assert group.num_not_scored == 3
    evaluation = Evaluation(1, [0], max_attempts=1)
    assert evaluation.next_row() == 0
    evaluation.fail(group)
    assert evaluation.is_complete
    assert evaluation.num_given_up == 1
    assert "1 of 1 prompts given up after 1 attempts, left out" in evaluation.why_given_up()
    assert evaluation.outcomes().left_out == [group]
    verified = result_and_scoring("gsm8k", is_eval=True)[1].all_wrong(replace(result, samples=[]))
    assert isinstance(verified, ScoredGroup)
    assert verified.rewards(10.0).tolist() == [0.0] * 3
    right = scored("gsm8k", [GIVEN, GIVEN], [Scored(1.0)] * 3, is_eval=True)
    metrics = evaluation_metrics([right, verified], verification_reward=10.0)
    assert (metrics["eval/scores"], metrics["eval/pass_at_1"], metrics["eval/num_given_up"]) == (5.75, 0.5, 1)


def test_a_function_that_fails_leaves_its_group_unscored() -> None:
    group = scored("passthrough", [FunctionResult([1.0] * 3), FAILED])
    assert isinstance(group, UnscoredGroup)
    assert FAILED.failure in group.cause
    assert group.num_failures == 3
    counts = scoring_metrics([group])
    assert (counts["rewards/short/failures"], counts["rewards/right/failures"]) == (3.0, 0.0)


def test_functions_add_to_a_verifier_and_none_leaves_its_score() -> None:
    scores = [Scored(1.0), Scored(0.0), Scored(0.5)]
    group = scored("gsm8k", [FunctionResult([None] * 3), FunctionResult([-1.0, None, 2.0])], scores)
    assert group.rewards(verification_reward=10.0).tolist() == [9.5, 0.0, 6.0]
    assert group.outcomes.tolist() == [1.0, 0.0, 0.5]
    assert isinstance(scored("gsm8k", [FunctionResult([1.0] * 3), FAILED], scores), UnscoredGroup)


def test_each_response_counts_once_in_the_share_that_is_not_scored() -> None:
    result, scoring = result_and_scoring("gsm8k")
    with_verifier = scoring.together(result, [[Scored(1.0), Scored(None, "timeout"), Scored(0.0)]], [GIVEN, FAILED])
    assert [score.failure for score in with_verifier] == [FAILED.failure, "timeout", FAILED.failure]
    result, scoring = result_and_scoring("passthrough")
    alone = scoring.together(result, [], [FunctionResult([1.0, None, 2.0]), FunctionResult([None] * 3)])
    assert [(score.score, score.failure) for score in alone] == [(0.0, None), (None, NO_REWARD), (0.0, None)]


def test_metrics_are_by_function_and_say_nothing_of_verifiers_that_do_not_score() -> None:
    group = scored(
        "passthrough",
        [FunctionResult([2.0, 4.0, None], seconds=0.5, metrics={"length": 3.0}), FunctionResult([1.0] * 3)],
    )
    metrics = response_metrics([group], verification_reward=10.0)
    assert metrics["rewards/right/mean"] == 3.0
    assert metrics["rewards/right/std"] == pytest.approx(2**0.5)
    assert (metrics["rewards/right/time"], metrics["rewards/right/logged/length"]) == (0.5, 3.0)
    assert metrics["scores"] == pytest.approx((2.5 + 4.5 + 0.5) / 3)
    assert not [name for name in metrics if name.startswith("objective/")]
    assert scoring_metrics([group])["rewards/right/not_scored"] == 1.0


def test_an_evaluation_by_functions_alone_has_a_reward_and_no_accuracy() -> None:
    group = scored("passthrough", [FunctionResult([2.0, 1.0, 0.0])] * 2, is_eval=True)
    metrics = evaluation_metrics([group], verification_reward=10.0)
    assert metrics["eval/scores"] == 1.5
    assert metrics["eval/rewards/right/mean"] == 1.0
    assert "eval/pass_at_1" not in metrics


def test_a_saved_state_keeps_the_rewards_of_functions(tmp_path: Path) -> None:
    result = FunctionResult([2.0, None, 1.0], seconds=0.1, metrics={"m": 1.0}, extra={"c": ["x", "y", "z"]})
    group: ScoredGroup = scored("passthrough", [result, FunctionResult([1.0] * 3)])
    assert said_by_functions(group, 1) == {"c": "y", "rewards": "right not scored, short 1"}
    write_state(tmp_path / "state.npz", {}, [FinishedGroup(group.result, group.scores, functions=group.functions)])
    _, [read] = read_state(tmp_path / "state.npz")
    first: FunctionRewards = read.functions[0]
    assert np.array_equal(first.rewards, group.functions[0].rewards, equal_nan=True)
    assert (first.name, first.weight, first.logged) == ("right", 1.0, {"m": 1.0})


def test_the_run_has_weights_of_one_where_none_are_given() -> None:
    functions = make_args(reward_funcs=["a.py:f", "b.c.g"]).reward_functions
    assert [(spec.name, spec.weight) for spec in functions] == [("f", 1.0), ("g", 1.0)]


def test_pending_scores_wait_for_functions_too() -> None:
    from open_instruct.rollouts.result_scoring import PendingScores

    future: Future[list[FunctionResult]] = Future()
    future.set_result([FAILED])
    assert PendingScores([], future).results() == ([], [FAILED])
