"""Every option of a run: its name, its default, its help. One class per subject; `GRPOConfig` inherits from all of them.

The string under a field is the option's help, on the command line and for the YAML files too. `config/checks.py` says which
values are mistakes. The options of a workflow, a loss or an advantage are declared beside that workflow, loss or advantage.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from open_instruct.algorithms.advantages import ADVANTAGES
from open_instruct.algorithms.distillation import DISTILLATION_LOSSES
from open_instruct.algorithms.losses import LOSSES, ClipOptions, DppoTvOptions, GmpoOptions, GspoOptions, SapoOptions
from open_instruct.option_limits import (
    ANY,
    COUNT,
    INTERVAL,
    MAX_TEMPERATURE,
    NOT_NEGATIVE,
    POSITIVE,
    POSITIVE_SHARE,
    SHARE,
    Limits,
    limited,
)
from open_instruct.registry import chosen_from
from open_instruct.workflows import builtin as builtin_workflows  # noqa: F401 - `WORKFLOWS` knows them then
from open_instruct.workflows.base import SINGLE_TURN, WORKFLOWS


@dataclass(kw_only=True)
class RunOptions:
    """Run"""

    exp_name: str = "grpo"
    """Name of the experiment."""
    run_name: str | None = None
    """Name of this run in logs and in wandb. By default exp_name and seed, such as grpo__42."""
    seed: int = limited(42, Limits(0, 2**32 - 1))
    """Seed of everything random. For the same data, the order in which prompts are issued depends on the seed alone."""
    output_dir: str = "output/"
    """Directory of all files that the run writes: metrics, checkpoints, the trained model, plots, logs."""
    dry_run: bool = False
    """Check options and data, reserve a place for every part, print steps, tokens and the memory that each part will need, and
    end: with exit code 0, or 1 if there is not enough memory. Nothing is written."""
    gpu_memory: float | None = limited(None, POSITIVE)
    """With dry_run: memory of each GPU in GiB, as nvidia-smi shows it, of a machine that is not this one. The answer then needs
    neither a GPU nor weights nor data, only the model's config.json."""
    num_gpus: int | None = limited(None, COUNT)
    """With gpu_memory: the number of GPUs. By default as many as the run needs."""
    verbose: bool = False
    """Log more on the terminal: debug messages of this program and info messages of its libraries."""

    @property
    def run_title(self) -> str:
        """Name of the run. It does not contain the time of day, so that a resumed run has the same title."""
        return self.run_name or f"{self.exp_name}__{self.seed}"


@dataclass(kw_only=True)
class RolloutOptions:
    """Rollout"""

    response_length: int = limited(256, COUNT)
    """Longest response, in tokens."""
    pack_length: int = limited(512, COUNT)
    """Most tokens in one row of a training batch. The longest prompt with the longest response must fit into a row."""
    rollout_workflow: str = chosen_from(WORKFLOWS, SINGLE_TURN)
    """How the model responds to a prompt. single_turn: in one turn; conversation: in turns, with tools and environments between;
    agent_program: as a program of yours asks it to; rc: in cycles of a reasoning turn and its summary."""
    workflow_modules: list[str] = field(default_factory=list)
    """Files (my_workflow.py) or modules that define further workflows. See docs/guides/workflows.md."""
    temperature: float = limited(1.0, Limits(0, MAX_TEMPERATURE, low_itself=False))
    """Sampling temperature in training, 0.01 or more: vLLM has no lower one."""
    vllm_top_p: float = limited(1.0, POSITIVE_SHARE)
    """Nucleus sampling in training: only the likeliest tokens that make up this share of the probability are sampled. 1: off.
    Below 1 the engine's log-probs are those among the tokens that are left, and rho corrects for the difference
    (use_rho_correction); with use_vllm_logprobs nothing does."""
    stop_strings: list[str] = field(default_factory=list)
    """Strings that end a response, in addition to the model's own end token."""
    num_unique_prompts_rollout: int = limited(16, COUNT)
    """Prompts per training step."""
    num_samples_per_prompt_rollout: int = limited(4, COUNT)
    """Responses per prompt. They form one group, whose mean score is the baseline of their advantages."""
    total_episodes: int = limited(100000, COUNT)
    """Responses of the whole run. The number of steps is this number divided by the responses per step: with 16 prompts per step
    and 4 responses per prompt, 6400 episodes are 100 steps."""
    filter_zero_std_samples: bool = True
    """Leave out groups whose responses all have the same score, because all their advantages are 0."""
    active_sampling: bool = False
    """Sample further prompts until num_unique_prompts_rollout groups of a step can be trained on, in place of those that
    filter_zero_std_samples leaves out."""
    no_resampling_pass_rate: float | None = limited(None, POSITIVE_SHARE)
    """Do not sample a prompt again, in later passes over the data, once the mean reward of its group was this share of the
    highest or more. Rewards are those that are trained on, with penalties. By default all prompts are sampled in each pass."""
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

    async_steps: int | None = limited(None, NOT_NEGATIVE)
    """Steps that generation may run ahead of training. 0 is strictly on-policy. By default 1; with colocate 0."""
    staleness_threshold: int | None = limited(None, NOT_NEGATIVE)
    """Highest age of samples, in steps, that pacing aims at: prompts are issued no faster than training can use them within that
    age. By default async_steps."""
    max_staleness_allowed: int | None = limited(None, NOT_NEGATIVE)
    """Age, in steps, past which no sample is ever trained on. By default staleness_threshold."""
    straggler_policy: Literal["wait", "drop", "truncate"] = "wait"
    """What happens to a group that would become older than max_staleness_allowed. wait: the last step that may train the group
    waits for it; drop: the group is thrown away and its prompt is issued again; truncate: only those tokens of the group that are
    fresh enough are trained on."""
    over_issued_prompts: int = limited(0, NOT_NEGATIVE)
    """Prompts that a step may leave to the next step, because it takes the groups that are complete first. The responses of
    those groups are shorter than the average."""
    streaming: bool = False
    """Learners begin a step with its first complete groups instead of waiting for the whole batch. The gradient is the same."""
    weight_transport: Literal["auto", "nccl", "ipc", "ray_object", "gloo", "shm"] = "auto"
    """How new weights reach the engines. auto: `nccl` between GPUs, `ipc` if engines and learners share GPUs, `ray_object`
    without a GPU. `ray_object` works everywhere, but every weight passes through main memory. `gloo` and `shm` do what `nccl`
    and `ipc` do on a machine without a GPU, for trials."""
    inflight_updates: bool = True
    """Engines take new weights between two tokens of a response. False: engines first finish the responses they have begun."""
    trigger_parameter_sync_step: int = limited(1, COUNT)
    """Training steps from one update of the engines' weights to the next."""
    max_queue_size: int | None = limited(None, COUNT)
    """Responses, ready to train on, that may wait for the learners. By default as many as the staleness bound allows to wait."""
    min_batch_count: int = limited(1, COUNT)
    """With --streaming: full micro-batches per learner that a partial batch holds before it goes to the learners. The last
    partial batch of a step may hold fewer."""
    batch_timeout: float = limited(30.0, POSITIVE)
    """Seconds of waiting for a batch after which the log says what the trainer waits for."""
    batch_generation_interval: float = limited(0.0, NOT_NEGATIVE)
    """Seconds to wait after sending a bundle of prompts to the engines before the next bundle is sent."""
    generation_timeout: float | None = limited(None, POSITIVE)
    """Seconds that an engine may take for one group (with rc: for one turn); those of weight updates do not count. Then the group
    is aborted and its prompt is sampled again with another seed. By default no limit. A limit biases training towards short
    responses, because long responses take longer: the metrics generation_timeouts (groups aborted) and dropped_timeouts (prompts
    dropped for it) say how much. A lower response_length limits the time without that bias."""
    max_generation_attempts: int = limited(3, COUNT)
    """Times that the engines may fail on a prompt before the prompt is given up: dropped as failed or, in an evaluation, counted
    as wrong (eval/num_given_up). It is no failure when a prompt is lost with its engine, or issued again after a resume."""


@dataclass(kw_only=True)
class AlgorithmOptions(ClipOptions, GspoOptions, GmpoOptions, SapoOptions, DppoTvOptions):
    """Algorithm"""

    loss_fn: str = chosen_from(LOSSES, "dapo")
    """Policy loss. dapo: the clipped ratio, with separate lower and upper bounds (clip_lower, clip_higher); grpo: the same with
    one bound, a mean over responses; dr_grpo: grpo without a length bias; cispo: weights are clipped, no token loses its
    gradient; gspo: one ratio per response; gmpo: the geometric mean of clipped ratios; sapo: a soft gate; dppo_tv: a trust region
    on the shift of probability. docs/guides/algorithms.md says when to use which."""
    algorithm_modules: list[str] = field(default_factory=list)
    """Files (my_loss.py) or modules that define further losses or advantages. See docs/guides/algorithms.md."""
    num_epochs: int = limited(1, COUNT)
    """Passes over the data of one training step."""
    num_mini_batches: int = limited(1, COUNT)
    """Optimizer steps into which the data of one training step is divided, in each pass."""
    beta: float = limited(0.05, NOT_NEGATIVE)
    """Weight of the KL divergence from the reference policy."""
    load_ref_policy: bool = True
    """Keep the initial model as the reference policy. False needs beta 0."""
    ref_policy_update_freq: int | None = limited(None, COUNT)
    """Training steps from one update of the reference policy to the next. By default it stays the initial model."""
    alpha: float = limited(0.6, POSITIVE_SHARE)
    """Share of the policy in an update of the reference policy: reference = alpha * policy + (1 - alpha) * reference."""
    kl_denominator: float | str | None = None
    """Divisor of the summed KL, as in loss_denominator. By default that of the loss."""
    kl_estimator: Literal[0, 1, 2, 3, 4] = 2
    """Estimator of the KL: 0 linear (k1), 1 quadratic (k2), 2 exponential (k3), 3 linear times the ratio, 4 exponential times the
    ratio, whose gradient is unbiased."""
    entropy_coef: float = limited(0.0, ANY)
    """Weight of an entropy bonus: this times the mean entropy per token is subtracted from the loss. A negative weight punishes
    entropy."""
    ce_coef: float = limited(0.0, NOT_NEGATIVE)
    """Weight of a cross-entropy loss on text that a workflow inserted into responses, such as the answers of tools: this times
    the mean over its tokens is added to the loss, so that the model learns to predict it (ECHO)."""
    loss_denominator: float | str | None = None
    """Divisor of the summed loss. token: the number of trained tokens of the optimizer step; sequence: the mean over each
    response, then over responses; constant: the number of responses times response_length; or a positive number. By default what
    the loss is meant to have: token for dapo, cispo and dppo_tv, constant for dr_grpo, sequence for the others."""
    advantage_normalization_type: str = chosen_from(ADVANTAGES, "centered")
    """Advantage of a response. centered: its score minus the mean score of its group; standard: that difference divided by the
    standard deviation of the group; rloo: its score minus the mean score of the others; maxrl: that of centered divided by the
    mean; opo: minus the mean weighted by length; reinforce_plus_plus and reinforce_plus_plus_baseline: the score, or that of
    centered, normalised over the step."""
    use_vllm_logprobs: bool = False
    """Use the engine's log-probs as those of the old policy. False: learners compute them before the first update of a step."""
    use_rho_correction: bool | None = None
    """Weigh the loss of each token by rho, the token's probability under the old policy divided by its probability in the engine,
    truncated (importance sampling). By default only if samples may be stale, vllm_top_p is below 1 or vllm_keep_prefix_cache is
    set, and not with use_vllm_logprobs."""
    rho_clamp_lower_bound: float = limited(0.0, NOT_NEGATIVE)
    """A lower rho is raised to this value."""
    rho_clamp_upper_bound: float = limited(2.0, NOT_NEGATIVE)
    """A higher rho is cut down to this value. 0: no upper bound."""
    rho_mask_lower_bound: float = limited(0.0, NOT_NEGATIVE)
    """Tokens whose rho is below this value are not trained on. 0: no lower bound."""
    rho_mask_upper_bound: float = limited(0.0, NOT_NEGATIVE)
    """Tokens whose rho is above this value are not trained on. 0: no upper bound."""
    rho_level: Literal["token", "sequence", "geometric"] = "token"
    """What rho is. token: the ratio of each token; sequence: the product over a response, its exact importance weight; geometric:
    the geometric mean over a response. The bounds hold for it."""
    rho_mask_sequence_level: bool = False
    """Apply the rho_mask bounds to whole responses, by the geometric mean of rho over a response, not to single tokens."""
    rho_mask_tv_divergence: bool = False
    """Do not train on a response for which the mean of |rho - 1| / 2 over its tokens is above rho_mask_upper_bound."""
    rho_as_in_open_instruct: bool = False
    """rho_mask_sequence_level and rho_mask_tv_divergence as open-instruct defines them, to reproduce its runs: a packed row
    counts as one response; rho_mask_sequence_level weighs by the geometric mean too; rho_mask_tv_divergence takes the mean of
    |rho - 1|, and masks only tokens that the advantage would push further away."""
    off_policy_mask_threshold: float | None = limited(None, NOT_NEGATIVE)
    """Do not train on a response with a negative advantage whose tokens have become less likely, since they were sampled, by more
    than this on average (nats per token). By default all responses are trained on."""


@dataclass(kw_only=True)
class DistillationOptions:
    """Distillation"""

    teacher_model_name_or_path: str | None = None
    """Teacher whose distribution the model learns, on the responses that it samples itself (on-policy distillation): a local
    directory or a name on the hub. It needs the same tokens as the model. By default there is no teacher."""
    teacher_model_revision: str | None = None
    """Branch, tag or commit of a teacher on the hub."""
    distillation_loss: str = chosen_from(DISTILLATION_LOSSES, "reverse_kl")
    """What is made smaller. reverse_kl: KL(model, teacher), exact over the teacher's distillation_top_k tokens and sampled beyond
    them; forward_kl: KL(teacher, model) over the teacher's distillation_top_k tokens."""
    distillation_top_k: int = limited(32, NOT_NEGATIVE)
    """Tokens, the likeliest first, whose probabilities the teacher tells at each place. 0: that of the sampled token alone."""
    distillation_coef: float = limited(1.0, POSITIVE)
    """Weight of the distillation loss, which is added to the policy loss."""
    use_task_rewards: bool = True
    """Train on rewards too. False: learn from the teacher alone; rewards are only reported."""
    teacher_num_engines: int = limited(1, COUNT)
    """Number of engines that run the teacher."""
    teacher_tensor_parallel_size: int = limited(1, COUNT)
    """GPUs (on CPU: processes) per engine of the teacher."""
    teacher_timeout_s: float = limited(600.0, POSITIVE)
    """Seconds that an engine of the teacher may go, with work, without an answer. Then the run ends."""


@dataclass(kw_only=True)
class OptimizerOptions:
    """Optimizer"""

    learning_rate: float = limited(2e-5, NOT_NEGATIVE)
    """Peak learning rate of AdamW."""
    lr_scheduler_type: Literal[
        "linear", "constant", "cosine", "constant_with_warmup", "cosine_with_restarts", "polynomial", "inverse_sqrt"
    ] = "linear"
    """Learning rate after warm-up, by the names of Transformers. linear: falls to 0 in a straight line; constant (the same as
    constant_with_warmup); cosine: falls to 0 along half a cosine."""
    warmup_ratio: float = limited(0.0, SHARE)
    """Share of the optimizer steps during which the learning rate rises to its peak in equal parts, the first of which the first
    step has. 0.1: the first tenth."""
    weight_decay: float = limited(0.0, NOT_NEGATIVE)
    """Decoupled weight decay."""
    max_grad_norm: float = limited(1.0, NOT_NEGATIVE)
    """A gradient with a larger norm is scaled down to this norm. 0: gradients are never scaled."""
    max_nonfinite_steps: int = limited(10, COUNT)
    """The run ends with exit code 1 after this many training steps in a row whose gradient is not finite (NaN or infinite).
    Such a step does not change the weights."""
    per_device_train_batch_size: int = limited(1, COUNT)
    """Rows of pack_length tokens in one forward and backward pass of a learner."""
    share_prompts: bool = True
    """Learners compute a prompt once for all of its responses; with sdpa unless responses are much longer than prompts. The
    gradient is the same but for rounding. Not with --attn_implementation eager, and not for models with sliding windows."""


@dataclass(kw_only=True)
class LearnerOptions:
    """Learners"""

    num_learners_per_node: list[int] = field(default_factory=lambda: [1])
    """Learners on each node: 4 4 is two nodes with four learners each."""
    single_gpu_mode: bool = False
    """Learner and engine share one GPU, and both stay in its memory. Give the engine at most half of that memory
    (vllm_gpu_memory_utilization 0.3, for example). Without a GPU they share the machine in any case."""
    colocate: bool = False
    """Engines and learners use the same devices by turns: while the learners compute, the engines give their memory back, and the
    other way round."""
    deepspeed_stage: Literal[0, 2, 3] = 0
    """ZeRO stage. 0: every learner holds everything; 2: optimizer states and gradients are divided among the learners; 3: weights
    too. In bfloat16, 0 runs as 2, because only stage 2 of DeepSpeed adds up gradients in float32."""
    deepspeed_offload_optimizer: bool = False
    """Keep optimizer states in main memory and make the optimizer step there (deepspeed_stage 2 or 3)."""
    deepspeed_offload_param: bool = False
    """Keep weights in main memory while they are not needed (deepspeed_stage 3)."""
    deepspeed_zpg: int = limited(1, COUNT)
    """Learners that hold all weights among them, so that gathers stay within a node: a secondary partition of ZeRO++
    (deepspeed_stage 3). It divides the number of learners. 1: no such partition."""
    sequence_parallel_size: int = limited(1, COUNT)
    """Learners that share every row: each holds a part of its tokens, so that long rows fit (DeepSpeed-Ulysses). It divides the
    number of learners and the number of the model's attention heads."""
    backend_timeout: int = limited(120, COUNT)
    """Minutes after which a collective operation among learners fails."""

    @property
    def num_learners(self) -> int:
        """Learners on all nodes together: the world size of the training processes."""
        return sum(self.num_learners_per_node)

    @property
    def num_data_shares(self) -> int:
        """Shares into which a step's samples are divided: one for each group of learners that share their rows."""
        return self.num_learners // self.sequence_parallel_size


@dataclass(kw_only=True)
class LoraOptions:
    """LoRA"""

    use_peft: bool = False
    """Train low-rank adapters (LoRA) beside the model's linear layers, and leave the model itself as it is. Gradients, optimizer
    states and checkpoints are those of the adapters alone, and the reference policy takes no memory."""
    lora_r: int = limited(16, COUNT)
    """Rank of the adapters."""
    lora_alpha: int = limited(32, COUNT)
    """What an adapter adds is multiplied by lora_alpha / lora_r."""
    lora_target_modules: list[str] = field(default_factory=lambda: ["all-linear"])
    """Ends of the names of the layers that get an adapter, such as q_proj v_proj. all-linear: every linear layer but the head."""
    use_rslora: bool = False
    """Multiply by lora_alpha / sqrt(lora_r) instead, so that adapters of high rank learn as fast as those of low rank."""
    save_merged_lora: bool = False
    """Save whole models with the adapter merged into their weights. By default saved models are the adapter alone, in the format
    of peft."""


@dataclass(kw_only=True)
class VLLMOptions:
    """vLLM"""

    vllm_num_engines: int = limited(1, COUNT)
    """Number of engines (vLLM instances) that generate."""
    vllm_tensor_parallel_size: int = limited(1, COUNT)
    """GPUs (on CPU: processes) per engine."""
    vllm_gpu_memory_utilization: float = limited(0.9, POSITIVE_SHARE)
    """Share of a GPU's memory that an engine takes."""
    vllm_enforce_eager: bool | None = None
    """Do not compile the model and do not capture graphs: the engine starts sooner and generates more slowly. By default True on
    CPU, so that a run begins sooner (benchmarks/engine_start.py measures what that costs), and False on GPUs."""
    vllm_enable_prefix_caching: bool | None = None
    """Reuse the keys and values of prompts that begin with the same tokens: a prompt is computed once for all of its samples, and
    a conversation's turn goes on from the turn before. A request uses only what was computed for requests that came under the
    same weights. By default on for models for which vLLM can do it."""
    vllm_keep_prefix_cache: bool = False
    """Reuse also keys and values that requests under older weights have computed. Tokens then attend to keys and values of older
    weights, also beyond the staleness bound, which is about tokens: metric kv_age says how old they are, and rho corrects for it
    (use_rho_correction). Evaluations use only keys and values of the weights that they measure."""
    vllm_recompute_kv_cache: bool = False
    """When new weights come, compute the keys and values of all responses under way again (kv_age is 0). By default a response
    keeps those that it has."""
    vllm_max_num_seqs: int = limited(256, COUNT)
    """Most responses that an engine generates at once."""
    vllm_engine_args: dict[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's engines that sample, as JSON: {"kv_cache_dtype": "fp8"}. The names are the fields of
    vllm.EngineArgs. Those that this program sets itself are refused."""
    engine_sleep_after_s: float | None = limited(None, POSITIVE)
    """Seconds without work after which an engine sleeps: it gives memory back until its next prompt. By default it never does."""
    engine_sleep_level: Literal[1, 2] | None = None
    """1: a sleeping engine frees its key-value cache and moves its weights to main memory. 2: it discards its weights too, and
    needs new weights before it generates again. By default 1; with colocate 2, because each training step brings new weights."""


@dataclass(kw_only=True)
class EvaluationOptions:
    """Evaluation"""

    local_eval_every: int = limited(100, INTERVAL)
    """Steps from one evaluation to the next. -1: never."""
    eval_on_step_0: bool = False
    """Evaluate before the first training step too."""
    eval_temperature: float | None = limited(None, Limits(0, MAX_TEMPERATURE))
    """Sampling temperature in evaluation; 0 is greedy. By default the temperature of training."""
    eval_top_p: float | None = limited(None, POSITIVE_SHARE)
    """Nucleus sampling in evaluation. By default that of training (vllm_top_p)."""
    eval_pass_at_k: int = limited(1, COUNT)
    """Responses to each prompt of an evaluation, with pass@1, 2, 4, … up to this number. Greedy
    responses (eval_temperature 0) are all the same, so more than 1 needs a higher temperature."""
    eval_completions: int = limited(64, Limits(-1))
    """Prompts of each evaluation set whose responses are written to completions/ in output_dir, and to the table
    sample_completions of trackers. 0: none, -1: all."""
    eval_response_length: int | None = limited(None, COUNT)
    """Longest response in evaluation, in tokens. By default response_length."""


@dataclass(kw_only=True)
class SavingOptions:
    """Saving"""

    save_freq: int = limited(200, INTERVAL)
    """Steps from one saved model (a Hugging Face directory) to the next. -1: only at the end."""
    checkpoint_state_freq: int = limited(200, INTERVAL)
    """Steps from one checkpoint to the next. A run that was killed resumes from its newest checkpoint. -1: never."""
    checkpoint_state_dir: str | None = None
    """Directory of the checkpoints. By default checkpoint_states in output_dir."""
    keep_last_n_checkpoints: int = limited(3, Limits(1, never_means="all"))
    """How many of the newest checkpoints are kept. -1: all."""
    save_traces: bool = False
    """Write the responses of each step from its record, on the controller's node: what it trains on to samples/ in output_dir, in
    a format that dataset_mixer_list can read again; all to rollouts_save_path, with rewards, advantages and log-probabilities;
    and as text to transcripts/ in output_dir, which shows who wrote what and what is trained on. Groups that a step leaves out
    are there at once, the others when the step is trained."""
    show_samples: int = limited(2, NOT_NEGATIVE)
    """Responses that the log shows as soon as the first are back, with the prompt as the model reads it, rewards, and what each
    verifier says. 0: none."""
    show_samples_every: int = limited(-1, INTERVAL)
    """Training steps from one showing of show_samples responses to the next. -1: only those of the first step."""
    rollouts_save_path: str | None = None
    """Directory for the rollouts of save_traces, in open-instruct's format. By default rollouts in output_dir."""
    record: bool = True
    """Write the record of the run to record/ in output_dir: every response, with its tokens,
    log-probabilities of engine and learner, verdicts, and what became of it (docs/reference/record.md).
    `python -m open_instruct.watch` shows it."""
    watch: bool = False
    """Serve the page of the run (python -m open_instruct.watch) on this machine until the run ends, and print its address."""
    record_keep_steps: int = limited(-1, Limits(1, never_means="all"))
    """Newest training steps whose responses the record keeps. -1: all."""
    health: bool = True
    """Look at the metrics of each step with the rules of health (docs/start/what_to_watch.md). What a rule finds is told in the
    log, on the live line, under alerts in metrics.jsonl, and in the table at the end."""
    health_modules: list[str] = field(default_factory=list)
    """Files (.py) or modules with further rules of health; open_instruct/health/rule.py says how to write one."""


@dataclass(kw_only=True)
class DeadlineOptions:
    """Deadlines"""

    placement_timeout_s: float = limited(50.0, POSITIVE)
    """Seconds that the cluster has to make room for learners and engines."""
    init_timeout_s: float = limited(3600.0, POSITIVE)
    """Seconds that engines and learners have to get ready, to connect with each other, and to write or read a checkpoint: enough
    for models of 70 B parameters on shared storage."""
    progress_timeout_s: float = limited(1800.0, POSITIVE)
    """Seconds without a batch that is ready to train on, after which the run ends and says what it waited for."""
    weight_sync_timeout_s: float = limited(600.0, POSITIVE)
    """Seconds that new weights have to reach every engine, in one attempt."""
    max_sync_retries: int = limited(3, NOT_NEGATIVE)
    """Further attempts after a weight update that failed. An engine that still lacks the new weights then is restarted."""
    sync_retry_delay: float = limited(1.0, NOT_NEGATIVE)
    """Seconds before each further attempt at a weight update."""
    logprob_mismatch_limit: float | None = limited(None, POSITIVE)
    """Largest allowed difference between the log-probs of engine and learner for the same weights: of any single token in float32
    (by default 0.001), on average over tokens in 16 bits (by default 0.1). A new engine is compared before it serves, and the run
    ends if the difference is larger. Later steps are compared if all their tokens, and the keys and values that these attended
    to, are of the version that is trained (max_sample_age 0 and kv_age/max 0)."""
    logprob_mismatch_action: Literal["stop", "warn"] = "stop"
    """What happens when a later step breaks logprob_mismatch_limit. stop: the run ends; warn: the run goes on, with a warning."""
    engine_stall_timeout_s: float = limited(300.0, POSITIVE)
    """Seconds that an engine with work may go without a step before it counts as dead. Time of a weight update does not count."""
    stopped_timeout_s: float = limited(12.0, POSITIVE)
    """Seconds that a process of the run may be stopped (SIGSTOP, a debugger, a frozen container). Then a stopped engine is
    replaced, and any other stopped process ends the run with a message that names it. A busy process is not a stopped one."""
    max_engine_restarts: int = limited(3, NOT_NEGATIVE)
    """Restarts of engines that died, in one run; one more death ends the run. 0: the first death ends it."""
    eval_timeout_s: float = limited(1800.0, POSITIVE)
    """Seconds that an evaluation may take until all its results are there."""


@dataclass(kw_only=True)
class TrackingOptions:
    """Tracking"""

    with_tracking: bool = False
    """Send the metrics to wandb as well; offline where there is no network or no key."""
    report_to: list[Literal["wandb", "tensorboard", "trackio", "mlflow", "swanlab"]] = field(default_factory=list)
    """Trackers to which the metrics are sent as well (docs/guides/tracking.md), such as trackio tensorboard."""
    metrics_port: int | None = limited(None, Limits(0, 65535))
    """Port of http://127.0.0.1:PORT/metrics, with the newest value of each metric for Prometheus. 0: one that is free."""
    metrics_host: str = "127.0.0.1"
    """Host of metrics_port. Whoever reaches it can read the metrics."""
    otlp_traces_endpoint: str | None = None
    """Where the life of each training prompt is sent as an OpenTelemetry trace: http://HOST:4317 (gRPC), or
    http://HOST:4318/v1/traces (HTTP). By default nowhere."""
    wandb_project: str = "open_instruct"
    """Project in wandb, trackio and swanlab, and experiment in mlflow."""
    wandb_entity: str | None = None
    """User or team in wandb, and workspace in swanlab."""
    wandb_group_name: str | None = None
    """Group of runs in wandb, trackio and swanlab."""
    send_slack_alerts: bool = False
    """Tell a Slack channel when the run has failed. The environment's SLACK_WEBHOOK or SLACK_WEBHOOK_URL is its address."""
    alerts: list[str] = field(default_factory=list)
    """Upper limits on metrics, such as max_sample_age=3. A step with a metric above its limit gets a warning in the log and the
    key alerts in its row of metrics.jsonl."""
    statistics_interval_s: float = limited(30.0, POSITIVE)
    """Seconds from one report on the state of all components in the log to the next."""
