"""The samples of a step as rows for views: everything but tokens, and what follows from the tokens."""

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa

from open_instruct.record import schema
from open_instruct.record.schema import SAMPLES
from open_instruct.scored_groups import UNSCORED
from open_instruct.watch.runs import Run

LISTS = ("prompt_ids", "response_ids", *schema.TOKEN_COLUMNS)
LIGHT = [field.name for field in SAMPLES if field.name not in (*LISTS, "effects")]
"""Columns without tokens and effects."""
ISSUED_AGAIN = ("too_old", UNSCORED)
"""Outcomes of groups whose prompts are issued again, or given up; no step counts these groups."""
RIGHT = 1.0 - 1e-6
"""A score, or an environment's reward, of at least this is a right response."""
SampleRow = dict[str, Any]
"""The columns of `LIGHT`, with `num_tokens`, `num_sampled`, `uses` (code: number of tokens), `oldest_version`, `newest_version`,
`age` (steps) and `is_right`."""
Key = tuple[str, int]
"""`prompt_id` and `attempt` of a group in a step."""
Table = Callable[[Sequence[str]], pa.Table]
"""Reads columns of the samples of one step or evaluation."""


def table_of_step(run: Run, step: int) -> Table:
    return lambda columns: run.table(step, columns)


def table_of_evaluation(run: Run, version: int, set_name: str) -> Table:
    return lambda columns: run.evaluation_table(version, set_name, columns)


def rows_of(read: Table, **only: Any) -> list[SampleRow]:
    """The samples, in the order of prompts, attempts and samples; `at` is the position in the table.

    `only`: the values that columns have to have, such as `prompt_id="train-17"`.
    """
    positions = _positions(read, only)
    if positions is not None and not len(positions):
        return []
    table = read([*LIGHT, "version", "use"])
    table = table if positions is None else table.take(positions)
    light = table.select(LIGHT).to_pylist()
    places = range(len(light)) if positions is None else positions.tolist()
    for at, row, facts in zip(places, light, token_facts(table), strict=True):
        row |= facts
        row["at"] = at
        row["age"] = None if row["oldest_version"] is None else _age(row)
        row["is_right"] = is_right(row)
        row["ground_truth"] = as_text(row["ground_truth"])
    return sorted(light, key=lambda row: (prompt_number(row["prompt_id"]), row["attempt"], row["sample"]))


def _positions(read: Table, only: Mapping[str, Any]) -> np.ndarray | None:
    """Where the rows are that are looked for; None: all."""
    if not only:
        return None
    table = read(list(only))
    masks = [table[name].to_numpy() == value for name, value in only.items()]
    return np.flatnonzero(np.logical_and.reduce(masks))


def as_text(value: str | None) -> str | None:
    """A ground truth for people: a text without the quotation marks of JSON, any other value as JSON."""
    with suppress(ValueError, TypeError):  # a long one is cut off
        if isinstance(text := json.loads(value or ""), str):
            return text
    return value


def _age(row: SampleRow) -> int:
    """Versions between the weights that the step trains, or the evaluation measures, and the oldest that sampled a token."""
    newest = row["step"] if row["set"] is not None else row["step"] - 1
    return newest - row["oldest_version"]


def token_facts(table: pa.Table) -> list[dict[str, Any]]:
    """For each response what its columns `use` and `version` say."""
    uses, offsets = lists(table["use"])
    versions, _ = lists(table["version"])
    sampled = is_sampled(uses)
    facts = []
    for (begins, stop), counts in zip(itertools.pairwise(offsets.tolist()), counts_of_uses(uses, offsets), strict=True):
        own = versions[begins:stop][sampled[begins:stop]]
        facts.append(
            {
                "num_tokens": stop - begins,
                "num_sampled": len(own),
                "uses": {code: count for code, count in enumerate(counts.tolist()) if count},
                "oldest_version": int(own.min()) if len(own) else None,
                "newest_version": int(own.max()) if len(own) else None,
            }
        )
    return facts


def is_sampled(uses: np.ndarray) -> np.ndarray:
    """Whether the model sampled each token: nobody inserted it."""
    return (uses != schema.GIVEN) & (uses != schema.TAUGHT)


def counts_of_uses(uses: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """(N, codes): how many tokens of each response have each use."""
    num_rows, num_codes = len(offsets) - 1, len(schema.USES)
    number = np.repeat(np.arange(num_rows), np.diff(offsets))
    return np.bincount(number * num_codes + uses, minlength=num_rows * num_codes).reshape(num_rows, num_codes)


def lists(column: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    """All values of a column of lists, and for N lists N + 1 offsets."""
    array = column.combine_chunks()
    array = array.chunk(0) if isinstance(array, pa.ChunkedArray) else array
    lengths = array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    return array.flatten().to_numpy(zero_copy_only=False), np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def is_right(row: Mapping[str, Any]) -> bool | None:
    """Whether a response is right: its score, or its environments' reward, is 1. None where it was not scored, and where only
    reward functions score, which do not say what is right."""
    if row["score"] is None:
        return None
    if row["verdicts"] and all(verdict["kind"] == "function" for verdict in row["verdicts"]):
        return None
    return row["score"] >= RIGHT or (row["environment_reward"] or 0.0) >= RIGHT


def prompt_number(prompt_id: str) -> tuple[str, int]:
    """Sorts `train-9` before `train-10`."""
    match = re.fullmatch(r"(.*?)(\d+)", prompt_id)
    return (match[1], int(match[2])) if match else (prompt_id, -1)


def groups_of(rows: Sequence[SampleRow]) -> dict[Key, list[SampleRow]]:
    """The samples of each issue of a prompt."""
    groups: dict[Key, list[SampleRow]] = {}
    for row in rows:
        groups.setdefault((row["prompt_id"], row["attempt"]), []).append(row)
    return groups


def ends(rows: Sequence[SampleRow]) -> list[SampleRow]:
    """One row for each conversation that was scored: the one in which it ends."""
    return [row for row in rows if not row["goes_on"] and row["outcome"] != UNSCORED]


def texts_of(run: Run, read: Table, positions: Sequence[int], column: str = "response_ids") -> list[str]:
    """The texts of the responses, or prompts, at these positions of the table."""
    array = read([column])[column].combine_chunks()
    return run.decode.texts([array[at].as_py() for at in positions])
