"""What reasoning-gym's tasks pay for: solving a row, and nothing that one could say without having read it.

Two sweeps over all tasks (constants, and right answers that are hedged or misspelt), then the holes that were found one by one.
"""

import functools
import json
import re
import time
from typing import Any

import pytest
from reasoning_gym.factory import DATASETS

from open_instruct.verifiers.reasoning_gym_data import encode_item, reasoning_gym_rows
from open_instruct.verifiers.reasoning_gym_scorers import mend
from open_instruct.verifiers.registry import score_response

TASKS = sorted(set(DATASETS) - {"composite"})  # which needs a list of other tasks
ROWS = {
    "knight_swap": 2,
    "intermediate_integration": 2,
    "simple_integration": 2,
    "puzzle24": 4,
    "sudoku": 4,
    "arc_agi": 4,
}
"""Of 8: rows of these tasks take from 0.1 to 1 second to make; each answer to an integral takes sympy 20 ms."""
SMALLER = {
    "futoshiki": "&max_board_size=4",
    "sokoban": "&max_w=6&max_h=6&max_boxes=4",
    "zebra_puzzles": "&num_people=3",
}
"""Parameters of tasks whose usual rows take a quarter of a second each."""
CONSTANTS = (
    *(
        "",
        "0",
        "1",
        "-1",
        "2",
        "10",
        "42",
        "0.5",
        "0.0",
        "1/2",
        "0/0",
        "nan",
        "inf",
        "-inf",
        "1e999",
        "0e0",
        "0j",
        "1_0",
    ),
    *(
        "True",
        "False",
        "Yes",
        "no",
        "on",
        "None",
        "null",
        "A",
        "a",
        "C",
        "R",
        "Monday",
        "impossible",
        "not 0",
        "0 or 1",
    ),
    *(
        "[]",
        "[[]]",
        "{}",
        "()",
        "[0]",
        '""',
        "0, 0",
        "\n",
        "?",
        "(",
        "1 2 3 4",
        "1*2*3*4",
        "00:00:00",
        "0 days",
        "P ∨ ¬P",
    ),
    *("x" * 300, "A → B → C", "0123456789", "LRUD" * 50, "R L U D", json.dumps([[0] * 10] * 10)),
)


@pytest.fixture(autouse=True)
def same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some tasks refuse to make rows that depend on the hash seed; here they may."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")


@functools.cache
def rows_of(task: str) -> list[dict[str, Any]]:
    return reasoning_gym_rows(f"reasoning_gym/{task}?size={ROWS.get(task, 8)}&seed=3{SMALLER.get(task, '')}")


def item_of(row: dict[str, Any]) -> dict[str, Any]:
    return json.loads(row["ground_truth"])


def right_answer(row: dict[str, Any]) -> str | None:
    """The row's own; where there are many, the example that the task brings along."""
    item = item_of(row)
    examples = [item["metadata"].get(key) for key in ("example_answer", "example_correct_answer")]
    return next((answer for answer in (item["answer"], *examples) if isinstance(answer, str)), None)


def score(row: dict[str, Any], answer: str) -> float:
    return score_response(row["dataset"], row["ground_truth"], [], f"<answer>{answer}</answer>").score


def is_same(constant: str, answer: str | None) -> bool:
    """Whether a constant is the row's own answer, but for case, spaces, and the spelling of a number."""
    if answer is None:
        return False
    try:
        return constant.strip().casefold() == answer.strip().casefold() or json.loads(constant) == json.loads(answer)
    except ValueError:
        return False


@pytest.mark.filterwarnings("ignore:loadtxt")
@pytest.mark.parametrize("task", TASKS)
def test_no_constant_pleases_a_task(task: str) -> None:
    """On the rows whose answer it is not, a constant has little on the average, and nowhere everything."""
    rows = rows_of(task)
    for constant in CONSTANTS:
        scores = [score(row, constant) for row in rows if not is_same(constant, item_of(row)["answer"])]
        assert sum(scores) <= 0.5 * len(scores), (constant, scores)
        if item_of(rows[0])["answer"] is not None:
            assert 1.0 not in scores, (constant, [item_of(row)["answer"] for row in rows])


def in_other_digits(answer: str, zero: str) -> str:
    return answer.translate({ord("0") + digit: chr(ord(zero) + digit) for digit in range(10)})


@pytest.mark.filterwarnings("ignore:loadtxt")
@pytest.mark.parametrize("task", TASKS)
def test_no_hedged_or_misspelt_answer_is_fully_right(task: str) -> None:
    for row in rows_of(task)[:3]:
        right = right_answer(row)
        if right is None or "Integral(" in right:
            continue
        assert score(row, right) == 1.0, right
        answers = [f"{right} or 7777", f"not {right}", f"zzz {right}", f"{right} zzz", f"{right}, zzz"]
        answers += [re.sub(r"([0-9])([0-9])(?![0-9])", rf"\1{sign}\2", right, count=1) for sign in ("_", ",")]
        answers += [
            in_other_digits(right, zero) for zero in ("\N{ARABIC-INDIC DIGIT ZERO}", "\N{FULLWIDTH DIGIT ZERO}")
        ]
        for answer in answers:
            assert answer == right or score(row, answer) < 1.0, answer


# --- arithmetic -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["countdown", "puzzle24"])
def test_arithmetic_uses_the_numbers_of_the_row_and_nothing_else(task: str) -> None:
    for row in rows_of(task):
        metadata = item_of(row)["metadata"]
        numbers, target = metadata["numbers"], metadata.get("target", 24)
        added = "+".join(map(str, numbers))
        assert score(row, right_answer(row) or "") == 1.0
        for answer in (
            f"{target}e0+0e0*({added})",
            f"{target}.0+0.0*({added})",
            f"{target}+0x0*({added})",
            f"{target}+(x-x)*({added})",
            f"(x/x)*{target}+0*({added})",
            f"{target}+0*({added})",
            f"{right_answer(row)}+0",
            f"({right_answer(row)})**1",
            f"({right_answer(row)})//1",
            f"sqrt({right_answer(row)})**2",
            f"{target}",
            "1*2*3*4",
            added,
        ):
            assert score(row, answer) <= 0.05 or (answer == added and sum(numbers) == target), answer


def row_about(task: str, answer: str | None, **metadata: object) -> dict[str, Any]:
    item = {"question": "", "answer": answer, "metadata": {"source_dataset": task, **metadata}}
    return {"dataset": f"reasoning_gym/{task}", "ground_truth": encode_item(item)}


def test_puzzle24_takes_no_fraction_for_24() -> None:
    row = row_about("puzzle24", "8*3*1*1", numbers=[7, 7, 2, 1])
    assert score(row, "7*7/2*1") < 1.0  # 24.5, of which the library takes the integer part
    assert score(row, "(7-2)*7-1") < 1.0
    assert score(row_about("puzzle24", "", numbers=[1, 2, 3, 4]), "1*2*3*4") == 1.0
    assert score(row_about("puzzle24", "", numbers=[3, 3, 8, 9]), "8/(3-8/3)") == 0.01
    assert score(row_about("puzzle24", "", numbers=[8, 3, 8, 3]), "8/(3-8/3)") == 1.0


@pytest.mark.parametrize(
    ("answer", "expected"),
    [("42", 1.0), ("+42.0", 1.0), ("$42", 1.0), ("42%", 1.0), ("42.", 1.0), ("4.2e1", 1.0), ("43", 0.01), ("-42", 0.01)]
    + [(answer, 0.0) for answer in ("not 42", "42 or 7777", "7777 or 42", "- 42", "4,2", "4 2", "4_2", "x", "")],
)
def test_gsm_symbolic_takes_one_number(answer: str, expected: float) -> None:
    assert score(row_about("gsm_symbolic", "42"), answer) == expected


def test_gsm_symbolic_knows_signs_and_thousands() -> None:
    assert score(row_about("gsm_symbolic", "-1234"), "-1,234") == 1.0
    assert score(row_about("gsm_symbolic", "-1234"), "1234") == 0.01


def test_no_probability_is_zero() -> None:
    row = row_about("coin_flip", "0.000030517578125")
    assert score(row, "0.000030517578125") == score(row, "1/32768") == score(row, "0.00003") == 1.0
    assert max(score(row, answer) for answer in ("0", "-0.00001", "0/1", "0,0/1")) < 0.5


def test_zero_is_right_where_it_solves_the_equation() -> None:
    """A quarter of the default rows of polynomial_equations have 0 for their only real solution."""
    import sympy

    rows = reasoning_gym_rows("reasoning_gym/polynomial_equations?size=40&seed=3")
    for row in rows:
        metadata = item_of(row)["metadata"]
        polynomial = sympy.Poly(metadata["polynomial_expr"], sympy.Symbol(metadata["variable"]))
        assert (score(row, "0") == 1.0) == (set(polynomial.real_roots()) == {0}), metadata


@pytest.mark.parametrize("answer", ["x", "none", "1.0 and 2.0", "[1.0]", "0"])
def test_no_solution_is_said_with_nothing(answer: str) -> None:
    row = row_about("polynomial_equations", "")
    assert score(row, "") == score(row, '""') == 1.0
    assert score(row, answer) < 1.0


@pytest.mark.parametrize("nan", ["nan", "NaN", "-nan", "inf", "Infinity"])
def test_what_is_no_number_is_not_sorted(nan: str) -> None:
    """Python sorts nan anywhere, and no distance from it is too large."""
    for row in rows_of("number_sorting"):
        count = item_of(row)["metadata"]["numbers"]
        assert score(row, item_of(row)["answer"]) == 1.0
        assert score(row, item_of(row)["answer"].replace("'", "")) == 1.0
        assert score(row, json.dumps([nan] * count)) == 0.0
        assert score(row, f"[{', '.join([nan] * count)}]") == 0.0


# --- boards, words and people -----------------------------------------------------------------------------------------


def test_an_empty_board_is_no_game_of_life() -> None:
    row = row_about("game_of_life", "[[0,1,0],[0,1,0],[0,0,0]]")
    assert score(row, "[[0, 1, 0],\n [0, 1, 0],\n [0, 0, 0]]") == 1.0
    assert score(row, "[[0,1,0],[0,0,0],[0,0,0]]") == 0.5
    assert score(row, "[[0,1,0],[0,1,0],[0,1,1]]") == 0.5
    for answer in ("[[0,0,0],[0,0,0],[0,0,0]]", "[[0,1],[0,1]]", "[1]", "{}", "[" * 4000, "[[[1]]]", "1"):
        assert score(row, answer) == 0.0, answer
    assert score(row_about("game_of_life", "[[0,0],[0,0]]"), "[[0,0],[0,0]]") == 1.0


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Zoey is a hero, and Aria is a villain.", 1.0),
        ("Aria is a villain and Zoey is a hero", 1.0),
        ("zoey hero, aria villain", 1.0),
        ("Zoey is a hero, and Aria is a hero.", 0.65),
        ("Zoey is a villain, and Aria is a hero.", 0.0),
        ("Zoey is a hero and a villain, and Aria is a villain.", 0.0),
        ("Zoey is a hero, Zoey is a villain", 0.0),
        ("Zoey is a hero", 0.0),
        ("Zoey is not a hero, and Aria is a villain.", 0.0),
        ("It is false that Zoey is a hero, and Aria is a villain.", 0.0),
        ("Zoey is a banana, and Aria is a villain.", 0.0),
    ],
)
def test_each_person_has_one_role(answer: str, expected: float) -> None:
    assert score(row_about("knights_knaves", "Zoey is a hero, and Aria is a villain."), answer) == expected


@pytest.mark.parametrize(
    ("task", "right", "answer"),
    [("prime_factorization", "2 × 3", "I do not know"), ("spell_backward", "sdrawkcab", "sdrawkcabx")],
)
def test_wrong_answers_that_the_library_stumbles_over_have_a_score(task: str, right: str, answer: str) -> None:
    """It raises `ValueError` at words for factors, and gives over 1 to nine right letters with another behind them."""
    row = row_about(task, right)
    assert score_response(row["dataset"], row["ground_truth"], [], f"<answer>{answer}</answer>").score < 1.0


@pytest.mark.parametrize(
    "answer",
    [
        "0",
        "[1]",
        "null",
        "true",
        "[[]]",
        '"x"',
        '{"a": 1}',
        '[{"Agent[0.5, 0.5]": -1}]',
        '[{"Agent[0.5]": "move(a, square[1])"}]',
    ],
)
def test_answers_of_a_wrong_type_have_a_score(answer: str) -> None:
    """The library raises at most of them. If they were not scored, nothing would keep a policy from them."""
    assert score(rows_of("boxnet")[0], answer) == 0.0


def test_numbers_beyond_all_bounds_have_a_score() -> None:
    item = {"question": "", "answer": "42", "metadata": {"source_dataset": "calendar_arithmetic", "task": "count_days"}}
    row = {"dataset": "reasoning_gym/calendar_arithmetic", "ground_truth": encode_item(item)}
    assert score(row, "42") == 1.0
    assert score(row, "9" * 400) == 0.0


class Failing:
    """A scorer of the library that fails."""

    def __init__(self, error: Exception, *, fails_at: str = "") -> None:
        self._error = error
        self._fails_at = fails_at

    def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
        if self._fails_at in answer:
            raise self._error
        return float(answer)


@pytest.mark.parametrize(
    ("error", "fails_at"),
    [
        (MemoryError(), "bad"),
        (OSError("no such file"), "bad"),
        (ImportError("no such module"), "bad"),
        (KeyError("target"), ""),  # at the row's own answer too, so that it is the label's fault
    ],
)
def test_failures_that_are_not_the_answers_are_not_zero(error: Exception, fails_at: str) -> None:
    scorer = mend("any", Failing(error, fails_at=fails_at))
    with pytest.raises(type(error)):
        scorer.score_answer("bad", {"answer": "1.0", "metadata": {}})


@pytest.mark.parametrize("answer", ["nan", "1.5", "-1", "bad"])
def test_scores_out_of_range_are_zero(answer: str) -> None:
    scorer = mend("any", Failing(KeyError("x"), fails_at="bad"))
    assert scorer.score_answer(answer, {"answer": "1.0", "metadata": {}}) == 0.0


@pytest.mark.parametrize(
    ("task", "right", "answer", "expected"),
    [
        ("letter_jumble", "to be or not", "TO be or not", 1.0),
        ("letter_jumble", "to be or not", "to be or not to be or not", 0.5),
        ("letter_jumble", "to be or not", "to bee or not", 0.75),
        ("spell_backward", "olleh", "OLLEH", 1.0),
        ("spell_backward", "olleh", "ollehxxxxx", 0.5),
        ("spell_backward", "enilotipac", "enilotipacx", 10 / 11),
        ("time_intervals", "67 days", "67", 1.0),
        ("time_intervals", "67 days", "67 or 68 days", 0.0),
        ("time_intervals", "03:22:03.005", "03:22:03.005", 1.0),
        ("time_intervals", "03:22:03.005", "03:22:03.5", 0.0),
        ("prime_factorization", "2 × 3 × 7", "7×2×3", 1.0),
        ("prime_factorization", "2 × 3 × 7", "2 × 21", 0.5),
    ],
)
def test_what_stands_behind_an_answer_counts(task: str, right: str, answer: str, expected: float) -> None:
    row = row_about(task, right, task_type="time_ms" if ":" in right else "date")
    assert score(row, answer) == pytest.approx(expected)


def test_words_behind_a_sorted_list_count() -> None:
    right = ["Ant", "bee", "cat", "dog"]
    row = row_about("word_sorting", ", ".join(right), sorted_words=right)
    assert score(row, "Ant, bee,cat ,  dog") == 1.0
    assert score(row, "Ant, bee, cat, dog, zzz, I do not know, 1, 2") == 0.5
    assert score(row, "Ant, bee, cat, dog, ") == 0.8
    assert score(row, "Ant, bee") == score(row, "Ant, bee, dog, cat") == 0.5
    assert score(row, "bee, cat, dog, Ant") == 0.2  # as the library has it for the right words
    assert score(row, "ant, zzz, zzz, zzz") == 0.0


def test_what_stands_behind_a_point_or_an_angle_counts() -> None:
    point = row_about("advanced_geometry", "(-51.000, 41.000)", task_type="orthocenter", ortho=("-51", "41"))
    angle = row_about("advanced_geometry", "52.13°", task_type="angle_measure", angle_ABC_degrees=52.125)
    for answer in ("(-51.000, 41.000)", "-51, 41", "( -51.0 ,41 )"):
        assert score(point, answer) == 1.0
        for behind in (", or (1, 2)", ",", ", 7", ") (", "°, 9", " x"):
            assert score(point, answer + behind) == 0.0, behind
    assert score(angle, "52.13°") == score(angle, "52.13 °") == score(angle, "52.13") == 1.0
    assert score(angle, "52.13° or 3") == score(angle, "nan") == 0.0
    assert 0 < score(angle, "51°") < 0.1
    assert 0 < score(point, "(1, 2)") < 0.1


def test_cars_leave_by_moves() -> None:
    row = row_about("rush_hour", None, board_config="o" * 12 + "AAoooo" + "o" * 18)
    assert score(row, "A+4") == score(row, "A+1 A+3") == 1.0
    assert score(row, "A+1") == 0.01
    for answer in ("A+4 I hope", "A", "a+4", "A+400", "A+99999999"):
        assert score(row, answer) == 0.0, answer


# --- time -------------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore:loadtxt")
@pytest.mark.parametrize(
    "task",
    [
        *(
            "chain_sum",
            "coin_flip",
            "complex_arithmetic",
            "countdown",
            "fraction_simplification",
            "game_of_life",
            "gsm_symbolic",
        ),
        *(
            "kakurasu",
            "knights_knaves",
            "polynomial_equations",
            "prime_factorization",
            "propositional_logic",
            "puzzle24",
        ),
        *("advanced_geometry", "number_sorting", "word_sorting"),
        *("quantum_lock", "rubiks_cube", "rush_hour", "sokoban", "survo", "time_intervals"),
    ],
)
def test_no_answer_that_is_looked_at_takes_long(task: str) -> None:
    """Texts of 4,096 characters, the most that a scorer sees, made of what its answers are made of."""
    row = rows_of(task)[0]
    score(row, "1")
    for part in (
        "1",
        "1,",
        "1,111",
        "1 ",
        " ",
        "1/",
        "1 × ",
        "A→",
        "A+9 ",
        "R9 ",
        "R99 ",
        "(",
        "¬",
        "P∧",
        "P∧(",
        "U",
        "0:",
        "+",
        "[",
        "a ",
    ):
        started = time.process_time()
        score(row, (part * 4096)[:4095] + "x")
        score(row, (part * 4096)[:4096])
        assert time.process_time() - started < 2.0, part
