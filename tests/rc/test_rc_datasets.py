"""Problems from rows as they come: this project's, GSM8K's, MATH's."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from open_instruct.rc.datasets import load_datasets
from open_instruct.rc_actor import identity_of
from open_instruct.verifiers.registry import build_all_verifiers, check_label, find_verifier
from open_instruct.workflows.rc.types import Problem


def load(tmp_path: Path, *rows: Any) -> list[Problem]:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_datasets([str(path)])


ROWS: list[tuple[dict[str, Any], tuple[str, str, object]]] = [
    ({"question": "Q", "answer": "so\n#### 1,234"}, ("Q", "gsm8k", "1,234")),
    ({"problem": "P", "solution": r"thus $\boxed{\frac{1}{2}}$."}, ("P", "math", r"\frac{1}{2}")),
    ({"problem": "P", "answer": "7", "solution": r"\boxed{8}"}, ("P", "math", "7")),
    ({"problem": "P", "answer": 7}, ("P", "math", "7")),
    (
        {
            "messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}],
            "ground_truth": "x",
            "dataset": "string_matcher",
        },
        ("U", "string_matcher", "x"),
    ),
    ({"task": "T", "answer": "x", "dataset": "math"}, ("T", "math", "x")),
    ({"problem": "P", "ground_truth": ["5"], "dataset": ["gsm8k"]}, ("P", "gsm8k", ["5"])),
    ({"problem": "P", "ground_truth": ["5"], "dataset": ["their_own"]}, ("P", "math", "5")),
    ({"question": "Q", "answer": ["so\n#### 7"]}, ("Q", "gsm8k", "7")),
]


@pytest.mark.parametrize(("row", "found"), ROWS, ids=lambda value: str(value)[:30])
def test_rows(tmp_path: Path, row: dict[str, Any], found: tuple[str, str, object]) -> None:
    (problem,) = load(tmp_path, row)
    assert (problem.text, problem.verifier, problem.ground_truth) == found


def test_all_mistakes_in_one_message(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no problem in it") as caught:
        load(
            tmp_path,
            {"answer": "1"},
            {"problem": "P"},
            [],
            {"problem": "\ud800", "answer": "1"},
            {"problem": "P", "answer": "1"},
            {"problem": "P", "answer": ["1", "2"]},
            {"problem": "P", "ground_truth": ["1", "2"], "dataset": ["math", "max_length"]},
        )
    told = str(caught.value)
    assert all(part in told for part in ("line 1", "line 2", "no answer in it", "line 3", "line 4"))
    assert "line 5" not in told
    assert "line 6: this verifier needs one text or number as ground truth, got ['1', '2']" in told
    assert "line 7: 2 verifiers in 'dataset', and a turn is scored by one" in told


@pytest.mark.parametrize("label", ['{"question": "q", "answer": "4", "metadata": null}', "[" * 100_000], ids=range(2))
def test_ground_truths_of_no_use_are_named_by_row(tmp_path: Path, label: str) -> None:
    good = {"problem": "P", "answer": "1"}
    with pytest.raises(ValueError, match=r"rows\.jsonl line 2: the verifier cannot use the ground truth"):
        load(tmp_path, good, {"problem": "P", "ground_truth": label, "dataset": "reasoning_gym/chain_sum"})


def test_names_and_entries(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"problem": "P", "answer": "1"}) + "\n")
    entry = {"hub_id": str(tmp_path / "a.jsonl"), "split": "train", "trust_remote_code": True}
    problems = load_datasets([entry, "reasoning_gym/chain_sum?size=2"], seed=1)
    assert [problem.dataset for problem in problems] == [str(tmp_path / "a.jsonl"), *["reasoning_gym/chain_sum"] * 2]
    assert len({problem.problem_id for problem in problems}) == 3
    assert [problem.row for problem in problems] == [
        f"{tmp_path / 'a.jsonl'} line 1",
        "reasoning_gym/chain_sum?size=2 index 0",
        "reasoning_gym/chain_sum?size=2 index 1",
    ]
    for bad, told in (
        ([entry, entry], "named twice"),
        ([{"hub": "x"}], "an entry has no key hub"),
        ([{"split": "x"}], "the entry lacks hub_id"),
        (["nowhere.jsonl"], "no such file"),
    ):
        with pytest.raises(ValueError, match=told):
            load_datasets(bad)


def test_an_entry_with_a_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """What reaches the library, which is the only one to know the hub."""
    import datasets

    asked: list[tuple[Any, ...]] = []

    def load_dataset(name: str, config: str | None, *, split: str, cache_dir: str | None) -> datasets.Dataset:
        asked.append((name, config, split))
        return datasets.Dataset.from_list([{"question": f"Q {config}", "answer": "#### 1"}])

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    entries = [
        {"hub_id": "openai/gsm8k", "config": "main", "split": "test"},
        {"hub_id": "openai/gsm8k", "config": "socratic"},
        "openai/gsm8k",
    ]
    problems = load_datasets(entries)
    assert asked == [
        ("openai/gsm8k", "main", "test"),
        ("openai/gsm8k", "socratic", "train"),
        ("openai/gsm8k", None, "train"),
    ]
    assert [problem.text for problem in problems] == ["Q main", "Q socratic", "Q None"]
    assert len({problem.problem_id for problem in problems}) == len({problem.dataset for problem in problems}) == 3
    with pytest.raises(ValueError, match="named twice"):
        load_datasets([entries[0], "openai/gsm8k?config=main"])


def test_an_empty_data_set_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no problems there"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("said", "label", "score"),
    [
        (r"\boxed{0.5}", r"\frac{1}{2}", 1),
        (r"\boxed{3} no, \boxed{4}", "4", 1),
        (r"\boxed{3} no, \boxed{4}", "3", 0),
        (r"\boxed{1,000}", "1000", 1),
        (r"\boxed{\left( 1, \dfrac{2}{3} \right)}", r"(1,\dfrac{2}{3})", 1),
        (r"\boxed{x^{2}+1}", "x^{2} + 1", 1),
        (r"\boxed{\text{east}}", "east", 1),
        (r"\boxed{4", "4", 0),
        ("4", "4", 1),  # the whole response is the answer
        (r"\boxed{}", "4", 0),
        (r"\boxed{1/0}", "4", 0),
        (r"\boxed{" * 3000, "4", 0),
    ],
)
def test_the_math_verifier(said: str, label: str, score: float) -> None:
    assert find_verifier("math", build_all_verifiers())([], said, label).score == score


def test_a_label_of_the_math_verifier_is_a_text_or_a_number() -> None:
    check_label("math", 5)
    with pytest.raises(ValueError, match="ground truth"):
        check_label("math", {"a": 1})


def test_a_stream_of_an_earlier_version_goes_on(tmp_path: Path) -> None:
    """Its settings hold a hash of the problems, which had no `row` then."""
    (problem,) = load(tmp_path, {"problem": "P", "answer": "1"})
    before = [
        {
            "problem_id": problem.problem_id,
            "text": "P",
            "ground_truth": "1",
            "verifier": "math",
            "dataset": problem.dataset,
        }
    ]
    assert identity_of([problem]) == hashlib.sha256(repr(before).encode()).hexdigest()[:16]
    assert identity_of([replace(problem, row="moved.jsonl line 1")]) == identity_of([problem])
