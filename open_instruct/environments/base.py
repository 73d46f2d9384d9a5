"""The interface of an environment. An environment sees text and tool calls, never token ids.

    opening = await environment.reset(task, seed)        messages that follow the row's prompt
    observation = await environment.step(turn)           messages that answer the model's turn, a reward, whether it is over
    ending = await environment.finish()                  the last reward, and numbers for metrics
    await environment.close()

A tool is an environment that only answers calls. Derive from `Environment` for anything with a state, and from `ToolEnvironment`
for a tool; or bring a plain function, or a class of another library (`adapters.py`).

Whose fault is an error? `ToolError` means that the model asked for something impossible, so its text is shown to the model. Any
other error, the end of the process or a missed deadline is the environment's fault: the conversation begins again in a fresh
environment.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from open_instruct.registry import Registry

Message = dict[str, Any]
"""A chat message: `role`, `content`, and in a tool's answer the tool's `name`."""
Schema = dict[str, Any]
"""Description of a tool in OpenAI's format: `{"type": "function", "function": {"name", "description", "parameters"}}`."""


class ToolError(Exception):
    """The model asked for something impossible. The text of the error is the tool's answer."""


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool that the model has written."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    id: str = ""
    """The call's id as the model or its parser gave it; may be empty."""
    problem: str = ""
    """Why the call cannot be read, as the model is told; empty if it can be read. No environment gets a call with a problem."""
    text: str = ""
    """The call as the model wrote it, if it has a problem."""


@dataclass(frozen=True)
class Turn:
    """What the model has said in one turn."""

    text: str
    """The whole turn as text, without special tokens."""
    calls: tuple[ToolCall, ...] = ()
    """The calls in the turn that are meant for this environment."""
    finish_reason: str = "stop"
    """`length` if the turn was cut off."""


@dataclass(frozen=True)
class Opening:
    """How an episode begins."""

    messages: Sequence[Message] = ()
    """Messages that follow the row's messages. Most environments have none, because the row's prompt says everything."""


@dataclass(frozen=True)
class Observation:
    """The environment's answer to a turn."""

    messages: Sequence[Message] = ()
    reward: float | None = None
    """Reward of this step; None: the step has none, which is not 0."""
    done: bool = False
    """Whether the episode is over."""
    num_errors: int = 0
    """Calls that were answered with an error."""


@dataclass(frozen=True)
class Ending:
    """The last reward and the metrics of an episode that is over."""

    reward: float | None = None
    """A further reward, for the episode as a whole; None: there is none."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers of the episode, such as the guesses that it took. The metric `env/<name>/<key>` is their mean over episodes."""


class Environment(ABC):
    """One episode at a time, in a process of its own. Constructor arguments come from `--tool_configs`, or from the row."""

    takes_text: ClassVar[bool] = False
    """Whether the environment answers every turn, with or without calls. Example: a game that reads moves from the text."""
    is_stateless: ClassVar[bool] = False
    """Whether the environment only answers calls and keeps nothing between two calls. Then it is never reset. A conversation has
    a process of it only during each call, and the process may serve other conversations between two calls."""

    runs_programs: ClassVar[bool] = False
    """Whether the environment runs model output as a program. Its process then inherits no variable that might hold a key."""

    @classmethod  # noqa: B027
    def prepare(cls) -> None:
        """Load what is slow to load. Called once, in the process from which environments are forked."""

    @classmethod  # noqa: B027
    def prepare_for(cls, config: Mapping[str, Any]) -> None:
        """Load what is slow to load and shared by all environments with these constructor arguments, such as an index. Called
        once for each set of arguments, in the process from which environments are forked."""

    @classmethod
    def problem(cls, config: Mapping[str, Any]) -> str:
        """Why this machine cannot run the environment, and what to do; empty if it can. Called before a run begins."""
        del config
        return ""

    @classmethod
    def schemas(cls, config: Mapping[str, Any]) -> list[Schema]:
        """The tools that the model may call, with these constructor arguments."""
        del config
        return []

    @abstractmethod
    async def reset(self, task: Mapping[str, Any], seed: int) -> Opening:
        """Begin an episode.

        Args:
            task: the row's settings for this environment, and the row's `messages` and `ground_truth`.
            seed: the same for all conversations about one prompt, so that they have the same task.

        Raises:
            ValueError: the task is wrong; the message says why.
        """

    @abstractmethod
    async def step(self, turn: Turn) -> Observation:
        """Answer a turn."""

    async def finish(self) -> Ending:
        """Called once, after the last step."""
        return Ending()

    def dump(self) -> Any:
        """The state of the episode as JSON values, from which `load` continues in a fresh process. Called after the reset and
        after every step. None: the episode cannot be restored, so the conversation begins again if the environment fails."""
        return None

    def load(self, state: Any) -> None:
        """Continue from a `dump` instead of a reset. Must be overridden if `dump` is."""
        raise NotImplementedError

    async def close(self) -> None:  # noqa: B027
        """Release what the environment holds. The process may be killed instead."""


class ToolEnvironment(Environment):
    """An environment that answers tool calls. Override `call` and `schemas`."""

    async def reset(self, task: Mapping[str, Any], seed: int) -> Opening:
        return Opening()

    @abstractmethod
    async def call(self, name: str, arguments: Mapping[str, Any]) -> "str | Observation":
        """The tool's answer as text, or an observation for a step with a reward.

        Raises:
            ToolError: the model asked for something impossible; the text is the answer.
        """

    async def step(self, turn: Turn) -> Observation:
        """Answer all calls of the turn, one after another."""
        messages: list[Message] = []
        reward, num_errors, done = None, 0, False
        for call in turn.calls:
            try:
                answer = await self.call(call.name, call.arguments)
            except ToolError as error:
                answer, num_errors = str(error), num_errors + 1
            if isinstance(answer, Observation):
                messages += answer.messages
                reward = answer.reward if reward is None else reward + (answer.reward or 0.0)
                num_errors += answer.num_errors
                done = answer.done
            else:
                messages.append(tool_message(call.name, answer))
            if done:
                break
        return Observation(messages, reward, done, num_errors)


def tool_message(name: str, content: str) -> Message:
    """The message with which a tool answers."""
    return {"role": "tool", "name": name, "content": content}


def user_message(content: str) -> Message:
    """The message with which a game answers."""
    return {"role": "user", "content": content}


def schema(name: str, description: str, parameters: Mapping[str, Mapping[str, Any]] | None = None) -> Schema:
    """Description of a tool that needs all its parameters. `parameters` maps each name to a JSON schema."""
    properties = {key: dict(value) for key, value in (parameters or {}).items()}
    kinds = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": kinds}}


def schema_name(described: Schema) -> str:
    return str(described["function"]["name"])


@dataclass(frozen=True)
class EnvironmentSpec:
    """Description of one tool or environment of a run. Any process can make the environment from it."""

    target: str
    """A registered name (`calculator`), or a function or class in a file or module (`my_tools.py:search`)."""
    name: str
    """The environment's name in rows, calls and metrics."""
    config: dict[str, Any] = field(default_factory=dict)
    """Arguments of the constructor."""


ENVIRONMENTS: Registry[type[Environment]] = Registry("tool or environment", flag="tools")


def mistake_in_config(cls: type[Any], config: Mapping[str, Any]) -> str:
    """Why the constructor does not accept these arguments; empty if it does."""
    try:
        inspect.signature(cls).bind(**config)
    except TypeError as error:
        takes = inspect.signature(cls).replace(return_annotation=inspect.Signature.empty)
        return f"{error}; {cls.__name__} takes {takes}"
    except ValueError:  # a class whose signature Python does not know
        return ""
    return ""
