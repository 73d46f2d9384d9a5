"""Words, sentences and paragraphs of a text, without data from other packages. Every function takes time linear in the text.

A *word* is letters and digits, joined by single hyphens, apostrophes or dots: `don't`, `well-known`, `U.S` and `3.14` are one
word each. A *mark* is any other character that is no space. A *sentence* ends after `.`, `!`, `?` or `…`, and any closing quotes
and brackets, if space follows. No sentence ends after an initial (`J.`), a title (`Dr.`), the number of a list (`1.` as first
word), or an abbreviation or an ellipsis before a small letter (`etc. and`, `well... yes`). A line break ends no sentence, so a
heading without a full stop belongs to the sentence after it.
"""

import re

WORD = re.compile(r"[^\W_]+(?:[-'’.][^\W_]+)*")
_WORD_OR_MARK = re.compile(rf"{WORD.pattern}|\S")
_BARE = re.compile(r"[^\W_](?:.*[^\W_])?", re.DOTALL)
_CLOSING = "\"'”’»)]}*_`>"
_ENDS = (".", "!", "?", "…", "。", "！", "？", "؟", "।", "॥", "۔")
_FULL_WIDTH_END = re.compile(r"([。！？]+)(?=[^\s」』”’）])")
_TITLES_TEXT = "mr mrs ms dr prof st capt cpt col gen lt sgt rev hon gov sen rep pres vs no nos fig figs vol pp cf"
_TITLES = frozenset(_TITLES_TEXT.split())
_ABBREVIATIONS_TEXT = (
    "etc e.g i.e inc ltd co corp jr sr dept est approx a.m p.m u.s u.k u.n u.s.a ph.d m.d b.a m.a jan feb mar apr jun "
    "jul aug sep sept oct nov dec al ca"
)
_ABBREVIATIONS = frozenset(_ABBREVIATIONS_TEXT.split())
_DIVIDER = re.compile(r"\s?\*\*\*\s?")
_SPACED_DIVIDER = re.compile(r"\s?\*[ ]?\*[ ]?\*\s?")


def words_of(text: str) -> list[str]:
    """The words of a text, without marks."""
    return WORD.findall(text)


def words_and_marks(text: str) -> list[str]:
    """The words of a text, and each mark as an element of its own."""
    return _WORD_OR_MARK.findall(text)


def bare(word: str) -> str:
    """The word in small letters, without marks around it."""
    match = _BARE.search(word)
    return match[0].lower() if match else ""


def sentences(text: str) -> list[str]:
    """The sentences of a text, with single spaces between words."""
    parts: list[str] = []
    current: list[str] = []
    tokens = _FULL_WIDTH_END.sub(r"\1 ", text).split()
    for token, successor in zip(tokens, [*tokens[1:], ""], strict=False):
        current.append(token)
        if _is_end(token, successor, is_first=len(current) == 1):
            parts.append(" ".join(current))
            current = []
    return [*parts, " ".join(current)] if current else parts


def _is_end(token: str, successor: str, *, is_first: bool) -> bool:
    core = token.rstrip(_CLOSING)
    if not core.endswith(_ENDS):
        return False
    stem = core.rstrip(".…").lstrip(_CLOSING + "([{“‘«<").lower()
    if not core.endswith((".", "…")) or not successor:
        return True
    if is_first and stem.isdecimal():
        return False
    is_initial = len(stem) == 1 and stem.isalpha() and stem != "i" and core[-2].isupper()
    if stem in _TITLES or is_initial:
        return False
    goes_on = successor.lstrip(_CLOSING + "([{“‘«<")[:1].islower()
    is_open = stem in _ABBREVIATIONS or core.endswith(("..", "…"))
    return not (is_open and goes_on)


def parts_between(text: str, divider: str) -> list[str] | None:
    """The parts of a text between dividers. The divider `* * *` also matches `***`; any other divider matches only itself.

    A blank part at the beginning or end is left out. None if there is a blank part between others.
    """
    pattern = {"***": _DIVIDER, "* * *": _SPACED_DIVIDER}.get(divider)
    parts = pattern.split(text) if pattern else text.split(divider)
    if len(parts) > 1 and not parts[0].strip():
        del parts[0]
    if parts and not parts[-1].strip():
        del parts[-1]
    return parts if all(part.strip() for part in parts) else None
