"""How far the arguments of a call go, so that a mark of calls inside of them is told from the beginning of the next call.

<tool_call>{"name": "search", "arguments": {"query": "what does <tool_call> mean"}}</tool_call>
           └──────────────────────── the object ────────────────────────────────┘
"""

import json
import re

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_PYTHON_TOKEN = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|[()\[\]{}'\"]", re.DOTALL)
_BRACKETS = {")": "(", "]": "[", "}": "{"}


def end_of_json(text: str, begin: int) -> int:
    """The end of the object that begins at `begin`. Of an object that is malformed, the end of its part that is certainly
    right: a string in front of the mistake may have swallowed what follows it, because its quotation mark is missing."""
    try:
        return json.JSONDecoder(strict=False).raw_decode(text, begin)[1]
    except json.JSONDecodeError as error:
        head = text[begin : error.pos].rstrip()
        last_string = next((match for match in _STRING.finditer(head) if match.end() == len(head)), None)
        return begin + last_string.start() if last_string else error.pos
    except RecursionError:
        return begin


def end_of_python_call(text: str, begin: int) -> int:
    """The end of the call whose opening parenthesis comes first at or after `begin`; `begin` if its brackets do not match."""
    opened: list[str] = []
    for token in _PYTHON_TOKEN.finditer(text, text.index("(", begin)):
        if token[0] in _BRACKETS:
            if opened.pop() != _BRACKETS[token[0]]:
                return begin
            if not opened:
                return token.end()
        elif token[0] in "([{":
            opened.append(token[0])
        elif token[0] in ("'", '"'):
            return begin
    return begin
