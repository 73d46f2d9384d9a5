"""Verifiers that compare words: whole answers, overlap, answers between tags, and the length of a response.

Names, labels and scores are those of open-instruct.
"""

import json
import math
import re
from collections import Counter
from contextlib import suppress

from open_instruct.scored_groups import PASSTHROUGH
from open_instruct.system.counted import counted
from open_instruct.verifiers.answer_reading import are_same_words, extract_answer, normalize_answer
from open_instruct.verifiers.base import VerificationResult, VerifierFunction
from open_instruct.verifiers.labels import numbers_of, single_label, texts_of
from open_instruct.verifiers.thoughts import answer_part, why_no_answer

FLAN_MARK = "The answer is: "
FINISH, END_FINISH = "<finish>", "</finish>"
FINISHED = (f"{FINISH}{{}}{END_FINISH}",)
ALMOST = 0.1
"""The score that `re_search_f1` gives to an answer in the right form without a right word."""


class FlanVerifier(VerifierFunction):
    """1 if the text after the last `The answer is: `, or all text after the thoughts without these words, equals the label."""

    name = "flan"
    forms = (f"{FLAN_MARK}{{}}", "{}")

    def __call__(
        self, tokenized_prediction: list[int], prediction: str, label: object, query: str | None = None
    ) -> VerificationResult:
        target = _text_of(label)
        answer = (answer_part(prediction, query) or "").rpartition(FLAN_MARK)[2]
        return VerificationResult(float(are_same_words(answer, [target], numbers_of(label))), answer=answer)


class StringF1Verifier(VerifierFunction):
    """Overlap of the response's words, after the thoughts, with the label's words. With several labels, the best overlap."""

    name = "string_f1"
    forms = ("{}",)

    def __call__(
        self, tokenized_prediction: list[int], prediction: str, label: object, query: str | None = None
    ) -> VerificationResult:
        answer = behind_thoughts(prediction, query)
        return VerificationResult(_overlap(answer, _texts(label), label))


class PuzzleVerifier(VerifierFunction):
    """1 if the response, after its thoughts and without answer tags, equals the label."""

    name = "puzzle"
    forms = ("{}",)

    def __call__(
        self, tokenized_prediction: list[int], prediction: str, label: object, query: str | None = None
    ) -> VerificationResult:
        answer, target = behind_thoughts(prediction, query), _text_of(label)
        return VerificationResult(float(are_same_words(answer, [target], numbers_of(label))), answer=answer)


class ReSearchVerifier(VerifierFunction):
    """1 if the first `<finish>…</finish>` after the thoughts equals one of the labels."""

    name = "re_search"
    forms = FINISHED

    def __call__(
        self, tokenized_prediction: list[int], prediction: str, label: object, query: str | None = None
    ) -> VerificationResult:
        targets = _texts_in_json(label)
        text = answer_part(prediction, query)
        answer = first_finished(text or "")
        if answer is None:
            return VerificationResult(0.0, reasoning=why_no_answer(text, f"{FINISH}…{END_FINISH}"), answer="")
        return VerificationResult(float(are_same_words(answer, targets, numbers_of(label))), answer=answer)

    def answers_in(self, label: object) -> list[str]:
        return _texts_in_json(label)


class ReSearchF1Verifier(VerifierFunction):
    """Overlap of the words in the last `<finish>…</finish>` after the thoughts with the best label; 0.1 without overlap, and
    0 without the tags.

    This is the score of ReSearch (arXiv:2503.19470, section 2.4).
    """

    name = "re_search_f1"
    forms = FINISHED

    def __call__(
        self, tokenized_prediction: list[int], prediction: str, label: object, query: str | None = None
    ) -> VerificationResult:
        labels = _texts_in_json(label)
        text = answer_part(prediction, query)
        answer = last_finished(text or "")
        if not answer:
            return VerificationResult(0.0, reasoning=why_no_answer(text, f"{FINISH}…{END_FINISH}"), answer="")
        return VerificationResult(_overlap(answer, labels, label) or ALMOST, answer=answer)

    def answers_in(self, label: object) -> list[str]:
        return _texts_in_json(label)


class MaxLengthVerifier(VerifierFunction):
    """1 minus the difference between the response's tokens and the label's, divided by `max_length_verifier_max_length`."""

    name = "max_length"

    def __call__(
        self, tokenized_prediction: list[int], prediction: str, label: object, query: str | None = None
    ) -> VerificationResult:
        num_tokens = len(tokenized_prediction)
        return VerificationResult(self._score(num_tokens - _number(label)), reasoning=counted(num_tokens, "token"))

    def _score(self, excess: float) -> float:
        return max(0.0, 1 - abs(excess) / self.verifier_config.max_length_verifier_max_length)


class UpToMaxLengthVerifier(MaxLengthVerifier):
    """1 up to as many tokens as the label says. Above, 1 minus the excess divided by `max_length_verifier_max_length`."""

    name = "up_to_max_length"

    def _score(self, excess: float) -> float:
        return super()._score(max(excess, 0.0))


class PassthroughVerifier(VerifierFunction):
    """0 for each response, because the reward comes only from a workflow's environment or from reward functions."""

    name = PASSTHROUGH

    def __call__(
        self, tokenized_prediction: list[int], prediction: str, label: object, query: str | None = None
    ) -> VerificationResult:
        return VerificationResult(0.0)


# --- reading ----------------------------------------------------------------------------------------------------------


def behind_thoughts(text: str, prompt: str | None = None) -> str:
    """The text after the last `</think>`, without answer tags; empty if thoughts were begun, even by the prompt, and never
    ended."""
    answer = answer_part(text, prompt) or ""
    return answer.replace("<answer>", "").replace("</answer>", "").strip()


def judged_part(text: str, prompt: str | None = None) -> str | None:
    """The part of a response that a judge sees: the last `<answer>…</answer>` after the thoughts, else all text after them. None
    if the thoughts never end."""
    answer = answer_part(text, prompt)
    return None if answer is None else extract_answer(answer) or behind_thoughts(answer)


def first_finished(text: str) -> str | None:
    """Content of the first complete `<finish>…</finish>`, in any case of letters; None if there is none."""
    opening = re.search(FINISH, text, re.IGNORECASE)
    closing = re.compile(END_FINISH, re.IGNORECASE).search(text, opening.end()) if opening else None
    return text[opening.end() : closing.start()].strip() if opening and closing else None


def last_finished(text: str) -> str | None:
    """Content of the last complete `<finish>…</finish>`; None if there is none."""
    end = text.rfind(END_FINISH)
    start = text.rfind(FINISH, 0, max(end, 0))
    return text[start + len(FINISH) : text.index(END_FINISH, start)].strip() if start >= 0 else None


def f1(answer: str, target: str) -> float:
    """Harmonic mean of the shares of common words, in [0, 1], as in SQuAD (arXiv:1606.05250, section 6.1).

    Example: without articles, `the red fox` has two words and `a fox` has one, and they have one in common: 2/3.
    """
    words, target_words = normalize_answer(answer).split(), normalize_answer(target).split()
    num_common = (Counter(words) & Counter(target_words)).total()
    return 2 * num_common / (len(words) + len(target_words)) if num_common else 0.0


def _overlap(answer: str, texts: list[str], label: object) -> float:
    """The best overlap with one of the texts; 1 if the answer is a number in the label, in another spelling."""
    return 1.0 if are_same_words(answer, (), numbers_of(label)) else max(f1(answer, text) for text in texts)


def _text_of(label: object) -> str:
    text = single_label(label)
    if not normalize_answer(text):
        raise ValueError(f"the ground truth must hold a word, a number or a symbol, got {label!r:.80}")
    return text


def _texts(label: object) -> list[str]:
    """The texts of a label: one text, or several of which any is right."""
    texts = texts_of(label)
    if not any(map(normalize_answer, texts)):
        raise ValueError(f"the ground truth must hold a word or a number, got {label!r:.80}")
    return texts


def _texts_in_json(label: object) -> list[str]:
    """As `_texts`, for a label that may also be the JSON of a list of numbers."""
    if isinstance(label, str) and label.lstrip()[:1] == "[":
        with suppress(ValueError, RecursionError):
            label = json.loads(label)
    return _texts(label)


def _number(label: object) -> float:
    try:
        number = float(single_label(label))
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise ValueError(f"the ground truth must be a number of tokens, got {label!r:.80}")
    return number
