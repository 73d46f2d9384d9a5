"""From texts to prompts and back: templates with named fields, and think tags."""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal

from open_instruct.chat_codec import END_THINK, THINK

REASONING_FIELDS = ("problem", "curr_summary")
SUMMARIZATION_FIELDS = ("problem", "existing_summary", "reasoning")
FILE_PREFIX = "file:"
"""A template that begins with this is the path of a file that holds the template."""
REASONING_TEMPLATE = """Solve this problem step by step.

Problem: {problem}

Previous work: {curr_summary}

Continue your reasoning:
"""
SUMMARIZATION_TEMPLATE = """Summarize the solution progress.

Problem: {problem}

Previous summary: {existing_summary}

New reasoning: {reasoning}

Provide a concise updated summary:
"""

ReasoningPart = Literal["thoughts", "answer", "both"]

_BRACES = re.compile(r"\{\{(?P<literal>\w*)\}\}|(?P<command>\\[A-Za-z]+)?\{(?P<name>[A-Za-z_]\w*)\}")


# --- templates --------------------------------------------------------------------------------------------------------


def fill_template(template: str, values: Mapping[str, str]) -> str:
    """`template` with each `{name}` of `values` replaced in one pass, so braces inside a value have no special meaning.

    `{{name}}` gives `{name}`. All other braces, and braces right after a LaTeX command, stay as they are.
    """

    def replace(match: re.Match[str]) -> str:
        if match["literal"] is not None:
            return "{" + match["literal"] + "}"
        is_field = match["command"] is None and match["name"] in values
        return values[match["name"]] if is_field else match[0]

    return _BRACES.sub(replace, template)


def read_template(template: str) -> str:
    """The template itself, or the content of the file that it names. Raises `OSError` or `UnicodeDecodeError`."""
    if not template.startswith(FILE_PREFIX):
        return template
    return Path(template.removeprefix(FILE_PREFIX).strip()).read_text()


def required_of_summaries(style: str) -> tuple[str, ...]:
    """Fields that a summarization template needs. If a summary replaces the previous one, its prompt must contain that one."""
    return ("reasoning",) if style == "append" else ("existing_summary", "reasoning")


def template_mistakes(template: str, *, fields: Collection[str], required: Collection[str]) -> list[str]:
    """What is wrong with a template; empty if nothing is."""
    names = {match["name"] for match in _BRACES.finditer(template) if match["name"] and not match["command"]}
    unknown = sorted(names - set(fields))
    listing = ", ".join(f"{{{name}}}" for name in fields)
    mistakes = [
        f"{{{name}}} is no field. There are {listing}; write {{{{{name}}}}} where braces are meant." for name in unknown
    ]
    return mistakes + [
        f"it lacks {{{name}}}. Write it where that text shall stand." for name in required if name not in names
    ]


# --- think tags -------------------------------------------------------------------------------------------------------


def thoughts_of(raw: str) -> str:
    """The thoughts: the text up to the first closing tag, or the whole text if there is no closing tag."""
    return _without_tags(raw.partition(END_THINK)[0])


def answer_of(raw: str) -> str:
    """The text after the last thought; empty if a thought was never closed."""
    if THINK not in raw and END_THINK not in raw:
        return raw
    spoken = raw.rpartition(END_THINK)[2]
    return _without_tags(spoken.partition(THINK)[0])


def reasoning_for_summary(raw: str, part: ReasoningPart) -> str:
    """The part of a reasoning turn that its summary is made from, without think tags."""
    if part == "thoughts":
        return thoughts_of(raw)
    if part == "answer":
        return answer_of(raw).strip()
    if END_THINK not in raw:
        return _without_tags(raw)
    return f"Thoughts:\n{thoughts_of(raw)}\n\nAnswer:\n{answer_of(raw).strip()}"


def with_opening_tag(raw: str) -> str:
    """A raw output that begins with the opening think tag. If the tag stood in the prompt instead, it is added here."""
    return raw if raw.lstrip().startswith(THINK) else THINK + raw


def summary_of(raw: str) -> str:
    """The summary in a raw output, without the thoughts before it."""
    return answer_of(raw).strip()


def _without_tags(text: str) -> str:
    return text.replace(THINK, "").replace(END_THINK, "").strip()
