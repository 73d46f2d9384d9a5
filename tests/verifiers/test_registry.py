"""Verifiers on the responses that models really give."""

import json
import math
import pickle
import subprocess
import sys
from decimal import Decimal

import pytest
import reasoning_gym
from hypothesis import given
from hypothesis import strategies as st

from open_instruct.verifiers import reasoning_gym_verifier
from open_instruct.verifiers.answer_reading import extract_answer, last_number
from open_instruct.verifiers.reasoning_gym_data import encode_item, reasoning_gym_rows
from open_instruct.verifiers.registry import (
    VerificationResult,
    VerifierFunction,
    build_all_verifiers,
    check_label,
    find_verifier,
    prepare_verifier,
    score_response,
    verifier_name,
    verifier_names,
)


def score(dataset: str, label: object, text: str) -> float:
    return score_response(dataset, label, [], text).score


@pytest.mark.parametrize("bad", [-0.1, 1.1, math.nan, math.inf])
def test_scores_lie_between_zero_and_one(bad: float) -> None:
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        VerificationResult(bad)


def test_verifiers_by_name() -> None:
    assert {"gsm8k", "reasoning_gym", "string_matcher"} <= set(verifier_names())
    verifiers = build_all_verifiers()
    assert sorted(verifiers) == verifier_names()
    for name, verifier in verifiers.items():
        assert isinstance(verifier, VerifierFunction)
        assert (verifier.name, verifier.weight) == (name, 1.0)


def test_the_dataset_column_finds_its_verifier() -> None:
    verifiers = build_all_verifiers()
    assert find_verifier("GSM8K", verifiers).name == "gsm8k"
    assert find_verifier("reasoning_gym/chain_sum", verifiers).name == "reasoning_gym"
    with pytest.raises(ValueError, match=r"no verifier is called 'gsm9k'; there are: .*gsm8k"):
        find_verifier("gsm9k", verifiers)


def test_a_full_name_goes_before_the_part_before_the_slash() -> None:
    assert verifier_name("math/strict", ["math", "math/strict"]) == "math/strict"
    assert verifier_name("math/loose", ["math", "math/strict"]) == "math"
    assert verifier_name("mathematics", ["math"]) is None


# Answers in tags


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>4</answer>", "4"),
        ("so <answer>\n 4 \n</answer>.", "4"),
        ("<answer>3</answer> no, <answer>4</answer>", "4"),
        ("<answer>3</answer> no, <answer>4", "3"),
        ("<answer>1<answer>2</answer>", "2"),
        ("<answer>4</answer></answer>", "4"),
        ("<answer></answer>", ""),
        ("<answer>4", None),
        ("4</answer>", None),
        ("</answer>4<answer>", None),
        ("", None),
    ],
)
def test_the_last_complete_answer_counts(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


parts = st.lists(st.sampled_from(["<answer>", "</answer>", "4", " ", "x"]), max_size=8)


@given(before=parts, inner=st.text("0123456789+-", max_size=5))
def test_whatever_stands_before_the_last_answer_is_read(before: list[str], inner: str) -> None:
    assert extract_answer("".join(before) + f"<answer>{inner}</answer>") == inner


def test_extracting_takes_linear_time() -> None:
    assert extract_answer("<answer>" * 200_000) is None
    assert extract_answer("<answer>" * 200_000 + "4</answer>") == "4"


# reasoning_gym


def test_reasoning_gym_scores_with_the_task() -> None:
    row = reasoning_gym_rows("reasoning_gym/chain_sum?size=1")[0]
    answer = json.loads(row["ground_truth"])["answer"]
    assert score(row["dataset"], row["ground_truth"], f"Well. <answer>{answer}</answer>") == 1.0
    assert score(row["dataset"], row["ground_truth"], "<answer>none</answer>") == 0.0
    result = score_response(row["dataset"], row["ground_truth"], [], f"It is {answer}")
    assert (result.score, result.reasoning) == (0.0, "no <answer>...</answer>")


@pytest.mark.parametrize("task", ["arc_1d", "basic_arithmetic", "countdown", "rearc", "simple_equations", "sudoku"])
def test_reasoning_gym_gives_its_own_answers_full_marks(task: str) -> None:
    """`rearc` compares tuples: with a ground truth of plain JSON its right answers would score 0.05."""
    for row in reasoning_gym_rows(f"reasoning_gym/{task}?size=3"):
        item = json.loads(row["ground_truth"])
        assert score(row["dataset"], row["ground_truth"], f"<answer>{item['answer']}</answer>") == 1.0


def test_scorers_know_the_parameters_of_the_entry() -> None:
    """`decimal_arithmetic` tolerates an error of one in the last place that it was asked for."""
    for digits in (2, 6):
        entry = f"reasoning_gym/decimal_arithmetic?size=1&min_num_decimal_places=2&max_num_decimal_places={digits}"
        row = reasoning_gym_rows(entry)[0]
        near = Decimal(json.loads(row["ground_truth"])["answer"]) + Decimal("0.001")
        assert score(row["dataset"], row["ground_truth"], f"<answer>{near}</answer>") == float(digits == 2)


def test_a_scorer_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = reasoning_gym_rows("reasoning_gym/spell_backward?size=4")
    calls = []
    reasoning_gym_verifier._scorer.cache_clear()
    create = reasoning_gym.create_dataset
    monkeypatch.setattr(reasoning_gym, "create_dataset", lambda task, **kw: calls.append(kw) or create(task, **kw))
    prepare_verifier(rows[0]["dataset"])
    for row in rows:
        score(row["dataset"], row["ground_truth"], "<answer>x</answer>")
    assert calls == [{"size": 1, "seed": 0}]


@pytest.mark.parametrize(
    ("label", "words"),
    [
        (7, "JSON text, got int"),
        ('{"answer": "4"}', "question, answer and metadata"),
        (encode_item({"question": "q", "answer": "a", "metadata": {}}), r"metadata\.source_dataset"),
        (
            encode_item({"question": "q", "answer": "a", "metadata": {"source_dataset": "chain_sun"}}),
            "nearest: chain_sum",
        ),
    ],
)
def test_ground_truths_of_no_use_are_refused(label: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_label("reasoning_gym/chain_sum", label)
    with pytest.raises(ValueError, match=words):
        score("reasoning_gym/chain_sum", label, "<answer>4</answer>")


# gsm8k


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 42.", "42"),
        ("first 7, then 42", "42"),
        ("1,234", "1234"),
        ("costs $1,234.50.", "1234.50"),
        ("12,34", None),
        ("1234,567", None),
        ("= -5", "-5"),
        ("-$5", "-5"),
        ("$-5", "-5"),
        ("9-4", "4"),
        ("9 - 4", "4"),
        ("(2)-4", "4"),
        ("x-4", "4"),
        ("about .5", "0.5"),
        ("3.14.", "3.14"),
        ("50%", "50"),
        ("#### 72", "72"),
        ("no number", None),
        ("", None),
    ],
)
def test_last_number(text: str, number: str | None) -> None:
    assert last_number(text) == (None if number is None else Decimal(number))


@given(st.integers(-(10**12), 10**12))
def test_every_spelling_of_a_number_is_that_number(number: int) -> None:
    for text in (f"{number}", f"{number:,}", f"it is {number}.", f"{number:,}.00", f"7, {number}", f"**{number}**"):
        assert last_number(text) == number


@pytest.mark.parametrize(
    ("label", "text", "expected"),
    [
        ("72", "so 72", 1.0),
        ("72", "72, or 73", 0.0),
        ("7.0", "7", 1.0),
        (7, "7", 1.0),
        (["1,000"], "$1000.", 1.0),
        ("0072", "72", 1.0),
        ("9" * 18, "9" * 18 + ".0", 1.0),
        ("9" * 19, "9" * 19 + ".0", 1.0),
        ("9" * 19, "9" * 18 + "8", 0.0),
        ("#### 72", "72", 1.0),
        ("72", "none", 0.0),
    ],
)
def test_gsm8k(label: object, text: str, expected: float) -> None:
    assert score("gsm8k", label, text) == expected


@pytest.mark.parametrize("label", ["many", None, ["1", "2"], {"a": 1}, True, "", "7 8", "\u0661"])
def test_gsm8k_needs_a_number(label: object) -> None:
    with pytest.raises(ValueError, match=r"number"):
        check_label("gsm8k", label)


# string_matcher


@pytest.mark.parametrize(
    ("label", "text", "expected"),
    [
        ("Paris", "<answer>paris</answer>", 1.0),
        ("The Hague", "<answer>Hague.</answer>", 1.0),
        ("Paris", "Paris", 0.0),
        ("Paris", "<answer>Paris, France</answer>", 0.0),
        (["Paris"], "<answer> Paris </answer>", 1.0),
    ],
)
def test_string_matcher(label: object, text: str, expected: float) -> None:
    assert score("string_matcher", label, text) == expected


def test_string_matcher_needs_a_text() -> None:
    with pytest.raises(ValueError, match="one text or number"):
        check_label("string_matcher", ["a", "b"])


def test_what_a_verifier_raises_comes_out() -> None:
    with pytest.raises(ValueError, match="no verifier is called 'x'"):
        score_response("x", "1", [], "1")


def test_score_response_pickles() -> None:
    assert pickle.loads(pickle.dumps(score_response)) is score_response


def test_importing_is_light() -> None:
    code = (
        "import sys; import open_instruct.verifiers.registry as g; g.verifier_names();"
        "print([m for m in ('torch', 'ray', 'vllm', 'deepspeed', 'transformers', 'datasets', 'reasoning_gym')"
        " if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
