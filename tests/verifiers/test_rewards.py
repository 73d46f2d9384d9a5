"""What is right and what is not: answers that look alike, nearly right ones, and constants that please everybody.

Each pair here was once scored wrongly, or would be by the obvious way to write the verifier.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from open_instruct.verifiers import reasoning_gym_verifier
from open_instruct.verifiers.reasoning_gym_data import iter_reasoning_gym_rows, reasoning_gym_rows
from open_instruct.verifiers.reasoning_gym_scorers import EXECUTING_TASKS, MAX_ANSWER
from open_instruct.verifiers.registry import check_label, prepare_verifier, score_response

RIGHT, WRONG = 1.0, 0.0


def score(dataset: str, label: object, text: str) -> float:
    return score_response(dataset, label, [], text).score


@pytest.mark.parametrize(
    ("label", "answer", "expected"),
    [
        ("A", "", WRONG),
        ("A", "the", WRONG),
        ("A", "...", WRONG),
        ("A", "a", RIGHT),
        ("A", "(A)", RIGHT),
        ("A", "A.", RIGHT),
        ("-", "", WRONG),
        ("<", "", WRONG),
        ("<", "<", RIGHT),
        ("-5", "5", WRONG),
        ("-5", "-5.", RIGHT),
        ("1/2", "12", WRONG),
        ("3.14", "314", WRONG),
        ("3.14", "3.14", RIGHT),
        ("C++", "C#", WRONG),
        ("C++", "c++", RIGHT),
        ("x+1", "x-1", WRONG),
        ("10%", "10", WRONG),
        ("42", "-42", WRONG),
        ("42", ".42", WRONG),
        ("42", "4,2", WRONG),
        ("42", "4_2", WRONG),
        ("42", "42%", WRONG),
        ("42", "42.", RIGHT),
        ("42", "4'2", WRONG),
        ("42", '4"2', WRONG),
        ("42", "4(2)", WRONG),
        ("42", "(4)(2)", WRONG),
        ("42", "(42)", RIGHT),
        ("23", "2(3)", WRONG),
        ("-42", "−42", RIGHT),
        ("5!", "5", WRONG),
        ("5", "5!", WRONG),
        ("5!", "5!", RIGHT),
        ("B", "A, B", WRONG),
        ("B", "A B", WRONG),
        ("B", "A: B", WRONG),
        ("B", "the B", RIGHT),
        ("B", "(B).", RIGHT),
        ("B", "“B”", RIGHT),
        ("B", "B)", RIGHT),
        ("AB", "A,B", WRONG),
        ("AB", "A B", WRONG),
        ("A, B", "A,B", RIGHT),
        ("a b", "b", WRONG),
        ("a b", "A B", RIGHT),
        ("dog", "a dog", RIGHT),
        ("apple", "An apple.", RIGHT),
        ("1000", "1,000", RIGHT),
        ("1000", "1,0,00", WRONG),
        ("1000000", "1000,000", WRONG),
        ("the Hague", "Hague!", RIGHT),
        ("it's", "its", RIGHT),
        ("U.S.", "US", RIGHT),
        ("Washington, D.C.", "Washington DC", RIGHT),
    ],
)
def test_string_matcher(label: str, answer: str, expected: float) -> None:
    assert score("string_matcher", label, f"So: <answer>{answer}</answer>") == expected


@pytest.mark.parametrize("label", ["", " ", [""], ".", "''", float("nan")])
def test_string_matcher_refuses_labels_that_no_answer_can_match(label: object) -> None:
    with pytest.raises(ValueError, match="ground truth"):
        check_label("string_matcher", label)


@pytest.mark.parametrize(
    ("label", "answer", "expected"),
    [
        ("42", "4 2", WRONG),
        ("42", "4  2", WRONG),
        ("42", "4 \n\n 2", WRONG),
        ("42", r"4\quad 2", WRONG),
        ("42", r"4 \, 2", WRONG),
        ("42", "4 $ 2", WRONG),
        ("42", " 42 ", RIGHT),
        ("42", r"42\%", WRONG),
        (r"42\%", "42%", RIGHT),
        ("42", "٤٢", WRONG),
        ("42", r"42\text{ cm}", RIGHT),
        (r"42\text{ m}", r"42\text{ cm}", WRONG),
        (r"42\text{ m}", r"42\text{ m}^2", WRONG),
        (r"42\text{ m}^2", r"42\text{ m$^2$}", RIGHT),
        ("42", r"42\text{ or 43}", WRONG),
        ("42", r"42\text{ or forty-three}", WRONG),
        ("42", r"42\text{, or -42}", WRONG),
        ("42", r"42\text{\%}", WRONG),
        ("42", r"42\text{ percent}", WRONG),
        (r"42\%", r"42\text{ percent}", RIGHT),
        ("1", r"1\text{0}", WRONG),
        ("5", r"5\text{ million}", WRONG),
        (r"5\text{ million}", r"5 \text{ million}", RIGHT),
        ("5", r"5\text{.5}", WRONG),
        ("5", r"5\mathrm{i}", WRONG),
        ("5", r"5\text{}^2", WRONG),
        ("5", r"5\text{^2}", WRONG),
        ("5", r"5\text{ square feet}", RIGHT),
        ("5", r"5\mathrm{m}^2", RIGHT),
        ("5", r"5\mathrm{m^2}", RIGHT),
        ("5", r"5\text{ cm$^2$}", RIGHT),
        ("5", r"5\text{ miles per hour}", RIGHT),
        ("5", r"5\text{ km/h}", RIGHT),
        ("5", r"5\text{ p.m.}", RIGHT),
        ("5", r"5\text{ °C}", RIGHT),
        ("5", r"5\mbox{ apples}", RIGHT),
        ("1000", r"1{,}000\text{ dollars}", RIGHT),
        ("4", r"\frac{123}", WRONG),
        ("4", r"\frac{12}{3}", RIGHT),
        ("4", r"\frac123", WRONG),
        (r"\frac{1}{2}", r"\frac12", RIGHT),
        (r"\frac{1}{2}", "0.5", RIGHT),
        ("-1/2", r"\frac{-1}{2}", RIGHT),
        ("-1/2", r"-\dfrac{1}{2}", RIGHT),
        ("-1/2", "1/2", WRONG),
        ("10000", "10{,}000", RIGHT),
        ("10000", r"10\,000", RIGHT),
        ("10000", "10,000", RIGHT),
        ("10000", "10 000", WRONG),
        (r"\sqrt2", r"\sqrt{2}", RIGHT),
        ("18.5", r"\$18.50", RIGHT),
        ("42", "−42", WRONG),
        ("-42", "−42", RIGHT),
        (r"x^2 + 1", r"x^2+1", RIGHT),
        (r"\text{even}", "even", RIGHT),
        ("1", "", WRONG),
        ("1", r"\frac{1}{0}", WRONG),
    ],
)
def test_math(label: str, answer: str, expected: float) -> None:
    assert score("math", label, rf"It is \boxed{{{answer}}}.") == expected


@pytest.mark.parametrize("label", ["", "$", ".", [""], float("nan"), float("inf")])
def test_math_refuses_labels_that_an_empty_box_would_match(label: object) -> None:
    with pytest.raises(ValueError, match="ground truth"):
        check_label("math", label)


@pytest.mark.parametrize(
    ("label", "text", "expected"),
    [
        ("42", "−42", WRONG),
        ("42", "it is –42", WRONG),
        ("-42", "−42", RIGHT),
        ("-42", "-42", RIGHT),
        ("42", "1e42", WRONG),
        ("42", "4e42", WRONG),
        ("1000", "1e3", RIGHT),
        ("42", "1/42", WRONG),
        ("0.5", "1/2", RIGHT),
        ("42", "12:42", WRONG),
        ("42", "1_42", WRONG),
        ("42", "1.000,42", WRONG),
        ("42", "42²", WRONG),
        ("42", "pages 40–42", RIGHT),
        ("42", "Answer:42", RIGHT),
        ("42", "and/or 42", RIGHT),
        ("42", "43 or 42", RIGHT),
        ("42", "42 or 43", WRONG),
        ("42", "1e99999999", WRONG),
        ("#### 42", "42", RIGHT),
        ("42", "10^42", WRONG),
        ("42", "10^{42}", WRONG),
        ("42", "10**42", WRONG),
        ("42", "so **42**", RIGHT),
        ("42", "42⁻¹", WRONG),
        ("42", "2024-05-42", WRONG),
        ("42", "1.2.42", WRONG),
        ("42", "1,42", WRONG),
        ("42", "1'042", WRONG),
        ("42", "42½", WRONG),
        ("42", "½42", WRONG),
        ("42", "42٠", WRONG),
        ("42", "5 /42", WRONG),
        ("0.5", "1 / 2", RIGHT),
        ("42", "84 / 2 = 42", RIGHT),
        ("42", "-€42", WRONG),
        ("-42", "-€42", RIGHT),
        ("-42", "-$42", RIGHT),
        ("-42", r"-\$42", RIGHT),
        ("42", "- 42", WRONG),
        ("42", "x = - 42", WRONG),
        ("42", "The total - 42", RIGHT),
        ("42", "Results:\n- 40\n- 42", RIGHT),
        ("42", "\N{NON-BREAKING HYPHEN}42", WRONG),
        ("42", "\N{FULLWIDTH HYPHEN-MINUS}42", WRONG),
        ("-42", "\N{FULLWIDTH HYPHEN-MINUS}42", RIGHT),
        ("0", "10 000", WRONG),
        ("0", "1,00,000", WRONG),
        ("0", r"1\,000", WRONG),
        ("1000", "1 000", RIGHT),
        ("1000", "1\N{NARROW NO-BREAK SPACE}000", RIGHT),
        ("1000000", "about 1 000 000.", RIGHT),
        ("1000", r"1\,000", RIGHT),
        ("100", "1 2 3 100", RIGHT),
        ("1000", "$1,000.00", RIGHT),
        ("1000", r"$1,\!000$", RIGHT),
        ("1000", r"\boxed{1{,}\! 000}", RIGHT),
        ("42", r"1,\!42", WRONG),
        ("42", "42 apples", RIGHT),
        ("42", "42%", RIGHT),
        ("42", "42!", RIGHT),
        ("42", r"\(42\)", RIGHT),
        ("42", "`42`", RIGHT),
        ("42", "[1, 42]", RIGHT),
    ],
)
def test_gsm8k(label: str, text: str, expected: float) -> None:
    assert score("gsm8k", label, text) == expected


@pytest.mark.parametrize("label", ["2024-05-06", "3 apples and 5 pears", "12:42", "1_42", "none"])
def test_gsm8k_refuses_labels_of_no_one_number(label: str) -> None:
    with pytest.raises(ValueError, match="must hold one number"):
        check_label("gsm8k", label)


@pytest.mark.parametrize("dataset", ["math", "gsm8k", "string_matcher"])
@pytest.mark.parametrize(
    "part",
    [
        "9",
        "\\frac",
        "\\frac9",
        "{",
        "1,111",
        "1.",
        " ",
        "-",
        "\\text{",
        "9/",
        "9 ",
        "1e9",
        "<answer>",
        "\\boxed{",
        "$",
        "%",
    ],
)
def test_no_answer_takes_long(dataset: str, part: str) -> None:
    """Twenty thousand characters of anything: a quadratic search would take many seconds."""
    answer = (part * 20_000)[:20_000]
    started = time.perf_counter()
    for text in (rf"\boxed{{{answer}}}", rf"\boxed{{\frac{answer}x}}", f"<answer>{answer}</answer>", f"it is {answer}"):
        score(dataset, "42", text)
    assert time.perf_counter() - started < 2.0


# --- reasoning-gym ----------------------------------------------------------------------------------------------------


def rows_of(task: str, size: int = 24) -> list[dict]:
    return reasoning_gym_rows(f"reasoning_gym/{task}?size={size}")


@pytest.mark.parametrize(
    ("task", "answer"),
    [
        ("game_of_life_halting", "False"),
        ("game_of_life_halting", "?"),
        ("coin_flip", "0"),
        ("complex_arithmetic", "nan"),
    ],
)
def test_no_constant_pleases_every_row(task: str, answer: str) -> None:
    scores = [score(row["dataset"], row["ground_truth"], f"<answer>{answer}</answer>") for row in rows_of(task)]
    assert min(scores) < 1.0
    targets = [json.loads(row["ground_truth"])["answer"] for row in rows_of(task)]
    assert [number == 1.0 for number in scores] == [str(number) == answer for number in targets]


@pytest.mark.parametrize(
    "task",
    [
        "binary_matrix",
        "bitwise_arithmetic",
        "coin_flip",
        "complex_arithmetic",
        "game_of_life_halting",
        "n_queens",
        "number_sorting",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    ],
)
def test_right_answers_of_mended_tasks_are_right(task: str) -> None:
    for row in rows_of(task):
        answer = json.loads(row["ground_truth"])["answer"]
        assert score(row["dataset"], row["ground_truth"], f"<answer>{answer}</answer>") == 1.0


def test_right_answers_to_countdown() -> None:
    for row in rows_of("countdown"):
        expression = json.loads(row["ground_truth"])["metadata"]["expression"]
        assert score(row["dataset"], row["ground_truth"], f"<answer>{expression}</answer>") == 1.0


@pytest.mark.parametrize(
    ("task", "answer", "part"),
    [("string_insertion", list, 0.1), ("spiral_matrix", str.split, 0.1)],
)
def test_lists_keep_their_partial_credit(task: str, answer: type, part: float) -> None:
    for row in rows_of(task, 4):
        right = json.loads(row["ground_truth"])["answer"]
        assert score(row["dataset"], row["ground_truth"], f"<answer>{answer(right)}</answer>") == part


def test_integrals_may_be_written_in_any_form() -> None:
    item = {
        "question": "",
        "answer": "x**2 + C",
        "metadata": {"source_dataset": "simple_integration", "variable": "x", "integrand": "2*x"},
    }
    label = json.dumps(item)
    for answer in ("x**2 + C", "x*x + C", "(x + 1)**2 - 2*x", "x**2 + pi", " x**2+3.5 "):
        assert score("reasoning_gym/simple_integration", label, f"<answer>{answer}</answer>") == 1.0
    for answer in ("x**3", "x**2 +", "Integral(2*x, x)", "", "x" * 5000):
        assert score("reasoning_gym/simple_integration", label, f"<answer>{answer}</answer>") == 0.0


def test_tasks_that_evaluate_answers_are_refused_where_there_is_no_jail(monkeypatch: pytest.MonkeyPatch) -> None:
    [row] = rows_of("n_queens", 1)
    check_label(row["dataset"], row["ground_truth"])
    monkeypatch.setattr(reasoning_gym_verifier, "missing", lambda: ["Landlock is not there"])
    for act in (lambda: check_label(row["dataset"], row["ground_truth"]), lambda: prepare_verifier(row["dataset"])):
        with pytest.raises(ValueError, match=r"reasoning_gym/n_queens: its scorer evaluates .* Landlock is not there"):
            act()
    [harmless] = rows_of("chain_sum", 1)
    check_label(harmless["dataset"], harmless["ground_truth"])


# --- nothing that somebody wrote is run -------------------------------------------------------------------------------


def attacks(trace: Path) -> list[str]:
    """Texts that write a file where they are run as Python; some look like what the tasks ask for."""
    touch = f"__import__('pathlib').Path({str(trace)!r}).touch()"
    return [
        touch,
        f"[{touch}]",
        f"[[{touch}]]",
        f"1 + ({touch} or 1)",
        f"(lambda: {touch})()",
        f"x*({touch} or 1)",
        f"exec({touch!r})",
        f"sin(eval({touch!r}))",
        f"().__class__.__base__.__subclasses__() and {touch}",
        f"0x1 & ({touch} or 1)",
    ]


@pytest.fixture(autouse=True)
def same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some tasks refuse to make rows that depend on the hash seed; here they may."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")


def row_of(task: str) -> dict[str, Any]:
    return next(iter(iter_reasoning_gym_rows(f"reasoning_gym/{task}?size=1&seed=1")))


def score_quietly(row: dict[str, Any], label: object, answer: str) -> float | None:
    """None where the verifier raises, which a pool counts as 0."""
    try:
        return score_response(row["dataset"], label, [], f"<answer>{answer}</answer>").score
    except Exception:
        return None


@pytest.mark.parametrize("task", sorted(EXECUTING_TASKS))
def test_nothing_of_an_answer_is_run(task: str, tmp_path: Path) -> None:
    """Without the jail, which would hide it."""
    row, trace = row_of(task), tmp_path / "trace"
    for attack in attacks(trace):
        assert (score_quietly(row, row["ground_truth"], attack) or 0.0) < 1.0, attack
        assert not trace.exists(), attack


@pytest.mark.parametrize("task", sorted(EXECUTING_TASKS))
def test_nothing_of_a_label_is_run(task: str, tmp_path: Path) -> None:
    """Each text in it is replaced by an attack."""
    row, trace = row_of(task), tmp_path / "trace"
    right = str(json.loads(row["ground_truth"])["answer"])
    for attack in attacks(trace):
        for label in with_each_text_replaced(json.loads(row["ground_truth"]), attack):
            score_quietly(row, json.dumps(label), right)
            assert not trace.exists(), label


def with_each_text_replaced(value: Any, by: str) -> Iterator[Any]:
    if isinstance(value, str):
        yield by
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from ({**value, key: other} for other in with_each_text_replaced(part, by))
    elif isinstance(value, list):
        for number, part in enumerate(value):
            yield from ([*value[:number], other, *value[number + 1 :]] for other in with_each_text_replaced(part, by))


@pytest.mark.parametrize("task", sorted(EXECUTING_TASKS))
def test_right_answers_are_right(task: str) -> None:
    for row in iter_reasoning_gym_rows(f"reasoning_gym/{task}?size=8&seed=2"):
        item = json.loads(row["ground_truth"])
        answer = item["answer"] or item["metadata"].get("example_answer")
        if "Integral(" not in str(answer):  # sympy could not do it, and the label says so
            assert score_quietly(row, row["ground_truth"], str(answer)) == 1.0, (answer, item)


@pytest.mark.parametrize(
    ("answer", "is_right"),
    [("{}", True), ("+{}", True), ("{}.0", True), (" {} ", True), ("{0[0]}_{0[1]}", False), ("{0[0]},{0[1]}", False)],
)
def test_sums_are_numbers_as_people_write_them(answer: str, is_right: bool) -> None:
    row = next(
        row
        for row in iter_reasoning_gym_rows("reasoning_gym/chain_sum?size=50&seed=7&min_digits=2&max_digits=2")
        if len(json.loads(row["ground_truth"])["answer"]) == 2
    )
    right = json.loads(row["ground_truth"])["answer"]
    assert (score_quietly(row, row["ground_truth"], answer.format(right)) == 1.0) == is_right
    arabic = right.translate({ord("0") + n: chr(0x660 + n) for n in range(10)})
    assert score_quietly(row, row["ground_truth"], arabic) != 1.0


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("task", "answer"),
    [
        ("coin_flip", "1e999999999"),
        ("propositional_logic", "\N{NOT SIGN}" * MAX_ANSWER),
        ("propositional_logic", "P\N{LOGICAL AND}" * (MAX_ANSWER // 2)),
        ("propositional_logic", "\N{LOGICAL AND}".join("abcdefghijklmnopqrstuvwxyz")),
        ("propositional_logic", "\N{LOGICAL AND}".join("P" * length for length in range(2, 27))),
        ("rubiks_cube", "R9999999"),
        ("rubiks_cube", "0123456789"),
        ("rush_hour", "A+99999999"),
        ("countdown", "9**9**9**9"),
        ("countdown", "10**10**7"),
        ("puzzle24", "2**(2**40)"),
        ("simple_integration", "factorial(10**7)"),
        ("string_insertion", "[i for i in range(10**9)]"),
        ("string_insertion", "'a'*(3*10**9)"),
    ],
    ids=lambda value: value[:20],
)
def test_answers_that_took_for_ever_take_no_time(task: str, answer: str) -> None:
    row = row_of(task)
    start = time.process_time()
    assert (score_quietly(row, row["ground_truth"], answer) or 0.0) < 1.0
    assert time.process_time() - start < 5.0
