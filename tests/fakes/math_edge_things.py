r"""Kinds of mathematical things whose formula changes somewhere, that are too small to compute, or that are words of two letters,
with answers that are the same in most places."""

import random

from math_spellings import Spelling, Thing


def absolute_value(rng: random.Random) -> Thing:
    """Its form changes far from 0, or between two numbers that lie close together."""
    place = rng.randint(4, 400)
    if rng.random() < 0.5:
        spellings = [
            Spelling("bars", f"|x-{place}|"),
            Spelling("other order", rf"\left|{place}-x\right|"),
            Spelling(r"`\lvert`", rf"\lvert x-{place} \rvert"),
            Spelling("root of a square", rf"\sqrt{{(x-{place})^2}}"),
            Spelling("root of an expanded square", rf"\sqrt{{x^2-{2 * place}x+{place**2}}}"),
        ]
        wrong = [
            f"x-{place}",
            f"{place}-x",
            f"|x-{place + 1}|",
            f"|x+{place}|",
            rf"\frac{{(x-{place})^2}}{{{place}-x}}",
        ]
        return Thing(spellings, wrong)
    total = f"|3x-{place}|+|3x-{place + 1}|"
    spellings = [
        Spelling("sum of two", total),
        Spelling("sum in other order", f"|3x-{place + 1}| + |{place}-3x|"),
    ]
    return Thing(spellings, [f"|6x-{2 * place + 1}|", f"6x-{2 * place + 1}", f"{2 * place + 1}-6x", f"|3x-{place}|"])


def rounded(rng: random.Random) -> Thing:
    below = rng.randint(6, 60)
    spellings = [
        Spelling(r"`\lfloor`", rf"\lfloor x/{below} \rfloor"),
        Spelling("fraction", rf"\left\lfloor \frac{{x}}{{{below}}} \right\rfloor"),
        Spelling(r"`\lceil`", rf"-\lceil -\frac{{x}}{{{below}}} \rceil"),
        Spelling("Unicode", f"⌊x÷{below}⌋"),
    ]
    return Thing(
        spellings,
        [
            rf"\lfloor x/{2 * below} \rfloor",
            rf"\lceil x/{below} \rceil",
            rf"\lceil x/{below} \rceil - 1",
            "0",
            f"x/{below}",
        ],
    )


def small_power(rng: random.Random) -> Thing:
    exponent = rng.randint(50, 600)
    spellings = [
        Spelling("negative power", f"e^{{-{exponent}}}"),
        Spelling("one over a power", rf"\frac{{1}}{{e^{{{exponent}}}}}"),
        Spelling(r"`\exp`", rf"\exp(-{exponent})"),
    ]
    wrong = ["0", f"e^{{-{exponent + 1}}}", f"2e^{{-{exponent}}}", f"e^{{{exponent}}}", rf"\pi^{{-{exponent}}}"]
    return Thing(spellings, wrong)


def power_too_small(rng: random.Random) -> Thing:
    """Below 10^-300, where only the same text is equal."""
    base, exponent, plus = (
        rng.choice(("e", r"\pi", r"\sqrt{7}")),
        rng.randint(1200, 9000),
        rng.choice(("", "5+", "x+", "1-")),
    )
    spellings = [
        Spelling("the same text", f"{plus}{base}^{{-{exponent}}}"),
        Spelling("one over a power", rf"{plus}\frac{{1}}{{{base}^{{{exponent}}}}}", is_read=False),
    ]
    wrong = [
        plus[:-1] or "0",
        f"{plus}{base}^{{-{exponent + 100}}}",
        f"{plus}2{base}^{{-{exponent}}}",
        f"{plus}3^{{-{exponent}}}",
    ]
    return Thing(spellings, wrong)


def two_letters(rng: random.Random) -> Thing:
    """Sides, tosses of a coin, abbreviations: `HT` is not `TH`."""
    first, second = rng.sample("ABCDEFGHIJKLMNOPQRSTUVWXYZ", 2)
    letters = rng.choice((first + second, first + second, first + second.lower(), first.lower() + second))
    spellings = [Spelling("letters", letters), Spelling(r"`\text`", rf"\text{{{letters}}}")]
    turned = letters[::-1]
    return Thing(
        spellings, [turned, rf"\text{{{turned}}}", " ".join(turned), letters[0], letters[0] * 2, f"{letters}_1"]
    )


def product_of_letters(rng: random.Random) -> Thing:
    factor, (first, second, third) = rng.randint(2, 99), rng.sample("abcmnpqrxz", 3)
    spellings = [
        Spelling("in order", f"{factor}{first}{second}"),
        Spelling("other order", f"{factor}{second}{first}"),
        Spelling(r"`\cdot`", rf"{first} \cdot {second} \cdot {factor}"),
    ]
    return Thing(
        spellings,
        [f"{first}{second}", f"{factor}{first}{third}", f"{factor + 1}{first}{second}", f"{factor}{first}+{second}"],
    )


EDGES = {
    "absolute value": absolute_value,
    "rounded down": rounded,
    "small power": small_power,
    "power below 10^-300": power_too_small,
    "two letters": two_letters,
    "product of letters": product_of_letters,
}
