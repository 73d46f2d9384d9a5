r"""A workflow of your own: some prompts are answered from the middle of a draft, so that only its ending is compared.

    python open_instruct/grpo_fast.py --config conf/tiny_sums.yaml --output_dir out/own_workflow \
        --workflow_modules examples/own_workflow.py --rollout_workflow from_the_middle --draft_share 0.5

    prompt ──► draft ──► cut at a random token ──► G endings of the first part: one group, whose members differ only from there on

A group's mean reward is then what the first part is worth, so advantages say what the *ending* added to it. That is what a value
model would estimate for each token, had from samples alone (compare VinePPO, arXiv:2410.01679).

`run` is all that a workflow needs. Queues, staleness, restarts and checkpoints see samples, and know no workflow by name.
All about workflows: docs/guides/workflows.md; one with games and two seats: docs/guides/self_play.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from open_instruct.data_types import Completion, PromptRequest, Sample
from open_instruct.option_limits import SHARE, limited
from open_instruct.scored_groups import ScoredGroup
from open_instruct.workflows.base import WORKFLOWS, Context, Trajectory, Workflow


@dataclass(kw_only=True)
class FromTheMiddleOptions:
    """From the middle"""  # the heading of these options in --help

    draft_share: float = limited(0.5, SHARE)
    """Share of the training prompts that are answered from the middle of a draft. The others are answered as usual."""


@WORKFLOWS.register("from_the_middle", options=FromTheMiddleOptions)
class FromTheMiddle(Workflow):
    """The first part of a draft is in the response, where the verifier sees it, but is not trained on."""

    async def run(self, request: PromptRequest, ctx: Context) -> Trajectory:
        """Chance comes from `ctx`, so that a prompt that is rolled out again after a failure has the same draft and cut."""
        sampling, start, version = request.generation_config, np.zeros(0, np.int32), 0
        if not request.is_eval and ctx.random(name="whether").random() < self.options.draft_share:
            (draft,) = await ctx.generate(request.prompt, replace(sampling, n=1), name="draft")
            start = draft.token_ids[: ctx.random(name="cut").randrange(len(draft.token_ids))]  # never its end token
            version = draft.version_spans[0][0]
        rest = replace(sampling, max_tokens=sampling.max_tokens - len(start))
        endings = await ctx.generate(np.concatenate([request.prompt, start]), rest)
        samples = [joined(request.prompt, start, version, ending) for ending in endings]
        return Trajectory(samples, notes=len(start))

    def metrics(self, rollouts: Sequence[ScoredGroup], groups: Sequence[ScoredGroup]) -> dict[str, float]:
        """Of the rollouts of a training step, with the notes that `run` has sent along."""
        counts = [rollout.result.notes for rollout in rollouts]
        return {"from_the_middle/given_tokens": sum(counts) / len(counts)} if counts else {}


def joined(prompt: np.ndarray, start: np.ndarray, version: int, ending: Completion) -> Sample:
    """The sample of a response that begins with tokens that are given: these are masked, and their log-probs 0."""
    return Sample(
        prompt_ids=prompt,
        response_ids=np.concatenate([start, ending.token_ids]),
        logprobs=np.concatenate([np.zeros(len(start), np.float32), ending.logprobs]),
        loss_mask=np.arange(len(start) + len(ending.token_ids)) >= len(start),
        finish_reason=ending.finish_reason,
        version_spans=[*([(version, len(start))] if len(start) else []), *ending.version_spans],
    )
