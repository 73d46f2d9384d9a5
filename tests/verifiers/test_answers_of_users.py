"""Answers as models write them, to labels as data sets have them: the verdict is that of a mathematician."""

import pytest
from user_answers import (
    BOXED_RIGHT,
    BOXED_WRONG,
    DECISIONS,
    LAST_NUMBER_RIGHT,
    LAST_NUMBER_WRONG,
    STATED_RIGHT,
    STATED_WRONG,
    TAGGED_RIGHT,
    TAGGED_WRONG,
)

from open_instruct.verifiers.math_forms import are_same_words, as_latex, choice_of
from open_instruct.verifiers.registry import check_label, score_response

Pairs = list[tuple[str, str]]
FORMS = {"boxed": ("math", r"So the result is $\boxed{%s}$."), "tagged": ("string_matcher", "<answer>%s</answer>")}


def scores(verifier: str, pairs: Pairs, form: str = "%s") -> dict[tuple[str, str], float]:
    for label, _ in pairs:
        check_label(verifier, label)
    return {
        (label, answer): score_response(verifier, label, [], form.replace("%s", answer)).score
        for label, answer in pairs
    }


@pytest.mark.parametrize(
    ("verifier", "form", "right", "wrong"),
    [
        (*FORMS["boxed"], BOXED_RIGHT, BOXED_WRONG),
        ("math", "%s", STATED_RIGHT, STATED_WRONG),
        ("gsm8k", "%s", LAST_NUMBER_RIGHT, LAST_NUMBER_WRONG),
        (*FORMS["tagged"], TAGGED_RIGHT, TAGGED_WRONG),
    ],
    ids=["boxed", "stated", "last number", "tagged"],
)
def test_verdicts_are_those_of_a_mathematician(verifier: str, form: str, right: Pairs, wrong: Pairs) -> None:
    assert {pair: score for pair, score in scores(verifier, right, form).items() if score != 1} == {}
    assert {pair: score for pair, score in scores(verifier, wrong, form).items() if score != 0} == {}


def test_what_is_not_read_scores_0_as_documented() -> None:
    assert set(scores("math", DECISIONS, FORMS["boxed"][1]).values()) == {0}


@pytest.mark.parametrize(
    ("label", "response", "expected"),
    [
        ("42", "The answer is 42.", 1),
        ("42", "So the correct answer is: 42", 1),
        ("42", "The answer is not 42.", 0),
        ("42", "I do not think the answer is 42.", 0),
        ("42", "Perhaps the answer is 42.", 0),
        ("42", "The answer is 42 or 43.", 0),
        ("42", "The answer is 42. No, it is 43.", 0),
        ("42", "The answer is 42.\nWait, it is 43.", 0),
        ("C", "The correct option is (C).", 1),
        ("C", "The correct option is (C) or (D).", 0),
        ("7", "It is $7$, since $8$ is impossible.", 1),
        ("8", "It is $7$, since $8$ is impossible.", 0),
        ("8", "So $8$ is impossible.", 0),
        ("3", "$x>0$ since it is a length, so $x=3$.", 1),
    ],
)
def test_stated_answers(label: str, response: str, expected: float) -> None:
    assert score_response("math", label, [], response).score == expected


@pytest.mark.parametrize(
    ("label", "answer", "expected"),
    [
        ("B", r"\textbf{(B) }12", 1),
        ("B", r"\text{(B)}\ 12", 1),
        ("B", "(B) 12", 0),
        ("B", r"\textbf{(B)} 7x", 0),
        ("B", r"\textbf{(B)}~12", 1),
        ("B", "B) Paris", 1),
        ("B", r"\textbf{(C) }12", 0),
        ("B", r"\textbf{(B) }\text{ and (C)}", 0),
        ("B", r"\text{(B) or (C)}", 0),
        ("B", "(B), (C)", 0),
        ("B", "(B) + 1", 0),
        ("B", r"\textbf{(B)}'", 0),
        ("B", r"\textbf{(B)}_", 0),
        ("B", r"\textbf{(B)} '", 0),
        ("B", r"\textbf{(B)}\sqrt{2}", 0),
        ("B", r"\textbf{(B)}\ \sqrt{2}", 1),
        ("B", r"\textbf{(B)}\ -12", 1),
        (r"\textbf{(B)}\ 12", "12", 1),
        (r"\textbf{(B)}\ 12", "(B)", 1),
        (r"\textbf{(B)}\ 12", r"\textbf{(B) }13", 0),
        (r"\textbf{(B)}\ 12", r"\textbf{(C) }12", 0),
        (r"\textbf{(B)}\ 12", "13", 0),
    ],
)
def test_choices_with_letter_and_text(label: str, answer: str, expected: float) -> None:
    assert score_response("math", label, [], rf"\boxed{{{answer}}}").score == expected


def test_forms_that_are_no_latex_are_rewritten_whole_or_not_at_all() -> None:
    assert as_latex("2 3/4") == r"2\frac{3}{4}"
    assert as_latex("{1, 2}") == r"\{1, 2\}"
    assert as_latex("]0, 1]") == "(0, 1]"
    assert as_latex("[0; 1[") == "[0, 1)"
    for text in ("2 5/4", "{1,000}", "[0, 1]", "2 3/4 + 1", r"\frac{1}{2}", "{x}", "x 10"):
        assert as_latex(text) == text
    assert not are_same_words("zD", "Zd")
    assert not are_same_words("Point A", "Point a")
    assert choice_of("(C)x") == ("", "")


@pytest.mark.parametrize(
    ("label", "answer", "expected"),
    [
        ("5 kg", r"5\text{ kg}", 1),
        ("5 kg", "5 g", 0),
        ("3", "3 xyz", 0),
        ("3", "3 abc", 0),
        ("60 km/h", r"60\text{ km/h}", 1),
        ("12 hours", "12", 1),
        ("2 million", "2", 0),
        (r"33\frac{1}{3}\%", r"33\frac{1}{3}", 0),
        (r"x\%", r"x\%", 1),
        ("{1, 2}", r"\{2, 1\}", 1),
        ("{1, 2}", "(1, 2)", 0),
    ],
)
def test_units_percentages_and_sets_of_plain_text(label: str, answer: str, expected: float) -> None:
    assert score_response("math", label, [], rf"\boxed{{{answer}}}").score == expected
