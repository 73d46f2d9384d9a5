r"""Reads the text before an equals sign: a name for the value after it (`x`, `f(2)`, `\angle ABC`, `\text{Area}`), or an
expression.

Text that ends in a negation, or holds words that offer or deny something (`5 or x`, `x \not`), is neither.
"""

import re

from open_instruct.verifiers.answer_reading import without_font

_GREEK = (
    "alpha|beta|gamma|delta|epsilon|varepsilon|zeta|eta|theta|vartheta|iota|kappa|lambda|mu|nu|xi|rho|sigma|tau|phi|varphi|chi|psi|"
    "omega|Gamma|Delta|Theta|Lambda|Sigma|Phi|Psi|Omega|ell"
)
_FONTS = "text|textbf|textit|textrm|mathrm|mathbf|mathcal|mathit|boldsymbol|bm|mbox|operatorname"
_MARKS = "overline|overrightarrow|vec|hat|widehat|bar|tilde|angle|measuredangle|triangle"
_OPERATIONS = (
    "frac|dfrac|tfrac|sqrt|cdot|times|div|pi|sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|sinh|cosh|tanh|ln|log|exp|binom|infty|"
    "sum|prod|int|lim|to|max|min|gcd|lcm|det|deg|bmod|pmod|mod|lfloor|rfloor|lceil|rceil|cap|cup|circ|mid|prime|dots|cdots|ldots"
)
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_KNOWN = frozenset("|".join((_GREEK, _FONTS, _MARKS, _OPERATIONS)).split("|"))
_CHARACTERS = re.compile(r"(?:[A-Za-z0-9+\-*/^_{}()\[\]|.,' \\=]|(?<=[A-Za-z0-9)}])!)+")
_NO_NAMES = re.compile(
    "or|nor|not|no|isn|aren|if|is|are|was|be|maybe|perhaps|possibly|either|neither|unless|but|minus|negative|than|wrong|false|"
    "never|less|greater|more|most|least|except|without|instead|unequal|unlike|approximately|about|around|"
    "and|also|then|thus|so|for|when|where|while|with|given|since|because|let|as|at",
    re.IGNORECASE,
)
"""Words that deny the text before an equals sign, offer something else, or begin a condition."""
_MARKED = re.compile(rf"\\(?:{_MARKS}|{_FONTS})(?![A-Za-z])")
_INDEX = re.compile(r"_(?:[A-Za-z0-9]|\{[^{}]*\})")
_ARGUMENTS = re.compile(r"(?:\^\{-1\})?\(([^()]*)\)$")
_FUNCTION_LETTERS = frozenset("fghpqruvFGHPQRSTUV")
_SINGLE = re.compile(rf"[A-Za-z]|\\(?:{_GREEK})")
_MULTIPLE = re.compile(rf"(?=[-0-9.])-?[0-9.]* *(?:{_SINGLE.pattern})")
_SEVERAL_CAPITALS = re.compile(r"[A-Z]{2,5}|[a-z]?[A-Z]{1,5}")
_WORDS = re.compile(r"[A-Za-z]{3,}")


def may_stand_before_equals(text: str) -> bool:
    """Whether a text is a name or an expression, so that `text = 3` says 3."""
    if not _CHARACTERS.fullmatch(text) or "\\\\" in text or text[-1:] in tuple("+-*/^_\\"):
        return False
    words = re.findall(r"[A-Za-z]+", _COMMAND.sub(" ", text))
    are_harmless = not any(map(_NO_NAMES.fullmatch, words))
    return are_harmless and all(command in _KNOWN for command in _COMMAND.findall(text))


def begins_a_statement(text: str) -> bool:
    """Whether a text between two equals signs holds the end of one statement and the beginning of another: `3 x` of `y=3 x=2`."""
    if re.search(r"[A-Za-z]{3,}", re.sub(rf"\\(?!(?:{_FONTS})(?![A-Za-z]))[A-Za-z]+", " ", text)):
        return True  # words
    return re.search(r"[0-9A-Za-z)}\]] +[A-Za-z](?:_\S+)?$", _COMMAND.sub("+", text)) is not None


def has_variable(text: str) -> bool:
    """Whether an expression contains a letter or a word. Numbers, roots and π alone are a value, not the name of a value."""
    greek = any(re.fullmatch(_GREEK, command) for command in _COMMAND.findall(text))
    return greek or re.search(r"[A-Za-z]", _COMMAND.sub(" ", text)) is not None


def is_multiple_of_a_variable(text: str) -> bool:
    """Whether the text is like `2x` or `-x`: an answer `2x = 6` may mean 6 or 3."""
    return _MULTIPLE.fullmatch(text) is not None


def name_of(text: str) -> str | None:
    r"""A name in one spelling, such as `AB` for `\overline{AB}`; None for an expression, such as `2x` or `a+b`."""
    if not may_stand_before_equals(text):
        return None
    plain = _MARKED.sub(" ", text)
    is_word = plain != text and re.fullmatch(r"[^0-9+\-*/^]*[A-Za-z]{3}[^+\-*/^]*", plain) is not None
    plain = re.sub(r"[ |]", "", without_font(plain.strip()))
    stem = _INDEX.sub("", plain).replace("'", "")
    arguments = _ARGUMENTS.search(stem)
    if arguments:
        stem = stem[: arguments.start()]
        if re.search(r"[+\-*/^\\]", arguments[1]) and stem not in _FUNCTION_LETTERS:
            return None  # `x(x+1)` is a product
    elif re.fullmatch(r"\([^()]+,[^()]+\)", plain):
        return plain if all(name_of(part) for part in plain[1:-1].split(",")) else None
    stem = stem.strip("{}[]")
    if is_word or _WORDS.fullmatch(stem) or _SINGLE.fullmatch(stem) or _SEVERAL_CAPITALS.fullmatch(stem):
        return plain.strip("{}")
    return None


def may_be_same(name: str, other: str) -> bool:
    """Whether two names may stand for the same thing.

    `y` and `f(x)` may, and so may `S` and `Area`. `x` and `y` may not, nor may `f(2)` and `f(3)`, `a_1` and `a_2`, `AB` and `CD`.
    """
    if name.casefold() == other.casefold():
        return True
    stem, other_stem = (re.split(r"[_(]|\^", text, maxsplit=1)[0] for text in (name, other))
    if stem == other_stem:
        return name == stem or other == other_stem
    are_variables = all(_SINGLE.fullmatch(text) and not text.isupper() for text in (name, other))
    are_figures = all(re.fullmatch(r"[A-Z]{2,5}", text) for text in (name, other))
    return not are_variables and not (are_figures and sorted(name) != sorted(other))
