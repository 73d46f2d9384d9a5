"""Finds out how a model's layers call their attention, by running the model on torch's meta device, which computes nothing."""

from dataclasses import dataclass
from typing import Any

PROBE = "probe_of_attention"
"""Name under which the recording attention, which only looks at its arguments, is registered with Transformers."""
WIDEST_HEAD = 256
"""Largest head dimension that FlashAttention's kernels accept."""


@dataclass(frozen=True)
class AttentionCall:
    """One layer's call of its attention."""

    head_size: int
    """Dimension of a query and of a key."""
    value_size: int
    """Dimension of a value."""
    window: int | None
    """Most tokens that a token attends to; None if the layer passes no window."""
    takes_parts: bool
    """Whether unknown arguments of the model's `forward` are passed on to the attention."""
    caps_or_sinks: bool
    """Whether scores are capped, or part of the attention goes to a sink instead of a token."""


_calls: dict[tuple[str, bool, bool], tuple[AttentionCall, ...]] = {}


def attention_calls(config: Any, *, trusted: bool = False, flat: bool = False) -> tuple[AttentionCall, ...]:
    """The attention calls of all layers, in order. Empty if the model cannot be run in this way, or has its own attention code.

    Args:
        config: config of a causal language model.
        trusted: as `trust_remote_code`.
        flat: run the model with an attention that returns (B, T, heads * value size), as sequence parallelism's attention does,
            instead of (B, T, heads, value size).
    """
    key = config.to_json_string(use_diff=False), trusted, flat
    if key not in _calls:
        try:
            _calls[key] = _run(config, trusted=trusted, flat=flat)
        except Exception:  # a model's code can raise anything
            _calls[key] = ()
    return _calls[key]


def _run(config: Any, *, trusted: bool, flat: bool) -> tuple[AttentionCall, ...]:
    import torch
    from transformers import AttentionInterface, AutoModelForCausalLM

    parts, calls = object(), []

    def look(module: Any, query: Any, key: Any, value: Any, *_: Any, **further: Any) -> tuple[Any, None]:
        calls.append(
            AttentionCall(
                head_size=query.shape[-1],
                value_size=value.shape[-1],
                window=further.get("sliding_window"),
                takes_parts=further.get("parts") is parts,
                caps_or_sinks=further.get("softcap") is not None or further.get("s_aux") is not None,
            )
        )
        output = value.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])
        return output.flatten(2) if flat else output, None

    AttentionInterface.register(PROBE, look)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=PROBE, trust_remote_code=trusted
        )
        ids, mask = torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 1, 1, 1, dtype=torch.bool)
    model.base_model(input_ids=ids, position_ids=ids, attention_mask=mask, use_cache=False, parts=parts)
    return tuple(calls)


def take_parts(config: Any, *, trusted: bool = False) -> bool:
    """Whether every layer tells its attention which tokens of a row attend to which (`learners/attention.py`)."""
    calls = attention_calls(config, trusted=trusted)
    return bool(calls) and all(call.takes_parts for call in calls)


def why_no_flash_attention(config: Any, *, trusted: bool = False) -> str:
    """Why PyTorch's FlashAttention kernels cannot compute a model's attention; "" if they can."""
    calls = attention_calls(config, trusted=trusted)
    if not take_parts(config, trusted=trusted):
        return "its layers do not tell their attention which tokens of a row are one sequence"
    for call in calls:
        if call.head_size % 8 or max(call.head_size, call.value_size) > WIDEST_HEAD or call.value_size > call.head_size:
            return f"its attention has heads of {call.head_size} and {call.value_size} numbers"
        if call.caps_or_sinks:
            return "its attention caps scores or has sinks"
    if sum(call.window is not None for call in calls) < _num_windows(config.get_text_config(), len(calls)):
        return "its layers do not tell their attention how far it may look back"
    return ""


def _num_windows(config: Any, num_layers: int) -> int:
    """Number of layers that attend to only some of the earlier tokens."""
    if kinds := getattr(config, "layer_types", None):
        return sum(kind != "full_attention" for kind in kinds)
    has_window = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return num_layers if has_window else 0
