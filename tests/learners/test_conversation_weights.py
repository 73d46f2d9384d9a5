"""A conversation weighs the same in the loss, whether it is one sample or several: cutting it changes no gradient.

The policy gives each token a log-prob that does not depend on the tokens before it, so a cut changes nothing else.
"""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_args

from open_instruct.algorithms.denominators import KINDS, Scales, loss_divisor
from open_instruct.algorithms.losses import LOSSES
from open_instruct.data_types import GenerationResult, MiniBatch, Sample, TokenStatistics
from open_instruct.learners.policy_loss import PolicyLoss
from open_instruct.rollouts.prompt_ledger import CONSUMED, IssuedPrompt
from open_instruct.rollouts.staleness import Assignment
from open_instruct.rollouts.step_assembly import CollationOptions, StepAssembly
from open_instruct.scored_groups import ScoredGroup

NUM_IDS = 23
LENGTHS = (9, 14, 5, 12)
"""Tokens of the four conversations of each group."""
REWARDS = (1.0, 0.0, 0.0, 0.5)
CUTS = ((4,), (2, 3, 11), (), (5, 9))
"""Where each of these conversations is cut into samples. The last sample of the fourth has no trained token."""
OF_SEQUENCES = {"gspo", "gmpo"}
"""Losses with a ratio of a whole sample, which is 1 until the first update."""


class TokenPolicy:
    """Stands for DeepSpeed's engine: the log-prob of a token is that of its id alone."""

    def __init__(self, weights: torch.Tensor) -> None:
        self.weights = weights

    def __call__(self, input_ids: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logprobs = torch.nn.functional.logsigmoid(self.weights)[input_ids[:, 1:]]
        return logprobs, torch.zeros_like(logprobs), logprobs.new_zeros((*logprobs.shape, 0))


def group_of(number: int, rng: np.random.Generator, *, is_cut: bool) -> ScoredGroup:
    """Four conversations, whole or cut into samples."""
    samples, scores = [], []
    for length, reward, cuts in zip(LENGTHS, REWARDS, CUTS, strict=True):
        ids = rng.integers(0, NUM_IDS, length).astype(np.int32)
        logprobs = -rng.uniform(0.3, 1.5, length).astype(np.float32)
        trained = rng.random(length) < 0.7
        trained[0], trained[9:12] = True, length > 12
        edges = [0, *(cuts if is_cut else ()), length]
        for start, end in pairwise(edges):
            samples.append(
                Sample(
                    np.arange(start + 2, dtype=np.int32),
                    ids[start:end],
                    np.where(trained, logprobs, 0)[start:end],
                    "stop",
                    [(0, end - start)],
                    loss_mask=trained[start:end],
                    goes_on=end < length,
                    is_judged=end == length,
                )
            )
            scores.append(reward)
    result = GenerationResult(samples, 0, f"train-{number}", 0, 0, TokenStatistics(2, sum(LENGTHS), 1.0, 1.0))
    return ScoredGroup(result, "math", np.array(scores, np.float32))


def rank_batches(args: Any, *, is_cut: bool, num_ranks: int, layout: Any) -> tuple[list[list[list[MiniBatch]]], int]:
    """The partial batches of a step of three groups, each a list of mini-batches for each rank; and its conversations."""
    rng = np.random.default_rng(5)
    assembly = StepAssembly(1, args, CollationOptions(num_ranks, layout, 0))
    batches = []
    for number in range(3):
        prompt = IssuedPrompt(f"train-{number}", number, 0)
        fate = assembly.add(group_of(number, rng, is_cut=is_cut), Assignment(prompt, 0, is_straggler=False))
        assert fate == CONSUMED
        batches.append(assembly.next_partial_batch(last=number == 2))
    return [batch.rank_batches for batch in batches if batch is not None], assembly.num_sequences


def gradients(*, is_cut: bool, num_ranks: int = 1, layout: str = "padded", **options: Any) -> list[torch.Tensor]:
    """The gradient of each optimizer step, over all ranks and micro-batches, as `Learner` computes it."""
    args = make_args(num_unique_prompts_rollout=3, load_ref_policy=True, beta=0.1, **options)
    weights = torch.linspace(-1, 2, NUM_IDS, dtype=torch.float64).requires_grad_()
    reference = TokenPolicy(torch.linspace(1, -1, NUM_IDS, dtype=torch.float64))
    loss = PolicyLoss(args, TokenPolicy(weights), reference, torch.device("cpu"))
    batches, num_sequences = rank_batches(args, is_cut=is_cut, num_ranks=num_ranks, layout=layout)
    assert len(batches) > 1 if args.streaming else len(batches) == 1

    def divisor(denominator: float | str, steps: list[MiniBatch]) -> float:
        return loss_divisor(
            denominator,
            num_tokens=sum(one.num_global_tokens for one in steps),
            num_sequences=sum(one.num_global_sequences for one in steps),
            response_length=args.lengths.response,
        )

    if args.streaming:  # one optimizer step of several partial batches
        of_ranks = [[mini for batch in batches for mini in batch[rank]] for rank in range(num_ranks)]
        assert sum(mini.num_global_sequences for mini in of_ranks[0]) == num_sequences
        steps = [of_ranks]
    else:
        [batch] = batches
        steps = [[[mini] for mini in of_step] for of_step in zip(*batch, strict=True)]
    old = [loss.old_logprobs(mini_batches) for mini_batches in batches[0]]
    found: list[torch.Tensor] = []
    for number, of_ranks in enumerate(steps):
        weights.grad = None
        whole = divisor(args.denominator, of_ranks[0])
        scales = Scales(kl=whole / divisor(args.denominator_of_kl, of_ranks[0]))
        for rank, mini_batches in enumerate(of_ranks):
            before = old[rank]
            for mini_batch in mini_batches:
                for place, micro_batch in enumerate(mini_batch.micro_batches):
                    of_micro = None if before is None else before[number][place]
                    loss_sum = loss.compute(micro_batch, of_micro, scales=scales).loss
                    (loss_sum / whole).backward()
        assert weights.grad is not None
        found.append(weights.grad.clone())
        with torch.no_grad():
            weights -= 0.5 * weights.grad
    return found


@pytest.mark.parametrize("denominator", [*KINDS, 50.0])
@pytest.mark.parametrize("loss_fn", LOSSES.names)
def test_cutting_a_conversation_into_samples_changes_no_gradient(loss_fn: str, denominator: float | str) -> None:
    options: dict[str, Any] = {"loss_fn": loss_fn, "loss_denominator": denominator, "pack_length": 48}
    num_mini_batches = 1 if loss_fn in OF_SEQUENCES else 2
    for kl_denominator, layout in (("sequence", "padded"), ("constant", "packed")):
        options |= {"kl_denominator": kl_denominator, "num_mini_batches": num_mini_batches}
        whole = gradients(is_cut=False, **options)
        cut = gradients(is_cut=True, num_ranks=3, layout=layout, **options)
        assert len(cut) == num_mini_batches
        torch.testing.assert_close(cut, whole, rtol=2e-6, atol=1e-9)


@pytest.mark.parametrize("denominator", [*KINDS, 50.0])
def test_cutting_a_conversation_changes_no_gradient_of_partial_batches(denominator: float | str) -> None:
    options: dict[str, Any] = {"loss_denominator": denominator, "pack_length": 48, "async_steps": 1}
    whole = gradients(is_cut=False, **options)
    cut = gradients(is_cut=True, num_ranks=2, streaming=True, **options)
    torch.testing.assert_close(cut, whole, rtol=2e-6, atol=1e-9)


def weight_by_conversation(denominator: str, cuts: tuple[int, ...]) -> list[float]:
    """The gradient with respect to the log-probs of each of two conversations of 30 tokens, with rewards 1 and 0; the first is
    cut into samples at `cuts`."""
    samples = []
    for first_id, at in ((0, cuts), (30, ())):
        for start, end in zip([0, *at], [*at, 30], strict=True):
            ids = np.arange(first_id + start, first_id + end, dtype=np.int32)
            given = np.full(len(ids), np.log(0.5), np.float32)
            spans = [(0, len(ids))]
            samples.append(Sample(np.array([60]), ids, given, "stop", spans, goes_on=end < 30, is_judged=end == 30))
    scores = np.array([1.0] * (len(cuts) + 1) + [0.0], np.float32)
    args = make_args(
        num_samples_per_prompt_rollout=2, response_length=30, loss_denominator=denominator, verification_reward=1.0
    )
    assembly = StepAssembly(1, args, CollationOptions(1, "packed", 0))
    result = GenerationResult(samples, 0, "train-0", 0, 0, TokenStatistics(1, 60, 1.0, 1.0))
    assembly.add(ScoredGroup(result, "math", scores), Assignment(IssuedPrompt("train-0", 0, 0), 0, is_straggler=False))
    batch = assembly.next_partial_batch(last=True)
    assert batch is not None
    [[mini_batch]] = batch.rank_batches
    logprobs = torch.full((61,), np.log(0.5), dtype=torch.float64).requires_grad_()

    def policy(input_ids: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        chosen = logprobs[input_ids[:, 1:]]
        return chosen, torch.zeros_like(chosen), chosen.new_zeros((*chosen.shape, 0))

    loss = PolicyLoss(args, policy, None, torch.device("cpu"))
    divisor = loss_divisor(
        denominator,
        num_tokens=mini_batch.num_global_tokens,
        num_sequences=mini_batch.num_global_sequences,
        response_length=30,
    )
    for micro_batch in mini_batch.micro_batches:
        (loss.compute(micro_batch, None).loss / divisor).backward()
    assert logprobs.grad is not None
    return [-float(logprobs.grad[:30].sum()), -float(logprobs.grad[30:60].sum())]


@pytest.mark.parametrize("cuts", [(), (10, 20), (1,), (3, 4, 5, 29)])
@pytest.mark.parametrize("denominator", KINDS)
def test_two_conversations_with_opposite_advantages_balance(denominator: str, cuts: tuple[int, ...]) -> None:
    """Advantages 1/2 and -1/2, each conversation half of the tokens, of the responses and of the longest possible responses."""
    assert weight_by_conversation(denominator, cuts) == pytest.approx([0.25, -0.25], rel=1e-6)
