"""Accuracy by cycle, over samples and data sets."""

import numpy as np
import pytest

from open_instruct.rc_evaluation import evaluate, stated_answer
from open_instruct.rc_types import REASONING, SUMMARIZATION, TrainingText


def trajectory(problem: str, sample: int, *answers: str, right: str = "yes", dataset: str = "d") -> list[TrainingText]:
    turns = []
    for number, answer in enumerate(answers, start=1):
        for kind, size in ((REASONING, 10), (SUMMARIZATION, 2)):
            reward = float(answer == right) if kind == REASONING else None
            metadata = {"turn_type": kind, "turn_number": number, "dataset": dataset}
            ids = np.zeros(size * number, np.int32)
            text = f"<answer>{answer}</answer>" if answer else "nothing"
            finished = number == 1
            key = ("g", f"{problem}/{sample}", problem)
            turns.append(TrainingText(text, ids, ids, ids.astype(np.float32), reward, finished, *key, metadata))
    return turns


def test_every_measure() -> None:
    measures = evaluate(
        [
            trajectory("p", 0, "no", "yes", "no"),
            trajectory("p", 1, "no", "no", "yes"),
            trajectory("p", 2, "yes", "no", "yes"),
            trajectory("q", 0, "no", "no", "no"),
            trajectory("q", 1, "", "", ""),
        ]
    )["overall"]
    assert (measures["problems"], measures["trajectories"]) == (2, 5)
    assert measures["accuracy_by_cycle"] == pytest.approx([1 / 6, 1 / 6, 2 / 6])
    assert (measures["initial"], measures["final"]) == pytest.approx((1 / 6, 2 / 6))
    assert measures["any_cycle"] == 0.5
    assert measures["best_of_n"] == 0.5
    assert measures["majority"] == 0.5
    assert measures["overflow"] == pytest.approx(2 / 3)
    assert measures["tokens_by_cycle"] == [12, 24, 36]


def test_problems_count_alike_and_data_sets_apart() -> None:
    some = [trajectory("p", number, "yes", dataset="a") for number in range(9)] + [
        trajectory("q", 0, "no", dataset="b")
    ]
    measures = evaluate(some)
    assert measures["overall"]["final"] == 0.5
    assert {name: one["final"] for name, one in measures["by_dataset"].items()} == {"a": 1, "b": 0}


def test_a_trajectory_that_stopped_early_keeps_its_answer() -> None:
    measures = evaluate([trajectory("p", 0, "yes"), trajectory("q", 0, "no", "no")])["overall"]
    assert measures["accuracy_by_cycle"] == [0.5, 0.5]


def test_a_majority_that_is_wrong_counts_as_wrong() -> None:
    some = [trajectory("p", number, answer) for number, answer in enumerate(["no", "no", "yes"])]
    assert evaluate(some)["overall"]["majority"] == 0
    assert evaluate(some)["overall"]["best_of_n"] == 1


def test_answers_that_vote() -> None:
    assert stated_answer("<think>3</think> <answer>4</answer>") == "4"
    assert stated_answer(r"so \boxed{5} of 6") == "5"
    assert stated_answer("it is 1,234.") == "1234"
    assert stated_answer("<think>7") is None
    assert evaluate([]) == {"overall": {"problems": 0, "trajectories": 0}, "by_dataset": {}}
