"""A label that is a whole number becomes 42.0 on its way through a table."""

from collections.abc import Callable
from pathlib import Path

import pytest
from dataset_files import load, make_row, write_parquet
from exhibit import Exhibit

from open_instruct.verifiers.registry import score_response

EXHIBIT = Exhibit(
    reports=("pandas-dev/pandas #20717", "pandas-dev/pandas #28335"),
    subject="data",
    happened="A column of whole numbers with one empty cell becomes floats, and small or large floats are printed with an "
    "exponent. As labels of a reward that compares texts, `42.0` and `1e-05` match nothing.",
    here="A number in JSON or parquet is that number however Python prints it (`verifiers/labels.py`), and a label "
    "that matches no spelling of itself is refused before the run.",
)
LABELS = {42.0: "42", 1e-05: "0.00001", 1e16: "10000000000000000", 0.5: "0.5", 7: "7"}
"""Labels as a table has them, and the answer that is meant."""


def check(score: Callable[[float, str], float]) -> None:
    for label, answer in LABELS.items():
        assert score(label, answer) == 1, label
        assert score(label, f"{answer}1") == 0, label


def theirs(label: float, answer: str) -> float:
    return float(str(label) == answer)


@pytest.fixture
def ours(tmp_path: Path) -> Callable[[float, str], float]:
    rows = [make_row(ground_truth=label, dataset="math") for label in LABELS]
    files = [write_parquet(tmp_path / f"{number}.parquet", [row]) for number, row in enumerate(rows)]
    loaded = [load(file, "1.0")[0].ground_truth for file in files]
    read = dict(zip(LABELS, loaded, strict=True))

    def score(label: float, answer: str) -> float:
        text = f"<answer>{answer}</answer>"
        scores = {score_response(dataset, read[label], [], text).score for dataset in ("math", "string_matcher")}
        assert len(scores) == 1
        return scores.pop()

    return score


def test_number_as_python_prints_it_is_caught() -> None:
    with pytest.raises(AssertionError):
        check(theirs)


def test_number_is_a_number_here(ours: Callable[[float, str], float]) -> None:
    check(ours)
