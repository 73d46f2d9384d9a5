"""Tries each reward function on a row of the data before anything starts."""

from collections.abc import Collection, Iterator
from concurrent.futures import Future

from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.config.verifier_options import RewardFunctionSpec
from open_instruct.data.prompt_dataset import PromptDataset, PromptRow
from open_instruct.data.reward_columns import call_for
from open_instruct.rewards.functions import PROMPT, Description, RewardFunctionError
from open_instruct.rewards.pool import START_S, FunctionResult, RewardFunctions
from open_instruct.rewards.run_functions import reward_functions

INVENTED = "An invented answer, to try the reward function."
NUM_TRIED = 2
"""Responses of the trial, so that a function that returns one number is noticed."""


def mistakes_of_functions(
    args: GRPOConfig, train_dataset: PromptDataset, eval_dataset: PromptDataset | None
) -> list[str]:
    """What is wrong with the functions of `--reward_funcs`: they cannot be loaded, need columns that no row has, or fail on the
    first row."""
    functions = reward_functions(args, num_processes=1)
    if functions is None:
        return []
    datasets = {"dataset_mixer_list": train_dataset}
    if eval_dataset is not None:
        datasets["dataset_mixer_eval_list"] = eval_dataset
    try:
        futures = functions.describe()
        mistakes = [
            mistake
            for spec, future in zip(functions.specs, futures, strict=True)
            for mistake in _mistakes(args, spec, future, datasets)
        ]
        names = {name for dataset in datasets.values() for name in dataset.column_names}
        return mistakes or list(_mistakes_of_trial(args, functions, train_dataset[0], names))
    finally:
        functions.close()


def _mistakes(
    args: GRPOConfig, spec: RewardFunctionSpec, future: Future[Description], datasets: dict[str, PromptDataset]
) -> Iterator[str]:
    flag = f"--reward_funcs {spec.target}"
    try:
        description = future.result(timeout=START_S + 10)
    except RewardFunctionError as error:
        yield f"{flag}: {error}."
        return
    if args.reward_jail and description.is_async:
        yield f"{flag}: it is async, and in the jail there is no server to wait for. Leave out --reward_jail."
    for option, dataset in datasets.items():
        columns = [name for name in dataset.column_names if name != PROMPT]
        if missing := [name for name in description.needed if name not in columns]:
            yield (
                f"{flag}: it needs {_in_words(missing)}, and the rows of --{option} have no such column. They have: "
                f"{', '.join(columns) or 'none'}."
            )


def _mistakes_of_trial(
    args: GRPOConfig, functions: RewardFunctions, row: PromptRow, column_names: Collection[str]
) -> Iterator[str]:
    """Calls each function as `FunctionScoring` does in the run."""
    texts, token_ids, state = [INVENTED] * NUM_TRIED, [[0]] * NUM_TRIED, {"max_steps": args.num_training_steps}
    call = call_for(row, column_names, texts=texts, token_ids=token_ids, state=state)
    results: list[FunctionResult] = functions.submit(call).result(timeout=args.reward_timeout_s + START_S)
    for spec, result in zip(functions.specs, results, strict=True):
        if result.failure:
            why = result.failure.removeprefix("error: ").removeprefix(f"{spec.name}: ")
            if why.startswith("timeout"):
                why = f"it took longer than --reward_timeout_s {args.reward_timeout_s:g}"
            yield f"--reward_funcs {spec.target}: tried with {row.place} and the response {INVENTED!r}: {why}."


def _in_words(columns: list[str]) -> str:
    names = ", ".join(map(repr, columns))
    return f"the column {names}" if len(columns) == 1 else f"the columns {names}"
