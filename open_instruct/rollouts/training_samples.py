"""Turns scored groups into training samples: advantages, and masks of the trained tokens. Pure: arrays in, arrays out."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from open_instruct.data_types import GenerationResult, TrainingSample
from open_instruct.scored_groups import ScoredGroup


def training_samples(
    groups: Sequence[ScoredGroup],
    *,
    verification_reward: float,
    advantages: Callable[..., np.ndarray],
    mask_truncated_completions: bool,
    learns_inserted: bool = False,
    masks: Sequence[Sequence[np.ndarray]] | None = None,
) -> list[TrainingSample]:
    """The samples of each response, with the advantage of its reward within its group, in the order of `groups`.

    `advantages(rewards_G, lengths_G=…)` gives (G,) advantages for the (G,) rewards of a group.

    With `mask_truncated_completions` a conversation that did not end by itself counts in its group's baseline, but all its
    samples are left out. A sample is also left out if its weight is 0, or if `masks` (per group and sample, (R,) bool; by default
    all True) excludes all its tokens. Tokens outside a `loss_mask` are never trained on, except that `learns_inserted` trains
    their cross-entropy.
    """
    if masks is None:
        masks = [[np.ones(len(sample.response_ids), dtype=bool) for sample in group.samples] for group in groups]
    advantages_PG = [_advantages_of(group, advantages, verification_reward) for group in groups]
    return [
        TrainingSample(
            query=sample.prompt_ids,
            response=sample.response_ids,
            mask=place.mask,
            logprobs=sample.logprobs,
            advantage=float(advantages_G[place.position]),
            weight=sample.weight,
            inserted=~sample.loss_mask if learns_inserted and sample.loss_mask is not None else None,
            teacher=sample.teacher,
            conversation_tokens=place.conversation_tokens,
            goes_on=place.goes_on,
        )
        for group, advantages_G, group_masks in zip(groups, advantages_PG, masks, strict=True)
        for place in _trained_samples(group, group_masks, mask_truncated_completions=mask_truncated_completions)
        for sample in (group.samples[place.position],)
    ]


@dataclass(frozen=True)
class _TrainedSample:
    """A sample of a group that is trained on."""

    position: int
    mask: np.ndarray  # (R,) bool
    conversation_tokens: int | None
    goes_on: bool
    """Both as in `TrainingSample`."""


def _trained_samples(
    group: ScoredGroup, masks: Sequence[np.ndarray], *, mask_truncated_completions: bool
) -> Iterator[_TrainedSample]:
    """The samples that are trained on. Example: of a conversation of three samples the first has 10 trained tokens, the second
    none, and the third 5. Then the first and the third are trained on, the first goes on, and both have 15
    `conversation_tokens`."""
    masks_by_position = {
        position: mask
        for position, (sample, group_mask, stops) in enumerate(zip(group.samples, masks, group.stopped, strict=True))
        if (mask := group_mask if sample.loss_mask is None else group_mask & sample.loss_mask).any()
        and sample.weight > 0
        and (stops or not mask_truncated_completions)
    }
    ends = group.ends
    num_tokens, last_positions = Counter[int](), {}
    for position, mask in masks_by_position.items():
        num_tokens[ends[position]] += int(mask.sum())
        last_positions[ends[position]] = position
    num_samples = Counter(ends[position] for position in masks_by_position)
    for position, mask in masks_by_position.items():
        end = ends[position]
        conversation_tokens = num_tokens[end] if num_samples[end] > 1 else None
        yield _TrainedSample(position, mask, conversation_tokens, goes_on=position != last_positions[end])


def _advantages_of(group: ScoredGroup, advantages: Callable[..., np.ndarray], verification_reward: float) -> np.ndarray:
    """(G,) advantages. The samples of one conversation are compared as one, with the reward of the last sample and the tokens of
    all samples as its length, and they all have the same advantage."""
    rewards, lengths = group.rewards(verification_reward), group.conversation_lengths
    if not any(sample.goes_on for sample in group.samples):
        return advantages(rewards, lengths_G=lengths)
    ends, place = np.unique(group.ends, return_inverse=True)
    return advantages(rewards[ends], lengths_G=lengths[ends])[place]


def fresh_masks(result: GenerationResult, oldest_allowed_version: int) -> list[np.ndarray]:
    """Per response (R,) bool: True on tokens that weights of `oldest_allowed_version` or newer sampled."""
    return [
        np.repeat([version >= oldest_allowed_version for version, _ in spans], [length for _, length in spans]).astype(
            bool
        )
        for spans in (sample.version_spans for sample in result.samples)
    ]
