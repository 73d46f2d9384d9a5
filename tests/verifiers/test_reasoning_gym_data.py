"""Mixer entries for reasoning-gym: parameters, rows, and JSON that loses nothing."""

import datetime
import functools
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
import reasoning_gym
from hypothesis import given
from hypothesis import strategies as st

from open_instruct.data.sources import SourceError, iter_rows
from open_instruct.verifiers import reasoning_gym_data
from open_instruct.verifiers.reasoning_gym_data import (
    INSTRUCTION,
    decode_item,
    encode_item,
    parse_entry,
    prompt_text,
    reasoning_gym_rows,
)
from open_instruct.verifiers.registry import score_response

CHAIN_SUM = "reasoning_gym/chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=2&size=20&seed=7"


def test_rows_are_those_of_the_library() -> None:
    rows = reasoning_gym_rows(CHAIN_SUM)
    library = reasoning_gym.create_dataset(
        "chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=2, size=20, seed=7
    )
    assert len(rows) == 20
    for row, item in zip(rows, library, strict=True):
        assert row["messages"] == [{"role": "user", "content": f"{item['question']}\n{INSTRUCTION}"}]
        assert row["dataset"] == "reasoning_gym/chain_sum"
        truth = decode_item(row["ground_truth"])
        assert {key: truth[key] for key in item} == item


def test_size_and_seed_have_defaults() -> None:
    assert parse_entry("reasoning_gym/chain_sum")[2] == {"size": 1000, "seed": 42}
    assert len(reasoning_gym_rows("reasoning_gym/chain_sum")) == 1000


@pytest.mark.parametrize(
    ("query", "ending"),
    [("", f"\n{INSTRUCTION}"), ("&instruction=Just%20say%20it.", "\nJust say it."), ("&instruction=", " =")],
)
def test_instruction_can_be_replaced_and_left_out(query: str, ending: str) -> None:
    for row in reasoning_gym_rows("reasoning_gym/chain_sum?size=2" + query):
        assert row["messages"][0]["content"].endswith(ending)


def test_prompt_text_without_instruction_is_the_question() -> None:
    assert prompt_text("1 + 1 =", "") == "1 + 1 ="


def test_values_are_json_or_pythons_or_text() -> None:
    params = parse_entry('reasoning_gym/x?a=5&b=0.5&c=true&d=False&e=["%2B","-"]&f=plain&g=None')[2]
    expected = {"a": 5, "b": 0.5, "c": True, "d": False, "e": ["+", "-"], "f": "plain", "g": None}
    assert {name: params[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("reasoning_gym/chain_sun", ["no task 'chain_sun'", "nearest: chain_sum"]),
        ("reasoning_gym/chain_sum?min_term=2", ["no parameter 'min_term'", "min_terms=2", "max_digits=4"]),
        ("reasoning_gym/chain_sum?min_terms=9", ["max_terms must be >= min_terms", "it has: min_terms=2"]),
        ("reasoning_gym/chain_sum?min_terms=2.5", ["min_terms must be int", "got 2.5"]),
        ("reasoning_gym/chain_sum?min_terms=two", ["min_terms must be int", "got 'two'"]),
        ("reasoning_gym/chain_sum?min_terms=true", ["min_terms must be int", "got True"]),
        ("reasoning_gym/chain_sum?size=0", ["size must be positive"]),
        ("reasoning_gym/chain_sum?seed=x", ["seed must be int"]),
        ("reasoning_gym/chain_sum?size=5&size=6", ["size more than once"]),
        ("reasoning_gym/composite", ["Must specify at least one dataset"]),
    ],
)
def test_bad_entries_say_what_would_be_right(entry: str, words: list[str]) -> None:
    with pytest.raises(ValueError, match="reasoning_gym/") as caught:
        reasoning_gym_rows(entry)
    assert entry in str(caught.value)
    for word in words:
        assert word in str(caught.value)


class BrokenTask:
    """A task that takes its parameters and cannot make its third row."""

    def __init__(self, **_: Any) -> None:
        self.score_answer = None

    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> dict:
        if number == 2:
            raise KeyError("grid")
        return {"question": "q", "answer": "a", "metadata": {}}


def test_a_row_that_a_task_cannot_make_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reasoning_gym, "create_dataset", lambda *_, **__: BrokenTask())
    rows = iter_rows("reasoning_gym/maze?size=4", "train", None, None)
    assert [str(next(rows).place), str(next(rows).place)] == ["index 0", "index 1"]
    with pytest.raises(
        SourceError, match=r"maze\?size=4': its row at index 2 cannot be made \('grid'\): give other parameters"
    ):
        next(rows)


@pytest.mark.parametrize("slow", ["making it", "its first row"])
def test_parameters_that_take_for_ever_are_told_and_leave_the_limits_of_before(
    monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    def create(*_: Any, **__: Any) -> Any:
        if slow == "making it":
            time.sleep(60)
        return SlowTask()

    class SlowTask(BrokenTask):
        def __getitem__(self, number: int) -> dict:
            time.sleep(60)
            return {}

    monkeypatch.setattr(reasoning_gym, "create_dataset", create)
    monkeypatch.setattr(reasoning_gym_data, "MAKING_S", 1)
    limits, handler = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGALRM)
    seconds = signal.alarm(1000)  # somebody else's, such as pytest's
    try:
        with pytest.raises(ValueError, match=f"maze': {slow} takes over 1 s: give smaller parameters"):
            reasoning_gym_rows("reasoning_gym/maze")
    finally:
        assert 900 < signal.alarm(seconds) <= 1000
    assert signal.getsignal(signal.SIGALRM) is handler
    assert resource.getrlimit(resource.RLIMIT_AS) == limits


def test_entries_that_follow_the_hash_seed_are_refused_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ValueError, match="start with PYTHONHASHSEED=0"):
        reasoning_gym_rows("reasoning_gym/knight_swap?size=1")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert len(reasoning_gym_rows("reasoning_gym/knight_swap?size=1")) == 1


def rows_under_hash_seed(entry: str, hash_seed: int) -> str:
    code = f"from open_instruct.verifiers.reasoning_gym_data import reasoning_gym_rows; print(reasoning_gym_rows({entry!r}))"
    env = os.environ | {"PYTHONHASHSEED": str(hash_seed)}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(("entry", "same"), [(CHAIN_SUM, True), ("reasoning_gym/ransom_note?size=5", False)])
def test_hash_ordered_tasks_still_are(entry: str, same: bool) -> None:
    """Where the second case fails, the library has mended that task: take it off HASH_ORDERED_TASKS."""
    assert (rows_under_hash_seed(entry, 1) == rows_under_hash_seed(entry, 2)) == same


def test_rows_that_the_library_draws_without_a_seed_are_the_same_each_time() -> None:
    entry = "reasoning_gym/list_functions?size=40&seed=5"
    state = random.getstate()
    rows = reasoning_gym_rows(entry)
    assert random.getstate() == state
    random.random()
    assert reasoning_gym_rows(entry) == rows
    assert reasoning_gym_rows(entry.replace("=40", "=20")) == rows[:20]
    other = reasoning_gym_rows(entry.replace("=5", "=6"))
    assert [row["messages"] for row in other] != [row["messages"] for row in rows]


def test_rows_of_time_intervals_do_not_know_what_day_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    import reasoning_gym.arithmetic.time_intervals as module

    class Tomorrow(datetime.date):
        @classmethod
        def today(cls) -> "Tomorrow":
            return cls(2031, 2, 3)

    entry = "reasoning_gym/time_intervals?size=40&seed=5"
    rows = reasoning_gym_rows(entry)
    monkeypatch.setattr(module, "date", Tomorrow)
    monkeypatch.setattr(
        module.parser, "parse", functools.partial(module.parser.parse, default=datetime.datetime(2031, 2, 3))
    )
    assert reasoning_gym_rows(entry) == rows
    for row in rows:
        answer = decode_item(row["ground_truth"])["answer"]
        assert score_response(row["dataset"], row["ground_truth"], [], f"<answer>{answer}</answer>").score == 1.0


words = st.text("ab_é", max_size=4)
keys = st.one_of(words, st.integers(), st.tuples(st.integers(), st.integers()))
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), words, st.floats(allow_nan=False), st.fractions()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.tuples(inner, inner), st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=6,
)


@given(metadata=st.dictionaries(words, values, max_size=3))
def test_items_survive_json(metadata: dict) -> None:
    item = {"question": "q", "answer": "a", "metadata": metadata}
    assert repr(decode_item(encode_item(item))) == repr(item)


def test_rows_of_gsm_symbolic_with_fractions_are_made() -> None:
    rows = reasoning_gym_rows("reasoning_gym/gsm_symbolic?size=60&seed=3")
    assert any("__fraction__" in row["ground_truth"] for row in rows)


BROKEN_FRACTION = '{"question": "q", "answer": "4", "metadata": {"__fraction__": [1, 0]}}'


@pytest.mark.parametrize("text", ["{", "[]", '{"answer": "4"}', "4", BROKEN_FRACTION])
def test_what_is_no_item_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - json's own words in one case
        decode_item(text)


def test_plain_json_of_an_item_is_taken() -> None:
    item = {"question": "q", "answer": "a", "metadata": {"n": 1}}
    assert decode_item(json.dumps(item)) == item
