r"""An environment of your own: it says whether an answer is right, and gives a wrong one another try, for less.

    python examples/own_environment.py > sums.jsonl
    python open_instruct/grpo_fast.py --config conf/tiny_sums.yaml --output_dir out/own_environment \
        --dataset_mixer_list sums.jsonl 2000 --dataset_mixer_eval_list sums.jsonl 128 \
        --environment_modules examples/own_environment.py --rollout_workflow conversation \
        --max_steps 2 --per_turn_max_tokens 24 --response_length 128

Each conversation has an environment of its own, in a process of its own. It sees what the model says as text; tokens, masks and
log-probs of the conversation are kept for it. If the process dies or hangs, another one goes on from the last `dump`.

All about environments, and about tools, for which a plain function is enough: docs/guides/environments.md.
"""

import json
import random
import re
from collections.abc import Mapping
from typing import Any

from open_instruct.environments.base import ENVIRONMENTS, Ending, Environment, Observation, Opening, Turn, user_message

QUESTION = "State the final answer to the following arithmetic problem: {} =\nAnswer inside <answer></answer>."
NUM_ROWS = 2000


@ENVIRONMENTS.register("tries")
class Tries(Environment):
    """A question that may be answered several times: the first try is worth 1, the second 0.5, and so on."""

    takes_text = True  # it answers every turn; without this line only calls of its `schemas`

    def __init__(self, most_tries: int = 2, factor: float = 0.5) -> None:  # `--tool_configs` may say other numbers
        self.most_tries, self.factor = most_tries, factor
        self.num_tries, self.is_solved = 0, False

    async def reset(self, task: Mapping[str, Any], seed: int) -> Opening:
        """Begin an episode.

        Args:
            task: what the row says of the environment, with the row's `messages` and `ground_truth`.
            seed: the same for all conversations about a prompt, so that they have the same task and can be compared. This
                environment draws nothing.
        """
        self.question, self.right_answer = task["messages"][-1]["content"], str(task["answer"])
        return Opening()  # the row's messages say everything; other environments begin with some of their own

    async def step(self, turn: Turn) -> Observation:
        self.num_tries += 1
        self.is_solved = re.findall(r"<answer>\s*(-?\d+)\s*</answer>", turn.text) == [self.right_answer]
        if self.is_solved:
            return Observation(reward=self.factor ** (self.num_tries - 1), done=True)
        if self.num_tries == self.most_tries:
            return Observation(reward=0.0, done=True)
        # This step has no reward, which is not a reward of 0.
        return Observation([user_message(f"That is wrong.\n{self.question}")])

    async def finish(self) -> Ending:
        return Ending(metrics={"tries": self.num_tries, "solved": self.is_solved})  # env/tries/solved is their mean

    def dump(self) -> dict[str, Any]:
        return vars(self)  # plain values

    def load(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


if __name__ == "__main__":  # the rows: verifier `passthrough` leaves the reward to the environment
    for number in range(NUM_ROWS):
        first, second = random.Random(number).choices(range(10, 100), k=2)
        row: dict[str, Any] = {"messages": [{"role": "user", "content": QUESTION.format(f"{first} + {second}")}]}
        row |= {"dataset": "passthrough", "env_config": {"env_name": "tries", "answer": first + second}}
        print(json.dumps(row))
