"""What verifiers say that they read, for the log and the transcripts."""

import pytest

from open_instruct.verifiers.base import VerificationResult
from open_instruct.verifiers.registry import score_response
from open_instruct.verifiers.scorers import MAX_READING, reading_of


@pytest.mark.parametrize(
    ("dataset", "label", "response", "answer", "reasoning"),
    [
        ("gsm8k", "46", "12 + 34 = 45.", "45", None),
        ("gsm8k", "46", "I do not know.", "", "no number at the end"),
        ("gsm8k", "46", "<think>12 + 34", "", "the thoughts never end, so there is no answer"),
        ("math", "46", "It is \\boxed{45}", "45", None),
        ("math", "46", "", "", "no answer found"),
        ("string_matcher", "46", "<answer>45</answer>", "45", None),
        ("string_matcher", "46", "45", "", "no <answer>...</answer>"),
        ("re_search", "46", "<finish>46</finish>", "46", None),
        ("re_search", "46", "46", "", "no <finish>…</finish>"),
        ("flan", "46", "The answer is: 45", "45", None),
        ("max_length", "46", "46", None, "1 token"),
    ],
)
def test_the_answer_that_was_read(dataset: str, label: str, response: str, answer: str, reasoning: str | None) -> None:
    reading = reading_of(score_response(dataset, label, [1], response))
    assert (reading.answer, reading.reasoning) == (answer, reasoning)


def test_readings_are_bounded_texts() -> None:
    result = VerificationResult(0.0, reasoning="x" * 500, answer=45)  # type: ignore[arg-type]  # a user's verifier may do so
    reading = reading_of(result)
    assert reading.answer == "45"
    assert reading.reasoning == "x" * (MAX_READING - 1) + "…"
