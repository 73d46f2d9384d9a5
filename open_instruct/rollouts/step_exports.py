"""Writes what the record holds of a training step in three forms: what it trains on as a file that can be read as data again, and
all responses as open-instruct's rollouts and as text."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.data.prompt_dataset import PromptDataset, PromptRow
from open_instruct.data.sample_record import ItemShape, append_record, non_tensor_fields, to_proto_item
from open_instruct.data_types import Sample, TrainingSample
from open_instruct.record.groups import ReadGroup, groups_of
from open_instruct.report.metrics_file import append_lines, write_lines
from open_instruct.rollouts.transcripts import transcript, verdicts, write_transcripts
from open_instruct.scored_groups import CONSUMED, TOO_OLD, ScoredGroup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SAMPLES, ROLLOUTS, TRANSCRIPTS = STEP_FORMS = "samples", "rollouts", "transcripts"
"""Forms, and names of their folders."""
LONGEST_GROUND_TRUTH = 1000
"""Characters of a ground truth that a transcript shows; the tests of a program may be long."""


_Group = tuple[ScoredGroup, Sequence[TrainingSample] | None, str]
"""A group, its samples that are trained on (None: the step leaves it out), and its fate."""


class RecordedRows:
    """Rows of the data, as far as the groups of a step show them."""

    def __init__(self, groups: Sequence[ReadGroup]) -> None:
        self._groups = {entry.group.result.index: entry for entry in groups}

    def __getitem__(self, index: int) -> PromptRow:
        entry = self._groups[index]
        nothing = np.zeros(0, np.int32)
        return PromptRow(nothing, entry.ground_truth, entry.group.dataset, raw_query="", place=entry.row)


Rows = PromptDataset | RecordedRows
"""Rows of the training data by their number."""


def write_samples(
    args: GRPOConfig,
    training_step: int,
    trained: Sequence[tuple[ScoredGroup, Sequence[TrainingSample]]],
    rows: Rows,
    tokenizer: "PreTrainedTokenizerBase",
) -> None:
    """Write the samples that a step trains on to a file of its own, which a resumed run writes again."""
    path = Path(args.output_dir) / SAMPLES / f"step_{training_step:06d}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    shape = ItemShape(args.lengths.prompt, args.lengths.response, tokenizer.pad_token_id)
    items = []
    for group, samples in trained:
        row = rows[group.result.index]
        fields = non_tensor_fields(
            data_source=row.dataset,
            ground_truth=row.ground_truth,
            rendered_prompt=str(tokenizer.decode(group.first.prompt_ids)),
            uid=group.result.prompt_id,
            index=group.result.index,
            row=row.place,
        )
        meta = _meta(training_step, group)
        items += [
            to_proto_item(
                sample.query, sample.response, shape, mask=sample.mask, non_tensor_batch=fields, meta_info=meta
            )
            for sample in samples
        ]
    append_record(path, items)


def _left_out(groups: Sequence[ReadGroup]) -> list[_Group]:
    """The groups that a step leaves out."""
    return [(entry.group, None, entry.outcome) for entry in groups if entry.outcome not in (CONSUMED, TOO_OLD)]


def _issue_number(entry: ReadGroup) -> int:
    return int(entry.group.result.prompt_id.rpartition("-")[2])


@dataclass
class _Written:
    """What the files of an open step hold already."""

    num_samples: int = 0
    num_prompts: int = 0


class StepExports:
    """Writes the files of training steps from the rows of the record: as it is written (`--save_traces`), or later
    (`open_instruct.export`).

    Groups that an open step leaves out are appended as soon as the record has them. When the step is trained, its files are
    written again as a whole. Fields and file names of the rollouts are those of open-instruct's `RolloutRecord`; `prompt_id`,
    `row` and `outcome` are further fields.

    Args:
        dataset: the rows of the training data; None: as the record shows them, with long ground truths cut off.
    """

    def __init__(
        self,
        args: GRPOConfig,
        dataset: PromptDataset | None,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        forms: Collection[str] = STEP_FORMS,
    ) -> None:
        self._args = args
        self._forms = forms
        self._dataset = dataset
        self._tokenizer = tokenizer
        self._rollouts = Path(args.rollouts_save_path or Path(args.output_dir) / ROLLOUTS)
        self._transcripts = Path(args.output_dir) / TRANSCRIPTS
        self._written: dict[int, _Written] = {}
        """By step, for the steps that are open."""

    def logged(self, training_step: int, table: pa.Table) -> None:
        """The record has further rows of an open step."""
        groups = list(groups_of(table))
        if left_out := _left_out(groups):
            self._write(training_step, left_out, self._rows(groups))

    def committed(self, training_step: int, table: pa.Table) -> None:
        """A step is trained, and these are its rows."""
        groups = list(groups_of(table))
        rows = self._rows(groups)
        trained = [(entry.group, entry.trained or []) for entry in sorted(groups, key=_issue_number) if entry.trained]
        self._written.pop(training_step, None)
        self._write(training_step, [*_left_out(groups), *((*entry, CONSUMED) for entry in trained)], rows)
        self._written.pop(training_step, None)
        if SAMPLES in self._forms:
            write_samples(self._args, training_step, trained, rows, self._tokenizer)

    def _rows(self, groups: Sequence[ReadGroup]) -> Rows:
        return self._dataset if self._dataset is not None else RecordedRows(groups)

    def _write(self, training_step: int, groups: Sequence[_Group], rows: Rows) -> None:
        """Append groups to the rollouts and transcripts of a step, or begin these files with them."""
        begins_anew = training_step not in self._written
        counts = self._written.setdefault(training_step, _Written())
        records: list[dict[str, Any]] = []
        entries: list[tuple[str, str]] = []
        for group, samples, fate in groups:
            row = rows[group.result.index]
            for number, sample, reward, training_sample in _samples_with(self._args, group, samples):
                record = self._record(sample, row, reward, training_sample) | {"step": training_step, "outcome": fate}
                record["prompt_id"] = group.result.prompt_id
                records.append(record | {"sample_idx": counts.num_samples, "prompt_idx": counts.num_prompts})
                if TRANSCRIPTS in self._forms:
                    entries.append(self._entry(group, number, row, reward, training_sample, fate))
                counts.num_samples += 1
            counts.num_prompts += 1
        if ROLLOUTS in self._forms:
            self._describe_run()
            append_lines(self._rollouts_of(training_step), records, begins_anew=begins_anew)
        if TRANSCRIPTS in self._forms:
            write_transcripts(self._transcripts_of(training_step), entries, begins_anew=begins_anew)

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


def _meta(training_step: int, group: ScoredGroup) -> dict[str, Any]:
    meta = {"training_step": training_step, "engine_id": group.result.engine_id}
    sample = group.first
    if sample.kind:
        meta |= {"turn_type": sample.kind, "turn_number": sample.number, "weight": sample.weight}
    return meta
