"""Spellings of numbers in LaTeX, for `math_things.py`."""

import random
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Spelling:
    form: str
    text: str
    is_read: bool = True
    """Whether a label may be spelled so."""


@dataclass(frozen=True)
class Thing:
    spellings: list[Spelling]
    wrong: list[str]
    """Answers that are not this thing."""


def num(rng: random.Random, most: int = 60) -> int:
    return rng.choice((-1, 1)) * rng.randint(2, most)


def frac(rng: random.Random, most: int = 40) -> Fraction:
    while True:
        value = Fraction(num(rng, most), rng.randint(2, 15))
        if value.denominator > 1:
            return value


def latex(value: Fraction, command: str = "frac") -> str:
    if value.denominator == 1:
        return str(value.numerator)
    sign = "-" if value < 0 else ""
    return rf"{sign}\{command}{{{abs(value.numerator)}}}{{{value.denominator}}}"


def plain(value: Fraction) -> str:
    return str(value)


def other(rng: random.Random, value: Fraction) -> Fraction:
    """Another number that looks like this one."""
    candidates = [value + 1, value - 1, -value, value * 10, value / 10, value + Fraction(1, 10**9)]
    candidates += [1 / value] if value not in (0, 1, -1) else []
    return rng.choice([candidate for candidate in candidates if candidate != value])


def repeating(value: Fraction) -> str:
    """A decimal with its period under a line."""
    sign, value = ("-" if value < 0 else ""), abs(value)
    whole, rest = divmod(value.numerator, value.denominator)
    digits, seen = "", {}
    while rest not in seen:
        seen[rest] = len(digits)
        digit, rest = divmod(rest * 10, value.denominator)
        digits += str(digit)
    start = seen[rest]
    return rf"{sign}{whole}.{digits[:start]}\overline{{{digits[start:]}}}"


def raised(number: int) -> str:
    """A whole number as an exponent of Unicode: `⁻¹²`."""
    return str(number).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def in_base(number: int, base: int) -> str:
    digits = ""
    while number:
        number, digit = divmod(number, base)
        digits = str(digit) + digits
    return digits


def plain_decimal(value: Fraction) -> str:
    """A decimal of a number whose denominator divides a power of ten."""
    sign, value, places = ("-" if value < 0 else ""), abs(value), 0
    while (value * 10**places).denominator > 1:
        places += 1
    digits = str((value * 10**places).numerator).rjust(places + 1, "0")
    return sign + (f"{digits[:-places]}.{digits[-places:]}" if places else digits)
