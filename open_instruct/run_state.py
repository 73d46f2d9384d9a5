"""The state file of a checkpoint: where the run stands, and whether a run can go on from what such a file says.

    {"identity": run_identity(…), "progress": {"training_step": 2, …}, "evaluation_of": null}

The file lies where anybody may have written it, so that its shape is checked here, in one place, before anything reads it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from open_instruct.run_identity import OPTIONS

Check = Callable[[Any], bool]


@dataclass
class Progress:
    """Where the run stands; all of it is in a checkpoint."""

    training_step: int = 0
    episode: int = 0
    num_total_tokens: int = 0
    wall_seconds: float = 0.0
    eval_accuracy_before: float | None = None
    eval_accuracy_after: float | None = None


def mistake_in(state: Mapping[str, Any], training_step: int) -> str:
    """What is wrong with the state of a step's checkpoint, in words; nothing where this program can go on from it."""
    progress: Any = state.get("progress")
    if not _is_identity(state.get("identity")):
        return "does not say of which run it is"
    if not _has_at_most(_PROGRESS)(progress):
        return "does not say where that run stood"
    if (step := progress.get("training_step")) != training_step:
        return f"is of step {step}, and its directory of step {training_step}"
    if "evaluation_of" not in state or not _or_none(_is_count)(state["evaluation_of"]):
        return "does not say which evaluation was under way"
    return ""


# --- shapes of JSON values --------------------------------------------------------------------------------------------


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0  # True is an int for `isinstance`


def _is_number(value: Any) -> bool:
    return _is_count(value) or (isinstance(value, float) and math.isfinite(value) and value >= 0)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _has(checks: Mapping[str, Check]) -> Check:
    """An object with all of these, and perhaps more."""
    return lambda value: (
        isinstance(value, dict) and all(name in value and is_so(value[name]) for name, is_so in checks.items())
    )


def _has_at_most(checks: Mapping[str, Check]) -> Check:
    return lambda value: (
        isinstance(value, dict) and all(name in checks and checks[name](one) for name, one in value.items())
    )


_PROGRESS = {
    "training_step": _is_count,
    "episode": _is_count,
    "num_total_tokens": _is_count,
    "wall_seconds": _is_number,
    "eval_accuracy_before": _or_none(_is_number),
    "eval_accuracy_after": _or_none(_is_number),
}
_FINGERPRINT = _has({"rows": _is_count, "prompts": _is_text, "ground_truths": _is_text, "verifiers": _is_text})
_TOKENIZER = {
    "name": _is_text,
    "words": _is_text,
    "chat_template": _is_text,
    "special": _is_text,
    "date": _or_none(_is_text),
}
_DATA: dict[str, Check] = {
    "texts": lambda value: isinstance(value, dict) and all(map(_or_none(_is_text), value.values())),
    "tokenizer": _has(_TOKENIZER),
    "train": _FINGERPRINT,
    "eval": _or_none(_FINGERPRINT),
}
"""What an identity says of data and tokenizer."""


def _is_identity(value: Any) -> bool:
    """That of an earlier version holds options alone, at its top. Of data it says all or nothing."""
    options = value.get("options", value) if isinstance(value, dict) else None
    if not isinstance(options, dict) or not options.keys() & set(OPTIONS):
        return False
    return not value.keys() & _DATA.keys() or _has(_DATA)(value)
