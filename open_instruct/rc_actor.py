"""Reasoning-cache (RC) rollouts against any OpenAI-compatible server: think, summarise, think again.

    python -m open_instruct.rc_actor --config-name test_rc output_dir=out/rc
    python -m open_instruct.rc_actor --config-name test_rc actor.num_reasoning_steps=5 me.llm_urls=http://localhost:8000/v1

    data sets ─► RCActorLoop ◄─► worker processes ─► HTTP servers
                     └─► output_dir/streams/actor.jsonl, one line a turn; live line; summary.json
                         for an evaluation: eval.jsonl, eval_summary.json, accuracy_by_cycle.png

The file (`conf/rc_base.yaml` holds every key) is composed by hydra. Start the same command again after an interruption:
trajectories that are in the stream are not made again. Exit codes: 0 done, 1 failed, 2 mistakes in the options, 85 ended by
SIGTERM, 130 ended by Ctrl-C.
"""

import asyncio
import hashlib
import json
import logging
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from open_instruct.config import yaml_files as yaml_door
from open_instruct.config.cli import UsageError, fail_with
from open_instruct.config.yaml_files import YamlProgram
from open_instruct.engines.openai_client import ServedModel, ServerProblem, find_model
from open_instruct.engines.server_keys import key_headers
from open_instruct.rc.actor_loop import Phase, RCActorLoop, RunFailed
from open_instruct.rc.evaluation import evaluate, format_comparison
from open_instruct.rc.options import (
    LISTED,
    RCOptions,
    RunOptions,
    SamplingOptions,
    option_keys,
    read_options,
    split_urls,
)
from open_instruct.rc.statistics import RolloutStatistics, format_rollout_table
from open_instruct.rc.stream import NotAStream, StreamWriter, read_trajectories, resume_stream
from open_instruct.rc.worker import load_dotted
from open_instruct.report.log_files import setup_logging
from open_instruct.report.plots import plot_accuracy_by_cycle
from open_instruct.report.run_summary import write_summary
from open_instruct.storage.atomic_file import write_atomically
from open_instruct.storage.output_directory import UnusableDirectory, describe, held, is_of_storage
from open_instruct.system.interruption import Interrupted, ends_by_signals, tell
from open_instruct.system.secret_masking import mask_tracebacks
from open_instruct.workflows.rc.types import Problem

logger = logging.getLogger("open_instruct.rc_actor")

PROGRAM = "rc_actor.py"
YAML_PROGRAM = YamlProgram(PROGRAM, __doc__, "rc_base", "section.key=value", option_keys, LISTED)
EVALUATION = "eval"
"""Name of the stream of an evaluation."""
POLICIES = ("solution_rollout_policy", "summarization_rollout_policy")


def main(argv: Sequence[str] | None = None) -> int:
    """Compose, check, roll out. Returns the exit code."""
    mask_tracebacks()
    with ends_by_signals():
        return _main(sys.argv[1:] if argv is None else argv)


def _main(argv: Sequence[str]) -> int:
    try:
        options = read_options(yaml_door.compose(YAML_PROGRAM, argv))
        problems = load_problems(options)
    except UsageError as error:
        fail_with(error.mistakes, program=PROGRAM)
    try:
        with held([Path(options.run.output_dir)], "output_dir"):
            return _run(options, problems)
    except UnusableDirectory as error:
        fail_with([str(error)], program=PROGRAM)


def _run(options: RCOptions, problems: Mapping[str, list[Problem]]) -> int:
    try:
        setup_logging(options.run.output_dir)
        with signals_as_exceptions():
            model = find_servers(options)
            for phase in phases(options, problems):
                run_phase(phase, options, model)
    except (RunFailed, ServerProblem) as error:
        logger.error("%s", error)
        return 1
    except NotAStream as error:
        logger.error("%s. Choose another output_dir, or move that file away.", error)
        return 1
    except OSError as error:
        if not is_of_storage(error):
            raise
        logger.error(
            "output_dir %s: %s. Make room and start the same command again.", options.run.output_dir, describe(error)
        )
        return 1
    except Interrupted as signal_received:
        logger.warning("%s: stopped. Start the same command again to go on.", signal_received)
        return signal_received.exit_code
    return 0


# --- before the run ---------------------------------------------------------------------------------------------------


def load_problems(options: RCOptions) -> dict[str, list[Problem]]:
    """Problems of the training and the test data sets. Rollout policies are checked too.

    Raises:
        UsageError: there are mistakes; it has all of them.
    """
    yaml_door.let_user_modules_be_found()
    mistakes: list[str] = []
    problems: dict[str, list[Problem]] = {"train": [], "test": []}
    for name in POLICIES:
        _tried(mistakes, f"actor.{name} ", load_dotted, getattr(options.actor, name))
    load = _tried(mistakes, "dataset_loader ", load_dotted, options.run.dataset_loader)
    test_names = options.test_dataset_names if options.run.eval_every_n_versions else []
    for kind, names in (("train", options.train_dataset_names), ("test", test_names)):
        if names and load is not None:
            problems[kind] = _tried(mistakes, f"{kind}_dataset_names: ", _problems, load, names, options.run) or []
    if mistakes:
        raise UsageError(mistakes)
    return problems


def _problems(load: Any, names: list[Any], run: RunOptions) -> list[Problem]:
    """The problems that the loader finds under these names. The loader may be the user's.

    Raises:
        ValueError: the loader fails, or returns something else.
    """
    try:
        problems = load(names, seed=run.seed)
    except ValueError:
        raise
    except Exception as error:
        logger.debug("dataset_loader", exc_info=error)
        raise ValueError(
            f"{run.dataset_loader} fails ({type(error).__name__}: {error}). It is called as load(names, seed=…)."
        ) from error
    if not isinstance(problems, list) or not all(isinstance(problem, Problem) for problem in problems):
        raise ValueError(
            f"{run.dataset_loader} gives {type(problems).__name__}, not a list of open_instruct.workflows.rc.types.Problem."
        )
    return problems


def _tried(mistakes: list[str], prefix: str, function: Any, *args: Any, **options: Any) -> Any:
    try:
        return function(*args, **options)
    except ValueError as error:
        mistakes += [prefix + line for line in str(error).splitlines()]
        return None


def find_servers(options: RCOptions) -> ServedModel:
    """The model that all servers serve, with the shortest context of all servers.

    Raises:
        ServerProblem: a server does not answer in time, or serves another model.
    """
    urls = list(dict.fromkeys([*split_urls(options.me.llm_urls), *split_urls(options.me.summarization_llm_urls)]))
    with_key = split_urls(options.me.api_key_urls)

    async def ask_all() -> list[ServedModel]:
        return await asyncio.gather(
            *(
                find_model(
                    url,
                    options.run.model_path,
                    headers=key_headers(url, with_key),
                    timeout_s=options.me.wait_for_server_s,
                )
                for url in urls
            )
        )

    models = asyncio.run(ask_all())
    if len({model.name for model in models}) > 1:
        served = ", ".join(f"{url}: {model.name}" for url, model in zip(urls, models, strict=True))
        raise ServerProblem(f"the servers call their model differently ({served}). Start them with one name.")
    lengths = [model.max_model_len for model in models if model.max_model_len]
    length = options.me.max_model_len or min(lengths, default=None)
    if length is None:
        raise ServerProblem("the servers do not say how many tokens they take. Set me.max_model_len.")
    return ServedModel(models[0].name, min([length, *lengths]))


class signals_as_exceptions:
    """SIGINT and SIGTERM raise `Interrupted` in the main thread. A second signal is left to Python."""

    def __enter__(self) -> None:
        self._before = {number: signal.signal(number, self._raise) for number in (signal.SIGINT, signal.SIGTERM)}

    def _raise(self, number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)
        raise Interrupted(number)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


# --- phases: an evaluation, and the rollouts --------------------------------------------------------------------------


def phases(options: RCOptions, problems: Mapping[str, list[Problem]]) -> Iterator[Phase]:
    """The evaluation first, if there is one; then the rollouts."""

    def phase(name: str, kind: str, sampling: SamplingOptions, **further: bool) -> Phase:
        samples = options.actor.num_samples_per_problem
        return Phase(name, problems[kind], options.settings(sampling), samples, options.run.attempts, **further)

    if problems["test"]:
        yield phase(EVALUATION, "test", options.test_llm, one_long_turn=options.actor.one_long_turn)
    if problems["train"]:
        yield phase("actor", "train", options.llm)


def run_phase(phase: Phase, options: RCOptions, model: ServedModel) -> dict[str, Any]:
    """Roll out what is not in the phase's stream yet. Returns the phase's summary, which is also written and printed."""
    output_dir = Path(options.run.output_dir)
    path = output_dir / "streams" / f"{phase.name}.jsonl"
    policies = {name: getattr(options.actor, name) for name in POLICIES}
    check_same_run(path.with_suffix(".settings.json"), phase, model, policies)
    warn_of_short_context(phase, model)
    statistics = RolloutStatistics()
    trajectory_ids = set()
    for trajectory in resume_stream(path):
        statistics.add(trajectory)
        trajectory_ids.add(trajectory[0].trajectory_id)
    if trajectory_ids:
        logger.info("%d of %d trajectories are in %s already", len(trajectory_ids), phase.num_trajectories, path)
    tokens_before = statistics.num_tokens
    with StreamWriter(path, max_entry_bytes=options.actor.shared_memory_entry_size) as stream:
        loop = RCActorLoop(phase, options, model, stream, statistics, trajectory_ids)
        loop.run()
    summary = statistics.summary(
        wall_seconds=loop.wall_seconds, tokens_of_this_run=statistics.num_tokens - tokens_before
    )
    tables = [format_rollout_table(summary)]
    if phase.name == EVALUATION:
        summary["evaluation"] = evaluate(read_trajectories(path), phase.settings.token_budgets)
        overall = summary["evaluation"]["overall"]
        tables.append(format_comparison(overall))
        plot_accuracy_by_cycle(overall, phase.settings.token_budgets, output_dir / "accuracy_by_cycle.png")
    name = "summary.json" if phase.name == "actor" else f"{phase.name}_summary.json"
    write_summary(output_dir / name, summary)
    tell("\n".join(filter(None, tables)))
    return summary


def warn_of_short_context(phase: Phase, model: ServedModel) -> None:
    """Warn if the model has no room for one long turn, because the control is then weaker than it should be."""
    budget = phase.settings.token_budgets[-1]
    assert model.max_model_len is not None
    if phase.one_long_turn and budget >= model.max_model_len:
        logger.warning(
            "actor.one_long_turn: a whole trajectory may spend %d tokens, but the model takes %d with the prompt. Longer turns "
            "are cut there; the summary counts them.",
            budget,
            model.max_model_len,
        )


def check_same_run(path: Path, phase: Phase, model: ServedModel, policies: Mapping[str, str]) -> None:
    """Check that a stream holds trajectories of the same settings and rollout policies, which lie in a file beside it.

    Raises:
        RunFailed: the stream was begun with other settings.
    """
    data = identity_of(phase.problems)
    later = {"data": data, **policies}  # earlier versions did not write them
    settings = asdict(phase.settings) | {"model": model.name, "problems": len(phase.problems)} | later
    if path.exists():
        try:
            before = {**later, **json.loads(path.read_text())}
        except (OSError, ValueError, TypeError) as error:
            raise RunFailed(f"{path}: it cannot be read ({error}). Choose another output_dir, or delete it.") from error
        changed = sorted(name for name in settings.keys() | before.keys() if settings.get(name) != before.get(name))
        if changed:
            raise RunFailed(
                f"{path.parent.parent}: holds a run with another {', '.join(changed)}. Choose another output_dir, or delete it."
            )
    write_atomically(path, json.dumps(settings).encode())


def identity_of(problems: Sequence[Problem]) -> str:
    """A hash of the problems. Their places do not count, because a file may move."""
    contents = [{name: value for name, value in asdict(problem).items() if name != "row"} for problem in problems]
    return hashlib.sha256(repr(contents).encode(errors="replace")).hexdigest()[:16]


if __name__ == "__main__":
    raise SystemExit(main())
