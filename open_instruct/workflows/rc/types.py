"""Messages of reasoning-cache (RC) rollouts: a problem, a turn's request to an engine, the answer, and what is kept of it.

They are sent between processes and, as lines of JSON, through the stream of results. `turns.py` makes them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np

REASONING = "reasoning"
"""A turn that thinks about the problem."""
SUMMARIZATION = "summarization"
"""A turn that rewrites the summary."""
SummaryReward = Literal["none", "zero", "downstream_mean"]
"""How a summary is rewarded in training (`--rc_summary_reward`)."""
CONTROL = "control"
"""Metadata key of the turns of a control. The cycles are compared with the control."""
ONE_LONG_TURN = "one_long_turn"
"""A control: a single reasoning turn that may sample as many tokens as a whole trajectory."""


@dataclass(frozen=True)
class Problem:
    """One problem. Only `text` is ever shown to the model."""

    problem_id: str
    """Unique over all data sets of a run."""
    text: str
    ground_truth: object
    """The value with which the verifier compares an answer: any JSON value."""
    verifier: str
    """As in the `dataset` column of training data: `gsm8k`, `reasoning_gym/chain_sum`, …"""
    dataset: str
    """The data set of the problem, for accuracies by data set."""
    row: str = ""
    """Where the problem stands in the user's data, such as `train.jsonl line 7`; empty if the loader does not say."""


@dataclass(frozen=True)
class TurnRequest:
    """What a workflow asks of an engine: continue these token ids."""

    prompt_ids: list[int]
    max_tokens: int
    temperature: float
    top_p: float
    seed: int
    turn_type: str
    """`reasoning` or `summarization`; summaries may be sent to engines of their own."""
    name: str = ""
    """Name of the turn, unique within its rollout."""


@dataclass(frozen=True)
class Generation:
    """The answer of an engine to a `TurnRequest`."""

    text: str
    """Without special tokens."""
    token_ids: list[int]
    logprobs: list[float]
    """Log-probs of the sampled tokens; empty where the engine gives none."""
    finish_reason: str
    """`stop` or `length`."""
    version_spans: list[tuple[int, int]] = field(default_factory=list)
    """`(weight version, number of tokens)` in order; the counts add up to the length of `token_ids`."""
    kv_age: int | None = None
    """As in `data_types.Completion`."""
    num_retries: int = 0
    """Failed attempts before this answer."""
    exact_tokens: bool = True
    """Whether `token_ids` are exactly the sampled ids. If not, they were made by tokenizing the text."""

    @property
    def finished(self) -> bool:
        """Whether the model itself ended its response."""
        return self.finish_reason != "length"

    @property
    def first_version(self) -> int:
        return self.version_spans[0][0] if self.version_spans else 0

    @property
    def last_version(self) -> int:
        return self.version_spans[-1][0] if self.version_spans else 0


@dataclass
class TrainingText:
    """One turn as a training sample. `InferenceProblemState` fills in `metadata` when the turn is added to it."""

    text: str
    """The raw output, think tags included."""
    prompt_ids: np.ndarray  # (Q,) int32, as the engine had them
    response_ids: np.ndarray  # (R,) int32
    logprobs: np.ndarray  # (R,) float32, as sampled; (0,) where the engine gives none
    reward: float | None
    """None: not scored, which is the default of summaries."""
    finished: bool
    """False if the turn was cut at its token limit."""
    group_id: str = ""
    """Identifies all samples of one problem in one attempt."""
    trajectory_id: str = ""
    problem_id: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def is_control(self) -> bool:
        return CONTROL in self.metadata

    def to_json(self) -> dict[str, Any]:
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in values.items()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "TrainingText":
        """The turn back from `to_json`; other keys are ignored."""
        arguments = {item.name: values[item.name] for item in fields(cls)}
        arguments["prompt_ids"] = np.asarray(arguments["prompt_ids"], np.int32)
        arguments["response_ids"] = np.asarray(arguments["response_ids"], np.int32)
        arguments["logprobs"] = np.asarray(arguments["logprobs"], np.float32)
        return cls(**arguments)


@dataclass(frozen=True)
class ReachedState:
    """The state of a rollout between two cycles: everything that the next reasoning turn sees in addition to the problem."""

    number: int = 0
    """Number of summaries that led to the state; 0 is the beginning of the rollout."""
    summary: str = ""
    """The summary as text, because it is put into a template."""
    version: int = 0
    """Oldest version that sampled a token of the summary."""


@dataclass(frozen=True)
class RCPlan:
    """What a training or evaluation prompt asks of an engine in addition to its sampling (`data_types.PromptRequest.task`).

    With `states` the samples are fresh reasoning turns, n (`SamplingConfig`) at each state. Without `states` the samples are the
    turns of n trajectories of `num_cycles` cycles, without the last summary, because no turn follows it.
    """

    problem: str
    start: ReachedState = ReachedState()
    """Where the rollout begins; no later than the first of `states` after 0."""
    states: tuple[int, ...] = ()
    """Numbers of the states to sample at."""
    num_cycles: int = 1
    num_summaries: int = 0
    """How many summaries are sampled on the way to each of `states`, as samples too. Without `states`, any number above 0 makes
    the trajectories' summaries samples."""


@dataclass(frozen=True)
class RolloutResult:
    """The result of one trajectory: all its turns, or why the trajectory was dropped."""

    trajectory_id: str
    rollouts: list[TrainingText]
    dropped: str = ""
    """The reason, as one word; empty if the trajectory is complete."""
    cause: str = ""
    """The error behind the reason."""
    num_retries: int = 0
    num_requeues: int = 0


@dataclass(frozen=True)
class RetryOptions:
    """When a turn is tried again, and when it is given up."""

    max_retries: int = 3
    """Most tries of one turn."""
    retry_base_delay: float = 1.0
    """Seconds before the second try; the delay doubles with each further try."""
    request_timeout_s: float = 1800.0
    """Time limit of one try."""
    max_server_downtime_s: float = 600.0
    """Seconds for which no server may be reachable before the run ends."""


class EngineError(RuntimeError):
    """An engine gave no answer to a turn; `num_retries` attempts failed before."""

    def __init__(self, message: str, num_retries: int = 0) -> None:
        super().__init__(message)
        self.num_retries = num_retries


class RetriesExhausted(EngineError):
    """The turn failed too often, each time for a reason that may be temporary: connection, timeout, overload."""


class TurnRejected(EngineError):
    """The engine refuses this request, and a retry would not help."""


class NotScored(Exception):
    """No verifier could score an answer. The answer's trajectory is left out; other trajectories are not affected."""


class EnginesDown(EngineError):
    """No engine was reachable for longer than the run waits. Ends the run."""


class PromptTooLong(ValueError):
    """A prompt leaves no room for an answer, even after everything that can be shortened has been shortened."""


def json_bytes(value: object) -> bytes:
    """`value` as a line of strict JSON."""
    return json.dumps(value, allow_nan=False).encode() + b"\n"
