"""Which families of models can be trained, judged by a model's config. docs/guides/models.md has the measurements."""

import json
import math
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from open_instruct.config.attention_calls import attention_calls, why_no_flash_attention

CHOOSE_ANOTHER = (
    "Choose a model of a family that docs/guides/models.md lists as exact, such as Qwen3, Llama, OLMo or Mixtral."
)

REFUSED = {
    "gpt_oss": "vLLM 0.32 cannot take new weights of its experts and attention sinks while it runs",
}
"""Reasons by `model_type` of config.json."""
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
_RECURRENT = ("mamba_d_state", "mamba_n_heads", "state_size", "ssm_cfg", "linear_num_key_heads", "linear_attn_config")
"""Options that only models with recurrent layers have."""


REFUSED_ON_CPU = {
    "deepseek_v2": "vLLM 0.32 computes its latent attention on CPU in bfloat16 alone",
    "deepseek_v3": "vLLM 0.32 computes its latent attention on CPU in bfloat16 alone",
}
_ROTARY_BY_LENGTH = {"dynamic", "longrope"}
"""Kinds of rotary embeddings that depend on the longest position that a learner receives."""
_WIDER_WINDOW = {"cohere2", "cohere2_moe", "cohere2_vision"}
"""Families whose sliding window is one token wider in vLLM 0.32 than in Transformers 5.19."""


def why_refused(
    config: Any, *, device_kind: str, attn_implementation: str, max_sequence_length: int, trusted: bool = False
) -> str | None:
    """Why a model of this config cannot be trained exactly; None if nothing is known against it.

    `trusted` is as `trust_remote_code`.
    """
    text = config.get_text_config()
    if reason := REFUSED.get(text.model_type) or (device_kind == "cpu" and REFUSED_ON_CPU.get(text.model_type)):
        return f"{reason}. {CHOOSE_ANOTHER}"
    if has_recurrent_layers(text):
        return (
            "it has recurrent layers, whose state would pass from one sequence to the next if several share a row. "
            + CHOOSE_ANOTHER
        )
    fitting, reason = attention_that_fits(config, attn_implementation, trusted=trusted)
    if reason:
        return f"{reason}. Use --attn_implementation auto or {fitting}, or choose another model."
    window = getattr(text, "sliding_window", None)
    if text.model_type in _WIDER_WINDOW and window is not None and max_sequence_length > window:
        return (
            f"its sliding window of {window} tokens is one token wider in the engine, and sequences of up to "
            f"{max_sequence_length} tokens exceed it. Set shorter lengths (--response_length, --max_prompt_token_length), or "
            "choose another model."
        )
    try:
        logits_scale_and_cap(text)
    except ValueError as error:
        return f"{error}. {CHOOSE_ANOTHER}"
    return None


def attention_that_fits(config: Any, attn_implementation: str, *, trusted: bool = False) -> tuple[str, str]:
    """An attention that computes a model of this config exactly. If it is not `attn_implementation`, also why; else ""."""
    cap = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    if cap is not None and attn_implementation != "eager":
        capped = f"it caps attention scores (attn_logit_softcapping={cap:g}), and the engine caps them"
        return "eager", f"{capped}, but PyTorch's fused attention does not"
    if attn_implementation != "eager" and not getattr(model_class(config), "_supports_sdpa", True):
        return "eager", "Transformers knows no fused attention for its layers"
    if attn_implementation == "flash_attention_2" and (reason := why_no_flash_attention(config, trusted=trusted)):
        return "sdpa", f"flash attention cannot compute it: {reason}"
    return attn_implementation, ""


def model_class(config: Any) -> type | None:
    """Transformers' causal language model class for this config; None if there is none, or the model brings its own code."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM._model_mapping.get(type(config), None)


def attends_fully(config: Any) -> bool:
    """Whether every layer of a model attends to all earlier tokens, so that one mask describes which tokens attend to which."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    uses_window = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    return kinds == {"full_attention"} and not uses_window and not has_recurrent_layers(config)


def why_not_divided(config: Any, *, trusted: bool = False) -> str:
    """Why the tokens of a row cannot be divided among learners; "" if they can."""
    text = config.get_text_config()
    if not attends_fully(text) or getattr(text, "kv_lora_rank", None) is not None:
        return "its attention has windows or is latent"
    if _rotary_kinds(text) & _ROTARY_BY_LENGTH:
        return "its rotary embeddings depend on the length of a row (dynamic, longrope)"
    if not attention_calls(config, trusted=trusted, flat=True):
        return f"the layers of {text.model_type} do not use the attention interface of Transformers"
    return ""


def _rotary_kinds(config: Any) -> set[str]:
    """Kinds of rotary embeddings: one kind for all layers, or one for each type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer = [entry for entry in parameters.values() if isinstance(entry, dict) and "rope_type" in entry]
    return {entry.get("rope_type", "default") for entry in by_layer or [parameters]}


def linear_cost(config: Any) -> float:
    """Operations of a layer for one token, without attention, divided by the operations of attention for one pair of tokens.

    A product with a matrix of n weights takes 2 n operations per token; attention with h query dimensions takes 4 h per pair.
    """
    hidden, heads = config.hidden_size, config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    queries, keys = heads * head_dim, (getattr(config, "num_key_value_heads", None) or heads) * head_dim
    names = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
    inner = next((size for name in names if (size := getattr(config, name, None))), 4 * hidden)
    experts = getattr(config, "num_experts_per_tok", None) or 1
    expert_size = getattr(config, "moe_intermediate_size", None) or inner
    intermediate = experts * expert_size if experts > 1 else inner
    weights = hidden * (2 * queries + 2 * keys + 3 * intermediate)
    return 2 * weights / (4 * queries)


Shapes = dict[str, list[int]]
"""Shapes of the tensors in a checkpoint, by name."""
MAX_HEADER_BYTES = 100_000_000
"""Longest header of a safetensors file; the library refuses a longer one."""
_SAVE_AGAIN = "Save or download it again."


class BadWeights(ValueError):
    """Weight files that cannot be loaded; the message says why."""


def problem_with_weights(directory: Path) -> str:
    """What is wrong with the weights in a model's directory; "" if they fit the model that the config describes."""
    shapes: Shapes = {}
    try:
        for path in _weight_files(directory):
            shapes |= _shapes_in_safetensors(path) if path.suffix == ".safetensors" else _shapes_in_pickle(path)
    except BadWeights as error:
        return f"{error}. {_SAVE_AGAIN}"
    return _problem_with_shapes(directory, shapes)


def _weight_files(directory: Path) -> list[Path]:
    """The files that Transformers or vLLM reads. If a single file and an index both exist, the two libraries prefer different
    ones, so both count."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        single, index = directory / name, directory / f"{name}.index.json"
        try:
            parts = _files_of_index(index) if index.is_file() else []
        except (OSError, ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
            raise BadWeights(f"{index.name} cannot be read") from error
        if files := parts + [single] * single.exists():
            return files
    raise BadWeights("no weights in it (model.safetensors)")


def _files_of_index(index: Path) -> list[Path]:
    names = set(json.loads(index.read_text())["weight_map"].values())
    if not names:
        raise ValueError("it names no files")
    return sorted(index.parent / name for name in names)


def _shapes_in_safetensors(path: Path) -> Shapes:
    """Shapes in a safetensors file, checked against its size. Its layout is <bytes of the header><header, JSON><tensors>."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = path.stat().st_size
            header = json.loads(file.read(length)) if 0 < length <= min(size, MAX_HEADER_BYTES) else None
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}  # type: ignore[union-attr]
        expected = 8 + length + max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
        shapes = {name: [int(side) for side in entry["shape"]] for name, entry in tensors.items()}
    except FileNotFoundError as error:
        raise BadWeights(f"{path.name} is missing") from error
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise BadWeights(f"{path.name} is damaged") from error
    if size != expected:
        raise BadWeights(f"{path.name} has {size} bytes instead of {expected}")
    return shapes


def _shapes_in_pickle(path: Path) -> Shapes:
    """Always empty, because the shapes are known only after reading the tensors; checks that the file can be opened.

    PyTorch writes a zip archive; before version 1.6 it wrote a bare pickle.
    """
    try:
        with open(path, "rb") as file:
            if file.read(2) != b"\x80\x02":
                zipfile.ZipFile(file).close()
    except FileNotFoundError as error:
        raise BadWeights(f"{path.name} is missing") from error
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise BadWeights(f"{path.name} is damaged") from error
    return {}


def _problem_with_shapes(directory: Path, shapes: Shapes) -> str:
    """What is wrong with the shapes, or "". Transformers itself compares, with tensors that have no memory, because it renames,
    splits and joins some tensors as it loads them."""
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception:  # `model_can_be_read` reports it
        return ""
    num_layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if shapes and isinstance(num_layers, int) and num_layers > len(shapes):  # making so many could take for ever
        return f"its config.json says {num_layers} layers, and its weights are {len(shapes)} tensors. {_SAVE_AGAIN}"
    try:
        missing, mismatched = _compare(config, shapes)
    except Exception as error:  # impossible sizes can make a model's code raise anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].partition(". ")[0].rstrip(".")
        return f"its config.json and its weights make no model ({reason:.200}). Choose another, or save or download it again."
    if missing:
        return (
            f"its weights lack {missing[0]}"
            + (f" and {len(missing) - 1} more" if missing[1:] else "")
            + f". {_SAVE_AGAIN}"
        )
    if mismatched:
        name, weights_shape, config_shape = mismatched[0]
        return (
            f"{name} has the shape {list(weights_shape)} in its weights, and {list(config_shape)} by its config.json. "
            f"{_SAVE_AGAIN}"
        )
    return ""


def _compare(config: Any, shapes: Shapes) -> tuple[list[str], list[tuple[str, Any, Any]]]:
    """Tensors of the model that are missing, and tensors of another shape: name, shape found, shape wanted.

    Without `shapes` the model is only made, and nothing is compared. Quantized tensors are not compared, because their shapes
    differ from the model's.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        architecture = type(AutoModelForCausalLM.from_config(config, trust_remote_code=False))
        weights = {name: torch.empty(shape) for name, shape in shapes.items()}
    if not shapes or getattr(config, "quantization_config", None) is not None:
        return [], []
    with _silent_transformers():
        _, info = architecture.from_pretrained(
            None,
            config=config,
            state_dict=weights,
            device_map="meta",
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    return sorted(info["missing_keys"]), sorted(info["mismatched_keys"])


@contextmanager
def _silent_transformers() -> Iterator[None]:
    """Inside the block Transformers shows no progress bar and logs nothing."""
    from transformers.utils import logging

    verbosity, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()


def has_recurrent_layers(config: Any) -> bool:
    other_layers = set(getattr(config, "layer_types", None) or ()) - _ATTENTION
    return bool(other_layers) or any(getattr(config, name, None) is not None for name in _RECURRENT)


def logits_scale_and_cap(config: Any) -> tuple[float, float | None]:
    """What a model family does to its logits after the head: the factor that multiplies them, and their cap or None.

    Granite divides (`logits_scaling`), Cohere multiplies (`logit_scale`), Gemma 2 caps (`final_logit_softcapping`: with 30,
    a logit of 60 becomes 30 * tanh(2) = 28.9).

    Raises ValueError if the family does something else to its logits.
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
