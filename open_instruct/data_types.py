"""Every message that travels between processes. Read this first.

Messages are frozen dataclasses that hold numpy arrays and plain Python values: token ids and log-probs, never text that has
to be tokenized again and never torch tensors. Arrays come out of Ray read-only; copy when a batch is built.

Shapes: B rows, T tokens, Q prompt tokens, R response tokens, G samples of one prompt.
"""

import time
from dataclasses import dataclass, field

import numpy as np

from open_instruct.rc_types import RCPlan, ReachedState, Turn

TRAIN = "TRAIN"
"""Marker of a prompt or result that belongs to training."""
EVAL = "EVAL"
"""Marker of a prompt or result that belongs to an evaluation: it never enters a training batch."""


@dataclass(frozen=True)
class SamplingConfig:
    """How one group is sampled. Log-probs are always returned, of the distribution that was sampled from."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    max_tokens: int = 256
    """Most tokens in one response."""
    n: int = 1
    """Samples per prompt (G)."""
    stop: tuple[str, ...] = ()
    """Strings that end a response, beside the model's own end token."""
    ignore_eos: bool = False
    """Sample `max_tokens` tokens even if the model ends its response. For benchmarks, which need responses of one length."""
    seed: int | None = None
    """With a seed, the samples of the group depend neither on the engine that draws them nor on what else the engine is doing."""


@dataclass(frozen=True)
class PromptRequest:
    """One prompt on its way to an engine through `param_prompt_Q`."""

    prompt: np.ndarray  # (Q,) int32
    generation_config: SamplingConfig
    index: int
    """Row of the dataset."""
    prompt_id: str
    """Unique within a run and its resumptions. The ledger's key."""
    training_step: int
    """For training: one more than the version that the engines served when the prompt was issued. A prompt that is issued while
    they serve version 4 has 5. For an evaluation: the version that it measures."""
    marker: str = TRAIN
    plan: RCPlan | None = None
    """With the reasoning cache: the turns that this prompt becomes. `prompt` is the prompt of the first turn."""

    @property
    def is_eval(self) -> bool:
        return self.marker == EVAL


@dataclass(frozen=True)
class Moment:
    """A point in time: as Unix time for people, and on a clock that nobody sets for measuring the seconds since then."""

    unix: float = field(default_factory=time.time)
    _clock: float = field(default_factory=time.monotonic)

    def elapsed_s(self) -> float:
        """Seconds since then, in the process that made it."""
        return time.monotonic() - self._clock


@dataclass(frozen=True)
class TokenStatistics:
    """What generating one group cost."""

    num_prompt_tokens: int
    """Tokens of the prompt, counted once."""
    num_response_tokens: int
    """Tokens of all G responses together, and of the turns on the way to them."""
    generation_time: float
    """Seconds from the moment when the engine admitted the prompt to the last token of the group."""
    start_time: float
    """Unix time at which the engine admitted the prompt."""
    num_preempted: int | None = None
    """How often the engine put samples of the group back to make room for others. None: not known, because vLLM counts this only
    with its statistics on, and our engines leave them off."""


@dataclass(frozen=True)
class GenerationResult:
    """The G responses to one prompt, on their way back through `inference_results_Q`."""

    responses: list[np.ndarray]  # G x (R,) int32
    logprobs: list[np.ndarray]  # G x (R,) float32, as sampled
    finish_reasons: list[str]  # G x "stop" | "length" | "abort"
    version_spans: list[list[tuple[int, int]]]
    """Per response, pairs `(weight version, number of tokens)` in order. `[(3, 10), (4, 2)]`: version 3 sampled the first ten
    tokens, version 4 the last two. The numbers add up to R."""
    index: int
    prompt_id: str
    training_step: int
    engine_id: int
    token_statistics: TokenStatistics
    marker: str = TRAIN
    error: str = ""
    """Why the engine gave the group up. Then there are no responses. "": it did not."""
    turns: tuple[Turn, ...] = ()
    """With the reasoning cache: G turns, one for each response."""
    states: tuple[ReachedState, ...] = ()
    """With the reasoning cache: the states that were reached on the way."""

    @classmethod
    def given_up(cls, request: PromptRequest, engine_id: int, error: str, began: Moment) -> "GenerationResult":
        """A group without responses."""
        return cls(
            responses=[],
            logprobs=[],
            finish_reasons=[],
            version_spans=[],
            index=request.index,
            prompt_id=request.prompt_id,
            training_step=request.training_step,
            engine_id=engine_id,
            token_statistics=TokenStatistics(len(request.prompt), 0, began.elapsed_s(), began.unix),
            marker=request.marker,
            error=error,
        )

    @property
    def is_eval(self) -> bool:
        return self.marker == EVAL

    @property
    def oldest_version(self) -> int:
        """The oldest version that sampled a token of the group. Without a token: the version that was served at its issue."""
        return min((version for spans in self.version_spans for version, _ in spans), default=self.training_step - 1)

    @property
    def newest_version(self) -> int:
        """The newest version that sampled a token of the group. Without a token: the version that was served at its issue."""
        return max((version for spans in self.version_spans for version, _ in spans), default=self.training_step - 1)


@dataclass(frozen=True)
class ShutdownSentinel:
    """Put on a queue to wake its reader for the last time."""


@dataclass(frozen=True)
class TrainingSample:
    """One scored response, ready to be collated."""

    query: np.ndarray  # (Q,) int32
    response: np.ndarray  # (R,) int32
    mask: np.ndarray  # (R,) bool: False where a token is not trained on
    logprobs: np.ndarray  # (R,) float32, the engine's
    advantage: float
    weight: float = 1.0
    """Weight of its tokens in the loss."""

    def __len__(self) -> int:
        return len(self.query) + len(self.response)


@dataclass(frozen=True)
class CollatedBatchData:
    """One micro-batch: B rows of T tokens, right-padded or packed. The learner treats both kinds alike.

    A token attends to the earlier tokens of its own sequence and to no others: padding stands to the right of a sequence, and in
    a packed row `position_ids` start again at 0 with each sequence. Entry `t` of every array belongs to token `t` of
    `query_responses`.
    """

    query_responses: np.ndarray  # (B, T) int32
    position_ids: np.ndarray  # (B, T) int32
    response_masks: np.ndarray  # (B, T) bool: True on response tokens that are trained on; False on queries and padding
    advantages: np.ndarray  # (B, T) float32, 0 where the mask is False
    vllm_logprobs: np.ndarray  # (B, T) float32, 0 where the mask is False
    loss_weights: np.ndarray | None = None  # (B, T) float32, 0 where the mask is False; None: 1 on every trained token

    @property
    def num_tokens(self) -> int:
        """Trained tokens in this micro-batch."""
        return int(self.response_masks.sum())


@dataclass(frozen=True)
class MiniBatch:
    """One rank's share of one optimizer step."""

    micro_batches: list[CollatedBatchData]
    """As many as on every other rank. Micro-batches without a trained token make up for missing ones."""
    num_global_tokens: int
    """Trained tokens of this optimizer step over all ranks: the denominator of the loss."""


@dataclass(frozen=True)
class RolloutBatch:
    """The data of one training step, or a piece of it, on its way to the learners. The step loop sees references, no samples."""

    training_step: int
    rank_data: list[object]
    """One Ray object reference per learner rank, each to a `list[MiniBatch]`."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the whole step. Only the last piece has them."""
    number: int = 0
    """Number of this piece within the step, from 0."""
    is_last: bool = True
    """Whether the step is complete with this piece, so that the learners make their optimizer step."""
    num_global_tokens: int = 0
    """Trained tokens of the whole step over all ranks. Only the last piece has the number. The controller sends no step without a
    token; if the number is 0 the learners make no optimizer step, because momentum alone would move the weights."""
    num_samples: int = 0
    """Responses in this piece."""
    min_version: int = 0
    """Oldest version among the trained tokens of this piece."""


@dataclass(frozen=True)
class Box:
    """Carries a Ray object reference unchanged. Ray replaces a bare reference by its value when it is an argument of a call."""

    inner: object
    """Reference to a `RolloutBatch`."""
