"""Views of evaluations: sets over versions, and the items whose answer changed."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from open_instruct.record.reader import EvaluationFile
from open_instruct.watch.mistakes import Mistake
from open_instruct.watch.runs import Run, Runs
from open_instruct.watch.samples import SampleRow, ends, rows_of, table_of_evaluation, texts_of
from open_instruct.watch.torn_files import TornFiles


def evaluations(runs: Runs, *, run: int = 0) -> dict[str, Any]:
    """The share of right answers of each set at each version, with its standard error and pass@k."""
    watched, torn = runs[run], TornFiles()

    def entry(file: EvaluationFile) -> Any:
        return watched.cached(file.path, "evaluation", lambda: _entry(watched, file.version, file.set))

    files = torn.whole(watched.record.evaluations(), entry)
    return {
        "sets": [*dict.fromkeys(file.set for file in files)],
        "versions": sorted({file.version for file in files}),
        "table": [entry(file) for file in files],
        "torn": torn.sentences,
    }


def _entry(run: Run, version: int, set_name: str) -> dict[str, Any]:
    items = items_of(run, version, set_name)
    rewards = [row["reward"] for rows in items.values() for row in rows]
    rights = [[row["is_right"] for row in rows] for rows in items.values()]
    judged = [[bool(right) for right in own] for own in rights] if all(None not in own for own in rights) else []
    shares = [sum(own) / len(own) for own in judged]
    share = float(np.mean(shares)) if shares else None
    passes = pass_at_k(judged)
    return {
        "set": set_name,
        "version": version,
        "share": share,
        "pass_at_1": share,
        "standard_error": _standard_error(shares),
        "pass_at_k": {k: float(np.mean(own)) for k, own in passes.items()},
        "pass_at_k_standard_error": {k: _standard_error(own) for k, own in passes.items()},
        "reward": float(np.mean(rewards)) if rewards else None,
        "num_items": len(items),
        "num_responses": len(rewards),
    }


def items_of(run: Run, version: int, set_name: str) -> dict[str, list[SampleRow]]:
    """The conversations of an evaluation by the row of the data."""
    items: dict[str, list[SampleRow]] = {}
    for row in ends(rows_of(table_of_evaluation(run, version, set_name))):
        items.setdefault(row["row"], []).append(row)
    return items


def _standard_error(values: Sequence[float]) -> float | None:
    """Of the mean over items; None of fewer than two."""
    return float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None


def pass_at_k(rights: Sequence[Sequence[bool]]) -> dict[str, list[float]]:
    """For k = 1, 2, 4, … and each prompt the chance that one of k responses to it is right, estimated from its n responses of
    which c are right as 1 - C(n - c, k) / C(n, k) (Chen et al., arXiv:2107.03374, eq. 1); a prompt with n < k responses counts
    with k = n."""
    most = max(map(len, rights), default=0)
    sizes = [2**power for power in range(most.bit_length())] if most > 1 else []
    return {str(k): [_pass_at(min(k, len(own)), len(own), sum(own)) for own in rights] for k in sizes}


def _pass_at(k: int, n: int, c: int) -> float:
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def flips(runs: Runs, set: str, version: int, other: int, *, run: int = 0) -> list[dict[str, Any]]:
    """The items of a set whose share of right answers at version `other` is not that at `version`."""
    watched = runs[run]
    before, after = items_of(watched, version, set), items_of(watched, other, set)
    changed = []
    for place in [place for place in before if place in after]:
        shares = [_share(items[place]) for items in (before, after)]
        if shares[0] is None or shares[1] is None:
            raise Mistake(f"only reward functions score {set}, and they do not say what is right.")
        if shares[0] != shares[1]:
            texts = [
                _first_text(watched, number, set, items[place]) for number, items in ((version, before), (other, after))
            ]
            changed.append(
                {"row": place, "before": shares[0], "after": shares[1], "text_before": texts[0], "text_after": texts[1]}
            )
    return changed


def _share(rows: Sequence[SampleRow]) -> float | None:
    rights = [row["is_right"] for row in rows]
    return None if None in rights else sum(map(bool, rights)) / len(rights)


def _first_text(run: Run, version: int, set_name: str, rows: Sequence[SampleRow]) -> str:
    return texts_of(run, table_of_evaluation(run, version, set_name), [rows[0]["at"]])[0]
