"""Environments with Gymnasium's interface, for a model that reads and writes text.

    observation, info = environment.reset(seed=…, options=…)
    observation, reward, terminated, truncated, info = environment.step(action)

The environment's `action_space` decides how the model's turn becomes an action:

    none, or Text            the whole turn, as text
    Discrete                 a whole number: the last in square brackets, [2], or without brackets the last in the turn
    Box, MultiDiscrete, …    a JSON list: the last in the turn, [0.5, -1]

An environment without `action_space` also gets a whole number if its `step` asks for an `int`. If a turn holds no action that the
space contains, the answer says what is expected, and the environment takes no step.
"""

import importlib
import inspect
import json
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from open_instruct.environments.base import (
    ENVIRONMENTS,
    Ending,
    Environment,
    Observation,
    Opening,
    Turn,
    user_message,
)
from open_instruct.environments.wire import as_text

_BRACKETED = re.compile(r"\[\s*([+-]?\d+)\s*\]")
_NUMBER = re.compile(r"(?<![\w.])[+-]?\d+(?![\w]|\.\d)")
_LIST = re.compile(r"\[[^\[\]]*\]")
_COLOURED = re.compile(r"\x1b\[[0-9;]*m([^\x1b]*)\x1b\[0m")
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class UnreadableAction(ValueError):
    """No action can be read from a turn; the message says what is expected."""


def is_gymnasium_like(value: type[Any]) -> bool:
    """Whether a class is one of Gymnasium's, or has its `reset(seed)` and `step(action)`, and is not a class of tools."""
    if any(base.__module__.partition(".")[0] in ("gymnasium", "gym") for base in value.__mro__):
        return True
    if hasattr(value, "get_reward") or not (hasattr(value, "reset") and hasattr(value, "step")):
        return False
    names = [name for name in inspect.signature(value.step).parameters if name != "self"]
    return names == ["action"] and "seed" in inspect.signature(value.reset).parameters


class GymnasiumEnvironment(Environment):
    """A class, or a function that makes an environment. Its arguments come from `--tool_configs`."""

    takes_text = True
    adapts: ClassVar[Any]

    def __init__(self, **config: Any) -> None:
        self._own = self.adapts(**config)
        self._num_steps = self._num_unreadable = 0
        self._total = 0.0
        self._was_truncated = False

    async def reset(self, task: Mapping[str, Any], seed: int) -> Opening:
        """Begin an episode. The row's settings, except the name, are passed to the environment as `options`."""
        options = {key: value for key, value in task.items() if key not in ("messages", "ground_truth")}
        arguments: dict[str, Any] = {"seed": seed % 2**31}
        if options:
            arguments["options"] = options
        result = self._own.reset(**arguments)
        if not isinstance(result, tuple) or len(result) != 2:
            raise ValueError(f"reset must return an observation and an info, got {result!r:.80}")
        self._num_steps = self._num_unreadable = 0
        self._total, self._was_truncated = 0.0, False
        return Opening([user_message(self._shown(result[0]))])

    async def step(self, turn: Turn) -> Observation:
        try:
            action = read_action(turn.text, self._own)
        except UnreadableAction as error:
            self._num_unreadable += 1
            return Observation([user_message(f"Error: {error}")], num_errors=1)
        result = self._own.step(action)
        if not isinstance(result, tuple) or len(result) != 5:
            raise ValueError(f"step must return five values, as Gymnasium has it since 0.26, got {result!r:.80}")
        observation, reward, terminated, truncated, _ = result
        self._num_steps += 1
        self._total += float(reward)
        self._was_truncated = bool(truncated)
        done = bool(terminated) or bool(truncated)
        return Observation([user_message(self._shown(observation))], float(reward), done)

    def _shown(self, observation: Any) -> str:
        """The observation as text, with the text picture if the environment was made with `render_mode` "ansi"."""
        parts = [observation_text(observation)]
        if getattr(self._own, "render_mode", None) == "ansi":
            parts.append(without_escapes(as_text(self._own.render())).strip("\n"))
        return "\n".join(part for part in parts if part)

    async def finish(self) -> Ending:
        return Ending(
            metrics={
                "steps": self._num_steps,
                "return": self._total,
                "unreadable_actions": self._num_unreadable,
                "truncated": float(self._was_truncated),
            }
        )

    async def close(self) -> None:
        if hasattr(self._own, "close"):
            self._own.close()


@ENVIRONMENTS.register("gymnasium")
class RegisteredGymnasium(GymnasiumEnvironment):
    """An environment that is registered with Gymnasium, such as `FrozenLake-v1`. Further arguments go to `gymnasium.make`."""

    def __init__(self, id: str, **options: Any) -> None:
        super().__init__(id=id, **options)

    @classmethod
    def problem(cls, config: Mapping[str, Any]) -> str:
        try:
            registry = importlib.import_module("gymnasium").registry
        except ImportError:
            return "install gymnasium, which this project does not bring: pip install gymnasium"
        return "" if config.get("id") in registry else f"gymnasium has no environment {config.get('id')!r}"


def _made(**config: Any) -> Any:
    return importlib.import_module("gymnasium").make(**config)


RegisteredGymnasium.adapts = staticmethod(_made)


def read_action(text: str, environment: Any) -> Any:
    """The action in a turn.

    Raises:
        UnreadableAction: the turn holds no action that the environment accepts.
    """
    space = getattr(environment, "action_space", None)
    if space is None:
        return _whole_number(text) if _asks_for_int(environment) else text
    if hasattr(space, "n") and not hasattr(space, "nvec") and not getattr(space, "shape", ()):
        return _of_discrete(text, space)
    if hasattr(space, "characters") or not hasattr(space, "contains") or not hasattr(space, "dtype"):
        return text
    return _of_list(text, space)


def _asks_for_int(environment: Any) -> bool:
    parameters = list(inspect.signature(environment.step).parameters.values())
    return bool(parameters) and parameters[0].annotation in (int, "int")


def _of_discrete(text: str, space: Any) -> int:
    lowest = int(getattr(space, "start", 0))
    highest = lowest + int(space.n) - 1
    form = f"a whole number from {lowest} to {highest} in square brackets, such as [{lowest}]"
    action = _whole_number(text, form)
    if not lowest <= action <= highest:
        raise UnreadableAction(f"there is no action {action}. Say {form}.")
    return action


def _whole_number(text: str, form: str = "a whole number in square brackets, such as [1]") -> int:
    matches = _BRACKETED.findall(text) or _NUMBER.findall(text)
    if not matches or len(matches[-1]) > 18:
        raise UnreadableAction(f"no action was found. Say {form}.")
    return int(matches[-1])


def _of_list(text: str, space: Any) -> Any:
    import numpy as np

    form = f"a list of numbers in the shape {list(space.shape)}, such as {_example(space)}"
    matches = _LIST.findall(text)
    if len(space.shape) > 1:
        matches = [text[text.index("[[") : text.rindex("]]") + 2]] if "[[" in text and "]]" in text else []
    if not matches:
        raise UnreadableAction(f"no action was found. Say {form}.")
    try:
        action = np.array(json.loads(matches[-1]), dtype=space.dtype)
    except (ValueError, TypeError, OverflowError) as error:
        raise UnreadableAction(f"{matches[-1]:.80} is no list of numbers. Say {form}.") from error
    if not space.contains(action):
        raise UnreadableAction(f"{matches[-1]:.80} is no action. Say {form}.")
    return action


def _example(space: Any) -> str:
    import numpy as np

    return json.dumps(np.zeros(space.shape, dtype=int).tolist())


def observation_text(observation: Any) -> str:
    """Text as it is; numbers, arrays and mappings of them as JSON."""
    return as_text(_plain(observation))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value.tolist() if hasattr(value, "tolist") else value


def without_escapes(picture: str) -> str:
    """A text picture without terminal codes. Coloured text, such as the player's place, is put in brackets."""
    return _ESCAPES.sub("", _COLOURED.sub(r"[\1]", picture))
