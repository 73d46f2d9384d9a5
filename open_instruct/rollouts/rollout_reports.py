"""What the driver is told about the rollout side: counts, progress, warnings, and prompts that steps have left out."""

from typing import Any

from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.rollouts.actor_warnings import HeldWarnings
from open_instruct.rollouts.batch_producer import BatchProducer
from open_instruct.rollouts.batch_progress import MOST_NAMED, BatchProgress, Returned, RolloutNews
from open_instruct.rollouts.data_preparation import DataPreparation
from open_instruct.rollouts.prompt_feeder import PromptFeeder
from open_instruct.rollouts.prompt_ledger import IssuedPrompt
from open_instruct.rollouts.prompt_requests import PromptRequests
from open_instruct.rollouts.running_evaluation import Evaluations
from open_instruct.rollouts.staleness import PromptFlow
from open_instruct.verifiers.registry import verifier_weight
from open_instruct.verifiers.row_verifiers import names_of_verifiers


class RolloutReports:
    """Reads the parts of the controller and changes none. Remembers the warnings that the driver has not fetched, and the prompts
    that are reported ahead of their step. Not thread-safe: the controller's lock guards it."""

    def __init__(
        self,
        args: GRPOConfig,
        flow: PromptFlow,
        feeder: PromptFeeder,
        preparation: DataPreparation,
        producer: BatchProducer,
        evaluations: Evaluations,
        requests: PromptRequests,
    ) -> None:
        self._args = args
        self._flow = flow
        self._feeder = feeder
        self._preparation = preparation
        self._producer = producer
        self._evaluations = evaluations
        self._requests = requests
        self.warnings = HeldWarnings()
        self._reported: set[str] = set()
        """Prompts whose fate was reported before their step was trained."""

    def statistics(self) -> dict[str, Any]:
        """Counts since the start of this process, under the names of the fully async policy. Samples are responses."""
        return {
            "total_generated_samples": self._preparation.num_samples,
            "dropped_stale_samples": self._flow.num_stale_discarded * self._args.num_samples_per_prompt_rollout,
            **self._preparation.failures.counts(),
            "current_param_version": self._flow.version,
            "is_paused": bool(self._feeder.pauses),
            "pause_count": self._feeder.pause_count,
            "resume_count": self._feeder.resume_count,
            "num_open_prompts": self._flow.num_unassigned,
        }

    def highest_reward(self) -> float | None:
        """The highest reward that a response can have; None if it differs between rows, or has no bound."""
        if self._args.reward_funcs:
            return None
        datasets = self._requests.train.dataset_names
        weights = {sum(map(verifier_weight, names_of_verifiers(dataset))) for dataset in datasets}
        reward = self._args.verification_reward * next(iter(weights))
        return self._args.reward_shaping.highest(reward) if len(weights) == 1 else None

    def progress(self) -> BatchProgress:
        """How far the batch of the next step is."""
        num_waited_for, prompts = self._flow.waited_for(MOST_NAMED)
        evaluation = self._evaluations.current
        assembly = self._producer.assembly
        return BatchProgress(
            training_step=self._flow.assembling,
            num_prompts=self._args.num_unique_prompts_rollout,
            num_back=len(assembly.groups) if assembly else 0,
            num_usable=assembly.num_usable if assembly else 0,
            num_masked=assembly.num_masked if assembly else 0,
            returned=assembly.returned if assembly else Returned(),
            version=self._flow.version,
            num_waited_for=num_waited_for,
            first_waited_for=[f"{prompt.prompt_id} (version {prompt.version})" for prompt in prompts],
            num_being_scored=len(self._preparation.being_scored),
            of_teacher=self._preparation.teacher_progress,
            num_waiting=len(self._producer.groups),
            evaluation=evaluation.in_words if evaluation else "",
            pauses=tuple(self._feeder.pauses),
            num_results=self._preparation.num_samples + (evaluation.num_done if evaluation else 0),
        )

    def news(self) -> RolloutNews:
        """What the driver has not been told yet."""
        evaluation = self._evaluations.current
        return RolloutNews(
            warnings=self.warnings.take(),
            evaluation_is_complete=evaluation is not None and evaluation.is_complete,
            left_out=self.left_out(also_of_usual_steps=False),
            progress=self.progress(),
            samples=self._producer.display.take(),
        )

    def left_out(self, *, also_of_usual_steps: bool) -> dict[int, list[dict[str, object]]]:
        """The prompts that steps have left out and that are not reported yet, by step.

        Usually the prompts of a step are reported together when the step is trained. A step that had nothing to train on may
        never be trained, so what it leaves out is reported at once.
        """
        rows: dict[int, list[dict[str, object]]] = {}
        for step, prompt, fate in self._flow.ledger.left_out():
            if prompt.prompt_id not in self._reported and (also_of_usual_steps or self._producer.has_extended(step)):
                self._reported.add(prompt.prompt_id)
                rows.setdefault(step, []).append(self._fate_row(prompt, fate))
        return rows

    def committed(self, fates: list[tuple[IssuedPrompt, str]]) -> list[dict[str, object]]:
        """The prompts of a step that was trained, without those that are reported already."""
        rows = [self._fate_row(prompt, fate) for prompt, fate in fates if prompt.prompt_id not in self._reported]
        self._reported.difference_update(prompt.prompt_id for prompt, _ in fates)
        return rows

    def _fate_row(self, prompt: IssuedPrompt, fate: str) -> dict[str, object]:
        return {"prompt_id": prompt.prompt_id, **self._requests.row_of(prompt.issue_number), "fate": fate}
