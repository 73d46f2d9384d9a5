"""One answer that takes for ever to score stops the whole run."""

from collections.abc import Callable, Iterator

import pytest
from exhibit import Exhibit
from verifier_fakes import score_by_text

from open_instruct.verifiers.pool import VerifierPool

EXHIBIT = Exhibit(
    reports=("verl-project/verl #6673", "areal-project/AReaL #548"),
    subject="rewards",
    happened="Answers were scored one after the other in the driver, without a time limit. One degenerate answer kept a "
    "regular expression busy, and training froze after a few steps; all looked like a hang of the engine. Limits "
    "that were added there and elsewhere gave such answers 0.",
    here="Scorers are processes with a limit for each answer. One that is over the limit is killed, even inside a call"
    " into C, its answer is *not scored*, and the other answers of the group get their scores "
    "(`verifiers/pool.py`).",
)
TIMEOUT_S = 1.0
Scores = Callable[[list[str]], list[float | None]]


def check(scores: Scores) -> None:
    assert scores(["4", "hang_in_c", "5", "4"]) == [1.0, None, 0.0, 1.0]


def theirs(texts: list[str]) -> list[float | None]:
    """With the limit that was added, as far as it can be shown without a hang."""
    return [0.0 if text == "hang_in_c" else float(text == "4") for text in texts]


@pytest.fixture
def pool() -> Iterator[VerifierPool]:
    with VerifierPool(1, TIMEOUT_S, score=score_by_text) as pool:
        yield pool


def test_score_of_zero_for_an_answer_over_the_limit_is_caught() -> None:
    with pytest.raises(AssertionError):
        check(theirs)


def test_answer_that_hangs_costs_one_limit_and_has_no_score_here(pool: VerifierPool) -> None:
    def ours(texts: list[str]) -> list[float | None]:
        return [scored.score for scored in pool.score_group("fake", "4", [[1]] * len(texts), texts)]

    check(ours)
