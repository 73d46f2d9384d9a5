"""What training has changed, in the model's words: answers to the same questions in the first evaluation and in the last."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_OF_STEP = re.compile(r"step_(\d+)\.jsonl")
NUM_QUESTIONS = 5
LONGEST_PROMPT, LONGEST_ANSWER, LONGEST_LABEL = 100, 160, 60
"""Characters that are shown."""


def answers_before_and_after(directory: Path, num_questions: int = NUM_QUESTIONS) -> str:
    """The first sample for each of the first questions that both evaluations have, with label and reward, as text for a terminal.

    Args:
        directory: holds a file `step_<training step>.jsonl` for each evaluation, with rows of `evaluation_table.completions`.

    Returns "" if there are fewer than two evaluations. Lines that are not whole, as a killed run may leave, are passed over.
    """
    files = {int(match[1]): file for file in directory.glob("*.jsonl") if (match := _OF_STEP.fullmatch(file.name))}
    if len(files) < 2:
        return ""
    first_step, last_step = min(files), max(files)
    before, after = _first_answers(files[first_step]), _first_answers(files[last_step])
    questions = [question for question in before if question in after][:num_questions]
    if not questions:
        return ""
    lines = [f"held-out answers after step {first_step} and after step {last_step}:"]
    for question in questions:
        lines += ["", *_shown({first_step: before[question], last_step: after[question]})]
    return "\n".join(lines)


def _first_answers(file: Path) -> dict[tuple[str, str], Mapping[str, Any]]:
    """The first sample for each question, by its evaluation set and the place of its row: two sets may have the same rows."""
    answers: dict[tuple[str, str], Mapping[str, Any]] = {}
    for row in filter(_is_answer, rows_of(file)):
        answers.setdefault((row.get("set", ""), row["row"]), row)
    return answers


def rows_of(file: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file of completions."""
    lines = file.read_text(errors="replace").split("\n")  # `splitlines` would divide a text at U+2028, too
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row


def _is_answer(row: Mapping[str, Any]) -> bool:
    has_all = {"row", "prompt", "response", "scores", "ground_truth"} <= row.keys()
    return has_all and isinstance(row["scores"], int | float)


def _shown(answers: Mapping[int, Mapping[str, Any]]) -> Iterator[str]:
    """A line for the question and a line for each step's answer."""
    row = next(iter(answers.values()))
    label = " or ".join(map(str, row.get("right_answers") or [row["ground_truth"]]))
    yield f"  {row['row']}, label {_beginning(label, LONGEST_LABEL)}: {_end(row['prompt'])}"
    width = max(len(str(step)) for step in answers)
    for step, answer in answers.items():
        yield f"    step {step:>{width}}  reward {answer['scores']:<4g} {_beginning(answer['response'], LONGEST_ANSWER)}"


def _beginning(text: str, limit: int) -> str:
    line = _line(text)
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def _end(prompt: str) -> str:
    """The end of a prompt has its question."""
    line = _line(prompt)
    return line if len(line) <= LONGEST_PROMPT else f"…{line[1 - LONGEST_PROMPT :]}"


def _line(text: str) -> str:
    """The text in one line that changes nothing on a terminal: control characters and half characters are shown as escapes."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in " ".join(text.split())
    )
