"""Numbers with their nouns."""

import pytest

from open_instruct.system.counted import counted, counted_are


@pytest.mark.parametrize(
    ("number", "expected"), [(0, "0 later rows"), (1, "1 later row"), (2, "2 later rows"), (1250, "1,250 later rows")]
)
def test_a_noun_has_its_plural(number: int, expected: str) -> None:
    assert counted(number, "later row") == expected


def test_a_noun_may_have_a_plural_of_its_own() -> None:
    assert [counted(number, "process", "processes") for number in (1, 2)] == ["1 process", "2 processes"]


def test_a_verb_agrees_with_its_number() -> None:
    assert [counted_are(number, "row") for number in (0, 1, 2)] == ["0 rows are", "1 row is", "2 rows are"]
