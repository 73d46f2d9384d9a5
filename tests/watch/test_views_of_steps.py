"""Every number of the views of a step is computed again from the record's table, without the code of the views."""

import itertools
import json
import math
from collections import Counter
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from made_records import REWARD, shared_record, tokenizer

from open_instruct.record import open_log
from open_instruct.watch import rewards as rewards_of_steps
from open_instruct.watch.mistakes import Mistake
from open_instruct.watch.runs import Runs
from open_instruct.watch.views import answer
from open_instruct.watch.views_step import NUM_BARS, histogram

STEPS = range(1, 14)
Row = dict[str, Any]


@pytest.fixture(scope="module")
def runs() -> Runs:
    return Runs([shared_record().directory])


def raw(step: int) -> list[Row]:
    """The rows of a step as they are in its file."""
    record = shared_record().directory / "record"
    if (path := record / "steps" / f"{step:06d}.parquet").exists():
        return pq.read_table(path).to_pylist()
    return [row for batch in open_log.read(record / "open" / f"{step:06d}.log") for row in batch.to_pylist()]


def text_of(row: Row) -> str:
    return tokenizer().decode(row["response_ids"], skip_special_tokens=False)


def age_of(row: Row) -> int:
    sampled = [version for version, use in zip(row["version"], row["use"], strict=True) if use not in (1, 2)]
    return row["step"] - 1 - min(sampled)


def key(row: Row) -> tuple[str, int, int]:
    return row["prompt_id"], row["attempt"], row["sample"]


@pytest.mark.parametrize("step", STEPS)
def test_step_counts_and_lists_what_its_table_holds(runs: Runs, step: int) -> None:
    rows, view = raw(step), answer(runs, "step", {"step": str(step), "limit": "1000"})
    assert view["step"] == step
    assert view["is_open"] == (step == 13)
    assert view["num_samples"] == view["num_matching"] == len(rows) > 0
    outcomes = {(row["prompt_id"], row["attempt"]): row["outcome"] for row in sorted(rows, key=key, reverse=True)}
    assert view["counts"] == Counter(outcomes.values())
    assert view["choices"] == {
        "verifier": sorted({verdict["name"] for row in rows for verdict in row["verdicts"]}),
        **{name: sorted({row[name] for row in rows}) for name in ("source", "outcome", "finish_reason")},
    }
    shown = {key(sample): sample for sample in view["samples"]}
    assert len(shown) == len(rows)
    for row in rows:
        sample = shown[key(row)]
        same = ("row", "source", "outcome", "reward", "score", "advantage", "finish_reason", "engine", "verdicts")
        assert {name: sample[name] for name in same} == {name: row[name] for name in same}
        assert sample["num_tokens"] == len(row["response_ids"])
        assert sample["age"] == age_of(row)
        assert sample["text"] == text_of(row)[:300]
        assert sample["is_right"] == (None if row["score"] is None else row["score"] == 1)


@pytest.mark.parametrize("step", STEPS)
def test_groups_and_summary_of_a_step_follow_from_its_table(runs: Runs, step: int) -> None:
    view = answer(runs, "step", {"step": str(step)})
    rewards: dict[tuple[str, int], list[float]] = {}
    scores: dict[tuple[str, int], list[float]] = {}
    old = set()
    for row in raw(step):
        group = row["prompt_id"], row["attempt"]
        old |= {group} if row["outcome"] == "too_old" else set()
        if not row["goes_on"] and row["outcome"] != "not_scored":
            rewards.setdefault(group, []).append(row["reward"])
            scores.setdefault(group, []).append(row["score"])
    shown = [group for group in view["groups"] if group["outcome"] != "not_scored"]
    assert len(view["groups"]) - len(shown) == (step == 9)
    assert {(group["prompt_id"], group["attempt"]): group["reward"] for group in shown} == pytest.approx(
        {group: sum(values) / len(values) for group, values in rewards.items()}
    )
    assert {(g["prompt_id"], g["attempt"]): g["num_right"] for g in shown} == {
        group: values.count(1.0) for group, values in scores.items()
    }
    counted = [group for group in rewards if group not in old]
    means = [np.mean(rewards[group]) for group in counted]
    summary = view["summary"]
    assert summary["num_groups"] == len(counted)
    assert summary["reward"] == pytest.approx(np.mean([value for group in counted for value in rewards[group]]))
    assert summary["standard_error"] == pytest.approx(np.std(means, ddof=1) / math.sqrt(len(means)))
    assert summary["all_right"] == sum(set(scores[group]) == {1.0} for group in counted)
    assert summary["all_wrong"] == sum(1.0 not in scores[group] for group in counted)
    assert summary["mixed"] == len(counted) - summary["all_right"] - summary["all_wrong"]


def test_reward_of_a_step_is_that_of_its_metrics(runs: Runs) -> None:
    curves = answer(runs, "curves", {"names": "reward"})
    for step, reward in zip(curves["step"], curves["values"]["all_groups/scores"], strict=True):
        if step:
            assert answer(runs, "step", {"step": str(step)})["summary"]["reward"] == pytest.approx(reward)


def test_step_is_compared_with_the_step_before(runs: Runs) -> None:
    rewards = [answer(runs, "step", {"step": str(step)})["summary"]["reward"] for step in range(1, 13)]
    errors = [answer(runs, "step", {"step": str(step)})["summary"]["standard_error"] for step in range(1, 13)]
    for step in (2, 5, 12):
        before = answer(runs, "step", {"step": str(step)})["summary"]["before"]
        assert before["step"] == step - 1
        assert before["difference"] == pytest.approx(rewards[step - 1] - rewards[step - 2])
        assert before["standard_error"] == pytest.approx((errors[step - 1] ** 2 + errors[step - 2] ** 2) ** 0.5)
        sizes = [abs(after - earlier) for earlier, after in itertools.pairwise(rewards)]
        assert before["num_as_large"] == sum(size >= abs(before["difference"]) - 1e-6 for size in sizes)
        assert before["num_steps"] == 11
        assert f"from that of step {step - 1}, " in before["text"]
    assert answer(runs, "step", {"step": "1"})["summary"]["before"] is None


@pytest.mark.parametrize(
    ("difference", "words"),
    [
        (0.19, "1.9 times the standard error of the difference (0.1): chance alone explains"),
        (-0.21, "2.1 times the standard error of the difference (0.1): more than chance alone"),
    ],
)
def test_jump_of_more_than_two_standard_errors_is_more_than_chance(difference: float, words: str) -> None:
    assert words in rewards_of_steps._sentence(4, difference, 0.1, 3, 9)


def test_steps_around_a_step_are_those_of_the_metrics(runs: Runs) -> None:
    curves = answer(runs, "curves", {"names": "reward"})
    rewards = dict(zip(curves["step"], curves["values"]["all_groups/scores"], strict=True))
    near = [rewards[step] for step in (2, 3, 4, 5, 6, 8, 9, 10, 11, 12)]
    around = answer(runs, "step", {"step": "7"})["summary"]["around"]
    assert around["steps"] == [2, 3, 4, 5, 6, 8, 9, 10, 11, 12]
    assert (around["mean"], around["standard_deviation"]) == pytest.approx((np.mean(near), np.std(near, ddof=1)))


FILTERS = [
    ({"outcome": "zero_std"}, lambda row: row["outcome"] == "zero_std"),
    ({"source": "train", "finish_reason": "length"}, lambda row: row["finish_reason"] == "length"),
    ({"verifier": "brevity"}, lambda row: any(verdict["name"] == "brevity" for verdict in row["verdicts"])),
    ({"min_reward": "5", "max_reward": "9.9"}, lambda row: 5 <= (row["reward"] or 0) <= 9.9),
    ({"max_reward": "0"}, lambda row: row["reward"] is not None and row["reward"] <= 0),
    ({"outcome": "not_scored"}, lambda row: row["outcome"] == "not_scored"),
    ({"min_age": "1"}, lambda row: age_of(row) >= 1),
    ({"min_length": "12", "max_length": "14"}, lambda row: 12 <= len(row["response_ids"]) <= 14),
    ({"text": "ANSWER IS 7"}, lambda row: "answer is 7" in text_of(row).lower()),
    ({"text": "<calculator>", "min_reward": "1"}, lambda row: "<calculator>" in text_of(row)),
]


@pytest.mark.parametrize(("filters", "passes"), FILTERS)
def test_filters_keep_the_samples_that_they_name(runs: Runs, filters: dict[str, str], passes: Any) -> None:
    num_kept = 0
    for step in STEPS:
        verifiers = {verdict["name"] for row in raw(step) for verdict in row["verdicts"]}
        if filters.get("verifier") not in (None, *verifiers):
            continue
        view = answer(runs, "step", {"step": str(step), "limit": "1000", **filters})
        kept = {key(row) for row in raw(step) if passes(row)}
        assert {key(sample) for sample in view["samples"]} == kept
        assert view["num_matching"] == len(kept)
        num_kept += len(kept)
    assert 0 < num_kept < sum(len(raw(step)) for step in STEPS)


@pytest.mark.parametrize("step", STEPS)
def test_bars_of_a_step_are_filters(runs: Runs, step: int) -> None:
    view = answer(runs, "step", {"step": str(step), "min_reward": "9"})
    edges, counts = view["histogram"]["edges"], view["histogram"]["counts"]
    rewards = [row["reward"] for row in raw(step) if row["reward"] is not None]
    assert sum(counts) == len(rewards), "the histogram is over all rewards"
    for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True):
        bar = answer(runs, "step", {"step": str(step), "min_reward": repr(low), "max_reward": repr(high)})
        assert bar["num_matching"] == count == sum(low <= reward <= high for reward in rewards)


def test_histogram_has_the_extremes_in_the_middle_of_its_first_and_last_bar() -> None:
    bars = histogram([0.0, REWARD, REWARD])
    assert bars["counts"] == [1] + [0] * (NUM_BARS - 2) + [2]
    assert np.mean(bars["edges"][:2]) == pytest.approx(0)
    assert np.mean(bars["edges"][-2:]) == pytest.approx(REWARD)
    assert histogram([3.0, 3.0]) == {"edges": [2.5, 3.5], "counts": [2]}
    assert histogram([]) == {"edges": [], "counts": []}


def test_samples_come_in_the_order_that_is_asked_for(runs: Runs) -> None:
    rows = raw(5)
    for sort, value, is_reversed in (
        ("best", lambda row: -math.inf if row["reward"] is None else row["reward"], True),
        ("worst", lambda row: math.inf if row["reward"] is None else row["reward"], False),
        ("longest", lambda row: len(row["response_ids"]), True),
        ("shortest", lambda row: len(row["response_ids"]), False),
    ):
        samples = answer(runs, "step", {"step": "5", "sort": sort, "limit": "7"})["samples"]
        table = {key(row): row for row in rows}
        assert [value(table[key(sample)]) for sample in samples] == sorted(map(value, rows), reverse=is_reversed)[:7]
    issue = [sample["prompt_id"] for sample in answer(runs, "step", {"step": "2", "limit": "1000"})["samples"]]
    assert issue == [f"train-{number}" for number in range(5, 10) for _ in range(4)], "9 before 10, not 10 before 9"
    first = answer(runs, "step", {"step": "5", "sort": "random", "limit": "1", "seed": "1"})["samples"]
    picks = {
        key(answer(runs, "step", {"step": "5", "sort": "random", "limit": "1", "seed": str(seed)})["samples"][0])
        for seed in range(20)
    }
    assert first == answer(runs, "step", {"step": "5", "sort": "random", "limit": "1", "seed": "1"})["samples"]
    assert len(picks) > 5
    with pytest.raises(Mistake, match=r"no order 'oldest'. Sort by one of: issue, best, worst"):
        answer(runs, "step", {"step": "5", "sort": "oldest"})


def test_offset_goes_on_where_the_page_before_ended(runs: Runs) -> None:
    pages = [answer(runs, "step", {"step": "5", "limit": "6", "offset": str(at)})["samples"] for at in (0, 6, 12, 18)]
    assert [sample for page in pages for sample in page] == answer(runs, "step", {"step": "5", "limit": "50"})[
        "samples"
    ]


@pytest.mark.parametrize("step", STEPS)
def test_tokens_with_the_largest_difference_are_found(runs: Runs, step: int) -> None:
    differences = [
        (abs(float(learner) - float(engine)), (*key(row), at))
        for row in raw(step)
        if row["learner_logprobs"] is not None
        for at, (engine, learner) in enumerate(zip(row["engine_logprobs"], row["learner_logprobs"], strict=True))
        if not math.isnan(learner)
    ]
    view = answer(runs, "tokens", {"step": str(step), "limit": "5"})
    assert view["num_tokens"] == len(differences)
    if not differences:
        assert (view["tokens"], view["mean"], view["max"]) == ([], None, None)
        return
    assert view["mean"] == pytest.approx(np.mean([size for size, _ in differences]))
    assert view["max"] == pytest.approx(max(differences)[0])
    largest = sorted(differences, reverse=True)[:5]
    assert [(*key(token), token["at"]) for token in view["tokens"]] == [place for _, place in largest]
    table = {key(row): row for row in raw(step)}
    for token in view["tokens"]:
        row, at = table[key(token)], token["at"]
        assert (token["id"], token["version"]) == (row["response_ids"][at], row["version"][at])
        assert token["difference"] == pytest.approx(row["learner_logprobs"][at] - row["engine_logprobs"][at])
        assert token["ratio"] == pytest.approx(math.exp(token["difference"]))
        assert token["text"] in text_of(row)


def test_search_finds_all_samples_with_a_text_newest_first(runs: Runs) -> None:
    view = answer(runs, "search", {"text": "<calculator>1", "limit": "1000"})
    places = {(step, *key(row)) for step in STEPS for row in raw(step) if "<calculator>1" in text_of(row)}
    assert {(sample["step"], *key(sample)) for sample in view["samples"]} == places
    steps = [sample["step"] for sample in view["samples"]]
    assert steps == sorted(steps, reverse=True)
    assert len(steps) > 2
    few = answer(runs, "search", {"text": "<calculator>", "limit": "2"})
    assert few["samples"] == answer(runs, "search", {"text": "<calculator>", "limit": "9"})["samples"][:2]
    assert answer(runs, "search", {"text": "<calculator>", "steps": "3"})["steps_read"] == [13, 12, 11]


def test_exported_rows_are_whole_samples(runs: Runs) -> None:
    exported = answer(runs, "export_rows", {"step": "5", "outcome": "consumed", "min_reward": "9"})
    rows = {key(row): row for row in raw(5) if row["outcome"] == "consumed" and row["reward"] >= 9}
    assert len(exported) == len(rows)
    for entry in exported:
        row = next(row for place, row in rows.items() if place[::2] == (entry["prompt_id"], entry["sample"]))
        assert entry["response"] == text_of(row)
        assert entry["prompt"] == tokenizer().decode(row["prompt_ids"], skip_special_tokens=False)
        truth = json.loads(row["ground_truth"])
        assert (entry["reward"], entry["ground_truth"], entry["row"]) == (row["reward"], truth, row["row"])


def test_step_that_is_not_there_is_a_mistake_that_names_the_nearest(runs: Runs) -> None:
    with pytest.raises(Mistake, match=r"no step 40. It has 13 steps from 1 to 13; the nearest is 13"):
        answer(runs, "step", {"step": "40"})
