"""The responses of an evaluation, as table rows for people and for other programs."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.rollouts.prompt_requests import PromptRequests
from open_instruct.scored_groups import ScoredGroup, said_by_functions
from open_instruct.verifiers.registry import right_answers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def completions(
    args: GRPOConfig, groups: Sequence[ScoredGroup], requests: PromptRequests, tokenizer: "PreTrainedTokenizerBase"
) -> list[dict[str, Any]]:
    """A row for each response to the first `--eval_completions` prompts of each evaluation set. `scores` are rewards.

    The columns `prompt`, `response`, `scores` and `ground_truth` are those of open-instruct's table. `row` identifies a prompt,
    because it is the place in the user's data. `source` is the file or data set that the row comes from, `set` is the name of the
    evaluation set, and `sample` counts the responses to a prompt from 0. `rewards` are those of reward functions; what they gave
    to `log_extra` is in further columns. `right_answers` are the answers that the verifier reads in the ground truth; empty if it
    reads none.
    """
    dataset = requests.held_out
    assert dataset is not None
    places = dataset.places
    rows = []
    for group in _first_of_each_set(groups, requests, args.eval_completions):
        index = group.result.index
        question = {
            "set": requests.evaluation_set(index).name,
            "row": places[index],
            "source": places.source_of(index),
            "ground_truth": dataset[index].ground_truth,
        }
        rows += answer_rows(group, group.rewards(args.verification_reward), question, tokenizer)
    return rows


def answer_rows(
    group: ScoredGroup, rewards: np.ndarray, question: Mapping[str, Any], tokenizer: "PreTrainedTokenizerBase"
) -> list[dict[str, Any]]:
    """The rows of `completions` for one group.

    Args:
        rewards: (G,) rewards of the samples.
        question: the columns `set`, `row`, `source` and `ground_truth`.
    """
    labels = list(right_answers(group.dataset, question["ground_truth"]))
    return [
        {
            **said_by_functions(group, number),
            "set": question["set"],
            "row": question["row"],
            "source": question["source"],
            "sample": number,
            "prompt": tokenizer.decode(sample.prompt_ids, skip_special_tokens=False),
            "response": tokenizer.decode(sample.response_ids, skip_special_tokens=False),
            "scores": float(rewards[number]),
            "ground_truth": question["ground_truth"],
            "right_answers": labels,
            "dataset": group.dataset,
            "finish_reason": sample.finish_reason,
            "num_tokens": len(sample.response_ids),
        }
        for number, sample in enumerate(group.samples)
    ]


def _first_of_each_set(groups: Sequence[ScoredGroup], requests: PromptRequests, limit: int) -> Iterator[ScoredGroup]:
    """The first groups of each set that have responses; -1 is all."""
    counts: Counter[str] = Counter()
    for group in groups:
        name = requests.evaluation_set(group.result.index).name
        if group.samples and (limit < 0 or counts[name] < limit):
            counts[name] += 1
            yield group
