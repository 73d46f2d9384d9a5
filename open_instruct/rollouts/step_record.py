"""Saves the responses of a training step (`--save_traces`) in three forms: what it trains on as a file that can be read as data
again, and all responses as open-instruct's rollouts and as text."""

import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.data.prompt_dataset import PromptDataset, PromptRow
from open_instruct.data.sample_record import ItemShape, append_record, non_tensor_fields, to_proto_item
from open_instruct.data_types import Sample, TrainingSample
from open_instruct.report.metrics_file import append_lines, write_lines
from open_instruct.rollouts.prompt_ledger import CONSUMED
from open_instruct.rollouts.step_assembly import StepAssembly
from open_instruct.rollouts.transcripts import keep_transcripts, transcript, verdicts, write_transcripts
from open_instruct.scored_groups import ScoredGroup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROLLOUTS, TRANSCRIPTS = "rollouts", "transcripts"
"""Forms of `StepTraces`, and names of their folders."""
LONGEST_GROUND_TRUTH = 1000
"""Characters of a ground truth that a transcript shows; the tests of a program may be long."""


def write_step_record(
    args: GRPOConfig,
    assembly: StepAssembly,
    dataset: PromptDataset,
    tokenizer: "PreTrainedTokenizerBase",
    pad_token_id: int,
) -> None:
    """Write the samples of a step to a file of its own, which a resumed run writes again."""
    path = Path(args.output_dir) / "samples" / f"step_{assembly.training_step:06d}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    shape = _shape(args, pad_token_id)
    items = []
    for group, samples in assembly.trained:
        row = dataset[group.result.index]
        fields = non_tensor_fields(
            data_source=row.dataset,
            ground_truth=row.ground_truth,
            rendered_prompt=str(tokenizer.decode(group.first.prompt_ids)),
            uid=group.result.prompt_id,
            index=group.result.index,
            row=row.place,
        )
        meta = _meta(assembly.training_step, group)
        items += [
            to_proto_item(
                sample.query, sample.response, shape, mask=sample.mask, non_tensor_batch=fields, meta_info=meta
            )
            for sample in samples
        ]
    append_record(path, items)


@dataclass
class _Written:
    """What the files of a step hold already."""

    num_samples: int = 0
    num_prompts: int = 0


class StepTraces:
    """Writes the responses of each step as text (`transcripts.py`) and as open-instruct's rollouts.

    Groups that a step leaves out are written as soon as they are left out, and the others when the step is complete. A resumed
    run writes the files of a step again, except the groups whose tokens it does not have any more. Fields and file names of the
    rollouts are those of open-instruct's `RolloutRecord`; `prompt_id`, `row` and `outcome` are further fields.
    """

    def __init__(
        self,
        args: GRPOConfig,
        dataset: PromptDataset,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        forms: Collection[str] = (ROLLOUTS, TRANSCRIPTS),
    ) -> None:
        self._args = args
        self._forms = forms
        self._dataset = dataset
        self._tokenizer = tokenizer
        self._rollouts = Path(args.rollouts_save_path or Path(args.output_dir) / ROLLOUTS)
        self._transcripts = Path(args.output_dir) / TRANSCRIPTS
        self._written: dict[int, _Written] = {}
        """By step, for the steps that are not complete."""

    def write_left_out(
        self, training_step: int, rollouts: Sequence[tuple[ScoredGroup, str]], *, forgotten: Collection[str] = ()
    ) -> None:
        """Write rollouts that the step leaves out, each with its fate.

        Args:
            forgotten: prompts whose tokens a resumed run does not have. What the step's files hold of these prompts stays.
        """
        if forgotten and training_step not in self._written:
            self._keep(training_step, forgotten)
        if rollouts:
            self._write(training_step, [(rollout, None, fate) for rollout, fate in rollouts])

    def write_trained(self, assembly: StepAssembly) -> None:
        """Write the groups that a complete step is trained on, in the order of issue."""
        self._write(assembly.training_step, [(group, samples, CONSUMED) for group, samples in assembly.trained])
        self._written.pop(assembly.training_step, None)

    def _write(
        self, training_step: int, groups: "Sequence[tuple[ScoredGroup, Sequence[TrainingSample] | None, str]]"
    ) -> None:
        begins_anew = training_step not in self._written
        counts = self._written.setdefault(training_step, _Written())
        records: list[dict[str, Any]] = []
        entries: list[tuple[str, str]] = []
        for group, samples, fate in groups:
            row = self._dataset[group.result.index]
            for number, sample, reward, training_sample in _samples_with(self._args, group, samples):
                record = self._record(sample, row, reward, training_sample) | {"step": training_step, "outcome": fate}
                record["prompt_id"] = group.result.prompt_id
                records.append(record | {"sample_idx": counts.num_samples, "prompt_idx": counts.num_prompts})
                entries.append(self._entry(group, number, row, reward, training_sample, fate))
                counts.num_samples += 1
            counts.num_prompts += 1
        if ROLLOUTS in self._forms:
            self._describe_run()
            append_lines(self._rollouts_of(training_step), records, begins_anew=begins_anew)
        if TRANSCRIPTS in self._forms:
            write_transcripts(self._transcripts_of(training_step), entries, begins_anew=begins_anew)

    def _keep(self, training_step: int, prompt_ids: Collection[str]) -> None:
        """Leave in a step's files only what an earlier process has written of these prompts, if there is anything."""
        path, records = self._rollouts_of(training_step), []
        prompts: dict[str, int] = {}
        for line in path.read_bytes().splitlines() if path.exists() else []:
            with suppress(ValueError):  # a line that was cut off
                record = json.loads(line)
                if record.get("prompt_id") in prompt_ids:
                    place = prompts.setdefault(record["prompt_id"], len(prompts))
                    records.append(record | {"sample_idx": len(records), "prompt_idx": place})
        if records:
            write_lines(path, records)
            keep_transcripts(self._transcripts_of(training_step), prompt_ids)
            self._written[training_step] = _Written(len(records), len(prompts))

    def _rollouts_of(self, training_step: int) -> Path:
        return self._rollouts / f"{self._args.run_title}_rollouts_{training_step:06d}.jsonl"

    def _transcripts_of(self, training_step: int) -> Path:
        return self._transcripts / f"step_{training_step:06d}.txt"

    def _record(
        self, sample: Sample, row: PromptRow, reward: float, training_sample: TrainingSample | None
    ) -> dict[str, Any]:
        return {
            "row": row.place,
            "prompt_tokens": sample.prompt_ids,
            "response_tokens": sample.response_ids,
            "reward": reward,
            "advantage": 0.0 if training_sample is None else training_sample.advantage,
            "finish_reason": sample.finish_reason,
            "dataset": row.dataset,
            "ground_truth": row.ground_truth,
            "request_info": None,
            "logprobs": sample.logprobs,
        }

    def _entry(
        self,
        group: ScoredGroup,
        number: int,
        row: PromptRow,
        reward: float,
        training_sample: TrainingSample | None,
        fate: str,
    ) -> tuple[str, str]:
        """Headline and text of a transcript."""
        outcome = f"left out ({fate})" if training_sample is None else f"advantage {training_sample.advantage:.4g}"
        sample = group.samples[number]
        headline = (
            f"{group.result.prompt_id}, sample {number}, {row.place} ({row.dataset}): reward {reward:.4g}, {outcome}"
        )
        ground_truth = _ground_truth_in_words(row.ground_truth)
        text = transcript(
            sample, training_sample, self._decode, ground_truth=ground_truth, verdicts=verdicts(group, number)
        )
        return f"{headline}, {sample.finish_reason}", text

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))

    def _describe_run(self) -> None:
        """Write the file that says which run the rollouts are of."""
        metadata = self._rollouts / f"{self._args.run_title}_metadata.jsonl"
        if not metadata.exists():
            started = datetime.now(UTC).isoformat(timespec="seconds")
            names = {"run_name": self._args.run_title, "model_name": self._args.model_name_or_path}
            write_lines(metadata, [{**names, "timestamp": started}])


def _samples_with(
    args: GRPOConfig, group: ScoredGroup, samples: Sequence[TrainingSample] | None
) -> Iterator[tuple[int, Sample, float, TrainingSample | None]]:
    """Number in the group, sample, reward, and training sample: of the samples that are trained on, or of all samples of a group
    that is left out (`samples` is None)."""
    trained = {id(sample.response): sample for sample in samples or ()}
    for number, (sample, reward) in enumerate(zip(group.samples, group.rewards(args.verification_reward), strict=True)):
        training_sample = trained.get(id(sample.response_ids))
        if samples is None or training_sample is not None:
            yield number, sample, float(reward), training_sample


def _ground_truth_in_words(ground_truth: object) -> str:
    text = str(ground_truth)
    return text if len(text) <= LONGEST_GROUND_TRUTH else f"{text[:LONGEST_GROUND_TRUTH]} … ({len(text):,} characters)"


def _shape(args: GRPOConfig, pad_token_id: int) -> ItemShape:
    return ItemShape(args.lengths.prompt, args.lengths.response, pad_token_id)


def _meta(training_step: int, group: ScoredGroup) -> dict[str, Any]:
    meta = {"training_step": training_step, "engine_id": group.result.engine_id}
    sample = group.first
    if sample.kind:
        meta |= {"turn_type": sample.kind, "turn_number": sample.number, "weight": sample.weight}
    return meta
