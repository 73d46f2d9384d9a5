"""Samples as text for people."""

from pathlib import Path

import numpy as np

from open_instruct.data_types import Sample, TrainingSample
from open_instruct.rollouts.transcripts import transcript, write_transcripts


def sample(text: str, *, sampled: str, spans: list[tuple[int, int]]) -> Sample:
    """A response whose token ids are its characters. `sampled` has a `+` for each token that the policy sampled."""
    return Sample(
        prompt_ids=np.array([ord(letter) for letter in "Q\n?"], np.int32),
        response_ids=np.array([ord(letter) for letter in text], np.int32),
        logprobs=np.zeros(len(text), np.float32),
        finish_reason="stop",
        version_spans=spans,
        loss_mask=np.array([mark == "+" for mark in sampled]),
    )


def decode(token_ids: list[int]) -> str:
    return "".join(map(chr, token_ids))


def trained(of: Sample, mask: str) -> TrainingSample:
    return TrainingSample(
        of.prompt_ids, of.response_ids, np.array([mark == "+" for mark in mask]), of.logprobs, advantage=0.5
    )


def test_transcript_shows_who_wrote_what_with_which_version_and_what_is_trained_on() -> None:
    one = sample("ab12cd", sampled="++--++", spans=[(1, 1), (3, 3), (4, 2)])
    assert transcript(one, trained(one, "-+--++"), decode).split("\n") == [
        "prompt      │ Q",
        "            │ ?",
        "too old v1  │ a",
        "trained v3  │ b",
        "given       │ 12",
        "trained v4  │ cd",
    ]


def test_transcript_of_a_single_turn_is_one_stretch() -> None:
    one = sample("a\n\nb", sampled="++++", spans=[(2, 4)])
    assert transcript(one, trained(one, "++++"), decode).split("\n")[2:] == [
        "trained v2  │ a",
        "            │",
        "            │ b",
    ]


def test_transcripts_of_a_step_replace_those_that_a_broken_run_has_left(tmp_path: Path) -> None:
    path = tmp_path / "transcripts" / "step_000001.txt"
    write_transcripts(path, [("old", "text")])
    write_transcripts(path, [("first", "one"), ("second", "\ud800 half a character")])
    assert path.read_text() == "──── first\none\n\n──── second\n? half a character\n"
