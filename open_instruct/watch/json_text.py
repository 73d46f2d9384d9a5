"""JSON for people and programs: a list of numbers or texts is one line, everything else has a line for each entry."""

import json
from typing import Any

INDENT = " "


def to_text(value: Any, depth: int = 0) -> str:
    """The JSON of a value that `json.dumps` knows."""
    inside = "\n" + INDENT * (depth + 1)
    end = "\n" + INDENT * depth
    if isinstance(value, dict) and value:
        entries = (f"{_line(str(name))}: {to_text(part, depth + 1)}" for name, part in value.items())
        return "{" + inside + f",{inside}".join(entries) + end + "}"
    if isinstance(value, list | tuple) and any(isinstance(part, dict | list | tuple) for part in value):
        return "[" + inside + f",{inside}".join(to_text(part, depth + 1) for part in value) + end + "]"
    return _line(value)


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
