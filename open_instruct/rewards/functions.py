"""What a reward function is: how it is named, loaded and described, and what it is called with.

    def short_and_right(completions, answer, **kwargs):
        return [float(text.strip() == right) for text, right in zip(completions, answer)]

A function is called with the G responses to one prompt. It gets by name what its signature asks for: `prompts`, `completions`,
`completion_ids`, `trainer_state`, `log_metric`, `log_extra`, and the columns of the row, each as a list of G values. It returns G
numbers of any size; None is *not scored*. The functions of this module run in the reward function's own process (`server.py`).
"""

import importlib
import inspect
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from open_instruct.config.verifier_options import PICKLE
from open_instruct.user_modules import UserModuleError, import_user_module

GIVEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""What a function may ask for in addition to the columns of the row."""
PROMPT = "prompt"
"""The column that functions get as `prompts`."""
RewardFunction = Callable[..., Any]


class RewardFunctionError(ValueError):
    """A reward function cannot be used; the message names it and says why."""


@dataclass(frozen=True)
class Description:
    """A function as its process has loaded it."""

    needed: tuple[str, ...]
    """Parameters without a default that are columns of the row."""
    is_async: bool


@dataclass(frozen=True)
class RewardCall:
    """The G responses to one prompt, as JSON values."""

    prompt: Any
    """A text, or a list of messages."""
    texts: Sequence[str]
    completion_ids: Sequence[Sequence[int]]
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The columns of the row."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """The fields of `TrainerState`."""


@dataclass
class TrainerState:
    """The progress of the run, under the names of transformers' `TrainerState`."""

    global_step: int = 0
    """Training steps done."""
    max_steps: int = 0
    epoch: float = 0.0
    """Passes over the training data so far."""
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    log_history: list[dict[str, float]] = field(default_factory=list)
    """Always empty: metrics are made elsewhere."""


def load(target: str) -> RewardFunction:
    """Import or unpickle the function that `target` names.

    Raises:
        RewardFunctionError: there is no such file, module or function, or importing it fails.
    """
    if target.endswith(PICKLE):
        return _unpickled(Path(target))
    where, _, name = target.rpartition(":" if ":" in target else ".")
    if not where or not name.isidentifier() or (":" not in target and target.endswith(".py")):
        raise RewardFunctionError(f"{target}: name a file and a function in it, such as my_rewards.py:short_and_right")
    if where.endswith(".py"):
        sys.path.insert(0, str(Path(where).resolve().parent))  # the file may import a file next to it
    importlib.invalidate_caches()
    try:
        module = import_user_module(where)
    except UserModuleError as error:
        raise RewardFunctionError(str(error)) from error
    function = getattr(module, name, None)
    if not callable(function):
        names = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        problem = "is no function" if hasattr(module, name) else f"there is no {name} in {where}"
        raise RewardFunctionError(f"{target}: {problem}. Its functions are: {', '.join(names) or 'none'}")
    if inspect.isclass(function):
        raise RewardFunctionError(f"{target}: it is a class. Give a function; verifiers belong to --verifier_modules")
    return function


def _unpickled(path: Path) -> RewardFunction:
    try:
        return pickle.loads(path.read_bytes())
    except Exception as error:  # a pickle may import anything
        raise RewardFunctionError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def describe(function: RewardFunction, target: str) -> Description:
    """Which columns a function needs, and whether it is `async`. Raises `RewardFunctionError` for one without a signature."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise RewardFunctionError(f"{target}: its parameters are not known ({error})") from error
    positionals = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_ONLY]
    if positionals:
        raise RewardFunctionError(
            f"{target}: the parameter {positionals[0]!r} has no name. Take it by name, without the /"
        )
    keywords = [
        parameter
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    columns = tuple(
        parameter.name for parameter in keywords if parameter.default is parameter.empty and parameter.name not in GIVEN
    )
    call = function if inspect.isroutine(function) else type(function).__call__
    return Description(columns, inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call))


def arguments_of(
    function: RewardFunction,
    call: RewardCall,
    *,
    log_extra: Callable[[str, Sequence[Any]], None],
    log_metric: Callable[[str, float], None],
) -> dict[str, Any]:
    """The keyword arguments of a call: those that the signature takes."""
    num_responses = len(call.texts)
    is_conversation = not isinstance(call.prompt, str)
    completions = [[{"role": "assistant", "content": text}] if is_conversation else text for text in call.texts]
    columns = {name: _copies(value, num_responses) for name, value in call.columns.items() if name != PROMPT}
    context = {
        "prompts": _copies(call.prompt, num_responses),
        "completions": completions,
        "completion_ids": [list(ids) for ids in call.completion_ids],
        "trainer_state": TrainerState(**call.state),
        "log_extra": log_extra,
        "log_metric": log_metric,
    }
    arguments = columns | context
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return arguments
    names = {name for name, parameter in parameters.items() if parameter.kind is not parameter.VAR_POSITIONAL}
    return {name: value for name, value in arguments.items() if name in names}


def _copies(value: Any, number: int) -> list[Any]:
    """The value of each response. What a function changes in one of them does not change in the others."""
    return [deepcopy(value) if isinstance(value, list | dict) else value for _ in range(number)]


def numbers_of(result: Any, num_responses: int) -> list[float | None]:
    """What a function has returned, as numbers. Numbers of numpy and torch are numbers too, one to a response.

    Raises:
        ValueError: it is no list of that many numbers; the message says what to return.
    """
    if isinstance(result, str | bytes | Mapping | Set) or not hasattr(result, "__iter__"):
        raise ValueError(f"it returned {result!r:.80}, not a list. Return one number for each of the completions")
    values = list(result)
    if len(values) != num_responses:
        raise ValueError(
            f"it returned {len(values)} rewards for {num_responses} completions. Return one for each, in order"
        )
    return [_number(value, place) for place, value in enumerate(values)]


def _number(value: Any, place: int) -> float | None:
    if value is None:
        return None
    try:
        number = float(value) if not isinstance(value, str | bytes) else None
    except (TypeError, ValueError, OverflowError):
        number = None
    if number is None or number != number or number in (float("inf"), float("-inf")):
        raise ValueError(
            f"its reward for completion {place} is {value!r:.80}, which is no finite number. Return a number, or None for a "
            "completion that is not scored"
        )
    return number
