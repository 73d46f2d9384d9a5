"""Writes what a run's record holds in the formats that other programs and people read.

    python -m open_instruct.export output --form transcripts              text that shows who wrote what and what is trained on
    python -m open_instruct.export output --form rollouts --to rollouts/  open-instruct's rollouts
    python -m open_instruct.export output --form samples --steps 10-20    what is trained on, for --dataset_mixer_list
    python -m open_instruct.export output --form completions              answers of evaluations

The files are those of --save_traces and of --eval_completions, with the same contents. They go into the run's directory unless
--to names another one.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.data.run_tokenizer import read_tokenizer
from open_instruct.record.groups import ReadGroup, groups_of
from open_instruct.record.reader import NoRecord, RunRecord, TornFile
from open_instruct.report.metrics_file import write_lines
from open_instruct.rollouts.evaluation_table import answer_rows
from open_instruct.rollouts.step_exports import STEP_FORMS, StepExports
from open_instruct.system.command_output import exit_code_of
from open_instruct.system.counted import counted
from open_instruct.verifiers.registry import import_verifiers

COMPLETIONS = "completions"
FORMS = *reversed(STEP_FORMS), COMPLETIONS


class NothingToExport(ValueError):
    """The text says why, and what to do."""


def main(argv: Sequence[str] | None = None) -> int:
    """Export. Returns the exit code: 0, or 2 if there is nothing to export."""
    options = _parser().parse_args(argv)
    directory = Path(options.to or options.directory)
    try:
        if directory.exists() and not directory.is_dir():
            raise NothingToExport(f"--to {directory} is a file. Give a directory.")
        record = RunRecord(options.directory)
        there = _versions(record) if options.form == COMPLETIONS else record.steps()
        steps = _chosen(record, there, options.steps)
        args = _options_of(record, directory)
        torn = [error for step in steps for error in _export(record, step, args, options.form)]
        if len(torn) >= len(steps):
            raise torn[0]
    except (NoRecord, NothingToExport, OSError) as error:
        problem = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else error
        print(f"export: {problem}", file=sys.stderr)
        return 2
    for error in torn:
        print(f"export: {error}", file=sys.stderr)
    num_steps = counted(len(steps) - len(torn), "step")
    print(f"{options.form} of {num_steps} in {directory / options.form}")
    return 0


def _export(record: RunRecord, step: int, args: GRPOConfig, form: str) -> list[TornFile]:
    """Export a step, or the evaluations of a version. Returns why it could not, if its file is torn."""
    try:
        (_export_evaluation if form == COMPLETIONS else _export_step)(record, step, args, form)
    except TornFile as error:
        return [error]
    return []


def _export_step(record: RunRecord, step: int, args: GRPOConfig, form: str) -> None:
    tokenizer = read_tokenizer(args.tokenizer_name, args.revision_of_tokenizer, args.tokenizer_setup)
    StepExports(args, None, tokenizer, forms={form}).committed(step, record.samples(step))


def _export_evaluation(record: RunRecord, version: int, args: GRPOConfig, form: str) -> None:
    """Write the answers of the evaluations at a version, of each set those to its first `--eval_completions` prompts."""
    import_verifiers(args.verifier_modules, args.verifier_config)
    names = [file.set for file in record.evaluations() if file.version == version]
    sets = [list(groups_of(record.evaluation(version, name))) for name in names]
    limit = args.eval_completions
    chosen = [entry for entries in sets for entry in sorted(entries, key=_index)[: None if limit < 0 else limit]]
    tokenizer = read_tokenizer(args.tokenizer_name, args.revision_of_tokenizer, args.tokenizer_setup)
    rows = []
    for entry in sorted(chosen, key=_index):
        question = {"set": entry.set, "row": entry.row, "source": entry.source, "ground_truth": entry.ground_truth}
        rows += answer_rows(entry.group, entry.group.rewards(1.0), question, tokenizer)
    write_lines(Path(args.output_dir) / form / f"step_{version:06d}.jsonl", rows)


def _index(entry: ReadGroup) -> int:
    return entry.group.result.index


def _versions(record: RunRecord) -> list[int]:
    """The versions that were evaluated."""
    return sorted({file.version for file in record.evaluations()})


def _chosen(record: RunRecord, there: list[int], text: str | None) -> list[int]:
    """The steps that were asked for, of those that are there; all without a text."""
    steps = there
    if text is not None:
        first, last = _ends(text)
        steps = [step for step in steps if first <= step and (last is None or step <= last)]
        if steps and last is not None and last > there[-1] and first < last:
            print(f"export: --steps {text}: the record ends at {there[-1]}", file=sys.stderr)
    if not steps:
        has = f"it has {there[0]} to {there[-1]}" if there else "it has none"
        raise NothingToExport(f"{record.output_dir}: the record has no such step; {has}.")
    return steps


def _ends(text: str) -> tuple[int, int | None]:
    """The first and the last step that a text names; None: to the end."""
    first, hyphen, last = text.partition("-")
    if not (first.isdigit() and (last.isdigit() or not last)):
        raise NothingToExport(f"--steps {text}: give a number, or two with a - between them, such as 10-20, or 10-.")
    if last and int(last) < int(first):
        raise NothingToExport(f"--steps {text} is reversed: --steps {last}-{first}.")
    return int(first), int(last) if last else None if hyphen else int(first)


def _options_of(record: RunRecord, directory: Path) -> GRPOConfig:
    """The run's options, with `directory` in place of its output directory."""
    in_force = record.options().get("in_force", {})
    if not in_force:
        raise NothingToExport(f"{record.output_dir} has no options.json, which says how the run was started.")
    names = {option.name for option in fields(GRPOConfig) if option.init}
    values = {name: value for name, value in in_force.items() if name in names}
    return GRPOConfig(**values | {"output_dir": str(directory), "rollouts_save_path": None})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", help="the run's --output_dir")
    parser.add_argument("--form", choices=FORMS, required=True)
    parser.add_argument("--steps", help="one step, or the first and the last: 10-20, or 10- to the end")
    parser.add_argument("--to", help="directory to write to")
    return parser


if __name__ == "__main__":
    raise SystemExit(exit_code_of(main))
