r"""Pairs of a label and an answer of `math` whose verdict is known by construction, for a test of all that the verifier reads.

A *thing* (a fraction, an interval, a matrix) is drawn at random, spelled in all its forms, and changed in one place
(`math_things.py`). Two spellings of the same thing are a right pair; a spelling of the thing and one of the changed thing are a
wrong pair. Nothing here asks the verifier: values are compared as Fractions, or are different because of how they were made.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from math_spellings import Thing
from math_things import KINDS


@dataclass(frozen=True)
class Pair:
    kind: str
    form: str
    """The form of the answer; of a wrong answer, how it came about."""
    label: str
    answer: str
    response: str
    is_right: bool


TAILS = [
    "+",
    "^",
    r"\cdot",
    "'",
    ")",
    r"\sqrt(2)",
    "=",
    r"\text{ or }7",
    r"\frac{",
    "_",
    ", 7",
    "<",
    r"\to",
    ";7",
    " 7x",
    "|",
]
"""Text behind an answer that makes it another, or senseless."""


def in_box(answer: str) -> str:
    return rf"So it is $\boxed{{{answer}}}$."


def in_response(rng: random.Random, answer: str) -> str:
    """A response that says the answer in one of the places where `math` looks for it."""
    return rng.choice(
        (
            in_box(answer),
            in_box(answer),
            rf"<think>Perhaps \boxed{{1729}}.</think>\[\boxed{{{answer}}}\]",
            f"It takes 1729 steps. <answer>{answer}</answer>",
            f"We find $a = 1729$.\n#### {answer}",
            f"**Final Answer**\n\n$${answer}$$",
        )
    )


def pairs(seed: int, number: int) -> Iterator[Pair]:
    """Pairs of all kinds in turn, half of them right."""
    rng = random.Random(seed)
    makers = list(KINDS.items())
    for position in range(number):
        kind, make = makers[position // 2 % len(makers)]
        thing = make(rng)
        label = rng.choice([one for one in thing.spellings if one.is_read]).text
        if position % 2 == 0:
            spelling = rng.choice(thing.spellings)
            yield Pair(kind, spelling.form, label, spelling.text, in_response(rng, spelling.text), True)
        else:
            yield wrong_pair(rng, kind, thing, label)


def wrong_pair(rng: random.Random, kind: str, thing: Thing, label: str) -> Pair:
    right = rng.choice([one for one in thing.spellings if one.is_read]).text
    how = rng.choice(("changed", "changed", "with a tail", "only thought"))
    if how == "only thought":
        response = rng.choice(
            (rf"<think>\boxed{{{right}}}</think> I give up on this.", rf"<think>So \boxed{{{right}}}")
        )
        return Pair(kind, how, label, right, response, False)
    tails = TAILS if not right.endswith("=0") else ["+", "^", "'"]  # 0 times anything is 0
    answer = rng.choice(thing.wrong) if how == "changed" else right + rng.choice(tails)
    return Pair(kind, how, label, answer, in_box(answer) if "{" in answer[-1:] else in_response(rng, answer), False)


def examples(seed: int) -> Iterator[Pair]:
    """Each form of each kind, with the first form as label."""
    for kind, make in KINDS.items():
        things = [make(random.Random(f"{seed} {number}")) for number in range(12)]
        forms = {one.form: (thing.spellings[0].text, one.text) for thing in reversed(things) for one in thing.spellings}
        order = sorted(forms, key=partial(_position, things))
        for form in order:
            label, answer = forms[form]
            yield Pair(kind, form, label, answer, in_box(answer), True)


def _position(things: list[Thing], form: str) -> tuple[int, str]:
    return min(position for thing in things for position, one in enumerate(thing.spellings) if one.form == form), form
