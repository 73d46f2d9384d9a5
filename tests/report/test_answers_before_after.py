"""Answers to the same questions in the first and in the last evaluation."""

import json
from pathlib import Path
from typing import Any

from open_instruct.report.answers_before_after import LONGEST_ANSWER, LONGEST_PROMPT, answers_before_and_after


def answer(place: str, response: str, scores: float | None, **columns: Any) -> dict[str, Any]:
    row = {"row": place, "prompt": "<user>1 + 1?", "response": response, "scores": scores, "ground_truth": "2"}
    return row | columns


def write(directory: Path, step: int, *rows: dict[str, Any]) -> None:
    directory.mkdir(exist_ok=True)
    (directory / f"step_{step:06d}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_answers_of_the_first_and_the_last_evaluation_stand_under_each_other(tmp_path: Path) -> None:
    write(tmp_path, 0, answer("t line 3", "It is\n3.", 0.0), answer("t line 5", "x", 0.0))
    write(tmp_path, 25, answer("t line 3", "between", 0.5))
    write(tmp_path, 50, answer("t line 5", "two", 0.25), answer("t line 3", "2", 1.0), answer("t line 3", "other", 0.0))
    assert answers_before_and_after(tmp_path).splitlines() == [
        "held-out answers after step 0 and after step 50:",
        "",
        "  t line 3, label 2: <user>1 + 1?",
        "    step  0  reward 0    It is 3.",
        "    step 50  reward 1    2",
        "",
        "  t line 5, label 2: <user>1 + 1?",
        "    step  0  reward 0    x",
        "    step 50  reward 0.25 two",
    ]


def test_the_label_is_the_answer_that_the_verifier_reads_in_the_ground_truth(tmp_path: Path) -> None:
    row = answer("t line 3", "7", 1.0, ground_truth='{"dataset": "chain_sum"}', right_answers=["7", "7.0"])
    for step in (0, 1):
        write(tmp_path, step, row)
    assert answers_before_and_after(tmp_path).splitlines()[2] == "  t line 3, label 7 or 7.0: <user>1 + 1?"


def test_answers_are_shown_for_so_many_questions(tmp_path: Path) -> None:
    for step in (0, 1):
        write(tmp_path, step, *(answer(f"t line {number}", "2", 1.0) for number in range(9)))
    assert answers_before_and_after(tmp_path, 2).count("label") == 2
    assert answers_before_and_after(tmp_path).count("label") == 5


def test_nothing_is_shown_without_two_evaluations_of_one_question(tmp_path: Path) -> None:
    assert answers_before_and_after(tmp_path / "nowhere") == ""
    write(tmp_path, 0, answer("t line 3", "2", 1.0))
    assert answers_before_and_after(tmp_path) == ""
    write(tmp_path, 1, answer("t line 4", "2", 1.0))
    assert answers_before_and_after(tmp_path) == ""


def test_long_texts_keep_the_end_of_a_prompt_and_the_beginning_of_an_answer(tmp_path: Path) -> None:
    row = answer("t line 3", "yes" + "!" * 300, 1.0, prompt="x" * 300 + " why?")
    for step in (0, 1):
        write(tmp_path, step, row)
    text = answers_before_and_after(tmp_path)
    assert "x why?\n" in text
    assert "reward 1    yes!" in text
    assert len(text.splitlines()[2]) == len("  t line 3, label 2: ") + LONGEST_PROMPT
    assert len(text.splitlines()[3]) == len("    step 0  reward 1    ") + LONGEST_ANSWER


def test_lines_that_are_not_whole_are_passed_over(tmp_path: Path) -> None:
    for step in (0, 1):
        write(tmp_path, step, answer("t line 3", "2", 1.0), {"row": "t line 4"})
        with (tmp_path / f"step_{step:06d}.jsonl").open("a") as file:
            file.write('{"row": "t li')
    assert answers_before_and_after(tmp_path).count("label") == 1


def test_rows_and_files_that_are_no_answers_are_passed_over(tmp_path: Path) -> None:
    write(tmp_path, 999999, answer("t line 3", "1", 0.0), answer("t line 4", "1", None))
    write(tmp_path, 1000000, answer("t line 4", "2", 1.0))
    with (tmp_path / "step_1000000.jsonl").open("a") as file:
        file.write("7\n[]\n" + json.dumps(answer("t line 3", "a\u2028\x1b[2J", 1.0), ensure_ascii=False) + "\n")
    (tmp_path / "step_1_copy.jsonl").write_text("{}")
    text = answers_before_and_after(tmp_path)
    assert text.startswith("held-out answers after step 999999 and after step 1000000:")
    assert text.endswith("step 1000000  reward 1    a \\x1b[2J")
