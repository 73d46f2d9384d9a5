"""Tags that are special tokens are gone before the reward looks for them."""

from collections.abc import Callable
from typing import Any

import pytest
from exhibit import Exhibit

from open_instruct.chat_codec import ChatCodec
from open_instruct.verifiers.registry import score_response

EXHIBIT = Exhibit(
    reports=("huggingface/trl #2897", "verl-project/verl #3958"),
    subject="tokens and turns",
    happened="Responses were decoded without special tokens. Where a tokenizer marks `<think>` or `<answer>` as special, "
    "the reward never saw them, and what it looks for was in no response.",
    here="Tags that a model writes stay in the decoded text even if they are special tokens; tokens that begin, end or"
    " pad a text are left out (`chat_codec.py`).",
)
TAGS = ["<think>", "</think>", "<answer>", "</answer>"]
RIGHT, WRONG = "<think>41</think><answer>42</answer>", "<think>42</think><answer>41</answer>"


def make_tokenizer() -> Any:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = "0123456789"
    backend = Tokenizer(models.WordLevel({letter: number for number, letter in enumerate(letters)}, unk_token="0"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    tokenizer.add_special_tokens({"additional_special_tokens": [*TAGS, "<turn>"]})
    return tokenizer


def check(decode: Callable[[Any, list[int]], str]) -> None:
    tokenizer = make_tokenizer()
    for text, score in ((RIGHT, 1), (WRONG, 0)):
        decoded = decode(tokenizer, tokenizer.encode(f"{text}<turn><end>")).replace(" ", "")
        assert decoded == text
        assert score_response("string_matcher", "42", [], decoded).score == score


def theirs(tokenizer: Any, token_ids: list[int]) -> str:
    return tokenizer.decode(token_ids, skip_special_tokens=True)


def ours(tokenizer: Any, token_ids: list[int]) -> str:
    return ChatCodec(tokenizer).decode(token_ids)


def test_decoding_without_tags_is_caught() -> None:
    with pytest.raises(AssertionError):
        check(theirs)


def test_tags_are_text_here() -> None:
    check(ours)
