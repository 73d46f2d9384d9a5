"""Arguments of a tested function become one text."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from exhibit import Exhibit

from open_instruct.verifiers.code_labels import calls_in

EXHIBIT = Exhibit(
    reports=("verl-project/verl #2199",),
    subject="rewards",
    happened="Some data sets hold the arguments of a call as a list and not as lines of JSON. The grader made a text of "
    "the list, the function got one wrong argument, and every program scored 0.",
    here="Arguments may be a list or lines of JSON, and a result in a list may be its element; a label that is neither"
    " is refused before the run, with its row (`verifiers/code_labels.py`).",
)
TESTS: tuple[tuple[dict[str, Any], list[Any], Any], ...] = (
    ({"input": "1\n2", "output": "3"}, [1, 2], 3),
    ({"input": [1, 2], "output": 3}, [1, 2], 3),
    ({"input": [1, 2], "output": [3]}, [1, 2], 3),
    ({"input": ["[1, 2]", "[3]"], "output": "[1, 2, 3]"}, [[1, 2], [3]], [1, 2, 3]),
    ({"input": ["ab", "c"], "output": "abc"}, ["ab", "c"], "abc"),
)
"""A test, the arguments that it means, and a right result."""
Read = Callable[[dict[str, Any]], tuple[list[Any], tuple[Any, ...]]]


def check(read: Read) -> None:
    for test, arguments, result in TESTS:
        read_arguments, results = read(test)
        assert read_arguments == arguments, test
        assert result in results, test


def theirs(test: dict[str, Any]) -> tuple[list[Any], tuple[Any, ...]]:
    def value(line: str) -> Any:
        try:
            return json.loads(line)
        except ValueError:
            return line

    return [value(line) for line in str(test["input"]).split("\n")], (value(str(test["output"])),)


def ours(test: dict[str, Any]) -> tuple[list[Any], tuple[Any, ...]]:
    [call] = calls_in([test])
    return call.arguments, call.results


def test_list_as_one_text_is_caught() -> None:
    with pytest.raises(AssertionError):
        check(theirs)


def test_arguments_are_read_in_all_forms_here() -> None:
    check(ours)
