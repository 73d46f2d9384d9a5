"""Takes a mathematical expression in LaTeX apart: lists, sets, intervals, unions, matrices, the sides of an equation."""

import itertools
import re

Parts = tuple[str, list[str]] | None
"""The kind of a structure, and its elements; None if the text is no such structure."""

_OPEN_CLOSE = {"(": ")", "[": "]", "{": "}"}
_MATRIX = re.compile(
    r"\\begin\{(?P<kind>[pbBvV]?matrix|smallmatrix|array)\} *(?:\{[lcr| ]*\})?(?P<rows>.*)\\end\{(?P=kind)\}", re.DOTALL
)
_GROUPED = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9]|,[0-9])")
_END_OF_ROW = re.compile(r"\\\\(?: ?\[-?[0-9.]+ ?(?:pt|em|ex|mm|cm|in)\])?")
_KINDS = {"Bmatrix": "braces", "vmatrix": "determinant", "Vmatrix": "norm"}
"""Matrix environments whose brackets mean something other than a matrix."""


def union(text: str) -> Parts:
    parts = re.split(r"\\cup(?![A-Za-z])|∪", text)
    return ("union", [part.strip() for part in parts]) if len(parts) > 1 else None


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
    elements = split_outside_brackets(text, ",")
    return ("list", elements) if elements is not None and len(elements) > 1 else None


def matrix(text: str) -> Parts:
    """The entries of a matrix, row by row. The shape is part of the kind. Round and square brackets mean the same, even around an
    `array`; bars mean the determinant."""
    outer = text[:1] + text[-1:]
    found = _MATRIX.fullmatch(text[1:-1].strip() if outer in ("()", "[]", "||") else text)
    if found is None or "\\begin" in found["rows"]:
        return None
    kind = _KINDS.get(found["kind"], "matrix")
    if outer in ("()", "[]", "||"):
        if found["kind"] not in ("matrix", "smallmatrix", "array"):
            return None
        kind = "determinant" if outer == "||" else "matrix"
    rows = [[entry.strip() for entry in row.split("&")] for row in _END_OF_ROW.split(found["rows"])]
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
    return _GROUPED.sub(lambda found: found[0] if depths[found.start()] else found[0].replace(",", ""), text)


def split_outside_brackets(text: str, separator: str) -> list[str] | None:
    """Parts between separators outside of brackets; None if brackets do not match, or a part is empty."""
    depth, start, parts = 0, 0, []
    for position, character in enumerate(text):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
            if depth < 0:
                return None
        elif character == separator and depth == 0:
            parts.append(text[start:position].strip())
            start = position + 1
    parts.append(text[start:].strip())
    return parts if depth == 0 and all(parts) else None
