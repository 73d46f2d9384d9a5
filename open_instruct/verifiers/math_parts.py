"""Takes mathematics in LaTeX apart: lists, alternatives, sets, intervals, unions, matrices, relations, equations."""

import itertools
import re

from open_instruct.verifiers.answer_reading import GROUPED

Parts = tuple[str, list[str]] | None
"""The kind of a structure, and its elements; None if the text is no such structure."""

_OPEN_CLOSE = {"(": ")", "[": "]", "{": "}"}
_MATRIX = re.compile(
    r"\\begin\{(?P<kind>[pbBvV]?matrix|smallmatrix|array)\} *(?:\{[lcr| ]*\})?(?P<rows>.*)\\end\{(?P=kind)\}", re.DOTALL
)
_END_OF_ROW = re.compile(r"\\\\(?: ?\[-?[0-9.]+ ?(?:pt|em|ex|mm|cm|in)\])?")
_KINDS = {"Bmatrix": "braces", "vmatrix": "determinant", "Vmatrix": "norm"}
"""Matrix environments whose brackets mean something other than a matrix."""


ANY_ORDER = "∨"
"""The sign for `or`, and the kind of a list of alternatives: the order of its elements does not count."""
_RELATIONS = {
    "≤": r"<=|\\leqslant|\\leqq|\\leq|\\le",
    "≥": r">=|\\geqslant|\\geqq|\\geq|\\ge",
    "≠": r"!=|\\neq|\\ne|\\not *=",
    "<": r"\\lt",
    ">": r"\\gt",
    "±": r"\\pm",
    "∓": r"\\mp",
    "\\emptyset ": r"\\varnothing|∅|\\\{ *\\\}",
}
_SIGNS = [(sign, re.compile(f"(?:{commands})(?![A-Za-z])")) for sign, commands in _RELATIONS.items()]
_WORD = r"(?:\\(?:text|textrm|mbox|mathrm) *\{{[ ,~]*{word}[ ,~]*\}}|(?<![A-Za-z\\]){word}(?![A-Za-z]))"
_OR = re.compile(r"(?:,\s*)?" + _WORD.format(word="or") + r"|\\lor(?![A-Za-z])")
_AND = re.compile(r"(?:,\s*)?" + _WORD.format(word="and"))


def with_signs(latex: str) -> str:
    """LaTeX with one sign for each kind of relation, `\\pm` and the empty set, and for `and` and `or` between parts. `and` is a
    comma, except beside `or`: `A and B or C` is not `A or B or C`."""
    for sign, commands in _SIGNS:
        latex = commands.sub(lambda _, sign=sign: sign, latex)
    latex = _OR.sub(ANY_ORDER, latex)
    is_mixed = ANY_ORDER in latex and not any(sign in latex for sign in "=<>≤≥≠")
    return _AND.sub("∧ " if is_mixed else ", ", latex)


def relation(text: str) -> tuple[str, list[str]] | None:
    """The signs and the sides of a chain such as `1 < x ≤ 2`; None if no sign is outside brackets, or a side is empty."""
    sides = split_outside_brackets(text, "<>≤≥≠")
    if sides is None or len(sides) < 2:
        return None
    return "".join(sign for sign in text if sign in "<>≤≥≠"), sides


def alternatives(text: str) -> list[str]:
    """Both values of a text with `±`; the text alone if it has none, or more than one: `± a ± b` may mean two values or four."""
    if text.count("±") + (text.count("∓") and "±" not in text) != 1:
        return [text]
    return [text.replace("±", upper).replace("∓", lower) for upper, lower in (("+", "-"), ("-", "+"))]


def union(text: str) -> Parts:
    parts = split_outside_brackets(re.sub(r"\\cup(?![A-Za-z])", "∪", text), "∪")
    return ("union", parts) if parts is not None and len(parts) > 1 else None


def bracketed(text: str) -> Parts:
    """`(1, 2)`, `[0, 1)`, `\\{1, 2\\}`: brackets around two or more elements, or a set around one."""
    opening, closing = text[:1], text[-1:]
    inner = text[1:-1]
    if text.startswith("\\{") and text.endswith("\\}"):
        opening, closing, inner = "{", "}", text[2:-2]
    elif opening == "{" or opening not in _OPEN_CLOSE or closing not in _OPEN_CLOSE.values():
        return None
    elements = split_outside_brackets(inner, ",")
    if elements is None or (len(elements) < 2 and opening != "{"):
        return None
    return opening + closing, elements


def listed(text: str) -> Parts:
    """`1, 2`; or in any order `1 ∨ 2`, `± 1`. Of `x = 1, y = 2 ∨ x = 3, y = 4` the elements are two lists."""
    groups = split_outside_brackets(text, ANY_ORDER)
    if groups is None:
        return None
    lists = [split_outside_brackets(group, ",") for group in groups]
    if len(groups) > 1 and any(sign in text for sign in "=<>≤≥≠") and any(parts and len(parts) > 1 for parts in lists):
        return ANY_ORDER, groups
    elements = [element for parts in lists for element in parts or [""]]
    if not all(elements):
        return None
    has_signs = any(len(alternatives(element)) > 1 and not _is_set(element) for element in elements)
    if len(elements) < 2 and not has_signs:
        return None
    return ANY_ORDER if has_signs or len(groups) > 1 else "list", elements


def _is_set(text: str) -> bool:
    return text.startswith("\\{") and text.endswith("\\}")


def matrix(text: str) -> Parts:
    """The entries of a matrix, row by row. The shape is part of the kind. Round and square brackets mean the same, even around an
    `array`; bars mean the determinant."""
    outer = text[:1] + text[-1:]
    match = _MATRIX.fullmatch(text[1:-1].strip() if outer in ("()", "[]", "||") else text)
    if match is None or "\\begin" in match["rows"]:
        return None
    kind = _KINDS.get(match["kind"], "matrix")
    if outer in ("()", "[]", "||"):
        if match["kind"] not in ("matrix", "smallmatrix", "array"):
            return None
        kind = "determinant" if outer == "||" else "matrix"
    rows = [[entry.strip() for entry in row.split("&")] for row in _END_OF_ROW.split(match["rows"])]
    if rows[-1] == [""]:
        rows.pop()  # the last row may end in `\\` too
    entries = [entry for row in rows for entry in row]
    if not all(entries) or len({len(row) for row in rows}) != 1:
        return None
    return f"{kind} of {len(rows)} rows", entries


def sides_of_equation(text: str) -> list[str] | None:
    """The parts between equals signs outside brackets: one side if there is no equals sign; None if a side is empty."""
    return split_outside_brackets(text, "=")


def without_thousands(text: str) -> str:
    """`1000\\pi` for `1,000\\pi`; commas in brackets stay, because `(1,200)` is a point."""
    depths = list(itertools.accumulate((char in "([{") - (char in ")]}") for char in text))
    return GROUPED.sub(lambda match: match[0] if depths[match.start()] else match[0].replace(",", ""), text)


def split_outside_brackets(text: str, separators: str) -> list[str] | None:
    """Parts between separators outside of brackets; None if brackets do not match, or a part is empty."""
    depth, start, parts = 0, 0, []
    for position, character in enumerate(text):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
            if depth < 0:
                return None
        elif character in separators and depth == 0:
            parts.append(text[start:position].strip())
            start = position + 1
    parts.append(text[start:].strip())
    return parts if depth == 0 and all(parts) else None
