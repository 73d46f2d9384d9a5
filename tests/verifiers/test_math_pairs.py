"""Generated pairs of label and answer with a known verdict: no wrong answer is paid, and the document says which forms are read.

`PYTHONPATH=.:tests/fakes python tests/verifiers/test_math_pairs.py` writes the table into docs/guides/verifiers.md.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from math_pairs import Pair, examples, pairs
from math_things import KINDS

from open_instruct.verifiers import math_equivalence
from open_instruct.verifiers.registry import score_response

DOCUMENT = Path(__file__).parents[2] / "docs" / "guides" / "verifiers.md"
MOST_TIME_OUTS = 3
"""Comparisons that may take too long: a wrong answer that nobody compared is not refused for being wrong."""
BEGIN, END = "<!-- forms of math: begin -->\n", "<!-- forms of math: end -->\n"
SEED = 1


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> None:
    math_equivalence.prepare()


@pytest.fixture
def time_outs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Filled with the comparisons that took too long."""
    messages: list[str] = []
    original = math_equivalence.within

    def counted(limit_s: float, call: Callable[[], bool]) -> bool:
        try:
            return original(limit_s, call)
        except math_equivalence.TookTooLong as error:
            messages.append(str(error))
            raise

    monkeypatch.setattr(math_equivalence, "within", counted)
    return messages


def is_paid(pair: Pair) -> bool:
    return score_response("math", pair.label, [], pair.response).score == 1


def forms_read(some: Iterable[Pair]) -> dict[tuple[str, str], set[bool]]:
    """Whether right answers in each form were paid: {True}, {False}, or both."""
    read: defaultdict[tuple[str, str], set[bool]] = defaultdict(set)
    for pair in some:
        read[pair.kind, pair.form].add(is_paid(pair))
    return read


def table() -> str:
    lines = ["| what | form | label | answer | read |", "|---|---|---|---|---|"]
    for pair in examples(SEED):
        label, answer = (f"`{text}`".replace("|", "\\|") for text in (pair.label, pair.answer))
        lines.append(f"| {pair.kind} | {pair.form} | {label} | {answer} | {'yes' if is_paid(pair) else 'no'} |")
    return "\n".join(lines) + "\n"


def check(some: list[Pair], time_outs: list[str]) -> None:
    wrong = [pair for pair in some if not pair.is_right]
    assert [pair for pair in wrong if is_paid(pair)] == []
    right = [pair for pair in some if pair.is_right]
    documented = {form for form, paid in forms_read(examples(SEED)).items() if paid == {True}}
    refused = [pair for pair in right if ((pair.kind, pair.form) in documented) != is_paid(pair)]
    assert refused == []
    assert len(time_outs) <= MOST_TIME_OUTS
    assert {pair.kind for pair in wrong} == {pair.kind for pair in right} == set(KINDS)


def test_no_wrong_answer_is_paid_and_forms_are_read_as_documented(time_outs: list[str]) -> None:
    check(list(pairs(SEED, 1000)), time_outs)


def test_comparisons_that_time_out_are_seen(monkeypatch: pytest.MonkeyPatch, time_outs: list[str]) -> None:
    monkeypatch.setattr(math_equivalence, "PATIENCE_S", -1)
    math_equivalence._same_at_points.cache_clear()
    with pytest.raises(AssertionError):
        check(list(pairs(SEED, 100)), time_outs)
    assert len(time_outs) > MOST_TIME_OUTS


@pytest.mark.extended
@pytest.mark.timeout(1200)
def test_no_wrong_answer_of_twenty_thousand_pairs_is_paid(time_outs: list[str]) -> None:
    some = list(pairs(SEED + 1, 20_000))
    assert sum(pair.is_right for pair in some) == 10_000
    check(some, time_outs)


def test_pairs_are_the_same_in_each_run() -> None:
    assert list(pairs(3, 60)) == list(pairs(3, 60)) != list(pairs(4, 60))


def test_wrong_pairs_of_each_kind_are_changed_have_tails_or_are_only_thought() -> None:
    ways = defaultdict(set)
    for pair in pairs(SEED, 2000):
        if not pair.is_right:
            ways[pair.kind].add(pair.form)
    assert all(some == {"changed", "with a tail", "only thought"} for some in ways.values())


def test_document_says_which_forms_are_read() -> None:
    text = DOCUMENT.read_text()
    assert text.partition(BEGIN)[2].partition(END)[0] == table()


def test_comparisons_take_milliseconds() -> None:
    some = list(pairs(SEED, 400))
    started = time.process_time()  # a busy machine does not count
    for pair in some:
        is_paid(pair)
    assert (time.process_time() - started) / len(some) < 0.05


if __name__ == "__main__":
    math_equivalence.prepare()
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    DOCUMENT.write_text(before + BEGIN + table() + END + rest.partition(END)[2])
