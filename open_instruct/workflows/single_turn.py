"""Single turns: the policy answers each prompt G times, in one request to the engine."""

import numpy as np

from open_instruct.data_types import PromptRequest, Sample
from open_instruct.workflows.base import SINGLE_TURN, WORKFLOWS, Context, Trajectory, Workflow


@WORKFLOWS.register(SINGLE_TURN)
class SingleTurn(Workflow):
    """The samples are the responses to the prompt."""

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
