"""Saves what a training step trains on (`--save_traces`) in three forms: a file that can be read as data again, open-instruct's
rollouts, and text."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.data.prompt_dataset import PromptDataset
from open_instruct.data.sample_record import ItemShape, append_record, non_tensor_fields, to_proto_item
from open_instruct.data_types import Sample, TrainingSample
from open_instruct.report.metrics_file import write_lines
from open_instruct.rollouts.step_assembly import StepAssembly
from open_instruct.rollouts.transcripts import transcript, write_transcripts
from open_instruct.scored_groups import ScoredGroup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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


def write_step_transcripts(
    args: GRPOConfig, assembly: StepAssembly, dataset: PromptDataset, tokenizer: "PreTrainedTokenizerBase"
) -> None:
    """Write the samples of a step as text (`transcripts.py`)."""

    def decode(token_ids: list[int]) -> str:
        return str(tokenizer.decode(token_ids, skip_special_tokens=False))

    entries = []
    for group, samples in assembly.trained:
        row = dataset[group.result.index]
        for number, sample, reward, of_step in _trained_samples(args, group, samples):
            headline = (
                f"{group.result.prompt_id}, sample {number}, {row.place} ({row.dataset}): reward {reward:.4g}, "
                f"advantage {of_step.advantage:.4g}, {sample.finish_reason}"
            )
            entries.append((headline, transcript(sample, of_step, decode)))
    write_transcripts(Path(args.output_dir) / "transcripts" / f"step_{assembly.training_step:06d}.txt", entries)


def _trained_samples(
    args: GRPOConfig, group: ScoredGroup, samples: Sequence[TrainingSample]
) -> Iterator[tuple[int, Sample, float, TrainingSample]]:
    """The samples of a group that are trained on: number in the group, sample, reward, and training sample."""
    trained = {id(sample.response): sample for sample in samples}
    for number, (sample, reward) in enumerate(zip(group.samples, group.rewards(args.verification_reward), strict=True)):
        if (of_step := trained.get(id(sample.response_ids))) is not None:
            yield number, sample, float(reward), of_step


def write_rollouts(args: GRPOConfig, assembly: StepAssembly, dataset: PromptDataset) -> None:
    """Write the samples of a step with rewards, advantages and log-probabilities, one line per sample. Fields and file names are
    those of open-instruct's `RolloutRecord`, and `row` is a further field. Each step has its own file, which a resumed run writes
    again."""
    directory = Path(args.rollouts_save_path or Path(args.output_dir) / "rollouts")
    metadata = directory / f"{args.run_title}_metadata.jsonl"
    if not metadata.exists():
        started = datetime.now(UTC).isoformat(timespec="seconds")
        names = {"run_name": args.run_title, "model_name": args.model_name_or_path}
        write_lines(metadata, [{**names, "timestamp": started}])
    rows: list[dict[str, Any]] = []
    for prompt_idx, (group, samples) in enumerate(assembly.trained):
        row = dataset[group.result.index]
        for _, sample, reward, of_step in _trained_samples(args, group, samples):
            rows.append(
                {
                    "step": assembly.training_step,
                    "sample_idx": len(rows),
                    "prompt_idx": prompt_idx,
                    "row": row.place,
                    "prompt_tokens": sample.prompt_ids,
                    "response_tokens": sample.response_ids,
                    "reward": reward,
                    "advantage": of_step.advantage,
                    "finish_reason": sample.finish_reason,
                    "dataset": row.dataset,
                    "ground_truth": row.ground_truth,
                    "request_info": None,
                    "logprobs": sample.logprobs,
                }
            )
    write_lines(directory / f"{args.run_title}_rollouts_{assembly.training_step:06d}.jsonl", rows)


def _shape(args: GRPOConfig, pad_token_id: int) -> ItemShape:
    return ItemShape(args.lengths.prompt, args.lengths.response, pad_token_id)


def _meta(training_step: int, group: ScoredGroup) -> dict[str, Any]:
    meta = {"training_step": training_step, "engine_id": group.result.engine_id}
    sample = group.first
    if sample.kind:
        meta |= {"turn_type": sample.kind, "turn_number": sample.number, "weight": sample.weight}
    return meta
