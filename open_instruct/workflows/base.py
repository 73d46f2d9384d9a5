"""Workflows: what becomes of a prompt. A rollout is a coroutine that sees a context and nothing else.

    controller                                    engine                                       controller
    task(row) ─► PromptRequest.task ─► queue ─►   run(request, ctx) ─► Trajectory ─► queue ─►  rewards(samples, scores)
                                                   ctx.generate, ctx.call, ctx.now …            arrived(notes), metrics(…)

A workflow is chosen by name (`--rollout_workflow`), and nothing outside it knows which one runs. To add one, write a file with a
subclass of `Workflow` and name it with `--workflow_modules my_workflow.py`; see docs/workflows.md.
"""

import random
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from open_instruct.chat_codec import ChatCodec
from open_instruct.data_types import Completion, PromptRequest, Sample, SamplingConfig
from open_instruct.registry import Registry
from open_instruct.user_modules import import_user_module
from open_instruct.workflows.effects import allowed

if TYPE_CHECKING:
    from open_instruct.config.options import GRPOConfig
    from open_instruct.data.prompt_dataset import PromptRow
    from open_instruct.scored_groups import ScoredGroup

Tool = Callable[[Any], Any]
"""A function, or a coroutine function, of plain values."""


class RolloutFailed(RuntimeError):
    """A rollout cannot go on, and nothing is wrong with the program: its prompt is sampled again with another seed."""


class GenerationFailed(RolloutFailed):
    """The engine gave no responses."""


class CallFailed(RolloutFailed):
    """A tool raised an error, or did not answer in time."""


def first_of(error: BaseException) -> BaseException:
    """What went wrong first, where several branches of a rollout failed; the others are about the same."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@dataclass(frozen=True)
class Effect:
    """Which effect of its rollout it is: the `number`-th of its name, from 0. The same whenever the rollout is run."""

    name: str
    number: int

    def __str__(self) -> str:
        return f"{self.name}-{self.number}"


class Context(ABC):
    """All that a rollout may do to the world or learn of it. Each effect has a name and a number.

    Branches of a rollout that run side by side give their effects different names, because which of two effects of one name comes
    first would depend on the machine.
    """

    def __init__(self, *, seed: int, max_model_len: int) -> None:
        self.seed = seed
        """Of the prompt. Requests whose seeds are made from it do not depend on what else the engine does."""
        self.max_model_len = max_model_len
        """Tokens of prompt and response together that the engine takes."""
        self._numbers: Counter[str] = Counter()

    @property
    @abstractmethod
    def codec(self) -> ChatCodec:
        """The model's tokenizer and chat template."""

    async def generate(
        self, prompt_ids: "np.ndarray | Sequence[int]", sampling: SamplingConfig, *, name: str = "generate"
    ) -> list[Completion]:
        """`sampling.n` responses of the policy to the token ids.

        Raises:
            GenerationFailed: the engine broke the request off.
        """
        with allowed():
            answer = self._generate(self._effect(name), np.asarray(prompt_ids, np.int32), sampling)
        return await answer

    async def call(self, tool: str, arguments: Any, *, timeout_s: float, name: str = "") -> Any:
        """What the workflow's tool of this name (`Workflow.tools`) says to `arguments`; both are plain values.

        Raises:
            CallFailed: the tool raised an error, or took longer than `timeout_s` seconds.
        """
        with allowed():
            answer = self._call(self._effect(name or tool), tool, arguments, timeout_s)
        return await answer

    def now(self, *, name: str = "now") -> float:
        """Unix time."""
        with allowed():
            return self._now(self._effect(name))

    def random(self, *, name: str = "random") -> random.Random:
        """A generator whose numbers depend on the seed of the prompt, the name and the number of the effect alone."""
        with allowed():
            return random.Random(f"{self.seed} {self._effect(name)}")

    def uuid(self, *, name: str = "uuid") -> uuid.UUID:
        """An identifier, as reproducible as `random`."""
        with allowed():
            return uuid.UUID(int=random.Random(f"{self.seed} {self._effect(name)}").getrandbits(128), version=4)

    def _effect(self, name: str) -> Effect:
        self._numbers[name] += 1
        return Effect(name, self._numbers[name] - 1)

    @abstractmethod
    def _generate(
        self, effect: Effect, prompt_ids: np.ndarray, sampling: SamplingConfig
    ) -> Awaitable[list[Completion]]:
        """Begin to generate."""

    @abstractmethod
    def _call(self, effect: Effect, tool: str, arguments: Any, timeout_s: float) -> Awaitable[Any]:
        """Begin a call."""

    @abstractmethod
    def _now(self, effect: Effect) -> float:
        """Unix time."""


@dataclass(frozen=True)
class Trajectory:
    """What a rollout comes to."""

    samples: list[Sample]
    notes: Any = None
    """JSON values for the workflow's side in the controller."""


@dataclass(frozen=True)
class Lengths:
    """Most tokens of what a rollout makes of a prompt, and most samples."""

    prompt: int
    """Of a sample's prompt."""
    response: int
    """Of a sample's response."""
    sequence: int
    """Prompt and response of whatever an engine is asked for, in evaluations too."""
    trained: int
    """Prompt and response of a sample that is trained on."""
    samples: int


@dataclass(frozen=True)
class OwnPrompt:
    """A row of the data as a workflow sees it."""

    text: str
    """The row's `raw_query`, which verifiers get."""
    token_ids: list[int]
    """Of the first prompt."""
    num_tokens: int
    """Of the longest prompt that the row comes to without a response in it; `--max_prompt_token_length` bounds it."""


class Workflow(ABC):
    """One kind of rollout. One object lives in the controller and one in each engine; both are made from the same options.

    Only `run` has to be written. The defaults are those of a workflow whose samples are compared with each other, scored by the
    verifier of the row, and no longer than `--response_length`.
    """

    tools: ClassVar[Mapping[str, Tool]] = {}
    """What `Context.call` finds by name. Tools may do what they like."""
    prompts_are_of_the_data: ClassVar[bool] = True
    """Whether every prompt is that of its row. If not, prompts may be longer than the longest of the data."""
    length_options: ClassVar[Sequence[str]] = ()
    """Options, beside those of every run, that `lengths` depends on; messages name them."""
    identity_options: ClassVar[Sequence[str] | None] = None
    """Options that must stay as they are when a run goes on from a checkpoint; by default all of the workflow's."""

    def __init__(self, options: Any) -> None:
        """`options` is an instance of the class that the workflow was registered with."""
        self.options = options

    # --- in the driver, before anything starts ------------------------------------------------------------------------

    @classmethod
    def mistakes(cls, args: "GRPOConfig") -> Iterator[str]:
        """What is wrong with the options of the run, one sentence or two each: `--flag value: what is wrong. What to do.`"""
        del args
        return iter(())

    @classmethod
    def prepared(cls, options: Any) -> Any:
        """The options with what has to be read on the driver's machine, such as the text of a file."""
        return options

    @classmethod
    def lengths(cls, args: "GRPOConfig") -> Lengths:
        """How long things get; it bounds the engine's context, the rows of a batch and the queues."""
        longest = max(args.response_length, args.eval_sampling.max_tokens)
        return Lengths(
            prompt=args.max_prompt_token_length,
            response=args.response_length,
            sequence=args.max_prompt_token_length + longest,
            trained=args.max_prompt_token_length + args.response_length,
            samples=args.num_samples_per_prompt_rollout,
        )

    @classmethod
    def identity_texts(cls, options: Any) -> dict[str, str]:
        """Texts by option that are part of what a run is, beside `identity_options`."""
        del options
        return {}

    @property
    def has_own_prompts(self) -> bool:
        """Whether it makes prompts of the rows in a way of its own."""
        return type(self).own_prompt is not Workflow.own_prompt

    def own_prompt(self, messages: Sequence[Mapping[str, str]], codec: ChatCodec) -> OwnPrompt:
        """The prompt of a row with these messages. By default it is the chat template around them, and this is not called.

        Raises:
            ValueError: what is wrong with the row.
        """
        raise NotImplementedError

    # --- in the controller --------------------------------------------------------------------------------------------

    def task(self, row: "PromptRow", row_number: int, *, prompt_id: str, version: int, seed: int, is_eval: bool) -> Any:
        """What `run` has to know beside prompt and sampling; plain values. A prompt that is issued again gets the same."""
        del row, row_number, prompt_id, version, seed, is_eval

    def answer(self, text: str) -> str:
        """The part of a judged sample's text that the verifier sees."""
        return text

    def rewards(self, samples: Sequence[Sample], scores: Sequence[float | None]) -> list[float | None]:
        """The reward of each sample, in [0, 1]; None is *not scored*.

        Args:
            scores: what the verifier says of each judged sample; of others None.
        """
        return [sample.reward if score is None else score for sample, score in zip(samples, scores, strict=True)]

    def arrived(self, prompt_id: str, notes: Any) -> None:  # noqa: B027
        """A training prompt is back, with the notes of its trajectory."""

    def dropped(self, prompt_id: str) -> None:  # noqa: B027
        """A training prompt failed for the last time."""

    def metrics(self, rollouts: "Sequence[ScoredGroup]", groups: "Sequence[ScoredGroup]") -> dict[str, float]:
        """Metrics of a training step. `rollouts` are whole, `groups` the same divided into those that are compared."""
        del rollouts, groups
        return {}

    def evaluated(self, rollouts: "Sequence[ScoredGroup]") -> "Sequence[ScoredGroup]":
        """What of each rollout an evaluation reports as the answers."""
        return rollouts

    def evaluation_metrics(self, rollouts: "Sequence[ScoredGroup]") -> dict[str, float]:
        """Further metrics of an evaluation."""
        del rollouts
        return {}

    def state_dict(self) -> Any:  # noqa: B027
        """What the controller's side has to keep over a restart: JSON values."""

    def load_state_dict(self, state: Any) -> None:
        """Take `state_dict` up again. Called before the first `task`."""
        del state

    # --- in an engine -------------------------------------------------------------------------------------------------

    @abstractmethod
    async def run(self, request: PromptRequest, ctx: Context) -> Trajectory:
        """Roll one prompt out. Whatever it does to the world or learns of it goes through `ctx`.

        Raises:
            RolloutFailed: it cannot go on.
        """


WORKFLOWS: Registry[type[Workflow]] = Registry("workflow", flag="rollout_workflow")
SINGLE_TURN = "single_turn"
"""The workflow of a run that names none."""


@dataclass(frozen=True)
class WorkflowSpec:
    """A workflow of a run, as it travels to the processes that make it."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    """Plain values."""
    modules: tuple[str, ...] = ()
    """The user's modules that have to be imported first."""

    @classmethod
    def of(cls, name: str, options: Any, modules: Sequence[str] = ()) -> "WorkflowSpec":
        prepared = WORKFLOWS[name].value.prepared(options)
        return cls(name, asdict(prepared), tuple(modules))

    def make(self) -> Workflow:
        """The workflow, in this process."""
        for module in self.modules:
            import_user_module(module)
        entry = WORKFLOWS[self.name]
        return entry.value(entry.options(**self.options))


def identity_options(name: str) -> list[str]:
    """Options of a workflow that a resumed run must not change."""
    entry = WORKFLOWS[name]
    own = entry.value.identity_options
    return list(own) if own is not None else [one.name for one in fields(entry.options)]
