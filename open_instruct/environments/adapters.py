"""Runs functions and classes that were written for other libraries as environments, without changes.

    def search(query: str) -> str                          a plain function: type hints and docstring become the schema
    class with public methods and reset                     TRL's `environment_factory`; `get_reward` gives the reward
    class with init(prompt) and step(text)                  skyrl-gym
    class with async reset(**kwargs) and step(call)         open-instruct's `RLEnvironment` and `TextRLEnvironment`
    class with reset(seed) and step(action), five values    Gymnasium; `gymnasium_like.py` turns text into an action

`environment_class` finds the class for a target: a registered name, or `file.py:name` or `module:name`.
"""

import asyncio
import contextlib
import copy
import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from open_instruct.environments import calculator, games, mcp_tools, openenv, python_tool, search  # noqa: F401 - they register
from open_instruct.environments.base import (
    ENVIRONMENTS,
    Ending,
    Environment,
    Observation,
    Opening,
    Schema,
    ToolCall,
    ToolEnvironment,
    ToolError,
    Turn,
    schema_name,
    tool_message,
    user_message,
)
from open_instruct.environments.gymnasium_like import GymnasiumEnvironment, is_gymnasium_like
from open_instruct.environments.wire import as_text
from open_instruct.registry import UnknownName
from open_instruct.user_modules import UserModuleError, import_user_module


class UnknownEnvironment(ValueError):
    """A target names nothing that can be used; the message lists what can be."""


@functools.cache
def environment_class(target: str) -> type[Environment]:
    """The environment class of a target.

    Raises:
        UnknownEnvironment: the target names no environment.
    """
    module_name, colon, name = target.rpartition(":")
    if not colon:
        try:
            return ENVIRONMENTS[target].value
        except UnknownName as error:
            cure = "or name one in a file: my_tools.py:name; --environment_modules takes files that register some"
            raise UnknownEnvironment(f"{error}; {cure}") from None
    try:
        module = import_user_module(module_name)
    except UserModuleError as error:
        raise UnknownEnvironment(str(error)) from error
    if not hasattr(module, name):
        raise UnknownEnvironment(f"{module_name} has no {name}")
    return adapted(getattr(module, name), name)


def adapted(value: Any, name: str) -> type[Environment]:
    """An environment class made from a function or class of any known kind."""
    if inspect.isclass(value) and issubclass(value, Environment):
        return value
    if inspect.isclass(value):
        if hasattr(value, "init") and hasattr(value, "step"):
            return _bound(SkyRLEnvironment, value, name)
        if hasattr(value, "text_step"):
            return _bound(OpenInstructTextEnvironment, value, name)
        if hasattr(value, "get_tool_definitions"):
            return _bound(OpenInstructEnvironment, value, name)
        if is_gymnasium_like(value):
            return _bound(GymnasiumEnvironment, value, name)
        if methods_of(value):
            return _bound(MethodsEnvironment, value, name)
    elif callable(value):
        return _bound(FunctionTool, value, name)
    raise UnknownEnvironment(f"{name} is neither a function nor a class with tools as methods, or with reset and step")


def _bound(adapter: type[Any], value: Any, name: str) -> type[Environment]:
    facts = {"adapts": staticmethod(value) if inspect.isfunction(value) else value}
    if inspect.isclass(value) and adapter is not SkyRLEnvironment:  # `--tool_configs` are its own arguments
        with contextlib.suppress(ValueError, TypeError):  # a class whose signature Python does not know
            facts["__signature__"] = inspect.signature(value)
    return type(name, (adapter,), facts)


def function_schema(function: Callable[..., Any]) -> Schema:
    """A function's name, docstring and type hints in OpenAI's format.

    Raises:
        ValueError: the docstring or a type hint is missing; the text says which.
    """
    from transformers.utils import get_json_schema

    try:
        described = get_json_schema(function)
    except Exception as error:  # Transformers has error types of its own for docstrings and type hints
        raise ValueError(f"{function.__name__}: {error}") from error
    described["function"].pop("return", None)
    return described


async def called(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """The result of a function or coroutine function. Arguments that do not fit count as the model's fault, and so does any error
    that the function raises."""
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise ToolError(f"Error: {error}") from error
    try:
        result = function(**arguments)
        return await result if inspect.isawaitable(result) else result
    except ToolError:
        raise
    except Exception as error:
        raise ToolError(f"Error: {type(error).__name__}: {error}") from error


class FunctionTool(ToolEnvironment):
    """A plain function. As in TRL, an error that the function raises is shown to the model."""

    is_stateless = True
    adapts: typing.ClassVar[Any]

    @classmethod
    def schemas(cls, config: Mapping[str, Any]) -> list[Schema]:
        return [function_schema(cls.adapts)]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        return as_text(await called(self.adapts, arguments))


def methods_of(value: type[Any]) -> dict[str, Callable[..., Any]]:
    """The public methods of a class that are tools by TRL's rule: instance and class methods, but no static methods. The
    parameter `self` is left out."""
    reserved = {"reset", "get_reward", "close"}
    public = inspect.getmembers(value, lambda member: inspect.isfunction(member) or inspect.ismethod(member))
    return {
        name: method if inspect.ismethod(method) else types.MethodType(method, value)
        for name, method in public
        if not name.startswith("_")
        and name not in reserved
        and not isinstance(inspect.getattr_static(value, name), staticmethod)
    }


class MethodsEnvironment(ToolEnvironment):
    """A class for TRL's `environment_factory`: `reset(**row)` may give a first text, and public methods are tools."""

    adapts: typing.ClassVar[Any]

    def __init__(self, **config: Any) -> None:
        self._own = self.adapts(**config)

    @classmethod
    def schemas(cls, config: Mapping[str, Any]) -> list[Schema]:
        return [function_schema(method) for method in methods_of(cls.adapts).values()]

    async def reset(self, task: Mapping[str, Any], seed: int) -> Opening:
        if not hasattr(self._own, "reset"):
            return Opening()
        text = self._own.reset(**_fitting(self._own.reset, {**task, "prompt": task.get("messages"), "seed": seed}))
        text = await text if inspect.isawaitable(text) else text
        return Opening([user_message(as_text(text))] if text else [])

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        return as_text(await called(getattr(self._own, name), arguments))

    async def finish(self) -> Ending:
        """The reward is the result of `get_reward`, or else the attribute `reward`, which reward functions for TRL read."""
        reward = self._own.get_reward() if hasattr(self._own, "get_reward") else getattr(self._own, "reward", None)
        return Ending(await reward if inspect.isawaitable(reward) else reward)

    async def close(self) -> None:
        await _call_those_there(self._own, "close")


async def _call_those_there(environment: Any, *names: str) -> None:
    """Call those of the named methods that the object has, and await the coroutines among them."""
    for name in names:
        if hasattr(environment, name):
            result = getattr(environment, name)()
            if inspect.isawaitable(result):
                await result


def _fitting(function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that the function has parameters for."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(values)
    return {name: value for name, value in values.items() if name in parameters}


class SkyRLEnvironment(Environment):
    """A text environment of skyrl-gym: `init(prompt)` gives messages, `step(text)` observations, reward and done."""

    takes_text = True
    adapts: typing.ClassVar[Any]

    def __init__(self, **config: Any) -> None:
        self._config = config
        self._own: Any = None

    async def reset(self, task: Mapping[str, Any], seed: int) -> Opening:
        messages = list(task.get("messages") or [])
        truth = {"method": "rule", "ground_truth": task.get("ground_truth")}
        extras = {"reward_spec": truth, "reward_model": truth, **task}  # skyrl-gym's environments read one of the two
        self._own = self.adapts(**_fitting(self.adapts, {"env_config": _Settings(self._config), "extras": extras}))
        prompt, _ = await asyncio.to_thread(
            self._own.init, copy.deepcopy(messages)
        )  # it may add to the list that it is given
        if list(prompt[: len(messages)]) != messages:
            raise ValueError("init has changed the messages of the row, and may only add messages behind them")
        return Opening(prompt[len(messages) :])

    async def step(self, turn: Turn) -> Observation:
        answer = await asyncio.to_thread(self._own.step, turn.text)
        return Observation(answer["observations"], answer["reward"], answer["done"])

    async def finish(self) -> Ending:
        metrics = self._own.get_metrics() if hasattr(self._own, "get_metrics") else {}
        return Ending(metrics={key: float(value) for key, value in metrics.items() if isinstance(value, int | float)})

    async def close(self) -> None:
        if self._own is not None:
            self._own.close()


class _Settings(dict[str, Any]):
    """A mapping whose entries are attributes too, as skyrl-gym's configurations are."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class OpenInstructEnvironment(ToolEnvironment):
    """open-instruct's `RLEnvironment`: `reset(**kwargs)` gives a result and tool definitions, `step(call)` a result."""

    adapts: typing.ClassVar[Any]

    def __init__(self, **config: Any) -> None:
        self._own = self.adapts(**config)

    @classmethod
    def schemas(cls, config: Mapping[str, Any]) -> list[Schema]:
        try:
            return list(cls.adapts.get_tool_definitions())
        except TypeError:  # an instance method
            return list(cls.adapts(**config).get_tool_definitions())

    async def reset(self, task: Mapping[str, Any], seed: int) -> Opening:
        if hasattr(self._own, "setup"):
            await self._own.setup()
        settings = {key: value for key, value in task.items() if key not in ("messages", "ground_truth")}
        await self._own.reset(
            **settings
        )  # its first result is shown nowhere, as in open-instruct: the row's prompt says it
        return Opening()

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Observation:
        return self._observation(await self._own.step(_Call(name, dict(arguments))), name)

    def _observation(self, result: Any, name: str) -> Observation:
        error = bool((getattr(result, "metadata", None) or {}).get("error"))
        role = getattr(self._own, "response_role", "tool")
        text = as_text(result.result)
        message = tool_message(name, text) if role == "tool" else {"role": role, "content": text}
        return Observation([message], float(result.reward or 0.0), bool(result.done), int(error))

    async def finish(self) -> Ending:
        return Ending(metrics=self._own.get_metrics() if hasattr(self._own, "get_metrics") else {})

    async def close(self) -> None:
        await _call_those_there(self._own, "close", "shutdown")


class OpenInstructTextEnvironment(OpenInstructEnvironment):
    """open-instruct's `TextRLEnvironment`: `text_step(text)` answers the whole turn."""

    takes_text = True

    @classmethod
    def schemas(cls, config: Mapping[str, Any]) -> list[Schema]:
        return []

    async def step(self, turn: Turn) -> Observation:
        return self._observation(await self._own.text_step(turn.text), "")


class _Call:
    """A call in the form that open-instruct's environments expect."""

    def __init__(self, name: str, args: dict[str, Any]) -> None:
        self.id, self.name, self.args = "", name, args


def call_of_text(described: Schema, text: str) -> ToolCall:
    """A call whose only argument is the text, for the first parameter that the tool needs."""
    parameters = described["function"].get("parameters", {})
    names = [*parameters.get("required", ()), *parameters.get("properties", ()), "text"]
    return ToolCall(schema_name(described), {names[0]: text})
