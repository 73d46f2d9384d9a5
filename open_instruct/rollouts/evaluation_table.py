"""The responses of an evaluation, as table rows for people and for other programs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.data.prompt_dataset import PromptDataset
from open_instruct.scored_groups import ScoredGroup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def completions(
    args: GRPOConfig, groups: Sequence[ScoredGroup], dataset: PromptDataset, tokenizer: "PreTrainedTokenizerBase"
) -> list[dict[str, Any]]:
    """A row for each response to the first `--eval_completions` prompts. `scores` are rewards.

    The columns `prompt`, `response`, `scores` and `ground_truth` are those of open-instruct's table.
    """
    limit = args.eval_completions
    chosen = [group for group in groups if group.samples][: None if limit < 0 else limit]
    return [
        {
            "prompt": tokenizer.decode(sample.prompt_ids, skip_special_tokens=False),
            "response": tokenizer.decode(sample.response_ids, skip_special_tokens=False),
            "scores": float(reward),
            "ground_truth": dataset[group.result.index].ground_truth,
            "dataset": group.dataset,
            "finish_reason": sample.finish_reason,
            "num_tokens": len(sample.response_ids),
        }
        for group in chosen
        for sample, reward in zip(group.samples, group.rewards(args.verification_reward), strict=True)
    ]
