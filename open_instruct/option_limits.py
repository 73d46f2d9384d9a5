"""The numbers that an option may have, declared on its field: `learning_rate: float = limited(1e-6, NOT_NEGATIVE)`."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from open_instruct.option_text import shown

_LIMITS = "limits"
NEVER = -1
"""Value of an interval in steps which means that the action never happens."""


@dataclass(frozen=True)
class Limits:
    """The numbers from `low` to `high`. NaN and infinity are outside."""

    low: float
    high: float = math.inf
    low_itself: bool = True
    """Whether `low` itself is allowed."""
    never_means: str = ""
    """The meaning of `NEVER` for this option, in a word; "" if `NEVER` is not allowed."""

    def hold(self, value: float) -> bool:
        above = value >= self.low if self.low_itself else value > self.low
        is_finite = isinstance(value, int) or math.isfinite(value)  # an int of 400 digits does not fit into a float
        return (is_finite and above and value <= self.high) or (bool(self.never_means) and value == NEVER)

    def __str__(self) -> str:
        if math.isinf(self.low):
            return "a finite number"
        low = f"{self.low} or more" if self.low_itself else f"more than {self.low}"
        high = "" if math.isinf(self.high) else f", at most {self.high}"
        return low + high + (f", or {NEVER} for {self.never_means}" if self.never_means else "")


MAX_TEMPERATURE = 2.0
"""vLLM refuses a higher temperature."""
LOWEST_TEMPERATURE = 0.01
"""The lowest temperature of vLLM. A lower temperature, except 0, is raised to it."""
COUNT = Limits(1)
NOT_NEGATIVE = Limits(0)
ANY = Limits(-math.inf)
POSITIVE = Limits(0, low_itself=False)
SHARE = Limits(0, 1)
POSITIVE_SHARE = Limits(0, 1, low_itself=False)
INTERVAL = Limits(1, never_means="never")


def limited(default: float | None, limits: Limits) -> Any:
    """The field of an option whose numbers have limits. None, where the option may be None, is within all limits."""
    return field(default=default, metadata={_LIMITS: limits})


def limits_of(options: Any) -> dict[str, Limits]:
    """The limits of an option class's fields (or of an instance's), by name; fields without limits are left out."""
    return {option.name: option.metadata[_LIMITS] for option in fields(options) if _LIMITS in option.metadata}


def numbers_are_within_limits(args: Any) -> Iterator[str]:
    """One message for each option whose number is outside its limits."""
    for name, limits in limits_of(args).items():
        value = getattr(args, name)
        if value is not None and not limits.hold(value):
            yield f"{shown(args, name)}: out of range. Give {limits}."
