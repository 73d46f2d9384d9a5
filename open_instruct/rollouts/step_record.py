"""What a training step trains on, as a file that can be read as data again (`--save_traces`)."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from open_instruct.config.options import GRPOConfig
from open_instruct.data.prompt_dataset import PromptDataset
from open_instruct.data.sample_record import ItemShape, append_record, non_tensor_fields, to_proto_item
from open_instruct.rollouts.step_assembly import StepAssembly
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
    """The samples of a step in a file of its own, which a resumed run writes anew."""
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
        )
        meta = _meta(assembly.training_step, group)
        items += [
            to_proto_item(
                sample.query, sample.response, shape, mask=sample.mask, non_tensor_batch=fields, meta_info=meta
            )
            for sample in samples
        ]
    append_record(path, items)


def _shape(args: GRPOConfig, pad_token_id: int) -> ItemShape:
    return ItemShape(args.lengths.prompt, args.lengths.response, pad_token_id)


def _meta(training_step: int, group: ScoredGroup) -> dict[str, Any]:
    meta = {"training_step": training_step, "engine_id": group.result.engine_id}
    sample = group.first
    if sample.kind:
        meta |= {"turn_type": sample.kind, "turn_number": sample.number, "weight": sample.weight}
    return meta
