"""A scorer that cannot work outside the main thread gives every answer 0."""

import signal
import threading
from collections.abc import Callable

import pytest
from exhibit import Exhibit

from open_instruct.verifiers.registry import score_response

EXHIBIT = Exhibit(
    reports=("verl-project/verl #5635", "huggingface/trl #5281"),
    subject="rewards",
    happened="The math grader limited its time with `signal.alarm`, which raises outside the main thread. Workers scored "
    "in other threads, and one trainer caught the error and took it for a wrong answer: all of MATH scored 0.",
    here="Comparisons are limited in any thread, scorers run in processes that can be killed, and an error of a "
    "verifier is counted and *not scored*, never 0 (`verifiers/math_equivalence.py`, `verifiers/pool.py`).",
)
Scorer = Callable[[str, str], float]


def check(score: Scorer) -> None:
    scores: list[float] = []
    thread = threading.Thread(target=lambda: scores.append(score(r"so it is $\boxed{\frac{2}{6}}$", r"\frac{1}{3}")))
    thread.start()
    thread.join(timeout=60)
    assert scores == [1.0]


def theirs(response: str, label: str) -> float:
    try:
        signal.signal(signal.SIGALRM, lambda *_: None)
        return float("frac" in response and "frac" in label)
    except Exception:
        return 0.0


def ours(response: str, label: str) -> float:
    return score_response("math", label, [], response).score


def test_alarm_outside_the_main_thread_is_caught() -> None:
    with pytest.raises(AssertionError):
        check(theirs)


def test_answers_are_scored_in_any_thread_here() -> None:
    check(ours)
