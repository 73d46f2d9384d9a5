"""Views of one training step: its samples and groups, the tokens on which engine and learner differ most, and search."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from open_instruct.watch.filters import Filters, in_order
from open_instruct.watch.mistakes import Mistake
from open_instruct.watch.rewards import compared, reward_of
from open_instruct.watch.runs import Run, Runs
from open_instruct.watch.samples import (
    ISSUED_AGAIN,
    SampleRow,
    ends,
    groups_of,
    lists,
    rows_of,
    table_of_step,
    texts_of,
)
from open_instruct.watch.torn_files import TornFiles

NUM_BARS = 20
TEXT_START = 300
"""Characters of a response in a list of samples."""
NEIGHBOURS = 5
"""Steps on each side with which the reward of a step is compared."""
MOST_STEPS = 50
"""Steps that a search reads, the newest first."""
SHOWN = (
    *("prompt_id", "attempt", "sample", "row", "source", "outcome", "reward", "score", "is_right", "advantage"),
    *("environment_reward", "num_tokens", "finish_reason", "age", "engine", "verdicts", "kind", "number"),
)
"""Fields of a sample in a list of samples."""


def step(
    runs: Runs,
    step: int,
    *,
    run: int = 0,
    verifier: str | None = None,
    source: str | None = None,
    outcome: str | None = None,
    finish_reason: str | None = None,
    min_reward: float | None = None,
    max_reward: float | None = None,
    min_age: int | None = None,
    min_length: int | None = None,
    max_length: int | None = None,
    text: str | None = None,
    sort: str = "issue",
    limit: int = 50,
    offset: int = 0,
    seed: int = 0,
) -> dict[str, Any]:
    """One step: its groups, the histogram of its rewards, and the samples that pass the filters."""
    watched = runs[run]
    filters = Filters(verifier, source, outcome, finish_reason, min_reward, max_reward, min_age, min_length, max_length)
    rows = rows_of(table_of_step(watched, step))
    filters.check(_choices(rows), f"step {step}")
    passing = _with_text(watched, step, filters.keep(rows, by_reward=False), text)
    matching = filters.keep(passing)
    chosen = in_order(matching, sort, seed)[offset : offset + limit]
    return {
        "step": step,
        "is_open": watched.is_open(step),
        "num_samples": len(rows),
        "counts": dict(Counter(group[0]["outcome"] for group in groups_of(rows).values())),
        "summary": summary(watched, step, rows),
        "num_matching": len(matching),
        "samples": shown(watched, step, chosen),
        "groups": [_group(group) for group in groups_of(rows).values()],
        "histogram": histogram([row["reward"] for row in passing if row["reward"] is not None]),
        "choices": _choices(rows),
        "tokenizer_problem": watched.decode.problem,
    }


def _with_text(run: Run, step: int, rows: Sequence[SampleRow], text: str | None) -> list[SampleRow]:
    """The samples whose response contains a text, in any case."""
    if not text:
        return list(rows)
    texts = texts_of(run, table_of_step(run, step), [row["at"] for row in rows])
    return [row for row, response in zip(rows, texts, strict=True) if text.lower() in response.lower()]


def shown(run: Run, step: int, rows: Sequence[SampleRow]) -> list[dict[str, Any]]:
    """Samples as a list shows them, each with the beginning of its text."""
    texts = texts_of(run, table_of_step(run, step), [row["at"] for row in rows])
    return [
        {"step": step, **{name: row[name] for name in SHOWN}, "text": text[:TEXT_START]}
        for row, text in zip(rows, texts, strict=True)
    ]


def histogram(values: Sequence[float]) -> dict[str, list]:
    """Bars of equal width. The lowest and the highest value are in the middle of the first and last bar, so that rewards on a
    grid are not on an edge."""
    if not len(values):
        return {"edges": [], "counts": []}
    low, high = min(values), max(values)
    half = (high - low) / (NUM_BARS - 1) / 2 or 0.5
    counts, edges = np.histogram(values, bins=NUM_BARS if high > low else 1, range=(low - half, high + half))
    return {"edges": edges.tolist(), "counts": counts.tolist()}


def _choices(rows: Sequence[SampleRow]) -> dict[str, list[str]]:
    """The values that a filter may have."""
    verifiers = {verdict["name"] for row in rows for verdict in row["verdicts"] or ()}
    names = ("source", "outcome", "finish_reason")
    return {"verifier": sorted(verifiers), **{name: sorted({row[name] for row in rows}) for name in names}}


def _group(rows: Sequence[SampleRow]) -> dict[str, Any]:
    first, conversations = rows[0], ends(rows)
    rights = [row["is_right"] for row in conversations]
    return {
        **{name: first[name] for name in ("prompt_id", "attempt", "row", "source", "outcome")},
        "num_samples": len(rows),
        "reward": float(np.mean([row["reward"] for row in conversations])) if conversations else None,
        "num_right": None if None in rights or not rights else sum(map(bool, rights)),
        "num_conversations": len(conversations),
    }


def summary(run: Run, step: int, rows: Sequence[SampleRow]) -> dict[str, Any]:
    """The mean reward of the step with its standard error, how many of its groups are all right or all wrong, the rewards of the
    steps around it, and the step before. Groups whose prompts were issued again are in none of them, as in `metrics.jsonl`."""
    groups = [_group(group) for group in groups_of(rows).values() if group[0]["outcome"] not in ISSUED_AGAIN]
    counts = [(group["num_right"], group["num_conversations"]) for group in groups if group["num_right"] is not None]
    own = reward_of(rows)
    return {
        "reward": own.mean,
        "standard_error": own.standard_error,
        "num_groups": len(groups),
        "all_right": sum(right == number for right, number in counts),
        "all_wrong": sum(right == 0 for right, _ in counts),
        "mixed": sum(0 < right < number for right, number in counts),
        "around": _around(run, step),
        "before": compared(run, step, own),
    }


def _around(run: Run, step: int) -> dict[str, Any] | None:
    """The rewards of up to five steps before and after, without the step itself; None if there are fewer than two."""
    table = run.metrics()
    if "all_groups/scores" not in table.names():
        return None
    pairs = zip(table.steps, table.column("all_groups/scores"), strict=True)
    near = {other: value for other, value in pairs if 0 < abs(other - step) <= NEIGHBOURS and value == value}
    if len(near) < 2:
        return None
    values = list(near.values())
    return {"steps": sorted(near), "mean": float(np.mean(values)), "standard_deviation": float(np.std(values, ddof=1))}


def tokens(runs: Runs, step: int, *, run: int = 0, limit: int = 20) -> dict[str, Any]:
    """The trained tokens of a step on which engine and learner differ most, and mean and maximum over all of them."""
    watched = runs[run]
    read = table_of_step(watched, step)
    table = read(
        ["prompt_id", "attempt", "sample", "row", "response_ids", "version", "engine_logprobs", "learner_logprobs"]
    )
    chosen = table.take(np.flatnonzero(table["learner_logprobs"].is_valid().to_numpy()))
    engine, offsets = lists(chosen["engine_logprobs"])
    learner, _ = lists(chosen["learner_logprobs"])
    difference = learner.astype(np.float64) - engine
    size = np.where(np.isnan(difference), -1.0, np.abs(difference))
    largest = [at for at in np.argsort(-size, kind="stable")[:limit].tolist() if size[at] >= 0]
    trained = size[size >= 0]
    return {
        "step": step,
        "num_tokens": len(trained),
        "mean": float(trained.mean()) if len(trained) else None,
        "max": float(trained.max()) if len(trained) else None,
        "tokens": [_token(watched, chosen, offsets, at, float(engine[at]), float(learner[at])) for at in largest],
        "tokenizer_problem": watched.decode.problem,
    }


def _token(run: Run, table: Any, offsets: np.ndarray, at: int, engine: float, learner: float) -> dict[str, Any]:
    number = int(np.searchsorted(offsets, at, side="right")) - 1
    place = at - int(offsets[number])
    row = table.slice(number, 1).to_pylist()[0]
    return {
        **{name: row[name] for name in ("prompt_id", "attempt", "sample", "row")},
        "at": place,
        "id": row["response_ids"][place],
        "text": run.decode.tokens(row["response_ids"])[place],
        "version": row["version"][place],
        "engine_logprob": engine,
        "learner_logprob": learner,
        "difference": learner - engine,
        "ratio": math.exp(learner - engine),
    }


def search(runs: Runs, text: str, *, run: int = 0, limit: int = 20, steps: int = MOST_STEPS) -> dict[str, Any]:
    """Samples whose response contains a text, the newest steps first; at most `steps` steps are read."""
    watched, torn = runs[run], TornFiles()
    if not text:
        raise Mistake("search needs a text.")
    samples: list[dict[str, Any]] = []
    read: list[int] = []
    for number in reversed(watched.steps()[-steps:]):
        rows = torn.read(lambda number=number: rows_of(table_of_step(watched, number)), None)
        if rows is None:
            continue
        read.append(number)
        samples += shown(watched, number, _with_text(watched, number, rows, text)[: limit - len(samples)])
        if len(samples) >= limit:
            break
    return {"text": text, "samples": samples, "steps_read": read, "num_steps": len(watched.steps())} | {
        "torn": torn.sentences
    }


def export_rows(
    runs: Runs,
    step: int,
    *,
    run: int = 0,
    verifier: str | None = None,
    source: str | None = None,
    outcome: str | None = None,
    finish_reason: str | None = None,
    min_reward: float | None = None,
    max_reward: float | None = None,
    min_age: int | None = None,
    min_length: int | None = None,
    max_length: int | None = None,
    text: str | None = None,
    sort: str = "issue",
    limit: int = 10_000,
) -> list[dict[str, Any]]:
    """Samples of a step as rows for training: whole texts of prompt and response, reward, ground truth, and place in the data.
    Those without a reward are left out."""
    watched = runs[run]
    filters = Filters(verifier, source, outcome, finish_reason, min_reward, max_reward, min_age, min_length, max_length)
    read = table_of_step(watched, step)
    samples = [row for row in rows_of(read) if row["reward"] is not None]
    filters.check(_choices(samples), f"step {step}")
    rows = in_order(_with_text(watched, step, filters.keep(samples), text), sort, 0)[:limit]
    positions = [row["at"] for row in rows]
    prompts, responses = texts_of(watched, read, positions, "prompt_ids"), texts_of(watched, read, positions)
    return [
        {"prompt": prompt, "response": response}
        | {name: row[name] for name in ("reward", "ground_truth", "row", "source", "prompt_id", "sample")}
        for row, prompt, response in zip(rows, prompts, responses, strict=True)
    ]
