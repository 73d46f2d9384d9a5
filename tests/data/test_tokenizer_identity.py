"""Two tokenizers have one identity if, and only if, they turn each text into the same tokens."""

import itertools
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY_MODEL
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from open_instruct.data.run_identity import OPTIONS, differences, tokenizer_identity
from open_instruct.data.run_tokenizer import read_tokenizer

WORDS = {word: number for number, word in enumerate(("<s>", "a", "b", "c", "ab", "bc", "abc"))}


def fast(change: Callable[[Tokenizer], object] = lambda _: None, merges: tuple[str, str] = ("ab", "bc")) -> Any:
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE(WORDS, [(left, right) for left, right in merges]))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    change(backend)
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<s>")


def changed(tokenizer: Any, other: Any) -> set[str]:
    """The parts of the identity that differ."""
    one, two = tokenizer_identity(tokenizer, "x"), tokenizer_identity(other, "x")
    return {part for part in one if one[part] != two[part]}


def test_merges_in_another_order_are_another_tokenizer() -> None:
    one, other = fast(), fast(merges=("bc", "ab"))
    assert one("abc")["input_ids"] != other("abc")["input_ids"]
    assert changed(one, other) == {"rules"}


@pytest.mark.parametrize(
    "change",
    [
        lambda backend: setattr(backend, "normalizer", normalizers.Lowercase()),
        lambda backend: setattr(backend, "pre_tokenizer", pre_tokenizers.ByteLevel()),
        lambda backend: setattr(backend, "post_processor", processors.TemplateProcessing("<s> $A", None, [("<s>", 0)])),
        lambda backend: setattr(backend, "decoder", decoders.ByteLevel()),
        lambda backend: backend.add_tokens([AddedToken("ab", lstrip=True)]),
    ],
    ids=["normalizer", "pre_tokenizer", "post_processor", "decoder", "added token"],
)
def test_other_rules_for_the_same_words_are_another_tokenizer(change: Callable[[Tokenizer], object]) -> None:
    assert changed(fast(), fast(change)) == {"rules"}
    assert changed(fast(change), fast(change)) == set()


def use(tokenizer: Any) -> None:
    tokenizer(["a", "ab c abc"], padding=True, truncation=True, max_length=2)


def test_a_tokenizer_that_was_used_has_the_identity_that_it_had(tmp_path: Path) -> None:
    tokenizer = fast()
    use(tokenizer)
    assert changed(tokenizer, fast()) == set()
    tokenizer.save_pretrained(tmp_path)  # with its truncation and padding
    assert changed(read_tokenizer(str(tmp_path), None), fast()) == set()
    tiny = read_tokenizer(str(TINY_MODEL), None)
    use(tiny)
    assert changed(tiny, read_tokenizer(str(TINY_MODEL), None)) == set()


def slow(directory: Path, merges: tuple[str, ...] = ("a b</w>", "b c</w>")) -> Any:
    """A tokenizer that has no backend."""
    directory.mkdir()
    words = ("<unk>", "a@@", "b@@", "a", "b", "c", "ab", "bc")
    (directory / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    (directory / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "CTRLTokenizer"}))
    return read_tokenizer(str(directory), None)


def test_a_tokenizer_without_a_backend_is_compared_by_its_files(tmp_path: Path) -> None:
    one, moved = slow(tmp_path / "one"), slow(tmp_path / "moved")
    other = slow(tmp_path / "other", merges=("b c</w>", "a b</w>"))
    assert not hasattr(one, "backend_tokenizer")
    one("a ab", truncation=True, max_length=2)
    assert changed(one, moved) == set()
    moved.chat_template = "{{ messages }}"
    assert changed(one, moved) == {"chat_template"}
    assert changed(one, other) == {"rules"}


def test_rules_that_are_python_code_are_not_known() -> None:
    class Jieba:
        def pre_tokenize(self, text: Any) -> None: ...

    tokenizer = fast()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(Jieba())
    assert tokenizer_identity(tokenizer, "x")["rules"] is None


def of_run(tokenizer: dict[str, Any]) -> dict[str, Any]:
    rows = {"rows": 1, "prompts": "p", "ground_truths": "g", "verifiers": "v"}
    options = {name: [] for name in OPTIONS if "mixer" in name}
    return {"options": options, "texts": {}, "tokenizer": tokenizer, "train": rows, "eval": None}


def test_rules_are_compared_as_far_as_both_sides_know_them() -> None:
    saved = tokenizer_identity(fast(), "a")
    now = of_run(tokenizer_identity(fast(merges=("bc", "ab")), "b"))
    [told] = differences(of_run(saved), now)
    assert told.startswith("the tokenizer (a then, b now) has other rules, such as merges")
    earlier = {name: value for name, value in saved.items() if name not in ("rules", "libraries")}
    assert differences(of_run(earlier), now) == []
    assert differences(of_run(saved | {"rules": None}), now) == []
    assert differences(of_run(saved | {"libraries": "tokenizers 0.1"}), now) == []
    [told] = differences(of_run(earlier | {"special": "other"}), now)
    assert told.endswith("has other special tokens")


def test_other_words_are_told_once() -> None:
    now = of_run(tokenizer_identity(fast(lambda backend: backend.add_tokens(["more"])), "x"))
    [told] = differences(of_run(tokenizer_identity(fast(), "x")), now)
    assert told.endswith("has other words")


def test_the_identity_of_a_large_tokenizer_is_cheap() -> None:
    from transformers import PreTrainedTokenizerFast

    letters = [chr(0x100 + number) for number in range(387)]
    merges = list(itertools.product(letters, letters))
    vocabulary = {word: number for number, word in enumerate([*letters, *map("".join, merges)])}
    assert len(vocabulary) > 150_000
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocabulary, merges)))
    started = time.process_time()
    tokenizer_identity(tokenizer, "large")
    assert time.process_time() - started < 1.5  # about 0.5 s


def test_a_moved_tokenizer_is_the_same(tmp_path: Path) -> None:
    moved = shutil.copytree(TINY_MODEL, tmp_path / "moved")
    assert changed(read_tokenizer(str(moved), None), read_tokenizer(str(TINY_MODEL), None)) == set()
