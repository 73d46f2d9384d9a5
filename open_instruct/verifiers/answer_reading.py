"""Finds the answer in its tags or its box, and reads an answer as a number, as LaTeX, or as words.

Text that could mean two answers, or that Python reads differently from a person, is not read as a number (`1,42`) and does not
equal the answer that it resembles (`A, B` is not B). Every reader takes time linear in the length of the text.
"""

import functools
import json
import re
from collections import deque
from collections.abc import Collection, Iterable
from decimal import Decimal
from fractions import Fraction

from open_instruct.verifiers.math_units import one_spelling


def extract_answer(text: str) -> str | None:
    """Content of the last complete `<answer>...</answer>`, stripped; None if there is none.

    In `<answer>1<answer>2</answer>` the content is 2, because the last opening tag before a closing tag counts. (The pattern of
    `reasoning_gym.utils.extract_answer` starts at the first opening tag and gives `1<answer>2`.) Takes time linear in the length
    of the text.
    """
    last_close = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(last_close, 0))
    if start < 0:
        return None
    start += len("<answer>")
    return text[start : text.index("</answer>", start)].strip()


_BOX_OR_BRACE = re.compile(r"(\\(?:boxed|fbox)[ \t\n]*)?\{|\}")
_BARE_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])(?![ \t]*\{)[ \t]*([^\n$]{1,100})")


def boxed_answer(text: str) -> str | None:
    """Content of the last complete `\\boxed{…}` or `\\fbox{…}`, with braces inside it. Without such a box, the text after a box
    without braces (`$\\boxed 3$`), up to the end of its formula or line; else None."""
    span = boxed_span(text)
    return text[span[0] : span[1]].strip() if span[0] >= 0 else _bare_box(text)


def boxed_span(text: str) -> tuple[int, int]:
    """Where the content of the last complete box with braces begins and ends; (-1, 0) if there is none."""
    span = (-1, 0)
    open_braces: list[tuple[int, bool]] = []  # where the content begins, and whether the brace belongs to a box
    for match in _BOX_OR_BRACE.finditer(text):
        if match[0] != "}":
            open_braces.append((match.end(), match[1] is not None))
        elif open_braces:
            begin, is_box = open_braces.pop()
            span = max(span, (begin, match.start())) if is_box else span
    return span


def _bare_box(text: str) -> str | None:
    """`3` in `\\boxed 3`; None if a word follows, because then the sentence is about boxes."""
    match = next(iter(deque(_BARE_BOX.finditer(text), maxlen=1)), None)
    content = re.split(r"\\[)\]]", match[1], maxsplit=1)[0].strip().rstrip(".") if match else ""
    is_word = len(content) > 1 and content[:2].isalpha()
    return content if content and not is_word else None


# --- LaTeX ------------------------------------------------------------------------------------------------------------

MAX_NUMBER = 1000
"""Longest text, in characters, that is read as a number, because Python takes quadratic time to read a number."""
_SPACING = re.compile(r"(\\\\)|\\(?:left|right|displaystyle|quad|qquad)(?![A-Za-z])|\\[!,;: ]|~")
"""Commands that only set spacing. The end of a row in a matrix, `\\\\ `, is matched first, because it is not the space `\\ `."""
_DOLLAR = re.compile(r"\\?\$")
_FONT = re.compile(
    r"(?:\\(?:text|textbf|textit|textrm|textsf|texttt|mbox|mathbf|mathit|mathrm|mathsf|boldsymbol|bold|bm|underline))? ?\{(.*)\}",
    re.DOTALL,
)
_SPACES = re.compile(r"(?<![0-9]) (?!(?<=[0-9], )[0-9]{3}(?![0-9]))| (?![0-9])")
"""Single spaces that may be removed. A space between two digits stays, because `4 2` is not 42. The space in `3, 125` stays too,
because this is not 3,125."""
_THOUSANDS = re.compile(r"(?<=[0-9])(?:\{,\}|\\,|,)(?:\\! *)?(?=[0-9]{3}(?![0-9]))")
"""A separator of thousands. The data set MATH writes `58,\\!500`, where `\\!` removes the space after the comma."""
_UNIT = re.compile(r"(.+?) ?(?:\\(?:text|mathrm|mbox)\{([^{}]*)\}(?:\^(?:([23])|\{([23])\}))?|\\?(%))")
_PLAIN_UNIT = re.compile(r"([-+]?[0-9][0-9.,]*(?: ?/ ?[0-9]+)?) +([A-Za-z]{2,}(?:(?: |/)[A-Za-z]+){0,2})(\^[23])?")
"""`5 kg`: LaTeX reads letters without `\\text` as variables, so only the words of `_PLAIN_UNITS` count."""
_PLAIN_UNITS = frozenset(
    re.findall(
        "[a-z]+",
        "cm mm km kg mg ml ft yd mi lb lbs oz min sec hr hrs mph kph s h g m l meter meters metre metres centimeter centimeters "
        "kilometer kilometers millimeter millimeters inch inches foot feet yard yards mile miles gram grams kilogram kilograms "
        "pound pounds ounce ounces ton tons liter liters litre litres gallon gallons second seconds minute minutes hour hours "
        "day days week weeks month months year years dollar dollars cent cents euro euros degree degrees percent unit units "
        "square cubic per people students apples points times",
    )
)
_UNIT_WORD = re.compile(r"°?([^\W\d_]+(?:\.[^\W\d_]+)*)\.?(?:\^?[23]|[²³])?|°")
_UNIT_LETTERS = frozenset("ACFJLNVWghlms")
_is_no_unit = re.compile(
    "and|but|cubed|else|equals|if|is|maybe|minus|mod|modulo|negative|neither|no|nor|not|or|over|pi|plus|squared|than|times|to|"
    "unless|versus|vs|wrong|zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|half|halves|quarter|"
    "(?:thir|four|fif|six|seven|eigh|nine)teen|(?:twen|thir|for|fif|six|seven|eigh|nine)ty|"
    "(?:third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|hundredth|thousandth)s?|"
    "(?:hundred|thousand|million|billion|trillion|dozen)s?|mil|mn|bn|tn"
).fullmatch
"""Matches a word that may follow a number but is no unit: it changes the number (`million`) or offers a second number (`or`)."""
_PLAIN_NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)")
POWER_OF_TEN = re.compile(rf"(?:{_PLAIN_NUMBER.pattern})[eE][-+]?[0-9]{{1,3}}")
"""`1.5e-3`, as programs write numbers."""
_FRACTION = re.compile(r"([-+]?)(?:\\frac\{([-+]?[0-9]+)\}\{([-+]?[0-9]+)\}|([0-9]+)/([0-9]+))")


def math_value(latex: str) -> tuple[Fraction | str, str]:
    """The exact number that LaTeX stands for, or else the LaTeX without spacing; and the unit after the number, or ""."""
    text = without_full_stop(latex.strip()).replace("\N{MINUS SIGN}", "-").replace("{,}", ",")
    text = text.replace("\\pounds", "£")
    text = " ".join(_DOLLAR.sub(" ", without_spacing(_THOUSANDS.sub(",", text))).split())
    if len(text) > MAX_NUMBER:
        return _compact(text), ""
    text = without_font(text)
    text = _with_unit(text)
    match = _UNIT.fullmatch(text)
    unit = _unit(match) if match else None
    number = _exactly(_compact(match[1])) if match and unit is not None else None
    money = "$" if has_dollars(latex) else ""
    if number is not None:
        return number, unit or money
    text = _compact(text)
    number = _exactly(text)
    return (text, "") if number is None else (number, money)


def has_dollars(latex: str) -> bool:
    """Whether a text has a sign of dollars. Two dollar signs are the ends of a formula."""
    return "\\$" in latex or latex.count("$") == 1


def _with_unit(text: str) -> str:
    """`5 \\text{kg}` for `5 kg`; a text without a well-known unit behind its number unchanged."""
    match = _PLAIN_UNIT.fullmatch(text)
    if match is None or not _PLAIN_UNITS.issuperset(re.split("[ /]", match[2].casefold())):
        return text
    return f"{match[1]} \\text{{{match[2]}}}{match[3] or ''}"


def without_full_stop(text: str) -> str:
    """`3` for `3.`; `0.333...` unchanged, because its dots stand for further digits."""
    return text if text.endswith("..") else text.removesuffix(".")


def without_spacing(latex: str) -> str:
    """LaTeX with a space in place of every command that only affects the layout: `\\left`, `\\,`, `~`."""
    return _SPACING.sub(r"\1 ", latex)


def without_font(latex: str) -> str:
    """The content of font commands: 3 for `\\mathbf{3}`, `even` for `\\text{even}`, and only the letter for `\\textbf{(C)}`."""
    text = _without_groups(latex)
    if text.startswith("(") and text.endswith(")"):
        inner = _without_groups(text[1:-1].strip())
        return inner if len(inner) == 1 and inner.isalpha() else text
    return text


def _without_groups(text: str) -> str:
    while (whole := _FONT.fullmatch(text)) and _is_balanced(whole[1]):
        text = whole[1].strip().rstrip(".")
    return text


def _is_balanced(latex: str) -> bool:
    """Whether every brace that opens in the text also closes in it: `a}{b` is the inside of two groups, not of one."""
    depth = 0
    for match in re.finditer(r"\\.|[{}]", latex):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth < 0:
            return False
    return depth == 0


def _compact(latex: str) -> str:
    """LaTeX without spaces, and with the braces around single digits that LaTeX allows one to omit, as in `\\frac12`."""
    text = re.sub(r"\\[dt]frac", r"\\frac", _SPACES.sub("", latex))
    text = re.sub(r"\\(sqrt|frac)([0-9])", r"\\\1{\2}", text)
    return re.sub(r"(\\frac\{[^{}]*\})([0-9])", r"\1{\2}", text)


def _unit(match: re.Match[str]) -> str | None:
    """The unit that `_UNIT` found: `square feet`, `m^2`, `%`, or "" if there is none; None if the text there is no unit.

    A unit consists of words that `_is_no_unit` does not match. A word of one letter must be the symbol of a unit, such as `m`,
    but not `i`.
    """
    _, text, bare_power, braced_power, percent = match.groups()
    words = re.split(r"[ /·-]+", (percent or text).strip().replace(" ^", "^").replace("\\%", "%"))
    if [word.casefold() for word in words] in (["%"], ["percent"], ["per", "cent"]):
        return "%"
    power = bare_power or braced_power
    if words == [""] and not power:
        return ""
    if not all(map(_is_unit_word, words)):
        return None
    spellings = [one_spelling(word.rstrip(".").replace("²", "^2").replace("³", "^3")) for word in words]
    signs = (
        ["/" if "/" in gap else " " for gap in re.findall("[ /·-]+", text.strip().replace(" ^", "^"))] if text else []
    )
    unit = "".join(sign + word for sign, word in zip(["", *signs], spellings, strict=True))
    return f"{unit}^{power}" if power else unit


def _is_unit_word(word: str) -> bool:
    match = _UNIT_WORD.fullmatch(word)
    name = (match[1] or "") if match else ""
    return match is not None and not _is_no_unit(name.casefold()) and (len(name) != 1 or name in _UNIT_LETTERS)


def _exactly(text: str) -> Fraction | None:
    """The number that a text stands for; None if it is no number."""
    if fraction := _FRACTION.fullmatch(text):
        sign, top, bottom, plain_top, plain_bottom = fraction.groups()
        denominator = int(bottom or plain_bottom)
        return int(f"{sign}1") * Fraction(int(top or plain_top), denominator) if denominator else None
    if re.fullmatch(r"[-+]?[1-9][0-9]{0,2}(?:,[0-9]{3})+(?:\.[0-9]*)?", text):
        text = text.replace(",", "")
    if _PLAIN_NUMBER.fullmatch(text) or POWER_OF_TEN.fullmatch(text):
        return Fraction(Decimal(text))
    return None


# --- numbers in prose --------------------------------------------------------------------------------------------------

_MINUS = "-\N{MINUS SIGN}\N{EN DASH}\N{NON-BREAKING HYPHEN}\N{FULLWIDTH HYPHEN-MINUS}"
_CURRENCY = r"(?:\\?\$|[€£¥₹])?"
_GAP = " \N{NO-BREAK SPACE}\N{THIN SPACE}\N{NARROW NO-BREAK SPACE}"
_DIGITS = (
    r"(?:[1-9][0-9]{0,2}(?:(?:\\,|(?:,|\{,\})(?:\\! ?)?)[0-9]{3})+(?![0-9])"
    rf"|(?<![0-9.,])(?<![0-9][{_GAP}])[1-9][0-9]{{0,2}}(?:[{_GAP}][0-9]{{3}})+(?![0-9])"
    r"|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
)
_NUMBER = re.compile(rf"([{_MINUS}]?){_CURRENCY}([{_MINUS}]?)({_DIGITS})([eE][-+]?[0-9]+)?(?: ?/ ?([0-9]+)(?![0-9/]))?")
_BEGINS_INSIDE = re.compile(r"(?:[0-9](?:[:_,'’]|\\,|\{,\}|(?:,|\{,\})\\! ?|\s*/\s*)|\^\s?\{?|[0-9)\]}]\*\*)\Z")
"""Text before a number which shows that the number is only a part of something: of a time, a power, a fraction, `1_42`, `1,42`,
`1.000,42`."""
_DATE = re.compile(rf"[0-9][{_MINUS}][0-9]+\Z")
"""The text of a date up to the hyphen before its last part."""
_SPACED_MINUS = re.compile(rf"(?:^\s*|[=(:≈][ \t]*)[{_MINUS}][{_GAP}]+\Z")
_GOES_ON = re.compile(r"[:/_][0-9]|[\u207a\u207b]")


def last_number(text: str) -> Fraction | None:
    """The exact value of the last number in a text; None if there is none, or if the last digits belong to something else.

    Separators of thousands (`1,000`, `1 000`), a currency, a power of ten (`1e3`) and a denominator (`1/2`) belong to the number;
    a full stop does not. A minus belongs to it, with two exceptions: a minus right after a digit, letter or bracket (`9-4` ends
    in 4), and a minus with a space on both sides after a word or at the beginning of a line (`- 42` in a list is 42; `= - 42`, or
    a text that is only `- 42`, is -42). Times, dates, powers and mixed numbers do not count: `12:42`, `2024-05-42`, `10^42`,
    `42²`, `42½`.
    """
    match = next(iter(deque(_NUMBER.finditer(text), maxlen=1)), None)
    if match is None or len(match[0]) > MAX_NUMBER or _GOES_ON.match(text, match.end()):
        return None
    before = text[max(match.start() - 40, 0) : match.start()]
    if _is_other_digit(before[-1:]) or _is_other_digit(text[match.end() : match.end() + 1]):
        return None
    first_sign, second_sign, digits, exponent, denominator = match.groups()
    if _BEGINS_INSIDE.search(before) or (first_sign and _DATE.search(before)):
        return None
    if digits[0] == "." and before[-1:].isdecimal():
        return None
    return _value(digits, exponent, denominator, is_negative=_is_negative(before, first_sign, second_sign))


def count_numbers(text: str) -> int:
    """How many numbers `last_number` would find in a text."""
    return sum(1 for _ in _NUMBER.finditer(text))


def _is_other_digit(char: str) -> bool:
    """Whether a character is numeric but not one of 0 to 9: `²`, `½`, an Arabic digit."""
    return char.isnumeric() and not char.isascii()


def _is_negative(before: str, first_sign: str, second_sign: str) -> bool:
    is_behind_something = before[-1:].isalnum() or before[-1:] in (")", "]")
    return bool(second_sign or (first_sign and not is_behind_something) or _SPACED_MINUS.search(before))


def _value(digits: str, exponent: str | None, denominator: str | None, *, is_negative: bool) -> Fraction | None:
    if (exponent and len(exponent) > 4) or (denominator and not int(denominator)):
        return None
    number = Fraction(Decimal(re.sub(r"[^0-9.]", "", digits) + (exponent or ""))) / int(denominator or 1)
    return -number if is_negative else number


# --- words -------------------------------------------------------------------------------------------------------------

_MINUS_SIGNS = {ord(sign): "-" for sign in _MINUS}
GROUPED = re.compile(r"(?<![0-9.,])[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9]|,[0-9])")
"""A whole number whose thousands are separated by commas. None begins with 0: `0,123` is a decimal number or a list."""
_SEPARATOR = re.compile(r"(?<![0-9])[,;:]|[,;:](?![0-9])")
_QUOTES = "\"'`\u2018\u2019\u201c\u201d"
_FENCE = re.compile(r"\A```(?:json)?\s+(.*?)\s*```\Z", re.DOTALL)
_BOLD = re.compile(r"(?<![\w)*])\*\*(?=[^\s*])([^*\n]+)(?<=\S)\*\*(?![\w(*])")
"""`**B**` in Markdown."""
_NUMBER_ALONE = re.compile(r"[-+]?(?:[0-9]{1,400}(?:\.[0-9]{1,400})?|\.[0-9]{1,400})(?:e[-+]?[0-9]{1,3})?")
_ZEROS = re.compile(r"\A([^\w.]*[0-9]+)\.0+(%?)\Z")
"""A whole number with zeros behind its point."""
_INSIDE_WORD = re.compile(rf"(?<=[^\W\d_])[.{_QUOTES}](?=[^\W\d_])")


@functools.lru_cache(maxsize=64)
def normalize_answer(text: str) -> str:
    """Lower case, without outer punctuation, English articles and superfluous spaces (after SQuAD, Rajpurkar et al. 2016).

    Punctuation is removed at the ends of words, and so are full stops and apostrophes between letters (`D.C.`, `it's`).
    Punctuation between digits, or as an operator, stays: `3.14`, `4'2`, `4(2)`, `5!`. `1,000` is 1000, and `42.0`, which is
    how pandas writes whole numbers, is 42; but `3.10` is not `3.1`, because it may be a version. An article before a word
    is removed: `the B` is B, but `A, B` and `A B` are `a b`, because `a` is no article before a single letter.
    """
    text = _BOLD.sub(r"\1", text.lower().translate(_MINUS_SIGNS))
    text = GROUPED.sub(lambda match: match[0].replace(",", ""), text)
    raw = _SEPARATOR.sub(r"\g<0> ", text).split()
    words = [(word.lstrip(_QUOTES + "("), _bare(word)) for word in raw]
    words = [pair for pair in words if pair[1]]
    successors = [*(bare for _, bare in words[1:]), ""]
    return " ".join(
        bare for (word, bare), successor in zip(words, successors, strict=False) if not _is_article(word, successor)
    )


def are_same_words(answer: str, texts: Iterable[str], numbers: Collection[Fraction] = ()) -> bool:
    """Whether an answer has the words of one of the texts, or their JSON, or is one of the numbers in any spelling:
    `1e3` is 1000."""
    words = normalize_answer(answer)
    if words != "" and words in map(normalize_answer, texts):
        return True
    if (value := _json_of(answer)) is not None and value in map(_json_of, texts):
        return True
    return bool(numbers) and _NUMBER_ALONE.fullmatch(words) is not None and Fraction(words) in numbers


def _json_of(text: str) -> str | None:
    """A JSON object or list in one spelling: without spaces, with its keys in order, `1` for `1.0`. None for any other text."""
    core = _FENCE.sub(r"\1", text.strip())
    if core[:1] not in ("{", "["):
        return None
    try:
        value = json.loads(core, parse_int=Decimal, parse_float=Decimal)
        return json.dumps(value, sort_keys=True, default=lambda number: ["number", str(number.normalize())])
    except (ValueError, ArithmeticError, RecursionError):
        return None


def _is_article(word: str, successor: str) -> bool:
    return bool(successor) and (
        word == "the" or (word in ("a", "an") and successor[:2].isalpha() and len(successor) > 1)
    )


def _bare(word: str) -> str:
    """A word without the punctuation around it. A decimal point and a factorial are not punctuation."""
    for _ in range(3):  # `("B."),` has three layers
        core = word.rstrip(_QUOTES + ".,:;?!")
        if word[len(core) :].startswith("!") and core[-1:] in (")", *"0123456789"):
            core += "!"
        body = core.lstrip(_QUOTES + ".,:;?!")
        if core.removesuffix(body).endswith(".") and body[:1].isdecimal():
            body = "." + body
        inner = body.strip("()")
        word = body if "(" in inner or ")" in inner else inner
    return _INSIDE_WORD.sub("", _ZEROS.sub(r"\1\2", word))
