"""The options of `--rollout_workflow rc`, and what is wrong with them."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from open_instruct.option_limits import COUNT, NOT_NEGATIVE, limited
from open_instruct.option_text import shown
from open_instruct.workflows.rc.plans import PlanOptions
from open_instruct.workflows.rc.prompts import (
    REASONING_FIELDS,
    REASONING_TEMPLATE,
    SUMMARIZATION_FIELDS,
    SUMMARIZATION_TEMPLATE,
    ReasoningPart,
    read_template,
    required_of_summaries,
    template_mistakes,
)
from open_instruct.workflows.rc.state import RCSettings
from open_instruct.workflows.rc.types import SUMMARIZATION, SummaryReward
from open_instruct.workflows.rc.weights import parse_turn_weights

if TYPE_CHECKING:
    from open_instruct.config.grpo_config import GRPOConfig

TEMPLATES = "rc_reasoning_prompt_template", "rc_summarization_prompt_template"


@dataclass(kw_only=True)
class ReasoningCacheOptions:
    """Reasoning cache"""

    rc_num_reasoning_steps: int = limited(3, COUNT)
    """Cycles of a trajectory."""
    rc_train_on: Literal["states", "turns"] = "states"
    """states: at each drawn state (after 0, 1, … summaries) num_samples_per_prompt_rollout fresh reasoning turns are sampled and
    compared. turns: the turns of num_samples_per_prompt_rollout trajectories are compared by type and number (their prompts
    differ)."""
    rc_states_per_problem: int = limited(2, COUNT)
    """States that are drawn for a prompt, each at most once."""
    rc_reasoning_prompt_template: str = REASONING_TEMPLATE
    """Prompt of a reasoning turn, with {problem} and {curr_summary}; file:PATH reads it from a file."""
    rc_summarization_prompt_template: str = SUMMARIZATION_TEMPLATE
    """Prompt of a summary, with {problem}, {existing_summary} and {reasoning}."""
    rc_max_summary_tokens: int = limited(256, COUNT)
    """Longest summary, in tokens. A reasoning turn may have response_length tokens."""
    rc_use_think_tags: bool = False
    """Begin reasoning turns with <think>. Then only the text after the thought counts as the answer."""
    rc_reasoning_for_summary: ReasoningPart = "thoughts"
    """The part of a reasoning turn that its summary is made from, if the turn has think tags."""
    rc_summarization_style: Literal["replace", "append"] = "replace"
    """A summary takes the place of the summary before, or is added to it."""
    rc_truncated_summary: Literal["keep", "keep_previous"] = "keep"
    """What to do with a summary that was cut off at its limit."""
    rc_summary_reward: SummaryReward = "none"
    """none: summaries are not trained. zero: they are trained with reward 0 (the KL alone acts on them; needs
    filter_zero_std_samples False). downstream_mean: with the mean score of the reasoning turns that they led to."""
    rc_summary_samples: int = limited(4, COUNT)
    """Summaries that are sampled and compared on the way to each drawn state, with rc_train_on states and trained summaries."""
    rc_turn_weights: list[str] = field(default_factory=list)
    """Weights in the loss by turn, such as reasoning:3=2.0 summarization=0.5; 0 leaves a turn out. By default 1."""
    rc_buffer_size: int = limited(0, NOT_NEGATIVE)
    """States of earlier rollouts that are kept, so that later rollouts can begin at them. 0: none."""
    rc_buffer_states_per_problem: int = limited(4, COUNT)
    """Most kept states of one prompt."""
    rc_max_state_age: int | None = limited(None, NOT_NEGATIVE)
    """Age, in weight versions, past which a kept state is thrown away. By default no limit."""
    rc_eval_num_reasoning_steps: int | None = limited(None, COUNT)
    """Cycles in evaluation. By default rc_num_reasoning_steps."""

    @property
    def rc_trains_summaries(self) -> bool:
        return self.rc_summary_reward != "none"

    @property
    def rc_num_trained_summaries(self) -> int:
        """`RCPlan.num_summaries` of a training prompt."""
        return self.rc_summary_samples if self.rc_trains_summaries else 0

    @property
    def rc_settings(self) -> RCSettings:
        """How turns are made. Sampling, seed and number of cycles come from each prompt instead.

        Raises `OSError` or `UnicodeDecodeError` for a template whose file cannot be read.
        """
        return RCSettings(
            num_reasoning_steps=self.rc_num_reasoning_steps,
            reasoning_prompt_template=read_template(self.rc_reasoning_prompt_template),
            summarization_prompt_template=read_template(self.rc_summarization_prompt_template),
            max_reasoning_tokens=0,
            max_summary_tokens=self.rc_max_summary_tokens,
            use_think_tags=self.rc_use_think_tags,
            reasoning_for_summary=self.rc_reasoning_for_summary,
            summarization_style=self.rc_summarization_style,
            truncated_summary=self.rc_truncated_summary,
        )

    @property
    def rc_plans(self) -> PlanOptions:
        """The options that decide what each prompt asks of the reasoning cache."""
        return PlanOptions(
            num_cycles=self.rc_num_reasoning_steps,
            states_per_problem=self.rc_states_per_problem if self.rc_train_on == "states" else 0,
            num_summaries=self.rc_num_trained_summaries,
            eval_num_cycles=self.rc_eval_num_reasoning_steps or self.rc_num_reasoning_steps,
            buffer_size=self.rc_buffer_size,
            buffer_states_per_problem=self.rc_buffer_states_per_problem,
            max_state_age=self.rc_max_state_age,
        )


def rc_states_are_there(args: "GRPOConfig") -> Iterator[str]:
    if args.rc_train_on == "states" and args.rc_states_per_problem > args.rc_num_reasoning_steps:
        options = shown(args, "rc_states_per_problem", "rc_num_reasoning_steps")
        yield f"{options}: a trajectory has a state before each of its cycles. Ask for {args.rc_num_reasoning_steps} or fewer."
    if args.rc_train_on == "turns" and args.rc_buffer_size:
        options = shown(args, "rc_train_on", "rc_buffer_size")
        yield (
            f"{options}: with rc_train_on turns every trajectory begins at the beginning, so no state is kept. Set "
            "rc_buffer_size to 0, or rc_train_on to states."
        )


def rc_templates_have_their_fields(args: "GRPOConfig") -> Iterator[str]:
    for name, fields, required in (
        ("rc_reasoning_prompt_template", REASONING_FIELDS, REASONING_FIELDS),
        (
            "rc_summarization_prompt_template",
            SUMMARIZATION_FIELDS,
            required_of_summaries(args.rc_summarization_style),
        ),
    ):
        try:
            template = read_template(getattr(args, name))
        except (OSError, UnicodeDecodeError) as error:
            yield f"--{name}: it cannot be read ({getattr(error, 'strerror', None) or error}). Check the path."
            continue
        for mistake in template_mistakes(template, fields=fields, required=required):
            yield f"--{name}: {mistake}"


def rc_weights_can_be_read(args: "GRPOConfig") -> Iterator[str]:
    try:
        weights = parse_turn_weights(args.rc_turn_weights)
    except ValueError as error:
        yield f"{shown(args, 'rc_turn_weights')}: {error}."
        return
    if not args.rc_trains_summaries and any(kind == SUMMARIZATION and w for (kind, _), w in weights.items()):
        options = shown(args, "rc_turn_weights", "rc_summary_reward")
        yield f"{options}: summaries are not trained. Set rc_summary_reward, or leave out their weights."


def rc_problems_are_one_message(args: "GRPOConfig") -> Iterator[str]:
    if args.system_prompt_override_file is not None:
        options = shown(args, "rollout_workflow", "system_prompt_override_file")
        yield f"{options}: a turn's prompt is a template with the problem in it. Put the system prompt's text into the templates."


def rc_summaries_can_be_compared(args: "GRPOConfig") -> Iterator[str]:
    if args.rc_trains_summaries and args.rc_train_on == "states" and args.rc_summary_samples == 1:
        options = shown(args, "rc_summary_reward", "rc_summary_samples")
        yield f"{options}: a summary is compared with other summaries, and there are none. Give 2 or more."
    if args.rc_summary_reward == "zero" and (args.filter_zero_std_samples or args.beta == 0):
        options = shown(args, "rc_summary_reward", "filter_zero_std_samples", "beta")
        yield (
            f"{options}: summaries that all score 0 are moved by the KL alone. Set filter_zero_std_samples to False and beta "
            "above 0, or rc_summary_reward to none."
        )


RULES = (
    rc_states_are_there,
    rc_templates_have_their_fields,
    rc_weights_can_be_read,
    rc_problems_are_one_message,
    rc_summaries_can_be_compared,
)
