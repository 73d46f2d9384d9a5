"""Responses that the log shows."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import make_args
from group_fakes import make_group

from open_instruct.rollouts import sample_display
from open_instruct.rollouts.sample_display import SampleDisplay, rule_in_words, shortened
from open_instruct.scored_groups import Reading, ScoredGroup

READINGS = Reading("46"), Reading("45"), Reading("", "no number at the end")


def decode(token_ids: list[int]) -> str:
    return " ".join(map(str, token_ids))


def display(**options: Any) -> SampleDisplay:
    row = SimpleNamespace(place="train.jsonl line 12", dataset="gsm8k", ground_truth="46", raw_query="12 + 34?")
    rows: Any = [row] * 4
    return SampleDisplay(make_args(**options), rows, decode)


def group(scores: Sequence[float], number: int = 0) -> ScoredGroup:
    return replace(
        make_group(
            scores, prompt_id=f"train-{number}", dataset="gsm8k", reasons=["stop", "length", "stop"], spans=((0, 2),)
        ),
        readings=(READINGS,),
    )


def test_the_best_and_the_worst_with_what_the_verifier_says() -> None:
    shown = display()
    shown.look_at(1, [group([0.0, 0.0, 0.0]), group([1.0, 0.0, 0.0], number=1)])
    (text,) = shown.take()
    assert text.splitlines() == [
        "2 of the 3 responses to train-1, train.jsonl line 12:",
        "prompt      │ 7 8 9",
        "label       │ 46",
        "rule        │ gsm8k: 1 if the last number after the thoughts equals the label: `$1,234.50.` is 1234.5, `7` equals "
        "`7.0`.",
        "──── response 1: reward 10, stop, 2 tokens",
        "sampled v0  │ 0 1",
        "verifier    │ gsm8k: score 1, read 46",
        "──── response 3: reward 0, stop, 2 tokens",
        "sampled v0  │ 20 21",
        "verifier    │ gsm8k: score 0, read no answer (no number at the end)",
    ]
    assert shown.take() == []


@pytest.mark.parametrize(("every", "steps"), [(-1, [1]), (1, [1, 2, 3, 4]), (2, [1, 2, 4])])
def test_responses_are_shown_once_in_each_step_that_is_due(every: int, steps: list[int]) -> None:
    shown, seen = display(show_samples_every=every), []
    for step in range(1, 5):
        shown.look_at(step, [])
        for _ in range(2):
            shown.look_at(step, [group([1.0, 0.0, 0.0])])
            seen += [step] * len(shown.take())
    assert seen == steps


def test_more_responses_than_a_group_has_are_taken_from_the_next() -> None:
    shown = display(show_samples=4)
    shown.look_at(1, [group([1.0, 0.0, 0.0]), group([1.0, 0.0, 0.0], number=1)])
    (text,) = shown.take()
    assert [line for line in text.splitlines() if line.endswith(":")] == [
        "3 of the 3 responses to train-0, train.jsonl line 12:",
        "1 of the 3 responses to train-1, train.jsonl line 12:",
    ]
    none = display(show_samples=0)
    none.look_at(1, [group([1.0, 0.0, 0.0])])
    assert none.take() == []


def test_a_verifier_that_fails_to_say_its_rule_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> str:
        raise KeyError("label")

    monkeypatch.setattr(sample_display, "scoring_rule", fails)
    assert "does not say what it looks for: KeyError" in rule_in_words("gsm8k", "1")


def test_a_long_text_shows_its_beginning_and_its_end() -> None:
    text = shortened("begin " + "x" * 5000 + " \\boxed{7}")
    assert text.startswith("begin xxx")
    assert text.endswith("\\boxed{7}")
    assert "(5,016 characters)" in text
    assert len(text) < 1240
    assert shortened("\ud800ü漢\t\x1b[31m\n\u202e") == "\\ud800ü漢\\t\\x1b[31m\n\\u202e"


def test_repeated_responses_come_last() -> None:
    rollout = group([0.0, 0.0, 0.0])
    samples = [rollout.samples[0], replace(rollout.samples[1], finish_reason="stop"), rollout.samples[0]]
    rollout = replace(rollout, result=replace(rollout.result, samples=samples))
    lines = display().shown(rollout, 3).splitlines()
    assert [line.split(":")[0] for line in lines if line.startswith("────")] == [
        "──── response 1",
        "──── response 2",
        "──── response 3",
    ]
