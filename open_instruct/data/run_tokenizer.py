"""The tokenizer of a run, read in the same way by every part that needs it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from open_instruct.config.options import GRPOConfig


def read_tokenizer(name: str, revision: str | None) -> Any:
    """Tokenizer from a local directory, the cache of the Hugging Face hub, or the hub; `revision` None is the default branch."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name, revision=revision)


def tokenizer_of_run(args: "GRPOConfig") -> Any:
    """The tokenizer of a run whose options have been checked."""
    return read_tokenizer(args.tokenizer_name, args.tokenizer_revision)
