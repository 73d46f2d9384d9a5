"""Every option of a run: its name, its default, its help and its check.

The options stand in groups, one class per subject, and `GRPOConfig` is all of them in one flat object. The string
under a field is its help, on the command line too. The checks are at the end of the file: one short function per rule.

A mistake reads `--flag value: what is wrong. What to do.` Before the colon stands every option that the judgement rests
on; `cli.py` relies on this.
"""

import functools
import math
import os
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from open_instruct.data_types import SamplingConfig
from open_instruct.device import Device, current_device, flash_attention_can_run

NEVER = -1
"""Value of an interval in steps that switches the thing off."""
HUB_TIMEOUT_S = 5.0
"""Seconds that the Hugging Face hub has to say whether it knows a name."""


@dataclass(kw_only=True)
class RunOptions:
    """Run"""

    exp_name: str = "grpo"
    """Name of the experiment."""
    run_name: str | None = None
    """Name of this run, in logs and in wandb. By default exp_name and seed."""
    seed: int = 42
    """Seed of everything random. The order in which prompts are issued depends on it alone."""
    output_dir: str = "output/"
    """Directory of all that the run writes: metrics, checkpoints, the trained model, plots, logs."""
    verbose: bool = False
    """Log more."""

    @property
    def run_title(self) -> str:
        """The same for a run that is resumed, so without the time of day."""
        return self.run_name or f"{self.exp_name}__{self.seed}"


@dataclass(kw_only=True)
class ModelOptions:
    """Model"""

    model_name_or_path: str
    """Model to train: a local directory or a name on the Hugging Face hub."""
    model_revision: str | None = None
    """Branch, tag or commit of a model on the hub."""
    model_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of weights and activations. auto is bfloat16 on GPU and float32 on CPU."""
    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    """Attention of the learners. auto is flash_attention_2 where there are a GPU and the package for it, else sdpa."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass: less memory, about a third more time."""


@dataclass(kw_only=True)
class TokenizerOptions:
    """Tokenizer"""

    tokenizer_name_or_path: str | None = None
    """Tokenizer, if not the model's own: a local directory or a name on the hub. It must have a chat template."""


@dataclass(kw_only=True)
class DataOptions:
    """Data"""

    dataset_mixer_list: list[str] = field(default_factory=lambda: ["ai2-adapt-dev/rlvr_gsm8k_zs", "1.0"])
    """Datasets to train on, each followed by how much of it: a fraction (1.0) or a number of rows (200)."""
    dataset_mixer_list_splits: list[str] = field(default_factory=lambda: ["train"])
    """Split of each training dataset, or one for all."""
    dataset_mixer_eval_list: list[str] = field(default_factory=list)
    """Datasets to evaluate on, written in the same way. Without any there is no evaluation."""
    dataset_mixer_eval_list_splits: list[str] = field(default_factory=lambda: ["test"])
    """Split of each evaluation dataset, or one for all."""
    sft_messages_key: str = "messages"
    """Column that holds the chat messages of the prompt."""
    ground_truths_key: str = "ground_truth"
    """Column that holds what the verifier compares with."""
    system_prompt_override_file: str | None = None
    """Text file whose content takes the place of every system prompt."""
    max_prompt_token_length: int = 256
    """Longest prompt, in tokens."""
    overlong_prompts: Literal["drop", "error"] = "drop"
    """What happens to longer prompts: left out and counted, or reported as a mistake before the run starts."""


@dataclass(kw_only=True)
class RolloutOptions:
    """Rollout"""

    response_length: int = 256
    """Longest response, in tokens."""
    pack_length: int = 512
    """Most tokens of one row of a training batch; at least one prompt with its response fits in."""
    temperature: float = 1.0
    """Sampling temperature in training."""
    stop_strings: list[str] = field(default_factory=list)
    """Strings that end a response, beside the model's own end token."""
    num_unique_prompts_rollout: int = 16
    """Prompts per training step."""
    num_samples_per_prompt_rollout: int = 4
    """Responses per prompt; they are one group, whose mean score is the baseline."""
    total_episodes: int = 100000
    """Responses of the whole run. Divided by prompts times responses per step, this is the number of steps."""
    async_steps: int = 1
    """Steps that generation may run ahead of training. 0 is strictly on-policy."""
    filter_zero_std_samples: bool = True
    """Leave out groups whose responses all have the same score: they teach nothing."""
    mask_truncated_completions: bool = False
    """Do not train on responses that were cut off at response_length."""

    @property
    def num_samples_per_step(self) -> int:
        """Responses per training step, before any filter."""
        return self.num_unique_prompts_rollout * self.num_samples_per_prompt_rollout

    @property
    def num_training_steps(self) -> int:
        return self.total_episodes // self.num_samples_per_step

    @property
    def train_sampling(self) -> SamplingConfig:
        """How a training group is sampled, seed aside."""
        return SamplingConfig(
            temperature=self.temperature,
            max_tokens=self.response_length,
            n=self.num_samples_per_prompt_rollout,
            stop=tuple(self.stop_strings),
        )


@dataclass(kw_only=True)
class AlgorithmOptions:
    """Algorithm"""

    loss_fn: Literal["dapo"] = "dapo"
    """Policy loss. dapo: the clipped ratio, with a lower and a higher bound of its own."""
    num_epochs: int = 1
    """Passes over the data of one step."""
    num_mini_batches: int = 1
    """Optimizer steps that the data of one training step is divided into."""
    beta: float = 0.05
    """Weight of the KL divergence from the reference policy."""
    load_ref_policy: bool = True
    """Keep the model as it was at the start, as reference policy. False needs beta 0."""
    kl_estimator: Literal[0, 1, 2, 3] = 2
    """Estimator of the KL: 0 linear (k1), 1 quadratic (k2), 2 exponential (k3), 3 weighted by the ratio."""
    clip_lower: float = 0.2
    """The ratio is clipped at 1 - clip_lower."""
    clip_higher: float = 0.272
    """The ratio is clipped at 1 + clip_higher."""
    loss_denominator: float | str = "token"
    """What the summed loss is divided by: token (the trained tokens of the optimizer step) or a positive number."""
    advantage_normalization_type: Literal["centered", "standard"] = "centered"
    """Advantage of a response: score - mean of its group (centered), or that over the standard deviation (standard)."""


@dataclass(kw_only=True)
class RewardOptions:
    """Rewards"""

    verification_reward: float = 10.0
    """Reward of a right answer."""
    verifier_timeout_s: float = 10.0
    """Seconds after which the verification of one response is killed and counts as failed."""
    verifier_workers: int = 1
    """Processes that verify."""


@dataclass(kw_only=True)
class OptimizerOptions:
    """Optimizer"""

    learning_rate: float = 2e-5
    """Peak learning rate of AdamW."""
    lr_scheduler_type: Literal["linear", "constant", "cosine"] = "linear"
    """Learning rate after warm-up: down to 0 in a line, constant, or down to 0 in half a cosine."""
    warmup_ratio: float = 0.0
    """Share of the steps in which the learning rate rises from 0."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    max_grad_norm: float = 1.0
    """The gradient is scaled down to this norm. 0 leaves it as it is."""
    per_device_train_batch_size: int = 1
    """Rows of pack_length tokens in one forward and backward pass of a learner."""


@dataclass(kw_only=True)
class LearnerOptions:
    """Learners"""

    num_learners_per_node: list[int] = field(default_factory=lambda: [1])
    """Learners on each node: 4 4 is two nodes with four each."""
    single_gpu_mode: bool = False
    """Learner and engine share one GPU."""
    deepspeed_stage: Literal[0, 2, 3] = 0
    """ZeRO stage. 0: every learner holds all; 2: optimizer and gradients are divided; 3: weights too."""
    backend_timeout: int = 120
    """Minutes after which a collective operation among learners fails."""

    @property
    def num_learners(self) -> int:
        """Learners on all nodes together: the world size of the training processes."""
        return sum(self.num_learners_per_node)


@dataclass(kw_only=True)
class VLLMOptions:
    """vLLM"""

    vllm_num_engines: int = 1
    """Engines that generate."""
    vllm_tensor_parallel_size: int = 1
    """GPUs (on CPU: processes) per engine."""
    vllm_gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory that an engine takes."""
    vllm_enforce_eager: bool = False
    """Do not compile and capture graphs: starts sooner, generates slower."""
    vllm_enable_prefix_caching: bool = False
    """Reuse the key-value cache of equal beginnings."""
    vllm_max_num_seqs: int = 256
    """Most responses that an engine generates at once."""


@dataclass(kw_only=True)
class EvaluationOptions:
    """Evaluation"""

    local_eval_every: int = 100
    """Steps from one evaluation to the next. -1: never."""
    eval_on_step_0: bool = False
    """Evaluate before the first step too."""
    eval_temperature: float | None = None
    """Sampling temperature in evaluation; 0 is greedy. By default that of training."""
    eval_top_p: float | None = None
    """Nucleus sampling in evaluation. By default 1.0, which is off."""
    eval_response_length: int | None = None
    """Longest response in evaluation, in tokens. By default response_length."""


@dataclass(kw_only=True)
class SavingOptions:
    """Saving"""

    save_freq: int = 200
    """Steps from one saved model (a Hugging Face directory) to the next. -1: only at the end."""
    checkpoint_state_freq: int = 200
    """Steps from one checkpoint to the next; a run that is killed goes on from the last. -1: never."""
    checkpoint_state_dir: str | None = None
    """Directory of the checkpoints. By default checkpoint_states in output_dir."""
    keep_last_n_checkpoints: int = 3
    """Checkpoints that are kept, the newest ones. -1: all."""


@dataclass(kw_only=True)
class DeadlineOptions:
    """Deadlines"""

    init_timeout_s: float = 1200.0
    """Seconds that engines and learners have to get ready."""
    progress_timeout_s: float = 1800.0
    """Seconds without a batch ready to train on after which the run ends and says who is waited for."""
    weight_sync_timeout_s: float = 600.0
    """Seconds that new weights have to reach every engine."""
    eval_timeout_s: float = 1800.0
    """Seconds that an evaluation has to come back."""


@dataclass(kw_only=True)
class TrackingOptions:
    """Tracking"""

    with_tracking: bool = False
    """Send the metrics to wandb as well; offline where there is no network or no key."""
    wandb_project: str = "open_instruct"
    """Project in wandb."""
    wandb_entity: str | None = None
    """User or team in wandb."""
    wandb_group_name: str | None = None
    """Group of runs in wandb."""


@dataclass(kw_only=True)
class GRPOConfig(
    RunOptions,
    ModelOptions,
    TokenizerOptions,
    DataOptions,
    RolloutOptions,
    AlgorithmOptions,
    RewardOptions,
    OptimizerOptions,
    LearnerOptions,
    VLLMOptions,
    EvaluationOptions,
    SavingOptions,
    DeadlineOptions,
    TrackingOptions,
):
    """All options of a GRPO run."""

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer_name_or_path or self.model_name_or_path

    @property
    def eval_sampling(self) -> SamplingConfig:
        """How an evaluation prompt is sampled, seed aside."""
        return SamplingConfig(
            temperature=self.temperature if self.eval_temperature is None else self.eval_temperature,
            top_p=1.0 if self.eval_top_p is None else self.eval_top_p,
            max_tokens=self.response_length if self.eval_response_length is None else self.eval_response_length,
            stop=tuple(self.stop_strings),
        )

    @property
    def max_sequence_length(self) -> int:
        """Tokens of the longest prompt with the longest response, evaluation included."""
        return self.max_prompt_token_length + max(self.response_length, self.eval_sampling.max_tokens)

    @property
    def state_dir(self) -> Path:
        return Path(self.checkpoint_state_dir or Path(self.output_dir) / "checkpoint_states")

    @property
    def device(self) -> Device:
        """The device of this machine, with the options that it depends on."""
        return current_device(
            dtype=self.model_dtype,
            attn_implementation=self.attn_implementation,
            single_gpu_mode=self.single_gpu_mode,
        )


# ---- Checks ----


def collect_mistakes(args: GRPOConfig) -> list[str]:
    """What is wrong with the options, apart from tokenizer (`load_tokenizer`) and data. Empty if nothing is."""
    return [mistake for rule in RULES for mistake in rule(args)]


def shown(args: GRPOConfig, *names: str) -> str:
    """Options as they would stand on the command line."""
    return " ".join(f"--{name} {_as_text(getattr(args, name))}" for name in names)


def _as_text(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value)) or "(empty)"
    return str(value) if str(value) else "(empty)"


@dataclass(frozen=True)
class Limits:
    """Numbers that an option may have. NaN and infinity are outside."""

    low: float
    high: float = math.inf
    low_itself: bool = True
    or_never: bool = False

    def hold(self, value: float) -> bool:
        above = value >= self.low if self.low_itself else value > self.low
        return (math.isfinite(value) and above and value <= self.high) or (self.or_never and value == NEVER)

    def __str__(self) -> str:
        low = f"{self.low} or more" if self.low_itself else f"more than {self.low}"
        high = "" if math.isinf(self.high) else f", at most {self.high}"
        return low + high + (f", or {NEVER} for never" if self.or_never else "")


MAX_TEMPERATURE = 2.0
"""vLLM samples at no higher one."""
_COUNT = Limits(1)
_NOT_NEGATIVE = Limits(0)
_POSITIVE = Limits(0, low_itself=False)
_SHARE = Limits(0, 1)
_POSITIVE_SHARE = Limits(0, 1, low_itself=False)
_INTERVAL = Limits(1, or_never=True)

LIMITS: dict[str, Limits] = {
    "seed": Limits(0, 2**32 - 1),
    "max_prompt_token_length": _COUNT,
    "response_length": _COUNT,
    "pack_length": _COUNT,
    "temperature": Limits(0, MAX_TEMPERATURE, low_itself=False),
    "num_unique_prompts_rollout": _COUNT,
    "num_samples_per_prompt_rollout": _COUNT,
    "total_episodes": _COUNT,
    "async_steps": _NOT_NEGATIVE,
    "num_epochs": _COUNT,
    "num_mini_batches": _COUNT,
    "beta": _NOT_NEGATIVE,
    "clip_lower": _SHARE,
    "clip_higher": _NOT_NEGATIVE,
    "verification_reward": _POSITIVE,
    "verifier_timeout_s": _POSITIVE,
    "verifier_workers": _COUNT,
    "learning_rate": _NOT_NEGATIVE,
    "warmup_ratio": _SHARE,
    "weight_decay": _NOT_NEGATIVE,
    "max_grad_norm": _NOT_NEGATIVE,
    "per_device_train_batch_size": _COUNT,
    "backend_timeout": _COUNT,
    "vllm_num_engines": _COUNT,
    "vllm_tensor_parallel_size": _COUNT,
    "vllm_gpu_memory_utilization": _POSITIVE_SHARE,
    "vllm_max_num_seqs": _COUNT,
    "local_eval_every": _INTERVAL,
    "eval_temperature": Limits(0, MAX_TEMPERATURE),
    "eval_top_p": _POSITIVE_SHARE,
    "eval_response_length": _COUNT,
    "save_freq": _INTERVAL,
    "checkpoint_state_freq": _INTERVAL,
    "keep_last_n_checkpoints": _INTERVAL,
    "init_timeout_s": _POSITIVE,
    "progress_timeout_s": _POSITIVE,
    "weight_sync_timeout_s": _POSITIVE,
    "eval_timeout_s": _POSITIVE,
}


def numbers_are_within_limits(args: GRPOConfig) -> Iterator[str]:
    for name, limits in LIMITS.items():
        value = getattr(args, name)
        if value is not None and not limits.hold(value):
            yield f"{shown(args, name)}: out of range. Give {limits}."


def every_node_has_learners(args: GRPOConfig) -> Iterator[str]:
    if not args.num_learners_per_node or min(args.num_learners_per_node) < 1:
        yield f"{shown(args, 'num_learners_per_node')}: every node needs a learner. Give 1 or more for each."


def choices_are_known(args: GRPOConfig) -> Iterator[str]:
    for name, hint in get_type_hints(type(args)).items():
        if get_origin(hint) is Literal and getattr(args, name) not in get_args(hint):
            yield f"{shown(args, name)}: unknown. Choose one of {', '.join(map(str, get_args(hint)))}."


def loss_denominator_is_token_or_positive(args: GRPOConfig) -> Iterator[str]:
    value = args.loss_denominator
    if value != "token" and (isinstance(value, str) or not _POSITIVE.hold(value)):
        yield f"{shown(args, 'loss_denominator')}: no denominator. Give token or a number above 0."


def stop_strings_are_not_empty(args: GRPOConfig) -> Iterator[str]:
    if "" in args.stop_strings:
        yield "--stop_strings '': an empty string would end every response at once. Leave it out."


def pack_holds_a_sample(args: GRPOConfig) -> Iterator[str]:
    needed = args.max_prompt_token_length + args.response_length
    if args.pack_length < needed:
        options = shown(args, "pack_length", "max_prompt_token_length", "response_length")
        yield f"{options}: a prompt with its response does not fit into a row. Set pack_length to {needed} or more."


def kl_has_its_reference(args: GRPOConfig) -> Iterator[str]:
    if args.beta > 0 and not args.load_ref_policy:
        options = shown(args, "beta", "load_ref_policy")
        yield f"{options}: the KL divergence needs a reference policy. Set beta to 0, or leave load_ref_policy True."


def groups_have_something_to_compare(args: GRPOConfig) -> Iterator[str]:
    if args.num_samples_per_prompt_rollout == 1:
        options = shown(args, "num_samples_per_prompt_rollout")
        yield f"{options}: a response is compared with the others of its group, and there are none. Give 2 or more."


def episodes_fill_a_step(args: GRPOConfig) -> Iterator[str]:
    if 0 < args.total_episodes < args.num_samples_per_step:
        options = shown(args, "total_episodes", "num_unique_prompts_rollout", "num_samples_per_prompt_rollout")
        yield f"{options}: not enough for one step. Set total_episodes to {args.num_samples_per_step} or more."


def mini_batches_are_not_empty(args: GRPOConfig) -> Iterator[str]:
    if args.num_mini_batches > args.num_samples_per_step > 0:
        options = shown(args, "num_mini_batches", "num_unique_prompts_rollout", "num_samples_per_prompt_rollout")
        yield f"{options}: more mini-batches than responses in a step. Give {args.num_samples_per_step} or fewer."


def evaluation_has_data_and_a_time(args: GRPOConfig) -> Iterator[str]:
    if args.dataset_mixer_eval_list and args.local_eval_every == NEVER and not args.eval_on_step_0:
        options = shown(args, "dataset_mixer_eval_list", "local_eval_every", "eval_on_step_0")
        yield f"{options}: the evaluation would never run. Set local_eval_every, or leave out the datasets."
    if args.eval_on_step_0 and not args.dataset_mixer_eval_list:
        options = shown(args, "eval_on_step_0", "dataset_mixer_eval_list")
        yield f"{options}: there is nothing to evaluate on. Name datasets, or leave out eval_on_step_0."


def system_prompt_file_can_be_read(args: GRPOConfig) -> Iterator[str]:
    path = args.system_prompt_override_file
    if path is not None and not (Path(path).is_file() and os.access(path, os.R_OK)):
        yield f"{shown(args, 'system_prompt_override_file')}: no file that can be read. Check the path."


def outputs_can_be_written(args: GRPOConfig) -> Iterator[str]:
    for name in ("output_dir", "checkpoint_state_dir"):
        if (path := getattr(args, name)) is None:
            continue
        absolute = Path(path).absolute()
        first_existing = next(parent for parent in (absolute, *absolute.parents) if parent.exists())
        if not first_existing.is_dir():
            yield f"{shown(args, name)}: {first_existing} is a file. Give a directory."
        elif not os.access(first_existing, os.W_OK | os.X_OK):
            yield f"{shown(args, name)}: {first_existing} cannot be written to. Give another directory."


def single_gpu_has_one_of_each(args: GRPOConfig) -> Iterator[str]:
    if not args.single_gpu_mode:
        return
    names = "num_learners_per_node", "vllm_num_engines", "vllm_tensor_parallel_size"
    if [args.num_learners_per_node, args.vllm_num_engines, args.vllm_tensor_parallel_size] != [[1], 1, 1]:
        yield f"{shown(args, 'single_gpu_mode', *names)}: one GPU holds one learner and one engine. Set each to 1."
    if args.device.kind == "cpu":
        yield f"{shown(args, 'single_gpu_mode')}: this machine has no GPU. Leave it out: on CPU processes share anyway."


def attention_can_run(args: GRPOConfig) -> Iterator[str]:
    if args.attn_implementation == "flash_attention_2" and not flash_attention_can_run(args.device.kind):
        options = shown(args, "attn_implementation")
        yield f"{options}: it needs an NVIDIA GPU and the package flash_attn. Choose auto or sdpa."


def machine_has_room(args: GRPOConfig) -> Iterator[str]:
    """A cluster's room is checked after connecting to it."""
    if os.environ.get("RAY_ADDRESS") or len(args.num_learners_per_node) > 1:
        return
    options = shown(args, "num_learners_per_node", "vllm_num_engines", "vllm_tensor_parallel_size")
    needed = args.device.num_workers_needed(args.num_learners, args.vllm_num_engines, args.vllm_tensor_parallel_size)
    if needed > args.device.num_places:
        yield (
            f"{options}: {needed} workers, and this machine has room for {args.device.num_places} "
            f"({args.device.places_explained}). Ask for fewer, or set RAY_ADDRESS to the cluster that has more."
        )


def model_can_be_read(args: GRPOConfig) -> Iterator[str]:
    if problem := _load("AutoConfig", args.model_name_or_path, args.model_revision)[1]:
        yield f"{shown(args, *_model_options(args))}: {problem}"


def model_has_enough_positions(args: GRPOConfig) -> Iterator[str]:
    config, _ = _load("AutoConfig", args.model_name_or_path, args.model_revision)
    num_positions = getattr(config, "max_position_embeddings", None)
    # Scaled rotary embeddings reach further than this number, each kind in its own way.
    is_scaled = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default") != "default"
    if num_positions is not None and not is_scaled and args.max_sequence_length > num_positions:
        names = "model_name_or_path", "max_prompt_token_length", "response_length", "eval_response_length"
        yield f"{shown(args, *names)}: the model reads {num_positions} tokens at most. Set shorter lengths."


RULES: tuple[Callable[[GRPOConfig], Iterator[str]], ...] = (
    choices_are_known,
    numbers_are_within_limits,
    every_node_has_learners,
    loss_denominator_is_token_or_positive,
    stop_strings_are_not_empty,
    pack_holds_a_sample,
    kl_has_its_reference,
    groups_have_something_to_compare,
    episodes_fill_a_step,
    mini_batches_are_not_empty,
    evaluation_has_data_and_a_time,
    system_prompt_file_can_be_read,
    outputs_can_be_written,
    single_gpu_has_one_of_each,
    attention_can_run,
    machine_has_room,
    model_can_be_read,
    model_has_enough_positions,
)


def load_tokenizer(args: GRPOConfig) -> tuple[Any | None, list[str]]:
    """The tokenizer, or None, and what is wrong with it.

    Of a model that cannot be read, `collect_mistakes` speaks; here it is passed over.
    """
    own = args.tokenizer_name_or_path is not None
    if not own and _load("AutoConfig", args.model_name_or_path, args.model_revision)[1]:
        return None, []
    names = ("tokenizer_name_or_path",) if own else _model_options(args)
    tokenizer, problem = _load("AutoTokenizer", args.tokenizer_name, None if own else args.model_revision)
    # Of a directory without tokenizer files, Transformers makes a tokenizer that knows no words.
    if tokenizer is not None and len(tokenizer) <= len(tokenizer.all_special_ids):
        problem = "it holds no tokenizer. Name one with --tokenizer_name_or_path."
    elif tokenizer is not None and not tokenizer.chat_template:
        problem = (
            "its tokenizer has no chat template. Choose a model trained on chats, or name a tokenizer that has a "
            "template with --tokenizer_name_or_path."
        )
    return (None, [f"{shown(args, *names)}: {problem}"]) if problem else (tokenizer, [])


def _model_options(args: GRPOConfig) -> tuple[str, ...]:
    return ("model_name_or_path",) if args.model_revision is None else ("model_name_or_path", "model_revision")


@functools.cache
def _load(kind: Literal["AutoConfig", "AutoTokenizer"], name: str, revision: str | None) -> tuple[Any | None, str]:
    """A model's config or tokenizer, or None and the reason. The network is asked only for what is not here."""
    if not name:
        return None, "empty. Name a model."
    path = Path(name)
    is_hub_name = re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name) is not None and not path.exists()
    if not is_hub_name and not path.is_dir():
        return None, "no such directory. Check the path."
    if kind == "AutoConfig" and path.is_dir() and not (path / "config.json").is_file():
        return None, "no config.json in it. Give the directory that save_pretrained wrote."
    return _from_pretrained(kind, name, revision, is_hub_name=is_hub_name)


def _from_pretrained(kind: str, name: str, revision: str | None, *, is_hub_name: bool) -> tuple[Any | None, str]:
    import transformers

    def load(*, local_files_only: bool) -> Any:
        # Code that comes with a model is never run, and the question whether to run it is never asked.
        return getattr(transformers, kind).from_pretrained(
            name, revision=revision or "main", local_files_only=local_files_only, trust_remote_code=False
        )

    try:
        return load(local_files_only=True), ""
    except Exception as error:  # whatever a broken file makes a parser raise is the user's to mend
        if not is_hub_name:
            return None, f"it cannot be read: {_first_line(error)}. Save or download it again."
    if problem := _problem_with_hub_name(name, revision):
        return None, problem
    try:
        return load(local_files_only=False), ""
    except Exception as error:
        return None, f"it cannot be loaded from the Hugging Face hub: {_first_line(error)}."


def _problem_with_hub_name(name: str, revision: str | None) -> str:
    """Why the hub cannot give `name`, or nothing. Asked in a thread: the look-up of a host name has no timeout."""
    import huggingface_hub

    answers: list[str] = []

    def ask() -> None:
        try:
            huggingface_hub.HfApi().model_info(name, revision=revision, timeout=HUB_TIMEOUT_S)
            answers.append("")
        except huggingface_hub.errors.HfHubHTTPError as error:
            answers.append(
                f"no such directory here, and the Hugging Face hub answers: {_first_line(error)}. Check the "
                "name; for a gated model set HF_TOKEN."
            )
        except Exception as error:
            answers.append(unreachable.format(reason=_first_line(error)))

    unreachable = (
        "no such directory here, not in the local cache of the Hugging Face hub, and the hub cannot be reached "
        "({reason}). Check the path, or download the model first."
    )
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(HUB_TIMEOUT_S)
    return answers[0] if answers else unreachable.format(reason=f"no answer in {HUB_TIMEOUT_S:.0f} s")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200].rstrip(". ")
