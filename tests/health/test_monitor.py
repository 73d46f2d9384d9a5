"""The rules run on a run: each alarm is told once, a broken rule ends no run, and memory and time are bounded."""

import logging
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from open_instruct.config.extensions import config_class_with, import_extensions, unused_modules
from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.health import RULES, Alarm, Monitor, Rule, all_rules, assess
from open_instruct.health.monitor import EVALUATIONS, QUIET, WINDOW
from open_instruct.health.rule import Row

HIGH = "high"


def is_high(rows: Sequence[Row]) -> str | None:
    return f"{rows[-1]['value']:.0f} is high" if rows[-1]["value"] > 10 else None


def high(metrics: tuple[str, ...] = ("value",)) -> Rule:
    return Rule(HIGH, is_high, metrics, cure="Lower it.", link="page.md#high")


def steps_told(monitor: Monitor, values: Sequence[float]) -> list[int]:
    return [alarm.step for step, value in enumerate(values, 1) for alarm in monitor.look(step, {"value": value})]


def test_an_alarm_says_what_is_wrong_what_to_do_and_where_to_read() -> None:
    (alarm,) = Monitor([high()]).look(3, {"value": np.float32(12), "other": 1})
    assert alarm == Alarm(HIGH, 3, "12 is high", "Lower it.", "page.md#high", {"value": 12.0})
    assert str(alarm) == "12 is high. Lower it. (page.md#high)"
    assert str(Alarm(HIGH, 3, "12 is high", "", "", {})) == "12 is high."


def test_an_alarm_that_holds_is_told_once() -> None:
    assert steps_told(Monitor([high()]), [1, 11, 12, 13, 1]) == [2]


def test_an_alarm_is_told_again_only_after_it_was_quiet() -> None:
    quiet = [1.0] * QUIET
    assert steps_told(Monitor([high()]), [11, *quiet, 12]) == [1, QUIET + 2]
    assert steps_told(Monitor([high()]), [11, *quiet[1:], 12]) == [1]


def test_the_live_line_learns_which_alarms_hold() -> None:
    monitor = Monitor([high()])
    monitor.look(1, {"value": 11})
    assert monitor.raised == [HIGH]
    monitor.look(2, {"other": 1})  # nothing new of the rule
    assert monitor.raised == [HIGH]
    monitor.look(3, {"value": 1})
    assert monitor.raised == []


@pytest.mark.parametrize("error", [KeyError("x"), ZeroDivisionError(), RecursionError(), AssertionError()])
def test_a_rule_that_raises_is_switched_off_with_one_warning(
    caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    num_calls = 0

    def broken(rows: Sequence[Row]) -> str | None:
        nonlocal num_calls
        num_calls += 1
        raise error

    monitor = Monitor([Rule("broken", broken, ("value",)), high()])
    with caplog.at_level(logging.WARNING):
        assert steps_told(monitor, [11, 12, 13]) == [1]
    assert num_calls == 1
    (record,) = caplog.records
    assert record.getMessage().startswith("the rule of health broken failed and is switched off: ")


def test_a_rule_that_returns_no_sentence_is_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    rule = Rule("wrong", lambda rows: True, ("value",))  # type: ignore[arg-type, return-value]
    assert steps_told(Monitor([rule]), [1, 2]) == []
    assert "TypeError: the rule wrong returned True; it must return a sentence or None" in caplog.text


def test_a_rule_sees_the_rows_that_have_all_of_its_metrics_and_is_asked_about_new_ones_alone() -> None:
    lengths: list[tuple[int, int]] = []

    def remember(rows: Sequence[Row]) -> None:
        lengths.append((rows[-1]["training_step"], len(rows)))

    monitor = Monitor([Rule("both", remember, ("a", "b"))])  # type: ignore[arg-type]
    for step, row in enumerate([{"a": 1, "b": 1}, {"a": 1}, {"a": 1, "b": None}, {"a": 1, "b": 2}, {"c": 1}], 1):
        monitor.look(step, row)
        monitor.look(step, {"added": 1})
    assert lengths == [(1, 1), (4, 2)]


def test_an_evaluation_that_ends_later_is_seen_with_the_rows_up_to_its_step() -> None:
    seen: list[list[Any]] = []

    def remember(rows: Sequence[Row]) -> None:
        seen.append([(row["training_step"], row["value"], row["eval/scores"]) for row in rows])

    monitor = Monitor([Rule("evaluation", remember, ("value", "eval/scores"))])  # type: ignore[arg-type]
    for step in (1, 2, 3):
        monitor.look(step, {"value": step})
    monitor.look(2, {"eval/scores": 0.5})
    monitor.look(4, {"value": 4})
    monitor.look(0, {"eval/scores": 0.1})  # has no row of a step
    assert seen == [[(2, 2, 0.5)]]


def test_evaluations_are_seen_longer_than_steps() -> None:
    seen: list[Row] = []

    def remember(rows: Sequence[Row]) -> None:
        seen[:] = rows

    monitor = Monitor([Rule("all", remember, ("value",))])  # type: ignore[arg-type]
    num_steps = 100 * (EVALUATIONS + 5) + WINDOW
    for step in range(1, num_steps + 1):
        monitor.look(step, {"value": step, **({"eval/scores": 0.5} if step % 100 == 0 else {})})
    assert len(seen) == WINDOW + EVALUATIONS
    assert [row["training_step"] for row in seen[-WINDOW:]] == list(range(num_steps - WINDOW + 1, num_steps + 1))
    assert [row["training_step"] for row in seen[:2]] == [600, 700]  # the oldest 5 of 55 are forgotten


def test_a_window_holds_numbers_alone() -> None:
    monitor = Monitor([high()])
    monitor.look(1, {"value": 1, "hist": {"edges": [0.0] * 20, "counts": [0] * 20}, "name": "x" * 1000})
    assert monitor._rows == [{"training_step": 1, "value": 1}]


def test_a_step_of_a_long_run_is_looked_at_in_milliseconds() -> None:
    """A step of the smallest demo takes half a second, and a hundredth of that is 5 ms; a busy machine has ten times as long."""
    names = {name for rule in all_rules() for name in rule.metrics} | {f"metric/{number}" for number in range(200)}
    rng, monitor = np.random.default_rng(0), Monitor()
    seconds = []
    for step in range(1, 401):
        row = dict(zip(names, rng.random(len(names)).tolist(), strict=True)) | {"training_step": step}
        began = time.process_time()
        monitor.look(step, row)
        seconds.append(time.process_time() - began)
    assert sorted(seconds)[len(seconds) // 2] < 0.05


def test_a_resumed_run_knows_the_rows_before() -> None:
    def count(rows: Sequence[Row]) -> str | None:
        return "three rows" if len(rows) == 3 else None

    monitor = Monitor([Rule("count", count, ("value",))])
    monitor.remember([{"training_step": step, "value": 1} for step in (1, 2)])
    assert [alarm.step for alarm in monitor.look(3, {"value": 1})] == [3]


def test_assess_gives_the_first_alarm_of_each_rule() -> None:
    low = Rule("low", lambda rows: "low" if rows[-1]["value"] < 2 else None, ("value",))
    values = [5, 11, *[5] * QUIET, 1, 12, *[5] * QUIET, 1]
    rows = [{"training_step": step, "value": value} for step, value in enumerate(values, 1)]
    assert [(alarm.rule, alarm.step) for alarm in assess(rows, [low, high()])] == [(HIGH, 2), ("low", QUIET + 3)]
    assert assess(rows[:1]) == assess([]) == []


# --- rules of a user --------------------------------------------------------------------------------------------------

OWN = """
    from open_instruct.health import RULES

    @RULES.register("{name}", metrics=["batch/prompt_lengths_mean"], cure="Lower --max_prompt_token_length.")
    def long_prompts(rows):
        mean = rows[-1]["batch/prompt_lengths_mean"]
        return f"prompts have {{mean:.0f}} tokens on average" if mean > 1000 else None
"""


@pytest.fixture
def own_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Writes a file with a rule of that name. What it registers is forgotten after the test."""
    monkeypatch.setattr(RULES, "_entries", dict(RULES._entries))

    def write(name: str) -> str:
        path = tmp_path / f"my_{name}.py"
        path.write_text(textwrap.dedent(OWN.format(name=name)))
        return str(path)

    return write


def test_a_rule_comes_with_one_file(own_rule: Callable[[str], str]) -> None:
    path = own_rule("long_prompts")
    assert config_class_with({"health_modules": [path]}) == (GRPOConfig, [])
    import_extensions([path])
    (alarm,) = Monitor().look(7, {"batch/prompt_lengths_mean": 1200.0})
    assert str(alarm) == "prompts have 1200 tokens on average. Lower --max_prompt_token_length."
    assert (alarm.rule, alarm.step) == ("long_prompts", 7)
    args = GRPOConfig(model_name_or_path="m", health_modules=[path])
    assert list(unused_modules(args)) == []  # no other option has to name a rule


def test_a_rule_of_a_name_that_is_taken_is_a_mistake(own_rule: Callable[[str], str]) -> None:
    path = own_rule("cut_off_answers")
    _, (mistake,) = config_class_with({"health_modules": [path]})
    assert mistake.startswith(f"--health_modules {path}: ")
    assert "the rule of health 'cut_off_answers' exists already" in mistake
