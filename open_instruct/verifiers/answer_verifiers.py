"""Verifiers that read one answer out of a response and compare it with the label: numbers, words, mathematics."""

import functools
from collections.abc import Iterable
from fractions import Fraction

from open_instruct.verifiers import math_equivalence
from open_instruct.verifiers.answer_reading import (
    are_same_words,
    count_numbers,
    extract_answer,
    last_number,
    math_value,
    normalize_answer,
)
from open_instruct.verifiers.base import VerificationResult, VerifierFunction
from open_instruct.verifiers.labels import numbers_of, single_label
from open_instruct.verifiers.math_answers import answer_of_label, final_answer, math_answer, whole_answer
from open_instruct.verifiers.math_forms import choice_of
from open_instruct.verifiers.math_units import units_agree
from open_instruct.verifiers.thoughts import answer_part, why_no_answer

PLAIN_DIGITS = 18


def _is_plain(text: str) -> bool:
    """Whether a label is a whole number in digits, as most labels are."""
    return text.isascii() and text.isdecimal() and len(text) <= PLAIN_DIGITS


def _fits_a_box(answer: str) -> bool:
    """Whether a box around this answer surely holds it whole: it has no tags, and each of its braces has a partner."""
    depth = 0
    for letter in answer:
        depth += (letter == "{") - (letter == "}")
        if depth < 0:
            return False
    return depth == 0 and "<" not in answer


class GSM8KVerifier(VerifierFunction):
    """1 if the last number after the thoughts equals the label: `$1,234.50.` is 1234.5, `7` equals `7.0`."""

    name = "gsm8k"

    def __call__(
        self, tokenized_prediction: list[int], prediction: str, label: object, query: str | None = None
    ) -> VerificationResult:
        target, text = self._target(label), answer_part(prediction, query)
        number = last_number(text or "")
        if number is None:
            return VerificationResult(0.0, reasoning=why_no_answer(text, "number at the end"), answer="")
        return VerificationResult(float(number == target), answer=str(number))

    def check_label(self, label: object) -> None:
        self._target(label)

    def _target(self, label: object) -> Fraction:
        text = single_label(label)
        if _is_plain(text):
            return Fraction(int(text))  # the same result as `last_number`, in a tenth of the time
        text = answer_of_label(text) or text
        target = last_number(text)
        if target is None or count_numbers(text) > 1:
            raise ValueError(f"a gsm8k ground truth must hold one number, got {label!r:.80}")
        return target


class StringMatcherVerifier(VerifierFunction):
    """1 if the last complete `<answer>...</answer>` after the thoughts equals the label. Case, outer punctuation, articles and
    spaces are ignored.

    `normalize_answer` has the details: `(B).` is B, while `A, B` is neither B nor AB, and `5!` is not 5.
    """

    name = "string_matcher"
    forms = ("<answer>{}</answer>",)

    def __call__(
        self, tokenized_prediction: list[int], prediction: str, label: object, query: str | None = None
    ) -> VerificationResult:
        target = single_label(label)
        if not normalize_answer(target):
            raise ValueError(f"a string_matcher ground truth must hold a word, a number or a symbol, got {label!r:.80}")
        text = answer_part(prediction, query)
        answer = extract_answer(text or "")
        if answer is None:
            return VerificationResult(0.0, reasoning=why_no_answer(text, "<answer>...</answer>"), answer="")
        return VerificationResult(float(are_same_words(answer, [target], numbers_of(label))), answer=answer)


@functools.lru_cache(maxsize=1024)  # a label may be a long solution, and all responses of a group share it
def _target(label: str) -> tuple[str, Fraction | str, str]:
    """The answer that a label of `math` asks for: as text, as a value, and the unit of the value."""
    if _is_plain(label):
        return label, Fraction(int(label)), ""  # the same result as `math_value`, in a tenth of the time
    text = answer_of_label(label)
    value, unit = math_value(text) if text is not None else ("", "")
    if text is None or value == "":
        raise ValueError(
            "a math ground truth must hold a number, LaTeX or a few words, or be a text that says its answer in \\boxed{…}, "
            f"behind #### or as `The answer is …`, got {label!r:.80}"
        )
    return text, value, unit


def _is_same_choice(answer: str, label: str) -> bool:
    """Whether an answer and a label name the same choice: `\\textbf{(B) }12` and B, or `\\textbf{(B)}\\ 12` and 12. If both have
    letter and text, both must agree."""
    (letter, text), (letter_of_label, text_of_label) = choice_of(answer), choice_of(label)
    if not letter and not letter_of_label:
        return False
    if letter and letter_of_label:
        return letter == letter_of_label and math_equivalence.are_equal(text, text_of_label)
    if letter:
        return letter == math_value(label)[0]
    return letter_of_label == math_value(answer)[0] or math_equivalence.are_equal(answer, text_of_label)


class MathVerifier(VerifierFunction):
    """1 if the answer equals the label: as a number, as LaTeX without its spacing, or as mathematics (`math_equivalence.py`).

    The answer is the last `\\boxed{…}`, or, without a box, the answer that `math_answers.py` finds. A label is an answer, or a
    whole solution that states an answer (`answer_of_label`). `3` and `3\\text{ cm}` are equal, but `3\\text{ m}` and
    `3\\text{ cm}` are not, and 42 equals neither `42\\%` nor `42\\text{ or 43}`.
    """

    name = "math"
    where = "the last \\boxed{…}, or without a box the answer that the response states,"
    """Where the answer stands, for messages."""

    def __call__(
        self, tokenized_prediction: list[int], prediction: str, label: object, query: str | None = None
    ) -> VerificationResult:
        target, target_value, unit = _target(single_label(label))
        text = answer_part(prediction, query)
        answer = None if text is None else self.find_answer(text)
        if answer is None:
            return VerificationResult(0.0, reasoning=why_no_answer(text, "answer found"), answer="")
        value, unit_of_answer = math_value(answer)
        if value == target_value:
            return VerificationResult(float(units_agree(unit_of_answer, unit)), answer=answer)
        is_right = math_equivalence.are_equal(answer, target) or _is_same_choice(answer, target)
        return VerificationResult(float(is_right), answer=answer)

    def find_answer(self, prediction: str) -> str | None:
        return math_answer(prediction)

    def scoring_rule(self, label: object) -> str:
        return f"1 if {self.where} equals {answer_of_label(single_label(label))}"

    def check_label(self, label: object) -> None:
        _target(single_label(label))

    def answers_in(self, label: object) -> list[str]:
        return [_target(single_label(label))[0]]

    def responses_with(self, label: object) -> Iterable[str]:
        answer = _target(single_label(label))[0]
        return () if _fits_a_box(answer) else (f"\\boxed{{{answer}}}",)

    def prepare(self, dataset: str) -> None:
        math_equivalence.prepare()


class StrictMathVerifier(MathVerifier):
    """As `math`, but the answer must be in `Final Answer: The final answer is $…$.`, or be the whole response."""

    name = "strict_math"
    where = "`Final Answer: The final answer is $…$.`, or the whole response,"

    def find_answer(self, prediction: str) -> str | None:
        return final_answer(prediction) or whole_answer(prediction)

    def responses_with(self, label: object) -> Iterable[str]:
        answer = _target(single_label(label))[0]
        if whole_answer(answer) and "<" not in answer and "answer" not in answer.lower():
            return ()  # the whole response is surely read as this answer
        return answer, f"Final Answer: The final answer is ${answer}$. I hope it is correct."
