"""Every option of a run: its name, its default, its help. One class per subject; `GRPOConfig` is all of them.

The string under a field is its help, on the command line and in the YAML doors too. `config/checks.py` says which values are
mistakes. The options of a workflow, a loss or an advantage stand beside it.
"""

from dataclasses import dataclass, field
from typing import Literal

from open_instruct.algorithms.advantages import ADVANTAGES
from open_instruct.algorithms.losses import LOSSES, ClipOptions
from open_instruct.registry import chosen_from
from open_instruct.workflows import builtin as builtin_workflows  # noqa: F401 - `WORKFLOWS` knows them then
from open_instruct.workflows.base import SINGLE_TURN, WORKFLOWS

NEVER = -1
"""Value of an interval in steps that switches the thing off."""


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
    """Branch, tag or commit of a model on the hub, and of its tokenizer if that comes from the same place."""
    device_type: Literal["auto", "cpu", "cuda"] = "auto"
    """What learners and engines compute on. auto is cuda where the machine that the command runs on has a GPU, else cpu. Say cuda
    on the head node of a cluster if that node alone has no GPU."""
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
    """Datasets to train on, each followed by how much of it: a fraction (1.0) or a number of rows (200). Of a data set with
    configurations, one is named like `openai/gsm8k?config=main`."""
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
    """Longest prompt, in tokens; with rc, longest problem in either template."""
    overlong_prompts: Literal["drop", "error"] = "drop"
    """What happens to longer prompts: left out and counted, or reported as a mistake before the run starts."""


@dataclass(kw_only=True)
class RolloutOptions:
    """Rollout"""

    response_length: int = 256
    """Longest response, in tokens."""
    pack_length: int = 512
    """Most tokens of one row of a training batch; at least one prompt with its response fits in."""
    rollout_workflow: str = chosen_from(WORKFLOWS, SINGLE_TURN)
    """What becomes of a prompt. single_turn: answers; rc: cycles of a reasoning turn and its summary."""
    workflow_modules: list[str] = field(default_factory=list)
    """Files (my_workflow.py) or modules that define further workflows. See docs/workflows.md."""
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


@dataclass(kw_only=True)
class AsyncOptions:
    """Asynchronous training"""

    async_steps: int | None = None
    """Steps that generation may run ahead of training. 0 is strictly on-policy. By default 1, and 0 with colocate."""
    staleness_threshold: int | None = None
    """Age of samples, in steps, that pacing aims at: prompts are issued no faster than they can be used by then. By default
    async_steps."""
    max_staleness_allowed: int | None = None
    """Age, in steps, past which no sample is ever trained on. By default staleness_threshold."""
    straggler_policy: Literal["wait", "drop", "truncate"] = "wait"
    """A group that would be older than max_staleness_allowed: the step before waits for it (wait), it is thrown away and its
    prompt issued again (drop), or only its tokens that are fresh enough are trained on (truncate)."""
    over_issued_prompts: int = 0
    """Prompts that a step may leave to the next one: it takes the first complete groups. They are shorter than the average."""
    streaming: bool = False
    """Learners begin a step with the first complete groups instead of the whole batch. The gradient is the same."""
    weight_transport: Literal["auto", "nccl", "ipc", "ray_object", "gloo", "shm"] = "auto"
    """How new weights come to the engines. auto: `nccl` between GPUs, `ipc` where engines and learners share them, `ray_object`
    without a GPU. `ray_object` works everywhere, but each weight passes through main memory. `gloo` and `shm` take the way
    of `nccl` and `ipc` on a machine without a GPU, for trying it out."""
    inflight_updates: bool = True
    """Engines take new weights between two tokens of a response. False: they finish what they have begun first."""
    trigger_parameter_sync_step: int = 1
    """Training steps from one update of the engines' weights to the next."""
    max_queue_size: int | None = None
    """Responses, ready to train on, that may wait for the learners. By default as many as the staleness bound lets be."""
    min_batch_count: int = 1
    """With --streaming: full micro-batches per learner that a partial batch holds before it goes to the learners. The last
    partial batch of a step may hold fewer."""
    batch_timeout: float = 30.0
    """Seconds of waiting for a batch after which the log says who is waited for."""
    batch_generation_interval: float = 0.0
    """Seconds between two bundles of prompts for the engines."""
    generation_timeout: float | None = None
    """Seconds that an engine may take for one group (with rc: one turn); then the group is broken off and the prompt sampled
    again with another seed. By default no limit. Long responses are what takes longer, so those that are trained on become
    shorter than the model's: the metrics generation_timeouts (groups broken off) and dropped_timeouts (prompts dropped for it)
    say how far. A lower response_length limits time without that bias."""
    max_generation_attempts: int = 3
    """Times that the engines may fail on a prompt before it is given up: dropped as failed, or in an evaluation counted as wrong
    (eval/num_given_up). Being lost with an engine, or issued again after a resume, is no failure."""


@dataclass(kw_only=True)
class AlgorithmOptions(ClipOptions):
    """Algorithm"""

    loss_fn: str = chosen_from(LOSSES, "dapo")
    """Policy loss. dapo: the clipped ratio, with a lower and a higher bound of its own."""
    algorithm_modules: list[str] = field(default_factory=list)
    """Files (my_loss.py) or modules that define further losses or advantages. See docs/algorithms.md."""
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
    loss_denominator: float | str = "token"
    """What the summed loss is divided by: token (the trained tokens of the optimizer step) or a positive number."""
    advantage_normalization_type: str = chosen_from(ADVANTAGES, "centered")
    """Advantage of a response: score - mean of its group (centered), or that over the standard deviation (standard)."""
    use_vllm_logprobs: bool = False
    """Take the engine's log-probs for those of the old policy; else they are computed before the first update of a step."""
    use_rho_correction: bool | None = None
    """Weigh each token by rho = old policy / engine, truncated (importance sampling). By default where samples may be stale."""
    rho_clamp_lower_bound: float = 0.0
    """rho is raised to at least this."""
    rho_clamp_upper_bound: float = 2.0
    """rho is cut down to at most this. 0: no upper bound."""
    rho_mask_lower_bound: float = 0.0
    """Tokens whose rho is below this are not trained on. 0: none."""
    rho_mask_upper_bound: float = 0.0
    """Tokens whose rho is above this are not trained on. 0: none."""
    rho_mask_sequence_level: bool = False
    """Judge a whole response by the geometric mean of its rho, not each token by its own."""
    rho_mask_tv_divergence: bool = False
    """Judge a response by the mean of |rho - 1| / 2 over its tokens: above rho_mask_upper_bound it is not trained on."""


@dataclass(kw_only=True)
class RewardOptions:
    """Rewards"""

    verification_reward: float = 10.0
    """Reward of a right answer."""
    verifier_modules: list[str] = field(default_factory=list)
    """Files (my_rewards.py) or modules that define further verifiers: subclasses of VerifierFunction. See docs/verifiers.md."""
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
    max_nonfinite_steps: int = 10
    """Training steps in a row whose gradient is not finite (NaN or infinite), after which the run ends with exit code 1.
    In each of them the weights stay as they are."""
    per_device_train_batch_size: int = 1
    """Rows of pack_length tokens in one forward and backward pass of a learner."""


@dataclass(kw_only=True)
class LearnerOptions:
    """Learners"""

    num_learners_per_node: list[int] = field(default_factory=lambda: [1])
    """Learners on each node: 4 4 is two nodes with four each."""
    single_gpu_mode: bool = False
    """Learner and engine share one GPU, and both stay in its memory: give the engine at most half of it
    (vllm_gpu_memory_utilization 0.3, for example)."""
    colocate: bool = False
    """Engines share the devices of the learners and take turns with them: who does not compute gives its memory back."""
    deepspeed_stage: Literal[0, 2, 3] = 0
    """ZeRO stage. 0: every learner holds all (in bfloat16 it runs as 2, because DeepSpeed adds gradients up in float32 there
    alone); 2: optimizer and gradients are divided; 3: weights too."""
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
    engine_sleep_after_s: float | None = None
    """Seconds without work after which an engine gives memory back until the next prompt. By default it never does."""
    engine_sleep_level: Literal[1, 2] | None = None
    """1: a sleeping engine gives back its key-value cache and moves its weights to main memory; 2: it drops the weights too, and
    generates again only with new ones. By default 1, and 2 with colocate, where each training step brings new ones."""


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
    save_traces: bool = False
    """Write what each step trains on to samples/ in output_dir, in a format that can be read as data again."""


@dataclass(kw_only=True)
class DeadlineOptions:
    """Deadlines"""

    placement_timeout_s: float = 50.0
    """Seconds that the cluster has to make room for learners and engines."""
    init_timeout_s: float = 3600.0
    """Seconds that engines and learners have to get ready, to connect with each other, and to write or read a checkpoint: enough
    for models of 70 B parameters on shared storage."""
    progress_timeout_s: float = 1800.0
    """Seconds without a batch ready to train on after which the run ends and says who is waited for."""
    weight_sync_timeout_s: float = 600.0
    """Seconds that new weights have to reach every engine, in one attempt."""
    max_sync_retries: int = 3
    """Further attempts after one that failed. An engine that still stays behind is restarted."""
    sync_retry_delay: float = 1.0
    """Seconds before each further attempt."""
    logprob_mismatch_limit: float | None = None
    """Largest allowed difference between log-probs of engine and learner for the same weights: of any token in float32, on
    average in 16 bits. None is 0.001 and 0.1. A new engine is compared before it serves, and ends the run when it differs more.
    Later steps are watched where all tokens are of the version that is trained (max_sample_age 0)."""
    logprob_mismatch_action: Literal["stop", "warn"] = "stop"
    """When a later step breaks logprob_mismatch_limit: end the run, or say so in the log and go on."""
    engine_stall_timeout_s: float = 300.0
    """Seconds that an engine with work may take no step; then it counts as dead. An update of its weights does not count."""
    stopped_timeout_s: float = 12.0
    """Seconds that a process of the run may be stopped (SIGSTOP, a debugger, a frozen container). Then an engine is replaced, and
    anything else ends the run by name. Work that takes long does not count."""
    max_engine_restarts: int = 3
    """Engines that may be started again in one run after they died; one more ends it. 0: the first death does."""
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
    alerts: list[str] = field(default_factory=list)
    """Limits on metrics, such as max_sample_age=3: a row above one is marked (alerts) and told in the log."""
    statistics_interval_s: float = 30.0
    """Seconds from one report on all components in the log to the next."""
