"""Single turns: the policy answers each prompt G times, in one request to the engine."""

from typing import TYPE_CHECKING

import numpy as np

from open_instruct.data_types import PromptRequest, Sample
from open_instruct.workflows.base import SINGLE_TURN, WORKFLOWS, Context, Trajectory, Workflow

if TYPE_CHECKING:
    from open_instruct.config.grpo_config import GRPOConfig


@WORKFLOWS.register(SINGLE_TURN)
class SingleTurn(Workflow):
    """The samples are the responses to the prompt. Only verifiers reward them."""

    greedy_responses_are_alike = True

    @classmethod
    def may_reward(cls, args: "GRPOConfig") -> bool:
        return False

    async def run(self, request: PromptRequest, ctx: Context) -> Trajectory:
        prompt_ids = np.asarray(request.prompt, np.int32)
        completions = await ctx.generate(prompt_ids, request.generation_config)
        return Trajectory(
            [
                Sample(
                    prompt_ids,
                    completion.token_ids,
                    completion.logprobs,
                    completion.finish_reason,
                    completion.version_spans,
                    kv_age=completion.kv_age,
                )
                for completion in completions
            ]
        )
