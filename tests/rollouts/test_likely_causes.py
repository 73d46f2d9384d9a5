"""The likeliest causes of a step with nothing to train on, by what its responses show."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from group_fakes import make_group

from open_instruct.rollouts.likely_causes import Texts, likely_causes, scores_in_words
from open_instruct.scored_groups import Reading, ScoredGroup

NOTHING_READ = Reading("", "no <finish>…</finish>")


def group(scores: Sequence[float], reading: Reading | None = None, **facts: Any) -> ScoredGroup:
    readings = () if reading is None else ((reading,) * len(scores),)
    return replace(make_group(scores, dataset="re_search", **facts), readings=readings)


def causes(*groups: ScoredGroup, text: str = "x", full_text: str | None = None, answer: str = "164") -> str:
    texts = Texts(lambda samples: [text] * len(samples), lambda _: full_text or text, lambda _: (answer,))
    return likely_causes(groups, texts)


def test_scores_are_counted_by_verifier() -> None:
    assert scores_in_words([group([0.0] * 4), group([0.0] * 4)]) == "0 of 8 responses scored above 0 by re_search."
    assert scores_in_words([group([1.0] * 4), group([0.0] * 4)]) == "4 of 8 responses scored above 0 by re_search."


@pytest.mark.parametrize(
    ("text", "elsewhere"), [("67 + 97 = 154.", ""), ("It is 164.", " The label stands somewhere in 8 of them.")]
)
def test_answers_without_the_form_that_the_verifier_reads(text: str, elsewhere: str) -> None:
    assert causes(group([0.0] * 4, NOTHING_READ), group([0.0] * 4, NOTHING_READ), text=text) == (
        f"re_search found no answer in 8 of 8 responses (no <finish>…</finish>).{elsewhere} Ask for this form in the prompt "
        "(--system_prompt_override_file), or choose the verifier that reads the form which the model writes (the column "
        "`dataset`, --remap_verifier)."
    )


def test_answers_that_are_read_and_differ_from_their_labels() -> None:
    said = causes(group([0.0] * 4, Reading("154")))
    assert said.startswith(
        "re_search read an answer in 4 of 4 responses, and none equals its label, such as '154' for '164'."
    )
    assert "--ground_truths_key" in said


def test_cut_off_responses_come_first() -> None:
    said = causes(group([0.0] * 4, NOTHING_READ, reasons=["length"] * 3 + ["stop"]))
    assert said.startswith("3 of 4 responses were cut off, after 2 tokens: raise --response_length")
    assert "found no answer in 4 of 4" in said
    assert "cut off" not in causes(group([0.0] * 4, NOTHING_READ, reasons=["length"] + ["stop"] * 3))


def test_a_label_in_special_tokens_is_seen() -> None:
    said = causes(group([0.0] * 4, NOTHING_READ), text="It is", full_text="It is <|164|>")
    assert said.startswith("4 of 4 responses hold the label in special tokens, which verifiers do not see")
    assert "special tokens" not in causes(group([0.0] * 4, NOTHING_READ), text="164", full_text="164<|end|>")


def test_a_digit_in_a_response_is_no_evidence() -> None:
    assert "somewhere" not in causes(group([0.0] * 4, NOTHING_READ), text="7 or 8", answer="7")


def test_right_answers_and_answers_that_are_the_same() -> None:
    assert causes(group([1.0] * 4), group([1.0] * 4)).startswith("Every response is right")
    same = group([1.0] * 4)
    samples = [replace(sample, response_ids=same.samples[0].response_ids) for sample in same.samples]
    same = replace(same, result=replace(same.result, samples=samples))
    assert causes(same, replace(same, scores=same.scores * 0)).startswith(
        "In 2 of 2 groups all responses are the same text"
    )
    assert causes(group([1.0] * 4), group([0.0] * 4)).startswith("Each prompt is too hard or too easy")


def test_a_verifier_that_says_nothing_leaves_the_usual_advice() -> None:
    assert causes(group([0.0] * 4, Reading())).startswith(
        "Where no response scores, the cause is more often a verifier"
    )
    assert causes(replace(group([0.0] * 4), left_out_as="zero_std")) == ""


def test_what_an_environment_calls_right_is_not_blamed_on_the_verifier() -> None:
    unread = group([0.0] * 4, NOTHING_READ)
    samples = [replace(sample, environment_reward=1.0) for sample in unread.samples]
    assert causes(replace(unread, result=replace(unread.result, samples=samples))).startswith("Every response is right")
