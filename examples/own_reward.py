r"""Rewards of your own, as TRL takes them: functions of a prompt's completions and of the columns of its row.

    python examples/own_reward.py > questions.jsonl
    python open_instruct/grpo_fast.py --config conf/tiny_sums.yaml --output_dir out/own_reward \
        --dataset_mixer_list questions.jsonl 2000 --dataset_mixer_eval_list questions.jsonl 128 \
        --reward_funcs examples/own_reward.py:right examples/own_reward.py:brief --reward_weights 1 0.1

A row has a `prompt` and whatever columns the functions ask for by name; here `answer`. Its reward is the weighted sum of what the
functions give, and `rewards/right/mean`, `rewards/brief/mean` are metrics of their own. Rewards may have any size and sign.

Each function has processes of its own, may read files and ask servers, and may be `async`. More: docs/guides/verifiers.md.
"""

import json
import random
import re
from typing import Any

Completion = list[dict[str, str]]
"""The last turn of the model, as a message. Where the prompt of a row is a text, a completion is a text too."""
QUESTION = "State the final answer to the following arithmetic problem: {} + {} =\nAnswer inside <answer></answer>."
NUM_ROWS = 2000


def right(completions: list[Completion], answer: list[int | None], **columns: Any) -> list[float | None]:
    """1 for the right number in answer tags, and nothing else in tags.

    Args:
        completions: the answers to one prompt.
        answer: the column of the row, once for each completion.
        columns: the other columns, `prompts`, `completion_ids` and `trainer_state`.

    Returns:
        A reward for each completion; None where this function has nothing to say.
    """
    rewards: list[float | None] = []
    for completion, number in zip(completions, answer, strict=True):
        answers = re.findall(r"<answer>\s*(-?\d+)\s*</answer>", completion[-1]["content"])
        rewards.append(None if number is None else float(answers == [str(number)]))
    return rewards


def brief(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Minus 1 for every ten tokens."""
    return [-len(token_ids) / 10 for token_ids in completion_ids]


if __name__ == "__main__":  # the rows
    for seed in range(NUM_ROWS):
        first, second = random.Random(seed).choices(range(10, 100), k=2)
        messages = [{"role": "user", "content": QUESTION.format(first, second)}]
        print(json.dumps({"prompt": messages, "answer": first + second}))
