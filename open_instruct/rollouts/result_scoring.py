"""Turns the responses to one prompt into a scored group: decode them, have them verified, leave out unscored responses."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from open_instruct.algorithms.reward_shaping import is_well_formed
from open_instruct.chat_codec import OMISSION, ChatCodec
from open_instruct.data.prompt_dataset import PromptDataset, PromptRow
from open_instruct.data_types import GenerationResult, Sample
from open_instruct.rewards.pool import FunctionResult
from open_instruct.rollouts.answer_prompts import prompt_before_answer
from open_instruct.rollouts.failure_log import NOT_SCORED
from open_instruct.rollouts.function_scoring import (
    FunctionScoring,
    function_rewards,
    misses_of,
    nothing_from,
    scored_by_functions,
    with_functions,
)
from open_instruct.rollouts.prompt_requests import PromptRequests
from open_instruct.rollouts.rollout_state import FinishedGroup
from open_instruct.scored_groups import (
    PASSTHROUGH,
    Misses,
    Reading,
    ScoredGroup,
    ScorePart,
    UnscoredGroup,
    ends_of,
    judged_places,
    take,
)
from open_instruct.verifiers.evolving_rubrics import EvolvingRubrics
from open_instruct.verifiers.pool import VerifierPool
from open_instruct.verifiers.registry import verifier_tags, verifier_weight
from open_instruct.verifiers.row_verifiers import checks_of_row, combined, is_rubric, names_of_verifiers
from open_instruct.verifiers.scoring_processes import Scored
from open_instruct.workflows.base import Workflow


@dataclass(frozen=True)
class PendingScores:
    """The scores of a result, once `futures` are done."""

    of_verifiers: list[Future[list[Scored]]]
    of_functions: Future[list[FunctionResult]] | None = None

    @property
    def futures(self) -> list[Future[Any]]:
        return [*self.of_verifiers, *([self.of_functions] if self.of_functions is not None else [])]

    def results(self) -> tuple[list[list[Scored]], list[FunctionResult]]:
        """For each verifier, and for each reward function, what it says of the judged samples."""
        functions = self.of_functions.result() if self.of_functions is not None else []
        return [future.result() for future in self.of_verifiers], functions


class ResultScoring:
    """Has results scored by `verifiers`. The rows of `requests` name the verifiers and the right answers."""

    def __init__(
        self,
        requests: PromptRequests,
        workflow: Workflow,
        tokenizer: Any,
        verifiers: VerifierPool,
        *,
        looks_at_form: bool = False,
        rubrics: EvolvingRubrics | None = None,
        functions: FunctionScoring | None = None,
    ) -> None:
        self._requests = requests
        self._workflow = workflow
        self._codec = ChatCodec(tokenizer, tags=verifier_tags())
        self.verifiers = verifiers
        self._looks_at_form = looks_at_form
        self.rubrics = rubrics
        """Criteria that are found during the run; None if the run does not look for any."""
        self._functions = functions

    def submit(self, result: GenerationResult, callback: "Callable[[PendingScores, float], None]") -> None:
        """Have the result verified. `callback` is called in a thread of the verifiers or of the reward functions, with the scores
        of all of them and the seconds that scoring took."""
        row = self._row(result)
        token_ids, texts = self._answers(result.samples)
        queries = self._queries(result.samples, row.raw_query)
        started = time.perf_counter()
        checks = [] if self._only_functions(row.dataset) else checks_of_row(row.dataset, row.ground_truth)
        if self.rubrics is not None and not result.is_eval:
            checks = [(name, self.rubrics.label(truth) if is_rubric(name) else truth) for name, truth in checks]
        futures = [self.verifiers.submit(name, truth, token_ids, texts, queries) for name, truth in checks]
        functions = None if self._functions is None else self._functions.submit(row, token_ids, texts)
        scores = PendingScores(futures, functions)
        when_all_are_done(scores.futures, lambda: callback(scores, time.perf_counter() - started))

    def _only_functions(self, dataset: str) -> bool:
        """Whether only reward functions score rows with this `dataset`."""
        return self._functions is not None and dataset.lower() == PASSTHROUGH

    def scored_by_functions(self, result: GenerationResult, functions: Sequence[FunctionResult]) -> list[Scored]:
        """For each judged sample 0, or why the reward functions leave it unscored."""
        assert self._functions is not None
        only_functions = self._only_functions(self._dataset_of(result))
        return scored_by_functions(self._functions.specs, functions, needs_one=only_functions)

    def together(
        self, result: GenerationResult, scored_by: Sequence[Sequence[Scored]], functions: Sequence[FunctionResult]
    ) -> Sequence[Scored]:
        """For each judged sample the score of all its verifiers, or why one of them or a reward function leaves it unscored.
        Where only functions score, the score is 0."""
        by_functions = self.scored_by_functions(result, functions) if functions else []
        if not scored_by:
            return by_functions
        names, weights = self._names_and_weights(result)
        results = combined(scored_by, weights) if len(names) > 1 else scored_by[0]
        return with_functions(results, by_functions) if functions else results

    def learn_rubrics(self, training_step: int, groups: Iterable[ScoredGroup]) -> dict[str, float]:
        """Have new criteria found from the responses that a step trains on, in parallel with training. Returns metrics of the
        results for earlier steps."""
        if self.rubrics is None:
            return {}
        compared = []
        for group in groups:
            row = self._row(group.result)
            labels = [truth for name, truth in checks_of_row(row.dataset, row.ground_truth) if is_rubric(name)]
            texts = self._answers(group.samples)[1] if labels else []
            compared += [(label, texts) for label in labels if texts]
        self.rubrics.learn(training_step, compared)
        return self.rubrics.take_metrics()

    def _answers(self, samples: Iterable[Sample]) -> tuple[list[list[int]], list[str]]:
        """What the verifiers get for each judged sample: token ids and text."""
        token_ids = [sample.answer_ids.tolist() for sample in samples if sample.is_judged]
        return token_ids, [self._workflow.answer(self._codec.decode(ids)) for ids in token_ids]

    def _queries(self, samples: Iterable[Sample], prompt: str) -> list[str]:
        """The prompt as the verifiers get it for each judged sample: it ends with `<think>` if thoughts are open where the answer
        begins. A workflow that cuts thoughts out of the answer itself gets the row's prompt as it is."""
        queries = []
        for sample in samples:
            if not sample.is_judged:
                continue
            text = self._codec.decode(sample.answer_ids.tolist())
            reads_thoughts = self._workflow.answer(text) != text
            queries.append(prompt if reads_thoughts else prompt_before_answer(prompt, sample, self._codec))
        return queries

    def texts(self, samples: Iterable[Sample]) -> list[str]:
        """The texts that the verifiers get for the judged samples."""
        return self._answers(samples)[1]

    def close(self) -> None:
        """End the verifiers, the reward functions and the search for criteria."""
        self.verifiers.close()
        if self._functions is not None:
            self._functions.close()
        if self.rubrics is not None:
            self.rubrics.close()

    def scored_group(
        self,
        result: GenerationResult,
        scored_by: Sequence[Sequence[Scored]],
        score_s: float,
        *,
        functions: Sequence[FunctionResult] = (),
    ) -> ScoredGroup | UnscoredGroup:
        """The rollout with its rewards, without unscored samples; an `UnscoredGroup` if too few samples were scored.

        Example: if 1 of 4 responses was not scored, the group has 3. If 3 were not scored, the fourth has no other response to be
        compared with. In an evaluation every response must be scored.

        Args:
            scored_by: for each verifier of the row, its results for the judged samples; empty if only functions score.
            functions: what each reward function says of the judged samples.
        """
        names, weights = self._names_and_weights(result)
        specs = self._functions.specs if self._functions is not None else ()
        misses = (*_misses(names, scored_by), *misses_of(specs, functions))
        by_functions = [self.scored_by_functions(result, functions)] if functions else []
        scored_by = scored_by or [[Scored(0.0)] * len(by_functions[0])]
        results = self.together(result, scored_by, functions)
        judged = iter(scored.score for scored in results)
        rewards = self._workflow.rewards(
            result.samples, [next(judged) if sample.is_judged else None for sample in result.samples]
        )
        positions = _comparable(result, rewards)
        num_failures = sum(any(map(_is_error, column)) for column in zip(*scored_by, *by_functions, strict=True))
        cost = sum(scored.cost for scored in results)
        without_reward = {position for position, reward in enumerate(rewards) if reward is None}
        num_not_scored = _num_responses(result, without_reward)
        scores = np.array([np.nan if reward is None else reward for reward in rewards], dtype=np.float32)
        group = replace(self.group(result, scores, num_failures), score_s=score_s)
        group = replace(group, parts=_parts(names, weights, _of_conversations(result.samples, scored_by)))
        group = replace(group, readings=_readings(result.samples, scored_by))
        if functions:
            group = replace(group, functions=function_rewards(result.samples, specs, functions))
        if not positions or (result.is_eval and len(positions) < len(rewards)):
            causes = sorted({scored.failure or "" for scored in results if scored.score is None})
            cause, without_samples = f"{NOT_SCORED}: {', '.join(causes)}", replace(result, samples=[])
            return UnscoredGroup(cause, num_not_scored, num_failures, cost, misses, without_samples, group)
        if len(positions) < len(rewards):
            unscored = sorted({*range(len(rewards))}.difference(positions))
            group = replace(take(group, positions), unscored=take(group, unscored))
        # A workflow may know the reward of a response that a verifier has not scored.
        parts = tuple(replace(part, scores=np.nan_to_num(part.scores)) for part in group.parts)
        return replace(group, parts=parts, num_not_scored=num_not_scored, cost=cost, misses=misses)

    def group(self, result: GenerationResult, rewards: np.ndarray, num_failures: int = 0) -> ScoredGroup:
        """A group of the result with `rewards`, float32 of shape (samples,)."""
        dataset = self._dataset_of(result)
        weight = sum(map(verifier_weight, names_of_verifiers(dataset)))
        well_formed = None
        if self._looks_at_form and result.samples:
            well_formed = np.array([is_well_formed(self._own_text(sample)) for sample in result.samples])
        return ScoredGroup(result, dataset, rewards, num_failures, reward_weight=weight, well_formed=well_formed)

    def _own_text(self, sample: Sample) -> str:
        """What the policy itself has said, with `OMISSION` in place of the answers of tools."""
        if sample.loss_mask is None:
            return self._codec.decode(sample.response_ids.tolist())
        is_own = sample.loss_mask.astype(bool)
        parts = np.split(sample.response_ids, np.flatnonzero(np.diff(is_own)) + 1)
        own_parts = parts[0 if is_own[:1].all() else 1 :: 2]
        return OMISSION.join(self._codec.decode(part.tolist()) for part in own_parts)

    def restored(self, saved: FinishedGroup) -> ScoredGroup:
        """A scored group, restored from a saved state."""
        assert saved.scores is not None, saved.result.prompt_id
        values = {field.name: getattr(saved, field.name) for field in fields(FinishedGroup)}
        if not saved.left_out_as:
            del values["well_formed"]
        return replace(self.group(saved.result, saved.scores), **values)

    def all_wrong(self, result: GenerationResult) -> ScoredGroup | UnscoredGroup:
        """The group of a result that an engine gave up, as an evaluation counts it: each verifier gives each response 0. Where
        only functions score nothing is known of it, because 0 may be more than any answer gets."""
        num_responses = self._requests.evaluation_set(result.index).sampling.n
        if self._only_functions(self._dataset_of(result)):
            return UnscoredGroup(result.error, num_responses, num_failures=0, result=replace(result, samples=[]))
        nothing = np.zeros(num_responses, dtype=np.float32)
        names, weights = self._names_and_weights(result)
        functions = nothing_from(self._functions.specs, num_responses) if self._functions is not None else ()
        parts = _parts(names, weights, [nothing] * len(names))
        return replace(self.group(result, nothing), parts=parts, functions=functions)

    def _names_and_weights(self, result: GenerationResult) -> tuple[list[str], list[float]]:
        """The verifiers of the result's row, and their weights."""
        names = names_of_verifiers(self._dataset_of(result))
        return names, [verifier_weight(name) for name in names]

    def _row(self, result: GenerationResult) -> PromptRow:
        return self._rows_of(result)[result.index]

    def _dataset_of(self, result: GenerationResult) -> str:
        return self._rows_of(result).dataset_of(result.index)

    def _rows_of(self, result: GenerationResult) -> PromptDataset:
        dataset = self._requests.held_out if result.is_eval else self._requests.train
        assert dataset is not None
        return dataset


def when_all_are_done(futures: Sequence[Future[Any]], callback: Callable[[], None]) -> None:
    """Call `callback` once, in the thread in which the last of the futures is done."""
    lock, num_open = threading.Lock(), len(futures)

    def count(_: Future[Any]) -> None:
        nonlocal num_open
        with lock:
            num_open -= 1
            is_last = num_open == 0
        if is_last:
            callback()

    for future in futures:
        future.add_done_callback(count)


def _parts(names: list[str], weights: list[float], scores: Sequence[np.ndarray]) -> tuple[ScorePart, ...]:
    """The scores of each verifier, if they are known. Empty for a single verifier, whose scores are the group's scores."""
    if len(names) == 1 or not scores:
        return ()
    return tuple(ScorePart(*part) for part in zip(names, weights, scores, strict=True))


def _is_error(scored: Scored) -> bool:
    return (scored.failure or "").startswith("error")


def _misses(names: Sequence[str], scored_by: Sequence[Sequence[Scored]]) -> tuple[Misses, ...]:
    """For each verifier, how many of the judged samples it did not score."""
    return tuple(
        Misses(name, sum(scored.score is None for scored in results), sum(map(_is_error, results)))
        for name, results in zip(names, scored_by, strict=bool(scored_by))
    )


def _of_conversations(samples: Sequence[Sample], scored_by: Sequence[Sequence[Scored]]) -> list[np.ndarray]:
    """For each verifier (G,) float32: the score of each sample's conversation, NaN if the conversation was not scored. Empty if a
    conversation ends in a sample that no verifier sees."""
    places = [place for place in judged_places(samples) if place is not None]
    if len(places) < len(samples):
        return []
    scores = [[np.nan if scored.score is None else scored.score for scored in results] for results in scored_by]
    return [np.array([own[place] for place in places], dtype=np.float32) for own in scores]


def _readings(samples: Sequence[Sample], scored_by: Sequence[Sequence[Scored]]) -> tuple[tuple[Reading, ...], ...]:
    """For each verifier what it says of each sample, which is nothing of a sample that it does not see."""
    readings = []
    for scored in scored_by:
        judged = iter(scored)
        readings.append(tuple(_reading(next(judged)) if sample.is_judged else Reading() for sample in samples))
    return tuple(readings)


def _reading(scored: Scored) -> Reading:
    """What a verifier says of a response, or why it has not scored it."""
    failure = scored.failure or "no reason given"
    return scored.reading if scored.score is not None else Reading(scored.reading.answer, f"not scored: {failure}")


def _comparable(result: GenerationResult, rewards: Sequence[float | None]) -> list[int]:
    """Positions of the samples whose reward is known, except samples that have no other sample left to be compared with. The
    samples of one conversation count as one."""
    positions = [position for position, reward in enumerate(rewards) if reward is not None]
    ends = set(ends_of(result.samples).tolist())
    sizes = Counter(result.samples[end].group for end in ends)
    counts = Counter(result.samples[end].group for end in ends.intersection(positions))
    groups = {group for group, size in sizes.items() if counts[group] >= min(2, size)}
    return [position for position in positions if result.samples[position].group in groups]


def _num_responses(result: GenerationResult, positions: Collection[int]) -> int:
    """How many conversations end in the samples at these positions."""
    return len(set(ends_of(result.samples).tolist()).intersection(positions))
