"""Reads the score in a judge's answer. Pure.

A judge quotes the response that it judges, and a response may say `Score: 10/10`. So the score is read only from the judge's JSON
object, or from the text if the answer holds no such object. Quotations are never read. A judge that gives two different verdicts
outside quotations has given none.
"""

import ast
import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import accumulate

from open_instruct.chat_codec import END_THINK

KEY = "score"
_NUMBER = (
    r"(?P<number>[-+]?(?:[0-9]++(?:\.[0-9]*+)?|\.[0-9]++)(?:e[-+]?[0-9]{1,3})?)"
    r"[*_`\"'\]]*(?:\s*(?:/|out of)\s*[*_]*(?P<of>[0-9]++(?:\.[0-9]++)?))?"
)
_SET_OFF = r"[*_`\"'(\[ \t]*"
"""Characters allowed between `Score:` and its number: bold type, quotation marks, brackets."""
_is_number = re.compile(rf"{_SET_OFF}{_NUMBER}[*_`\"')\] \t.]*", re.IGNORECASE).fullmatch
_STATED = re.compile(
    rf"(?P<quote>[\"'`]?)(?<![a-z])(?P<key>{KEY})(?P=quote)[*_\"']*\s*(?:\([^()\n]*\))?[*_]*\s*[:=]"
    rf"{_SET_OFF}(?:\n\s*{_SET_OFF}(?=[^a-z\n]*$))?{_NUMBER}(?!\s*(?:%|[-\u2013]\s*[0-9]))",
    re.IGNORECASE | re.MULTILINE,
)
"""`"SCORE": 7`, `**Score:** 7/10`, `Score (of 10) = [7]`, or a number alone on the next line; no range."""
_QUOTED = re.compile(
    r"(?<!\w)\"[^\"]*(?:\"|\Z)|\u201c[^\u201d]*(?:\u201d|\Z)|(?<!\w)'(?:[^'\n]|'(?=\w))*'(?!\w)|`[^`\n]*`|^[ \t]*>.*$",
    re.MULTILINE,
)
_BEGINS_LINE = re.compile(r"[\s*_#-]*(?:(?:my|the|final|overall|total)\s+)*", re.IGNORECASE).fullmatch
_BRACE = re.compile(r"(?<!\\)[{}]")
_DECISION = re.compile(r"final decision\W*(yes|no)\b", re.IGNORECASE)


def score_up_to(maximum: float) -> Callable[[str], float | None]:
    """A reader of answers with `"SCORE": n`, n in [0, maximum], as a share of `maximum`; `8/10` is eight of ten."""

    def read(answer: str) -> float | None:
        statement = stated_score(answer.rpartition(END_THINK)[2], maximum)
        if statement is None or not statement[1]:
            return None
        number, scale = statement
        return number / scale if 0 <= number <= scale else None

    return read


def decision(answer: str) -> float | None:
    """Reads `Final Decision: Yes` or `No`. None if the judge decides nothing, or both."""
    text = _without_quotations(answer.rpartition(END_THINK)[2])
    decisions = {word.lower() for word in _DECISION.findall(text)}
    return float("yes" in decisions) if len(decisions) == 1 else None


def stated_score(text: str, maximum: float) -> tuple[float, float] | None:
    """The number that a text gives as score, and the highest possible score: `maximum`, unless the text names another (`8/10`).
    None if the text gives no number, or several numbers that differ.

    A JSON object with a score counts, whatever sentences are before, after or inside it:
    `{"SCORE": 3, "REASONING": "It claims 'Score: 10/10' for itself."}` is 3. So does a line `Score: 3`; a sentence with
    a score counts only if there is neither.
    """
    entries = [value for verdict in _objects(text) for key, value in verdict.items() if str(key).lower() == KEY]
    values = [
        value[0] if isinstance(value, list) and len(value) == 1 else value for value in entries if value is not None
    ]
    statements = [_is_number(str(value)) for value in values]
    statements += _stated_in_text(text, with_sentences=not values)
    verdicts = [(float(match["number"]), float(match["of"] or maximum)) if match else None for match in statements]
    shares = {verdict and (verdict[0] / verdict[1] if verdict[1] else verdict[0]) for verdict in verdicts}
    return verdicts[0] if len(shares) == 1 else None


def _objects(text: str) -> Iterator[dict]:
    """The JSON objects in a text that are not inside a quotation or other braces."""
    text = _FENCE.sub("", text).strip("`\"' \t\n")
    prose = _without_quotations(text)
    begin = text.find("{")
    while begin >= 0:
        verdict, end = _object_at(text, begin)
        if verdict is not None and prose[begin] == "{":
            yield verdict
        if end is None:  # the answer was cut off, so the rest may be inside a quotation
            return
        begin = text.find("{", end)


_FENCE = re.compile(r"```\w*")
_DECODER = json.JSONDecoder(strict=False)


def _object_at(text: str, begin: int) -> tuple[dict | None, int | None]:
    """The object that begins at a brace, in JSON or Python syntax, or None; and the end of its braces, or None."""
    with suppress(ValueError, RecursionError):
        return _DECODER.raw_decode(text, begin)
    end = _closing(text, begin)
    with suppress(ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        value = ast.literal_eval(text[begin:end]) if end is not None else None
        return value if isinstance(value, dict) else None, end
    return None, end


def _closing(text: str, begin: int) -> int | None:
    """The position after the brace that closes the brace at `begin`, or None. LaTeX's `\\{` does not count as a brace."""
    depth = 0
    for brace in _BRACE.finditer(text, begin):
        depth += 1 if brace[0] == "{" else -1
        if depth <= 0:
            return brace.end()
    return None


def _stated_in_text(text: str, *, with_sentences: bool) -> list[re.Match[str]]:
    """The statements of a score outside quotations and objects: lines that begin with `Score:`, and keys in quotation marks.
    Beside such a line's score any other on the line counts too: `Score: 7 (not Score: 3)` has two. Without these, the sentences
    that contain a score, if they are wanted."""
    braces = list(_BRACE.finditer(text))
    begins = [brace.start() for brace in braces]
    depths = [0, *accumulate(1 if brace[0] == "{" else -1 for brace in braces)]
    prose = _without_quotations(text)

    def depth(match: re.Match[str]) -> int:
        return depths[bisect_left(begins, match.start())]

    def is_verdict(match: re.Match[str]) -> bool:
        line = prose[prose.rfind("\n", 0, match.start()) + 1 : match.start()]
        return bool(match["quote"] or _BEGINS_LINE(line))

    max_depth = 1 if with_sentences else 0  # an object that cannot be read is read as a text
    matches = [match for match in _STATED.finditer(prose) if depth(match) <= max_depth]
    verdicts = [match for match in matches if is_verdict(match)]
    lines = {prose.count("\n", 0, match.start()) for match in verdicts}
    beside = [match for match in matches if depth(match) == 0 and prose.count("\n", 0, match.start()) in lines]
    return verdicts + beside or (matches if with_sentences else [])


def _without_quotations(text: str) -> str:
    """The text with spaces in place of quotations, so that positions stay the same."""
    return _QUOTED.sub(lambda match: match[0] if _is_part(match[0]) else " " * len(match[0]), text)


def _is_part(quotation: str) -> bool:
    """Whether the quotation marks enclose only a key or a number, and not a quotation."""
    return quotation[1:-1].lower() == KEY or _is_number(quotation) is not None
