"""The verifier `ifeval_old`: the labels of the first RLVR data, `{"func_name": "verify_bullet_points", "N": 3, …}`.

Names, arguments and conditions are those of open-instruct's `if_functions.py`, where a response is right (1) or wrong (0).
"""

import re
from collections.abc import Mapping
from typing import Any

from open_instruct.verifiers.base import VerificationResult, VerifierFunction
from open_instruct.verifiers.instructions import languages
from open_instruct.verifiers.instructions.forms import is_json
from open_instruct.verifiers.instructions.ifeval import single_mapping
from open_instruct.verifiers.instructions.instruction import (
    Instruction,
    count,
    instruction,
    language,
    letter,
    position,
    text,
    words,
)
from open_instruct.verifiers.text_verifiers import behind_thoughts

AT_LEAST, AROUND, AT_MOST = "at least", "around", "at most"
_SENTENCE_END = re.compile(r"(?<!\w\.\w.)(?<![A-Z][a-z]\.)(?<=[.?!])\s")


def quantifier(value: object) -> str:
    """Reads how a number is compared."""
    if value not in (AT_LEAST, AROUND, AT_MOST):
        raise ValueError(f"{AT_LEAST!r}, {AROUND!r} or {AT_MOST!r}")
    return str(value)


def _near(number: int, quantifier: str, target: int, tolerance: int) -> bool:
    """Whether a number is as wanted. The quantifier `around` allows the tolerance in either direction."""
    low = {AT_LEAST: target, AROUND: target - tolerance}.get(quantifier, 0)
    high = {AT_MOST: target, AROUND: target + tolerance}.get(quantifier, number)
    return low <= number <= high


def _tenth(number: int) -> int:
    return max(round(number * 0.1), 1)


def _num_words(response: str, N: int, quantifier: str) -> bool:
    return _near(len(response.split()), quantifier, N, _tenth(N))


def _num_sentences(response: str, N: int, quantifier: str) -> bool:
    return _near(len(_SENTENCE_END.split(response)), quantifier, N, 1)


def _capital_words(response: str, N: int, quantifier: str) -> bool:
    return _near(len(re.findall(r"\b[A-Z]+\b", response)), quantifier, N, _tenth(N))


def _keyword_frequency(response: str, word: str, N: int) -> bool:
    return re.findall(r"\w+", response.lower()).count(word.lower()) == N


def _paragraph_count(response: str, N: int) -> bool:
    """Paragraphs are the parts between dividers `* * *`; none may be blank."""
    paragraphs = response.split("* * *")
    return len(paragraphs) == N and all(paragraph.strip() for paragraph in paragraphs)


def _paragraphs(response: str, N: int, first_word: str, i: int) -> bool:
    paragraphs = response.split("\n\n")
    return len(paragraphs) == N >= i and paragraphs[i - 1].strip().startswith(first_word)


def _postscript(response: str, postscript_marker: str) -> bool:
    """The marker occurs, with text after it."""
    _, marker, behind = response.partition(postscript_marker)
    return bool(marker and behind.strip())


def _bullets(response: str, N: int) -> bool:
    return sum(line.strip().startswith(("*", "-")) for line in response.split("\n")) == N


def _sections(response: str, N: int, section_splitter: str) -> bool:
    """Text before the first splitter counts as a section, as in open-instruct."""
    sections = response.split(section_splitter)
    return len(sections) - (sections[0] == "") == N


def _two_responses(response: str) -> bool:
    answers = response.split("******")
    return len(answers) == 2 and answers[0].strip() != answers[1].strip()


def _keywords(response: str, keyword_list: list[str]) -> bool:
    return all(keyword.lower() in response.lower() for keyword in keyword_list)


def _forbidden_words(response: str, forbidden_words: list[str]) -> bool:
    return not any(keyword.lower() in response.lower() for keyword in forbidden_words)


FUNCTIONS: dict[str, Instruction] = {
    "verify_keywords": instruction(_keywords, keyword_list=words),
    "verify_keyword_frequency": instruction(_keyword_frequency, word=text, N=count),
    "validate_forbidden_words": instruction(_forbidden_words, forbidden_words=words),
    "verify_letter_frequency": instruction(
        lambda response, letter, N: response.count(letter) == N, letter=letter, N=count
    ),
    "validate_response_language": instruction(languages.is_in, language=language),
    "verify_paragraph_count": instruction(_paragraph_count, N=count),
    "validate_word_constraint": instruction(_num_words, N=count, quantifier=quantifier),
    "verify_sentence_constraint": instruction(_num_sentences, N=count, quantifier=quantifier),
    "validate_paragraphs": instruction(_paragraphs, N=count, first_word=text, i=position),
    "verify_postscript": instruction(_postscript, postscript_marker=text),
    "validate_placeholders": instruction(
        lambda response, N: len(re.findall(r"\[[^\[\]\n]*\]", response)) >= N, N=count
    ),
    "verify_bullet_points": instruction(_bullets, N=count),
    "validate_title": instruction(lambda response: any(_closes(line) for line in response.split("\n"))),
    "validate_choice": instruction(lambda response, options: any(map(response.__contains__, options)), options=words),
    "validate_highlighted_sections": instruction(
        lambda response, N: len(re.findall(r"\*[^*\n]*\*", response)) >= N, N=count
    ),
    "validate_sections": instruction(_sections, N=count, section_splitter=text),
    "validate_json_format": instruction(is_json),
    "validate_repeat_prompt": instruction(
        lambda response, original_prompt: response.startswith(original_prompt), original_prompt=text
    ),
    "validate_two_responses": instruction(_two_responses),
    "validate_uppercase": instruction(lambda response: response == response.upper()),
    "validate_lowercase": instruction(lambda response: response == response.lower()),
    "validate_frequency_capital_words": instruction(_capital_words, N=count, quantifier=quantifier),
    "validate_end": instruction(lambda response, end_phrase: response.endswith(end_phrase), end_phrase=text),
    "validate_quotation": instruction(lambda response: response.startswith('"') and response.endswith('"')),
    "validate_no_commas": instruction(lambda response: "," not in response),
}
"""Conditions by the `func_name` of a label."""


def _closes(line: str) -> bool:
    return ">>" in line.partition("<<")[2]


def read_function(label: object) -> tuple[Instruction, dict[str, Any]]:
    """The condition in a label, with its arguments.

    Raises:
        ValueError: the label has another form, the name is unknown, or the arguments do not fit.
    """
    mapping: Mapping[str, object] = single_mapping(label)
    name = mapping.get("func_name")
    if not isinstance(name, str) or name not in FUNCTIONS:
        raise ValueError(f"func_name must name one of open-instruct's 25 functions, got {name!r:.60}")
    kwargs = {key: value for key, value in mapping.items() if key != "func_name"}
    try:
        return FUNCTIONS[name], FUNCTIONS[name].read(kwargs)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


class IFEvalOldVerifier(VerifierFunction):
    """1 if the response, after its thoughts and without answer tags, meets the row's single condition."""

    name = "ifeval_old"

    def __call__(
        self, tokenized_prediction: list[int], prediction: str, label: object, query: str | None = None
    ) -> VerificationResult:
        function, arguments = read_function(label)
        answer = behind_thoughts(prediction.replace("<|assistant|>", ""), query)
        return VerificationResult(float(bool(answer) and function.follows(answer, **arguments)))

    def prepare(self, dataset: str) -> None:
        languages.load_profiles()
