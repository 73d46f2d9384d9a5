"""Rollout policies of reasoning-cache rollouts: how a finished turn becomes a training sample.

`actor.solution_rollout_policy` and `actor.summarization_rollout_policy` each name a policy by dotted path. A user's own policy
must have the signature of `turns.RolloutPolicy`.
"""

import numpy as np

from open_instruct.workflows.rc.turns import FinishedTurn, Score
from open_instruct.workflows.rc.types import REASONING, TrainingText


async def generate_math_rollout(turn: FinishedTurn, score: Score) -> TrainingText:
    """A reasoning turn gets the verifier's score of its answer as reward. A summary gets no reward."""
    reward: float | None = None
    metadata: dict[str, object] = {}
    if turn.turn_type == REASONING:
        has_answer = bool(turn.answer.strip())
        reward = await score(turn.problem, turn.generation.token_ids, turn.answer) if has_answer else 0.0
        if not has_answer:
            metadata["no_answer"] = True
    return to_training_text(turn, reward, metadata)


def to_training_text(turn: FinishedTurn, reward: float | None, metadata: dict[str, object]) -> TrainingText:
    """The turn as a sample with this reward. `InferenceProblemState` completes its `metadata`."""
    return TrainingText(
        text=turn.text,
        prompt_ids=np.asarray(turn.request.prompt_ids, np.int32),
        response_ids=np.asarray(turn.generation.token_ids, np.int32),
        logprobs=np.asarray(turn.generation.logprobs, np.float32),
        reward=reward,
        finished=turn.generation.finished,
        metadata=metadata,
    )
