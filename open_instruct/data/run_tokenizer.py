"""The tokenizer of a run, read in the same way by every part that needs it."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from open_instruct.chat_templates import AS_IT_IS, TokenizerSetup

if TYPE_CHECKING:
    from open_instruct.config.grpo_config import GRPOConfig


def read_tokenizer(name: str, revision: str | None, setup: TokenizerSetup = AS_IT_IS) -> Any:
    """The tokenizer from a local directory, the Hugging Face cache, or the hub. `revision` None is the default branch."""
    return setup.apply(_read(name, revision, trust_remote_code=setup.trust_remote_code))


def _read(name: str, revision: str | None, *, trust_remote_code: bool) -> Any:
    if _is_plain(
        Path(name)
    ):  # without the import of torch, which `AutoTokenizer` needs for configs of models: 4 s of CPU time
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(name)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)


def tokenizer_of_run(args: "GRPOConfig") -> Any:
    """The tokenizer of a run whose options have been checked."""
    return read_tokenizer(args.tokenizer_name, args.revision_of_tokenizer, args.tokenizer_setup)


def _is_plain(directory: Path) -> bool:
    """Whether a local directory has a tokenizer that needs no code of its model, by its `tokenizer_config.json`."""
    try:
        settings = json.loads((directory / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError):
        return False
    return (
        isinstance(settings, dict)
        and settings.get("tokenizer_class") == "TokenizersBackend"
        and "auto_map" not in settings
    )
