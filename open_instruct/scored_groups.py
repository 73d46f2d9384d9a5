"""Groups of responses with their scores, on the way from the verifiers to a training step. Pure functions of values."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from open_instruct.data_types import GenerationResult, Sample

ALIKE = 1e-6
"""Relative difference up to which rewards count as the same."""
CONSUMED = "consumed"
"""Fate of a group that is trained on."""
TOO_OLD = "too_old"
"""Outcome of a group that was discarded because it was too old. Its prompt is issued again."""
UNSCORED = "not_scored"
"""Outcome of a response that nothing uses, because it, or all that it would be compared with, was not scored."""
PASSTHROUGH = "passthrough"
"""Name of the verifier that leaves rewards to the workflow and to reward functions."""


@dataclass(frozen=True)
class ScorePart:
    """The scores that one of several verifiers gave to a group."""

    name: str
    weight: float
    scores: np.ndarray  # (G,) float32 in [0, 1]


@dataclass(frozen=True)
class Reading:
    """What a verifier says of a response, for people: fields of `VerificationResult`."""

    answer: str | None = None
    reasoning: str | None = None


@dataclass(frozen=True)
class Misses:
    """How many responses of a result a verifier did not score."""

    name: str
    num_not_scored: int
    num_failures: int
    """Of these, the responses for which the verifier raised an error."""
    is_function: bool = False
    """Whether it is a reward function."""


@dataclass(frozen=True)
class FunctionRewards:
    """The rewards that one reward function gave to a group."""

    name: str
    weight: float
    rewards: np.ndarray  # (G,) float64, of any size; NaN where the function scored nothing
    seconds: float = 0.0
    """How long the function computed."""
    logged: Mapping[str, float] = field(default_factory=dict)
    """What the function gave to `log_metric`."""
    extra: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """What the function gave to `log_extra`: G texts, by column. Not in saved states."""
    failure: str = ""
    """Why it scored no response; "" if all went well."""


@dataclass(frozen=True)
class ScoredGroup:
    """The responses to one prompt with the verifier's scores."""

    result: GenerationResult
    dataset: str
    scores: np.ndarray  # (G,) float32 in [0, 1]
    num_failures: int = 0
    """Responses that were not scored because a verifier raised an error."""
    num_not_scored: int = 0
    """All responses that were not scored. They are not among the samples."""
    score_s: float = 0.0
    """Seconds from the arrival of the group to its last score."""
    cost: float = 0.0
    """US dollars that scoring the group cost."""
    misses: tuple[Misses, ...] = ()
    """For each verifier of the row."""
    reward_weight: float = 1.0
    """Weight of the group's verifier. Scores are multiplied by it to become rewards."""
    parts: "tuple[ScorePart, ...]" = ()
    """The scores of each verifier, if several score a row. `scores` are then their weighted means, and `reward_weight` the sum of
    their weights."""
    functions: tuple[FunctionRewards, ...] = ()
    """What each reward function gave, in addition to the verifier's score."""
    well_formed: np.ndarray | None = None
    """(G,) bool: whether each response has the form that its reward depends on; None if rewards depend on no form."""
    shaped_rewards: np.ndarray | None = None
    """(G,) float64: the rewards of training, if they are not just the verifier's score: shaped (`RewardShaping`), or with the
    rewards of environments added. `StepAssembly` sets them."""
    readings: tuple[tuple[Reading, ...], ...] = ()
    """For each verifier of the row, what it says of each of the G samples. Empty where that is not known, as after a resume."""
    unscored: "ScoredGroup | None" = None
    """The responses that are not among the samples because they were not scored (`UNSCORED`), with score NaN; `readings` say why.
    None: all were scored, or it is not known any more."""
    left_out_as: str = ""
    """The fate of a group that a step has left out, and whose tokens are therefore forgotten (`without_tokens`); "" for a group
    with tokens."""

    @property
    def samples(self) -> list[Sample]:
        """G samples."""
        return self.result.samples

    @property
    def first(self) -> Sample:
        """The first sample. In a group that `split` made, all samples have its kind, number and weight."""
        return self.result.samples[0]

    @property
    def has_rewards(self) -> bool:
        """Whether a verifier scored samples of the group, or the workflow knew their reward."""
        return any(sample.is_judged or sample.reward is not None for sample in self.samples)

    @property
    def weighted_scores(self) -> np.ndarray:
        """(G,) float32, scores times `reward_weight`; times `--verification_reward` they are the rewards."""
        return self.reward_weight * self.scores

    @property
    def has_zero_std(self) -> bool:
        """Whether all conversations have the same reward, up to rounding. Their advantages are then all 0 and teach nothing."""
        return are_alike((self.scores if self.shaped_rewards is None else self.shaped_rewards)[self.ends])

    @property
    def has_environment_rewards(self) -> bool:
        return any(sample.environment_reward is not None for sample in self.samples)

    @property
    def environment_rewards(self) -> np.ndarray:
        """(G,) float64: rewards of environments, in addition to the verifier's; 0 where there was no environment."""
        return np.array([sample.environment_reward or 0.0 for sample in self.samples])

    @property
    def function_rewards(self) -> np.ndarray:
        """(G,) float64: the weighted sum of what the reward functions gave. A function that scored nothing adds nothing."""
        weighted = [function.weight * np.nan_to_num(function.rewards) for function in self.functions]
        return np.sum(weighted, axis=0) if weighted else np.zeros(len(self.scores))

    @property
    def has_added_rewards(self) -> bool:
        """Whether something other than a verifier gives rewards of any size: an environment or a reward function."""
        return bool(self.functions) or self.has_environment_rewards

    @property
    def added_rewards(self) -> np.ndarray:
        """(G,) float64: rewards of environments and of reward functions, in addition to the verifier's. A group that was given up
        has rewards but no samples."""
        return self.function_rewards + (self.environment_rewards if self.has_environment_rewards else 0.0)

    @property
    def outcomes(self) -> np.ndarray:
        """(G,): what tells right (1 or more) from wrong (0): the verifier's scores; where only reward functions score, their
        weighted sum."""
        return self.function_rewards if self.functions and family(self.dataset) == PASSTHROUGH else self.scores

    @property
    def ends(self) -> np.ndarray:
        """(G,) int: for each sample the position of the sample in which its conversation ends, usually its own."""
        return ends_of(self.samples)

    @property
    def lengths(self) -> np.ndarray:
        """(G,) int: the tokens of each response."""
        return np.array([len(sample.response_ids) for sample in self.samples])

    @property
    def conversation_lengths(self) -> np.ndarray:
        """(G,) int: for each sample the tokens of all responses of its conversation."""
        ends = self.ends
        return np.bincount(ends, weights=self.lengths, minlength=len(ends)).astype(int)[ends]

    @property
    def is_judged(self) -> np.ndarray:
        """(G,) bool: whether a verifier scores the conversation of each sample."""
        return np.array([self.samples[end].is_judged for end in self.ends], dtype=bool)

    @property
    def stopped(self) -> np.ndarray:
        """(G,) bool: whether the conversation of each sample ended by itself."""
        return stopped_of(self.samples)

    @property
    def by_verifier(self) -> "tuple[ScorePart, ...]":
        """The scores of each verifier, under its family's name. Empty where only reward functions score."""
        if self.functions and family(self.dataset) == PASSTHROUGH:
            return ()
        parts = self.parts or (ScorePart(self.dataset, self.reward_weight, self.scores),)
        return tuple(replace(part, name=family(part.name)) for part in parts)

    def rewards(self, verification_reward: float) -> np.ndarray:
        """(G,): the rewards that advantages are made from."""
        if self.shaped_rewards is not None:
            return self.shaped_rewards
        rewards = verification_reward * self.weighted_scores
        return rewards + self.added_rewards if self.has_added_rewards else rewards


@dataclass(frozen=True)
class UnscoredGroup:
    """Too few responses of a result were scored, so the result has no rewards."""

    cause: str
    num_not_scored: int
    num_failures: int
    cost: float = 0.0
    misses: tuple[Misses, ...] = ()
    """All as in `ScoredGroup`."""
    result: GenerationResult | None = None
    """The result without its samples."""
    unscored: ScoredGroup | None = None
    """All its responses, as in `ScoredGroup`; None if there are none."""


def said_by_functions(group: ScoredGroup, position: int) -> dict[str, str]:
    """For people: what the reward functions gave to a sample, and what they logged of it, by column. Empty without any."""
    if not group.functions:
        return {}
    named_rewards = [(function.name, function.rewards[position]) for function in group.functions]
    rewards = ", ".join(
        f"{name} {'not scored' if np.isnan(reward) else f'{reward:.4g}'}" for name, reward in named_rewards
    )
    logged = {column: values[position] for function in group.functions for column, values in function.extra.items()}
    return {**logged, "rewards": rewards}


def are_alike(rewards: np.ndarray) -> bool:
    """Whether rewards are the same up to rounding: a millionth of the largest of them, or of 1 if all are smaller.

    Weighted means of several verifiers' scores may differ in their last digit, 0.3 from 0.30000001, although each verifier gave
    all responses the same score. Divided by their standard deviation, such differences would become advantages of 1 and -1.
    """
    return bool(np.ptp(rewards) <= ALIKE * max(1.0, float(np.abs(rewards).max())))


def family(verifier: str) -> str:
    """The name under which metrics know a verifier: `reasoning_gym` for `reasoning_gym/chain_sum`, `math` for `MATH`."""
    return verifier.partition("/")[0].partition("?")[0].lower()


def ends_of(samples: Sequence[Sample]) -> np.ndarray:
    """(G,) int: for each sample the position of the sample in which its conversation ends, usually its own."""
    ends = np.arange(len(samples))
    for position in reversed(range(len(samples) - 1)):
        if samples[position].goes_on:
            ends[position] = ends[position + 1]
    return ends


def stopped_of(samples: Sequence[Sample]) -> np.ndarray:
    """(G,) bool: whether the conversation of each sample ended by itself. Only its last sample shows that."""
    return np.array([samples[end].finish_reason == "stop" for end in ends_of(samples)], dtype=bool)


def last_samples(rollouts: Sequence[ScoredGroup]) -> list[ScoredGroup]:
    """The rollouts with only the last sample of each conversation."""
    return [
        take(rollout, [position for position, sample in enumerate(rollout.samples) if not sample.goes_on])
        if any(sample.goes_on for sample in rollout.samples)
        else rollout
        for rollout in rollouts
    ]


def judged_places(samples: Sequence[Sample]) -> list[int | None]:
    """For each sample, the number of the end of its conversation among the judged samples; None if that end is not judged."""
    judged = [position for position, sample in enumerate(samples) if sample.is_judged]
    number_of = {position: number for number, position in enumerate(judged)}
    return [number_of.get(end) for end in ends_of(samples).tolist()]


def split(rollout: ScoredGroup) -> list[ScoredGroup]:
    """The rollout divided into groups whose samples are compared with each other (`Sample.group`).

    Numbers that count once for the whole rollout (failures, misses, cost) stay with the first group that a verifier scores.
    """
    members: defaultdict[int, list[int]] = defaultdict(list)
    for position, sample in enumerate(rollout.samples):
        members[sample.group].append(position)
    groups = [take(rollout, positions) for positions in members.values()]
    judged = next(
        (number for number, group in enumerate(groups) if any(sample.is_judged for sample in group.samples)), 0
    )
    nothing: dict[str, Any] = {"num_failures": 0, "num_not_scored": 0, "cost": 0.0, "misses": ()}
    return [group if number == judged else replace(group, **nothing) for number, group in enumerate(groups)]


def without_tokens(group: ScoredGroup, fate: str) -> ScoredGroup:
    """A group that a step has left out with this fate, for metrics: everything but its tokens, log-probs and masks. These become
    zeros of the same lengths, which take no memory."""
    samples = [
        replace(
            sample,
            prompt_ids=_no_memory(sample.prompt_ids),
            response_ids=_no_memory(sample.response_ids),
            logprobs=_no_memory(sample.logprobs),
            loss_mask=None if sample.loss_mask is None else _no_memory(sample.loss_mask),
            teacher=None,
        )
        for sample in group.samples
    ]
    result = replace(group.result, samples=samples)
    return replace(group, result=result, readings=(), unscored=None, left_out_as=fate)


def _no_memory(array: np.ndarray) -> np.ndarray:
    return np.broadcast_to(np.zeros((), array.dtype), array.shape)


def take(group: ScoredGroup, positions: Sequence[int]) -> ScoredGroup:
    """The group with only the samples at these positions."""
    chosen, statistics = list(positions), group.result.token_statistics
    samples = [group.samples[position] for position in chosen]
    num_tokens = sum(len(sample.response_ids) for sample in samples)
    if chosen == list(range(len(group.samples))) and num_tokens == statistics.num_response_tokens:
        return group
    statistics = replace(statistics, num_response_tokens=num_tokens)
    result = replace(group.result, samples=samples, token_statistics=statistics)
    shaped = None if group.shaped_rewards is None else group.shaped_rewards[chosen]
    well_formed = None if group.well_formed is None else group.well_formed[chosen]
    parts = tuple(replace(part, scores=part.scores[chosen]) for part in group.parts)
    readings = tuple(tuple(verifier_readings[position] for position in chosen) for verifier_readings in group.readings)
    functions = tuple(_take_rewards(function, chosen) for function in group.functions)
    group = replace(group, result=result, scores=group.scores[chosen], parts=parts, readings=readings)
    group = replace(group, functions=functions)
    return replace(group, shaped_rewards=shaped, well_formed=well_formed)


def _take_rewards(function: FunctionRewards, chosen: Sequence[int]) -> FunctionRewards:
    extra = {column: [values[position] for position in chosen] for column, values in function.extra.items()}
    return replace(function, rewards=function.rewards[list(chosen)], extra=extra)
