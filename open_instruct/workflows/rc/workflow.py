"""The reasoning cache as a workflow (`--rollout_workflow rc`): cycles of a reasoning turn and its summary.

`plans` decides what a prompt asks for, `rollouts` takes the turns of a plan, and `rewards` scores the turns.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from open_instruct.chat_codec import ChatCodec
from open_instruct.data_types import PromptRequest, Sample
from open_instruct.scored_groups import ScoredGroup
from open_instruct.workflows.base import WORKFLOWS, Context, Lengths, OwnPrompt, RolloutFailed, Trajectory, Workflow
from open_instruct.workflows.rc.options import RULES, TEMPLATES, ReasoningCacheOptions
from open_instruct.workflows.rc.plans import RCPlanner
from open_instruct.workflows.rc.prompts import read_template
from open_instruct.workflows.rc.rewards import (
    answer_to_judge,
    evaluation_metrics,
    last_turns,
    rewards_of_turns,
    rollout_metrics,
)
from open_instruct.workflows.rc.rollouts import keep_versions, roll_out
from open_instruct.workflows.rc.state import InferenceProblemState
from open_instruct.workflows.rc.turns import RCTurns
from open_instruct.workflows.rc.types import (
    REASONING,
    SUMMARIZATION,
    Generation,
    Problem,
    PromptTooLong,
    RCPlan,
    ReachedState,
    TurnRequest,
)
from open_instruct.workflows.rc.weights import parse_turn_weights

if TYPE_CHECKING:
    from open_instruct.config.grpo_config import GRPOConfig
    from open_instruct.data.prompt_dataset import PromptRow


@WORKFLOWS.register("rc", options=ReasoningCacheOptions)
class ReasoningCache(Workflow):
    """The samples are reasoning turns and, with `--rc_summary_reward`, summaries. The notes are the states that were reached."""

    prompts_are_of_the_data = False
    adds_rewards = False
    greedy_responses_are_alike = True
    length_options = ("rc_max_summary_tokens",)
    identity_options = (
        "rc_num_reasoning_steps",
        "rc_train_on",
        "rc_states_per_problem",
        "rc_max_summary_tokens",
        "rc_use_think_tags",
        "rc_reasoning_for_summary",
        "rc_summarization_style",
        "rc_truncated_summary",
        "rc_summary_reward",
        "rc_summary_samples",
    )

    def __init__(self, options: ReasoningCacheOptions) -> None:
        super().__init__(options)
        self._settings = options.rc_settings
        self._weights = parse_turn_weights(options.rc_turn_weights)
        self._planner = RCPlanner(options.rc_plans)

    # --- in the driver ------------------------------------------------------------------------------------------------

    @classmethod
    def mistakes(cls, args: "GRPOConfig") -> Iterator[str]:
        for rule in RULES:
            yield from rule(args)

    @classmethod
    def may_reward(cls, args: "GRPOConfig") -> bool:
        return False

    @classmethod
    def prepared(cls, options: ReasoningCacheOptions) -> ReasoningCacheOptions:
        return replace(
            options,
            rc_reasoning_prompt_template=read_template(options.rc_reasoning_prompt_template),
            rc_summarization_prompt_template=read_template(options.rc_summarization_prompt_template),
        )

    @classmethod
    def identity_texts(cls, options: ReasoningCacheOptions) -> dict[str, str]:
        return {name: read_template(getattr(options, name)) for name in TEMPLATES}

    @classmethod
    def lengths(cls, args: "GRPOConfig") -> Lengths:
        """A summary is made from the reasoning and the previous summary, so its prompt contains both."""
        summary, samples = args.rc_max_summary_tokens, args.num_samples_per_prompt_rollout
        ways = args.rc_num_trained_summaries
        if args.rc_train_on == "states":
            num_samples = args.rc_states_per_problem * (samples * max(ways, 1) + ways)
        else:
            num_samples = samples * (2 * args.rc_num_reasoning_steps - 1 if ways else args.rc_num_reasoning_steps)
        trained_summaries = 2 if args.rc_trains_summaries else 1
        sequence = args.max_prompt_token_length + args.longest_response + 2 * summary
        return Lengths(
            prompt=sequence,
            response=max(args.response_length, summary),
            sequence=sequence,
            trained=args.max_prompt_token_length + args.response_length + trained_summaries * summary,
            samples=num_samples,
        )

    def own_prompt(self, messages: Sequence[Mapping[str, str]], codec: ChatCodec) -> OwnPrompt:
        """The problem in the template of the first reasoning turn. The problem must fit into the reasoning and the summarization
        template, so `num_tokens` is the length of the longer of the two prompts."""
        if [message["role"] for message in messages] != ["user"]:
            raise ValueError("the reasoning cache takes one user message, the problem")
        problem = messages[0]["content"]
        state = InferenceProblemState(Problem("", problem, None, "", ""), self._settings)
        opens_think = self._settings.use_think_tags
        reasoning = codec.chat_prompt(state.get_filled_reasoning_prompt(), opens_think=opens_think)
        summarization = codec.chat_prompt(state.get_filled_summarization_prompt())
        return OwnPrompt(problem, reasoning, max(len(reasoning), len(summarization)))

    # --- in the controller --------------------------------------------------------------------------------------------

    def task(
        self, row: "PromptRow", row_number: int, *, prompt_id: str, version: int, seed: int, is_eval: bool
    ) -> RCPlan:
        if is_eval:
            return self._planner.evaluation_plan(row.raw_query)
        return self._planner.training_plan(prompt_id, row_number, row.raw_query, version=version, seed=seed)

    def answer(self, text: str) -> str:
        return answer_to_judge(text, opens_think=self._settings.use_think_tags)

    def rewards(self, samples: Sequence[Sample], scores: Sequence[float | None]) -> list[float | None]:
        return rewards_of_turns(samples, scores, self.options.rc_summary_reward)

    def arrived(self, prompt_id: str, notes: Any) -> None:
        self._planner.arrived(prompt_id, tuple(ReachedState(**state) for state in notes))

    def dropped(self, prompt_id: str) -> None:
        self._planner.dropped(prompt_id)

    def metrics(self, rollouts: Sequence[ScoredGroup], groups: Sequence[ScoredGroup]) -> dict[str, float]:
        return rollout_metrics(rollouts, groups) | self._planner.metrics()

    def evaluated(self, rollouts: Sequence[ScoredGroup]) -> Sequence[ScoredGroup]:
        return last_turns(rollouts)

    def evaluation_metrics(self, rollouts: Sequence[ScoredGroup]) -> dict[str, float]:
        return evaluation_metrics(rollouts)

    def state_dict(self) -> dict[str, Any]:
        return self._planner.state_dict()

    def load_state_dict(self, state: dict[str, Any] | list[dict[str, Any]]) -> None:
        self._planner.load_state_dict(state)

    # --- in an engine -------------------------------------------------------------------------------------------------

    async def run(self, request: PromptRequest, ctx: Context) -> Trajectory:
        config, codec = request.generation_config, ctx.codec
        settings = replace(
            self._settings,
            max_reasoning_tokens=config.max_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            seed=config.seed or 0,
        )

        async def generate(turn: TurnRequest) -> Generation:
            sampling = replace(
                config,
                n=1,
                max_tokens=turn.max_tokens,
                temperature=turn.temperature,
                top_p=turn.top_p,
                seed=turn.seed,
            )
            (completion,) = await ctx.generate(turn.prompt_ids, sampling, name=turn.name)
            token_ids = completion.token_ids.tolist()
            return Generation(
                text=codec.decode(token_ids),
                token_ids=token_ids,
                logprobs=completion.logprobs.tolist(),
                finish_reason=completion.finish_reason,
                version_spans=completion.version_spans,
                kv_age=completion.kv_age,
            )

        turns = RCTurns(
            generate=generate,
            codec=codec,
            policies={REASONING: keep_versions, SUMMARIZATION: keep_versions},
            score=_nobody_scores,
            # training must not use the engine's room for longer evaluations, because `lengths` promises shorter samples
            max_model_len=min(
                ctx.max_model_len, ctx.max_prompt_tokens + config.max_tokens + 2 * settings.max_summary_tokens
            ),
        )
        try:
            rollout = await roll_out(turns, request.task, settings, config.n, _key_of_seeds(request), self._weights)
        except PromptTooLong as error:
            raise RolloutFailed(f"PromptTooLong: {error}") from error
        return Trajectory(rollout.samples, [asdict(state) for state in rollout.states])


def _key_of_seeds(request: PromptRequest) -> str:
    """The key on which the seeds of turns depend in addition to the prompt's seed. In an evaluation both are the same at every
    version, so that two evaluations differ only by their weights."""
    return f"eval-0-{request.index}" if request.is_eval else request.prompt_id


async def _nobody_scores(*_: object) -> float:
    raise AssertionError("verifiers score, after the rollout")
