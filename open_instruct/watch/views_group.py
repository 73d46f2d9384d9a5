"""Views of a group, with its answers side by side, and of one sample, with its tokens."""

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from open_instruct.record import schema
from open_instruct.watch.decoding import common_length
from open_instruct.watch.mistakes import Mistake
from open_instruct.watch.runs import Run, Runs
from open_instruct.watch.samples import (
    LISTS,
    SampleRow,
    Table,
    groups_of,
    prompt_number,
    rows_of,
    table_of_evaluation,
    table_of_step,
    texts_of,
)

OF_GROUP = ("step", "set", "prompt_id", "attempt", "row", "source", "outcome", "ground_truth")
OF_SAMPLE = (
    *("sample", "reward", "score", "is_right", "advantage", "environment_reward", "verdicts", "finish_reason"),
    *("num_tokens", "age", "engine", "kind", "number", "goes_on", "parent", "weight", "kv_age", "issue_version"),
    *("began", "generation_s", "tool_s", "score_s", "arrived", "rank", "mini_batch", "micro_batch", "position"),
    *("oldest_version", "newest_version"),
)
THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
END_THINK, THINK = "</think>", "<think>"


def group(runs: Runs, step: int, prompt_id: str, *, run: int = 0, attempt: int | None = None) -> dict[str, Any]:
    """A group side by side: the prompt once, and each answer with what it was worth."""
    watched = runs[run]
    return _group(watched, table_of_step(watched, step), prompt_id, attempt, f"step {step}")


def evaluation(
    runs: Runs, version: int, set: str, *, run: int = 0, limit: int = 200, offset: int = 0
) -> dict[str, Any]:
    """The answers of an evaluation set at a version, item by item."""
    watched = runs[run]
    read = table_of_evaluation(watched, version, set)
    groups = list(groups_of(rows_of(read)).values())
    chosen = groups[offset : offset + limit]
    prompts = texts_of(watched, read, [rows[0]["at"] for rows in chosen], "prompt_ids")
    texts = iter(texts_of(watched, read, [row["at"] for rows in chosen for row in rows]))
    return {
        "version": version,
        "set": set,
        "num_items": len(groups),
        "items": [
            {
                **{name: rows[0][name] for name in OF_GROUP},
                "prompt_text": prompt,
                "samples": [{**{name: row[name] for name in OF_SAMPLE}, "text": next(texts)} for row in rows],
            }
            for rows, prompt in zip(chosen, prompts, strict=True)
        ],
        "tokenizer_problem": watched.decode.problem,
    }


def sample(
    runs: Runs, step: int, prompt_id: str, sample: int, *, run: int = 0, attempt: int | None = None
) -> dict[str, Any]:
    """One response with its tokens: who wrote each, what each is used for, and what engine and learner say of it."""
    watched = runs[run]
    return _sample(watched, table_of_step(watched, step), prompt_id, sample, attempt, f"step {step}")


def evaluation_sample(
    runs: Runs, version: int, set: str, prompt_id: str, sample: int, *, run: int = 0
) -> dict[str, Any]:
    """The same for a response of an evaluation."""
    watched = runs[run]
    read = table_of_evaluation(watched, version, set)
    return _sample(watched, read, prompt_id, sample, None, f"the evaluation of {set} at version {version}")


def _rows(read: Table, prompt_id: str, attempt: int | None, place: str) -> list[SampleRow]:
    """The samples of a group; by default of the last attempt. Raises `Mistake` if there is none."""
    groups = groups_of(rows_of(read, prompt_id=prompt_id))
    attempts = [number for _, number in groups if attempt in (None, number)]
    if not attempts:
        names = sorted(set(read(["prompt_id"])["prompt_id"].to_pylist()), key=prompt_number)
        some = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
        suffix = "" if attempt is None else f" with attempt {attempt}"
        raise Mistake(
            f"{place} has no prompt {prompt_id}{suffix}. It has {len(names)}: {some}. `why {prompt_id}` says where it is."
        )
    return groups[prompt_id, attempts[-1]]


def _group(run: Run, read: Table, prompt_id: str, attempt: int | None, place: str) -> dict[str, Any]:
    rows = _rows(read, prompt_id, attempt, place)
    texts = texts_of(run, read, [row["at"] for row in rows])
    return {
        **{name: rows[0][name] for name in OF_GROUP},
        "prompt_text": texts_of(run, read, [rows[0]["at"]], "prompt_ids")[0],
        "samples": [
            {**{name: row[name] for name in OF_SAMPLE}, "text": text, "parts_at": part}
            for row, text, part in zip(rows, texts, parting(texts), strict=True)
        ],
        "tokenizer_problem": run.decode.problem,
    }


def parting(texts: Sequence[str]) -> list[int | None]:
    """For each text the first character from which on no other text is like it; None if another text is the same."""
    places: list[int | None] = []
    for number, text in enumerate(texts):
        shared = [common_length(text, other) for at, other in enumerate(texts) if at != number]
        is_unique = all(other != text for at, other in enumerate(texts) if at != number)
        places.append(max(shared, default=0) if is_unique else None)
    return places


def _sample(run: Run, read: Table, prompt_id: str, number: int, attempt: int | None, place: str) -> dict[str, Any]:
    rows = _rows(read, prompt_id, attempt, place)
    row = next((row for row in rows if row["sample"] == number), None)
    if row is None:
        raise Mistake(
            f"{prompt_id} has no sample {number} in {place}: its samples are {', '.join(str(r['sample']) for r in rows)}."
        )
    values = {name: read([name])[name][row["at"]].as_py() for name in LISTS}
    pieces = run.decode.tokens(values["response_ids"])
    prompt = run.decode.tokens(values["prompt_ids"])
    return {
        **{name: row[name] for name in (*OF_GROUP, *OF_SAMPLE, "answer_start")},
        "uses": {schema.USES[code]: count for code, count in row["uses"].items()},
        "prompt_tokens": prompt,
        "prompt_ids": values["prompt_ids"],
        "turns": list(turns(pieces, values["use"], opens_thought=_is_open("".join(prompt)))),
        "tokens": [_token(row, values, at, piece) for at, piece in enumerate(pieces)],
        "tokenizer_problem": run.decode.problem,
    }


def _token(row: SampleRow, values: dict[str, Any], at: int, text: str) -> dict[str, Any]:
    use, version = values["use"][at], values["version"][at]
    is_sampled = use not in (schema.GIVEN, schema.TAUGHT)
    engine = values["engine_logprobs"][at] if is_sampled else None
    learner, correction = _known(values["learner_logprobs"], at), _known(values["correction"], at)
    difference = None if learner is None or engine is None else learner - engine
    newest = row["step"] if row["set"] is not None else row["step"] - 1
    return {
        "text": text,
        "id": values["response_ids"][at],
        "use": use,
        "use_text": schema.USES[use],
        "version": version if is_sampled else None,
        "age": newest - version if is_sampled else None,
        "engine_logprob": engine,
        "learner_logprob": learner,
        "difference": difference,
        "ratio": None if difference is None else math.exp(min(difference, 700.0)),
        "correction": correction,
        "advantage": row["advantage"] if use == schema.TRAINED else None,
    }


def _known(values: Sequence[float] | None, at: int) -> float | None:
    """None where a value is not known."""
    return None if values is None or math.isnan(values[at]) else values[at]


def _is_open(prompt: str) -> bool:
    """Whether a prompt ends inside a thought."""
    return prompt.rfind(THINK) > prompt.rfind(END_THINK)


def turns(pieces: Sequence[str], uses: Sequence[int], *, opens_thought: bool = False) -> Iterator[dict[str, Any]]:
    """The response in stretches of tokens, `from` … `to` (without it): `model`, `given` (inserted), or `thought` (between the
    model's <think> and </think>)."""
    roles = ["given" if use in (schema.GIVEN, schema.TAUGHT) else "model" for use in uses]
    thoughts = _thoughts(pieces, opens_thought)
    roles = [
        "thought" if role == "model" and is_thought else role for role, is_thought in zip(roles, thoughts, strict=True)
    ]
    begins = 0
    for at in range(1, len(roles) + 1):
        if at == len(roles) or roles[at] != roles[begins]:
            yield {"role": roles[begins], "from": begins, "to": at}
            begins = at


def _thoughts(pieces: Sequence[str], opens_thought: bool) -> list[bool]:
    """For each token whether it is a part of a thought, the tags included."""
    text = "".join(pieces)
    prefix = THINK if opens_thought else ""
    spans = [(match.start() - len(prefix), match.end() - len(prefix)) for match in THOUGHT.finditer(prefix + text)]
    inside, at = [], 0
    for piece in pieces:
        ends = at + len(piece)
        inside.append(any(begins < max(ends, at + 1) and at < stop for begins, stop in spans))
        at = ends
    return inside
