"""View of the conversations of a step: how long each prompt waited for an engine, turns, tools, scores, and its step."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from open_instruct.watch.mistakes import Mistake
from open_instruct.watch.runs import Run, Runs
from open_instruct.watch.samples import SampleRow, groups_of, rows_of, table_of_step

KINDS = ("queue", "turn", "tool", "environment", "verify", "wait")
"""Kinds of spans, in the order of a prompt's life."""
OF_ENGINE = {"generate": "turn", "environment": "environment"}
"""Kinds of effects that are not tools."""
Span = dict[str, Any]


def conversations(
    runs: Runs, step: int | None = None, *, run: int = 0, limit: int = 100, offset: int = 0
) -> dict[str, Any]:
    """The prompts of a step (by default the newest trained one) over time: in the queue, turns, tools, environment, scoring, and
    waiting for the step; and the seconds of each."""
    watched = runs[run]
    steps = watched.record.steps() if watched.has_record else []
    chosen = (steps or [None])[-1] if step is None else step
    if chosen is None:
        raise Mistake(f"{watched.directory} has no trained step yet.")
    read = table_of_step(watched, chosen)
    groups = sorted(groups_of(rows_of(read)).values(), key=lambda group: group[0]["began"])
    effects = read(["effects"])["effects"]
    lanes = [_lane(watched, group, effects[group[0]["at"]].as_py() or []) for group in groups]
    page = lanes[offset : offset + limit]
    spans = [span for lane in page for span in lane["spans"]]
    return {
        "step": chosen,
        "began": min((span["began"] for span in spans), default=None),
        "ended": max((span["ended"] for span in spans), default=None),
        "num_groups": len(lanes),
        "mean_seconds": {kind: float(np.mean([lane["seconds"][kind] for lane in lanes])) for kind in KINDS},
        "lanes": page,
    }


def _lane(run: Run, group: Sequence[SampleRow], effects: Sequence[dict[str, Any]]) -> dict[str, Any]:
    first = group[0]
    spans = sorted(_spans(run, first, effects), key=lambda span: span["began"])
    seconds = dict.fromkeys(KINDS, 0.0)
    for span in spans:
        seconds[span["kind"]] += span["ended"] - span["began"]
    names = ("prompt_id", "attempt", "row", "outcome", "engine")
    return {**{name: first[name] for name in names}, "num_samples": len(group), "seconds": seconds, "spans": spans}


def _spans(run: Run, first: SampleRow, effects: Sequence[dict[str, Any]]) -> Iterator[Span]:
    began, ended = first["began"], first["began"] + first["generation_s"]
    if (issued := _issued(run, first)) is not None and issued < began:
        yield _span("queue", issued, began, "issued, and no engine had it")
    if not effects:
        yield _span("turn", began, ended, "one request to the engine")
    for effect in effects:
        kind = OF_ENGINE.get(effect["kind"], "tool")
        yield _span(kind, began + effect["began"], began + effect["began"] + effect["seconds"], effect["name"])
    scored = ended + first["score_s"]
    if first["score_s"]:
        yield _span("verify", ended, scored, "its verifiers and reward functions")
    if first["arrived"] > scored:
        yield _span("wait", scored, first["arrived"], "waited for its step")


def _issued(run: Run, first: SampleRow) -> float | None:
    """When the prompt was issued for this attempt; None if the record does not say."""
    times = [
        event["unix"]
        for event in run.prompt_events().get(first["prompt_id"], [])
        if event["kind"] == "issued" and event["attempt"] == first["attempt"] and event["unix"] <= first["began"]
    ]
    return times[-1] if times else None


def _span(kind: str, began: float, ended: float, text: str) -> Span:
    return {"kind": kind, "began": began, "ended": ended, "text": text}
