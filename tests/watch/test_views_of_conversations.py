"""Seconds of conversations are computed again from the record's table and its events of prompts."""

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from made_records import EFFECTS, shared_record

from open_instruct.record.reader import RunRecord
from open_instruct.watch.mistakes import Mistake
from open_instruct.watch.runs import Runs
from open_instruct.watch.views import answer
from open_instruct.watch.views_time import _without


@pytest.fixture(scope="module")
def runs() -> Runs:
    return Runs([shared_record().directory])


def issues() -> dict[tuple[str, int], float]:
    lines = (shared_record().directory / "record" / "prompts.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return {(row["prompt_id"], row["attempt"]): row["unix"] for row in rows if row["kind"] == "issued"}


@pytest.mark.parametrize("step", [1, 5, 9, 12])
def test_lanes_of_conversations_are_what_the_table_says(runs: Runs, step: int) -> None:
    view = answer(runs, "conversations", {"step": str(step)})
    table = pq.read_table(shared_record().directory / "record" / "steps" / f"{step:06d}.parquet").to_pylist()
    first = {(row["prompt_id"], row["attempt"]): row for row in table if row["sample"] == 0}
    lanes: dict[tuple[str, int], Any] = {(lane["prompt_id"], lane["attempt"]): lane for lane in view["lanes"]}
    assert lanes.keys() == first.keys()
    assert view["num_groups"] == len(first)
    for key, row in first.items():
        seconds = lanes[key]["seconds"]
        has_tool = bool(row["effects"])
        assert seconds["queue"] == pytest.approx(row["began"] - issues()[key], abs=1e-3)
        assert seconds["turn"] == pytest.approx(1.25 if has_tool else row["generation_s"])
        assert (seconds["tool"], seconds["environment"]) == ((0.5, 0.25) if has_tool else (0.0, 0.0))
        assert seconds["verify"] == pytest.approx(row["score_s"])
        ready = row["began"] + row["generation_s"] + row["score_s"]
        assert seconds["wait"] == pytest.approx(row["arrived"] - ready, abs=1e-3)
        names = [span["text"] for span in lanes[key]["spans"] if span["kind"] in ("turn", "tool", "environment")]
        assert names == ([name for _, name, _, _ in EFFECTS] if has_tool else ["one request to the engine"])
        for kind, mean in view["mean_seconds"].items():
            assert mean == pytest.approx(sum(lane["seconds"][kind] for lane in lanes.values()) / len(lanes))


def test_a_part_of_the_lanes_is_shown(runs: Runs) -> None:
    whole = answer(runs, "conversations", {"step": "5"})["lanes"]
    part = answer(runs, "conversations", {"step": "5", "limit": "2", "offset": "1"})
    assert part["lanes"] == whole[1:3]
    assert part["began"] == min(span["began"] for lane in whole[1:3] for span in lane["spans"])


def test_engines_that_sleep_are_idle(tmp_path: Path) -> None:
    directory = tmp_path / "out"
    shutil.copytree(shared_record().directory, directory)
    events = [json.loads(line) for line in (directory / "record" / "events.jsonl").read_text().splitlines()]
    end = next(event["unix"] for event in events if event["kind"] == "step" and event["step"] == 12)
    sleep = {"kind": "sleep", "unix": end, "monotonic": 0.0, "start": 2, "began": end - 10.0, "seconds": 4.0}
    with open(directory / "record" / "events.jsonl", "a") as file:
        file.write(json.dumps(sleep) + "\n")
    window = {"from_step": "12", "to_step": "12"}
    before, after = (answer(Runs([place]), "lanes", window) for place in (shared_record().directory, directory))
    for lane, other in zip(before["lanes"][:2], after["lanes"][:2], strict=True):
        slept = [(span["began"], span["ended"]) for span in other["spans"] if span["kind"] == "sleep"]
        assert slept == [(end - 10.0, end - 6.0)]
        worked = [span for span in other["spans"] if span["kind"] == "generate"]
        assert all(span["began"] >= end - 6.0 or span["ended"] <= end - 10.0 for span in worked)
        assert other["idle_share"] > lane["idle_share"]


def test_times_without_holes() -> None:
    spans = [{"kind": "generate", "began": 0.0, "ended": 10.0, "text": "a"}]
    parts = _without(
        spans, [{"began": 2.0, "ended": 3.0}, {"began": 9.0, "ended": 20.0}, {"began": 30.0, "ended": 31.0}]
    )
    assert [(part["began"], part["ended"], part["text"]) for part in parts] == [(0.0, 2.0, "a"), (3.0, 9.0, "a")]
    assert _without(spans, [{"began": -1.0, "ended": 11.0}]) == []


def test_a_record_from_before_effects_is_read(tmp_path: Path) -> None:
    directory = tmp_path / "out"
    shutil.copytree(shared_record().directory, directory)
    path = directory / "record" / "steps" / "000005.parquet"
    table = pq.read_table(path)
    pq.write_table(table.drop_columns(["effects"]), path)
    assert RunRecord(directory).samples(5)["effects"].null_count == table.num_rows
    lanes = answer(Runs([directory]), "conversations", {"step": "5"})["lanes"]
    assert all(lane["seconds"]["turn"] == 2.0 and lane["seconds"]["tool"] == 0 for lane in lanes)


def test_a_run_without_a_trained_step_has_no_conversations(tmp_path: Path) -> None:
    (tmp_path / "out" / "record").mkdir(parents=True)
    with pytest.raises(Mistake, match="no"):
        answer(Runs([tmp_path / "out"]), "conversations", {})
