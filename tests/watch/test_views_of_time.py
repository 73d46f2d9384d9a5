"""Lanes, ages and costs are computed again from the record's tables and events."""

import json
from collections import Counter
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from made_records import SETS, shared_record

from open_instruct.record import open_log
from open_instruct.watch.mistakes import Mistake
from open_instruct.watch.runs import Runs
from open_instruct.watch.views import answer
from open_instruct.watch.views_time import merged

Row = dict[str, Any]


@pytest.fixture(scope="module")
def runs() -> Runs:
    return Runs([shared_record().directory])


def raw() -> list[Row]:
    record = shared_record().directory / "record"
    rows = [row for file in sorted((record / "steps").iterdir()) for row in pq.read_table(file).to_pylist()]
    return rows + [
        row for file in (record / "open").iterdir() for batch in open_log.read(file) for row in batch.to_pylist()
    ]


def evaluated() -> list[Row]:
    files = (shared_record().directory / "record" / "evaluations").iterdir()
    return [row for file in files for row in pq.read_table(file).to_pylist()]


def lines(name: str) -> list[Row]:
    return [json.loads(line) for line in (shared_record().directory / name).read_text().splitlines()]


def covered(spans: list[tuple[float, float]], window: tuple[float, float]) -> float:
    """Seconds of the window in which there is a span, counted in hundredths."""
    times = np.arange(window[0], window[1], 0.01) + 0.005
    return 0.01 * int(np.any([(times >= began) & (times < ended) for began, ended in spans], axis=0).sum())


@pytest.mark.parametrize(("first", "last"), [(None, None), (2, 5), (9, 9)])
def test_lanes_are_what_events_and_groups_say(runs: Runs, first: int | None, last: int | None) -> None:
    values = {} if first is None else {"from_step": str(first), "to_step": str(last)}
    view = answer(runs, "lanes", values)
    steps = {event["step"]: event for event in lines("record/events.jsonl") if event["kind"] == "step"}
    own = [event for step, event in steps.items() if first is None or first <= step <= (last or step)]
    window = (min(event["unix"] - event["seconds"] for event in own), max(event["unix"] for event in own))
    assert (view["began"], view["ended"]) == window
    by_name = {lane["name"]: lane for lane in view["lanes"]}
    assert list(by_name) == ["engine 0", "engine 1", "verifiers", "learners", "driver"]
    parts = [(span["kind"], span["began"], span["ended"]) for span in by_name["learners"]["spans"]]
    assert parts == [
        part
        for event in own
        for at in (event["unix"] - event["seconds"],)
        for part in (("wait", at, at + event["waited_s"]), ("train", at + 3.0, at + 3.0 + event["trained_s"]))
    ]
    assert by_name["learners"]["idle_share"] == pytest.approx(
        1 - sum(e["trained_s"] for e in own) / (window[1] - window[0])
    )
    for engine in (0, 1):
        rows = [row for row in raw() + evaluated() if row["engine"] == engine]
        groups = [(row["began"], row["began"] + row["generation_s"]) for row in rows]
        busy = covered(groups, window)
        lane = by_name[f"engine {engine}"]
        assert lane["idle_share"] == pytest.approx(1 - busy / (window[1] - window[0]), abs=1e-3)
        assert covered([(span["began"], span["ended"]) for span in lane["spans"]], window) == pytest.approx(
            busy, abs=0.02
        )
    syncs = [e for e in lines("record/events.jsonl") if e["kind"] == "sync" and window[0] <= e["began"] <= window[1]]
    told = [span["began"] for span in by_name["driver"]["spans"] if span["kind"] == "sync"]
    assert {event["began"] for event in syncs} <= set(told)


def test_lanes_of_steps_that_are_not_there_are_a_mistake(runs: Runs) -> None:
    with pytest.raises(Mistake, match="no step from 50 to 60: finished steps are 1 to 12"):
        answer(runs, "lanes", {"from_step": "50", "to_step": "60"})


def test_spans_that_overlap_become_one() -> None:
    spans = [
        {"kind": "generate", "began": b, "ended": e, "text": name}
        for name, b, e in (("c", 5, 6), ("a", 0, 2), ("b", 1, 3))
    ]
    assert [(span["began"], span["ended"], span["text"]) for span in merged(spans)] == [
        (0, 3, "a and 1 more"),
        (5, 6, "c"),
    ]
    assert [span["text"] for span in spans] == ["c", "a", "b"], "what was given is as it was"


@pytest.mark.parametrize("step", [1, 3, 7, 12, 13])
def test_tokens_by_version_and_ages_of_keys_are_counted(runs: Runs, step: int) -> None:
    view = answer(runs, "staleness", {"step": str(step)})
    rows = [row for row in raw() if row["step"] == step]
    versions: Counter[str] = Counter()
    for row in rows:
        versions.update(str(v) for v, use in zip(row["version"], row["use"], strict=True) if use not in (1, 2))
    assert view["by_version"] == versions
    assert view["kv_age"] == Counter(str(row["kv_age"]) for row in rows)
    assert view["num_responses"] == len(rows)
    assert view["num_of_several_versions"] == sum(len(set(row["version"])) > 1 for row in rows)
    assert view["bound"] == 2


def test_ages_of_steps_are_those_of_the_metrics(runs: Runs) -> None:
    view, rows = answer(runs, "staleness", {}), lines("metrics.jsonl")
    assert view["step"] == 13, "the newest"
    assert view["steps"] == [row["training_step"] for row in rows]
    assert view["mean_age"] == [row.get("num_steps_off_policy") for row in rows]
    assert view["max_age"] == [row.get("num_steps_off_policy_max") for row in rows]


def test_cost_adds_up_token_by_token(runs: Runs) -> None:
    view = answer(runs, "cost", {})
    tokens: Counter[str] = Counter()
    names = {
        3: "sampled by weights older than the bound (--straggler_policy truncate)",
        7: "of a step that is not trained yet",
    }
    names |= {0: "trained", 4: "of a response that was cut off (--mask_truncated_completions)"}
    groups: dict[tuple[int, str, int], list[Row]] = {}
    for row in raw():
        tokens.update(row["outcome"] if use == 6 else names[use] for use in row["use"] if use != 1)
        groups.setdefault((row["step"], row["prompt_id"], row["attempt"]), []).append(row)
    assert view["tokens"]["trained"] == tokens.pop("trained")
    assert view["tokens"]["left_out"] == tokens
    assert view["tokens"]["sampled"] == view["tokens"]["trained"] + sum(tokens.values())
    record = shared_record().directory / "record" / "evaluations"
    files = [pq.read_table(record / f"{version:06d}_{name}.parquet") for version in (0, 5) for name in SETS]
    assert view["tokens"]["evaluations"] == sum(len(ids) for file in files for ids in file["response_ids"].to_pylist())
    groups = {name: sorted(rows, key=lambda row: row["sample"]) for name, rows in groups.items()}
    outcomes = Counter("open" if rows[0]["step"] == 13 else rows[0]["outcome"] for rows in groups.values())
    assert view["groups"] == outcomes
    zero = [{row["score"] for row in rows} for rows in groups.values() if rows[0]["outcome"] == "zero_std"]
    assert view["left_out_groups"]["zero_std"] == {"all right": zero.count({1.0}), "all wrong": zero.count({0.0})}
    assert sum(view["left_out_groups"]["zero_std"].values()) == outcomes["zero_std"]
    assert view["left_out_groups"]["not_scored"] == {"not scored": 1}
    right_groups = [
        rows
        for rows in groups.values()
        if rows[0]["outcome"] not in ("too_old", "not_scored") and any(r["score"] == 1 for r in rows)
    ]
    assert view["groups_with_a_right_response"] == len(right_groups)
    seconds = view["seconds"]
    assert (seconds["steps"], seconds["waiting"], seconds["learners"], seconds["sync"]) == (120.0, 36.0, 72.0, 12.0)
    assert seconds["waiting_share"] == pytest.approx(0.3)
    assert seconds["per_group_with_a_right_response"] == pytest.approx(120.0 / len(right_groups))
    assert view["dollars"] == 0.5


def test_engine_seconds_count_overlapping_groups_once(runs: Runs) -> None:
    seconds = 0.0
    for engine in (0, 1):
        own = [(row["began"], row["began"] + row["generation_s"]) for row in raw() if row["engine"] == engine]
        seconds += covered(own, (min(own)[0], max(end for _, end in own)))
    told = answer(runs, "cost", {})["seconds"]
    assert told["engines"] == pytest.approx(seconds, abs=0.1)
    rows = [row for row in lines("metrics.jsonl") if "engines/busy_share" in row]
    assert told["engines_busy_share"] == pytest.approx(np.mean([row["engines/busy_share"] for row in rows]))
