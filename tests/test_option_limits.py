"""Limits of numbers, declared on the fields of options."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from open_instruct.option_limits import INTERVAL, POSITIVE, SHARE, Limits, limited, limits_of, numbers_are_within_limits


@given(low=st.integers(-5, 5), high=st.integers(-5, 5), low_itself=st.booleans(), value=st.floats(-9, 9))
def test_limits(low: int, high: int, low_itself: bool, value: float) -> None:
    holds = Limits(low, high, low_itself=low_itself).hold(value)
    assert holds == ((low <= value if low_itself else low < value) and value <= high)


@dataclass(kw_only=True)
class Options:
    share: float = limited(0.5, SHARE)
    every: int = limited(1, INTERVAL)
    timeout_s: float | None = limited(None, POSITIVE)
    free: float = -3.0


def test_numbers_within_the_limits_of_their_fields_are_no_mistakes() -> None:
    assert list(numbers_are_within_limits(Options())) == []
    assert list(numbers_are_within_limits(Options(share=1, every=-1, timeout_s=0.1))) == []
    assert list(limits_of(Options)) == ["share", "every", "timeout_s"]


def test_each_number_outside_its_limits_is_a_mistake() -> None:
    assert list(numbers_are_within_limits(Options(share=1.5, every=0, timeout_s=float("inf")))) == [
        "--share 1.5: out of range. Give 0 or more, at most 1.",
        "--every 0: out of range. Give 1 or more, or -1 for never.",
        "--timeout_s inf: out of range. Give more than 0.",
    ]
