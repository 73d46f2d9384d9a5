"""Views of one prompt: what became of it, and what the model answered to one row of the data over time."""

import difflib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from shlex import quote
from typing import Any

import pyarrow.compute as pc

from open_instruct.record import schema
from open_instruct.scored_groups import UNSCORED
from open_instruct.system.counted import counted
from open_instruct.watch.mistakes import Mistake
from open_instruct.watch.runs import Run, Runs
from open_instruct.watch.samples import (
    ISSUED_AGAIN,
    SampleRow,
    ends,
    groups_of,
    prompt_number,
    rows_of,
    table_of_evaluation,
    table_of_step,
    texts_of,
)
from open_instruct.watch.torn_files import TornFiles

STEPS_BEFORE = 200
"""Steps before the last one of a prompt in which its discarded attempts are looked for."""
MOST_ROWS = 8
"""Rows that a refusal names."""
DISCARDED = "stale_results_dropped"
REASONS = {
    "consumed": "trained on it",
    "zero_std": "left it out, because all its responses have the same reward, so that their advantages are 0",
    "masked": "left it out, because all its responses were cut off (--mask_truncated_completions)",
    "too_old": "discarded it, because its tokens were older than the bound of staleness; the prompt was issued again",
    UNSCORED: "could not use it, because too few of its responses were scored",
    "failed": "dropped it, because the engines gave it up too often",
    "run_ended": "was under way when the run ended, so nothing was trained on it",
}


def why(runs: Runs, prompt_id: str, *, run: int = 0) -> dict[str, Any]:
    """The life of a prompt in sentences, from the record."""
    watched, torn = runs[run], TornFiles()
    entry = next(
        (
            (step, prompt)
            for step, prompts in watched.prompts()
            for prompt in prompts
            if prompt["prompt_id"] == prompt_id
        ),
        None,
    )
    attempts = _attempts(watched, prompt_id, None if entry is None else entry[0], torn)
    events = watched.prompt_events().get(prompt_id, [])
    if not attempts and entry is None and not events:
        raise Mistake(_unknown(watched, prompt_id, torn))
    row = attempts[-1][0]["row"] if attempts else _row_of_entry(entry)
    return {
        "prompt_id": prompt_id,
        "row": row,
        "sentences": [*_sentences(watched, prompt_id, row, attempts, entry, events)],
        "attempts": [
            {
                "attempt": group[0]["attempt"],
                "step": group[0]["step"],
                "outcome": group[0]["outcome"],
                "rewards": [sample["reward"] for sample in group],
            }
            for group in attempts
        ],
        "torn": torn.sentences,
    }


def lives_of_step(run: Run, step: int) -> dict[str, list[str]]:
    """For each prompt of a step the sentences of `why`, of its attempts in this step alone."""
    attempts: dict[str, list[list[SampleRow]]] = {}
    for (prompt_id, _), group in groups_of(rows_of(table_of_step(run, step))).items():
        attempts.setdefault(prompt_id, []).append(group)
    return {name: [*_sentences(run, name, groups[0][0]["row"], groups, None)] for name, groups in attempts.items()}


def _row_of_entry(entry: tuple[int, dict[str, Any]] | None) -> str | None:
    return None if entry is None else entry[1].get("row")


def _attempts(run: Run, prompt_id: str, settled_in: int | None, torn: TornFiles) -> list[list[SampleRow]]:
    """The groups of a prompt in the order of steps. Those of discarded attempts are in steps before the one that settled it; a
    first attempt has none before it."""
    steps = run.steps()
    if settled_in is not None:
        groups = torn.read(lambda: _groups_in(run, settled_in, prompt_id), []) if settled_in in steps else []
        if groups and groups[0][0]["attempt"] == 0:
            return groups
        steps = [step for step in steps if step <= settled_in]
    return [
        group
        for step in steps[-STEPS_BEFORE:]
        for group in torn.read(lambda step=step: _groups_in(run, step, prompt_id), [])
    ]


def _groups_in(run: Run, step: int, prompt_id: str) -> list[list[SampleRow]]:
    """The groups of a prompt in a step, by attempt."""
    return list(groups_of(rows_of(table_of_step(run, step), prompt_id=prompt_id)).values())


def _unknown(run: Run, prompt_id: str, torn: TornFiles) -> str:
    if match := re.fullmatch(r"eval-(\d+)-\d+", prompt_id):
        for name in [file.set for file in run.record.evaluations() if file.version == int(match[1])]:
            read = table_of_evaluation(run, int(match[1]), name)
            for sample in torn.read(lambda read=read: rows_of(read, prompt_id=prompt_id), [])[:1]:
                return (
                    f"{prompt_id} is a prompt of the evaluation of {name} at version {match[1]}, which trains on nothing. Its "
                    f"answers: evaluation_sample {match[1]} {quote(name)} {prompt_id} 0; over time: row {quote(sample['row'])}"
                )
    finished = {prompt["prompt_id"] for _, prompts in run.prompts() for prompt in prompts}
    near = [name for name in {*finished, *run.prompt_events()} if name.lower() in _spellings(prompt_id)]
    if near:
        return f"the record has no prompt {prompt_id!r}. Did you mean {near[0]}?"
    names = sorted(finished, key=prompt_number)
    hint = f"Prompts of finished steps are {names[0]} to {names[-1]}." if names else "No step has finished yet."
    problem = f"the record has nothing of the prompt {prompt_id}: it was not issued, or has no scores yet."
    return " ".join([problem, hint, *torn.sentences])


def _spellings(prompt_id: str) -> tuple[str, str]:
    """What a user may mean by a prompt's name that is not there: `Train-3`, or `3` alone."""
    text = prompt_id.strip().lower()
    return text, f"train-{text.lstrip('#')}"


def _sentences(
    run: Run,
    prompt_id: str,
    row: str | None,
    attempts: Sequence[Sequence[SampleRow]],
    entry: tuple[int, dict[str, Any]] | None,
    events: Sequence[dict[str, Any]] = (),
) -> Iterator[str]:
    yield f"{prompt_id} is {_place(row)}."
    parts = [(group[0]["began"], list(_of_attempt(run, group))) for group in attempts]
    parts += [(event["unix"], [_of_event(event)]) for event in events if event["kind"] in ("lost", "given_up")]
    for _, sentences in sorted(parts, key=lambda part: part[0]):
        yield from sentences
    issues = [event for event in events if event["kind"] == "issued"]
    if not attempts and entry is None and issues:
        yield (
            f"It was issued at version {issues[-1]['version']}, at {_time(issues[-1]['unix'])}, and no step has it yet: it is "
            "with the engines, being scored, or waits for a step."
        )
    if not attempts and entry is not None:
        step, prompt = entry
        fate = prompt.get("fate", "")
        yield f"Step {step} {REASONS.get(fate, f'gave it the outcome {fate}')}."
        yield "The record has no samples of it."


def _of_event(event: dict[str, Any]) -> str:
    """What happened to a prompt besides its groups."""
    if event["kind"] == "lost":
        return f"It was lost with its engine at {_time(event['unix'])}, and issued again."
    cause = f": {event['cause']}" if event.get("cause") else ""
    then = "It is tried again." if event.get("is_tried_again") else "It is not tried again."
    return f"Engine {event['engine']} gave it up at {_time(event['unix'])}{cause}. {then}"


def _time(unix: float) -> str:
    return f"{datetime.fromtimestamp(unix, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _place(row: str | None) -> str:
    match = re.fullmatch(r"(.*) (line|row|index) (\d+)", row or "")
    return (
        f"{match[2]} {match[3]} of {match[1]}"
        if match
        else f"row {row!r} of the data"
        if row
        else "of a row that is not known"
    )


def _of_attempt(run: Run, group: Sequence[SampleRow]) -> Iterator[str]:
    first = group[0]
    again = f" again (attempt {first['attempt']})" if first["attempt"] else ""
    yield f"It was issued{again} at version {first['issue_version']} to engine {first['engine']}, {_when(first)}."
    yield f"{counted(len(group), 'response')}: {_lengths(group)}; {_versions(group)}; {_ended(group)}."
    yield f"{_scores(group)} in {first['score_s']:.2f} s."
    if run.is_open(first["step"]) and first["outcome"] == "consumed":
        yield f"Step {first['step']} has taken it and is not trained yet."
        return
    yield f"Step {first['step']} {REASONS.get(first['outcome'], 'gave it the outcome ' + first['outcome'])}{_rewards(group)}."
    if first["outcome"] == "consumed":
        yield _tokens(group)
    yield from _unscored(group)


def _unscored(group: Sequence[SampleRow]) -> Iterator[str]:
    """How many responses were not scored, and why."""
    missing = [row for row in group if row["outcome"] == UNSCORED]
    verdicts = [verdict for row in missing for verdict in row["verdicts"] or () if verdict["score"] is None]
    reasons = Counter(": ".join(filter(None, (verdict["name"], verdict["reasoning"]))) for verdict in verdicts)
    if missing:
        words = "; ".join(f"{reason} ({count})" if count > 1 else reason for reason, count in reasons.most_common(4))
        yield f"{counted(len(missing), 'response')} of it could not be used for lack of a score{f': {words}' if words else ''}."


def _when(row: SampleRow) -> str:
    tools = f", {row['tool_s']:.2f} s of them waiting for tools" if row["tool_s"] else ""
    return f"which began at {_time(row['began'])} and needed {row['generation_s']:.2f} s{tools}"


def _lengths(group: Sequence[SampleRow]) -> str:
    lengths = [row["num_tokens"] for row in group]
    return f"{min(lengths)} to {max(lengths)} tokens" if min(lengths) < max(lengths) else counted(lengths[0], "token")


def _versions(group: Sequence[SampleRow]) -> str:
    versions = [
        version for row in group for version in (row["oldest_version"], row["newest_version"]) if version is not None
    ]
    if not versions:
        return "no token was sampled"
    low, high = min(versions), max(versions)
    return f"sampled by version {low}" if low == high else f"sampled by versions {low} to {high}"


def _ended(group: Sequence[SampleRow]) -> str:
    words = {"stop": "ended by themselves", "length": "were cut off", "abort": "were aborted"}
    reasons = Counter(row["finish_reason"] for row in group if not row["goes_on"])
    return ", ".join(f"{count} {words.get(reason, reason)}" for reason, count in reasons.items())


def _scores(group: Sequence[SampleRow]) -> str:
    """What each verifier gave: `math gave 3 of 8 responses the score 1, 5 the score 0`."""
    by_name: dict[str, list[float | None]] = {}
    for row in group:
        for verdict in () if row["goes_on"] else row["verdicts"] or ():
            by_name.setdefault(verdict["name"], []).append(verdict["score"])
    if not by_name:
        return "No verifier scored it, and its rewards were known"
    parts = []
    for name, scores in by_name.items():
        counts = Counter(scores)
        (score, count), *more = counts.most_common(4)
        rest = "".join(f", {number} {_score(value)}" for value, number in more)
        parts.append(f"{name} gave {count} of {counted(len(scores), 'response')} {_score(score)}{rest}")
    return "; ".join(parts)


def _score(score: float | None) -> str:
    return "no score" if score is None else f"the score {score + 0.0:.4g}"  # -0.0 becomes 0


def _rewards(group: Sequence[SampleRow]) -> str:
    conversations = ends(group)
    rewards = [row["reward"] for row in conversations]
    if not rewards:
        return ""
    rights = [row["is_right"] for row in conversations]
    judged = "" if None in rights else _in_words(sum(map(bool, rights)), len(rights))
    low, high = min(rewards), max(rewards)
    return f". Rewards: {f'all {low:.4g}' if low == high else f'{low:.4g} to {high:.4g}'}{judged}"


def _in_words(right: int, number: int) -> str:
    return {0: ", all wrong", number: ", all right"}.get(right, f", {right} of {number} right")


def _tokens(group: Sequence[SampleRow]) -> str:
    """What its tokens are used for."""
    uses: Counter[int] = Counter()
    for row in group:
        uses.update(row["uses"])
    trained, total = uses.pop(schema.TRAINED, 0), sum(row["num_tokens"] for row in group)
    rest = "; ".join(f"{count} are {schema.USES[code]}" for code, count in sorted(uses.items()))
    return f"{trained:,} of {counted(total, 'token')} are trained on" + (f"; {rest}" if rest else "") + "."


# --- a row over time --------------------------------------------------------------------------------------------------


def row(runs: Runs, row: str, *, run: int = 0) -> dict[str, Any]:
    """What the model answered to a row of the data, over time, in training and evaluations.

    `row` is its place, such as `train.jsonl line 7`, or any end of it that fits only one row, such as `line 7` or `7`. If it fits
    one row of training and others of evaluations, the row of training is shown, and `others` names the others.
    """
    watched, torn = runs[run], TornFiles()
    steps = _steps_by_row(watched, torn)
    evaluations = _evaluations_by_row(watched, torn)
    place, further_rows = _find(row, list(steps), list(evaluations))
    groups = [
        _group_of_row(watched, rows, step=step)
        for step in steps.get(place, ())
        for rows in torn.read(lambda step=step: _with_row(watched, step, place), [])
    ]
    measured = [_measured(watched, version, name, place) for version, name in evaluations.get(place, ())]
    if not groups and not measured:
        raise Mistake(" ".join([f"the record has no samples of {place}.", *torn.sentences]))
    shares = [group["share"] for group in groups or measured if group["outcome"] != UNSCORED]
    source, ground_truth = (groups or measured)[0]["source"], (groups or measured)[0]["ground_truth"]
    return {
        "row": place,
        "others": further_rows,
        "source": source,
        "ground_truth": ground_truth,
        "groups": groups,
        "evaluations": measured,
        "verdict": verdict(shares),
        "torn": torn.sentences,
    }


def verdict(shares: Sequence[float | None]) -> str:
    """What the shares of right responses to a row come to, in the order of time. `mostly right`: at least half."""
    if any(share is None for share in shares):
        return "not known"
    numbers = [share for share in shares if share is not None]
    if not numbers:
        return "not known"
    if len(numbers) == 1:
        return "once"
    if not any(numbers):
        return "never right"
    if numbers[-1] >= 0.5:
        return "mostly right"
    return "forgotten" if max(numbers[:-1]) >= 0.5 else "mixed"


def _steps_by_row(run: Run, torn: TornFiles) -> dict[str, list[int]]:
    """The steps that have a row: of finished steps from `prompts.jsonl`; of open steps, and of groups that were too old, from the
    record, because their prompts are in `prompts.jsonl` later or not at all. The same holds for groups that were not scored."""
    steps: dict[str, list[int]] = {}
    steps_with_samples = set(run.steps())
    for step, prompts in run.prompts():
        for prompt in prompts:
            steps.setdefault(prompt["row"], []).append(step)
    for step in run.record.open_steps():
        for place in run.table(step, ["row"])["row"].to_pylist():
            steps.setdefault(place, []).append(step)
    for step in run.record.steps() if _has_discarded(run) else ():
        path = run.record.places.step(step)
        for place in torn.read(lambda p=path, s=step: run.cached(p, "discarded", lambda: _discarded(run, s)), set()):
            steps.setdefault(place, []).append(step)
    return {place: sorted({step for step in own if step in steps_with_samples}) for place, own in steps.items()}


def _has_discarded(run: Run) -> bool:
    """Whether groups were thrown away for their age, or because they were not scored, or that is not known."""
    table = run.metrics()
    if DISCARDED not in table.names() or any(table.column(DISCARDED)):
        return True
    return any(event["kind"] == "given_up" for events in run.prompt_events().values() for event in events)


def _discarded(run: Run, step: int) -> set[str]:
    """The rows of the groups of a step whose prompts were issued again."""
    table = run.record.samples(step, ["row", "outcome"])
    return set(table.filter(pc.field("outcome").isin(ISSUED_AGAIN))["row"].to_pylist())


def _evaluations_by_row(run: Run, torn: TornFiles) -> dict[str, list[tuple[int, str]]]:
    """Version and set of the evaluations that have a row."""
    places: dict[str, list[tuple[int, str]]] = {}
    for file in run.record.evaluations():
        rows = torn.read(lambda v=file.version, n=file.set: _rows_of_evaluation(run, v, n), [])
        for place in dict.fromkeys(rows):
            places.setdefault(place, []).append((file.version, file.set))
    return places


def _rows_of_evaluation(run: Run, version: int, set_name: str) -> list[str]:
    return run.evaluation_table(version, set_name, ["row"])["row"].to_pylist()


def _find(text: str, trained: Sequence[str], evaluated: Sequence[str]) -> tuple[str, list[str]]:
    """The row that a user means: if one of training and others of evaluations fit, that of training, and the others. Raises
    `Mistake` if there is none, or several."""
    names = [*dict.fromkeys([*trained, *evaluated])]
    if text in names:
        return text, []
    ends_of_words = [name for name in names if name.endswith((f"/{text}", f" {text}"))]
    fitting = ends_of_words or [name for name in names if name.endswith(text)]
    training_rows = [name for name in fitting if name in trained]
    chosen = training_rows if len(fitting) <= MOST_ROWS and len(training_rows) == 1 else fitting
    if len(chosen) == 1:
        return chosen[0], [name for name in fitting if name != chosen[0]]
    problem = f"fits {len(fitting):,} rows" if fitting else "is no row that this run has used so far"
    near = fitting[:MOST_ROWS] or [*dict.fromkeys([*_like(text, trained), *_like(text, evaluated)])]
    rest = ", …" if len(fitting) > MOST_ROWS else ""
    raise Mistake(f"{text!r} {problem}. Give the place as the record names it: {', '.join(map(quote, near))}{rest}.")


def _like(text: str, places: Sequence[str]) -> list[str]:
    """The rows whose ends are most like a text."""
    ends = {place[-len(text) - 1 :]: place for place in reversed(places)}
    return [ends[end] for end in difflib.get_close_matches(text, ends, MOST_ROWS // 2, 0.0)]


def _with_row(run: Run, step: int, place: str) -> list[list[SampleRow]]:
    return list(groups_of(rows_of(table_of_step(run, step), row=place)).values())


def _group_of_row(run: Run, group: Sequence[SampleRow], *, step: int) -> dict[str, Any]:
    return {**_answers(run, group, table_of_step(run, step)), "step": step, "version": group[0]["oldest_version"]}


def _measured(run: Run, version: int, set_name: str, place: str) -> dict[str, Any]:
    read = table_of_evaluation(run, version, set_name)
    group = rows_of(read, row=place)
    return {**_answers(run, group, read), "set": set_name, "version": version}


def _answers(run: Run, group: Sequence[SampleRow], read: Any) -> dict[str, Any]:
    conversations = ends(group) or [row for row in group if not row["goes_on"]]
    rights = [row["is_right"] for row in ends(group)]
    return {
        **{name: group[0][name] for name in ("prompt_id", "attempt", "source", "ground_truth", "outcome")},
        "rewards": [row["reward"] for row in conversations],
        "share": None if None in rights or not rights else sum(map(bool, rights)) / len(rights),
        "texts": texts_of(run, read, [row["at"] for row in conversations]),
    }
