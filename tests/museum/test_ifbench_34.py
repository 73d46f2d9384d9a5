"""Checks of instructions refuse responses that follow them, and find words inside other words."""

from collections.abc import Callable

import pytest
from exhibit import Exhibit

from open_instruct.verifiers.registry import score_response

EXHIBIT = Exhibit(
    reports=("allenai/IFBench #34", "modelscope/evalscope #1755"),
    subject="rewards",
    happened="A word at a given place was compared with its comma or quotation mark, so right responses failed. Names and "
    "keywords were found inside longer words: `Mia` in Miami.",
    here="A word is compared without the marks around it where the instruction is about a word, and a forbidden word "
    "is a whole word (`verifiers/instructions/`). Keywords that are counted are also counted inside words, as the"
    " published IFEval does.",
)
SECOND = ("keywords:keyword_specific_position", {"keyword": "whisper", "n": 1, "m": 2})
NO_MIA = ("keywords:forbidden_words", {"forbidden_words": ["Mia"]})
LAST = ("last_word:last_word_answer", {"last_word": "home"})
RESPONSES = (
    (*SECOND, "The whisper, it came.", True),
    (*SECOND, "The wind, whisper.", False),
    (*NO_MIA, "In Miami it rains.", True),
    (*NO_MIA, 'He met "Mia".', False),
    (*LAST, "Let us go home!", True),
    (*LAST, "Let us go to the homes.", False),
)


def check(follows: Callable[[str, dict, str], bool]) -> None:
    for instruction, arguments, response, expected in RESPONSES:
        assert follows(instruction, arguments, response) == expected, response


def theirs(instruction: str, arguments: dict, response: str) -> bool:
    words = response.split()
    if "n" in arguments:
        return words[arguments["m"] - 1] == arguments["keyword"]
    if "last_word" in arguments:
        return words[-1] == arguments["last_word"]
    return not any(word in response for word in arguments["forbidden_words"])


def ours(instruction: str, arguments: dict, response: str) -> bool:
    label = {"instruction_id": [instruction], "kwargs": [arguments]}
    return score_response("ifeval", label, [], response).score == 1


def test_words_with_their_marks_are_caught() -> None:
    with pytest.raises(AssertionError):
        check(theirs)


def test_words_are_compared_as_words_here() -> None:
    check(ours)
