"""Views of whole runs: which there are, their options, and what went wrong in them."""

import importlib
import importlib.util
from typing import Any

from open_instruct.watch.mistakes import Mistake
from open_instruct.watch.runs import OPTIONS_FILE, Run, Runs
from open_instruct.watch.samples import ends, rows_of, table_of_evaluation
from open_instruct.watch.states import end_of, state_of
from open_instruct.watch.torn_files import TornFiles
from open_instruct.watch.views_curves import without_undone

MOST_WARNINGS = 200
"""Warnings that `health` gives, the newest."""


def runs(runs: Runs) -> list[dict[str, Any]]:
    """The runs that were found: state, model, step, reward, newest evaluations."""
    return [_summary(run, number) for number, run in enumerate(runs.refresh())]


def _summary(run: Run, number: int) -> dict[str, Any]:
    metrics, starts, options, torn = run.metrics(), run.starts(), run.options(), TornFiles()
    step = metrics.steps[-1] if metrics.steps else None
    state = state_of(run.directory, starts) if run.has_record else "no record"
    return {
        "run": number,
        "directory": str(run.directory),
        "name": run.option("run_name") or run.directory.name,
        "state": state,
        "end": end_of(state, starts),
        "starts": len(starts),
        "model": run.option("model_name_or_path"),
        "step": step,
        "num_steps": num_steps(run),
        "reward": None if step is None else metrics.value("all_groups/scores", step),
        "evaluations": _evaluations(run, torn),
        "command": options.get("command"),
        "torn": torn.sentences,
    }


def num_steps(run: Run) -> int | None:
    """Training steps that the run is to do; None if its options are not known."""
    names = ("total_episodes", "num_unique_prompts_rollout", "num_samples_per_prompt_rollout")
    episodes, prompts, samples = (run.option(name) for name in names)
    return None if None in (episodes, prompts, samples) else episodes // (prompts * samples)


def _evaluations(run: Run, torn: TornFiles) -> dict[str, dict[str, Any]]:
    """The newest evaluation of each set that can be read."""
    newest: dict[str, dict[str, Any]] = {}
    for file in reversed(run.record.evaluations() if run.has_record else []):
        if file.set not in newest:
            version, name = file.version, file.set
            entry = torn.read(lambda v=version, n=name: _evaluation(run, v, n), None)
            newest |= {} if entry is None else {name: entry}
    return dict(sorted(newest.items(), key=lambda pair: (pair[1]["version"], pair[0])))


def _evaluation(run: Run, version: int, set_name: str) -> dict[str, Any]:
    rewards = [row["reward"] for row in ends(rows_of(table_of_evaluation(run, version, set_name)))]
    reward = sum(rewards) / len(rewards) if rewards and None not in rewards else None
    return {"version": version, "share": share_right(run, version, set_name), "reward": reward}


def share_right(run: Run, version: int, set_name: str) -> float | None:
    """Share of right responses, prompts weighed the same; None if only reward functions score."""
    rows = ends(rows_of(table_of_evaluation(run, version, set_name)))
    by_prompt: dict[str, list[bool | None]] = {}
    for row in rows:
        by_prompt.setdefault(row["prompt_id"], []).append(row["is_right"])
    if not by_prompt or any(right is None for rights in by_prompt.values() for right in rights):
        return None
    return sum(sum(map(bool, rights)) / len(rights) for rights in by_prompt.values()) / len(by_prompt)


def options(runs: Runs, *, run: int = 0, other: int | None = None) -> list[dict[str, Any]]:
    """The options in force, first those that were given on the command line; with `other` those that differ from that run."""
    own = _options(runs[run])
    if other is None:
        return [{"name": name, **entry, "other": None} for name, entry in own.items()]
    second = _options(runs[other])
    missing = {"value": None, "given": False, "derived": False}
    pairs = [(name, own.get(name, missing), second.get(name, missing)) for name in dict.fromkeys([*own, *second])]
    return [{"name": name, **a, "other": b["value"]} for name, a, b in pairs if a["value"] != b["value"]]


def _options(run: Run) -> dict[str, dict[str, Any]]:
    content = run.options()
    if "in_force" not in content:
        path = run.directory / OPTIONS_FILE
        problem = "is broken: copy it again" if path.exists() else "is not there: a run writes it at its start"
        raise Mistake(f"{path} {problem}.")
    own, computed = content.get("given", {}), content.get("derived", {})
    names = sorted(content["in_force"], key=lambda name: (name not in own, name not in computed))
    return {
        name: {"value": content["in_force"][name], "given": name in own, "derived": name in computed} for name in names
    }


def health(runs: Runs, *, run: int = 0) -> dict[str, Any]:
    """What the rules of health found while the run went on, and the newest warnings of its log."""
    events = without_undone(runs[run].events())
    rules = _rules()
    metrics = {rule.name: rule.metrics[0] for rule in rules if rule.metrics}
    return {
        "alarms": [
            {name: event.get(name) for name in ("rule", "step", "text", "cure", "link")}
            | {"metric": metrics.get(event["rule"])}
            for event in events
            if event["kind"] == "health"
        ],
        "rules": [
            {
                "name": rule.name,
                "fires_when": rule.fires_when,
                "text": (rule.function.__doc__ or "").strip(),
                "cure": rule.cure,
            }
            for rule in rules
        ],
        "warnings": [
            {"unix": event["unix"], "level": event.get("level"), "text": event.get("text")}
            for event in events
            if event["kind"] == "warning"
        ][-MOST_WARNINGS:],
    }


def _rules() -> list[Any]:
    """The rules of health of this installation."""
    if importlib.util.find_spec("open_instruct.health") is None:
        return []
    return importlib.import_module("open_instruct.health").all_rules()
