"""Shares, errors, pass@k and flips are computed again from the tables of evaluations."""

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from made_records import SETS, shared_record, tokenizer
from rich.console import Console

from open_instruct.rollouts.evaluation_metrics import pass_at_k_metrics
from open_instruct.watch.runs import Runs
from open_instruct.watch.terminal import frame
from open_instruct.watch.views import answer
from open_instruct.watch.views_evaluation import pass_at_k


@pytest.fixture(scope="module")
def runs() -> Runs:
    return Runs([shared_record().directory])


def items(version: int, name: str) -> dict[str, list[dict[str, Any]]]:
    rows = pq.read_table(
        shared_record().directory / "record" / "evaluations" / f"{version:06d}_{name}.parquet"
    ).to_pylist()
    return {row["row"]: [other for other in rows if other["row"] == row["row"]] for row in rows}


def test_table_of_evaluations_follows_from_the_items(runs: Runs) -> None:
    view = answer(runs, "evaluations", {})
    assert (sorted(view["sets"]), view["versions"]) == (sorted(SETS), [0, 5])
    assert {(entry["set"], entry["version"]) for entry in view["table"]} == set(itertools.product(SETS, (0, 5)))
    for entry in view["table"]:
        own = items(entry["version"], entry["set"])
        shares = [np.mean([row["score"] == 1 for row in rows]) for rows in own.values()]
        assert entry["share"] == entry["pass_at_1"] == pytest.approx(np.mean(shares))
        assert entry["standard_error"] == pytest.approx(np.std(shares, ddof=1) / math.sqrt(len(shares)))
        assert entry["pass_at_k"]["2"] == pytest.approx(
            np.mean([any(r["score"] == 1 for r in rows) for rows in own.values()])
        )
        passed = [any(r["score"] == 1 for r in rows) for rows in own.values()]
        assert entry["pass_at_k_standard_error"]["2"] == pytest.approx(np.std(passed, ddof=1) / math.sqrt(len(passed)))
        assert entry["num_items"] == len(own) == 4
        assert entry["num_responses"] == 8
        assert entry["reward"] == pytest.approx(np.mean([row["reward"] for rows in own.values() for row in rows]))
    assert {entry["share"] for entry in view["table"]} == {0.375, 0.5}


def test_share_is_the_one_of_the_runs_and_of_the_metrics(runs: Runs) -> None:
    (run,) = answer(runs, "runs", {})
    curves = answer(runs, "curves", {})
    for name in SETS:
        rewards = [row["reward"] for rows in items(5, name).values() for row in rows]
        assert run["evaluations"][name] == {"version": 5, "share": 0.5, "reward": pytest.approx(np.mean(rewards))}
        values = dict(zip(curves["step"], curves["values"][f"eval/{name}/pass_at_1"], strict=True))
        assert (values[0], values[5]) == (0.375, 0.5)


def test_pass_at_k_is_that_of_the_metrics() -> None:
    rights = [[True, False, False, False, True], [False] * 5, [True, False]]
    metrics = pass_at_k_metrics([np.array(own) for own in rights])
    means = {k: np.mean(own) for k, own in pass_at_k(rights).items()}
    assert means == {str(k): pytest.approx(metrics[f"eval/pass_at_{k}_unbiased"]) for k in (1, 2, 4)}
    assert pass_at_k([]) == pass_at_k([[True]]) == {}


@pytest.mark.parametrize("name", SETS)
def test_flips_are_the_items_whose_share_changed(runs: Runs, name: str) -> None:
    before, after = items(0, name), items(5, name)
    expected = []
    for place in before:
        shares = [np.mean([row["score"] == 1 for row in rows[place]]) for rows in (before, after)]
        texts = [
            tokenizer().decode(rows[place][0]["response_ids"], skip_special_tokens=False) for rows in (before, after)
        ]
        if shares[0] != shares[1]:
            expected.append(
                {"row": place, "before": shares[0], "after": shares[1], "text_before": texts[0], "text_after": texts[1]}
            )
    flips = answer(runs, "flips", {"set": name, "version": "0", "other": "5"})
    assert flips == expected
    assert len(flips) == 3
    assert [
        (flip["after"], flip["before"]) for flip in answer(runs, "flips", {"set": name, "version": "5", "other": "0"})
    ] == [(flip["before"], flip["after"]) for flip in flips]


def test_evaluation_by_reward_functions_alone_has_no_share(tmp_path: Path) -> None:
    import pyarrow as pa
    from made_records import copy_of

    from open_instruct.watch.mistakes import Mistake

    directory = copy_of(shared_record(), tmp_path / "out")
    for file in (directory / "record" / "evaluations").iterdir():
        table = pq.read_table(file)
        verdicts = [[{**own[0], "kind": "function"}] for own in table["verdicts"].to_pylist()]
        column = pa.array(verdicts, table.schema.field("verdicts").type)
        pq.write_table(
            table.set_column(table.schema.get_field_index("verdicts"), table.schema.field("verdicts"), column), file
        )
    runs = Runs([directory])
    assert {(entry["share"], entry["standard_error"]) for entry in answer(runs, "evaluations", {})["table"]} == {
        (None, None)
    }
    newest = answer(runs, "runs", {})[0]["evaluations"]["plus"]
    rewards = [row["reward"] for rows in items(5, "plus").values() for row in rows]
    assert newest == {"version": 5, "share": None, "reward": pytest.approx(np.mean(rewards))}
    console = Console(width=200)
    with console.capture() as capture:
        console.print(frame(runs, 200))
    assert f"plus reward {np.mean(rewards):.3g} (step 5)" in capture.get()
    with pytest.raises(Mistake, match="only reward functions score plus"):
        answer(runs, "flips", {"set": "plus", "version": "0", "other": "5"})
