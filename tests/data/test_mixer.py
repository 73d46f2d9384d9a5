"""Lists of datasets and amounts, and what they take of each."""

from pathlib import Path
from typing import Any

import pytest
from dataset_files import load, make_row, mistakes_of, questions, write_lines

from open_instruct.data.mixer import parse_mixer_list, splits_of_names


def test_amounts_are_fractions_with_a_point_and_counts_without() -> None:
    pairs = parse_mixer_list(["a", "1.0", "b", "0.25", "c", "500", "d", "1"])
    assert pairs == [("a", 1.0), ("b", 0.25), ("c", 500), ("d", 1)]
    assert [type(amount) for _, amount in pairs] == [float, float, int, int]


@pytest.mark.parametrize("amount", ["0", "-5", "0.0", "20000.0", "-0.5", "all", "1e3", "nan", "inf.", ""])
def test_bad_amounts_say_what_to_write(amount: str) -> None:
    with pytest.raises(ValueError, match=r"an amount is a share of the rows such as 1\.0, or a count such as 500"):
        parse_mixer_list(["a", amount])


def test_all_bad_pairs_are_told() -> None:
    with pytest.raises(ValueError, match=r"--mix a 0: .*\n--mix c x: "):
        parse_mixer_list(["a", "0", "b", "1.0", "c", "x"], "--mix")


def test_a_name_without_amount() -> None:
    with pytest.raises(ValueError, match=r"--dataset_mixer_list must be name, amount.*got 3 words: a 1\.0 b"):
        parse_mixer_list(["a", "1.0", "b"])


def test_one_split_for_each_name_or_for_all() -> None:
    assert splits_of_names(["train"], 3) == ["train"] * 3
    assert splits_of_names(["train", "test"], 2) == ["train", "test"]
    with pytest.raises(ValueError, match="one for each of the 3 names; got 2: train test"):
        splits_of_names(["train", "test"], 3)


def test_a_bad_mixer_list_is_a_dataset_error() -> None:
    assert "an amount is" in mistakes_of("a", "0")[0]
    assert mistakes_of()[0].startswith("--dataset_mixer_list: it names no data: give names and amounts")
    assert "--mix_splits needs one split" in mistakes_of("a", "1.0", splits=("x", "y"), flag="--mix")[0]


def test_a_count_takes_the_first_rows_and_a_share_draws_them(tmp_path: Path) -> None:
    name = write_lines(tmp_path / "d.jsonl", [make_row(str(i)) for i in range(10)])
    assert questions(load(name, "3")) == ["0", "1", "2"]
    assert questions(load(name, "0.45")) == ["0", "1", "5", "8"]  # RandomState(42), as open-instruct draws them
    assert len(load(name, "1.0")) == len(load(name, "10")) == 10
    assert "has no rows in a fraction of 0.01" in mistakes_of(name, "0.01")[0]


def test_rows_repeat_where_more_are_asked_for_than_there_are(tmp_path: Path) -> None:
    rows = [make_row(str(i)) for i in range(10)]
    rows[4] = make_row("4 " * 100)  # too long, and left out as often as it is drawn
    name = write_lines(tmp_path / "d.jsonl", rows)
    kept = [str(i) for i in range(10) if i != 4]
    drop: dict[str, Any] = {"max_prompt_token_length": 80, "overlong_prompts": "drop"}
    assert questions(load(name, "2.0", **drop)) == kept * 2
    assert questions(load(name, "23", **drop)) == [*kept * 2, "8", "1", "5"]
    again = load(name, "1.3")
    assert len(again) == 13
    assert [again[10 + n].prompt.tolist() for n in range(3)] == [again[row].prompt.tolist() for row in (8, 1, 5)]
