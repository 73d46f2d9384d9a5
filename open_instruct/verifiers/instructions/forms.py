"""Instructions on the form of a response: lists, sections, titles, brackets, marks, its beginning and its end."""

import json
import re
from contextlib import suppress

from open_instruct.verifiers.instructions.instruction import Instruction, count, instruction, word
from open_instruct.verifiers.instructions.parts import sentences

CHOICES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_POSTSCRIPTS = {"P.S.": r"p\.\s?s\.", "P.P.S": r"p\.\s?p\.\s?s"}
_CODE_FENCE = re.compile(r"```(?:json|Json|JSON)?")


def _placeholders(response: str, num_placeholders: int) -> bool:
    return len(re.findall(r"\[[^\[\]\n]*\]", response)) >= num_placeholders


def _postscript(response: str, postscript_marker: str) -> bool:
    pattern = _POSTSCRIPTS.get(postscript_marker) or re.escape(postscript_marker.lower())
    return re.search(pattern, response.lower()) is not None


def _bullets(response: str, num_bullets: int) -> bool:
    """A bullet is a line that begins with `-`, or with a single `*` and more text after it."""
    return len(re.findall(r"^[^\S\n]*(?:\*[^*\n]|-)", response, re.MULTILINE)) == num_bullets


def _highlights(response: str, num_highlights: int) -> bool:
    """`*so*` counts once, and so does `**so**`; blank highlights do not count."""
    spans = re.findall(r"\*\*([^\n*]*)\*\*|\*([^\n*]*)\*", response)
    return sum(bool((double or single).strip()) for double, single in spans) >= num_highlights


def _sections(response: str, section_spliter: str, num_sections: int) -> bool:
    """The splitter followed by a number, such as `Section 3`, occurs at least `num_sections` times."""
    return len(re.findall(rf"{re.escape(section_spliter)}\s?\d+", response)) >= num_sections


def json_inside(response: str) -> str:
    """The response without a code fence around it."""
    inside = response.strip()
    fence = _CODE_FENCE.match(inside)
    return inside[fence.end() if fence else 0 :].removesuffix("```").strip()


def is_json(response: str) -> bool:
    with suppress(ValueError, RecursionError):
        json.loads(response)
        return True
    return False


def _title(response: str) -> bool:
    titles = (line.partition("<<")[2].rpartition(">>")[0] for line in response.splitlines())
    return any(title.strip("<> \t") for title in titles)


def _hyphens(response: str) -> bool:
    """A hyphen, and no space, joins each sentence to the next. Hyphens within sentences are allowed."""
    text, num_hyphens = re.subn(r"(?<=[.!?])-(?=\S)", " ", response.strip())
    return len(sentences(text)) == num_hyphens + 1 and not re.search(r"[.!?]\s+-|[.!?]-\s", response)


def _square_brackets(response: str) -> bool:
    return all(token.startswith("[") and token.endswith("]") for token in response.split())


def _bigrams(response: str) -> bool:
    """`<<two words>> <<and two>>`; a last word without a partner is free, as in open-instruct."""
    tokens = response.split()
    pairs = zip(tokens[::2], tokens[1::2], strict=False)
    return all(first.startswith("<<") and second.endswith(">>") for first, second in pairs)


def _end(response: str, end_phrase: str) -> bool:
    return response.strip().strip('"').lower().endswith(end_phrase.lower())


def _quotation(response: str) -> bool:
    inside = response.strip()
    return len(inside) > 1 and inside[0] == inside[-1] == '"'


INSTRUCTIONS: dict[str, Instruction] = {
    "detectable_content:number_placeholders": instruction(_placeholders, num_placeholders=count),
    "detectable_content:postscript": instruction(_postscript, postscript_marker=word),
    "detectable_format:number_bullet_lists": instruction(_bullets, num_bullets=count),
    "detectable_format:constrained_response": instruction(lambda response: any(map(response.__contains__, CHOICES))),
    "detectable_format:number_highlighted_sections": instruction(_highlights, num_highlights=count),
    "detectable_format:multiple_sections": instruction(_sections, section_spliter=word, num_sections=count),
    "detectable_format:json_format": instruction(lambda response: is_json(json_inside(response))),
    "detectable_format:title": instruction(_title),
    "detectable_format:sentence_hyphens": instruction(_hyphens),
    "detectable_format:square_brackets": instruction(_square_brackets),
    "detectable_format:bigram_wrapping": instruction(_bigrams),
    "startend:end_checker": instruction(_end, end_phrase=word),
    "startend:quotation": instruction(_quotation),
    "punctuation:no_comma": instruction(lambda response: "," not in response),
    "punctuation:punctuation_dot": instruction(lambda response: "." not in response),
    "punctuation:punctuation_exclamation": instruction(lambda response: "!" not in response),
}
