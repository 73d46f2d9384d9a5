"""A conversation of several samples counts as one response: in the filter, in shaping, in masking and in metrics."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from conftest import make_args

from open_instruct.data_types import GenerationResult, Sample, TokenStatistics
from open_instruct.rollouts.batch_metrics import freshness_metrics, response_metrics, step_metrics
from open_instruct.rollouts.evaluation_metrics import evaluation_metrics
from open_instruct.rollouts.prompt_ledger import CONSUMED, MASKED, ZERO_STD, IssuedPrompt
from open_instruct.rollouts.result_scoring import _comparable, _num_responses
from open_instruct.rollouts.staleness import Assignment
from open_instruct.rollouts.step_assembly import CollationOptions, StepAssembly, pass_rate
from open_instruct.scored_groups import ScoredGroup, last_samples

NUM_TOKENS = 4


def sample(*, goes_on: bool = False, ended: str = "stop", version: int = 0, given: float | None = None) -> Sample:
    return Sample(
        prompt_ids=np.arange(1, 4, dtype=np.int32),
        response_ids=np.arange(5, 5 + NUM_TOKENS, dtype=np.int32),
        logprobs=-np.ones(NUM_TOKENS, np.float32),
        finish_reason=ended,
        version_spans=[(version, NUM_TOKENS)],
        goes_on=goes_on,
        is_judged=not goes_on,
        environment_reward=given,
    )


def conversation(num_samples: int, **last: Any) -> list[Sample]:
    """Samples of one conversation. Those that go on are `stop`, as workflows make them."""
    given = last.get("given")
    return [*[sample(goes_on=True, given=given) for _ in range(num_samples - 1)], sample(**last)]


def group(*conversations: list[Sample], scores: list[float], **options: Any) -> ScoredGroup:
    samples = [one for some in conversations for one in some]
    of_samples = np.repeat(np.array(scores, np.float32), [len(some) for some in conversations])
    statistics = TokenStatistics(3, NUM_TOKENS * len(samples), 1.0, 100.0)
    return ScoredGroup(GenerationResult(samples, 0, "train-0", 0, 0, statistics), "math", of_samples, **options)


def added(one: ScoredGroup, **options: Any) -> tuple[str, StepAssembly]:
    assembly = StepAssembly(1, make_args(num_unique_prompts_rollout=1, **options), CollationOptions(1, "packed", 0))
    return assembly.add(one, Assignment(IssuedPrompt("train-0", 0, 0), 0, is_straggler=False)), assembly


def test_advantage_over_the_step_sees_a_conversation_once() -> None:
    seen = []

    def over_step(advantages: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
        seen.append((advantages.tolist(), num_tokens.tolist()))
        return advantages - advantages.mean()

    _, assembly = added(
        group(conversation(3), conversation(1), conversation(2), conversation(1), scores=[1, 0, 0, 0]),
        advantage_normalization_type="reinforce_plus_plus",
    )
    assembly._over_step = over_step
    batch = assembly.next_partial_batch(last=True)
    assert seen == [([10.0, 0.0, 0.0, 0.0], [12, 4, 8, 4])]
    [(_, samples)] = assembly.trained
    assert [one.advantage for one in samples] == [7.5] * 3 + [-2.5] * 4
    metrics = assembly.metrics(now=1.0)
    assert (metrics["val/advantages_mean"], metrics["val/advantages_max"]) == (0.0, 7.5)
    assert batch is not None
    assert batch.rank_batches[0][0].num_global_sequences == assembly.num_sequences == 4


PENALTY = {"non_stop_penalty": True, "non_stop_penalty_value": -1.0}
LONG = {"overlong_buffer_len": 30, "overlong_penalty_factor": 15.0}


@pytest.mark.parametrize("num_samples", [1, 2, 3])
def test_filter_leaves_out_conversations_that_were_all_cut_off(num_samples: int) -> None:
    cut = conversation(num_samples, ended="length")
    fate, assembly = added(group(cut, cut, scores=[0, 0]), **PENALTY)
    assert (fate, assembly.has_gradient) == (ZERO_STD, False)


def test_filter_compares_what_environments_gave_at_the_end_of_conversations() -> None:
    first = [sample(goes_on=True, given=0.5), sample()]  # no reward without good outputs
    assert added(group(first, conversation(1), scores=[0, 0]))[0] == ZERO_STD


@pytest.mark.parametrize("options", [PENALTY, LONG])
def test_shaped_reward_of_a_conversation_is_that_of_its_last_sample(options: dict[str, Any]) -> None:
    last = sample(ended="length")
    last = replace(last, response_ids=np.arange(32, dtype=np.int32), logprobs=np.zeros(32, np.float32))
    last = replace(last, version_spans=[(0, 32)])
    fate, assembly = added(group([sample(goes_on=True), last], conversation(1), scores=[1, 1]), **options)
    assert fate == CONSUMED
    rewards = assembly.groups[0].rewards(10.0)
    assert rewards[0] == rewards[1] < rewards[2]


def test_length_of_a_conversation_is_that_of_all_its_samples() -> None:
    """Of 32 tokens the penalty begins at 2: eight samples of four tokens have all of it, one sample of four loses a fifteenth."""
    _, assembly = added(group(conversation(8), conversation(1), scores=[1, 1]), **LONG)
    assert assembly.groups[0].rewards(10.0).tolist() == [-5.0] * 8 + [10.0 - 15.0 * 2 / 30]
    _, assembly = added(group(conversation(3), conversation(1), scores=[1, 0]), advantage_normalization_type="opo")
    [(_, samples)] = assembly.trained
    assert [one.advantage for one in samples] == pytest.approx([2.5] * 3 + [-7.5])


def test_equal_sums_of_score_and_environment_teach_nothing() -> None:
    one = group(conversation(1, given=0.0), conversation(1, given=10.0), scores=[1, 0])
    assert added(one)[0] == ZERO_STD


def test_no_sample_of_a_conversation_that_was_cut_off_is_trained_on() -> None:
    cut, whole = conversation(3, ended="length"), conversation(2)
    _, assembly = added(group(cut, whole, scores=[0, 1]), mask_truncated_completions=True)
    [(_, samples)] = assembly.trained
    assert [one.advantage for one in samples] == [5.0, 5.0]
    assert added(group(cut, cut, scores=[0, 1]), mask_truncated_completions=True)[0] == MASKED


def test_tokens_of_a_conversation_that_was_cut_off_have_no_age() -> None:
    cut = [sample(goes_on=True, version=1), sample(version=2, ended="length")]
    both = group(cut, [sample(version=3)], scores=[0, 1])
    metrics = freshness_metrics(5, [both], [1], now=101.0, mask_truncated_completions=True)
    assert (metrics["version_diversity"], metrics["max_sample_age"]) == (1, 1)


def test_metrics_of_rewards_count_a_conversation_once_and_lengths_all_samples() -> None:
    """One conversation of three samples is right, and one of one sample is wrong and was cut off."""
    one = group(conversation(3), conversation(1, ended="length"), scores=[1, 0])
    one = replace(one, well_formed=np.array([False, False, True, False]))
    trained = response_metrics([one], verification_reward=10.0)
    for name in ("verifiable_correct_rate", "verifiable_solved_rate", "math_correct_rate", "math_solved_rate"):
        assert trained[f"objective/{name}"] == 0.5
    assert trained["scores"] == trained["objective/verifiable_reward"] == trained["objective/math_reward"] == 5.0
    assert trained["val/stop_rate"] == trained["val/format_scores"] == 0.5
    assert len(one.samples) * trained["val/sequence_lengths"] == 4 * NUM_TOKENS
    evaluated = evaluation_metrics(last_samples([one]), verification_reward=10.0)
    for name, value in trained.items():
        if not name.endswith("_hist"):
            assert evaluated[f"eval/{name.removeprefix('val/')}"] == value

    step = step_metrics([one], [one], num_prompts=1)
    for name in ("batch/percent_solved_mean", "all_groups/percent_solved_mean", "unsolved_batch_size_ratio"):
        assert step[name] == 0.5
    assert step["val/num_step_response_tokens"] == 4 * NUM_TOKENS


def test_what_environments_gave_is_averaged_over_conversations() -> None:
    one = group(conversation(3, given=1.0), conversation(1, given=0.0), scores=[0, 0])
    assert response_metrics([one], verification_reward=10.0)["objective/environment_reward"] == 0.5


def test_what_an_environment_gave_full_reward_is_right() -> None:
    """A game without a verifier: its answers have the score 0 and what the environment gave."""
    won = group(conversation(2, given=1.0), conversation(1, given=1.0), scores=[0, 0])
    lost = group(conversation(2, given=0.0), conversation(1, given=0.0), scores=[0, 0])
    one = group(conversation(1, given=1.0), conversation(1, given=0.0), scores=[0, 0])
    step = step_metrics([won, lost, one], [one], num_prompts=1)
    assert step["all_groups/percent_solved_mean"] == 0.5
    assert (step["batch/filtered_prompts_solved"], step["batch/filtered_prompts_zero"]) == (1, 1)


def test_pass_rate_counts_a_conversation_once() -> None:
    assert pass_rate(group(conversation(9), conversation(1), scores=[1, 0]), make_args()) == 0.5


@pytest.mark.parametrize(("given", "rate"), [((1.0, 1.0), 1.0), ((20.0, 0.0), 0.5), ((0.5, 0.0), 0.0)])
def test_pass_rate_with_rewards_of_an_environment_is_the_share_that_is_right(
    given: tuple[float, float], rate: float
) -> None:
    first, second = given
    one = group(conversation(3, given=first), conversation(1, given=second), scores=[0, 0])
    assert pass_rate(one, make_args()) == rate


def test_pass_rate_is_that_of_answers_alone() -> None:
    """Two summaries, which no verifier scores, have no reward of their own."""
    summaries = [[replace(sample(), is_judged=False, reward=0.0)] for _ in range(2)]
    one = group(*summaries, conversation(1), conversation(1), scores=[0, 0, 1, 1])
    assert pass_rate(one, make_args()) == 1.0


FORM = {"apply_r1_style_format_reward": True}


@pytest.mark.parametrize(
    "options",
    [
        FORM,
        {"apply_verifiable_reward": False},
        FORM | {"apply_verifiable_reward": False, "additive_format_reward": True},
    ],
)
def test_what_an_environment_gave_stays_where_the_verifiers_reward_does_not_count(options: dict[str, Any]) -> None:
    one = group(conversation(1, given=1.0), conversation(2, given=0.0), scores=[1, 1])
    fate, assembly = added(replace(one, well_formed=np.zeros(3, bool)), **options)
    assert (fate, assembly.groups[0].rewards(10.0).tolist()) == (CONSUMED, [1.0, 0.0, 0.0])


def test_conversation_without_a_score_leaves_nobody_to_compare_the_other_with() -> None:
    one = group(conversation(3), conversation(2), scores=[1, 0])
    assert _comparable(one.result, [1.0, 1.0, 1.0, None, None]) == []
    three = group(conversation(3), conversation(2), conversation(1), scores=[1, 0, 0])
    assert _comparable(three.result, [1.0, 1.0, 1.0, None, None, 0.0]) == [0, 1, 2, 5]
    assert _num_responses(three.result, {3, 4}) == 1
