"""What a run leaves behind: rows of metrics, the summary, the plot."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.health import RULES
from open_instruct.report import run_log
from open_instruct.report.run_log import METRICS_FILE, PLOT_FILE, SUMMARY_FILE, RunLog
from open_instruct.report.run_summary import PromptCounts, RunSummary


class FakeTracker:
    """Remembers what a tracker is told."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, Any]]] = []
        self.exit_code: int | None = None
        self.alerts: list[tuple[str, str, int]] = []
        self.starts: list[int] = []

    def started(self, after_step: int) -> None:
        self.starts.append(after_step)

    def alert(self, title: str, text: str, step: int) -> None:
        self.alerts.append((title, text, step))

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self.rows.append((step, dict(metrics)))

    def log_table(self, name: str, rows: list[dict[str, Any]], step: int) -> None:
        self.rows.append((step, {name: rows}))

    def finish(self, exit_code: int = 0) -> None:
        self.exit_code = exit_code


pytestmark = pytest.mark.usefixtures("restored_logging")


@pytest.fixture
def tracker(monkeypatch: pytest.MonkeyPatch) -> FakeTracker:
    fake = FakeTracker()
    monkeypatch.setattr(run_log, "make_tracker", lambda *_: fake)
    return fake


@pytest.fixture
def make_log(tmp_path: Path, tracker: FakeTracker) -> Iterator[Callable[[], RunLog]]:
    """Logs of one output directory; each further one is a resumption."""
    logs: list[RunLog] = []

    def make() -> RunLog:
        args = GRPOConfig(
            model_name_or_path="m",
            output_dir=str(tmp_path),
            total_episodes=6 * 64,
            alerts=["scores=5", "eval/scores=7"],
        )
        logs.append(RunLog(args))
        return logs[-1]

    yield make
    for log in logs:
        log.close()


@pytest.fixture
def log(make_log: Callable[[], RunLog]) -> RunLog:
    log = make_log()
    log.started(0, None)
    return log


def row_of(step: int, score: float = 1.0) -> dict[str, Any]:
    return {
        "training_step": step,
        "scores": score,
        "all_groups/scores": score,
        "learner_response_tokens_per_second_step": 10.0,
        "queue/prompts": 1,
        "queue/results": 2,
        "avg_sample_age": 1.0,
    }


def evaluation_of(accuracy: float) -> dict[str, float]:
    return {"eval/pass_at_1": accuracy, "eval/scores": 10 * accuracy}


def written(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / METRICS_FILE).read_text().splitlines()]


def steps_of(directory: Path) -> list[int]:
    return [row["training_step"] for row in written(directory)]


SUMMARY = RunSummary(
    eval_accuracy_before=0.25,
    eval_accuracy_after=None,
    training_steps=2,
    wall_seconds=3.5,
    tokens_per_second=100.0,
    prompts=PromptCounts(issued=9, consumed=6, dropped={"zero_std": 2, "run_ended": 1}, reissued=4),
    checkpoint="out/model",
    plot=None,
)


def test_a_row_is_there_when_its_step_is_over(log: RunLog, tmp_path: Path, tracker: FakeTracker) -> None:
    for step in (1, 2, 3):
        log.step(row_of(step))
        assert steps_of(tmp_path) == list(range(1, step + 1))
        assert [number for number, _ in tracker.rows] == list(range(1, step + 1))


def test_an_evaluation_joins_the_row_of_its_step(log: RunLog, tmp_path: Path, tracker: FakeTracker) -> None:
    log.step(row_of(1))
    log.evaluation(1, evaluation_of(0.5))
    assert written(tmp_path) == [row_of(1) | evaluation_of(0.5)]
    log.step(row_of(2))
    assert written(tmp_path) == [row_of(1) | evaluation_of(0.5), row_of(2)]
    assert tracker.rows == [(1, row_of(1)), (1, evaluation_of(0.5)), (2, row_of(2))]


def test_the_evaluation_of_a_resumed_run_joins_the_row_that_an_earlier_process_wrote(
    make_log: Callable[[], RunLog], tmp_path: Path, tracker: FakeTracker
) -> None:
    killed = make_log()
    killed.started(0, None)
    killed.step(row_of(1))
    killed.step(row_of(2))
    resumed = make_log()
    resumed.started(2, Path("checkpoint"))
    assert tracker.starts == [-1, 2]
    resumed.evaluation(2, evaluation_of(0.5))
    assert written(tmp_path) == [row_of(1), row_of(2) | evaluation_of(0.5)]


def test_alerts_are_raised_on_steps_and_on_evaluations(
    log: RunLog, tmp_path: Path, caplog: pytest.LogCaptureFixture, tracker: FakeTracker
) -> None:
    log.step(row_of(1, score=6.0))
    log.evaluation(1, evaluation_of(0.8))
    log.evaluation(2, evaluation_of(0.4))
    step_alert, evaluation_alert = "scores is 6, above 5", "eval/scores is 8, above 7"
    assert [row.get("alerts") for row in written(tmp_path)] == [
        {"scores": step_alert, "eval/scores": evaluation_alert},
        None,
    ]
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == [f"alert at step 1: {step_alert}", f"alert at step 1: {evaluation_alert}"]
    assert tracker.alerts == [("alert", step_alert, 1), ("alert", evaluation_alert, 1)]


def test_the_evaluation_before_the_first_step_has_a_row_of_its_own(log: RunLog, tmp_path: Path) -> None:
    log.evaluation(0, evaluation_of(0.25))
    log.step(row_of(1))
    assert written(tmp_path) == [{"training_step": 0, **evaluation_of(0.25)}, row_of(1)]


def test_an_evaluation_does_not_get_into_the_row_of_another_step(log: RunLog, tmp_path: Path) -> None:
    log.step(row_of(1))
    log.evaluation(2, evaluation_of(0.5))
    assert written(tmp_path) == [row_of(1), {"training_step": 2, **evaluation_of(0.5)}]


def test_answers_of_an_evaluation_have_a_file_of_their_own(log: RunLog, tmp_path: Path) -> None:
    answers = [{"prompt": "1 + 1", "response": "zwölf \ud800", "scores": 0.0}]
    log.evaluation(3, evaluation_of(0.5) | {"sample_completions": answers})
    assert written(tmp_path) == [{"training_step": 3, **evaluation_of(0.5)}]
    (line,) = (tmp_path / "completions" / "step_000003.jsonl").read_text().splitlines()
    assert json.loads(line) == {"prompt": "1 + 1", "response": "zwölf ?", "scores": 0.0}


def test_answers_that_cannot_be_written_end_no_run(log: RunLog, tmp_path: Path) -> None:
    (tmp_path / "completions").write_text("a file in the way")
    log.evaluation(3, evaluation_of(0.5) | {"sample_completions": [{"prompt": "x"}]})
    assert steps_of(tmp_path) == [3]


def test_rows_after_the_checkpoint_are_cut_on_resume(make_log: Callable[[], RunLog], tmp_path: Path) -> None:
    killed = make_log()
    killed.started(0, None)
    for step in (1, 2, 3):
        killed.step(row_of(step, score=1.0))
    with open(tmp_path / METRICS_FILE, "ab") as file:
        file.write(b'{"training_step": 4, "sco')
    resumed = make_log()
    resumed.started(2, Path("checkpoint"))
    assert steps_of(tmp_path) == [1, 2]
    resumed.step(row_of(3, score=7.0))
    assert [(row["training_step"], row["scores"]) for row in written(tmp_path)] == [(1, 1.0), (2, 1.0), (3, 7.0)]


def test_a_run_without_a_checkpoint_starts_with_no_rows(make_log: Callable[[], RunLog], tmp_path: Path) -> None:
    killed = make_log()
    killed.started(0, None)
    killed.evaluation(0, evaluation_of(0.25))
    make_log().started(0, None)
    assert written(tmp_path) == []


def test_the_end_leaves_summary_table_and_plot(
    log: RunLog, tmp_path: Path, tracker: FakeTracker, capsys: pytest.CaptureFixture[str]
) -> None:
    log.step(row_of(1))
    log.step(row_of(2))
    summary = log.ended(SUMMARY, exit_code=0)
    log.close()
    assert steps_of(tmp_path) == [1, 2]
    assert json.loads((tmp_path / SUMMARY_FILE).read_text()) == {
        "eval_accuracy_before": 0.25,
        "eval_accuracy_after": None,
        "eval_reward_before": None,
        "eval_reward_after": None,
        "training_steps": 2,
        "wall_seconds": 3.5,
        "tokens_per_second": 100.0,
        "prompts": {"issued": 9, "consumed": 6, "dropped": {"zero_std": 2, "run_ended": 1}, "reissued": 4},
        "checkpoint": "out/model",
        "plot": str(tmp_path / PLOT_FILE),
        "eval_sets": {},
        "alarms": {},
    }
    assert (tmp_path / PLOT_FILE).read_bytes().startswith(b"\x89PNG")
    assert summary.plot == str(tmp_path / PLOT_FILE)
    assert "25.0%" in capsys.readouterr().out
    assert tracker.exit_code == 0


def test_without_a_row_there_is_no_plot(log: RunLog, tmp_path: Path) -> None:
    log.ended(SUMMARY, exit_code=0)
    assert json.loads((tmp_path / SUMMARY_FILE).read_text())["plot"] is None
    assert not (tmp_path / PLOT_FILE).exists()


def test_a_run_that_did_not_end_well_says_so_to_the_tracker(log: RunLog, tracker: FakeTracker) -> None:
    log.close()
    assert tracker.exit_code == 1


def test_a_failure_is_one_line_and_its_traceback_is_in_the_file(
    log: RunLog, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        raise ValueError("--seed -1: too small")
    except ValueError as error:
        log.failed(error)
    text = capsys.readouterr().err
    assert "--seed -1: too small" in text
    assert "Traceback" not in text
    assert "Traceback" in (tmp_path / "logs" / "driver.log").read_text()


def test_the_live_line_shows_the_step_and_the_last_accuracy(
    make_log: Callable[[], RunLog], capsys: pytest.CaptureFixture[str]
) -> None:
    log = make_log()
    log.started(0, None)
    log.evaluation(0, evaluation_of(0.25))
    log.step(row_of(6, score=3.0))
    text = capsys.readouterr().err
    assert "step 6/6" in text
    assert "reward 3.000  10 tok/s" in text  # of how much is not known
    assert "queues 1/2" in text
    assert "eval 25% (step 0)" in text


def test_the_live_line_names_each_evaluation_set_and_its_step(
    make_log: Callable[[], RunLog], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = make_log()
    log.started(0, None)
    log.evaluation(2, {"eval/plus/pass_at_1": 0.1, "eval/minus/pass_at_1": 0.2, "eval/pass_at_1": 0.15})
    log.evaluation(4, {"eval/plus/pass_at_1": 0.5})
    log.step(row_of(6))
    assert "eval plus 50% (step 4), minus 20% (step 2)" in capsys.readouterr().err
    text = (tmp_path / "logs" / "driver.log").read_text()
    assert "evaluation after step 2: plus 10.0% right, minus 20.0% right" in text
    assert log.accuracies_at(6) is None


def test_an_evaluation_of_graded_rewards_tells_their_mean(make_log: Callable[[], RunLog], tmp_path: Path) -> None:
    """An answer that an environment gave 0.9 is not right, and a run that goes from 0.1 to 0.9 has learned nevertheless."""
    log = make_log()
    log.started(0, None)
    log.evaluation(2, {"eval/pass_at_1": 0.0, "eval/scores": 4.5, "eval/objective/environment_reward": 0.45})
    log.evaluation(
        4, {"eval/a/pass_at_1": 0.1, "eval/a/scores": 1.0, "eval/a/objective/environment_reward": 0.1}
    )  # nothing graded
    text = (tmp_path / "logs" / "driver.log").read_text()
    assert "evaluation after step 2: 0.0% right, environment reward 0.450" in text
    assert text.endswith("evaluation after step 4: a 10.0% right\n")


def test_the_live_line_says_how_much_a_reward_can_be(
    make_log: Callable[[], RunLog], capsys: pytest.CaptureFixture[str]
) -> None:
    log = make_log()
    log.started(0, None)
    log.step(row_of(6, score=0.469), highest_reward=10.0)
    assert "reward 0.469 of 10  " in capsys.readouterr().err


@pytest.mark.parametrize(("num_cut", "words"), [(1, "1 later row cut"), (2, "2 later rows cut")])
def test_a_resumed_run_says_how_many_rows_it_cuts(
    make_log: Callable[[], RunLog], tmp_path: Path, capsys: pytest.CaptureFixture[str], num_cut: int, words: str
) -> None:
    killed = make_log()
    killed.started(0, None)
    for step in range(1, 3 + num_cut):
        killed.step(row_of(step))
    make_log().started(2, Path("checkpoint"))
    assert f"after step 2 ({words})" in capsys.readouterr().err


def test_answers_of_a_set_stay_when_a_resumed_run_evaluates_another_set_at_the_step(
    log: RunLog, tmp_path: Path
) -> None:
    for name, number in (("plus", 1), ("minus", 2), ("plus", 3)):
        answers = [{"set": name, "response": str(number)}]
        log.evaluation(3, evaluation_of(0.5) | {"sample_completions": answers})
    lines = (tmp_path / "completions" / "step_000003.jsonl").read_text().splitlines()
    assert [json.loads(line)["response"] for line in lines] == ["2", "3"]


# --- health -----------------------------------------------------------------------------------------------------------

CUT_OFF = "all_groups/val/stop_rate"
SENTENCE = "90% of the answers of 10 steps are cut off"


def cut_off_run(log: RunLog, num_steps: int = 11) -> None:
    """Nine of ten answers of each step are cut off; `cut_off_answers` tells it after ten steps."""
    log.started(0, None)
    for step in range(1, num_steps + 1):
        log.step({**row_of(step), CUT_OFF: 0.1})


def events_of(directory: Path, kind: str) -> list[dict[str, Any]]:
    lines = (directory / "record" / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def test_an_alarm_is_in_the_log_the_row_the_live_line_the_journal_and_the_table(
    make_log: Callable[[], RunLog],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    tracker: FakeTracker,
) -> None:
    log = make_log()
    log._args.total_episodes = 11 * 64  # the line of the last step is printed at once
    cut_off_run(log)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith(f"cut_off_answers at step 10: {SENTENCE}. Raise --response_length, or ")
    assert tracker.alerts == [("cut_off_answers", warning.removeprefix("cut_off_answers at step 10: "), 10)]
    assert warning.endswith(" (docs/start/what_to_watch.md#do-the-answers-stay-sane)")
    alerts = {"health/cut_off_answers": SENTENCE}
    assert [row.get("alerts") for row in written(tmp_path)] == [*[None] * 9, alerts, None]
    (event,) = events_of(tmp_path, "health")
    assert (event["rule"], event["step"], event["text"]) == ("cut_off_answers", 10, SENTENCE)
    assert event["cure"].startswith("Raise --response_length")
    assert event["link"].endswith("#do-the-answers-stay-sane")
    assert "age 1.0  ⚠ cut_off_answers" in capsys.readouterr().err
    log.ended(SUMMARY, exit_code=0)
    assert json.loads((tmp_path / SUMMARY_FILE).read_text())["alarms"] == {"cut_off_answers": 10}
    assert "alarms                 cut_off_answers (step 10)" in capsys.readouterr().out


def test_alerts_of_a_limit_and_of_a_rule_share_the_row(log: RunLog, tmp_path: Path) -> None:
    for step in range(1, 11):
        log.step({**row_of(step, score=6.0), CUT_OFF: 0.1})
    assert written(tmp_path)[-1]["alerts"] == {"scores": "scores is 6, above 5", "health/cut_off_answers": SENTENCE}


def test_an_evaluation_raises_an_alarm_in_the_row_of_its_step(log: RunLog, tmp_path: Path) -> None:
    """The reward rises from 1 to 9 by its standard error of 0.1, and the evaluation falls from 9 to 5."""
    for step, accuracy in enumerate((0.2, 0.9, 0.6, 0.5), 1):
        log.step({**row_of(step), "all_groups/scores": 2.0 * step, "all_groups/scores_standard_error": 0.1})
        log.evaluation(step, {"eval/pass_at_1": accuracy, "eval/scores": 6 * accuracy})
    (text,) = written(tmp_path)[-1]["alerts"].values()
    assert text == "eval/scores fell from 5.4 to 3 while the reward of training rose from 4 to 8"
    assert all("alerts" not in row for row in written(tmp_path)[:-1])


def test_health_can_be_switched_off(tmp_path: Path, tracker: FakeTracker, caplog: pytest.LogCaptureFixture) -> None:
    log = RunLog(GRPOConfig(model_name_or_path="m", output_dir=str(tmp_path), total_episodes=11 * 64, health=False))
    cut_off_run(log)
    log.close()
    assert all("alerts" not in row for row in written(tmp_path))
    assert events_of(tmp_path, "health") == []
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_a_resumed_run_goes_on_with_the_rows_before(make_log: Callable[[], RunLog], tmp_path: Path) -> None:
    cut_off_run(make_log(), num_steps=9)
    resumed = make_log()
    resumed.started(8, Path("checkpoint"))
    for step in (9, 10):
        resumed.step({**row_of(step), CUT_OFF: 0.1})
    assert [row["training_step"] for row in written(tmp_path) if "alerts" in row] == [10]


def test_the_table_of_a_resumed_run_has_the_alarms_of_the_run_before(
    make_log: Callable[[], RunLog], tmp_path: Path
) -> None:
    cut_off_run(make_log(), num_steps=12)
    resumed = make_log()
    resumed.started(11, Path("checkpoint"))
    resumed.step({**row_of(12), CUT_OFF: 0.9})
    assert resumed.ended(SUMMARY, exit_code=0).alarms == {"cut_off_answers": 10}


def test_a_rule_of_the_user_is_looked_at_and_a_broken_one_ends_no_run(
    tmp_path: Path, tracker: FakeTracker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(RULES, "_entries", dict(RULES._entries))
    (tmp_path / "my_rules.py").write_text(
        "from open_instruct.health import RULES\n"
        "@RULES.register('broken', metrics=['scores'])\n"
        "def broken(rows): return rows[-1]['nothing']\n"
        "@RULES.register('negative', metrics=['scores'], cure='Add 1.')\n"
        "def negative(rows): return 'the score is negative' if rows[-1]['scores'] < 0 else None\n"
    )
    modules = [str(tmp_path / "my_rules.py")]
    log = RunLog(GRPOConfig(model_name_or_path="m", output_dir=str(tmp_path / "out"), health_modules=modules))
    log.started(0, None)
    for step, score in enumerate((1.0, -1.0, 1.0), 1):
        log.step(row_of(step, score=score))
    log.close()
    assert [row.get("alerts") for row in written(tmp_path / "out")] == [
        None,
        {"health/negative": "the score is negative"},
        None,
    ]
    broken, negative = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert broken.startswith("the rule of health broken failed and is switched off: KeyError: 'nothing'")
    assert negative == "negative at step 2: the score is negative. Add 1."


def test_the_row_after_a_checkpoint_says_its_size_and_the_room_that_is_left(log: RunLog, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    (checkpoint / "learner").mkdir(parents=True)
    (checkpoint / "state.json").write_bytes(b"x" * 24)
    (checkpoint / "learner" / "states").write_bytes(b"x" * 1000)
    log.step(row_of(1))
    log.checkpoint_written(checkpoint)
    log.step(row_of(2))
    log.step(row_of(3))
    sizes = [{key: size for key, size in row.items() if key.startswith("storage/")} for row in written(tmp_path)]
    assert sizes[0] == sizes[2] == {}
    assert sizes[1]["storage/checkpoint_bytes"] == 1024
    assert sizes[1]["storage/free_bytes"] > 0


def test_a_checkpoint_that_cannot_be_looked_at_ends_no_run(log: RunLog, tmp_path: Path) -> None:
    log.checkpoint_written(tmp_path / "nowhere")
    log.step(row_of(1))
    assert steps_of(tmp_path) == [1]
