"""The view of metrics over steps, with marks for what happened."""

import math
import re
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

from open_instruct.watch.metrics_table import MetricsTable
from open_instruct.watch.mistakes import Mistake
from open_instruct.watch.runs import Run, Runs

GROUPS: dict[str, list[tuple[str, str]]] = {
    "learning": [
        ("all_groups/scores", "reward"),
        ("all_groups/percent_solved_mean", "share of right responses"),
        ("all_groups/val/sequence_lengths", "response length"),
        ("all_groups/val/stop_rate", "responses that ended by themselves"),
        ("batch/filtered_prompts_pct", "share of groups left out"),
        ("policy/entropy_avg", "entropy"),
        ("loss/total_avg", "loss"),
        ("lr", "learning rate"),
    ],
    "evaluation": [
        ("eval/pass_at_1", "evaluation: share right"),
        ("eval/scores", "evaluation: reward"),
        ("eval/<set>/pass_at_1", "<set>: share right"),
        ("eval/<set>/scores", "<set>: reward"),
        ("eval/<set>/sequence_lengths", "<set>: response length"),
    ],
    "stability": [
        ("debug/vllm_vs_local_logprob_diff_mean", "engine-learner difference of log-probs"),
        ("debug/vllm_vs_local_logprob_diff_max", "largest engine-learner difference"),
        ("optim/grad_norm", "gradient norm"),
        ("policy/clipfrac_avg", "share of clipped tokens"),
        ("val/ratio", "ratio"),
        ("val/rho_weight", "correction"),
        ("objective/kl2_avg", "KL to the reference"),
        ("num_steps_off_policy", "age of groups"),
        ("num_steps_off_policy_max", "age of the oldest group"),
        ("objective/not_scored", "responses not scored"),
    ],
    "speed": [
        ("learner_response_tokens_per_second_step", "tokens per second"),
        ("time/total", "seconds of the step"),
        ("time/trainer_waiting_for_data", "seconds waiting for data"),
        ("time/learners", "seconds of the learners"),
        ("time/weight_sync", "seconds of the weight sync"),
        ("time/verification", "seconds of scoring"),
        ("engines/busy_share", "engines: share of busy time"),
        ("memory/learner_peak_bytes", "learner memory"),
    ],
}
"""Metrics of the page, with their labels. `<set>` stands for each evaluation set."""
TOKENS = "val/num_total_tokens"
OF_STEPS = ("step", "sync", "checkpoint", "model", "health")
"""Events that a resumed run has again."""
MOST_OF_AN_END = 10
"""Values at the beginning and at the end of a run from which `change` is told."""
LONGEST_TEXT = 300
"""Characters of a mark."""


def curves(
    runs: Runs, *, run: int = 0, names: list[str] | None = None, steps: list[str] | None = None
) -> dict[str, Any]:
    """Metrics by step, in four groups, and marks. `names`: metrics, labels, or parts of them; by default those of the page.
    `steps`: steps, or ranges such as 10-40; by default all. With `names` also how the metrics changed."""
    watched = runs[run]
    table = watched.metrics()
    problem = None if table.exists else "the run has no metrics.jsonl, which it writes with its first step."
    if problem and names:
        raise Mistake(problem)
    groups = {group: list(_present(entries, table)) for group, entries in GROUPS.items()}
    labels = {entry["name"]: entry["label"] for entries in groups.values() for entry in entries}
    chosen = (
        list(labels)
        if not names
        else [*dict.fromkeys(name for part in names for name in matching(part, labels, table))]
    )
    places = places_of(steps, table.steps)
    own = {table.steps[at] for at in places}
    ends = {event["step"]: event["unix"] for event in watched.events() if event["kind"] == "step"}
    tokens = table.column(TOKENS) if TOKENS in table.names() else [None] * len(table.steps)
    values = {name: [table.column(name)[at] for at in places] for name in chosen}
    return {
        "change": {name: change(values[name]) for name in chosen} if names else {},
        "step": [table.steps[at] for at in places],
        "unix": [ends.get(table.steps[at]) for at in places],
        "tokens": [tokens[at] for at in places],
        "groups": {
            group: own_entries
            for group, entries in groups.items()
            if (own_entries := [entry for entry in entries if entry["name"] in chosen]) or not names
        },
        "values": values,
        "others": [] if names else [name for name in table.names() if name not in labels],
        "marks": [mark for mark in marks(watched) if not steps or mark["step"] in own],
        "problem": problem,
    }


def change(values: Sequence[float | None]) -> dict[str, Any]:
    """Means of the first and of the last tenth of the values, 10 at most; what is absent does not count."""
    numbers = [value for value in values if value is not None and not math.isnan(value)]
    count = max(1, min(MOST_OF_AN_END, len(numbers) // 10))
    first, last = (fmean(part) if part else None for part in (numbers[:count], numbers[-count:]))
    return {"first": first, "last": last, "of": min(count, len(numbers))}


def places_of(texts: list[str] | None, steps: Sequence[int]) -> list[int]:
    """The positions of the steps that are named, such as `10` or `10-40`; of all without a text. Raises `Mistake`."""
    if not texts:
        return list(range(len(steps)))
    places: set[int] = set()
    for text in texts:
        match = re.fullmatch(r"(\d+)(-?)(\d*)", text)
        if match is None or (match[3] and not match[2]):
            raise Mistake(f"steps has to be steps, such as 10,40 or 10-40, not {text!r}.")
        first, last = int(match[1]), float(match[3] or ("inf" if match[2] else match[1]))
        fitting = {at for at, step in enumerate(steps) if first <= step <= last}
        if not fitting:
            there = f"they are {min(steps)} to {max(steps)}" if steps else "there are none yet"
            raise Mistake(f"the metrics have no step {text}: {there}.")
        places |= fitting
    return sorted(places)


def matching(text: str, labels: dict[str, str], table: MetricsTable) -> list[str]:
    """The metrics that a user means: by name, by label, or by a part of either."""
    names = table.names()
    for candidates in (
        [name for name in names if name == text],
        [name for name, label in labels.items() if label == text],
        [name for name, label in labels.items() if text.lower() in f"{label} {name}".lower()],
        [name for name in names if text.lower() in name.lower()],
    ):
        if candidates:
            return candidates
    raise Mistake(
        f"no metric is named {text!r}. The view `curves` without names lists those of this run in `groups` and `others`."
    )


def _present(entries: Sequence[tuple[str, str]], table: MetricsTable) -> Iterator[dict[str, str]]:
    """The metrics of a group that the run has."""
    names = table.names()
    for name, label in entries:
        pattern = re.compile(re.escape(name).replace("<set>", "([^/]+)"))
        for candidate in names if "<set>" in name else [name] if name in names else []:
            if match := pattern.fullmatch(candidate):
                own = match[1] if match.groups() else ""
                yield {"name": candidate, "label": label.replace("<set>", own)}


def marks(run: Run) -> Iterator[dict[str, Any]]:
    """What happened, each with the step that was trained or under way."""
    step = 0
    for event in without_undone(run.events()):
        kind = event["kind"]
        if kind == "step":
            step = event["step"]
        elif kind == "loop":
            step = event["after_step"]
            words = f"start {event['start']} goes on after step {step}" if step else f"start {event['start']} begins"
            yield {"step": step, "kind": "start", "text": words}
        elif kind == "sync":
            yield {
                "step": event["version"],
                "kind": "sync",
                "text": f"version {event['version']} in {event['seconds']:.2f} s",
            }
        elif kind == "checkpoint":
            yield {"step": event["step"], "kind": "checkpoint", "text": f"checkpoint in {event['seconds']:.1f} s"}
        elif kind == "warning":
            is_fault = event.get("level") in ("ERROR", "CRITICAL")
            text = str(event.get("text", ""))[:LONGEST_TEXT]
            yield {"step": step + 1, "kind": "fault" if is_fault else "warning", "text": text}
    yield from _replacements(run.metrics())


def without_undone(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events without those of steps that a later start of the run has trained again. Warnings and starts stay."""
    rows: list[dict[str, Any]] = []
    for event in events:
        if event["kind"] == "loop":
            rows = [row for row in rows if row["kind"] not in OF_STEPS or _step_of(row) <= event["after_step"]]
        rows.append(event)
    return rows


def _step_of(event: dict[str, Any]) -> int:
    return event["version"] if event["kind"] == "sync" else event["step"]


def _replacements(table: MetricsTable) -> Iterator[dict[str, Any]]:
    """Steps in which an engine was replaced. The count begins again at each start of the run."""
    if "engine_restarts" in table.names():
        before = 0.0
        for step, count in zip(table.steps, table.column("engine_restarts"), strict=True):
            if count > before:
                yield {"step": step, "kind": "replacement", "text": f"engines replaced: {count - before:.0f}"}
            before = count if count == count else before
