"""Reads the tests in a label of the code verifiers: packed or not, as JSON or as values, with lines or lists as inputs.

{"input": ["1", "2"], "output": ["3"]}               lines of the standard input and output
{"input": "1\\n2", "output": "3", "fn_name": "add"}   a line of JSON for each argument, and the result in JSON
{"input": [1, 2], "output": 3, "fn_name": "add"}     the arguments and the result themselves
"""

import base64
import io
import json
import pickle
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from open_instruct.verifiers.labels import is_number, number_as_text

LARGEST_TESTS = 100 * 2**20
"""In bytes, after unpacking."""
MOST_DIGITS = 100_000
"""Longest whole number in a label, in digits. Reading one of this length takes a tenth of a second."""
DIGITS_AT_ONCE = 4000
"""Most digits that Python converts at once."""


@dataclass(frozen=True)
class Call:
    """A test that calls a function."""

    arguments: list[Any]
    results: tuple[Any, ...]
    """The right results, of which any may be meant."""


def read_list(label: object) -> list[Any]:
    """A list as it is, or the list in a JSON text, or in a list with only such a text. Else an empty list.

    The JSON may also be packed as LiveCodeBench and open-instruct pack it: pickled, deflated, in base64.
    """
    if isinstance(label, list) and len(label) == 1 and isinstance(label[0], str) and label[0].lstrip().startswith("["):
        label = label[0]
    if isinstance(label, str):
        try:
            label = parse_json(label if label.lstrip()[:1] in ("[", "{") else _unpacked(label))
        except (ValueError, RecursionError):
            return []
    return label if isinstance(label, list) else []


def with_lines(test: dict[str, Any]) -> dict[str, Any]:
    """A test of input and output with both as texts. Raises `ValueError` if they are no texts, numbers or lists of these."""
    value = "" if test["input"] is None else test["input"]
    texts = {"input": _lines(value), "output": _lines(test["output"])}
    if None in texts.values():
        raise ValueError(
            f"the input and output of a test must be texts, numbers or lists of lines, got {test!r:.200}. A test that calls a "
            'function names it: "fn_name": "<function>"'
        )
    return test | texts


def _lines(value: object) -> str | None:
    """A text or number, or a list of them as lines."""
    if isinstance(value, str):
        return value
    if is_number(value):
        return number_as_text(value)  # type: ignore[arg-type]
    if not isinstance(value, list):
        return None
    lines = [_lines(line) if not isinstance(line, list) else None for line in value]
    return None if None in lines else "\n".join(map(str, lines))


def function_in(tests: Sequence[dict[str, Any]]) -> str:
    """The function that a row's tests call. Raises `ValueError` if no test names it."""
    for test in tests:
        metadata = read_json(test.get("metadata"))
        fields = metadata if isinstance(metadata, dict) else {}
        for name in (test.get("fn_name"), fields.get("fn_name"), fields.get("func_name")):
            if isinstance(name, str) and name.isidentifier():
                return name
    raise ValueError(
        "a code_stdio ground truth with tests of testtype functional must say which function they call: add "
        '"fn_name": "<function>" to each test (LiveCodeBench has it as func_name in the metadata of the row)'
    )


def calls_in(tests: Sequence[dict[str, Any]]) -> list[Call]:
    """The calls of functional tests.

    If every result is a list of one element beside a list of arguments, as in APPS, the result may also be this element.

    Raises:
        ValueError: the arguments are neither a list nor lines of JSON, or the result is not JSON.
    """
    calls = [_call_in(test) for test in tests]
    are_wrapped = all(
        isinstance(test["input"], list) and isinstance(result, list) and len(result) == 1
        for test, (_, result) in zip(tests, calls, strict=True)
    )
    return [Call(arguments, (result, result[0]) if are_wrapped else (result,)) for arguments, result in calls]


def _call_in(test: dict[str, Any]) -> tuple[list[Any], Any]:
    inputs, result = test["input"], test["output"]
    if isinstance(inputs, list) and not _are_lines_of_json(inputs, result):
        return inputs, result
    lines = inputs if isinstance(inputs, list) else str(inputs).split("\n")
    try:
        arguments = [parse_json(line) for line in lines if line.strip()]
        return arguments, parse_json(result) if isinstance(result, str) else result
    except (ValueError, RecursionError) as error:
        raise ValueError(
            "a functional test must have its arguments as a list or as lines of JSON, and with lines of JSON the output as JSON: "
            f"{test!r:.200}"
        ) from error


def _are_lines_of_json(inputs: list[Any], result: object) -> bool:
    """Whether a list holds JSON texts of the arguments (`["[1, 2]", "3"]`), and not the arguments themselves (`["ab", "3"]`)."""
    texts = [text for text in (*inputs, result) if isinstance(text, str)]
    are_texts = len(texts) == len(inputs) + 1
    if not are_texts or not any(text.lstrip()[:1] in ("[", "{", '"') for text in texts[:-1]):
        return False
    try:
        for text in texts:
            parse_json(text)
    except (ValueError, RecursionError):
        return False
    return True


# --- JSON -------------------------------------------------------------------------------------------------------------


def parse_json(text: str) -> Any:
    """The value of a JSON text, in which whole numbers may have up to `MOST_DIGITS` digits. Raises `ValueError` or
    `RecursionError` for other texts."""
    return json.loads(text, parse_int=_whole_number)


def _whole_number(digits: str) -> int:
    """`int` without Python's limit of 4,300 digits. Halving the digits costs less than the quadratic time of `int`."""
    if len(digits) <= DIGITS_AT_ONCE:
        return int(digits)
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a number of over {MOST_DIGITS} digits")
    if digits[0] == "-":
        return -_whole_number(digits[1:])
    half = len(digits) // 2
    return _whole_number(digits[:-half]) * 10**half + _whole_number(digits[-half:])


def read_json(text: object) -> Any:
    """The value of a JSON text; any other value unchanged."""
    try:
        return parse_json(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        return text


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler without classes, so that unpickling runs no code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name}")


def _unpacked(text: str) -> str:
    """The JSON in a packed text. Raises `ValueError` if the text is not packed, or too large."""
    try:
        unpacker = zlib.decompressobj()
        content = unpacker.decompress(base64.b64decode(text, validate=True), LARGEST_TESTS)
        if unpacker.unconsumed_tail:
            raise ValueError(f"more than {LARGEST_TESTS} bytes of tests")
        tests = _PlainUnpickler(io.BytesIO(content)).load()
    except (zlib.error, pickle.UnpicklingError, EOFError, IndexError, KeyError, TypeError, AttributeError) as error:
        raise ValueError("not packed") from error
    if isinstance(tests, bytes):
        tests = tests.decode()
    return tests if isinstance(tests, str) else json.dumps(tests)
