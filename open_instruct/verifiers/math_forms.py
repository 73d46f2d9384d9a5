r"""Forms in which people write an answer that are no LaTeX, or not the LaTeX of what they mean, rewritten as LaTeX of that.

`2 3/4` is a mixed number, `{1, 2}` a set, `]0, 1]` an interval, `3 x 10^8` a product, `\text{all real numbers}` an interval too,
and `\textbf{(B)}\ 12` an answer of multiple choice with its letter. Whole answers are rewritten, never parts of a formula.
"""

import re
from collections.abc import Sequence

from open_instruct.verifiers.answer_reading import GROUPED, without_spacing

_MIXED = re.compile(r"([-+]?[0-9]+) +([0-9]+) ?/ ?([0-9]+)")
_TIMES_TEN = re.compile(r"(?<=[0-9])\s*[xX]\s*(?=10(?:\^|\*\*))")
_DATE = re.compile(r"[0-9]{1,2}/[0-9]{1,2}/(?:[0-9]{2}|[0-9]{4})|[0-9]{4}/[0-9]{1,2}/[0-9]{1,2}")
_SET = re.compile(r"\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}")
_INTERVAL = re.compile(r"([\[\]])([^\[\];,]+[,;][^\[\];,]+)([\[\]])")
_REALS = re.compile(
    r"\\(?:R|reals)|(?:all )?real numbers|all reals|"
    r"\\mathbb ?(?:R|\{R\})|\\(?:text|mathrm|textrm|mbox) ?\{ *(?:all )?(?:real numbers|reals) *\}",
    re.IGNORECASE,
)
_DOTS = re.compile(r"\\(?:ldots|cdots|dotsc)(?![A-Za-z])|\u2026")
_MODULUS = re.compile(r"\\pmod *([0-9])(?![0-9])")
_FONT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|bf) ?\{([^{}]*)\}")
_WORDS = re.compile(r"[A-Za-z][A-Za-z'-]*|[0-9]+|[.,;]")
_NATURAL = re.compile(r"[A-Z]?[a-z]+|YES|NO|TRUE|FALSE")
_SHORT_WORDS = frozenset(("yes", "no", "odd"))
_LETTER = re.compile(
    r"(?:\\(?:text|textbf|mathrm|mathbf|textrm|bf) ?\{ *(?P<font>\(?[A-J][).:]?)"
    r"(?: +\}| *\}(?= *(?:\\[ ,;:!]|~|\\q?quad(?![A-Za-z]))))|(?P<plain>[A-J][).:]) )(?P<rest>.*)",
    re.DOTALL,
)
"""A letter in a font with a space that LaTeX shows behind it, or `B) `. `\\textbf{(B)} x` may be a product."""
_INSIDE_FONT = re.compile(r"(\\(?:text|textbf|mathrm|mathbf|textrm|bf) ?)\{ *(\([A-J]\)|[A-J][).:]) +([^{}]+)\}\Z")
_SECOND_CHOICE = re.compile(r"\b(?:and|or)\b|\([A-J]\)|\A[,;=+*^/<>_']|\A-(?![0-9.])|\A[A-J]\b")
"""The beginning of a text that names another choice, or goes on with the letter as with a variable."""


def as_latex(text: str) -> str:
    """An answer without the forms that LaTeX reads differently: `2\\frac{3}{4}` for `2 3/4`, `\\{1, 2\\}` for `{1, 2}`."""
    text = _DOTS.sub(r"\\dots ", text.strip()).replace(r"\lbrace", r"\{").replace(r"\rbrace", r"\}")
    text = _MODULUS.sub(r"\\pmod{\1}", text)
    if _REALS.fullmatch(text):
        return r"(-\infty,\infty)"
    if (mixed := _MIXED.fullmatch(text)) and 0 < int(mixed[2]) < int(mixed[3]):
        return rf"{mixed[1]}\frac{{{mixed[2]}}}{{{mixed[3]}}}"
    if (interval := _INTERVAL.fullmatch(text)) and (interval[1], interval[3]) != ("[", "]"):
        opening, closing = {"[": "[", "]": "("}[interval[1]], {"]": "]", "[": ")"}[interval[3]]
        return f"{opening}{interval[2].replace(';', ',')}{closing}"
    inside = _SET.fullmatch(text)
    if inside and "," in _SET.sub("", inside[1]) and not GROUPED.fullmatch(inside[1]):
        return rf"\{{{inside[1]}\}}"
    return _TIMES_TEN.sub(r"\\times ", text)


def is_date(text: str) -> bool:
    """Whether a text is a date with slashes, which is no quotient."""
    return _DATE.fullmatch(text.strip()) is not None


def are_same_words(text: str, other: str) -> bool:
    """Whether two answers are the same words, whatever their fonts and the case of their letters: `\\text{No solution}` and
    `no solution`. Single letters keep their case, and letters that are no word: `zD` is not `Zd`."""
    words, other_words = _words_of(text), _words_of(other)
    return len(words) == len(other_words) > 0 and all(map(_is_same_word, words, other_words))


def _words_of(text: str) -> Sequence[str]:
    """The words of an answer that is nothing else; empty if it is a formula."""
    plain = _FONT.sub(r" \1 ", without_spacing(text).replace("$", ""))
    words = _WORDS.findall(plain)
    is_all = re.sub(r"\s", "", plain) == "".join(words)
    has_word = any(word.casefold() in _SHORT_WORDS or (len(word) > 3 and _NATURAL.fullmatch(word)) for word in words)
    return words if is_all and has_word else ()


def _is_same_word(word: str, other: str) -> bool:
    are_natural = len(word) > 1 and _NATURAL.fullmatch(word) and _NATURAL.fullmatch(other)
    return word == other or bool(are_natural and word.casefold() == other.casefold())


def choice_of(text: str) -> tuple[str, str]:
    """The letter and the text of an answer such as `\\textbf{(B)}\\ 12`, `\\text{(B) }12` or `B) Paris`; two empty texts if it
    is no choice, or names a second one."""
    spaced = _INSIDE_FONT.sub(r"\1{\2 } \1{\3}", text.strip().strip("$"))
    match = _LETTER.fullmatch(spaced)
    if match is None:
        return "", ""
    rest = without_spacing(match["rest"]).strip()
    if not rest or _SECOND_CHOICE.search(_FONT.sub(r" \1 ", rest).strip()):
        return "", ""
    return (match["font"] or match["plain"]).strip("().: "), rest
