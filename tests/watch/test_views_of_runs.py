"""Runs with their states, options, curves with marks: from the files of runs that ended, were killed, failed, or go on."""

import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from made_records import BEGAN, copy_of, make_record, shared_record

from open_instruct.record.reader import NoRecord, RunRecord
from open_instruct.watch.mistakes import Mistake
from open_instruct.watch.runs import Runs
from open_instruct.watch.states import end_of, state_of
from open_instruct.watch.views import answer
from open_instruct.watch.views_curves import change


@pytest.fixture(scope="module")
def runs() -> Runs:
    return Runs([shared_record().directory])


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (shared_record().directory / name).read_text().splitlines()]


def test_run_is_told_from_its_files(runs: Runs) -> None:
    (run,) = answer(runs, "runs", {})
    last = lines("metrics.jsonl")[-1]
    options = json.loads((shared_record().directory / "options.json").read_text())
    assert (run["run"], run["name"], run["state"], run["starts"]) == (0, "made", "ended", 2)
    assert (
        (run["step"], run["reward"])
        == (last["training_step"], last["all_groups/scores"])
        == (12, pytest.approx(7.0421, abs=1e-4))
    )
    assert run["num_steps"] == 12
    assert run["model"] == options["in_force"]["model_name_or_path"]
    assert run["command"] == options["command"]
    assert run["directory"] == str(shared_record().directory)


def test_runs_are_found_in_folders_and_keep_their_numbers(tmp_path: Path) -> None:
    copy_of(shared_record(), tmp_path / "b" / "second")
    runs = Runs([tmp_path])
    assert [run["name"] for run in answer(runs, "runs", {})] == ["made"]
    copy_of(shared_record(), tmp_path / "a")
    assert [Path(run["directory"]).name for run in answer(runs, "runs", {})] == ["second", "a"]
    with pytest.raises(Mistake, match="there is no run 2: 2 were found"):
        answer(runs, "options", {"run": "2"})


def test_directory_without_a_run_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(Mistake, match=r"no run is in there. Give the --output_dir of a run"):
        Runs([tmp_path])


def test_view_of_samples_without_a_record_is_a_mistake_with_a_cure(tmp_path: Path) -> None:
    directory = copy_of(shared_record(), tmp_path / "out")
    (directory / "record").rename(tmp_path / "elsewhere")
    runs = Runs([directory])
    assert answer(runs, "runs", {})[0]["state"] == "no record"
    assert answer(runs, "curves", {})["values"]["all_groups/scores"][1:] == [
        row["all_groups/scores"] for row in lines("metrics.jsonl")[1:]
    ]
    with pytest.raises(
        Mistake, match=r"holds no record. Give the --output_dir of a run that was not started with --record False"
    ):
        answer(runs, "step", {"step": "5"})


STATES: list[tuple[dict[str, Any] | None, str]] = [
    ({"reason": "done", "exit_code": 0}, "ended"),
    ({"reason": "interrupted", "exit_code": 0}, "ended"),
    ({"reason": "interrupted", "exit_code": 143}, "interrupted"),
    ({"reason": "failed: no engine is left", "exit_code": 1}, "failed"),
]


@pytest.mark.parametrize(("end", "state"), STATES)
def test_state_of_a_run_that_told_its_end(tmp_path: Path, end: dict[str, Any], state: str) -> None:
    assert state_of(tmp_path, [{"end": None}, {"end": end}]) == state


def test_run_without_an_end_runs_as_long_as_its_process() -> None:
    process = psutil.Process()
    start = {"end": None, "host": socket.gethostname(), "process": process.pid, "unix": process.create_time() + 5}
    assert state_of(Path(), [start]) == "running"
    assert state_of(Path(), [start | {"unix": process.create_time() - 60}]) == "killed", (
        "the number is of a later process"
    )
    child = psutil.Popen(["true"])
    child.wait()
    assert state_of(Path(), [start | {"process": child.pid}]) == "killed"


def test_run_of_another_machine_runs_while_it_writes(tmp_path: Path) -> None:
    start = {"end": None, "host": "elsewhere", "process": 1, "unix": BEGAN}
    assert state_of(tmp_path, [start]) == "killed"
    (tmp_path / "metrics.jsonl").write_text("")
    assert state_of(tmp_path, [start]) == "running"
    os.utime(tmp_path / "metrics.jsonl", (0, time.time() - 3600))
    assert state_of(tmp_path, [start]) == "killed"


def test_killed_and_resumed_runs_are_read(tmp_path: Path) -> None:
    make_record(tmp_path / "out", num_steps=3, end=None, is_resumed=False)
    for path in (tmp_path / "out").rglob("*"):
        os.utime(path, (BEGAN, BEGAN))
    runs = Runs([tmp_path])
    (run,) = answer(runs, "runs", {})
    assert (run["state"], run["starts"], run["step"]) == ("killed", 1, 3)
    assert answer(runs, "step", {"step": "4"})["is_open"]


def test_options_are_those_in_force_with_what_was_given(runs: Runs) -> None:
    content = json.loads((shared_record().directory / "options.json").read_text())
    view = answer(runs, "options", {})
    assert {entry["name"]: entry["value"] for entry in view} == content["in_force"]
    assert {entry["name"] for entry in view if entry["given"]} == set(content["given"]) == {"seed", "learning_rate"}
    assert {entry["name"] for entry in view if entry["derived"]} == set(content["derived"])


def test_options_of_two_runs_are_those_that_differ(tmp_path: Path) -> None:
    copy_of(shared_record(), tmp_path / "a")
    path = copy_of(shared_record(), tmp_path / "b") / "options.json"
    content = json.loads(path.read_text())
    content["in_force"] |= {"seed": 2, "new_option": 3}
    path.write_text(json.dumps(content))
    view = answer(Runs([tmp_path]), "options", {"run": "0", "other": "1"})
    assert [(entry["name"], entry["value"], entry["other"]) for entry in view] == [
        ("seed", 1, 2),
        ("new_option", None, 3),
    ]


def test_curves_are_the_numbers_of_the_metrics(runs: Runs) -> None:
    rows, view = lines("metrics.jsonl"), answer(runs, "curves", {})
    assert view["step"] == [row["training_step"] for row in rows]
    assert view["tokens"] == [row.get("val/num_total_tokens") for row in rows]
    shown = [entry["name"] for group in view["groups"].values() for entry in group]
    assert list(view["values"]) == shown
    for name in shown:
        assert view["values"][name] == [row.get(name) for row in rows]
    numbers = {name for row in rows for name, value in row.items() if isinstance(value, int | float)}
    assert {*shown, *view["others"]} == numbers
    assert [entry["label"] for entry in view["groups"]["evaluation"]] == ["plus: share right", "minus: share right"]
    ends = {event["step"]: event["unix"] for event in lines("record/events.jsonl") if event["kind"] == "step"}
    assert view["unix"] == [None, *(ends[step] for step in view["step"][1:])]


@pytest.mark.parametrize(
    ("names", "metrics"),
    [
        ("reward", ["all_groups/scores"]),
        ("optim/grad_norm", ["optim/grad_norm"]),
        ("seconds", ["time/total", "time/trainer_waiting_for_data", "time/learners", "time/weight_sync"]),
        ("engine_rest,reward", ["engine_restarts", "all_groups/scores"]),
    ],
)
def test_curves_are_found_by_name_label_or_part(runs: Runs, names: str, metrics: list[str]) -> None:
    assert list(answer(runs, "curves", {"names": names})["values"]) == metrics


def test_curves_of_some_names_and_steps_have_nothing_else(runs: Runs) -> None:
    whole = answer(runs, "curves", {})
    view = answer(runs, "curves", {"names": "reward,grad_norm", "steps": "3,9-10"})
    assert view["step"] == [3, 9, 10]
    places = [whole["step"].index(step) for step in view["step"]]
    assert list(view["values"]) == ["all_groups/scores", "optim/grad_norm"]
    for name in ("unix", "tokens"):
        assert view[name] == [whole[name][at] for at in places]
    for name, values in view["values"].items():
        assert values == [whole["values"][name][at] for at in places]
    assert {group: [entry["name"] for entry in entries] for group, entries in view["groups"].items()} == {
        "learning": ["all_groups/scores"],
        "stability": ["optim/grad_norm"],
    }
    assert {mark["step"] for mark in view["marks"]} == {3, 9, 10}
    assert view["others"] == []


@pytest.mark.parametrize(
    ("steps", "sentence"),
    [
        ("ten", "steps has to be steps, such as 10,40 or 10-40, not 'ten'"),
        ("3,40", "the metrics have no step 40: they are 0"),
    ],
)
def test_steps_without_curves_are_a_mistake(runs: Runs, steps: str, sentence: str) -> None:
    with pytest.raises(Mistake, match=sentence):
        answer(runs, "curves", {"steps": steps})


def test_unknown_curve_is_a_mistake(runs: Runs) -> None:
    with pytest.raises(Mistake, match="no metric is named 'absent'"):
        answer(runs, "curves", {"names": "absent"})


def test_file_that_is_missing_or_broken_is_named(tmp_path: Path) -> None:
    directory = copy_of(shared_record(), tmp_path / "run")
    runs = Runs([directory])
    assert answer(runs, "curves", {})["problem"] is None
    (directory / "metrics.jsonl").unlink()
    (directory / "record" / "events.jsonl").unlink()
    (directory / "options.json").write_text('{"in_force": {')
    runs = Runs([directory])
    assert answer(runs, "curves", {})["problem"].startswith("the run has no metrics.jsonl")
    for view, arguments, sentence in (
        ("curves", {"names": "reward"}, "has no metrics.jsonl"),
        ("lanes", {}, "has no record/events.jsonl, of which lanes are made"),
        ("options", {}, "options.json is broken: copy it again"),
    ):
        with pytest.raises(Mistake, match=sentence):
            answer(runs, view, arguments)
    with pytest.raises(NoRecord, match=r"options.json is broken: .*; copy it again"):
        RunRecord(directory).options()


def test_change_of_a_metric_is_told_from_both_ends_of_the_run(runs: Runs) -> None:
    view = answer(runs, "curves", {"names": "gradient norm"})
    assert view["change"] == {"optim/grad_norm": {"first": 0.51, "last": 0.62, "of": 1}}
    assert answer(runs, "curves", {})["change"] == {}
    numbers = [float(number) for number in range(200)]
    assert change([None, *numbers, float("nan")]) == {"first": 4.5, "last": 194.5, "of": 10}
    assert change([None]) == {"first": None, "last": None, "of": 0}


def test_options_that_were_given_come_first(runs: Runs) -> None:
    options = answer(runs, "options", {})
    assert [option["given"] for option in options[:3]] == [True, True, False]
    assert options[2]["derived"]


def test_why_a_run_is_over_is_a_sentence() -> None:
    def start(reason: str, exit_code: int) -> list[dict[str, Any]]:
        return [{"end": {"reason": reason, "exit_code": exit_code}}]

    assert end_of("running", [{"end": None}]) is None
    assert end_of("ended", start("done", 0)) is None
    assert end_of("failed", start("failed: the controller died", 1)) == "The run failed: the controller died"
    assert "driver.log" in str(end_of("failed", start("failed", 1)))
    assert "exit code 85" in str(end_of("interrupted", start("interrupted", 85)))
    assert "was killed" in str(end_of("killed", [{"end": None}]))


def test_marks_are_the_events_with_the_step_that_was_under_way(runs: Runs) -> None:
    marks = [(mark["kind"], mark["step"]) for mark in answer(runs, "curves", {})["marks"]]
    assert [mark for mark in marks if mark[0] == "start"] == [("start", 0), ("start", 6)]
    assert [mark for mark in marks if mark[0] == "checkpoint"] == [("checkpoint", step) for step in (3, 6, 9, 12)]
    assert [step for kind, step in marks if kind == "sync"] == [*range(1, 13)], "each step once"
    assert ("warning", 6) in marks, "after step 5, step 6 is under way"
    assert ("fault", 11) in marks
    assert [mark for mark in marks if mark[0] == "replacement"] == [("replacement", 9)]


def test_health_has_the_newest_warnings_of_the_log(runs: Runs) -> None:
    view = answer(runs, "health", {})
    warnings = [event for event in lines("record/events.jsonl") if event["kind"] == "warning"]
    assert view["warnings"] == [{"unix": w["unix"], "level": w["level"], "text": w["text"]} for w in warnings]
    assert len(warnings) == 2


def test_rules_of_health_say_when_they_fire(runs: Runs) -> None:
    rules = {rule["name"]: rule["fires_when"] for rule in answer(runs, "health", {})["rules"]}
    assert rules["cut_off_answers"] == "all_groups/val/stop_rate is below 0.75 in each of 10 steps, and does not rise"
    assert all(rules.values())


def test_alarms_of_health_are_those_of_the_steps_that_count(runs: Runs) -> None:
    events = [event for event in lines("record/events.jsonl") if event["kind"] == "health"]
    assert [event["step"] for event in events] == [4, 7, 7], "step 7 was trained twice"
    alarms = answer(runs, "health", {})["alarms"]
    assert [(alarm["rule"], alarm["step"], alarm["text"], alarm["cure"], alarm["link"]) for alarm in alarms] == [
        (event["rule"], event["step"], event["text"], event["cure"], event["link"]) for event in (events[0], events[2])
    ]


def test_what_a_view_read_is_read_again_when_its_file_changes(tmp_path: Path) -> None:
    directory = copy_of(shared_record(), tmp_path / "out")
    runs = Runs([directory])
    views: list[Callable[[], Any]] = [
        lambda: answer(runs, "step", {"step": "5"})["num_samples"],
        lambda: answer(runs, "health", {})["warnings"],
        lambda: answer(runs, "options", {})[0]["value"],
        lambda: answer(runs, "runs", {})[0]["starts"],
    ]
    before = [view() for view in views]
    steps = directory / "record" / "steps"
    os.replace(steps / "000004.parquet", steps / "000005.parquet")
    (steps / "000007.parquet").unlink()
    (directory / "record" / "events.jsonl").write_text("")
    (directory / "record" / "starts.jsonl").write_text("")
    (directory / "options.json").write_text('{"in_force": {"run_name": "another"}}')
    after = [view() for view in views]
    assert all(old != new for old, new in zip(before[1:], after[1:], strict=True))
    assert answer(runs, "step", {"step": "5"})["samples"][0]["prompt_id"] == "train-15"
    with pytest.raises(Mistake, match="no step 7"):
        answer(runs, "step", {"step": "7"})


def test_open_step_grows_and_becomes_a_trained_step(tmp_path: Path) -> None:
    directory = copy_of(shared_record(), tmp_path / "out")
    record, runs = directory / "record", Runs([directory])
    view = answer(runs, "step", {"step": "13"})
    assert (view["is_open"], view["num_samples"]) == (True, 8)
    log = record / "open" / "000013.log"
    log.write_bytes(log.read_bytes() * 2)
    assert answer(runs, "step", {"step": "13"})["num_samples"] == 16
    log.write_bytes(log.read_bytes()[:-5])
    assert answer(runs, "step", {"step": "13"})["num_samples"] in (8, 12), "what is torn is left out"
    (record / "steps" / "000012.parquet").rename(record / "steps" / "000013.parquet")
    log.unlink()
    view = answer(runs, "step", {"step": "13"})
    assert (view["is_open"], view["num_samples"]) == (False, 20)
