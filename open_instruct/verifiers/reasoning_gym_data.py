"""Prompts from reasoning-gym, a library of procedural reasoning tasks, each with its own scorer.

A mixer entry names the task and, in the form of a URL query, its parameters:

    reasoning_gym/chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=2&size=4000&seed=7

`size` (rows) and `seed` fix the rows. Many tasks make row `i` from `seed + i`, so two seeds that are closer together than `size`
share rows: with size 100, row 5 of seed 7 is row 0 of seed 12. Choose seeds far apart for training and evaluation (and let
`load_prompts` exclude the rows that still coincide). Values are JSON (`5`, `0.5`, `true`, `["+","-"]`) or else plain text; `%26`
is `&`, `%2B` is `+`.
`instruction` replaces the sentence after each question; `instruction=` leaves it out.
"""

import difflib
import json
import os
import random
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import MISSING, Field, fields
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

PREFIX = "reasoning_gym/"
"""Beginning of a mixer entry for this source, and of the `dataset` column of its rows."""
INSTRUCTION = "Answer inside <answer></answer>."
"""Follows each question on a line of its own; the verifier reads the answer from these tags."""
PARAMETERS = "parameters"
"""Key of an item, in addition to question, answer and metadata: the parameters of the entry, which some scorers read too."""
HASH_ORDERED_TASKS = frozenset(
    ("codeio", "isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder")
)
"""Tasks of reasoning-gym 0.1.25 that iterate over sets while they draw, so their rows depend on PYTHONHASHSEED too."""
MIXTURE = "composite"
"""The task that draws its rows from several other tasks."""
DEFAULT_SIZE = 1000
MOST_ROWS = 10**8
MAKING_S = 20
"""Longest time to make a task, or its first row: some parameters set the size of a task, which may be huge."""
MAKING_BYTES = 4 * 2**30
"""Most additional address space to make a task, or its first row."""
DEFAULT_SEED = 42


def is_reasoning_gym(name: str) -> bool:
    """Whether a mixer entry names a task of reasoning-gym."""
    return name.startswith(PREFIX)


def reasoning_gym_rows(entry: str) -> list[dict]:
    """All rows of one mixer entry; see `iter_reasoning_gym_rows`."""
    return list(iter_reasoning_gym_rows(entry))


def iter_reasoning_gym_rows(entry: str) -> Iterator[dict]:
    """Makes the rows of one mixer entry such as `reasoning_gym/chain_sum?size=10`.

    Each row is `{"messages": [{"role": "user", "content": question and instruction}], "ground_truth": JSON text of the
    task's question, answer and metadata (`encode_item`), "dataset": "reasoning_gym/chain_sum"}`.

    Raises:
        ValueError: before the first row: the task or a parameter is unknown, or the task does not accept a value. Later: the task
            cannot make a row.
    """
    task, instruction, params = parse_entry(entry)
    dataset = make_dataset(entry, task, params)
    if task in HASH_ORDERED_TASKS and os.environ.get("PYTHONHASHSEED", "random") == "random":
        raise ValueError(
            f"{entry!r}: the rows of {task} depend on Python's hash seed too, which is random: start with PYTHONHASHSEED=0"
        )
    if params["size"] > MOST_ROWS:  # type: ignore[operator]
        raise ValueError(f"{entry!r}: size {params['size']}: at most {MOST_ROWS} rows")
    with limited(f"{entry!r}: its first row"):
        _item(entry, dataset, 0, params["seed"])
    task_params = {name: value for name, value in params.items() if name not in ("size", "seed")}
    items = (_item(entry, dataset, i, params["seed"]) for i in range(len(dataset)))
    return (_row(task, item, instruction, task_params) for item in items)


def _item(entry: str, dataset: "ProceduralDataset", number: int, seed: object) -> dict:
    """One item. Python's global random generator is seeded meanwhile, because a rule of `list_functions` draws from it."""
    state = random.getstate()
    random.seed(f"{seed}:{number}")
    try:
        return dataset[number]
    except TookTooMuch:
        raise
    except Exception as err:  # a task may raise anything for values that it did not check
        raise ValueError(
            f"{entry!r}: its row at index {number} cannot be made ({_said(err)}): give other parameters"
        ) from err
    finally:
        random.setstate(state)


def _said(err: Exception) -> str:
    return str(err) or type(err).__name__


class TookTooMuch(ValueError):
    """Making a task or a row takes too much time or memory."""


@contextmanager
def limited(subject: str) -> Iterator[None]:
    """Raises `TookTooMuch` if the block takes over `MAKING_S` seconds or `MAKING_BYTES` of address space.

    Time is limited only in the main thread, where Python handles signals. In a jail, which has limits of its own, this function
    limits neither time nor memory.
    """

    def give_up(*_: object) -> None:
        raise TookTooMuch(f"{subject} takes over {MAKING_S} s: give smaller parameters")

    with _limited_memory():
        try:
            if threading.current_thread() is not threading.main_thread():
                yield
                return
            before, seconds_left = signal.signal(signal.SIGALRM, give_up), signal.alarm(MAKING_S)
            try:
                yield
            finally:
                signal.alarm(
                    min(seconds_left, _A_DAY_S)
                )  # a jail refuses `alarm`, and its result is no number of seconds
                signal.signal(signal.SIGALRM, before)
        except MemoryError as err:
            raise TookTooMuch(f"{subject} takes over {MAKING_BYTES >> 30} GiB: give smaller parameters") from err


_A_DAY_S = 86_400


@contextmanager
def _limited_memory() -> Iterator[None]:
    """Limits the address space, so that even a single huge list is refused. No signal could interrupt its allocation."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with suppress(OSError, ValueError):
        limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + MAKING_BYTES
        if soft == resource.RLIM_INFINITY or limit < soft:
            resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def prompt_text(question: str, instruction: str = INSTRUCTION) -> str:
    """The user's message: the question and, on the next line, the instruction on how to answer."""
    return f"{question}\n{instruction}" if instruction else question


def parse_entry(entry: str) -> tuple[str, str, dict[str, object]]:
    """`reasoning_gym/task?a=1` as (task, instruction, parameters with `size` and `seed` filled in)."""
    task, _, query = entry.removeprefix(PREFIX).partition("?")
    pairs = parse_qsl(query, keep_blank_values=True)
    values = dict(pairs)
    if len(values) < len(pairs):
        duplicates = sorted({name for name, _ in pairs if sum(name == other for other, _ in pairs) > 1})
        raise ValueError(f"{entry!r} gives {', '.join(duplicates)} more than once: keep one value of each")
    instruction = values.pop("instruction", INSTRUCTION)
    params = {"size": DEFAULT_SIZE, "seed": DEFAULT_SEED} | {name: _parse_value(text) for name, text in values.items()}
    return task, instruction, params


def _parse_value(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # a number with over 4,300 digits is a ValueError too
        # Python's spelling is what the library's own documentation shows.
        return {"True": True, "False": False, "None": None}.get(text, text)


def check_verifier_name(name: str) -> None:
    """Raises `ValueError` if a row's `dataset` column begins with `reasoning_gym/`, in any case, but names none of its tasks."""
    family, _, task = name.partition("/")
    if f"{family.lower()}/" != PREFIX:
        return
    if f"{family}/" != PREFIX or not task:
        raise ValueError(f"unknown verifier {name!r:.80}: write {PREFIX}{task or 'chain_sum, or another task of it'}")
    _check_task(name, task)
    if task == MIXTURE:
        raise ValueError(f"{name!r} is a mixture of tasks, and a row is of one of them: name the task of the row")


def _check_task(entry: str, task: str) -> None:
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        near = (
            ", ".join(difflib.get_close_matches(task[:100], DATASETS, n=3, cutoff=0.4))  # 100: the time is quadratic
            or "see reasoning_gym.factory.DATASETS"
        )
        raise ValueError(f"{entry!r:.200}: reasoning-gym has no task {task!r:.80}; nearest: {near}")


def make_dataset(entry: str, task: str, params: dict[str, object]) -> "ProceduralDataset":
    """The library's dataset object for a task, with every parameter checked. Messages name it `entry`."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    _check_task(entry, task)
    definitions = {f.name: f for f in fields(DATASETS[task][1])}
    listing = ", ".join(f"{name}={_default(f)!r}" for name, f in definitions.items())
    for name in params:
        if name not in definitions:
            raise ValueError(f"{entry!r}: {task} has no parameter {name!r}; it has: {listing}")
    values = {name: _check_type(entry, definitions[name], value) for name, value in params.items()}
    try:
        with limited(f"{entry!r}: making it"):
            return reasoning_gym.create_dataset(task, **values)
    except TookTooMuch:
        raise
    except Exception as err:  # a task may raise anything for values that it did not check
        raise ValueError(f"{entry!r}: {task} does not take these parameters ({_said(err)}); it has: {listing}") from err


def _default(config_field: Field) -> object:
    if config_field.default_factory is not MISSING:
        return config_field.default_factory()
    return None if config_field.default is MISSING else config_field.default


def _check_type(entry: str, config_field: Field, value: object) -> object:
    """The value in the type of the parameter's default, so that `2.5` terms are refused now and not when a row is made."""
    default = 0 if config_field.name in ("seed", "size") else _default(config_field)
    if isinstance(default, tuple) and isinstance(value, list):
        return tuple(value)
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if default is None or type(value) is type(default) or (isinstance(default, str) and isinstance(value, str)):
        return value
    raise ValueError(f"{entry!r}: {config_field.name} must be {type(default).__name__} like {default!r}, got {value!r}")


def _row(task: str, item: dict, instruction: str, task_params: dict[str, object]) -> dict:
    if task == "time_intervals":  # it puts today's date before its times; no scorer reads them
        metadata = {name: value for name, value in item["metadata"].items() if name not in ("start_time", "end_time")}
        item = item | {"metadata": metadata}
    return {
        "messages": [{"role": "user", "content": prompt_text(item["question"], instruction)}],
        "ground_truth": encode_item(item | {PARAMETERS: task_params} if task_params else item),
        "dataset": PREFIX + task,
    }


def encode_item(item: dict) -> str:
    """An item as JSON. `decode_item` makes an equal item, with its tuples and integer keys, because some scorers need them."""
    return json.dumps(_tagged(item))


def decode_item(text: str) -> dict:
    """The item that `encode_item` was given. Plain JSON of an item, as other tools write it, is accepted too.

    Raises:
        ValueError: the text is not JSON, or not an object that holds `question` and `answer`.
    """
    item = json.loads(text, object_hook=_untagged)
    if not isinstance(item, dict) or not {"question", "answer"} <= item.keys():
        raise ValueError(
            f"a reasoning_gym ground truth must be a JSON object with question, answer and metadata, got {text!r:.80}"
        )
    return item


_TUPLE = "__tuple__"
_ITEMS = "__items__"
_FRACTION = "__fraction__"


def _tagged(value: object) -> object:
    if isinstance(value, tuple):
        return {_TUPLE: [_tagged(part) for part in value]}
    if isinstance(value, list):
        return [_tagged(part) for part in value]
    if isinstance(value, Fraction):  # gsm_symbolic has fractions among its variables
        return {_FRACTION: [value.numerator, value.denominator]}
    if not isinstance(value, dict):
        return value
    if all(isinstance(key, str) for key in value):
        return {key: _tagged(part) for key, part in value.items()}
    return {_ITEMS: [[_tagged(key), _tagged(part)] for key, part in value.items()]}


def _untagged(value: dict) -> object:
    if len(value) == 1:
        if _TUPLE in value:
            return tuple(value[_TUPLE])
        if _ITEMS in value:
            return dict(value[_ITEMS])
        if _FRACTION in value:
            numerator, denominator = value[_FRACTION]
            if not (isinstance(numerator, int) and isinstance(denominator, int) and denominator):
                raise ValueError(f"a fraction must be two whole numbers, the second not 0, got {value!r:.80}")
            return Fraction(numerator, denominator)
    return value
