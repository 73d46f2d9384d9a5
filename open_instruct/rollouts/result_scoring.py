"""From the responses to one prompt to a scored group: decode them, have them verified, leave out what no verifier scored."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np

from open_instruct.data.prompt_dataset import PromptRow
from open_instruct.data_types import GenerationResult
from open_instruct.rollouts.generation_failures import NOT_SCORED
from open_instruct.rollouts.prompt_requests import PromptRequests
from open_instruct.scored_groups import ScoredGroup, take
from open_instruct.verifiers.pool import VerifierPool
from open_instruct.verifiers.scoring_processes import Scored
from open_instruct.verifiers.verifiers import verifier_weight
from open_instruct.workflows.base import Workflow


class ResultScoring:
    """Has results scored by `verifiers`. The rows of `requests` say by which verifier, and what is right."""

    def __init__(self, requests: PromptRequests, workflow: Workflow, tokenizer: Any, verifiers: VerifierPool) -> None:
        self._requests = requests
        self._workflow = workflow
        self._tokenizer = tokenizer
        self.verifiers = verifiers

    def submit(self, result: GenerationResult, done: "Callable[[Future[list[Scored]], float], None]") -> None:
        """Have the result verified. `done` is called in a thread of the verifiers, with what they said and the seconds it
        took."""
        row = self._row(result)
        token_ids = [sample.response_ids.tolist() for sample in result.samples if sample.is_judged]
        texts = self._tokenizer.batch_decode(token_ids, skip_special_tokens=True)
        texts = [self._workflow.answer(text) for text in texts]
        started = time.perf_counter()
        future = self.verifiers.submit(row.dataset, row.ground_truth, token_ids, texts, row.raw_query)
        future.add_done_callback(lambda future: done(future, time.perf_counter() - started))

    def scored_group(
        self, result: GenerationResult, scored: Sequence[Scored], score_s: float
    ) -> tuple[ScoredGroup | None, str]:
        """The rollout with its rewards, without samples that were not scored. Or None, where too few samples were scored, and
        why.

        Example: of 4 responses one was not scored, so the group has 3. If 3 were not scored, there is nothing left to compare the
        fourth with. Of an evaluation every response must be scored.
        """
        scores = iter(one.score for one in scored)
        rewards = self._workflow.rewards(
            result.samples, [next(scores) if sample.is_judged else None for sample in result.samples]
        )
        known = _comparable(result, rewards)
        if not known or (result.is_eval and len(known) < len(rewards)):
            causes = sorted({one.failure or "" for one in scored if one.score is None})
            return None, f"{NOT_SCORED}: {', '.join(causes)}"
        known_rewards = np.array([0.0 if reward is None else reward for reward in rewards], dtype=np.float32)
        num_failures = sum((one.failure or "").startswith("error") for one in scored)
        group = self.group(result, known_rewards, num_failures)
        if len(known) < len(rewards):
            group = take(group, known)
        cost = sum(one.cost for one in scored)
        return replace(group, num_not_scored=len(rewards) - len(known), score_s=score_s, cost=cost), ""

    def group(self, result: GenerationResult, rewards: np.ndarray, num_failures: int = 0) -> ScoredGroup:
        """The result with `rewards`, float32 of shape (samples,)."""
        dataset = self._row(result).dataset
        return ScoredGroup(result, dataset, rewards, num_failures, reward_weight=verifier_weight(dataset))

    def _row(self, result: GenerationResult) -> PromptRow:
        dataset = self._requests.held_out if result.is_eval else self._requests.train
        assert dataset is not None
        return dataset[result.index]


def _comparable(result: GenerationResult, rewards: Sequence[float | None]) -> list[int]:
    """Positions of the samples whose reward is known, but for those that have nobody left to be compared with."""
    known = [position for position, reward in enumerate(rewards) if reward is not None]
    sizes = Counter(sample.group for sample in result.samples)
    left = Counter(result.samples[position].group for position in known)
    groups = {group for group, size in sizes.items() if left[group] >= min(2, size)}
    return [position for position in known if result.samples[position].group in groups]
