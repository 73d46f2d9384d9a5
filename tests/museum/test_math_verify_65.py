"""The grader never comes back."""

import subprocess
import sys
import time
from collections.abc import Callable

import pytest
from exhibit import Exhibit

from open_instruct.verifiers.math_equivalence import are_equal

EXHIBIT = Exhibit(
    reports=("huggingface/Math-Verify #65", "hkust-nlp/simpleRL-reason #95"),
    subject="rewards",
    happened="A tower of powers in an answer was worked out in full, and the limit on the grader's time did not hold, so "
    "whole runs hung on one response, or ended with its time-out.",
    here="The size of a power is bounded before it is computed, each comparison has a limit of its own "
    "(`verifiers/math_equivalence.py`), and scorers run in processes that can be killed (`verifiers/pool.py`).",
)
TOWER = r"\frac{5^{(5^{(5^{(5^5)})} - 4)} - 5}{16}"
ANSWERS = (TOWER, r"\{@a 1276915 \sqrt{9^{9^{9^9}}} \{1,1-3-10);5\}", "(" * 400 + "1" + ")" * 400, r"99999!!!")
PATIENCE_S = 5.0
"""Processor time, so that a busy machine does not matter."""


def check(equal: Callable[[str, str], bool]) -> None:
    for answer in ANSWERS:
        begun = time.process_time()
        assert not equal(answer, "92.5857658508735")
        assert time.process_time() - begun < PATIENCE_S


def theirs(answer: str, label: str) -> bool:
    """In a process of its own, which is ended after a second of processor time. Python itself starts in a fraction of that."""
    program = f"(5 ** (5 ** (5**5) - 4) - 5) // 16 == {label}"
    limit = "import resource; resource.setrlimit(resource.RLIMIT_CPU, (1, 1)); "
    process = subprocess.run([sys.executable, "-S", "-c", limit + program], check=False, timeout=120)
    if process.returncode < 0:
        raise TimeoutError(f"ended by signal {-process.returncode}")
    return process.returncode == 0


ours = are_equal


def test_tower_that_is_worked_out_is_caught() -> None:
    with pytest.raises(TimeoutError):
        check(theirs)


def test_no_answer_takes_long_here() -> None:
    check(ours)
