r"""The signs of mathematical expressions in LaTeX: commands that are known, tokens, numbers. `math_syntax.py` reads
expressions made of them."""

import re
from dataclasses import dataclass
from fractions import Fraction


class Unreadable(ValueError):
    """The text is no expression of the grammar, or has two meanings."""


@dataclass(frozen=True, slots=True)
class Node:
    """An expression: an operation and its arguments; for a number, a name and a function of unknown meaning also a value."""

    operation: str
    arguments: tuple["Node", ...] = ()
    value: Fraction | str = ""


ONE = Node("number", value=Fraction(1))
GREEK = frozenset(
    re.findall(
        "[A-Za-z]+",
        "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho varrho sigma tau "
        "upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Upsilon Phi Psi Omega ell infty hbar",
    )
)
FUNCTIONS = frozenset(
    [
        "sin",
        "cos",
        "tan",
        "cot",
        "sec",
        "csc",
        "arcsin",
        "arccos",
        "arctan",
        "sinh",
        "cosh",
        "tanh",
        "ln",
        "log",
        "lg",
        "exp",
    ]
)
_PLAIN = FUNCTIONS | {"sqrt", "pi"}
"""Words that mean the same without a backslash."""
INVERSES = {"sin": "arcsin", "cos": "arccos", "tan": "arctan"}
ANGLES = frozenset(["sin", "cos", "tan", "cot", "sec", "csc"])
ACCENTS = frozenset(
    re.findall(
        "[a-z]+",
        "overline bar hat widehat tilde widetilde vec overrightarrow overleftrightarrow dot ddot angle measuredangle triangle "
        "mathbb mathcal mathfrak mathscr",
    )
)
"""Commands that make another name of what follows."""
FONTS = frozenset(["mathrm", "mathbf", "mathit", "mathsf", "boldsymbol", "bm", "textit", "textbf"])
PLAIN_FUNCTIONS = frozenset("fghFGH")
"""Letters before a bracket that are always functions."""
PERHAPS_FUNCTIONS = frozenset("pqruvPQRSTUV")
TIMES = frozenset((r"\cdot", r"\times", "*", "·", "×", r"\ast"))
OVER = frozenset(("/", r"\div", "÷"))
CLOSING = {"(": ")", "[": "]", "{": "}", "|": "|", r"\lfloor": r"\rfloor", r"\lceil": r"\rceil", r"\lvert": r"\rvert"}
ROUNDED = {r"\lfloor": "floor", r"\lceil": "ceiling", r"\lvert": "abs", "|": "abs"}
FRACTIONS = frozenset((r"\frac", r"\dfrac", r"\tfrac", r"\cfrac"))
BINOMIALS = frozenset((r"\binom", r"\dbinom", r"\tbinom"))
STRUCTURES = frozenset(name[1:] for name in (*FRACTIONS, *BINOMIALS, r"\pi", r"\sqrt", r"\operatorname"))
_TOKEN = re.compile(
    r"(?P<space>\s+|\\[,;:! ]|~|\\(?:left|right|displaystyle|textstyle|bigl?|bigr|Bigl?|Bigr|quad|qquad)(?![A-Za-z])\.?)"
    r"|(?P<repeating>[0-9]*\.[0-9]*\\(?:overline|bar|dot) ?(?:\{[0-9]+\}|[0-9]))"
    r"|(?P<number>[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
    r"|(?P<command>\\[A-Za-z]+|\\[{}|])"
    r"|(?P<word>[A-Za-z]+)"
    r"|(?P<sign>\N{DEGREE SIGN}|[-+*/^_(){}\[\]|!',×·÷])"
)
_REPEATING = re.compile(r"([0-9]*)\.([0-9]*)\\(?:overline|bar|dot) ?\{?([0-9]+)\}?")
_NO_PRODUCTS = frozenset(("or", "is", "if", "no", "to", "in", "of", "as", "at", "by", "we", "so"))


def names_in(node: Node) -> set[str]:
    """The names of an expression's variables."""
    inner = set().union(*map(names_in, node.arguments)) if node.arguments else set()
    return inner | {str(node.value)} if node.operation == "name" else inner


def has_call(node: Node) -> bool:
    """Whether an expression holds a function of unknown meaning."""
    return node.operation == "call" or any(map(has_call, node.arguments))


def tokens_of(latex: str) -> list[str]:
    tokens, position = [], 0
    while position < len(latex):
        match = _TOKEN.match(latex, position)
        if match is None:
            raise Unreadable(f"no sign of an expression: {latex[position]!r}")
        position = match.end()
        if match.lastgroup == "word":
            tokens += _letters(match[0])
        elif match.lastgroup != "space":
            tokens.append(match[0])
    return tokens


def _letters(word: str) -> list[str]:
    """A word as a command, if it is the name of a function; as one name, if it is two capitals (a side `AB`, heads and tails
    `HT`); else as a product of letters."""
    if word in _PLAIN:
        return [f"\\{word}"]
    if len(word) == 2 and word.isupper():
        return [word]
    if len(word) > 2 or word in _NO_PRODUCTS:
        raise Unreadable(f"a word: {word}")
    return list(word)


def number_in_base(digits: str, base: int) -> Fraction:
    """The value of digits in a base from 2 to 36. Raises `Unreadable` if there is no such number."""
    try:
        return Fraction(int(digits, base if 2 <= base <= 36 else 1))
    except ValueError as error:
        raise Unreadable(f"no number in base {base}: {digits}") from error


def is_number(token: str) -> bool:
    return token[:1] in tuple("0123456789.")


def number_of(token: str) -> Node:
    if match := _REPEATING.fullmatch(token):
        whole, prefix, cycle = match.groups()
        period = Fraction(int(cycle), 10 ** len(cycle) - 1) / 10 ** len(prefix)
        return Node("number", value=Fraction(f"{whole or 0}.{prefix or 0}") + period)
    return Node("number", value=Fraction(token))
