"""The text of a YAML file of options: what such a file must not contain, and how its values are written."""

from collections.abc import Mapping
from typing import Any

import yaml

MOST_BRACKETS = 2000


class BadYaml(ValueError):
    """The text is valid YAML, but it cannot be a file of options."""


def check_yaml(text: str) -> None:
    """Refuse YAML that is a mistake but that PyYAML would accept silently, or that PyYAML would take very long to read.

    Raises:
        BadYaml: the text has too many brackets, an alias (a few lines of aliases can expand to gigabytes), or a mapping with the
            same key twice.
        yaml.YAMLError, RecursionError: the text is not YAML, or is nested too deep.
    """
    if text.count("[") + text.count("{") > MOST_BRACKETS:  # PyYAML takes quadratic time for nested ones
        raise BadYaml(f"over {MOST_BRACKETS} brackets. No option needs so many")
    keys: list[set[str] | None] = []
    """Keys of each open mapping; None for an open list."""
    is_key: list[bool] = []
    """For each open mapping or list: whether its next scalar is a key."""
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise BadYaml(f"{_line_of(event)}: an alias (*{event.anchor}). Write the value itself")
        if isinstance(event, yaml.ScalarEvent) and keys and keys[-1] is not None and is_key[-1]:
            if event.value in keys[-1]:
                raise BadYaml(f"{_line_of(event)}: {event.value} stands there twice. Leave one out")
            keys[-1].add(event.value)
        if isinstance(event, yaml.CollectionEndEvent):
            keys.pop()
            is_key.pop()
        if isinstance(event, yaml.ScalarEvent | yaml.CollectionEndEvent) and is_key:
            is_key[-1] = not is_key[-1]
        if isinstance(event, yaml.CollectionStartEvent):
            keys.append(set() if isinstance(event, yaml.MappingStartEvent) else None)
            is_key.append(True)


def unreadable_value(error: Exception) -> str:
    """The mistake about a value that is correct YAML but impossible, such as a number of over 4,300 digits or a 13th month."""
    return f"a value cannot be read ({str(error).partition(';')[0]:.120}). Correct it."


def _line_of(event: yaml.Event) -> str:
    return f"line {event.start_mark.line + 1 if event.start_mark else '?'}"


def texts_as_written(text: str, kinds: Mapping[str, Any]) -> dict[str, str]:
    """The original text of options that hold text but whose value YAML reads as a number: 0123 would become 83."""
    numbers = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    return {
        key.value: value.value
        for key, value in (root.value if root else ())
        if kinds.get(key.value) in (str, str | None) and value.tag in numbers
    }
