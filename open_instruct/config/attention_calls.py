"""What the layers of a model ask of their attention, found out by running the model without numbers (on torch's meta device)."""

from dataclasses import dataclass
from typing import Any

PROBE = "probe_of_attention"
"""Name under which Transformers knows the attention that only looks at what it is given."""
WIDEST_HEAD = 256
"""Most numbers of a head that FlashAttention's kernels take."""


@dataclass(frozen=True)
class AttentionCall:
    """One layer's call of its attention."""

    head_size: int
    """Numbers of a query and of a key."""
    value_size: int
    """Numbers of a value."""
    window: int | None
    """Tokens that a token sees at most; None if the layer names no window."""
    takes_parts: bool
    """Whether the arguments of the model's `forward` that the model does not know reach the attention."""
    caps_or_sinks: bool
    """Whether scores are capped, or some of the attention goes to no token."""


_found: dict[tuple[str, bool, bool], tuple[AttentionCall, ...]] = {}


def attention_calls(config: Any, *, trusted: bool = False, flat: bool = False) -> tuple[AttentionCall, ...]:
    """The calls of all layers, in their order; none if the model cannot be run in this way, or has attention of its own.

    Args:
        config: of a causal language model.
        trusted: as `trust_remote_code`.
        flat: run the model with an attention that returns (B, T, heads * value size), as that of sequence parallelism does, in
            place of (B, T, heads, value size).
    """
    key = config.to_json_string(use_diff=False), trusted, flat
    if key not in _found:
        try:
            _found[key] = _run(config, trusted=trusted, flat=flat)
        except Exception:  # a model's code can raise anything
            _found[key] = ()
    return _found[key]


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
    """Whether every layer's attention is told which tokens of a row look at which (`learners/attention.py`)."""
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
    """Layers that look at some of the earlier tokens alone."""
    if kinds := getattr(config, "layer_types", None):
        return sum(kind != "full_attention" for kind in kinds)
    has_window = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return num_layers if has_window else 0
