"""Texts of tokens together are the text, whatever the tokens are."""

import shutil
from pathlib import Path

import pytest
from conftest import TINY_MODEL
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from open_instruct.watch.decoding import Decoder, common_length

TOKENIZER = Tokenizer.from_file(str(TINY_MODEL / "tokenizer.json"))
DECODER = Decoder([TINY_MODEL], "tiny")


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, TOKENIZER.get_vocab_size() - 1), max_size=30))
def test_texts_of_any_tokens_are_the_text(ids: list[int]) -> None:
    texts = DECODER.tokens(ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == DECODER.text(ids) == TOKENIZER.decode(ids, skip_special_tokens=False)


def test_character_of_several_tokens_is_in_the_last_of_them() -> None:
    ids = TOKENIZER.encode("a日b", add_special_tokens=False).ids
    assert DECODER.tokens(ids) == ["a", "", "", "日", "b"]
    assert DECODER.tokens(ids[:3]) == ["a", "", "\ufffd"], "bytes that are no whole character"
    assert DECODER.tokens([]) == []


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Metaspace(),
        decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
        decoders.WordPiece(),
    ],
)
def test_texts_are_the_text_with_other_decoders(tmp_path: Path, decoder: object) -> None:
    words = ["▁one", "▁two", "th", "##ree", "<0xE6>", "<0x97>", "<0xA5>", "▁", "!"]
    model = models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="!")
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoder  # pyrefly: ignore
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    own = Decoder([tmp_path], "")
    for ids in ([0, 1], [0, 2, 3], [4, 5, 6], [0, 4, 5], [4, 8, 5, 6, 1], [7, 7, 0], [1, 8, 8], [5]):
        assert "".join(own.tokens(ids)) == tokenizer.decode(ids, skip_special_tokens=False)
        assert len(own.tokens(ids)) == len(ids)


def test_special_tokens_are_shown() -> None:
    ids = TOKENIZER.encode("<|user|>Hello<|end|>").ids
    assert DECODER.text(ids) == "<|user|>Hello<|end|>"


def test_tokenizer_is_looked_for_in_one_place_after_the_other(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    shutil.copytree(TINY_MODEL, tmp_path / "model")
    decoder = Decoder([tmp_path / "absent", tmp_path / "broken", tmp_path / "model"], "owner/absent")
    assert decoder.text([21]) == TOKENIZER.decode([21])
    assert decoder.problem is None, "it was found after all"


@pytest.mark.parametrize("name", ["owner/absent", "", "a/b/c/d", "../x"])
def test_text_without_a_tokenizer_is_token_ids(tmp_path: Path, name: str) -> None:
    decoder = Decoder([tmp_path], name)
    assert decoder.texts([[1, 22], []]) == ["[1][22]", ""]
    assert decoder.tokens([1, 22]) == ["[1]", "[22]"]
    assert "is not on this machine, so texts are token ids" in (decoder.problem or "")


def test_common_length() -> None:
    assert [common_length(*pair) for pair in (("abc", "abd"), ("", "a"), ("ab", "abc"), ("x", "y"))] == [2, 0, 2, 0]
