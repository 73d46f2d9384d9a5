"""GRPO from Python: the same options, checks and loop as the command line.

    from open_instruct import GRPO

    def short(completions, **kwargs):
        return [-len(text) for text in completions]

    result = GRPO("Qwen/Qwen3-0.6B", train=[{"prompt": "Say hello."}], rewards=[short], output_dir="out").train()

Rows and functions that other processes cannot read are written below `output_dir` first: `data/`, `reward_functions/`.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from open_instruct.config.cli import Refused, UsageError, make_config, no_such_option
from open_instruct.config.extensions import MODULE_OPTIONS, config_class_with
from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.data.reward_columns import json_values
from open_instruct.data.run_inputs import RunInputs
from open_instruct.grpo_fast import run
from open_instruct.registry import option_kinds
from open_instruct.report.metrics_file import read_metrics
from open_instruct.report.run_log import METRICS_FILE, SUMMARY_FILE
from open_instruct.report.run_summary import RunSummary, read_summary
from open_instruct.rewards.targets import is_target, targets_of
from open_instruct.run.checked_inputs import loaded_inputs, settled, validators
from open_instruct.run.run_saving import MODEL
from open_instruct.storage.atomic_file import write_atomically
from open_instruct.system.interruption import EXIT_INTERRUPTED, EXIT_PREEMPTED

Rows = str | Path | Iterable[object]
"""A file, a directory or a hub name; or rows, such as a list of dictionaries or a `datasets.Dataset`."""


class RunFailed(RuntimeError):
    """The run has failed; the log says why."""


@dataclass(frozen=True)
class GRPOResult:
    """What a run has left."""

    output_dir: Path
    model_dir: Path
    """The trained model, in the format of Hugging Face."""
    metrics: dict[str, Any]
    """The metrics of the last step; empty if nothing was trained, as with `dry_run`."""
    summary: RunSummary | None
    """The table at the end of the run; None if nothing was trained."""


class GRPO:
    """A run of GRPO.

    Args:
        model: name or directory of the model, as `--model_name_or_path`.
        train: the rows to train on.
        rewards: reward functions (TRL's signature), names such as `my_rewards.py:right`, and at most one name of a verifier.
        output_dir: where the run writes. A run that was interrupted goes on from here.
        eval: the rows to evaluate on; None: there is no evaluation.
        reward_weights: a weight for each reward function; None: 1 for each.
        options: any option of the command line, under its name: `learning_rate=1e-6`.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        train: Rows,
        rewards: Sequence[Callable[..., Any] | str] | Callable[..., Any] | str = (),
        output_dir: str | Path = "output",
        eval: Rows | None = None,
        reward_weights: Sequence[float] | None = None,
        **options: Any,
    ) -> None:
        self._model = str(model)
        self._output_dir = Path(output_dir)
        self._rows = {"dataset_mixer_list": _lasting(train)}
        if eval is not None:
            self._rows["dataset_mixer_eval_list"] = _lasting(eval)
        self._rewards = [rewards] if isinstance(rewards, str) or callable(rewards) else list(rewards)
        self._weights = None if reward_weights is None else [float(weight) for weight in reward_weights]
        self._options = options

    def train(self) -> GRPOResult:
        """The whole run, or the rest of one that was interrupted. Ray is started for it and ended after it.

        Raises:
            ValueError: options, rows or reward functions cannot be used. The message holds all mistakes.
            KeyboardInterrupt: a signal ended the run. The same call goes on from its checkpoint.
            RunFailed: the run has failed.
        """
        try:
            args, inputs = self._checked()
            code = run(args, inputs)
        except UsageError as error:
            raise ValueError(str(error)) from error
        except Refused as error:
            raise ValueError("\n".join(error.mistakes)) from error
        if code in (EXIT_INTERRUPTED, EXIT_PREEMPTED):
            raise KeyboardInterrupt(f"the run was interrupted; the same call goes on from {args.output_dir}")
        if code:
            raise RunFailed(f"the run has failed: {args.output_dir}/logs/driver.log says why")
        return self._result()

    def _checked(self) -> tuple[GRPOConfig, RunInputs]:
        """Options and data, checked as those of the command line are. Raises `UsageError`."""
        modules = {name: list(self._options.get(name, [])) for name in MODULE_OPTIONS}
        config_cls, mistakes = config_class_with(modules)
        names = list(option_kinds(config_cls))
        mistakes += [no_such_option(name, names, prefix="") for name in self._options if name not in names]
        mistakes += self._given_twice()
        inputs: list[RunInputs] = []
        args = make_config(
            config_cls,
            self._written(names),
            validators=[lambda _: mistakes, *validators(inputs)],
        )
        args = settled(args)
        return args, loaded_inputs(args, inputs)

    def _given_twice(self) -> list[str]:
        has_verifier = any(isinstance(reward, str) and not is_target(reward) for reward in self._rewards)
        arguments = {
            "model_name_or_path": "model",
            "dataset_mixer_list": "train",
            "dataset_mixer_eval_list": "eval" if "dataset_mixer_eval_list" in self._rows else "",
            "reward_funcs": "rewards" if self._rewards else "",
            "default_verifier": "rewards" if has_verifier else "",
        }
        return [
            f"{option}: it is given as {argument} too. Leave one of them out."
            for option, argument in arguments.items()
            if argument and option in self._options
        ]

    def _written(self, names: Sequence[str]) -> dict[str, Any]:
        """The options as a file of options would hold them. Writes rows and functions into files."""
        functions = [reward for reward in self._rewards if not isinstance(reward, str) or is_target(reward)]
        verifiers = [reward for reward in self._rewards if isinstance(reward, str) and not is_target(reward)]
        if len(verifiers) > 1:
            text = ", ".join(map(repr, verifiers))
            raise ValueError(
                f"rewards: {text} are verifiers. Name several in the column 'dataset' of each row instead."
            )
        options: dict[str, Any] = {
            "model_name_or_path": self._model,
            "output_dir": str(self._output_dir),
            **{flag: [self._source(flag, rows), "1.0"] for flag, rows in self._rows.items()},
            **({"default_verifier": verifiers[0]} if verifiers else {}),
        }
        if functions:
            try:
                options["reward_funcs"] = targets_of(functions, self._output_dir / "reward_functions")
            except OSError as error:
                raise self._not_written(error) from error
        if self._weights is not None:
            options["reward_weights"] = self._weights
        return options | {name: value for name, value in self._options.items() if name in names}

    def _source(self, flag: str, rows: Rows) -> str:
        """The name of the rows. Rows in memory are written into a file."""
        if isinstance(rows, str | Path):
            return str(rows)
        name = "eval" if "eval" in flag else "train"
        if isinstance(rows, Mapping):
            keys = ", ".join(map(repr, rows))
            raise ValueError(f"{name}: a {type(rows).__name__} has no rows. Give one of its values: {keys}.")
        lines = []
        for number, row in enumerate(rows, start=1):
            if not isinstance(row, Mapping):
                raise ValueError(
                    f"{name}: row {number} is {type(row).__name__}. Give dictionaries, each with a 'prompt'."
                )
            lines.append(json.dumps(json_values(row), ensure_ascii=False) + "\n")
        path = self._output_dir / "data" / f"{name}.jsonl"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, "".join(lines).encode(errors="surrogatepass"))
        except OSError as error:
            raise self._not_written(error) from error
        return str(path)

    def _not_written(self, error: OSError) -> ValueError:
        return ValueError(f"output_dir {self._output_dir}: it cannot be written ({error.strerror}).")

    def _result(self) -> GRPOResult:
        metrics_file, summary_file = self._output_dir / METRICS_FILE, self._output_dir / SUMMARY_FILE
        rows = list(read_metrics(metrics_file)) if metrics_file.exists() else []
        summary = read_summary(summary_file) if summary_file.exists() else None
        return GRPOResult(self._output_dir, self._output_dir / MODEL, rows[-1] if rows else {}, summary)


def _lasting(rows: Rows) -> Rows:
    """The rows, so that they can be read again when the run goes on: an iterator gives its rows once."""
    return list(rows) if isinstance(rows, Iterator) else rows
