"""Builds the batch of one training step: groups come in, partial batches for the learners go out.

add(group) … add(group) ─► next_partial_batch()         with --streaming, as soon as every rank's share is a full micro-batch
                           next_partial_batch(last)     the rest, with the metrics of the whole step
"""

import functools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from open_instruct.algorithms.advantages import ADVANTAGES, group_advantages
from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.data_types import MiniBatch, TrainingSample
from open_instruct.registry import options_of
from open_instruct.rollouts import batch_metrics
from open_instruct.rollouts.batch_metrics import is_right
from open_instruct.rollouts.batch_progress import Returned
from open_instruct.rollouts.packing import conversations_of, num_conversations, prepare_collated_data_for_workers
from open_instruct.rollouts.prompt_ledger import CONSUMED, MASKED, ZERO_STD
from open_instruct.rollouts.staleness import Assignment, sample_age
from open_instruct.rollouts.training_samples import fresh_masks, training_samples
from open_instruct.scored_groups import ScoredGroup, last_samples, split, take, without_tokens


@dataclass(frozen=True)
class CollationOptions:
    """What collation needs in addition to the user's options."""

    num_ranks: int
    layout: Literal["padded", "packed"]
    pad_token_id: int
    pairs_per_token: float | None = None
    """As in `share_prompts`; None shares no prompt."""


@dataclass(frozen=True)
class PartialBatch:
    """What the learners receive in one message. `rank_batches` holds a list of mini-batches for each rank."""

    number: int
    rank_batches: list[list[MiniBatch]]
    samples: Sequence[TrainingSample]
    """All samples, in the order of issue. `MiniBatch.samples_of_micro_batches` numbers them."""
    min_version: int
    """Oldest version among the trained tokens."""

    @property
    def num_samples(self) -> int:
        return len(self.samples)


@dataclass(frozen=True)
class _Kept:
    """A group that is trained on."""

    issue_number: int
    group: ScoredGroup
    oldest_trained_version: int
    samples: list[TrainingSample]
    """At least one sample. Each sample has at least one token to train on."""


class StepAssembly:
    """The groups of one training step. Pure: the controller decides which groups are added, and sends the batches."""

    def __init__(self, training_step: int, args: GRPOConfig, options: CollationOptions) -> None:
        self.training_step = training_step
        self.num_tokens = 0
        """Trained tokens so far."""
        self.num_sequences = 0
        """Conversations with a trained token so far. A response that is a single sample is one."""
        self._args = args
        self._options = options
        name = args.advantage_normalization_type
        own_options = options_of(args, ADVANTAGES[name].options)
        self._advantages = functools.partial(group_advantages, name=name, options=own_options)
        self._over_step = ADVANTAGES.fact(name, "over_step")
        if not args.use_task_rewards:
            self._advantages, self._over_step = _no_advantages, None
        self._shaping = args.reward_shaping
        self.rollouts: list[ScoredGroup] = []
        """All rollouts that were added, undivided. Of the rollouts that are left out only the newest, as many as a step has
        prompts, have tokens (`forget_tokens`)."""
        self._parts: list[list[ScoredGroup]] = []
        """Each of the rollouts, divided into groups whose samples are compared with each other."""
        self._left_out: deque[tuple[int, str]] = deque()
        """Position in `rollouts`, and fate, of each rollout that is left out and still has tokens."""
        self._kept: list[_Kept] = []
        self.num_extended = 0
        """How often the step has taken more prompts because it had nothing to train on."""
        self.returned = Returned()
        self.num_warnings = 0
        """How often the log has said that it has nothing to train on."""
        self._num_masked = 0
        self._unsent: list[_Kept] = []
        self._num_unsent_tokens = 0
        """Number of prompt and response tokens of the samples in `_unsent`."""
        self._num_partial_batches = 0
        self._num_computed = 0
        self._num_rows = 0
        self._packing_s = 0.0

    @property
    def groups(self) -> list[ScoredGroup]:
        """The rollouts, divided into groups whose samples are compared with each other."""
        return [group for parts in self._parts for group in parts]

    @property
    def answers(self) -> list[ScoredGroup]:
        """The groups that rewards are measured on: those that a verifier or an environment has rewarded, or all if none has."""
        return [group for group in self.groups if group.has_rewards] or self.groups

    @property
    def has_gradient(self) -> bool:
        """Whether there is a token to train on. A step without any must not reach the learners, because momentum would still move
        the weights."""
        return self.num_tokens > 0

    @property
    def num_missing(self) -> int:
        """How many prompts are missing from the number that a step should train on."""
        return max(0, self._args.num_unique_prompts_rollout - len({entry.issue_number for entry in self._kept}))

    @property
    def num_usable(self) -> int:
        """How many groups are trained on."""
        return len(self._kept)

    @property
    def num_masked(self) -> int:
        """How many groups are left out because every response was cut off and is masked."""
        return self._num_masked

    @property
    def why_no_gradient(self) -> str:
        """A message for the log, if no group can be trained on. `likely_causes.py` has the causes."""
        num_groups, num_masked = len(self.groups), self._num_masked
        if not num_masked:
            groups = "1 group" if num_groups == 1 else f"each of {num_groups} groups"
            scores = np.concatenate([group.outcomes for group in last_samples(self.groups)])
            return (
                f"step {self.training_step}: in {groups} all responses scored alike (mean score "
                f"{scores.mean():.3g}), so there is nothing to train on yet, and more prompts are sampled."
            )
        return (
            f"step {self.training_step}: no token of its {num_groups} groups may be trained on, because in "
            f"{num_groups - num_masked} of them all responses scored alike, and in {num_masked} every response was cut off at "
            "its length limit and is masked, so more prompts are sampled. A higher --response_length, or "
            "mask_truncated_completions False, would end this."
        )

    @property
    def trained(self) -> Iterator[tuple[ScoredGroup, list[TrainingSample]]]:
        """Groups that are trained on, with their samples, in the order of issue."""
        for entry in sorted(self._kept, key=lambda entry: entry.issue_number):
            yield entry.group, entry.samples

    def add(self, group: ScoredGroup, assignment: Assignment) -> str:
        """Take a group into the step. Returns its fate: `CONSUMED`; `ZERO_STD` if all its samples scored alike, so that there is
        nothing to learn; `MASKED` if none of its tokens may be trained on.

        A rollout may be several groups; it is consumed if one of these groups is consumed.
        """
        rollout = self._shaped(group)
        parts = split(rollout)
        self.rollouts.append(rollout)
        self._parts.append(parts)
        self.returned = functools.reduce(Returned.with_group, parts, self.returned)
        fates = {self._add(part, assignment) for part in parts}
        fate = next(fate for fate in (CONSUMED, MASKED, ZERO_STD) if fate in fates)
        if fate != CONSUMED:
            self._left_out.append((len(self.rollouts) - 1, fate))
        return fate

    def forget_tokens(self) -> dict[int, str]:
        """Forget the tokens of rollouts that are left out, except the newest. A step that finds nothing to train on takes more
        and more prompts, and would otherwise keep the tokens of all. Returns the fates by position in `rollouts`."""
        fates = {}
        while len(self._left_out) > self._args.num_unique_prompts_rollout:
            position, fate = self._left_out.popleft()
            self.rollouts[position] = without_tokens(self.rollouts[position], fate)
            self._parts[position] = split(self.rollouts[position])
            fates[position] = fate
        return fates

    def _shaped(self, rollout: ScoredGroup) -> ScoredGroup:
        """The rollout with the rewards that are trained on."""
        if not self._shaping.is_on and not rollout.has_added_rewards:
            return rollout
        shaped = self._shaping.apply(
            self._args.verification_reward * rollout.weighted_scores,
            rollout.conversation_lengths,
            rollout.stopped,
            rollout.well_formed,
            rollout.is_judged,
            rollout.added_rewards,
        )
        return replace(rollout, shaped_rewards=shaped[rollout.ends])

    def _add(self, group: ScoredGroup, assignment: Assignment) -> str:
        args = self._args
        if group.left_out_as:
            self._num_masked += group.left_out_as == MASKED
            return group.left_out_as
        if group.first.weight == 0 or (args.leaves_out_zero_std and group.has_zero_std):
            return ZERO_STD
        age = sample_age(self.training_step, assignment.oldest_trained_version)
        assert age <= args.staleness_bound, (
            f"{group.result.prompt_id} is {age} steps old, allowed are {args.staleness_bound}"
        )
        samples = self._samples(group, assignment)
        if not samples:
            self._num_masked += 1
            return MASKED
        entry = _Kept(assignment.prompt.issue_number, group, assignment.oldest_trained_version, samples)
        self._kept.append(entry)
        self._unsent.append(entry)
        self._num_unsent_tokens += sum(len(sample) for sample in entry.samples)
        self.num_tokens += sum(sample.num_trained for sample in entry.samples)
        self.num_sequences += num_conversations(entry.samples)
        return CONSUMED

    def _samples(self, group: ScoredGroup, assignment: Assignment) -> list[TrainingSample]:
        args = self._args
        masks = None
        if group.result.oldest_version < assignment.oldest_trained_version:  # straggler_policy truncate
            masks = [fresh_masks(group.result, assignment.oldest_trained_version)]
        return training_samples(
            [group],
            verification_reward=args.verification_reward,
            advantages=self._advantages,
            mask_truncated_completions=args.mask_truncated_completions,
            learns_inserted=args.ce_coef > 0,
            masks=masks,
        )

    def next_partial_batch(self, *, last: bool) -> PartialBatch | None:
        """The next partial batch, or None while a rank has less than a full share. The last is always made and may be empty."""
        started = time.perf_counter()
        if not last and not (self._args.streaming and self._num_unsent_tokens >= self._full_share):
            return None
        batch = self._make_partial_batch()
        self._packing_s += time.perf_counter() - started
        return batch

    @property
    def _full_share(self) -> int:
        """The number of tokens that fills `--min_batch_count` micro-batches on every rank."""
        args = self._args
        return self._options.num_ranks * args.per_device_train_batch_size * args.pack_length * args.min_batch_count

    def _make_partial_batch(self) -> PartialBatch:
        args, options = self._args, self._options
        if self._over_step is not None:
            self._complete_advantages(self._over_step)
        # In the order of issue, so that a whole batch does not depend on which group finished first.
        unsent = sorted(self._unsent, key=lambda entry: entry.issue_number)
        samples = [sample for entry in unsent for sample in entry.samples]
        rank_batches = prepare_collated_data_for_workers(
            samples,
            dp_world_size=options.num_ranks,
            pack_length=args.pack_length,
            rows=args.per_device_train_batch_size,
            layout=options.layout,
            pad_token_id=options.pad_token_id,
            num_mini_batches=args.num_mini_batches,
            pairs_per_token=options.pairs_per_token,
        )
        batch = PartialBatch(
            number=self._num_partial_batches,
            rank_batches=rank_batches,
            samples=samples,
            min_version=min((entry.oldest_trained_version for entry in unsent), default=self.training_step - 1),
        )
        self._unsent = []
        self._num_unsent_tokens = 0
        self._num_partial_batches += 1
        self._num_computed += batch_metrics.num_computed_tokens(rank_batches)
        self._num_rows += batch_metrics.num_packed_rows(rank_batches)
        return batch

    def _complete_advantages(self, over_step: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> None:
        """Replace the advantages that were computed within each group by advantages over the whole step."""
        conversations = [conversation for entry in self._kept for conversation in conversations_of(entry.samples)]
        if not conversations:
            return
        advantages = np.array([conversation[0].advantage for conversation in conversations], dtype=np.float64)
        num_tokens = np.array([sum(sample.num_trained for sample in conversation) for conversation in conversations])
        completed = iter(over_step(advantages, num_tokens).tolist())
        self._kept = [replace(entry, samples=_with_advantages(entry.samples, completed)) for entry in self._kept]
        self._unsent = list(self._kept)  # without --streaming nothing was sent before

    def _solved_metrics(self) -> dict[str, int]:
        enough = self._args.no_resampling_pass_rate
        if enough is None:
            return {}
        return {
            "batch/no_resampled_prompts": sum(pass_rate(rollout, self._args) >= enough for rollout in self.rollouts)
        }

    def metrics(self, now: float) -> dict[str, Any]:
        """Metrics of the whole step, whose last partial batch was made at Unix time `now`. Rewards and lengths are means over the
        groups that are trained on, as in open-instruct; `all_groups/*` are means over all generated groups, also those without a
        gradient. Ages are the ages of trained tokens."""
        args = self._args
        entries = sorted(self._kept, key=lambda entry: entry.issue_number)
        samples = [sample for entry in entries for sample in entry.samples]
        groups = [entry.group for entry in entries]
        answers = self.answers
        is_kept = set(map(id, groups))
        trained = [group for group in answers if id(group) in is_kept] or answers
        measures = batch_metrics.response_metrics(answers, verification_reward=args.verification_reward)
        trained_measures = measures
        if len(trained) < len(answers):
            trained_measures = batch_metrics.response_metrics(trained, verification_reward=args.verification_reward)
        metrics = {
            **trained_measures,
            **{f"all_groups/{name}": value for name, value in measures.items() if not name.endswith("_hist")},
            **batch_metrics.standard_error(answers, verification_reward=args.verification_reward),
            **batch_metrics.scoring_metrics(self.rollouts),
            **batch_metrics.step_metrics(
                self.groups,
                groups,
                num_prompts=args.num_unique_prompts_rollout,
            ),
            **self._solved_metrics(),
            **batch_metrics.straggler_metrics(self.groups),
            **batch_metrics.freshness_metrics(
                self.training_step,
                groups,
                [entry.oldest_trained_version for entry in entries],
                now=now,
                mask_truncated_completions=args.mask_truncated_completions,
            ),
            "packed_ratio": self._num_rows / max(len(samples), 1),
            "packed_fill_ratio": sum(len(sample) for sample in samples) / max(self._num_computed, 1),
            "batch/num_partial_batches": self._num_partial_batches,
            "time/packing": self._packing_s,
            "time/verification": self.groups[-1].score_s,  # the step waited only for the last group
        }
        return metrics | (batch_metrics.advantage_metrics(samples) if samples else {})


def pass_rate(rollout: ScoredGroup, args: GRPOConfig) -> float:
    """The mean reward of a rollout, as a share of the highest reward that a response can have. Rewards of environments and reward
    functions have no maximum; a rollout with such rewards has the share of right responses instead. A conversation counts once.
    If a rollout has judged samples, only these count."""
    (answers,) = last_samples([rollout])
    if judged := [position for position, sample in enumerate(answers.samples) if sample.is_judged]:
        answers = take(answers, judged)
    if answers.has_added_rewards:
        return float(is_right(answers).mean())
    highest = args.reward_shaping.highest(args.verification_reward * rollout.reward_weight)
    return float(answers.rewards(args.verification_reward).mean()) / (highest or 1.0)


def _with_advantages(samples: Sequence[TrainingSample], advantages: Iterator[float]) -> list[TrainingSample]:
    """The samples with the next of the advantages, of which there is one for each conversation."""
    completed = [(conversation, next(advantages)) for conversation in conversations_of(samples)]
    return [replace(sample, advantage=advantage) for conversation, advantage in completed for sample in conversation]


def _no_advantages(rewards_G: np.ndarray, *, lengths_G: np.ndarray) -> np.ndarray:
    """Zeros, for a run that learns only from a teacher."""
    del lengths_G
    return np.zeros(len(rewards_G))
