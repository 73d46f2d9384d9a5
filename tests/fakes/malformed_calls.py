"""Calls of tools as models write them wrongly, in the form of each of vLLM's parsers."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from open_instruct.workflows.conversations.call_forms import CallForm

GUESS = {"number": 50}
NOTE = {"text": "a\nb"}


@dataclass(frozen=True)
class Malformed:
    """A call that is written wrongly."""

    kind: str
    text: str
    readings: tuple[tuple[str, dict[str, Any]], ...]
    """The only name and arguments under which it may be carried out. In any other case the model must be told."""
    is_last: bool = False
    """Whether the turn ends with it."""


def malformed_calls(form: CallForm) -> Iterator[Malformed]:
    """The ways to write `guess(number=50)` or `note(text="a\\nb")` wrongly that the form has."""
    call, is_json = form.example("guess", GUESS), form.syntax == "json"
    written = json.dumps(GUESS)
    meant = (("guess", GUESS),)
    if is_json:
        yield Malformed("missing brace", call.replace(written, '{"number": 50'), ())
        yield Malformed("line break in a string", form.example("note", NOTE).replace("\\n", "\n"), (("note", NOTE),))
        for kind, value in (("null", "null"), ("JSON text", json.dumps(written))):
            yield Malformed(kind, call.replace(written, value), (("guess", {}) if kind == "null" else meant[0],))
        yield Malformed("no arguments", call.replace(written, "").replace(', "arguments": ', ""), (("guess", {}),))
    else:
        closing = ")" if form.syntax == "python" else form.end
        yield Malformed("missing end", call.replace(closing, ""), ())
        yield Malformed("no arguments", form.example("guess", {}), (("guess", {}),))
        for kind, values in (
            ("null", (None, "null", "None")),
            ("text for a number", ("fifty",)),
            ("quoted number", ("50", 50)),
        ):
            readings = tuple(("guess", {"number": value}) for value in values)
            yield Malformed(kind, form.example("guess", {"number": values[0]}), (*readings, ("guess", {})))
        readings = tuple(("guess", {"numbr": value}) for value in (50, "50"))
        yield Malformed("unknown argument", form.example("guess", {"numbr": 50}), (*readings, ("guess", {})))
        as_text = form.example("note", NOTE).replace("\\n", "\n")
        yield Malformed("line break in a string", as_text, (("note", NOTE), ("note", {"text": "a b"})))
    for key in ("arguments", "args", "parameters"):
        if f'"{key}"' in call:
            other = "parameters" if key != "parameters" else "arguments"
            yield Malformed("other key", call.replace(f'"{key}"', f'"{other}"'), meant)
    if '"' in call.replace('<|"|>', ""):  # Gemma's mark of a text is no quotation mark
        yield Malformed("single quotes", call.replace('"', "'"), meant)
    yield Malformed("unknown tool", form.example("gues", GUESS), (("gues", GUESS), ("gues", {"number": "50"})))
    yield Malformed("cut off", call[: call.index("50") + 1], (), is_last=True)
