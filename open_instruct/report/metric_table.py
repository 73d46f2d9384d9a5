"""Every name that a run reports under, and what it means: the metrics of rows, what `/metrics` has beside them, and the spans of
a prompt's life. `metric_names.py` makes docs/reference/metrics.md from it.

`<…>` in a name stands for a part that varies. Names that open-instruct has too mean the same; where they do not, `differs` says
how.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """One metric, or one for every value of the `<…>` in its name."""

    name: str
    meaning: str
    differs: str = ""
    """From open-instruct's metric of this name."""

    def matches(self, key: str) -> bool:
        """Whether a key of a row is this metric. `<a|b>` is one of these, `<…>` anything."""
        parts = re.split(r"(<[^>]*>)", self.name)
        return re.fullmatch("".join(map(_pattern, parts)), key) is not None


def _pattern(part: str) -> str:
    if not part.startswith("<"):
        return re.escape(part)
    return f"(?:{re.escape(part[1:-1]).replace(chr(92) + '|', '|')})" if "|" in part else r"\S+"


SECTIONS: dict[str, list[Metric]] = {
    "Progress": [
        Metric("training_step", "training steps, from 1; a row 0 holds the evaluation before training"),
        Metric("episode", "responses that were to be trained on so far: steps × prompts × responses"),
        Metric("global_step", "the same as `episode`"),
        Metric(
            "epoch",
            "passes over the training data so far: prompts that the steps so far trained on or dropped, and rows that were "
            "skipped (`--no_resampling_pass_rate`), divided by the rows of the data",
            "there `episode` / responses per prompt / rows",
        ),
        Metric("lr", "learning rate of the step"),
        Metric(
            "val/num_step_tokens",
            "tokens of prompts (each once) and responses of the groups that the step trained on, masked responses included",
        ),
        Metric("val/num_step_response_tokens", "of these the responses"),
        Metric("val/num_total_tokens", "sum of `val/num_step_tokens` so far", "there without the step itself"),
        Metric("val/num_total_response_tokens", "sum of `val/num_step_response_tokens` so far"),
        Metric("learner_tokens_per_second_step", "`val/num_step_tokens` per second of `time/total`"),
        Metric("learner_tokens_per_second_overall", "the same over the whole run"),
        Metric(
            "learner_response_tokens_per_second_<step|overall>", "the same, responses alone: the live line's tokens/s"
        ),
        Metric(
            "val/actor_tokens_per_second", "tokens of prompts and responses / seconds of the slowest group trained on"
        ),
        Metric(
            "engines/tokens_per_second", "response tokens of finished groups of all engines per second of wall time"
        ),
    ],
    "Rewards": [
        Metric("scores", "mean reward, after shaping"),
        Metric("objective/<verifier>_reward", "mean of score × weight × `--verification_reward`"),
        Metric("objective/verifiable_reward", "the same over all verifiers"),
        Metric("objective/<verifier>_correct_rate", "share of responses with a score above 0"),
        Metric("objective/verifiable_correct_rate", "the same over all verifiers"),
        Metric("objective/<verifier>_solved_rate", "share of responses with a score of 1"),
        Metric("objective/verifiable_solved_rate", "the same over all verifiers"),
        Metric("val/format_scores", "share of responses in the right form", "there the mean reward of the form"),
        Metric(
            "objective/not_scored",
            "responses that were not scored, of all groups that the step took, and of the groups that no step took since the row "
            "before, because too few of their responses were scored or because they were too old",
        ),
        Metric("objective/verifier_failures", "of these those for which a verifier raised an error"),
        Metric("objective/<verifier>_not_scored", "responses of the same groups that this verifier did not score"),
        Metric("objective/<verifier>_failures", "of these those for which it raised an error"),
        Metric("objective/environment_reward", "what environments gave beside the verifier, mean over the responses"),
        Metric(
            "rewards/<function>/<mean|std>",
            "of the rewards that a function of `--reward_funcs` gave, without its weight, over the responses that it scored",
        ),
        Metric("rewards/<function>/time", "seconds that it computed for the responses to one prompt, mean"),
        Metric("rewards/<function>/not_scored", "responses for which it gave None or no number, of the same groups"),
        Metric("rewards/<function>/failures", "of these those for which it raised an error, or was ended"),
        Metric("rewards/<function>/logged/<…>", "what it gave to `log_metric`, mean over the groups"),
        Metric("objective/verifier_cost", "US dollars that scoring the same groups cost, where it cost something"),
        Metric("unscored_groups", "groups of which too few responses were scored, in this process so far"),
        Metric(
            "all_groups/<scores|objective/…|rewards/…|val/…>",
            "the same over all groups that the step took, also those that it left out. Groups that no step took are in no mean: "
            "their generation failed, too few of their responses were scored, or they were too old",
        ),
        Metric(
            "all_groups/scores_standard_error",
            "standard error of `all_groups/scores`: two steps differ by chance by about as much. From the groups' mean rewards; "
            "absent with one group",
        ),
        Metric(
            "all_groups/percent_solved_mean",
            "share of right responses over all groups: score, or environments' reward, 1",
        ),
        Metric(
            "all_groups/total_prompts", "groups that the step took: `batch/total_prompts` and `batch/filtered_prompts`"
        ),
    ],
    "Batches": [
        Metric("batch/total_prompts", "groups that the step trained on"),
        Metric("batch/filtered_prompts", "groups that the step took and left out (`zero_std`, `masked`)"),
        Metric(
            "batch/filtered_prompts_<zero|solved|nonzero>",
            "of these, where all rewards are alike: with all scores 0, with all scores 1, and the others",
            "there by the reward",
        ),
        Metric("batch/filtered_prompts_pct", "share of these among the groups that the step took, 0 to 1"),
        Metric(
            "batch/no_resampled_prompts",
            "groups whose mean reward is `--no_resampling_pass_rate` of the highest or more, or whose share of right responses "
            "is, where environments give rewards",
        ),
        Metric("batch/percent_solved_<mean|hist>", "mean score of each group, 0 to 1", "there of shaped rewards"),
        Metric("val/solve_rate_hist", "the same as `batch/percent_solved_hist`"),
        Metric("val/total_reward_groups", "groups that the step trained on"),
        Metric("batch/<prompt_lengths|response_lengths>", "histogram"),
        Metric("batch/<prompt|response>_lengths_mean", "mean of the same"),
        Metric("batch/per_group_generation_times", "histogram"),
        Metric("batch/unsolved_groups_ratio", "share of groups without a right answer"),
        Metric("batch/num_partial_batches", "pieces in which the step reached the learners (`--streaming`)"),
        Metric("real_batch_size_ratio", "groups trained on / `--num_unique_prompts_rollout`"),
        Metric("unsolved_batch_size_ratio", "share of responses with a score below 1"),
        Metric("packed_ratio", "packed rows / samples: lower is better packed"),
        Metric("packed_fill_ratio", "tokens of samples / tokens computed; over 1 where samples share a prompt"),
        Metric("val/sequence_lengths", "mean response length"),
        Metric("val/sequence_lengths_<min|max>", "shortest and longest response"),
        Metric(
            "val/sequence_lengths_<solved|unsolved>",
            "mean length with score 1, and with score 0",
            "there 0 if there is none",
        ),
        Metric("val/sequence_lengths_<solved|unsolved>_hist", "histogram of the same"),
        Metric("val/stop_rate", "share of responses that ended by themselves"),
        Metric("val/advantages_<mean|min|max>", "over the responses that the step trained on"),
        Metric("val/advantages_hist", "histogram of the same"),
        Metric("stale_results_dropped", "groups thrown away for their age since the step before"),
    ],
    "Age of the data": [
        Metric("model_step_<min|mean|max>", "oldest, mean and newest version that sampled what is trained on"),
        Metric(
            "kv_age/<mean|max>",
            "of responses: the version that sampled the newest token minus the oldest whose keys and values it attended to. "
            "Too high where vLLM let a request wait past an update, because keys and values count from the request's admission "
            "on. Too low at most for a block that only a running request uses, once as many other blocks as the cache holds were "
            "used meanwhile",
        ),
        Metric("num_steps_off_policy", "mean age of the groups in steps; 0 is on policy"),
        Metric("num_steps_off_policy_max", "age of the oldest group: never above the bound, `--max_staleness_allowed`"),
        Metric("<avg|min|max>_sample_age", "age of a sample's oldest trained token in steps"),
        Metric("stale_samples_ratio", "share of samples older than one step"),
        Metric("version_diversity", "versions among the trained tokens"),
        Metric("freshness/<avg_sample_age|max_sample_age|min_sample_age|stale_samples_ratio>", "the same again"),
        Metric("freshness/avg_token_age", "each trained token at its own version"),
        Metric("freshness/<avg|max>_sample_latency", "seconds from a sample's generation to its training"),
        Metric(
            "over_issue/num_stragglers",
            "groups left to later steps so far (`--over_issued_prompts`), also those that were too old then",
        ),
        Metric(
            "over_issue/response_length_<taken|left>", "mean response length of groups that steps took first, and left"
        ),
    ],
    "Loss and policy": [
        Metric(
            "loss/policy_avg",
            "policy part of the loss, divided as `--loss_denominator` says",
            "there always a mean over tokens, with `--num_epochs` that of the last pass",
        ),
        Metric(
            "loss/<kl|ce|distillation>_avg",
            "its other parts, where there are any, with their weights: KL divided as `--kl_denominator` says, cross-entropy "
            "by the inserted tokens, distillation like the policy part",
            "there means over tokens",
        ),
        Metric("loss/total_avg", "the loss that is minimised: the sum of these", "there scaled for the backward pass"),
        Metric("objective/kl<0|1|2|3|4>_avg", "estimators of the KL to the reference policy"),
        Metric("objective/teacher_kl_avg", "KL to the teacher"),
        Metric(
            "policy/clipfrac_avg",
            "share of tokens whose ratio is clipped",
            "there without tokens that a correction masks",
        ),
        Metric("policy/dual_clipfrac_avg", "share of tokens at the second clip (`--clip_ratio_c`)"),
        Metric("policy/entropy_avg", "mean entropy per token, always"),
        Metric("val/ratio", "mean ratio of new to old probability"),
        Metric(
            "val/ratio_<var|spread>",
            "over tokens: variance, and largest deviation",
            "there between means of micro-batches",
        ),
        Metric("val/rho_weight", "mean weight of the engine-learner correction"),
        Metric("val/rho_<clipfrac|drop_frac|drop_low_frac|drop_high_frac>", "shares of tokens that it caps or drops"),
        Metric("val/off_policy_drop_frac", "share of tokens that `--off_policy_mask_threshold` drops"),
        Metric("val/teacher_top_k_mass", "probability in the teacher's top K"),
        Metric("optim/grad_norm", "norm of the gradient before clipping"),
        Metric(
            "optim/<nonfinite_steps|skipped_steps>",
            "optimizer steps left out: gradient not finite; also without a token",
        ),
        Metric(
            "debug/vllm_vs_local_logprob_diff_<mean|max|std>", "engine's against learner's log-probabilities, absolute"
        ),
        Metric(
            "debug/vllm_local_reverse_kl", "mean of engine's minus learner's", "there weighted by probability once more"
        ),
    ],
    "Sources and environments": [
        Metric("source/<name>/groups", "groups generated for the step from this source"),
        Metric("source/<name>/share", "its share of the groups trained on"),
        Metric(
            "source/<name>/scores",
            "mean reward over its responses; absent, like the next three, in a step without a group of it",
        ),
        Metric("source/<name>/<solved|zero>", "share of its groups in which every response is right, or scored 0"),
        Metric("source/<name>/length", "mean response length"),
        Metric(
            "environment/<name>/<groups|share|scores|solved|zero|length>", "as of a source, over the rows that name it"
        ),
    ],
    "Evaluation": [
        Metric("eval/scores", "mean reward"),
        Metric("eval/pass_at_1", "share of responses whose score, or environment's reward, is 1 or more"),
        Metric("eval/pass_at_1_standard_error", "of that share, by chance alone"),
        Metric("eval/pass_at_<k>", "with k responses a prompt: share of prompts with a right one (`--eval_pass_at_k`)"),
        Metric("eval/pass_at_<k>_unbiased", "estimate of the same from all responses"),
        Metric("eval/objective/<metric>", "as in training"),
        Metric(
            "eval/objective/<not_scored|verifier_failures|verifier_cost>",
            "as in training, over all prompts, also those that are left out for it",
        ),
        Metric("eval/sequence_lengths<…>", "as `val/sequence_lengths…` in training"),
        Metric("eval/sequence_lengths", "mean response length"),
        Metric("eval/<stop_rate|format_scores>", "as in training, without prompts that were given up"),
        Metric("eval/model_step_<min|mean|max>", "the version that was measured: one for a whole evaluation"),
        Metric("eval/actor_tokens_per_second", "as in training"),
        Metric("eval/response_tokens_per_second", "response tokens per second of the evaluation"),
        Metric("eval/num_given_up", "prompts that failed too often: wrong, or not scored where only functions score"),
        Metric("eval/num_not_scored", "prompts of which a response was not scored; they are left out"),
        Metric("eval/rc/<metric>", "reasoning cache: accuracy and tokens by cycle, as means over trajectories"),
        Metric("eval/<set>/num_prompts", "prompts of one set (`--eval_sets`) that were measured"),
        Metric(
            "eval/<set>/<metric>",
            "every metric above except versions, speeds and histograms, over the prompts of one set",
        ),
    ],
    "Time": [
        Metric("time/total", "the step, from the end of the step before"),
        Metric("time/training", "waiting for data and training"),
        Metric("time/trainer_waiting_for_data", "waiting for data"),
        Metric("time/learners", "waiting for the learners once all data is there"),
        Metric("time/learner_compute", "the slowest learner at work"),
        Metric("time/<forward_backward|optimizer>", "its parts"),
        Metric("time/weight_sync", "sending weights"),
        Metric("time/weight_sync_<mean|min|max|median>", "over the sends since the row before", "there over learners"),
        Metric("time/engine_pause_<mean|min|max|median>", "how long engines stood still for it"),
        Metric("time/generation", "first to last sample of the step"),
        Metric("time/group_generation_<mean|min|max>", "groups trained on"),
        Metric("time/verification", "scoring of the last group"),
        Metric("time/packing", "making batches"),
        Metric("time/saving", "writing checkpoints, in rows where one was written"),
        Metric("time/eval", "an evaluation up to its last result; it runs beside training"),
        Metric("time/waiting_for_evaluation", "training stood still for it"),
        Metric("time/<engines|learners>_<offload|onload>", "handing devices over (`--colocate`)"),
        Metric(
            "agent_loop/<generate_sequences|tool_calls|compute_score>/<min|max|mean|p50|p95>",
            "over all groups that the step took; `tool_calls` is the time in which nothing of the group was generated",
        ),
        Metric(
            "agent_loop/num_preempted/<min|max|mean|p50|p95>", "of groups whose engine counts preemptions; ours do not"
        ),
        Metric("agent_loop/slowest/<what>", "the slowest group: its phases, lengths, prompt and engine"),
        Metric("engines/busy_share", "share of time in engine steps"),
        Metric("engines/slowest_share", "of several: tokens a busy second of the slowest / median, over 20 steps"),
        Metric("engines/<asleep_s|num_sleeps>", "sleeping engines, since their start"),
    ],
    "Memory": [
        Metric("memory/learner_bytes_max", "in use after the step, on the learner with most"),
        Metric("memory/learner_peak_bytes", "at the peak of the step"),
        Metric("memory/<engines_released|engines_offloaded|learners_offloaded>_bytes", "given back meanwhile"),
        Metric("storage/<checkpoint|free>_bytes", "after a checkpoint: its size, and the room that its disk has left"),
    ],
    "Queues and counts": [
        Metric("prompts/<issued|consumed|reissued|open>", "fates of prompts so far"),
        Metric("prompts/dropped_<reason>", "prompts dropped so far, by reason"),
        Metric("queue/<prompts|results|waiting_results>", "items in the queues"),
        Metric(
            "queue/<size|total_produced|total_consumed|dropped_samples>", "samples in the message queue, and so far"
        ),
        Metric("queue/<memory_bytes|max_memory_bytes>", "its size, now and at most"),
        Metric("queue/<put_waits|put_wait_s>", "how often and how long the controller waited for the learners so far"),
        Metric("training/<global_step|param_version|param_sync_count>", "of the fully async policy"),
        Metric("alerts", "texts of the alerts that the row raised, by metric or `health/<rule>`"),
        Metric("current_param_version", "version of the weights that the engines were sent last"),
        Metric("is_paused", "whether no training prompt is issued now"),
        Metric("num_open_prompts", "prompts that are issued and that no step has taken"),
        Metric("queue_size", "samples in the message queue now"),
        Metric("<memory_bytes|max_memory_bytes>", "bytes in the message queue, now and at most"),
        *(
            Metric(name, "count of the fully async policy, since the start of the process")
            for name in (
                *("dropped_samples", "engine_restarts", "global_steps"),
                *("param_sync_count", "param_sync_requests", "pause_count", "processed_samples"),
                *("put_wait_s", "put_waits", "resume_count", "sync_failures", "total_consumed"),
                "total_produced",
            )
        ),
        Metric(
            "total_generated_samples",
            "samples of training that came back from the engines in this process so far, also those that were not scored or were "
            "too old; without groups whose generation failed",
        ),
        Metric(
            "dropped_stale_samples",
            "groups thrown away for their age in this process so far, times `--num_samples_per_prompt_rollout`",
        ),
        Metric(
            "generation_errors",
            "groups of training and evaluation that came back without responses, in this process so far; each attempt counts",
        ),
        Metric("generation_timeouts", "of those of training the groups that took longer than `--generation_timeout`"),
        Metric("dropped_timeouts", "training prompts that were dropped because their last attempt took too long"),
    ],
    "Evolving rubrics": [
        Metric(
            "evolving_rubrics/total_<active|inactive>", "criteria found so far that count, and that newer ones replaced"
        ),
        Metric("evolving_rubrics/num_overrides", "questions with criteria that were found"),
        Metric("evolving_rubrics/num_active_rubrics", "of these criteria the mean number per question"),
        Metric("evolving_rubrics/num_new_rubrics", "new criteria per comparison since the row before"),
        Metric("evolving_rubrics/valid_rate", "share of comparisons whose answer was understood"),
        Metric("evolving_rubrics/skipped", "comparisons without an answer that was understood"),
        Metric("evolving_rubrics/avg_gt_rubrics", "criteria of the data per comparison"),
        Metric("evolving_rubrics/cost", "US dollars for the comparisons"),
    ],
    "Conversations": [
        Metric(
            "conversations/turns",
            "turns of the model in a conversation, mean; this and the others also of groups that were left out since the row "
            "before, because too few of their conversations were scored or because they were too old",
        ),
        Metric("conversations/steps", "calls of tools and steps of environments in a conversation, mean"),
        Metric(
            "conversations/branch_rate", "share of conversations that the chat template made go on as another sample"
        ),
        Metric("conversations/restarts", "conversations of the step that began again because an environment failed"),
        Metric(
            "conversations/restores", "environments that failed and went on from their last state in a fresh process"
        ),
        Metric("conversations/shortened_answers", "answers of the step whose middle was left out"),
        Metric("conversations/tool_s", "seconds in which tools and environments computed for a conversation, mean"),
        Metric("conversations/tool_ms_per_policy_token", "the same in milliseconds for each token that was sampled"),
        Metric("conversations/slowest_environment", "name of the tool or environment whose calls took longest"),
        Metric("conversations/wait_s", "seconds in which a conversation waited for environments to begin, mean"),
        Metric(
            "conversations/ended_by_<answer|environment|steps|length>",
            "share of conversations that ended with an answer, by their environment, at `max_steps`, or at a limit of tokens",
        ),
        Metric("conversations/turn_reward", "reward of one step of an environment, mean"),
        Metric("conversations/policy_tokens", "tokens that the policy sampled in a conversation, mean"),
        Metric(
            "conversations/tool_tokens", "tokens of tools and environments, with the template's text around them, mean"
        ),
        Metric("conversations/template_tokens", "tokens of the prompts with which conversations branched, mean"),
        Metric(
            "conversations/prompt_tokens_per_policy_token",
            "tokens that engines were given, over all turns, for each token that they sampled",
        ),
        Metric(
            "tools/<…>/avg_calls_per_rollout", "calls of a tool, or of all together (`aggregate`), in a conversation"
        ),
        Metric(
            "tools/<…>/failure_rate",
            "share of these calls that were answered with an error. Three names are for calls that no tool has carried out: "
            "`malformed` (cannot be read), `unknown` (there is no such tool) and `over_limit` (after the last of `max_steps`)",
        ),
        Metric("tools/<…>/avg_runtime", "seconds that a call took, mean"),
        Metric("tools/<…>/max_runtime", "seconds that a call took in the conversation in which they took most"),
        Metric("env/<…>/<…>", "what an environment says of its episodes at their end, mean"),
    ],
    "Of workflows": [
        Metric("rc/<metric>", "reasoning cache: states, turns and summaries"),
    ],
    "Agent programs": [
        Metric("agents/requests", "requests of a program for tokens or messages, mean over the rollouts"),
        Metric("agents/samples", "samples that a rollout became, mean"),
        Metric(
            "agents/<policy|inserted>_tokens",
            "tokens of a rollout that the model sampled, and that programs added, mean",
        ),
        Metric(
            "agents/prompt_tokens_per_policy_token",
            "tokens that engines were given, over all requests, for each token that they sampled",
        ),
        Metric("agents/program_s", "seconds in which a program ran without a request under way, mean"),
        Metric("agents/wait_s", "seconds in which a rollout waited for a place to run its program, mean"),
        Metric(
            "agents/reward_rate",
            "share of rollouts whose program printed a reward; this and the others also of groups that were left out since the "
            "row before, because too few of their rollouts were scored or because they were too old",
        ),
        Metric("agents/limit_rate", "share of rollouts that reached a limit of tokens or samples"),
        Metric("agents/refused", "requests of the step that were answered with an error"),
        Metric(
            "agents/lost", "completions of the step that the program was not there to hear; they are not trained on"
        ),
        Metric("agents/restarts", "rollouts of the step that began again because their program failed"),
    ],
}

PREFIX = "open_instruct_"
"""Beginning of every name in `/metrics`."""
RUN_INFO = Metric("run_info", "1, with run, model and output directory as labels")
LAST_ROW = Metric("last_row_timestamp_seconds", "Unix time of the newest row")
ENDPOINT = [RUN_INFO, LAST_ROW]
"""What `/metrics` has beside the metrics of rows."""

ALL_GROUPS = "all_groups/percent_solved_mean", "all_groups/scores_standard_error", "all_groups/total_prompts"
ABSENT = {
    "time/health_check": "engines and learners are watched all the time, not between steps",
    "time/generation_waiting_for_trainer": "`queue/put_wait_s`, summed up",
    "actor_mfu, actor_mbu, learner_mfu": "not computed",
    "val/rho_hist": "not computed: shares and mean are",
    "eval/num_steps_off_policy, eval/stale_results_dropped": "an evaluation has one version and drops nothing",
}
"""Metrics of open-instruct that are not here, and why."""


@dataclass(frozen=True)
class Span:
    """A part of a prompt's life in a trace."""

    name: str
    meaning: str


@dataclass(frozen=True)
class Attribute:
    """What a span says of its prompt."""

    name: str
    meaning: str


PROMPT = Span("prompt", "one attempt at a prompt, from its issue to its outcome; the trace has all attempts")
QUEUE = Span("queue", "from the issue until an engine admits it")
GENERATION = Span("generation", "from there to the last token of the group, tools and environments included")
VERIFICATION = Span("verification", "scoring")
BATCH = Span(
    "batch", "from the scores until its step is trained, or leaves the group out; its event `taken`: a step takes it"
)
SPANS = [PROMPT, QUEUE, GENERATION, VERIFICATION, BATCH]

PROMPT_ID = Attribute("prompt.id", "such as `train-17`")
ATTEMPT = Attribute("prompt.attempt", "how often the prompt had been issued before")
VERSION = Attribute("prompt.version", "version that engines had, or were about to get, at the issue")
ENGINE = Attribute("prompt.engine", "number of the engine")
OUTCOME = Attribute(
    "prompt.outcome",
    "`consumed`, why it was dropped (`zero_std`, `masked`, `too_old`, `run_ended`), `given_up` or `lost`",
)
STEP = Attribute("prompt.step", "the training step that took it")
CAUSE = Attribute("prompt.cause", "why an engine gave it up")
OLDEST_VERSION = Attribute("prompt.version.oldest", "version that sampled its oldest token")
NEWEST_VERSION = Attribute("prompt.version.newest", "version that sampled its newest token")
INPUT_TOKENS = Attribute("gen_ai.usage.input_tokens", "tokens of the prompt")
OUTPUT_TOKENS = Attribute("gen_ai.usage.output_tokens", "tokens of all its responses")
TOOL_TIME = Attribute("prompt.tool_s", "seconds in which it waited only for tools and environments")
ATTRIBUTES = [
    *(PROMPT_ID, ATTEMPT, VERSION, ENGINE, OUTCOME, STEP, CAUSE),
    *(OLDEST_VERSION, NEWEST_VERSION, INPUT_TOKENS, OUTPUT_TOKENS, TOOL_TIME),
]
