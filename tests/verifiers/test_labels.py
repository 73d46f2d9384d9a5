"""Labels are values: a number is that number however it is spelled, and a text that is JSON is what it says."""

import json
import time
from decimal import Decimal

import numpy as np
import pytest

from open_instruct.verifiers.answer_verifiers import GSM8KVerifier, StringMatcherVerifier
from open_instruct.verifiers.base import VerificationResult, VerifierFunction
from open_instruct.verifiers.labels import single_label
from open_instruct.verifiers.registry import check_label, score_response


def score(dataset: str, label: object, text: str) -> float:
    check_label(dataset, label)
    return score_response(dataset, label, [], text).score


def stated(dataset: str, answer: str) -> str:
    """A response that gives the answer in the form that the verifier reads."""
    forms = {
        "math": rf"Thus the result is $\boxed{{{answer}}}$.",
        "strict_math": f"Final Answer: The final answer is ${answer}$. I hope it is correct.",
        "gsm8k": f"So they have {answer} left.",
        "flan": f"The answer is: {answer}",
        "string_matcher": f"<answer>{answer}</answer>",
        "re_search": f"<finish>{answer}</finish>",
        "re_search_f1": f"<finish>{answer}</finish>",
    }
    return forms.get(dataset, answer)


OF_NUMBERS = ("math", "strict_math", "gsm8k")
OF_WORDS = ("string_matcher", "flan", "puzzle", "string_f1", "re_search", "re_search_f1")


@pytest.mark.parametrize("dataset", OF_NUMBERS + OF_WORDS)
@pytest.mark.parametrize(
    ("label", "answer"),
    [
        (42, "42"),
        (42.0, "42"),
        (-3.0, "-3"),
        (0.0, "0"),
        (0.5, "0.5"),
        (1e-05, "0.00001"),
        (2.5e-07, "0.00000025"),
        (1e16, "10000000000000000"),
        (1e22, "1" + 22 * "0"),
        (123456789012345680.0, "123456789012345680"),
        (Decimal("42.50"), "42.5"),
        (Decimal("1E+3"), "1000"),
        (np.int64(42), "42"),
        (np.float64(42.0), "42"),
        (np.float32(0.1), "0.1"),
        ([42.0], "42"),
    ],
)
def test_number_as_label_is_that_number(dataset: str, label: object, answer: str) -> None:
    assert score(dataset, label, stated(dataset, answer)) == 1
    assert score(dataset, label, stated(dataset, "43")) < 1


@pytest.mark.parametrize("dataset", OF_NUMBERS + OF_WORDS)
@pytest.mark.parametrize(
    ("label", "answer", "is_right"),
    [
        (42.0, "42.0", True),
        (42, "42.00", True),
        (42.5, "42.50", True),
        (0.5, ".5", True),
        (1e-05, "1e-05", True),
        (1234, "1,234.0", True),
        ("42.0", "42", True),
        ("42", "42.0", True),
        ("-3.0", "-3", True),
        ("12.0%", "12%", True),
        (42, "420", False),
        (42.5, "42.05", False),
        (1e-05, "0.000001", False),
        ("42.0", "42.5", False),
        ("42.0", "4", False),
        ("10", "1.0", False),
    ],
)
def test_zeros_that_say_nothing_make_no_other_number(
    dataset: str, label: object, answer: str, *, is_right: bool
) -> None:
    """pandas writes whole numbers with `.0`, and models do not."""
    assert (score(dataset, label, stated(dataset, answer)) == 1) == is_right


def test_texts_that_only_look_like_numbers_stay_texts() -> None:
    for label, answer in (("3.10", "3.1"), ("007", "7"), ("1.0.0", "1.0"), ("1e3", "1000"), ("nan", "0")):
        for dataset in ("string_matcher", "flan", "puzzle", "re_search"):
            assert score(dataset, label, stated(dataset, answer)) == 0
    for dataset in ("string_matcher", "re_search"):
        for answer in ("nan", "inf", "1_0", "", "10 or 11"):
            assert score(dataset, 10, stated(dataset, answer)) == 0


def test_numbers_are_spelled_without_an_exponent() -> None:
    assert [single_label(number) for number in (-0.0, 1e-7, 5e300, 0.1 + 0.2)] == [
        "0",
        "0.0000001",
        "5" + 300 * "0",
        "0.30000000000000004",
    ]


@pytest.mark.parametrize("label", ["1e-5", "1e-05", "1E-5", "1.0e-05", "10e-6", "0.1e-4"])
@pytest.mark.parametrize("answer", ["0.00001", "1e-5", r"\frac{1}{100000}", "10^{-5}", r"10^{-5}\text{ m}"])
def test_power_of_ten_in_a_text_is_a_number_for_math(label: str, answer: str) -> None:
    assert score("math", label, stated("math", answer)) == 1


def test_power_of_ten_that_is_another_number_is_wrong() -> None:
    assert score("math", "1e-5", stated("math", "0.0001")) == 0
    assert score("math", "1e-5", stated("math", "1e-6")) == 0
    assert score("math", 1e16, stated("math", "1e15")) == 0
    assert score("math", 1e16, stated("math", "1e16")) == 1


@pytest.mark.parametrize("dataset", OF_NUMBERS + OF_WORDS)
@pytest.mark.parametrize(
    "label",
    [
        '["42"]',
        ' ["42"] ',
        '"42"',
        ["42"],
        '["[\\"42\\"]"]',
        ['["42"]'],
        json.dumps(json.dumps("42")),
        json.dumps(json.dumps(["42"])),
        "['42']",
    ],
)
def test_text_that_is_json_of_a_text_is_unwrapped(dataset: str, label: object) -> None:
    assert score(dataset, label, stated(dataset, "42")) == 1
    assert score(dataset, label, stated(dataset, "43")) < 1


@pytest.mark.parametrize("dataset", ["string_f1", "re_search", "re_search_f1"])
@pytest.mark.parametrize("label", [["Rome", "Paris"], '["Rome", "Paris"]', "['Rome', 'Paris']"])
@pytest.mark.parametrize("answer", ["Rome", "Paris"])
def test_each_text_of_a_list_is_right_for_verifiers_of_several_labels(dataset: str, label: object, answer: str) -> None:
    assert score(dataset, label, stated(dataset, answer)) == 1


@pytest.mark.parametrize("dataset", [*OF_NUMBERS, "string_matcher", "flan", "puzzle"])
@pytest.mark.parametrize("label", [["1", "2"], '["1", "2"]', "['1', '2']", True, False, None, {"a": 1}])
def test_label_that_is_no_one_text_or_number_is_refused_with_the_cure(dataset: str, label: object) -> None:
    with pytest.raises(ValueError, match=r"one text or number.*(re_search|as a text)"):
        check_label(dataset, label)


@pytest.mark.parametrize(
    "text", ["[1, 2]", "(1, 2]", "{1, 2}", '[1, "a', "['a' or b]", '"a" or "b"', "[a]", "[]", "''", '"']
)
def test_text_that_is_no_json_of_texts_stays_as_it_is(text: str) -> None:
    assert single_label(text) == text


def test_lengths_may_be_numbers_of_any_kind() -> None:
    for label in (3, 3.0, "3", "3.0", ["3"], '["3"]', Decimal(3), np.int32(3)):
        assert score_response("max_length", label, [7, 8, 9], "").score == 1


# --- labels that match no spelling of themselves ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dataset", "label"),
    [
        ("string_matcher", "<answer>42</answer>"),
        ("string_matcher", "</think> yes <think>"),
        ("flan", "The answer is: 42"),
        ("puzzle", "<think>2 + 2</think> 4"),
        ("puzzle", "<answer>42</answer>"),
        ("re_search", "<finish>Rome</finish>"),
        ("math", r"\frac{1}{2"),
        ("string_f1", "<think>"),
    ],
)
def test_label_that_matches_no_spelling_of_itself_is_refused(dataset: str, label: str) -> None:
    with pytest.raises(ValueError, match="no response can match the ground truth"):
        check_label(dataset, label)


def test_verifier_that_reads_another_form_does_not_inherit_the_responses() -> None:
    class Marked(GSM8KVerifier):
        name = "marked"

    class Own(StringMatcherVerifier):
        name = "own"

        def __call__(self, *_: object, **__: object) -> VerificationResult:
            return VerificationResult(0.0)

    Own().try_label("Rome")
    Own().try_label("<b>")
    Marked().try_label("42")


def test_verifier_says_by_its_forms_how_answers_are_stated() -> None:
    class InBrackets(VerifierFunction):
        """1 if the text in the first brackets is the label."""

        name = "in_brackets"
        forms = ("[[{}]]",)

        def __call__(
            self, _: list[int], prediction: str, label: object, query: str | None = None
        ) -> VerificationResult:
            answer = prediction.partition("[[")[2].partition("]]")[0]
            return VerificationResult(float(answer == label))

    InBrackets().try_label("Rome")
    InBrackets().try_label("<b>")
    with pytest.raises(ValueError, match="no response can match the ground truth"):
        InBrackets().try_label("a]]b")
    check_label("re_search", '[1, "<b>"]')
    check_label("re_search", '["<finish>", "Rome"]')


def test_a_million_labels_are_tried_in_two_minutes() -> None:
    """A fiftieth of them, in processor time, because the machine may be busy."""
    labels = [rf"\\frac{{{number}}}{{7}}" if number % 3 else str(number) for number in range(5000)]
    started = time.process_time()
    for dataset in ("math", "string_matcher", "flan", "re_search"):
        for label in labels:
            check_label(dataset, label)
    assert time.process_time() - started < 20000 / 1e6 * 120 * 2
