"""Asks reward functions about results, and combines what they say with what the verifiers say."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.config.verifier_options import RewardFunctionSpec
from open_instruct.data.prompt_dataset import PromptDataset, PromptRow
from open_instruct.data.reward_columns import call_for
from open_instruct.data_types import Sample
from open_instruct.rewards.pool import FunctionResult, RewardFunctions
from open_instruct.rewards.run_functions import reward_functions
from open_instruct.scored_groups import FunctionRewards, Misses, judged_places
from open_instruct.verifiers.pool import default_workers
from open_instruct.verifiers.scoring_processes import Scored

NO_REWARD = "every reward function returned None"


class FunctionScoring:
    """The reward functions of a run, and what they are given.

    Args:
        column_names: the columns that any row has. A row without one gives None.
        state: the fields of `TrainerState` at this moment.
    """

    def __init__(
        self, functions: RewardFunctions, column_names: Sequence[str], state: Callable[[], Mapping[str, Any]]
    ) -> None:
        self._functions = functions
        self._column_names = tuple(column_names)
        self._state = state
        self.specs = functions.specs

    def submit(self, row: PromptRow, token_ids: list[list[int]], texts: list[str]) -> Future[list[FunctionResult]]:
        """What each function says of the responses to a row."""
        call = call_for(row, self._column_names, texts=texts, token_ids=token_ids, state=self._state())
        return self._functions.submit(call)

    def close(self) -> None:
        self._functions.close()


def function_scoring(
    args: GRPOConfig, train: PromptDataset, held_out: PromptDataset | None, version: Callable[[], int]
) -> FunctionScoring | None:
    """The reward functions of a run; None without any. `version` is the number of training steps done."""
    functions = reward_functions(args, num_processes=default_workers())
    if functions is None:
        return None
    names = {name: None for dataset in (train, held_out) if dataset is not None for name in dataset.column_names}

    def state() -> dict[str, Any]:
        global_step = version()
        epoch = global_step * args.num_unique_prompts_rollout / max(len(train), 1)
        return {"global_step": global_step, "max_steps": args.num_training_steps, "epoch": epoch}

    return FunctionScoring(functions, tuple(names), state)


def scored_by_functions(
    specs: Sequence[RewardFunctionSpec], results: Sequence[FunctionResult], *, needs_one: bool
) -> list[Scored]:
    """For each of G responses 0, or why it is not scored: a function failed, or each returned None.

    Args:
        needs_one: whether a response is not scored if each function returned None, because no verifier scores it. A function of
            weight 0 is only logged, and scores nothing.
    """
    failures = [result.failure for result in results if result.failure]
    counts = [spec.weight != 0 for spec in specs]
    together = []
    for rewards in zip(*(result.rewards for result in results), strict=True):
        scores = [reward for reward, does_count in zip(rewards, counts, strict=True) if does_count]
        nothing = needs_one and all(reward is None for reward in scores)
        failure = failures[0] if failures else NO_REWARD if nothing else None
        together.append(Scored(None if failure else 0.0, failure))
    return together


def with_functions(scored: Sequence[Scored], by_functions: Sequence[Scored]) -> list[Scored]:
    """The results of the verifiers, not scored where a function failed."""
    return [
        result if result.score is None or function.failure is None else Scored(None, function.failure, result.cost)
        for result, function in zip(scored, by_functions, strict=True)
    ]


def function_rewards(
    samples: Sequence[Sample], specs: Sequence[RewardFunctionSpec], results: Sequence[FunctionResult]
) -> tuple[FunctionRewards, ...]:
    """What each function gave to each sample: what it gave to the end of the sample's conversation. NaN is nothing."""
    places = judged_places(samples)

    def of(result: FunctionResult) -> np.ndarray:
        rewards = [None if place is None else result.rewards[place] for place in places]
        return np.array([np.nan if reward is None else reward for reward in rewards], dtype=np.float64)

    def extra(result: FunctionResult) -> dict[str, list[str]]:
        return {
            column: ["" if place is None else values[place] for place in places]
            for column, values in result.extra.items()
        }

    return tuple(
        FunctionRewards(
            spec.name, spec.weight, of(result), result.seconds, dict(result.metrics), extra(result), result.failure
        )
        for spec, result in zip(specs, results, strict=True)
    )


def nothing_from(specs: Sequence[RewardFunctionSpec], num_responses: int) -> tuple[FunctionRewards, ...]:
    """Of responses that an engine never gave: each function scores nothing."""
    return tuple(FunctionRewards(spec.name, spec.weight, np.full(num_responses, np.nan)) for spec in specs)


def misses_of(specs: Sequence[RewardFunctionSpec], results: Sequence[FunctionResult]) -> tuple[Misses, ...]:
    """For each function, how many responses it did not score, and for how many of these it failed."""
    return tuple(
        Misses(
            spec.name,
            sum(reward is None for reward in result.rewards),
            len(result.rewards) if result.failure else 0,
            is_function=True,
        )
        for spec, result in zip(specs, results, strict=True)
    )
