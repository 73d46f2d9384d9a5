"""Which families of models can be trained, as far as a model's config says; docs/models.md has what was measured."""

import json
import math
from pathlib import Path
from typing import Any

CHOOSE_ANOTHER = "Choose a model of a family that docs/models.md lists as exact, such as Qwen3, Llama, OLMo or Mixtral."

REFUSED = {
    "gpt_oss": "vLLM 0.32 cannot take new weights of its experts and attention sinks while it runs",
}
"""By `model_type` in config.json, with the reason."""
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
_RECURRENT = ("mamba_d_state", "mamba_n_heads", "state_size", "ssm_cfg", "linear_num_key_heads", "linear_attn_config")
"""Options that only models with recurrent layers have."""


REFUSED_ON_CPU = {
    "deepseek_v2": "vLLM 0.32 computes its latent attention on CPU in bfloat16 alone",
    "deepseek_v3": "vLLM 0.32 computes its latent attention on CPU in bfloat16 alone",
}
_WIDER_WINDOW = {"cohere2", "cohere2_moe", "cohere2_vision"}
"""Families whose sliding window is one token wider in vLLM 0.32 than in Transformers 5.19."""


def why_refused(config: Any, *, device_kind: str, attn_implementation: str, max_sequence_length: int) -> str | None:
    """Why a model of this config cannot be trained exactly; None if nothing is known against it."""
    text = config.get_text_config()
    if reason := REFUSED.get(text.model_type) or (device_kind == "cpu" and REFUSED_ON_CPU.get(text.model_type)):
        return f"{reason}. {CHOOSE_ANOTHER}"
    if has_recurrent_layers(text):
        return (
            "it has recurrent layers, whose state would pass from one sequence to the next where several share a row. "
            + CHOOSE_ANOTHER
        )
    if getattr(text, "attn_logit_softcapping", None) is not None and attn_implementation == "sdpa":
        return (
            f"it caps attention scores (attn_logit_softcapping={text.attn_logit_softcapping:g}), which the engine does and "
            "PyTorch's sdpa does not. Use --attn_implementation flash_attention_2 on a GPU, or choose another model."
        )
    window = getattr(text, "sliding_window", None)
    if text.model_type in _WIDER_WINDOW and window is not None and max_sequence_length > window:
        return (
            f"its sliding window of {window} tokens is one token wider in the engine, and sequences may have "
            f"{max_sequence_length}. Set shorter lengths (--response_length, --max_prompt_token_length), or choose another model."
        )
    try:
        logits_scale_and_cap(text)
    except ValueError as error:
        return f"{error}. {CHOOSE_ANOTHER}"
    return None


def problem_with_weights(directory: Path) -> str:
    """What is wrong with the weight files of a model's directory; nothing where they can be read."""
    index = directory / "model.safetensors.index.json"
    try:
        names = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {"model.safetensors"}
    except (OSError, ValueError, LookupError, AttributeError, TypeError):
        return f"{index.name} cannot be read. Save or download it again."
    if not index.is_file() and not (directory / "model.safetensors").is_file():
        others = any(directory.glob("*.bin")) or any(directory.glob("*.safetensors"))
        return "" if others else "no weights in it (model.safetensors). Save or download it again."
    for name in sorted(names):
        if problem := _problem_with_file(directory / name):
            return f"{name} {problem}. Save or download it again."
    return ""


def _problem_with_file(path: Path) -> str:
    """A safetensors file says in its header how long it is: <bytes of the header><header, JSON><tensors>."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = path.stat().st_size
            header = json.loads(file.read(length)) if 0 < length <= size else None
        ends = [one["data_offsets"][1] for name, one in header.items() if name != "__metadata__"]  # type: ignore[union-attr]
    except FileNotFoundError:
        return "is missing"
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return "is damaged"
    expected = 8 + length + max(ends, default=0)
    return "" if size == expected else f"has {size} bytes instead of {expected}"


def has_recurrent_layers(config: Any) -> bool:
    others = set(getattr(config, "layer_types", None) or ()) - _ATTENTION
    return bool(others) or any(getattr(config, name, None) is not None for name in _RECURRENT)


def logits_scale_and_cap(config: Any) -> tuple[float, float | None]:
    """What a family does to its logits after the head: the factor that it multiplies them by, and their cap.

    Granite divides (`logits_scaling`), Cohere multiplies (`logit_scale`), Gemma 2 caps (`final_logit_softcapping`: with 30,
    a logit of 60 becomes 30 * tanh(2) = 28.9).

    Raises ValueError where a family does something else.
    """
    config = config.get_text_config()
    factors = [getattr(config, name, None) or 1.0 for name in ("logit_scale", "lm_head_multiplier")]
    scale = math.prod(factors) / (getattr(config, "logits_scaling", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    if getattr(config, "output_multiplier", None) not in (None, 1) or (scale != 1 and cap is not None):
        raise ValueError(
            f"models of type {config.model_type} change their logits after the head in a way not known here"
        )
    return scale, cap
