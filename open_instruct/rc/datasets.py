"""Problems of reasoning-cache rollouts from reasoning-gym, local files, directories and hub names.

The option `dataset_loader` names `load_datasets` by default. A row may have the columns that training takes (`messages`,
`ground_truth`, `dataset`; the last two may be lists of one), those of GSM8K (`question`, `answer` that ends in `#### 42`) or
those of MATH (`problem`, and `answer` or a `solution` with `\\boxed`).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from open_instruct.data.mixer import DatasetError, Mistakes
from open_instruct.data.row_checks import check_ground_truth
from open_instruct.data.sources import CONFIG_MARK, RawRow, SourceError, iter_rows, source_name
from open_instruct.verifiers.answer_reading import boxed_answer
from open_instruct.verifiers.labels import single_label
from open_instruct.verifiers.reasoning_gym_data import is_reasoning_gym
from open_instruct.verifiers.registry import verifier_name, verifier_names
from open_instruct.workflows.rc.types import Problem

ENTRY_KEYS = ("hub_id", "config", "split", "trust_remote_code")
GSM8K_MARK = "####"


def load_datasets(dataset_names: Sequence[str | Mapping[str, Any]], seed: int = 0) -> list[Problem]:
    """All problems of the named data sets, in order.

    An entry is a name (`reasoning_gym/…`, a file, a directory, a hub name) or `{hub_id, config, split, trust_remote_code}`. The
    split is `train` by default. `config` names one of several configurations; two configurations count as different data sets.
    `trust_remote_code` has no effect, because data sets that bring code are not loaded. `seed` is unused here; it is for loaders
    that draw problems at random.

    Raises:
        ValueError: with all mistakes, by data set and row.
    """
    mistakes = Mistakes()
    problems: list[Problem] = []
    names: set[str] = set()
    for entry in dataset_names:
        name, split = _name_and_split(entry, mistakes)
        if name in names:
            mistakes.add(f"{name}: named twice. Name it once, and raise `attempts` to work on its problems again.")
        elif name:
            names.add(name)
            problems += _problems(name, split, mistakes)
    mistakes.raise_any()
    if not problems:
        raise DatasetError(f"{', '.join(names) or 'dataset names'}: no problems there. Name a data set that has some.")
    return problems


def _name_and_split(entry: str | Mapping[str, Any], mistakes: Mistakes) -> tuple[str, str]:
    if isinstance(entry, str):
        return entry, "train"
    unknown = ", ".join(str(key) for key in entry if key not in ENTRY_KEYS)
    name = entry.get("hub_id")
    if unknown or not isinstance(name, str) or not name:
        problem = f"an entry has no key {unknown}" if unknown else "the entry lacks hub_id"
        mistakes.add(f"{dict(entry)}: {problem}. Write hub_id and, where needed, config, split and trust_remote_code.")
        return "", ""
    config = entry.get("config")
    return name if config is None else f"{name}{CONFIG_MARK}{config}", str(entry.get("split") or "train")


def _problems(name: str, split: str, mistakes: Mistakes) -> Iterator[Problem]:
    verifiers = verifier_names()
    try:
        for number, row in enumerate(iter_rows(name, split, None, None)):
            try:
                yield _to_problem(row, name, split, number, verifiers)
            except ValueError as error:
                mistakes.add(f"{name} {row.place}: {error}")
    except SourceError as error:
        mistakes.add(f"{name}: {error}")


def _to_problem(row: RawRow, name: str, split: str, number: int, verifiers: Sequence[str]) -> Problem:
    """A row as a problem.

    Raises:
        ValueError: something is missing, or the verifier cannot use the ground truth.
    """
    if row.problem:
        raise ValueError(row.problem)
    text = _question(row.values)
    verifier, ground_truth = _answer(row.values, verifiers)
    check_ground_truth(verifier, ground_truth)
    dataset = name.partition("?")[0] if is_reasoning_gym(name) else name
    place = f"{source_name(name, split)} {row.place}"
    return Problem(f"{name}#{number}", text, ground_truth, verifier, dataset, place)


def _question(values: Mapping[str, Any]) -> str:
    messages = values.get("messages")
    if isinstance(messages, list):
        contents = [
            part.get("content") for part in messages if isinstance(part, Mapping) and part.get("role") == "user"
        ]
        text = contents[-1] if contents else None
    else:
        text = next((values[key] for key in ("problem", "question", "task") if values.get(key)), None)
    if not isinstance(text, str) or not text.strip():
        columns = ", ".join(values) or "nothing"
        raise ValueError(f"no problem in it: one of problem, question, task or messages. It has: {columns}")
    text.encode()  # half a surrogate pair raises UnicodeEncodeError, which is a ValueError
    return text


def _answer(values: Mapping[str, Any], verifiers: Sequence[str]) -> tuple[str, object]:
    """Name of the verifier, and the ground truth."""
    named = _one_of(values.get("dataset"))
    label = next((values[key] for key in ("ground_truth", "answer") if values.get(key) not in (None, "")), None)
    if isinstance(named, str) and verifier_name(named, verifiers) is not None and label is not None:
        return named, label
    answer = single_label(label) if label is not None else None
    if answer is not None and GSM8K_MARK in answer:
        return "gsm8k", answer.rpartition(GSM8K_MARK)[2].strip()
    if answer is None and isinstance(values.get("solution"), str):
        answer = boxed_answer(values["solution"])
    if answer is None:
        raise ValueError(f"no answer in it: one of ground_truth, answer, solution. It has: {', '.join(values)}")
    return "math", answer


def _one_of(named: object) -> object:
    """The verifier that the column `dataset` names; open-instruct's data may wrap the name in a list."""
    if isinstance(named, list) and len(named) > 1:
        raise ValueError(f"{len(named)} verifiers in 'dataset', and a turn is scored by one. Leave one.")
    return named[0] if isinstance(named, list) and named else named
