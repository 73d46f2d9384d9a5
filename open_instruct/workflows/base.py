"""Workflows: what an engine does with a prompt. A rollout is a coroutine, and all its effects go through a context.

    controller                                    engine                                       controller
    task(row) ─► PromptRequest.task ─► queue ─►   run(request, ctx) ─► Trajectory ─► queue ─►  rewards(samples, scores)
                                                   ctx.generate, ctx.call, ctx.now …            arrived(notes), metrics(…)

A workflow is chosen by name (`--rollout_workflow`), and no other code knows which workflow runs. To add a workflow, write a file
with a subclass of `Workflow` and name the file with `--workflow_modules my_workflow.py`; see docs/guides/workflows.md.
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
from open_instruct.data_types import Completion, GenerationResult, PromptRequest, Sample, SamplingConfig
from open_instruct.registry import Registry
from open_instruct.scored_groups import ends_of, last_samples
from open_instruct.user_modules import import_user_module
from open_instruct.workflows.effects import allowed

if TYPE_CHECKING:
    from open_instruct.config.grpo_config import GRPOConfig
    from open_instruct.data.prompt_dataset import PromptRow
    from open_instruct.scored_groups import ScoredGroup

Tool = Callable[[Any], Any]
"""A function or coroutine function that takes one plain value and returns a plain value."""


CallParser = Callable[[str], list[tuple[str, str]]]
"""Finds the tool calls in a text. Returns the tool's name and its arguments, as JSON, for each call."""


class RolloutFailed(RuntimeError):
    """A rollout cannot go on although nothing is wrong with the program. Its prompt is sampled again with another seed."""


class GenerationFailed(RolloutFailed):
    """The engine gave no responses."""


class CallFailed(RolloutFailed):
    """A tool raised an error, or did not answer in time."""


def first_of(error: BaseException) -> BaseException:
    """The first error, if several branches of a rollout failed. The other branches usually failed for the same reason."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@dataclass(frozen=True)
class Effect:
    """Identity of an effect within its rollout: a name, and a number among the effects of that name, from 0.

    The second `ctx.generate` is `generate-1`, whenever the rollout is run.
    """

    name: str
    number: int

    def __str__(self) -> str:
        return f"{self.name}-{self.number}"


class Context(ABC):
    """Everything that a rollout may do to the world or learn from it. Each effect has a name and a number.

    Branches of a rollout that run in parallel must give their effects different names. With the same name, the speed of the
    machine would decide which effect gets the lower number.
    """

    def __init__(self, *, seed: int, max_model_len: int, max_prompt_tokens: int | None = None) -> None:
        self.seed = seed
        """Seed of the prompt. Requests whose seeds are derived from this seed do not depend on the engine's other work."""
        self.max_model_len = max_model_len
        """Most tokens, prompt and response together, that the engine accepts. The limit includes room for the longest response
        of training and evaluation, so it does not bound the prompt of a rollout: `max_prompt_tokens` does."""
        self.max_prompt_tokens = max_model_len if max_prompt_tokens is None else max_prompt_tokens
        """Most tokens of a rollout's prompt before the policy has said anything (`--max_prompt_token_length`)."""
        self._numbers: Counter[str] = Counter()

    @property
    @abstractmethod
    def codec(self) -> ChatCodec:
        """The model's tokenizer and chat template."""

    @abstractmethod
    def vllm_parser(self, name: str, schemas: Sequence[Mapping[str, Any]]) -> CallParser:
        """vLLM's parser of tool calls with this name.

        Raises:
            RolloutFailed: vLLM has no such parser; the message lists the parsers that vLLM has.
        """

    async def generate(
        self, prompt_ids: "np.ndarray | Sequence[int]", sampling: SamplingConfig, *, name: str = "generate"
    ) -> list[Completion]:
        """Sample `sampling.n` responses of the policy to the token ids.

        Raises:
            GenerationFailed: the engine aborted the request, for example after `--generation_timeout`.
        """
        with allowed():
            answer = self._generate(self._effect(name), np.asarray(prompt_ids, np.int32), sampling)
        return await answer

    async def call(self, tool: str, arguments: Any, *, timeout_s: float, name: str = "") -> Any:
        """Call the tool of this name (`Workflow.tools`) and return its answer. `arguments` and the answer are plain values.

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
        """A random generator that depends only on the prompt's seed and on the effect's name and number."""
        with allowed():
            return random.Random(f"{self.seed} {self._effect(name)}")

    def uuid(self, *, name: str = "uuid") -> uuid.UUID:
        """An identifier that depends on the same values as `random`."""
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
    """The result of a rollout."""

    samples: list[Sample]
    notes: Any = None
    """JSON values that `run` sends to the workflow object in the controller (`Workflow.arrived`)."""


@dataclass(frozen=True)
class Lengths:
    """Upper bounds on the tokens and samples that a rollout makes from one prompt."""

    prompt: int
    """Tokens of a sample's prompt."""
    response: int
    """Tokens of a sample's response."""
    sequence: int
    """Tokens of any request to an engine, prompt and response together, evaluations included."""
    trained: int
    """Tokens of a sample that is trained on, prompt and response together."""
    samples: int
    """Samples of one prompt."""


@dataclass(frozen=True)
class OwnPrompt:
    """A row of the data as a workflow sees it."""

    text: str
    """The row's `raw_query`, which verifiers get."""
    token_ids: list[int]
    """Token ids of the first prompt."""
    num_tokens: int
    """Tokens of the longest prompt that the row alone gives, before any response. `--max_prompt_token_length` limits it."""


ResultMetrics = Callable[[Sequence[GenerationResult]], dict[str, Any]]


def metrics_of_results(workflow: "Workflow", results: Sequence[GenerationResult]) -> dict[str, Any]:
    """All of `Workflow.result_metrics`."""
    return {name: value for function in workflow.result_metrics for name, value in function(results).items()}


class Workflow(ABC):
    """One kind of rollout. One object lives in the controller and one in each engine; both are made from the same options.

    Only `run` has to be written. The other methods' defaults suit a workflow whose samples are compared with each other, are
    scored by the row's verifier, and are no longer than `--response_length`.
    """

    tools: ClassVar[Mapping[str, Tool]] = {}
    """The tools that `Context.call` finds by name. Unlike `run`, a tool may read a clock, draw numbers or use the network."""
    prompts_are_of_the_data: ClassVar[bool] = True
    """Whether every prompt is the prompt of its row. If not, prompts may be longer than the longest prompt of the data."""
    length_options: ClassVar[Sequence[str]] = ()
    """The workflow's own options that `lengths` depends on. Messages about lengths name them."""
    greedy_responses_are_alike: ClassVar[bool] = False
    """Whether all responses to a prompt are alike at temperature 0. Environments, tools and programs may answer differently."""
    adds_rewards: ClassVar[bool] = True
    """Whether rewards in addition to the verifiers', such as those of reward functions, count for each response. False where the
    rewards of some samples are made from the scores of others."""
    environments_fact: ClassVar[str] = ""
    """Fact of a row that lists its environments by `env_name`: each has metrics, `environment/<name>/…`; "": there is none."""
    reward_options: ClassVar[Sequence[str]] = ()
    """Options with which rollouts bring rewards of their own. Messages about a run without any reward name them."""
    identity_options: ClassVar[Sequence[str] | None] = None
    """Options that must not change when a run resumes from a checkpoint. None: all options of the workflow."""
    result_metrics: ClassVar[Sequence[ResultMetrics]] = ()
    """Functions that give further metrics of a training step or an evaluation from the notes of results: those of its rollouts,
    and those that were left out since the row before, because too few of their samples were scored or because they were too old.
    The latter have no samples. In an evaluation the names get the prefix `eval/`."""

    def __init__(self, options: Any) -> None:
        """`options` is an instance of the class that the workflow was registered with."""
        self.options = options

    # --- in the driver, before anything starts ------------------------------------------------------------------------

    @classmethod
    def mistakes(cls, args: "GRPOConfig") -> Iterator[str]:
        """Messages about wrong options of the run, each in the form `--flag value: what is wrong. What to do.`"""
        del args
        return iter(())

    @classmethod
    def may_reward(cls, args: "GRPOConfig") -> bool:
        """Whether rollouts of this run may bring rewards of their own, so that no verifier is needed."""
        del args
        return True

    @classmethod
    def prepared(cls, options: Any) -> Any:
        """The options, completed with everything that only the driver's machine can read, such as the text of a file."""
        return options

    @classmethod
    def lengths(cls, args: "GRPOConfig") -> Lengths:
        """Upper bounds that size the engine's context, the rows of a batch and the queues."""
        return Lengths(
            prompt=args.max_prompt_token_length,
            response=args.response_length,
            sequence=args.max_prompt_token_length + args.longest_response,
            trained=args.max_prompt_token_length + args.response_length,
            samples=args.num_samples_per_prompt_rollout,
        )

    @classmethod
    def identity_texts(cls, options: Any) -> dict[str, str]:
        """Further texts, by option, that must not change when a run resumes, such as the content of a template file."""
        del options
        return {}

    @property
    def has_own_prompts(self) -> bool:
        """Whether the workflow overrides `own_prompt`."""
        return type(self).own_prompt is not Workflow.own_prompt

    def own_prompt(self, messages: Sequence[Mapping[str, str]], codec: ChatCodec) -> OwnPrompt:
        """The prompt of a row with these messages. Called only if overridden: by default the prompt is the chat template around
        the messages.

        Raises:
            ValueError: the row cannot be used; the text says why.
        """
        raise NotImplementedError

    @property
    def reads_rows(self) -> bool:
        """Whether the workflow overrides `row_facts`."""
        return type(self).row_facts is not Workflow.row_facts

    def row_facts(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """What the workflow needs to know about a row in addition to its prompt, as JSON values. `task` finds these values in
        `PromptRow.facts`, together with the row's `messages`. Called only if overridden.

        Raises:
            ValueError: the row cannot be used; the text says why.
        """
        raise NotImplementedError

    def row_schemas(self, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The tools, in OpenAI's format, that the chat template describes in the row's prompt."""
        del facts
        return []

    def template_mistakes(self, codec: ChatCodec) -> Iterator[str]:
        """Messages about what the workflow needs and the run's chat template cannot do. Each message says what to do."""
        del codec
        return iter(())

    # --- in the controller --------------------------------------------------------------------------------------------

    def task(self, row: "PromptRow", row_number: int, *, prompt_id: str, version: int, seed: int, is_eval: bool) -> Any:
        """What `run` needs to know in addition to the prompt and the sampling options, as plain values. A prompt that is
        issued again gets the same task."""
        del row, row_number, prompt_id, version, seed, is_eval

    def answer(self, text: str) -> str:
        """The part of a judged sample's text that the verifier sees."""
        return text

    def rewards(self, samples: Sequence[Sample], scores: Sequence[float | None]) -> list[float | None]:
        """The reward of each sample, in [0, 1]; None is *not scored*.

        Args:
            scores: the verifier's score of each judged sample; None for every sample without a score.

        A sample that continues in the next sample gets the reward of the last sample of its chain.
        """
        rewards = [sample.reward if score is None else score for sample, score in zip(samples, scores, strict=True)]
        return [rewards[end] for end in ends_of(samples)]

    def arrived(self, prompt_id: str, notes: Any) -> None:  # noqa: B027
        """Called when the result of a training prompt has arrived, with the notes of its trajectory."""

    def dropped(self, prompt_id: str) -> None:  # noqa: B027
        """Called when a training prompt has failed for the last time."""

    def metrics(self, rollouts: "Sequence[ScoredGroup]", groups: "Sequence[ScoredGroup]") -> dict[str, float]:
        """Further metrics of a training step. `rollouts` has one entry per prompt; `groups` has the same samples, divided into
        groups whose samples are compared with each other. If a step had to take several times its prompts, the tokens of early
        rollouts that it left out are zeros of the same lengths (`ScoredGroup.left_out_as`)."""
        del rollouts, groups
        return {}

    def evaluated(self, rollouts: "Sequence[ScoredGroup]") -> "Sequence[ScoredGroup]":
        """The samples of each rollout that an evaluation reports as answers: those that do not continue in another sample."""
        return last_samples(rollouts)

    def evaluation_metrics(self, rollouts: "Sequence[ScoredGroup]") -> dict[str, float]:
        """Further metrics of an evaluation. Their names begin with `eval/`; the prefix is added where a name lacks it."""
        del rollouts
        return {}

    def state_dict(self) -> Any:  # noqa: B027
        """What the workflow object in the controller must keep when a run restarts, as JSON values."""

    def load_state_dict(self, state: Any) -> None:
        """Restore a `state_dict`. Called before the first `task`."""
        del state

    # --- in an engine -------------------------------------------------------------------------------------------------

    def engine_tools(self) -> Mapping[str, Tool]:
        """The tools that `Context.call` finds by name."""
        return self.tools

    def close(self) -> None:  # noqa: B027
        """Release what rollouts have opened. Called once, after the last rollout has ended."""

    @abstractmethod
    async def run(self, request: PromptRequest, ctx: Context) -> Trajectory:
        """Roll one prompt out. Every effect of the rollout on the world, and everything it reads from it, goes through `ctx`.

        Raises:
            RolloutFailed: the rollout cannot go on.
        """


WORKFLOWS: Registry[type[Workflow]] = Registry("workflow", flag="rollout_workflow")
SINGLE_TURN = "single_turn"
"""The workflow of a run that does not choose one."""


@dataclass(frozen=True)
class WorkflowSpec:
    """Description of a run's workflow, from which each process makes its own workflow object."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    """Plain values."""
    modules: tuple[str, ...] = ()
    """User modules to import first, because the workflow may be registered in them."""

    @classmethod
    def of(cls, name: str, options: Any, modules: Sequence[str] = ()) -> "WorkflowSpec":
        prepared = WORKFLOWS[name].value.prepared(options)
        return cls(name, asdict(prepared), tuple(modules))

    def make(self) -> Workflow:
        """Make the workflow object in this process."""
        for module in self.modules:
            import_user_module(module)
        entry = WORKFLOWS[self.name]
        return entry.value(entry.options(**self.options))


def identity_options(name: str) -> list[str]:
    """Options of a workflow that a resumed run must not change."""
    entry = WORKFLOWS[name]
    names = entry.value.identity_options
    return list(names) if names is not None else [option.name for option in fields(entry.options)]
