"""Views of time: who did what when, how old the data was, and what a run cost."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from open_instruct.record import schema
from open_instruct.scored_groups import UNSCORED
from open_instruct.watch.mistakes import Mistake
from open_instruct.watch.runs import Run, Runs
from open_instruct.watch.samples import (
    ISSUED_AGAIN,
    SampleRow,
    counts_of_uses,
    ends,
    groups_of,
    is_right,
    is_sampled,
    lists,
    rows_of,
    table_of_evaluation,
    table_of_step,
)
from open_instruct.watch.torn_files import TornFiles

STEPS_SHOWN = 20
"""Steps of the lanes if none are named: the last."""
Span = dict[str, Any]
"""`kind`, `began`, `ended` (Unix time) and `text`."""
NOT_SAMPLED = (schema.GIVEN, schema.TAUGHT)
DRIVER = {"sync": "sync", "checkpoint": "checkpoint", "model": "checkpoint"}
"""Events of the driver that are spans, and their kinds."""


def lanes(runs: Runs, from_step: int | None = None, to_step: int | None = None, *, run: int = 0) -> dict[str, Any]:
    """What engines, verifiers, learners and driver did over time, and the share of it in which each did nothing."""
    watched = runs[run]
    times = _times_of_steps(watched)
    if not times and not watched.record.places.events.exists():
        raise Mistake(
            f"{watched.directory} has no record/events.jsonl, of which lanes are made: the run has not begun, or the file was "
            "not copied."
        )
    if not times:
        raise Mistake(f"{watched.directory} has not finished a step yet, so there are no lanes.")
    last = max(times) if to_step is None else to_step
    first = max(min(times), last - STEPS_SHOWN + 1) if from_step is None else from_step
    if from_step is not None and to_step is not None and from_step > to_step:
        raise Mistake(f"the steps {from_step} and {to_step} are reversed: lanes {to_step} {from_step}.")
    chosen = {step: span for step, span in times.items() if first <= step <= last}
    if not chosen:
        raise Mistake(f"there is no step from {first} to {last}: finished steps are {min(times)} to {max(times)}.")
    window = (min(began for began, _ in chosen.values()), max(ended for _, ended in chosen.values()))
    torn = TornFiles()
    engines = [*_engine_lanes(watched, chosen, window, torn)]
    return {
        "began": window[0],
        "ended": window[1],
        "from_step": min(chosen),
        "to_step": max(chosen),
        "lanes": [*engines, _learners(watched, chosen, window), _driver(watched, window)],
        "torn": torn.sentences,
    }


def _times_of_steps(run: Run) -> dict[int, tuple[float, float]]:
    """When each step began and ended. Of a step that was trained again after a resume the last time counts."""
    return {
        event["step"]: (event["unix"] - event["seconds"], event["unix"])
        for event in run.events()
        if event["kind"] == "step"
    }


def _learners(run: Run, chosen: dict[int, Any], window: tuple[float, float]) -> dict[str, Any]:
    events = {event["step"]: event for event in run.events() if event["kind"] == "step" and event["step"] in chosen}
    spans = [span for event in events.values() for span in _parts_of_step(event)]
    return _lane("learners", spans, window, busy={"train"})


def _parts_of_step(event: dict[str, Any]) -> Iterator[Span]:
    """The learners wait for data, then train."""
    at = event["unix"] - event["seconds"]
    for kind, name in (("wait", "waited_s"), ("train", "trained_s")):
        seconds = event.get(name) or 0.0
        if seconds:
            yield {
                "kind": kind,
                "began": at,
                "ended": at + seconds,
                "text": f"step {event['step']}: {kind} {seconds:.2f} s",
            }
        at += seconds


def _driver(run: Run, window: tuple[float, float]) -> dict[str, Any]:
    spans = [
        {
            "kind": DRIVER[event["kind"]],
            "began": event["began"],
            "ended": event["began"] + event["seconds"],
            "text": f"{event['kind']} {event.get('version', event.get('step'))}",
        }
        for event in run.events()
        if event["kind"] in DRIVER
    ]
    return _lane("driver", spans, window, busy={"sync", "checkpoint"})


def _engine_lanes(
    run: Run, chosen: dict[int, Any], window: tuple[float, float], torn: TornFiles
) -> Iterator[dict[str, Any]]:
    """A lane for each engine, from the groups of steps and evaluations, and one for the verifiers."""
    by_engine: dict[int, list[Span]] = {}
    sleeps = [
        _span("sleep", event["began"], event["began"] + event["seconds"], "its device has the learners")
        for event in run.events()
        if event["kind"] == "sleep"
    ]
    verifying: list[Span] = []
    for group in _groups_near(run, min(chosen), max(chosen), torn):
        prompt_id, began = group[0]["prompt_id"], group[0]["began"]
        ended = began + group[0]["generation_s"]
        by_engine.setdefault(group[0]["engine"], []).append(_span("generate", began, ended, prompt_id))
        verifying.append(_span("verify", ended, ended + group[0]["score_s"], prompt_id))
    for engine in sorted(by_engine):
        spans = [*_without(merged(by_engine[engine]), sleeps), *sleeps]
        yield _lane(f"engine {engine}", spans, window, busy={"generate"})
    yield _lane("verifiers", merged(verifying), window, busy={"verify"})


def _groups_near(run: Run, first: int, last: int, torn: TornFiles) -> Iterator[list[SampleRow]]:
    """The groups that engines may have sampled during these steps: also those of later steps, as far as the bound of staleness
    allows, and those of evaluations."""
    ahead = last + 1 + (run.option("max_staleness_allowed") or 0)
    tables = [table_of_step(run, step) for step in run.steps() if first <= step <= ahead]
    files = [file for file in run.record.evaluations() if first - 1 <= file.version <= last]
    tables += [table_of_evaluation(run, file.version, file.set) for file in files]
    for read in tables:
        yield from groups_of(torn.read(lambda read=read: rows_of(read), [])).values()


def _without(spans: Sequence[Span], holes: Sequence[Span]) -> list[Span]:
    """The spans without the times of the holes."""
    parts = list(spans)
    for hole in holes:
        ends = [
            (part, times)
            for part in parts
            for times in (
                (part["began"], min(part["ended"], hole["began"])),
                (max(part["began"], hole["ended"]), part["ended"]),
            )
        ]
        parts = [part | {"began": began, "ended": ended} for part, (began, ended) in ends if began < ended]
    return parts


def _span(kind: str, began: float, ended: float, text: str) -> Span:
    return {"kind": kind, "began": began, "ended": ended, "text": text}


def merged(spans: Sequence[Span]) -> list[Span]:
    """Spans of one kind that overlap as one, named after its first and the number of them."""
    united: list[list[Any]] = []
    for span in sorted(spans, key=lambda span: span["began"]):
        if united and span["began"] <= united[-1][0]["ended"]:
            united[-1][0]["ended"] = max(united[-1][0]["ended"], span["ended"])
            united[-1][1] += 1
        else:
            united.append([dict(span), 1])
    return [span | ({"text": f"{span['text']} and {number - 1} more"} if number > 1 else {}) for span, number in united]


def _lane(name: str, spans: Iterable[Span], window: tuple[float, float], *, busy: set[str]) -> dict[str, Any]:
    """The spans that touch the window, and the share of the window in which no busy span is."""
    inside = [span for span in spans if span["ended"] >= window[0] and span["began"] <= window[1]]
    work = merged([span for span in inside if span["kind"] in busy])
    worked = sum(min(span["ended"], window[1]) - max(span["began"], window[0]) for span in work)
    length = window[1] - window[0]
    return {"name": name, "spans": inside, "idle_share": 1.0 - worked / length if length > 0 else None}


# --- age --------------------------------------------------------------------------------------------------------------


def staleness(runs: Runs, step: int | None = None, *, run: int = 0) -> dict[str, Any]:
    """The age of the groups of each step beside its bound, and of one step (by default the last) the tokens by version."""
    watched, torn = runs[run], TornFiles()
    table = watched.metrics()
    names = table.names()
    newest = (number for number in reversed(watched.steps()) if torn.whole([number], lambda n: _versions(watched, n)))
    chosen = next(newest, None) if step is None else step
    if chosen is None:
        raise Mistake(f"{watched.directory} has no samples of any step yet.")
    return {
        "bound": watched.option("max_staleness_allowed"),
        "step": chosen,
        **_versions(watched, chosen),
        "steps": table.steps,
        "mean_age": list(table.column("num_steps_off_policy")) if "num_steps_off_policy" in names else [],
        "max_age": list(table.column("num_steps_off_policy_max")) if "num_steps_off_policy_max" in names else [],
        "torn": torn.sentences,
    }


def _versions(run: Run, step: int) -> dict[str, Any]:
    """Sampled tokens by version, responses by the age of their keys and values, and responses of several versions."""
    read = table_of_step(run, step)
    table = read(["version", "use"])
    uses, _ = lists(table["use"])
    versions, _ = lists(table["version"])
    sampled = versions[is_sampled(uses)]
    numbers, counts = np.unique(sampled, return_counts=True)
    rows = rows_of(read)
    several = sum(row["oldest_version"] != row["newest_version"] for row in rows if row["oldest_version"] is not None)
    kv_ages = Counter(row["kv_age"] for row in rows if row["kv_age"] is not None)
    return {
        "by_version": {str(number): count for number, count in zip(numbers.tolist(), counts.tolist(), strict=True)},
        "kv_age": {str(age): count for age, count in sorted(kv_ages.items())},
        "num_responses": len(rows),
        "num_of_several_versions": several,
    }


# --- cost -------------------------------------------------------------------------------------------------------------


def cost(runs: Runs, *, run: int = 0) -> dict[str, Any]:
    """What the run sampled, trained on and threw away, in groups, tokens, seconds and dollars. Reads all steps."""
    watched, torn, total = runs[run], TornFiles(), _Sums()
    for step in watched.steps():
        total.add(torn.read(lambda step=step: _sums(watched, step), _Sums()))
    evaluated = sum(
        torn.read(lambda file=file: _evaluated(watched, file.version, file.set), 0)
        for file in watched.record.evaluations()
    )
    return {
        "groups": dict(total.groups),
        "left_out_groups": {reason: dict(kinds) for reason, kinds in total.left_out_groups.items()},
        "tokens": {
            "sampled": sum(total.tokens.values()),
            "trained": total.tokens[schema.USES[schema.TRAINED]],
            "left_out": {
                reason: count for reason, count in total.tokens.items() if reason != schema.USES[schema.TRAINED]
            },
            "evaluations": evaluated,
        },
        "groups_with_a_right_response": total.with_right,
        "seconds": _seconds(watched, total),
        "dollars": _dollars(watched),
        "torn": torn.sentences,
    }


def _sums(run: Run, step: int) -> "_Sums":
    return run.cached(run.path_of(step), "sums", lambda: _sums_of(run.record.samples(step, OF_SUMS)))


class _Sums:
    """Counts over steps."""

    def __init__(self) -> None:
        self.groups: Counter[str] = Counter()
        self.left_out_groups: dict[str, Counter[str]] = {}
        self.tokens: Counter[str] = Counter()
        """Sampled tokens by what they are used for; those of groups that no step trains on by the group's outcome."""
        self.busy: dict[int, list[Span]] = {}
        """By engine the times in which it had a group."""
        self.with_right = 0

    def add(self, other: "_Sums") -> None:
        self.groups.update(other.groups)
        self.tokens.update(other.tokens)
        self.with_right += other.with_right
        for engine, spans in other.busy.items():
            self.busy.setdefault(engine, []).extend(spans)
        for reason, kinds in other.left_out_groups.items():
            self.left_out_groups.setdefault(reason, Counter()).update(kinds)


OF_SUMS = (
    *("prompt_id", "attempt", "outcome", "goes_on", "score", "environment_reward", "verdicts"),
    *("engine", "began", "generation_s", "use"),
)


def _sums_of(table: pa.Table) -> _Sums:
    """The counts of one step, from its columns `OF_SUMS`."""
    sums = _Sums()
    uses, offsets = lists(table["use"])
    rows = table.drop_columns(["use"]).to_pylist()
    for row, counts in zip(rows, counts_of_uses(uses, offsets).tolist(), strict=True):
        row["uses"] = {code: count for code, count in enumerate(counts) if count and code not in NOT_SAMPLED}
        row["is_right"] = is_right(row)
    for (prompt_id, _), group in groups_of(rows).items():
        _add_group(sums, group)
        began = group[0]["began"]
        span = _span("generate", began, began + group[0]["generation_s"], prompt_id)
        sums.busy.setdefault(group[0]["engine"], []).append(span)
    sums.busy = {engine: merged(spans) for engine, spans in sums.busy.items()}
    return sums


def _add_group(sums: _Sums, group: Sequence[SampleRow]) -> None:
    is_open = any(schema.OPEN in row["uses"] for row in group)
    outcome = "open" if is_open else group[0]["outcome"]
    rights = [row["is_right"] for row in ends(group)]
    sums.groups[outcome] += 1
    sums.with_right += any(rights) and outcome not in ISSUED_AGAIN
    if outcome not in ("consumed", "open"):
        sums.left_out_groups.setdefault(outcome, Counter())[_kind(rights)] += 1
    for row in group:
        own = UNSCORED if row["outcome"] == UNSCORED else outcome
        sums.tokens.update({_reason(code, own): number for code, number in row["uses"].items()})


def _reason(code: int, outcome: str) -> str:
    return outcome if code == schema.LEFT_OUT else schema.USES[code]


def _kind(rights: Sequence[bool | None]) -> str:
    if not rights:
        return "not scored"
    if None in rights:
        return "rewards alike"
    return "all right" if all(rights) else "all wrong" if not any(rights) else "mixed"


def _evaluated(run: Run, version: int, set_name: str) -> int:
    """Sampled tokens of an evaluation."""
    path = run.record.places.evaluation(version, set_name)
    read = table_of_evaluation(run, version, set_name)
    return run.cached(path, "tokens", lambda: sum(row["num_sampled"] for row in rows_of(read)))


def _seconds(run: Run, total: _Sums) -> dict[str, Any]:
    """Seconds of the finished steps: all, those of waiting for data, training and sending weights; and seconds in which engines
    had a training group, with its tools."""
    names = {
        "steps": "time/total",
        "waiting": "time/trainer_waiting_for_data",
        "learners": "time/learners",
        "sync": "time/weight_sync",
    }
    sums = {part: _sum(run, name) for part, name in names.items()}
    whole = sums["steps"]
    return {
        **sums,
        "waiting_share": None if not whole or sums["waiting"] is None else sums["waiting"] / whole,
        "engines": sum(span["ended"] - span["began"] for spans in total.busy.values() for span in merged(spans)),
        "engines_busy_share": _mean_over_time(run, "engines/busy_share"),
        "per_group_with_a_right_response": None if not total.with_right or whole is None else whole / total.with_right,
    }


def _mean_over_time(run: Run, name: str) -> float | None:
    """Mean of a metric, in which each step counts by its seconds; None if it is not known."""
    table = run.metrics()
    if not {name, "time/total"} <= set(table.names()):
        return None
    values, seconds = np.array(table.column(name)), np.array(table.column("time/total"))
    is_known = ~(np.isnan(values) | np.isnan(seconds))
    return float(np.average(values[is_known], weights=seconds[is_known])) if is_known.any() else None


def _sum(run: Run, name: str) -> float | None:
    table = run.metrics()
    return float(np.nansum(table.column(name))) if name in table.names() else None


def _dollars(run: Run) -> float | None:
    """What judges cost; None if no row names a cost."""
    names = ("objective/verifier_cost", "eval/objective/verifier_cost", "evolving_rubrics/cost")
    sums = [value for value in (_sum(run, name) for name in names) if value is not None]
    return sum(sums) if sums else None
