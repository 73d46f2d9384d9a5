"""Instructions on the language of a response, and on capital and small letters throughout.

`langdetect` recognises languages by letter frequencies. It draws random numbers, so its seed is set here: a text always has the
same language.
"""

from langdetect import DetectorFactory, LangDetectException, detect_langs, detector_factory

from open_instruct.verifiers.instructions.instruction import Instruction, instruction, language

SURE_LETTERS = 20
"""Fewer letters than this say nothing about the language of a text."""
MOST_CHARACTERS = 10_000
"""Most characters of a text that are read."""

DetectorFactory.seed = 0


def load_profiles() -> None:
    """Reads the frequencies of all languages: half a second, once in a process."""
    detector_factory.init_factory()


def candidates(text: str) -> list[str]:
    """The languages that a text may be in, the likeliest first; empty if it holds no letters.

    A text in capital letters is converted to small letters first, because langdetect ignores words in capitals.
    """
    try:
        guesses = detect_langs((text.lower() if text.isupper() else text)[:MOST_CHARACTERS])
    except LangDetectException:
        return []
    return [guess.lang for guess in guesses]


def is_in(response: str, language: str) -> bool:
    """Whether the language is the likeliest. A response without letters is in no language; in IFEval it is in every language."""
    return candidates(response)[:1] == [language]


def _may_be_english(response: str) -> bool:
    letters = [char for char in response if char.isalpha()]
    return all(map(str.isascii, letters)) if len(letters) < SURE_LETTERS else "en" in candidates(response)


INSTRUCTIONS: dict[str, Instruction] = {
    "language:response_language": instruction(is_in, language=language),
    "change_case:english_capital": instruction(lambda response: response.isupper() and _may_be_english(response)),
    "change_case:english_lowercase": instruction(lambda response: response.islower() and _may_be_english(response)),
}
