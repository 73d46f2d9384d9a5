"""Answers that are shown where a step has nothing to train on."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from group_fakes import make_group

from open_instruct.rollouts import shown_answers as module
from open_instruct.rollouts.shown_answers import readable, scores_in_words, shown_answers

TEXTS = {0: "67 + 97 = 154.", 1: "One\nline\x1b[31m and\u202e more"}


def rows(ground_truth: object = "164", dataset: str = "re_search") -> Any:
    return [
        SimpleNamespace(
            place=f"train.jsonl line {line}", dataset=dataset, ground_truth=ground_truth, raw_query="67 + 97?"
        )
        for line in (5, 9)
    ]


def groups(*scores: float) -> list[Any]:
    return [
        make_group([score] * 4, index=index, prompt_id=f"train-{index}", dataset="re_search")
        for index, score in enumerate(scores)
    ]


def test_two_answers_with_score_label_and_the_rule_of_the_verifier() -> None:
    zero = groups(0.0, 0.0)
    texts = {id(zero[number].samples[0]): text for number, text in TEXTS.items()}
    lines = shown_answers(zero, rows(), lambda samples: [texts[id(sample)] for sample in samples]).splitlines()
    assert lines == [
        "  train-0, train.jsonl line 5: score 0, stop",
        "    prompt  67 + 97?",
        "    answer  67 + 97 = 154.",
        "    label   164",
        "    rule    re_search: 1 if the first `<finish>…</finish>` after the thoughts equals one of the labels.",
        "  train-1, train.jsonl line 9: score 0, stop",
        "    prompt  67 + 97?",
        "    answer  One\\nline\\x1b[31m and\\u202e more",
        "    label   164",
        "    rule    re_search: 1 if the first `<finish>…</finish>` after the thoughts equals one of the labels.",
    ]


def test_scores_are_counted_by_verifier() -> None:
    advice = "Where no response scores, the cause is more often a verifier"
    assert scores_in_words(groups(0.0, 0.0)).startswith(f"0 of 8 responses scored above 0 by re_search. {advice}")
    assert scores_in_words(groups(1.0, 0.0)) == "4 of 8 responses scored above 0 by re_search."


def test_one_group_shows_one_answer_and_several_verifiers_show_their_rules() -> None:
    two = rows(["164", "20"], "math + max_length")
    lines = shown_answers(groups(0.0)[:1], two, lambda samples: ["x"] * len(samples)).splitlines()
    assert [line.split()[0] for line in lines] == ["train-0,", "prompt", "answer", "label", "rule", "label", "rule"]


def test_a_verifier_that_fails_to_say_its_rule_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> str:
        raise KeyError("label")

    monkeypatch.setattr(module, "scoring_rule", fails)
    assert "does not say what it looks for: KeyError" in shown_answers(groups(0.0), rows(), lambda samples: ["x"])


def test_a_long_text_shows_its_beginning_and_its_end() -> None:
    text = readable("begin " + "x" * 5000 + " \\boxed{7}")
    assert text.startswith("begin xxx")
    assert text.endswith("\\boxed{7}")
    assert "(5,016 characters)" in text
    assert len(text) < 340
    assert readable("\ud800ü漢\t") == "\\ud800ü漢\\t"
    readable("\ud800").encode()  # can be written
    assert np.isfinite(len(readable("")))
