"""Verifiers that compare words, with open-instruct's labels and scores."""

import time

import pytest

from open_instruct.config.verifier_options import VerifierConfig
from open_instruct.verifiers.registry import build_all_verifiers, check_label, score_response
from open_instruct.verifiers.text_verifiers import f1, judged_part

THOUGHTS = "<think>a fox? no, a hen</think>"


@pytest.mark.parametrize(
    ("name", "label", "text", "expected"),
    [
        ("flan", "yes", "Let me see. The answer is: Yes.", 1),
        ("flan", "yes", "The answer is: no. The answer is: yes", 1),
        ("flan", "yes", "The answer is: yes. The answer is: no", 0),
        ("flan", "yes", "yes", 1),
        ("flan", "yes", "yes or no", 0),
        ("puzzle", "a red fox", f"{THOUGHTS}<answer>The red fox!</answer>", 1),
        ("puzzle", "a red fox", "red fox", 1),
        ("puzzle", "a red fox", "red fox and hen", 0),
        ("string_f1", "a red fox", "the red fox", 1),
        ("string_f1", "a red fox", f"{THOUGHTS}\nred hen", 0.5),
        ("string_f1", ["hen", "a red fox"], "red fox", 1),
        ("string_f1", "hen", "fox", 0),
        ("string_f1", "hen", "", 0),
        ("re_search", '["Paris", "Lutetia"]', "so <finish> paris </finish>", 1),
        ("re_search", "Paris", "<FINISH>Paris</FINISH>", 1),
        ("re_search", ["Paris"], "<finish>London</finish><finish>Paris</finish>", 0),
        ("re_search", "Paris", "Paris", 0),
        ("re_search", "Paris", "<finish>Paris", 0),
        ("re_search", "1889", "<finish>1889</finish>", 1),
        ("re_search", "2.50", "<finish>2.50</finish>", 1),
        ("re_search", "true", "<finish>True</finish>", 1),
        ("re_search_f1", "1E3", "<finish>1E3</finish>", 1),
        ("re_search_f1", "the red fox", "<finish>red hen</finish>", 0.5),
        ("re_search_f1", '["hen", "fox"]', "<finish>hen</finish> no <finish>fox</finish>", 1),
        ("re_search_f1", "fox", "<finish>hen</finish>", 0.1),
        ("re_search_f1", "fox", "fox", 0),
        ("re_search_f1", "fox", "<finish></finish>", 0),
        ("passthrough", "anything", "anything", 0),
    ],
)
def test_scores(name: str, label: object, text: str, expected: float) -> None:
    assert score_response(name, label, [], text).score == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "num_tokens", "expected"),
    [
        ("max_length", 100, 1),
        ("max_length", 50, 0.75),
        ("max_length", 150, 0.75),
        ("max_length", 1000, 0),
        ("up_to_max_length", 1, 1),
        ("up_to_max_length", 100, 1),
        ("up_to_max_length", 150, 0.75),
        ("up_to_max_length", 1000, 0),
    ],
)
def test_lengths(name: str, num_tokens: int, expected: float) -> None:
    verifier = build_all_verifiers(VerifierConfig(max_length_verifier_max_length=200))[name]
    assert verifier([0] * num_tokens, "", "100").score == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("flan", ""),
        ("flan", {"a": 1}),
        ("puzzle", "..."),
        ("string_f1", []),
        ("string_f1", [{"a": 1}]),
        ("re_search", "[]"),
        ("re_search_f1", None),
        ("max_length", "long"),
        ("max_length", -1),
        ("up_to_max_length", "nan"),
    ],
)
def test_labels_that_cannot_be_met_are_refused(name: str, label: object) -> None:
    with pytest.raises(ValueError, match="ground truth"):
        check_label(name, label)


def test_f1_counts_each_common_word_as_often_as_both_have_it() -> None:
    assert f1("red red fox", "red fox fox") == pytest.approx(2 / 3)
    assert f1("the red fox", "a fox") == pytest.approx(2 / 3)
    assert f1("", "") == 0


@pytest.mark.parametrize(
    ("response", "part"),
    [
        ("<answer>4</answer> so", "4"),
        ("<think>I use <answer></answer> tags, <answer>3</answer></think>A good answer", "A good answer"),
        ("<think>hm</think><answer> 4 </answer>", "4"),
        ("plain", "plain"),
    ],
)
def test_a_judge_sees_the_answer_behind_the_thoughts(response: str, part: str) -> None:
    assert judged_part(response) == part


def test_what_a_judge_sees_is_found_in_linear_time() -> None:
    started = time.process_time()
    judged_part("<answer>" * 100_000)
    assert time.process_time() - started < 1.0
