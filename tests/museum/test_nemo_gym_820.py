"""The last block of code is run, and it is no solution."""

import re
from collections.abc import Callable

import pytest
from exhibit import Exhibit

from open_instruct.verifiers.code_blocks import program_in

EXHIBIT = Exhibit(
    reports=("NVIDIA-NeMo/Gym #820", "LiveCodeBench/LiveCodeBench #118"),
    subject="rewards",
    happened="The text between the last two fences was run. Models show a call of their function, its output or a summary "
    "behind the solution, and these right solutions, 18 of 100 in one count, scored 0.",
    here="Of several blocks the program is the definitions and what they need, or the last script; output, shell lines"
    " and demonstrations are none (`verifiers/code_choice.py`).",
)
SOLUTION = "def double(x):\n    return 2 * x\n"
SCRIPT = "print(int(input()) * 2)\n"
RESPONSES = (
    (f"```python\n{SOLUTION}```\nTry it:\n```python\nprint(double(2))\n```", False, SOLUTION),
    (f"```python\n{SOLUTION}```\nIt gives:\n```\n4\n```", False, SOLUTION),
    (f"```python\n{SCRIPT}```\nOutput:\n```\n4\n```", True, SCRIPT),
    (f"```python\n{SCRIPT}```\nTo run it:\n```\npython solution.py < in.txt\n```", True, SCRIPT),
    (f"First:\n```python\nprint(input())\n```\nBetter:\n```\n{SCRIPT}```", True, SCRIPT),
)
"""A response, whether the tests look at what a program writes, and the program."""


def check(program: Callable[[str, bool], str]) -> None:
    for response, is_script, expected in RESPONSES:
        assert program(response, is_script).strip() == expected.strip(), response


def theirs(response: str, is_script: bool) -> str:
    del is_script
    return re.findall(r"```(?:python)?\n(.*?)```", response, re.DOTALL)[-1]


def ours(response: str, is_script: bool) -> str:
    return program_in(response, is_script=is_script)


def test_last_block_is_caught() -> None:
    with pytest.raises(AssertionError):
        check(theirs)


def test_solution_is_run_here() -> None:
    check(ours)
