"""All options of a run in one flat object, and the values that follow from them. `options.py` declares them."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from open_instruct.algorithms.advantages import ADVANTAGES
from open_instruct.algorithms.denominators import TOKEN
from open_instruct.algorithms.losses import LOSSES
from open_instruct.algorithms.reward_shaping import RewardShaping
from open_instruct.chat_templates import TokenizerSetup, chat_template
from open_instruct.config.data_options import DataOptions, ModelOptions, TokenizerOptions
from open_instruct.config.evaluation_sets import NamedData
from open_instruct.config.options import (
    AlgorithmOptions,
    AsyncOptions,
    DeadlineOptions,
    DistillationOptions,
    EvaluationOptions,
    LearnerOptions,
    LoraOptions,
    OptimizerOptions,
    RolloutOptions,
    RunOptions,
    SavingOptions,
    TrackingOptions,
    VLLMOptions,
)
from open_instruct.config.verifier_options import EvolvingRubricOptions, RewardOptions, VerifierConfig
from open_instruct.data_types import SamplingConfig
from open_instruct.device import AssumedGpus, Device, Kind, current_device
from open_instruct.registry import NO_FLAG, options_of
from open_instruct.user_modules import import_user_module
from open_instruct.weight_transports import RAY_OBJECT, WeightTransport
from open_instruct.workflows.agents.options import AgentOptions
from open_instruct.workflows.base import WORKFLOWS, Lengths, WorkflowSpec
from open_instruct.workflows.conversations.options import ConversationOptions
from open_instruct.workflows.rc.options import ReasoningCacheOptions


@dataclass(kw_only=True)
class GRPOConfig(
    NamedData,
    RunOptions,
    ModelOptions,
    TokenizerOptions,
    DataOptions,
    RolloutOptions,
    ReasoningCacheOptions,
    ConversationOptions,
    AgentOptions,
    AsyncOptions,
    AlgorithmOptions,
    DistillationOptions,
    RewardOptions,
    VerifierConfig,
    EvolvingRubricOptions,
    OptimizerOptions,
    LearnerOptions,
    LoraOptions,
    VLLMOptions,
    EvaluationOptions,
    SavingOptions,
    DeadlineOptions,
    TrackingOptions,
):
    """All options of a GRPO run."""

    own_options: dict[str, Any] = field(default_factory=dict, metadata=NO_FLAG)
    """Values of the options that belong to the user's own losses, advantages and workflows; `registry.options_of` reads them."""
    given: dict[str, Any] = field(default_factory=dict, metadata=NO_FLAG, compare=False)
    """The options that the user wrote, on the command line or in a file, as they were written, with secrets masked."""
    command_line: list[str] = field(default_factory=list, metadata=NO_FLAG, compare=False)
    """The words of the command, with secrets masked; empty if the options come from another program."""

    @property
    def staleness_target(self) -> int:
        """Highest age of samples, in steps, that pacing aims at: `staleness_threshold`, or what stands in for it."""
        if self.staleness_threshold is not None:
            return self.staleness_threshold
        if self.async_steps is not None:
            return self.async_steps
        return 0 if self.colocate else 1

    @property
    def staleness_bound(self) -> int:
        """Age, in steps, past which no sample is trained on."""
        return self.staleness_target if self.max_staleness_allowed is None else self.max_staleness_allowed

    @property
    def corrects_off_policy(self) -> bool:
        """Whether tokens are weighed by rho: as the option says; without it, where engines may sample from another distribution
        than learners compute: samples may be stale, `vllm_top_p` leaves tokens out, or a kept prefix cache holds keys and values
        of older weights. With `use_vllm_logprobs` rho is always 1."""
        if self.use_rho_correction is not None:
            return self.use_rho_correction
        differs = self.staleness_bound > 0 or self.vllm_top_p < 1 or self.vllm_keep_prefix_cache
        return differs and not self.use_vllm_logprobs

    @property
    def denominator(self) -> float | str:
        """What the summed loss is divided by: as the option says; without it, as the loss is meant."""
        if self.loss_denominator is not None:
            return self.loss_denominator
        return LOSSES.fact(self.loss_fn, "denominator", TOKEN)

    @property
    def denominator_of_kl(self) -> float | str:
        """What the summed KL is divided by."""
        return self.denominator if self.kl_denominator is None else self.kl_denominator

    @property
    def reward_shaping(self) -> RewardShaping:
        """What is added to rewards beside the verifier's score."""
        form = "ignored"
        if self.apply_r1_style_format_reward:
            form = "rewarded" if self.additive_format_reward else "needed"
        return RewardShaping(
            counts_score=self.apply_verifiable_reward,
            form=form,
            form_reward=self.r1_style_format_reward,
            non_stop_reward=self.non_stop_penalty_value if self.non_stop_penalty else None,
            max_length=self.response_length,
            overlong_buffer=self.overlong_buffer_len,
            overlong_penalty=self.overlong_penalty_factor,
        )

    @property
    def verifier_config(self) -> VerifierConfig:
        """The options of the verifiers that come with the project."""
        return options_of(self, VerifierConfig)

    @property
    def has_teacher(self) -> bool:
        return self.teacher_model_name_or_path is not None

    @property
    def leaves_out_zero_std(self) -> bool:
        """Whether groups whose responses all have the same reward are left out. From a teacher they learn nevertheless, and so do
        they with an advantage that compares them with the rest of the step."""
        return self.filter_zero_std_samples and self.compares_within_groups and not self.has_teacher

    @property
    def compares_within_groups(self) -> bool:
        """Whether a response learns from the other responses of its group."""
        needs_group = ADVANTAGES.fact(self.advantage_normalization_type, "needs_group", True)
        return needs_group and self.use_task_rewards

    @property
    def shares_devices(self) -> bool:
        """Whether engines are on the devices of the learners. On CPU `single_gpu_mode` means nothing: they share the machine."""
        return self.colocate or (self.single_gpu_mode and self._device_kind != "cpu")

    @property
    def _device_kind(self) -> Kind:
        if self.device_type == "auto" and self.gpu_memory is not None:
            return "cuda"
        return current_device(kind=None if self.device_type == "auto" else self.device_type).kind

    @property
    def num_engine_workers(self) -> int:
        return self.vllm_num_engines * self.vllm_tensor_parallel_size

    @property
    def takes_turns(self) -> bool:
        """Whether engines and learners of a single machine never compute at the same time."""
        is_on_policy = self.staleness_bound == 0 and not self.streaming and not self.has_teacher
        return is_on_policy and len(self.num_learners_per_node) == 1

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer_name_or_path or self.model_name_or_path

    @property
    def revision_of_tokenizer(self) -> str | None:
        """`model_revision` if the tokenizer comes from the model's repository, else None: no other repository has that commit."""
        if self.tokenizer_revision is not None:
            return self.tokenizer_revision
        return self.model_revision if self.tokenizer_name == self.model_name_or_path else None

    @property
    def tokenizer_setup(self) -> TokenizerSetup:
        """How the tokenizer is read. Raises `UnknownTemplate` for a template that is not there."""
        template = None if self.chat_template_name is None else chat_template(self.chat_template_name)
        return TokenizerSetup(template, self.add_bos, self.trust_remote_code)

    @property
    def train_sampling(self) -> SamplingConfig:
        """How a training group is sampled, without the seed."""
        return SamplingConfig(
            temperature=self.temperature,
            top_p=self.vllm_top_p,
            max_tokens=self.response_length,
            n=self.num_samples_per_prompt_rollout,
            stop=tuple(self.stop_strings),
        )

    @property
    def eval_sampling(self) -> SamplingConfig:
        """How an evaluation prompt is sampled, without the seed."""
        return SamplingConfig(
            temperature=self.temperature if self.eval_temperature is None else self.eval_temperature,
            top_p=self.vllm_top_p if self.eval_top_p is None else self.eval_top_p,
            max_tokens=self.response_length if self.eval_response_length is None else self.eval_response_length,
            n=self.eval_pass_at_k,
            stop=tuple(self.stop_strings),
        )

    @property
    def sleep_level(self) -> int:
        """How deeply engines sleep: as the option says; else 2 if each sleep ends with new weights (`colocate`), and 1 if not."""
        return self.engine_sleep_level or (2 if self.colocate else 1)

    @property
    def lengths(self) -> Lengths:
        """How long prompts, responses and sequences may become, and how many samples a prompt gives."""
        if self.rollout_workflow not in WORKFLOWS.names:  # learners ask too, and have no rollouts of their own
            for module in self.workflow_modules:
                import_user_module(module)
        return WORKFLOWS[self.rollout_workflow].value.lengths(self)

    @property
    def max_sequence_length(self) -> int:
        """Tokens of the longest prompt together with the longest response, evaluation included."""
        return self.lengths.sequence

    @property
    def workflow(self) -> WorkflowSpec:
        """The workflow of the run, in a form from which every process can make it.

        Raises `OSError` or `UnicodeDecodeError` for a file that cannot be read; `config/checks.py` has reported such a file.
        """
        options = options_of(self, WORKFLOWS[self.rollout_workflow].options)
        return WorkflowSpec.of(self.rollout_workflow, options, self.workflow_modules)

    @property
    def state_dir(self) -> Path:
        return Path(self.checkpoint_state_dir or Path(self.output_dir) / "checkpoint_states")

    @property
    def device(self) -> Device:
        """The device on which the run computes, made from the options that affect it."""
        return current_device(
            kind=self._device_kind,
            dtype=self.model_dtype,
            attn_implementation=self.attn_implementation,
            colocated=self.shares_devices,
            weight_transport=_transport(self),
            workers_at_once=max(self.num_engine_workers, 1) if self.takes_turns else None,
            learners_at_once=max(self.num_learners, 1) if self.takes_turns else None,
            shares_cores=not self.takes_turns and not self.has_teacher,  # a teacher does not say when it computes
            assumed=_assumed_gpus(self),
        )


def num_places_needed(args: GRPOConfig) -> int:
    """Workers that need a place: a GPU, or a share of a core."""
    num_teacher_workers = args.teacher_num_engines * args.teacher_tensor_parallel_size if args.has_teacher else 0
    return args.num_learners + (0 if args.shares_devices else args.num_engine_workers) + num_teacher_workers


def _assumed_gpus(args: GRPOConfig) -> AssumedGpus | None:
    """The GPUs that `gpu_memory` and `num_gpus` describe. Without a number there are as many as the run needs."""
    if args.gpu_memory is None:
        return None
    return AssumedGpus(int(args.gpu_memory * 2**30), args.num_gpus or num_places_needed(args))


def enforces_eager(args: GRPOConfig) -> bool:
    """Whether engines run the model without compiling it: as the option says; without it, on CPU."""
    return args.device.kind == "cpu" if args.vllm_enforce_eager is None else args.vllm_enforce_eager


def _transport(args: GRPOConfig) -> WeightTransport | None:
    """None is what fits the device. Where a learner shares its GPU with no engine, nobody would open what it shares by `ipc`, and
    CUDA would never take the memory back."""
    if args.weight_transport != "auto":
        return args.weight_transport
    return RAY_OBJECT if args.shares_devices and args.num_engine_workers != args.num_learners else None


def config_of(args: Any) -> GRPOConfig:
    """The options of a run, read from any namespace that holds some of them. Attributes that are no options are ignored."""
    if isinstance(args, GRPOConfig):
        return args
    names = GRPOConfig.__dataclass_fields__
    return GRPOConfig(**{name: value for name, value in vars(args).items() if name in names})
