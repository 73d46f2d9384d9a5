"""The messages that carry prompts, samples and batches between controller, engines and learners. Read this first.

Reports about these processes stand with the module that makes them: weight updates in `engines/weight_update_client.py`,
verifiers in `verifiers/scoring_processes.py`, steps of the learners in `learners/step_sums.py`.

Messages are frozen dataclasses that hold numpy arrays and plain Python values: token ids and log-probs, never text that has
to be tokenized again, and never torch tensors. Arrays from Ray are read-only, so copy them when a batch is built.

Shapes: B rows, T tokens, Q prompt tokens, R response tokens, G samples of one prompt.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

TRAIN = "TRAIN"
"""Marker of a prompt or result that belongs to training."""
EVAL = "EVAL"
"""Marker of a prompt or result that belongs to an evaluation and never enters a training batch."""


@dataclass(frozen=True)
class SamplingConfig:
    """How to sample one group. Log-probs are always returned, under the distribution that was sampled from."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    max_tokens: int = 256
    """Most tokens in one response."""
    n: int = 1
    """Samples per prompt (G)."""
    stop: tuple[str, ...] = ()
    """Strings that end a response, in addition to the model's own end token."""
    ignore_eos: bool = False
    """Sample `max_tokens` tokens even if the model ends its response. For benchmarks, which need responses of one length."""
    seed: int | None = None
    """With a seed, the samples of the group do not depend on the engine that draws them, nor on the engine's other work."""
    needs_fresh_cache: bool = False
    """Use no keys and values that older weights have computed, even if the engine keeps its prefix cache. The workflow runner
    sets this for evaluations, because an evaluation measures one weight version."""


@dataclass(frozen=True)
class PromptRequest:
    """One prompt on its way to an engine through `param_prompt_Q`."""

    prompt: np.ndarray  # (Q,) int32
    generation_config: SamplingConfig
    index: int
    """Row of the dataset."""
    prompt_id: str
    """Unique within a run and its resumptions. The ledger's key."""
    issue_version: int
    """The version that engines had, or were about to receive, when the prompt was issued. An engine begins the prompt with this
    version or a newer version. For an evaluation: the version that it measures."""
    marker: str = TRAIN
    task: Any = None
    """What the workflow has to know in addition to the prompt and the sampling (`Workflow.task`)."""

    @property
    def is_eval(self) -> bool:
        return self.marker == EVAL


@dataclass(frozen=True)
class Moment:
    """A point in time: Unix time for people to read, and a monotonic clock, which is never set, to measure the seconds since."""

    unix: float = field(default_factory=time.time)
    _clock: float = field(default_factory=time.monotonic)

    def elapsed_s(self) -> float:
        """Seconds since this moment. Valid only in the process that made it."""
        return time.monotonic() - self._clock


@dataclass(frozen=True)
class TokenStatistics:
    """The cost of generating one group."""

    num_prompt_tokens: int
    """Tokens of the prompt, counted once."""
    num_response_tokens: int
    """Tokens of all G responses together, and of the turns that were sampled before them."""
    generation_time: float
    """Seconds from the moment when the engine admitted the prompt to the last token of the group."""
    start_time: float
    """Unix time at which the engine admitted the prompt."""
    tool_time: float = 0.0
    """Seconds in which the rollout waited only for tools and environments, and the engine computed nothing for it."""
    effects: Sequence[Sequence[Any]] = ()
    """When the rollout waited for the engine and for tools: for each effect its kind (`generate`, or the name of the tool), its
    name (`generate-1`), seconds from `start_time` to its begin, and seconds. Empty for a rollout of a single request."""
    num_preempted: int | None = None
    """How often the engine preempted samples of the group to make room for other samples. None: not known, because vLLM counts
    preemptions only if its statistics are on, and our engines leave them off."""


@dataclass(frozen=True)
class Completion:
    """One response as an engine sampled it."""

    token_ids: np.ndarray  # (R,) int32
    logprobs: np.ndarray  # (R,) float32, of the distribution that was sampled from
    finish_reason: str
    """`stop`, `length` or `abort`."""
    version_spans: list[tuple[int, int]]
    """Pairs `(weight version, number of tokens)` in order. Example: with `[(3, 10), (4, 2)]` version 3 sampled the first ten
    tokens and version 4 the last two. The numbers of tokens add up to R."""
    kv_age: int | None = None
    """The version that sampled the newest token minus the oldest version whose keys and values the response attended to
    (`kv_ages.py`). None: not known."""


@dataclass(frozen=True)
class TeacherLogprobs:
    """A teacher's log-probs at each of the R tokens of a response."""

    top_ids: np.ndarray  # (R, K) int32: the teacher's likeliest tokens
    top_logprobs: np.ndarray  # (R, K) float32; -inf where the teacher names fewer than K tokens
    logprobs: np.ndarray  # (R,) float32, of the response's own tokens


@dataclass(frozen=True)
class Sample:
    """One response to train on or to measure, with the prompt that the engine was given."""

    prompt_ids: np.ndarray  # (Q,) int32
    response_ids: np.ndarray  # (R,) int32
    logprobs: np.ndarray  # (R,) float32, as sampled; 0 where `loss_mask` is False
    finish_reason: str
    version_spans: list[tuple[int, int]]
    """As in `Completion`. The spans cover all R tokens; a token that the policy did not sample has its neighbours' version."""
    loss_mask: np.ndarray | None = None
    """(R,) bool: True on tokens that the policy sampled, False on inserted text such as a tool's answer. None: all are True."""
    group: int = 0
    """Number of the sample's group. Samples of one rollout with the same number are each other's baseline."""
    kind: str = ""
    """Kind of the response, if the workflow has several kinds, such as `reasoning` and `summarization`."""
    number: int = 0
    """Number of the turn among the turns of its kind, from 1: the third reasoning turn has 3. 0 if turns are not numbered."""
    weight: float = 1.0
    """Weight of the sample's tokens in the loss; 0 leaves the sample out."""
    is_judged: bool = True
    """Whether a verifier scores the sample. If not, its reward is `reward` or comes from `Workflow.rewards`."""
    reward: float | None = None
    """Reward in [0, 1], if the workflow knows it. None: not known yet, which never counts as 0."""
    teacher: TeacherLogprobs | None = None
    """The teacher's log-probs of the response; None without a teacher, and until the teacher has read the response."""
    answer_start: int = 0
    """Position in the response where a verifier begins to read: in a conversation, the beginning of the model's last turn."""
    environment_reward: float | None = None
    """Reward of a conversation's environments, in addition to the verifier's; None: there was no environment, or it gave none."""
    goes_on: bool = False
    """Whether the sample's conversation continues in the next sample, from a prompt that the chat template rendered again. Such a
    sample has the reward and the advantage of the sample in which its conversation ends."""
    kv_age: int | None = None
    """As in `Completion`; for a conversation, the age of the turn with the oldest keys and values."""
    parent: int = -1
    """Position, among the samples of the rollout, of the sample whose text is in this sample's prompt; -1: there is none."""

    @property
    def answer_ids(self) -> np.ndarray:
        """The token ids that a verifier reads: from `answer_start` to the last token that the policy sampled. Text that a tool
        has inserted after that is not part of the answer."""
        sampled = range(len(self.response_ids)) if self.loss_mask is None else np.flatnonzero(self.loss_mask)
        return self.response_ids[self.answer_start : sampled[-1] + 1 if len(sampled) else 0]


@dataclass(frozen=True)
class GenerationResult:
    """The result of one prompt, on its way back through `inference_results_Q`."""

    samples: list[Sample]
    """With the workflow `single_turn`, the G responses to the prompt."""
    index: int
    prompt_id: str
    issue_version: int
    engine_id: int
    token_statistics: TokenStatistics
    marker: str = TRAIN
    error: str = ""
    """Why the rollout was given up, in which case there are no samples; "" if it was not given up."""
    notes: Any = None
    """JSON values that the workflow sends to its object in the controller (`Workflow.arrived`)."""

    @classmethod
    def given_up(cls, request: PromptRequest, engine_id: int, error: str, began: Moment) -> "GenerationResult":
        """The result of a rollout that was given up: a group without responses."""
        return cls(
            samples=[],
            index=request.index,
            prompt_id=request.prompt_id,
            issue_version=request.issue_version,
            engine_id=engine_id,
            token_statistics=TokenStatistics(len(request.prompt), 0, began.elapsed_s(), began.unix),
            marker=request.marker,
            error=error,
        )

    @property
    def is_eval(self) -> bool:
        return self.marker == EVAL

    @property
    def responses(self) -> list[np.ndarray]:
        """The token ids of each sample, (R,) int32."""
        return [sample.response_ids for sample in self.samples]

    @property
    def logprobs(self) -> list[np.ndarray]:
        """The log-probs of each sample, (R,) float32."""
        return [sample.logprobs for sample in self.samples]

    @property
    def finish_reasons(self) -> list[str]:
        """The finish reason of each sample."""
        return [sample.finish_reason for sample in self.samples]

    @property
    def version_spans(self) -> list[list[tuple[int, int]]]:
        """The version spans of each sample."""
        return [sample.version_spans for sample in self.samples]

    @property
    def oldest_version(self) -> int:
        """The oldest version that sampled a token of the group. If there is no token: the prompt's `issue_version`."""
        return min(self._versions(), default=self.issue_version)

    @property
    def newest_version(self) -> int:
        """The newest version that sampled a token of the group. If there is no token: the prompt's `issue_version`."""
        return max(self._versions(), default=self.issue_version)

    def _versions(self) -> Iterator[int]:
        return (version for sample in self.samples for version, _ in sample.version_spans)


@dataclass(frozen=True)
class ShutdownSentinel:
    """Put on a queue to wake its reader for the last time."""


@dataclass(frozen=True)
class TrainingSample:
    """One scored response, or one sample of a conversation of several samples, ready to be collated."""

    query: np.ndarray  # (Q,) int32
    response: np.ndarray  # (R,) int32
    mask: np.ndarray  # (R,) bool: False where a token is not trained on
    logprobs: np.ndarray  # (R,) float32, the engine's
    advantage: float
    weight: float = 1.0
    """Weight of the response's tokens in the loss."""
    inserted: np.ndarray | None = None
    """(R,) bool: True on tokens that a workflow inserted and whose cross-entropy is trained on (`--ce_coef`); None: there are no
    such tokens."""
    teacher: TeacherLogprobs | None = None
    """The teacher's log-probs of the response; None without a teacher."""
    conversation_tokens: int | None = None
    """Trained tokens of all samples of a conversation of several samples; None: the sample is a conversation of its own."""
    goes_on: bool = False
    """Whether the next sample to train on belongs to the same conversation."""

    def __len__(self) -> int:
        return len(self.query) + len(self.response)

    @property
    def num_trained(self) -> int:
        """Trained tokens of this sample."""
        return int(self.mask.sum())


@dataclass(frozen=True)
class CollatedBatchData:
    """One micro-batch: B rows of T tokens, right-padded or packed. The learner treats both kinds alike.

    A token attends only to earlier tokens of its own sequence, because padding is on the right of a sequence, and in a packed row
    `position_ids` start again at 0 with each sequence. Where responses share a prompt (`shared_prompts.py`), `segments` and
    `branches` say which tokens attend to which. Entry `t` of every array belongs to token `t` of `query_responses`.
    """

    query_responses: np.ndarray  # (B, T) int32
    position_ids: np.ndarray  # (B, T) int32
    response_masks: np.ndarray  # (B, T) bool: True on response tokens that are trained on; False on queries and padding
    advantages: np.ndarray  # (B, T) float32, 0 where the mask is False
    vllm_logprobs: np.ndarray  # (B, T) float32, 0 where the mask is False
    loss_weights: np.ndarray | None = None  # (B, T) float32, 0 on prompts and padding; None: 1 on every response token
    conversation_tokens: np.ndarray | None = None
    """(B, T) float32: `TrainingSample.conversation_tokens` on responses, 0 on prompts and padding. None: every sample is a
    conversation of its own, so the trained tokens of a token's sequence are counted."""
    ce_masks: np.ndarray | None = (
        None  # (B, T) bool: True on tokens whose cross-entropy is trained on; None: on no token
    )
    teacher_top_ids: np.ndarray | None = None  # (B, T, K) int32, as in `TeacherLogprobs`; None without a teacher
    teacher_top_logprobs: np.ndarray | None = None  # (B, T, K) float32, -inf outside responses
    teacher_logprobs: np.ndarray | None = None  # (B, T) float32
    segments: np.ndarray | None = (
        None  # (B, T) int32, from 1: tokens with the same number share a prompt; None: no prompt is shared
    )
    branches: np.ndarray | None = None  # (B, T) int32: 0 on shared prompts, the number of the response from 1 elsewhere
    predictors: np.ndarray | None = None  # (B, T) int32: column of the token before each token in its sequence

    @property
    def num_tokens(self) -> int:
        """Trained tokens in this micro-batch."""
        return int(self.response_masks.sum())


@dataclass(frozen=True)
class MiniBatch:
    """One rank's share of one optimizer step."""

    micro_batches: list[CollatedBatchData]
    """The same number on every rank. A rank with less data gets additional micro-batches without trained tokens."""
    num_global_tokens: int
    """Trained tokens of this optimizer step over all ranks."""
    num_global_sequences: int = 0
    """Conversations with a trained token in this optimizer step over all ranks. A response that is a single sample is one."""
    num_global_ce_tokens: int = 0
    """Tokens whose cross-entropy is trained on in this optimizer step over all ranks."""
    samples_of_micro_batches: tuple[tuple[int, ...], ...] = ()
    """For each micro-batch the numbers of its samples among the samples of the partial batch, row by row. For the record."""


@dataclass(frozen=True)
class RolloutBatch:
    """The data of one training step, or a partial batch of it, on its way to the learners. The step loop handles only
    references, never the samples."""

    training_step: int
    rank_data: list[object]
    """One Ray object reference per learner rank, each to a `list[MiniBatch]`."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """Metrics of the whole step. Only the last partial batch has them."""
    number: int = 0
    """Number of this partial batch within the step, from 0."""
    is_last: bool = True
    """Whether the step is complete with this partial batch, so that the learners make their optimizer step."""
    num_global_tokens: int = 0
    """Trained tokens of the whole step over all ranks. Only the last partial batch has it. The controller sends no step without a
    token. If the number is 0 nevertheless, the learners make no optimizer step, because momentum would move the weights."""
    num_global_sequences: int = 0
    """Conversations with a trained token in the whole step over all ranks. Only the last partial batch has it."""
    num_samples: int = 0
    """Samples in this partial batch."""
    min_version: int = 0
    """Oldest version among the trained tokens of this partial batch."""


@dataclass(frozen=True)
class Box:
    """Carries a Ray object reference unchanged. If a call had the bare reference as an argument, Ray would replace it by its
    value."""

    inner: object
    """Reference to a `RolloutBatch`."""
