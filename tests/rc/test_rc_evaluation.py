"""Accuracy by cycle, over samples and data sets, and that of one long turn."""

import json
from pathlib import Path

import numpy as np
import pytest
from rc_fakes import settings

from open_instruct.rc.evaluation import evaluate, format_comparison, stated_answer
from open_instruct.report.plots import plot_accuracy_by_cycle
from open_instruct.workflows.rc.types import CONTROL, ONE_LONG_TURN, REASONING, SUMMARIZATION, TrainingText

BUDGETS = [100, 220, 340]


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
        ],
        BUDGETS,
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
    measures = evaluate(some, BUDGETS)
    assert measures["overall"]["final"] == 0.5
    assert {name: one["final"] for name, one in measures["by_dataset"].items()} == {"a": 1, "b": 0}


def test_a_trajectory_that_stopped_early_keeps_its_answer() -> None:
    measures = evaluate([trajectory("p", 0, "yes"), trajectory("q", 0, "no", "no")], BUDGETS)["overall"]
    assert measures["accuracy_by_cycle"] == [0.5, 0.5]


def test_a_majority_that_is_wrong_counts_as_wrong() -> None:
    some = [trajectory("p", number, answer) for number, answer in enumerate(["no", "no", "yes"])]
    assert evaluate(some, BUDGETS)["overall"]["majority"] == 0
    assert evaluate(some, BUDGETS)["overall"]["best_of_n"] == 1


def test_what_no_policy_has_scored_is_not_wrong() -> None:
    known = [trajectory("p", 0, "yes", "no"), long_turn("p", 90)]
    unknown = [trajectory("q", 0, "yes", "no"), long_turn("q", 90)]
    unknown[0][2].reward = unknown[1][0].reward = None
    measures = evaluate([*known, *unknown], BUDGETS)["overall"]
    assert measures == evaluate(known, BUDGETS)["overall"] | {"not_scored": 2}
    assert evaluate(unknown, BUDGETS)["overall"] == {"problems": 0, "trajectories": 0, "not_scored": 2}


def test_measures_do_not_depend_on_the_order_of_the_stream() -> None:
    some = [trajectory("p", number, answer) for number, answer in enumerate(["no", "yes"])]
    some += [trajectory("q", 0, "yes", dataset="other")]
    assert json.dumps(evaluate(some, BUDGETS)) == json.dumps(evaluate(some[::-1], BUDGETS))


def test_answers_that_vote() -> None:
    assert stated_answer("<think>3</think> <answer>4</answer>") == "4"
    assert stated_answer(r"so \boxed{5} of 6") == "5"
    assert stated_answer("it is 1,234.") == "1234"
    assert stated_answer("<think>7") is None
    assert evaluate([], BUDGETS) == {"overall": {"problems": 0, "trajectories": 0}, "by_dataset": {}}


# --- one long turn ----------------------------------------------------------------------------------------------------


def long_turn(
    problem: str, num_tokens: int, reward: float = 1.0, *, finished: bool = True, dataset: str = "d"
) -> list[TrainingText]:
    metadata = {"turn_type": REASONING, "turn_number": 1, "dataset": dataset, CONTROL: ONE_LONG_TURN}
    ids = np.zeros(num_tokens, np.int32)
    key = ("g", f"{problem}/{ONE_LONG_TURN}/0", problem)
    return [TrainingText("yes", ids, ids, ids.astype(np.float32), reward, finished, *key, metadata)]


def test_budgets_are_those_of_the_answer_of_each_cycle() -> None:
    rc = settings(3, max_reasoning_tokens=100, max_summary_tokens=20)
    assert rc.token_budgets == BUDGETS
    long = rc.as_one_long_turn()
    assert (long.num_reasoning_steps, long.max_reasoning_tokens) == (1, 340)
    assert settings(1, max_reasoning_tokens=100).token_budgets == [100]


def test_a_long_turn_is_right_from_the_budget_that_it_ended_within() -> None:
    some = [long_turn("p", 100), long_turn("q", 101), long_turn("r", 340), long_turn("s", 5, reward=0.5)]
    some += [long_turn("t", 340, finished=False), long_turn("u", 250, finished=False)]
    measures = evaluate(some, BUDGETS)["overall"]
    assert measures["budget_by_cycle"] == BUDGETS
    assert measures["one_long_turn_by_budget"] == pytest.approx([1 / 6, 2 / 6, 3 / 6])
    assert (measures["one_long_turns"], measures["one_long_turns_cut_by_context"]) == (6, 1)


def test_problems_count_alike_in_the_control_too() -> None:
    some = [long_turn("p", 10) for _ in range(9)] + [long_turn("q", 10, reward=0.0)]
    assert evaluate(some, BUDGETS)["overall"]["one_long_turn_by_budget"] == [0.5] * 3


def test_a_control_changes_nothing_that_is_said_of_the_cycles() -> None:
    cycles = [trajectory("p", 0, "no", "yes", dataset="a"), trajectory("q", 0, "no", "no", dataset="b")]
    controls = [long_turn("p", 10, dataset="a"), long_turn("q", 200, dataset="b")]
    without, both = evaluate(cycles, BUDGETS), evaluate([*cycles, *controls], BUDGETS)
    assert both["overall"].items() >= without["overall"].items()
    assert "one_long_turn_by_budget" not in without["overall"]
    by_dataset = {name: one["one_long_turn_by_budget"] for name, one in both["by_dataset"].items()}
    assert by_dataset == {"a": [1, 1, 1], "b": [0, 1, 1]}
    assert evaluate(controls, BUDGETS)["overall"]["problems"] == 0


def test_the_comparison_as_a_table() -> None:
    cycles = [trajectory("p", 0, "no", "yes", "yes"), trajectory("q", 0, "no", "no", "yes")]
    measures = evaluate([*cycles, long_turn("p", 90), long_turn("q", 250, finished=False)], BUDGETS)["overall"]
    lines = format_comparison(measures).splitlines()
    assert [line.split() for line in lines[2:5]] == [
        ["100", "0.0%", "50.0%"],
        ["220", "50.0%", "50.0%"],
        ["340", "100.0%", "50.0%"],
    ]
    assert lines[6].startswith("1 of 2 long turns were cut by the context")
    assert format_comparison(evaluate(cycles, BUDGETS)["overall"]) == ""


def test_the_plot_is_drawn_where_there_is_something_to_draw(tmp_path: Path) -> None:
    stopped_early = [trajectory("p", 0, "yes"), long_turn("p", 90)]
    for name, some in (("both", stopped_early), ("cycles", stopped_early[:1])):
        path = tmp_path / f"{name}.png"
        assert plot_accuracy_by_cycle(evaluate(some, BUDGETS)["overall"], BUDGETS, path) == path
        assert path.read_bytes().startswith(b"\x89PNG")
    nothing = evaluate([], BUDGETS)["overall"]
    assert plot_accuracy_by_cycle(nothing, BUDGETS, tmp_path / "nothing.png") is None
    assert not (tmp_path / "nothing.png").exists()
