"""What is in the messages between an engine and the process of an environment (`system/cells/framing.py`).

The process of an environment has run a user's code on a model's text, so its messages are not trusted: every part of an answer is
checked, and both sides cut long texts.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from open_instruct.environments.base import Ending, Message, Observation, Opening, ToolCall, Turn
from open_instruct.system.cells.framing import BadMessage

MOST_BYTES = 2**22
"""Most bytes of one answer. A longer answer is the environment's fault."""
MOST_TEXT = 2**18
"""Most characters of one message. A longer text loses its middle."""
CUT = "\n[… {} characters left out …]\n"
MOST_MESSAGES = 256
MODEL, ENVIRONMENT = "model", "environment"
"""Whose fault an error is."""


def as_text(content: Any) -> str:
    """A tool's answer as valid text of bounded length.

    Bytes are read as UTF-8. Invalid bytes become U+FFFD; so do halves of surrogate pairs, which no tokenizer accepts. NUL is left
    out for the same reason.
    """
    if isinstance(content, bytes | bytearray):
        content = bytes(content[: 2 * MOST_TEXT]).decode(errors="replace")
    elif not isinstance(content, str):
        try:
            content = json.dumps(content, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            content = str(content)
    if len(content) > MOST_TEXT:
        left_out = len(content) - MOST_TEXT
        content = content[: MOST_TEXT // 2] + CUT.format(left_out) + content[-(MOST_TEXT // 2) :]
    if not content.isascii():
        content = content.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return content.replace("\0", "")


def first_error(error: BaseException) -> BaseException:
    """The first error within nested exception groups, whose own text says nothing ("unhandled errors in a TaskGroup")."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def turn_to_json(turn: Turn) -> dict[str, Any]:
    return asdict(turn)


def turn_from_json(values: Mapping[str, Any]) -> Turn:
    return Turn(values["text"], tuple(ToolCall(**call) for call in values["calls"]), values["finish_reason"])


def _message_to_json(message: Mapping[str, Any]) -> Message:
    return {key: as_text(message[key]) for key in ("role", "name", "content") if message.get(key) is not None}


def opening_to_json(opening: Opening) -> dict[str, Any]:
    return {"messages": [_message_to_json(message) for message in opening.messages]}


def observation_to_json(observation: Observation) -> dict[str, Any]:
    return {
        "messages": [_message_to_json(message) for message in observation.messages],
        "reward": None if observation.reward is None else float(observation.reward),
        "done": bool(observation.done),
        "num_errors": int(observation.num_errors),
    }


def ending_to_json(ending: Ending) -> dict[str, Any]:
    return {
        "reward": None if ending.reward is None else float(ending.reward),
        "metrics": {str(key): float(value) for key, value in ending.metrics.items()},
    }


def opening_from_json(values: Mapping[str, Any]) -> Opening:
    return Opening(_messages(values.get("messages")))


def observation_from_json(values: Mapping[str, Any]) -> Observation:
    done, num_errors = values.get("done"), values.get("num_errors")
    if not isinstance(done, bool) or type(num_errors) is not int or num_errors < 0:
        raise BadMessage("an observation without `done` and `num_errors`")
    return Observation(_messages(values.get("messages")), _reward(values.get("reward")), done, num_errors)


def ending_from_json(values: Mapping[str, Any]) -> Ending:
    metrics = values.get("metrics")
    if not isinstance(metrics, dict) or len(metrics) > MOST_MESSAGES:
        raise BadMessage("an ending without metrics")
    return Ending(_reward(values.get("reward")), {key: value for key, value in metrics.items() if _is_number(value)})


def _messages(values: Any) -> list[Message]:
    if not isinstance(values, list) or len(values) > MOST_MESSAGES:
        raise BadMessage("not a list of messages")
    for message in values:
        is_text = isinstance(message, dict) and all(isinstance(value, str) for value in message.values())
        if not is_text or not {"role", "content"} <= message.keys():
            raise BadMessage("not a message")
    return values


def _reward(value: Any) -> float | None:
    if value is not None and not _is_number(value):
        raise BadMessage("a reward that is no number")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
