"""Values of options as the user wrote them, on the command line or in YAML, to values of the option's kind."""

import json
from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import Any, Literal, get_args, get_origin


def convert_all(options: Mapping[str, Any], kinds: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Values by option, and a mistake for each option whose value cannot be read."""
    values, mistakes = {}, {}
    for name, value in options.items():
        try:
            values[name] = convert(value, kinds[name])
        except ValueError as error:
            mistakes[name] = f"--{name} {as_text(value)}: expected {error}."
    return values, mistakes


def convert(value: Any, kind: Any) -> Any:
    """`value`, a string or a value that YAML has read, converted to the type `kind`.

    Raises:
        ValueError: `value` does not fit the type; the message says what was expected.
    """
    if get_origin(kind) is list:
        (item_kind,) = get_args(kind)
        items = _items(value, are_texts=item_kind is str)
        return [convert(str(item) if _is_number(item) and item_kind is str else item, item_kind) for item in items]
    if get_origin(kind) is Literal:
        choices = {str(choice): choice for choice in get_args(kind)}
        if str(value) not in choices:
            raise ValueError(f"one of {', '.join(choices)}")
        return choices[str(value)]
    if kind in _READERS:
        expected, read = _READERS[kind]
        try:
            return read(value)
        except (KeyError, TypeError, ValueError):
            raise ValueError(expected) from None
    return _convert_to_one_of(value, get_args(kind))


def _items(value: Any, *, are_texts: bool) -> list[Any]:
    """The items of a list, which may be given as the JSON of the list: `--stop_strings '["</answer>"]'`. If the items are
    texts, the JSON must begin with a text: `[1]` is itself a text, such as a reference to a source.

    Raises:
        ValueError: a text resembles the JSON of texts, but is not.
    """
    items = value if isinstance(value, list) else [value]
    text = items[0].strip() if len(items) == 1 and isinstance(items[0], str) else ""
    if not text.startswith("[") or not text.endswith("]"):
        return items
    try:
        read = list(json.loads(text))
    except (ValueError, RecursionError):
        if text.startswith(('["', "['")):
            raise ValueError("""a list as JSON, as in '["a", "b"]', or its items one by one, as in a b""") from None
        return items  # a text with brackets, such as [END]
    return items if are_texts and read and not isinstance(read[0], str) else read


def _convert_to_one_of(value: Any, kinds: Sequence[Any]) -> Any:
    if NoneType in kinds and (value is None or str(value).lower() in ("none", "null")):
        return None
    expected = []
    for kind in kinds:
        if kind is NoneType:
            continue
        try:
            return convert(value, kind)
        except ValueError as error:
            expected.append(str(error))
    raise ValueError(" or ".join(expected))


_TRUE, _FALSE = ("true", "t", "yes", "y", "1"), ("false", "f", "no", "n", "0")


def _read_bool(value: Any) -> bool:
    if not isinstance(value, str | bool):
        raise TypeError
    words = dict.fromkeys(_TRUE, True) | dict.fromkeys(_FALSE, False)
    return words[str(value).lower()]


def _read_int(value: Any) -> int:
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise TypeError
    return int(value)


def _read_float(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError
    return float(value)  # also from a YAML string, because YAML does not read 2e-5 as a number


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _read_str(value: Any) -> str:
    if not isinstance(value, str):  # no numbers either: YAML reads 0123 as 83, and the original text is lost
        raise TypeError
    return value


def _read_json_object(value: Any) -> dict[str, Any]:
    """From text, or from a mapping in a YAML file."""
    read = json.loads(value, object_pairs_hook=_without_repeats) if isinstance(value, str) else value
    if not isinstance(read, dict) or not all(isinstance(name, str) for name in read):
        raise TypeError
    json.dumps(read, allow_nan=False)  # a date in a YAML file is no JSON
    return read


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError
    return dict(pairs)


_READERS: dict[Any, tuple[str, Callable[[Any], Any]]] = {
    bool: ("True or False", _read_bool),
    int: ("one whole number", _read_int),
    float: ("one number", _read_float),
    str: ("one text (in YAML, quoted)", _read_str),
    dict[str, Any]: ("one JSON object in quotes, such as '{\"name\": 1}' (in YAML, a mapping)", _read_json_object),
}


def as_text(value: Any) -> str:
    """A value as the user wrote it."""
    if isinstance(value, list):
        return " ".join(map(str, value)) or "(nothing)"
    return str(value)
