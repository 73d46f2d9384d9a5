"""Writes the trained model as files that Transformers, peft and vLLM read."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.data.run_tokenizer import tokenizer_of_run
from open_instruct.learners.lora import save_adapter
from open_instruct.learners.weight_sync import DeepSpeedWeightSource
from open_instruct.storage.checkpoints import sync_to_disk


def save_model_files(
    directory: Path, args: GRPOConfig, model: Any, source: DeepSpeedWeightSource, *, rank: int
) -> None:
    """Write the model, or with LoRA only its adapter (unless `save_merged_lora`), and the tokenizer. Every rank calls it, and the
    first rank writes. When the call returns on the first rank, the files are on disk."""
    if args.use_peft and not args.save_merged_lora:
        adapter = source.adapter()
        if rank == 0:
            save_adapter(model, adapter, directory)
    elif rank == 0:
        state = {name: tensor.cpu() for name, tensor in source}
        with _any_generation_config(model, directory):
            # The source gives the checkpoint's names already, and a second conversion would change them.
            model.save_pretrained(directory, state_dict=state, save_original_format=False)
    else:
        for _ in source:  # take part in the gathers
            pass
    if rank == 0:
        tokenizer_of_run(args).save_pretrained(directory)
        sync_to_disk([*directory.rglob("*"), directory])


@contextmanager
def _any_generation_config(model: Any, directory: Path) -> Iterator[None]:
    """Let the model that is saved in the block keep its `generation_config.json`, whatever its content.

    Transformers 5.19 reads a file that has a temperature but no `do_sample`, as some models have it, and refuses to write it.
    """
    from transformers.utils import GENERATION_CONFIG_NAME

    own = getattr(model, "generation_config", None)
    if own is None:
        yield
        return
    model.generation_config = type(own)()
    try:
        yield
    finally:
        model.generation_config = own
    own.to_json_file(directory / GENERATION_CONFIG_NAME, keys_to_pop=["compile_config"])
