"""Which groups a step trains on; what it does for each result does not grow with the results that are here already."""

import dataclasses
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import make_args
from group_fakes import ended_by, make_result

from open_instruct.data_types import TokenStatistics, TrainingSample
from open_instruct.rollouts.batch_producer import BatchProducer
from open_instruct.rollouts.prompt_ledger import CONSUMED, MASKED, ZERO_STD, IssuedPrompt
from open_instruct.rollouts.staleness import Assignment
from open_instruct.rollouts.step_assembly import CollationOptions, StepAssembly, pass_rate
from open_instruct.scored_groups import ScoredGroup, split

NUM_GROUPS = 64
NUM_SAMPLES = 4


def group(number: int) -> ScoredGroup:
    result = make_result(
        responses=[np.arange(5, dtype=np.int32)] * NUM_SAMPLES,
        logprobs=[np.zeros(5, dtype=np.float32)] * NUM_SAMPLES,
        finish_reasons=["stop"] * NUM_SAMPLES,
        version_spans=[[(0, 5)]] * NUM_SAMPLES,
        index=0,
        prompt_id=f"train-{number}",
        issue_version=0,
        engine_id=0,
        token_statistics=TokenStatistics(3, 5 * NUM_SAMPLES, 0.0, 0.0),
    )
    scores = np.array([1, 0, 0, 1], dtype=np.float32)
    return ScoredGroup(result, dataset="sums", scores=scores, num_failures=0)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_result_is_looked_at_a_few_times_whatever_is_here_already(
    streaming: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0
    length = TrainingSample.__len__

    def counted(sample: TrainingSample) -> int:
        nonlocal looks
        looks += 1
        return length(sample)

    args = make_args(
        num_unique_prompts_rollout=NUM_GROUPS,
        streaming=streaming,
        pack_length=10**6,  # no batch is full before the last
        total_episodes=NUM_GROUPS * NUM_SAMPLES,
    )
    assembly = StepAssembly(1, args, CollationOptions(1, "packed", 0))
    monkeypatch.setattr(TrainingSample, "__len__", counted)
    for number in range(NUM_GROUPS):
        prompt = IssuedPrompt(f"train-{number}", number, 0, arrived=True)
        assert assembly.add(group(number), Assignment(prompt, 0, is_straggler=False)) == CONSUMED
        assert assembly.next_partial_batch(last=False) is None
    assert looks <= 2 * NUM_GROUPS * NUM_SAMPLES


def finished(number: int, *reasons: str, scores: list[float] | None = None) -> ScoredGroup:
    """A group whose responses ended for `reasons`."""
    one = group(number)
    return dataclasses.replace(
        one, result=ended_by(one.result, *reasons), scores=np.array(scores or [1, 0, 0, 1], dtype=np.float32)
    )


def test_group_without_a_token_to_train_on_is_masked_and_gives_no_gradient() -> None:
    args = make_args(num_unique_prompts_rollout=3, mask_truncated_completions=True)
    assembly = StepAssembly(1, args, CollationOptions(1, "padded", 0))

    def add(one: ScoredGroup) -> str:
        number = int(one.result.prompt_id.removeprefix("train-"))
        prompt = IssuedPrompt(one.result.prompt_id, number, 0, arrived=True)
        return assembly.add(one, Assignment(prompt, 0, is_straggler=False))

    assert add(finished(0, *["length"] * 4)) == MASKED
    assert add(finished(1, *["stop"] * 4, scores=[1, 1, 1, 1])) == ZERO_STD
    assert not assembly.has_gradient
    assert add(finished(2, "length", "length", "stop", "length")) == CONSUMED
    assert assembly.has_gradient
    batch = assembly.next_partial_batch(last=True)
    assert batch is not None
    assert batch.num_samples == 1
    assert batch.rank_batches[0][0].num_global_tokens == assembly.num_tokens == 5
    metrics = assembly.metrics(now=1.0)
    assert metrics["real_batch_size_ratio"] == 1 / 3
    assert (metrics["batch/filtered_prompts_solved"], metrics["batch/filtered_prompts_zero"]) == (1, 0)


def assembled(args: Any, groups: list[ScoredGroup]) -> StepAssembly:
    assembly = StepAssembly(1, args, CollationOptions(1, "packed", 0))
    for number, one in enumerate(groups):
        prompt = IssuedPrompt(one.result.prompt_id, number, 0, arrived=True)
        assembly.add(one, Assignment(prompt, 0, is_straggler=False))
    return assembly


def test_advantages_that_need_the_whole_step_are_completed_before_it_is_sent() -> None:
    args = make_args(advantage_normalization_type="reinforce_plus_plus", filter_zero_std_samples=False)
    groups = [finished(0, *["stop"] * 4), finished(1, *["stop"] * 4, scores=[1, 1, 1, 1])]
    assembly = assembled(args, groups)
    batch = assembly.next_partial_batch(last=True)
    assert batch is not None
    [micro_batch] = batch.rank_batches[0][0].micro_batches
    advantages = micro_batch.advantages[micro_batch.response_masks].astype(np.float64)
    assert len(advantages) == assembly.num_tokens == 40
    assert advantages.mean() == pytest.approx(0, abs=1e-6)
    assert advantages.var(ddof=1) == pytest.approx(1, rel=1e-5)
    assert assembly.metrics(now=1.0)["val/advantages_max"] == pytest.approx(advantages.max())


def test_shaped_rewards_decide_what_is_trained_on() -> None:
    """All four answers are right, but one was cut off: with the penalty there is something to learn."""
    right = finished(0, "stop", "stop", "length", "stop", scores=[1, 1, 1, 1])
    assert assembled(make_args(), [right]).num_tokens == 0
    assembly = assembled(make_args(non_stop_penalty=True, non_stop_penalty_value=-1.0), [right])
    assert (assembly.num_tokens, assembly.num_sequences) == (20, 4)
    [(_, samples)] = assembly.trained
    np.testing.assert_allclose([sample.advantage for sample in samples], [2.75, 2.75, -8.25, 2.75])
    assembly.next_partial_batch(last=True)
    metrics = assembly.metrics(now=1.0)
    assert metrics["scores"] == pytest.approx((3 * 10 - 1) / 4)
    assert metrics["objective/verifiable_reward"] == pytest.approx(10)
    assert metrics["objective/verifiable_correct_rate"] == 1


def test_the_form_alone_solves_a_prompt_where_all_responses_have_it() -> None:
    form = {"apply_verifiable_reward": False, "apply_r1_style_format_reward": True, "r1_style_format_reward": 5.0}
    args = make_args(no_resampling_pass_rate=0.9, **form)
    one_of_four = finished(0, "stop", "stop", "stop", "stop", scores=[1, 1, 1, 1])
    well_formed = np.array([True, False, False, False])
    rewards = args.reward_shaping.apply(
        one_of_four.rewards(10.0), one_of_four.lengths, one_of_four.stopped, well_formed
    )
    assert pass_rate(dataclasses.replace(one_of_four, shaped_rewards=rewards, well_formed=well_formed), args) == 0.25


@pytest.mark.parametrize(
    ("options", "rate"),
    [
        ({}, 1.0),
        ({"non_stop_penalty": True, "non_stop_penalty_value": -1.0}, (3 * 10 - 1) / 40),
        (
            {"apply_r1_style_format_reward": True, "additive_format_reward": True, "r1_style_format_reward": 5.0},
            40 / 60,
        ),
    ],
)
def test_prompts_are_solved_by_the_rewards_that_are_trained_on(options: dict[str, Any], rate: float) -> None:
    """All four answers are right, one was cut off, and none has the form; as in open-instruct."""
    args = make_args(no_resampling_pass_rate=0.9, **options)
    right = finished(0, "stop", "stop", "length", "stop", scores=[1, 1, 1, 1])
    formless = np.zeros(4, dtype=bool)
    shaped = args.reward_shaping.apply(right.rewards(10.0), right.lengths, right.stopped, formless)
    shaped = shaped if args.reward_shaping.is_on else None
    right = dataclasses.replace(right, shaped_rewards=shaped, well_formed=formless)
    assert pass_rate(right, args) == pytest.approx(rate)
    assembly = assembled(args, [right])
    assert assembly._solved_metrics() == {"batch/no_resampled_prompts": int(rate >= 0.9)}


def test_the_batch_says_how_many_responses_it_trains_on() -> None:
    args = make_args(mask_truncated_completions=True)
    assembly = assembled(args, [finished(0, "stop", "length", "stop", "stop")])
    batch = assembly.next_partial_batch(last=True)
    assert batch is not None
    assert batch.rank_batches[0][0].num_global_sequences == assembly.num_sequences == 3


def test_a_group_whose_first_conversation_goes_on_counts_in_the_rewards() -> None:
    plain, branched = finished(0, *["stop"] * 4, scores=[1, 0, 0, 0]), finished(1, *["stop"] * 4, scores=[0, 0, 1, 1])
    samples = branched.samples
    samples[0] = dataclasses.replace(samples[0], goes_on=True, is_judged=False)  # 7 conversations in all
    branched = dataclasses.replace(branched, num_failures=2, num_not_scored=2, cost=0.5)
    assembly = assembled(make_args(), [plain, *split(branched)])
    assembly.next_partial_batch(last=True)
    metrics = assembly.metrics(now=1.0)
    assert metrics["all_groups/scores"] == metrics["scores"] == pytest.approx(10 * 3 / 7)
    assert metrics["objective/not_scored"] == metrics["objective/verifier_failures"] == 2
    assert metrics["objective/verifier_cost"] == 0.5


def test_metrics_of_a_verifier_have_its_name_however_rows_spell_it() -> None:
    groups = [dataclasses.replace(finished(n, *["stop"] * 4), dataset=name) for n, name in enumerate(["MATH", "math"])]
    assembly = assembled(make_args(), groups)
    assembly.next_partial_batch(last=True)
    names = {name for name in assembly.metrics(now=1.0) if name.startswith("objective/") and name.endswith("_reward")}
    assert names == {"objective/math_reward", "objective/verifiable_reward"}


def test_groups_that_steps_have_taken_are_saved_before_those_that_wait() -> None:
    """A run that goes on takes groups in this order. Otherwise a step would take one that waits in place of a straggler that it
    had waited for, and the straggler would be too old afterwards."""
    parts: Any = [None] * 10
    producer = BatchProducer(*parts)
    producer.groups = {"train-3": group(3)}
    producer.taken = {4: [group(2)], 3: [group(1), group(0)]}
    saved = [finished.result.prompt_id for finished in producer.finished_groups()]
    assert saved == ["train-1", "train-0", "train-2", "train-3"]


@pytest.mark.parametrize(("num_samples", "counted"), [(0, 1), (4, 4), (9, 4)])
def test_batch_that_is_larger_than_the_queue_fills_it(num_samples: int, counted: int) -> None:
    """The queue would refuse it for ever. Rows may ask for more steps of their environment than the queue was made for."""
    put: list[int] = []
    parts: Any = [None] * 10
    producer: Any = BatchProducer(*parts)
    producer._args = make_args(max_queue_size=4)
    producer._threads = SimpleNamespace(stopping=threading.Event())
    producer._message_queue = SimpleNamespace(put=lambda _, *, num_samples, **__: put.append(num_samples))
    producer._put(SimpleNamespace(num_samples=num_samples, min_version=0, training_step=1, number=0), num_bytes=100)
    assert put == [counted]
