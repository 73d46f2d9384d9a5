"""A label that is the JSON of a list of texts is compared as it stands."""

from collections.abc import Callable

import pytest
from exhibit import Exhibit

from open_instruct.verifiers.registry import check_label, score_response

EXHIBIT = Exhibit(
    reports=("SkyworkAI/Skywork-OR1",),
    subject="data",
    happened="The data holds each answer as the JSON of a list of texts, which the scorer of the project unpacks. A grader"
    " that takes the label as it stands gives 0 to every right answer, without a word.",
    here="A label that is the JSON of one text is that text, and several texts are refused before the run where a "
    "verifier reads one (`verifiers/labels.py`).",
)


def check(score: Callable[[str, str], float]) -> None:
    assert score(r"so it is $\boxed{42}$", '["42"]') == 1.0
    assert score(r"so it is $\boxed{\frac{1}{2}}$", r'["\\frac{1}{2}"]') == 1.0
    assert score(r"so it is $\boxed{41}$", '["42"]') == 0.0


def theirs(response: str, label: str) -> float:
    return float(label in response)


def ours(response: str, label: str) -> float:
    return score_response("math", label, [], response).score


def test_label_that_is_taken_as_it_stands_is_caught() -> None:
    with pytest.raises(AssertionError):
        check(theirs)


def test_label_in_json_is_its_text_here() -> None:
    check(ours)
    with pytest.raises(ValueError, match="needs one text or number"):
        check_label("math", '["42", "43"]')
