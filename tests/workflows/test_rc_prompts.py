"""Templates, think tags, and texts that are made shorter."""

import time
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rc_fakes import codec

from open_instruct.chat_codec import special_tokens
from open_instruct.workflows.rc.prompts import (
    REASONING_FIELDS,
    answer_of,
    fill_template,
    reasoning_for_summary,
    summary_of,
    template_mistakes,
    thoughts_of,
    with_opening_tag,
)


@pytest.mark.parametrize(
    ("raw", "thoughts", "answer"),
    [
        ("abc", "abc", "abc"),
        ("<think>T</think>A", "T", "A"),
        ("T</think>A", "T", "A"),
        ("<think>T", "T", ""),
        ("<think>T1</think>A<think>T2</think>B", "T1", "B"),
        ("<think>T1</think>A<think>T2", "T1", "A"),
        ("", "", ""),
        ("</think>", "", ""),
        ("<think>", "", ""),
    ],
)
def test_thoughts_and_answer(raw: str, thoughts: str, answer: str) -> None:
    assert thoughts_of(raw) == reasoning_for_summary(raw, "thoughts") == thoughts
    assert answer_of(raw) == answer
    assert summary_of(raw) == answer.strip()


def test_parts_for_the_summary() -> None:
    assert reasoning_for_summary("<think>T</think>A", "answer") == "A"
    assert reasoning_for_summary("<think>T</think>A", "both") == "Thoughts:\nT\n\nAnswer:\nA"
    assert reasoning_for_summary("abc", "both") == "abc"


@given(st.text(alphabet="ab<>/", max_size=8), st.lists(st.sampled_from(["<think>", "</think>", "x", " "]), max_size=8))
def test_no_part_has_a_tag_whatever_is_said(text: str, parts: list[str]) -> None:
    raw = text + "".join(parts)
    for part in ("thoughts", "answer", "both"):
        processed = reasoning_for_summary(raw, part)
        assert "<think>" not in processed
        assert "</think>" not in processed


def test_the_opening_tag_is_not_doubled() -> None:
    assert with_opening_tag("T</think>A") == "<think>T</think>A"
    assert with_opening_tag("\n<think>T") == "\n<think>T"


def test_known_fields_alone_are_replaced_and_once() -> None:
    template = r"{problem} \boxed{x} \boxed{{}} {{problem}} {} {0} \frac{a}{\sqrt{b}} {curr_summary}"
    filled = fill_template(template, {"problem": "{curr_summary}", "curr_summary": "{problem}"})
    assert filled == r"{curr_summary} \boxed{x} \boxed{} {problem} {} {0} \frac{a}{\sqrt{b}} {problem}"


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{problem} {curr_summary}", []),
        (r"{problem} {curr_summary} \boxed{answer} {{name}} {}", []),
        ("{problem} {curr_summary} {summary}", ["{summary} is no field"]),
        ("{problem}", ["lacks {curr_summary}"]),
        (r"\boxed{problem} {curr_summary}", ["lacks {problem}"]),
    ],
)
def test_mistakes_in_a_template(template: str, told: list[str]) -> None:
    found = template_mistakes(template, fields=REASONING_FIELDS, required=REASONING_FIELDS)
    assert len(found) == len(told)
    assert all(part in mistake for part, mistake in zip(told, found, strict=True))


def test_shortened_keeps_both_ends() -> None:
    text = "BEGIN " + "word " * 200 + "END"
    short = codec().shortened(text, 50)
    assert short.startswith("BEGIN")
    assert short.endswith("END")
    assert len(codec().encode(short)) <= 52
    assert codec().shortened("short", 50) == "short"
    assert codec().decode(codec().encode(codec().shortened(text, 0))).strip() == "[…]"


@given(st.text())
def test_token_ids_are_the_tokenizers_own(text: str) -> None:
    one = codec()
    tokenizer: Any = one._tokenizer
    expected = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert one.encode(text) == expected
    tokenizer(text, truncation=True, max_length=1)  # leaves that in the tokenizer
    assert one.encode(text) == expected


@given(st.lists(st.text()))
def test_token_ids_of_many_texts_are_the_tokenizers_own(texts: list[str]) -> None:
    one = codec()
    tokenizer: Any = one._tokenizer
    tokenizer(["a", "b c"], truncation=True, max_length=1, padding=True)  # leaves both in the tokenizer
    assert one.encode_all(texts) == [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def test_special_tokens_that_are_spelled_out_go() -> None:
    assert codec().without_special_tokens("a<|user|>b<|end|>") == "ab"


@pytest.mark.parametrize(
    "text",
    [
        "<|e<|end|>nd|>",
        "<|e<|e<|end|>nd|>nd|>",
        "<|end<|user|>|>",
        "<|us<think>er|>",
        "<|end|",
        "<" * 50 + "<|end|>" * 50,
    ],
)
def test_what_a_model_wrote_never_becomes_a_control_token(text: str) -> None:
    """Also where leaving one out, or a tag, joins the halves of another."""
    one = codec()
    control = {one._tokenizer.convert_tokens_to_ids(token) for token in special_tokens(one._tokenizer)}
    plain = Counter(token for token in one.chat_prompt("x") if token in control)
    for written in (text, thoughts_of(f"<think>{text}</think>"), reasoning_for_summary(text, "both")):
        assert Counter(token for token in one.chat_prompt(f"so {written} it is") if token in control) == plain


def test_leaving_special_tokens_out_takes_linear_time() -> None:
    nested = "<|e" * 20_000 + "nd|>" * 20_000
    started = time.perf_counter()
    assert codec().without_special_tokens(nested) == ""
    assert time.perf_counter() - started < 3
