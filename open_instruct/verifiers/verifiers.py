"""Verifiers: each scores a response from its text and the row's ground truth.

A row's `dataset` column names its verifier: `gsm8k`, `math`, `string_matcher`, or `reasoning_gym/<task>`, where the part before
the slash is the name. A verifier is a subclass of `VerifierFunction`. To add a verifier, write the class into a file of your own
and name the file: `--verifier_modules my_rewards.py`. Nothing has to be registered, because the file is imported in every process
that needs verifiers.
"""

import functools
import inspect
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from open_instruct.user_modules import UserModuleError, import_user_module
from open_instruct.verifiers.answer_reading import (
    boxed_answer,
    count_numbers,
    extract_answer,
    last_number,
    math_value,
    normalize_answer,
)
from open_instruct.verifiers.reasoning_gym_data import PARAMETERS, PREFIX, decode_item, make_dataset
from open_instruct.verifiers.reasoning_gym_scorers import EXECUTING_TASKS, Scorer, mend
from open_instruct.verifiers.sandbox import missing


@dataclass(frozen=True)
class VerificationResult:
    """What a verifier found."""

    score: float
    """In [0, 1]; 1 is right."""
    cost: float = 0.0
    """US dollars spent on judging; metric `objective/verifier_cost`."""
    reasoning: str | None = None
    """Why the verifier gave this score, if it can say."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.score <= 1.0:
            raise ValueError(f"a verifier's score lies in [0, 1], got {self.score}")
        if not 0.0 <= self.cost < math.inf:
            raise ValueError(f"a verifier's cost is a number of US dollars, got {self.cost}")


class VerifierFunction(ABC):
    """Scores one response. A verifier has no state, so that any process may score with it.

    A subclass sets `name` (and `weight`, if it is not 1) in its body or through `super().__init__("name", weight=0.5)`. Its
    constructor is called without arguments.
    """

    name: str = ""
    """Value of the `dataset` column before any slash; upper and lower case are the same."""
    weight: float = 1.0
    """The reward of a response is its score times this weight times `--verification_reward`."""

    def __init__(self, name: str | None = None, weight: float | None = None, verifier_config: Any = None) -> None:
        """`verifier_config` is None here. It is kept as an attribute for verifiers that were written for open-instruct."""
        self.name = self.name if name is None else name
        self.weight = self.weight if weight is None else weight
        self.verifier_config = verifier_config

    @abstractmethod
    def __call__(
        self, tokenized_prediction: list[int], prediction: str, label: object, query: str | None = None
    ) -> VerificationResult:
        """Scores `prediction`, whose token ids are `tokenized_prediction`, against the row's ground truth `label`.

        `query` is the text of the prompt, as the model has seen it; with the reasoning cache `query` is the problem.

        Raises:
            ValueError: this verifier does not understand the label. A bad prediction never raises, it scores 0.
        """

    def check_label(self, label: object) -> None:
        """Raises the `ValueError` that scoring against this label would raise, so that bad data is refused before a run.

        By default this scores an empty response to an empty prompt. Override it if scoring takes long or costs money.
        """
        self([], "", label, "")

    def prepare(self, dataset: str) -> None:  # noqa: B027 - most verifiers need nothing
        """Loads whatever is slow to load and needed to score rows with this value of the `dataset` column."""

    def prepare_label(self, label: object) -> None:  # noqa: B027 - most verifiers need nothing
        """Loads whatever is slow to load and needed to score against this label."""


class ReasoningGymVerifier(VerifierFunction):
    """Gives the last complete `<answer>...</answer>` to the task's own scorer; 0 if the response has none.

    Partial credit follows the task: `score_answer` of `chain_sum`, for example, gives a score between 0 and 1 to an answer that
    contains the right answer.
    """

    name = "reasoning_gym"

    def __call__(
        self, tokenized_prediction: list[int], prediction: str, label: object, query: str | None = None
    ) -> VerificationResult:
        item, scorer = self._item_and_scorer(label)
        answer = extract_answer(prediction)
        if answer is None:
            return VerificationResult(0.0, reasoning="no <answer>...</answer>")
        return VerificationResult(float(scorer.score_answer(answer, item)))

    def check_label(self, label: object) -> None:
        _refuse_without_jail(self._item_and_scorer(label)[0]["metadata"]["source_dataset"])

    def prepare(self, dataset: str) -> None:
        task = dataset.removeprefix(PREFIX)
        _refuse_without_jail(task)
        _scorer(task, "{}")

    def prepare_label(self, label: object) -> None:
        self._item_and_scorer(label)

    def _item_and_scorer(self, label: object) -> tuple[dict, Scorer]:
        if not isinstance(label, str):
            raise ValueError(f"a reasoning_gym ground truth must be the item's JSON text, got {type(label).__name__}")
        item = decode_item(label)
        task = item.get("metadata", {}).get("source_dataset")
        if not isinstance(task, str):
            raise ValueError("a reasoning_gym ground truth must name its task in metadata.source_dataset")
        return item, _scorer(task, json.dumps(item.get(PARAMETERS, {}), sort_keys=True))


def _refuse_without_jail(task: str) -> None:
    reasons = missing() if task in EXECUTING_TASKS else []
    if reasons:
        raise ValueError(
            f"reasoning_gym/{task}: its scorer evaluates what a model wrote, and this machine has no jail for that: "
            f"{'; '.join(reasons)}. Leave the task out, or run on a kernel that has them."
        )


@functools.lru_cache(maxsize=256)
def _scorer(task: str, parameters: str) -> Scorer:
    """The scorer of a task. `score_answer` is a method of a dataset, so a dataset of one row is made, which may take seconds."""
    return mend(task, make_dataset(PREFIX + task, task, json.loads(parameters) | {"size": 1, "seed": 0}))


PLAIN_DIGITS = 18


class GSM8KVerifier(VerifierFunction):
    """1 if the last number in the response equals the label: `$1,234.50.` is 1234.5, `7` equals `7.0`."""

    name = "gsm8k"

    def __call__(
        self, tokenized_prediction: list[int], prediction: str, label: object, query: str | None = None
    ) -> VerificationResult:
        return VerificationResult(float(last_number(prediction) == self._wanted(label)))

    def check_label(self, label: object) -> None:
        self._wanted(label)

    def _wanted(self, label: object) -> Fraction:
        text = _single(label).rpartition("####")[2]
        if text.isascii() and text.isdecimal() and len(text) <= PLAIN_DIGITS:
            return Fraction(int(text))  # as `last_number` reads it, in a tenth of the time
        wanted = last_number(text)
        if wanted is None or count_numbers(text) > 1:
            raise ValueError(f"a gsm8k ground truth must hold one number, got {label!r:.80}")
        return wanted


class StringMatcherVerifier(VerifierFunction):
    """1 if the last complete `<answer>...</answer>` equals the label. Case, outer punctuation, articles and spaces are ignored.

    `normalize_answer` has the details: `(B).` is B, while `A, B` is neither B nor AB, and `5!` is not 5.
    """

    name = "string_matcher"

    def __call__(
        self, tokenized_prediction: list[int], prediction: str, label: object, query: str | None = None
    ) -> VerificationResult:
        wanted = normalize_answer(_single(label))
        if not wanted:
            raise ValueError(f"a string_matcher ground truth must hold a word, a number or a symbol, got {label!r:.80}")
        answer = extract_answer(prediction)
        if answer is None:
            return VerificationResult(0.0, reasoning="no <answer>...</answer>")
        return VerificationResult(float(normalize_answer(answer) == wanted))


class MathVerifier(VerifierFunction):
    """1 if the last `\\boxed{…}` equals the label: as a number if both are numbers, else as LaTeX without its spacing.

    `3` and `3\\text{ cm}` are equal, `3\\text{ m}` and `3\\text{ cm}` are not; nor are `42` and `42\\%`, or `42\\text{ or 43}`.
    """

    name = "math"

    def __call__(
        self, tokenized_prediction: list[int], prediction: str, label: object, query: str | None = None
    ) -> VerificationResult:
        wanted, unit = math_value(_single(label))
        if wanted == "":
            raise ValueError(f"a math ground truth must hold a number or LaTeX, got {label!r:.80}")
        answer = boxed_answer(prediction)
        if answer is None:
            return VerificationResult(0.0, reasoning=r"no \boxed{…}")
        value, unit_of_answer = math_value(answer)
        units_agree = unit == unit_of_answer or ("" in (unit, unit_of_answer) and "%" not in (unit, unit_of_answer))
        return VerificationResult(float(value == wanted and units_agree))


def _single(label: object) -> str:
    """A label as text. Some of open-instruct's data wraps the label in a list of one."""
    if isinstance(label, list) and len(label) == 1:
        label = label[0]
    is_number = isinstance(label, int | float) and not isinstance(label, bool) and math.isfinite(label)
    if not is_number and not isinstance(label, str):
        raise ValueError(f"this verifier needs one text or number as ground truth, got {label!r:.80}")
    return str(label)


class VerifierModuleError(UserModuleError):
    """A module of `--verifier_modules`, or a verifier in it, cannot be used."""


def import_verifiers(modules: Sequence[str]) -> None:
    """Import modules that define verifiers, each once in a process.

    Args:
        modules: paths of files (`my_rewards.py`), or dotted names of modules that Python finds (`my_package.rewards`).

    Raises:
        UserModuleError: a module cannot be imported, defines no verifier, or defines a verifier that cannot be used.
    """
    for name in modules:
        module = import_user_module(name)
        known = {cls for cls in _verifier_classes() if not cls.__module__.startswith(f"{__package__}.")}
        if not any(isinstance(value, type) and value in known for value in vars(module).values()):
            raise VerifierModuleError(f"{name} defines no verifier: it holds no subclass of VerifierFunction")
    _verifiers.cache_clear()
    _verifiers()


def _verifier_classes(base: type[VerifierFunction] = VerifierFunction) -> list[type[VerifierFunction]]:
    """All direct and indirect subclasses that can be instantiated. A class that still lacks `__call__` is a base for others."""
    found = [] if inspect.isabstract(base) else [base]
    return found + [cls for child in base.__subclasses__() for cls in _verifier_classes(child)]


def build_all_verifiers() -> dict[str, VerifierFunction]:
    """One of each kind of verifier, by its name in lower case.

    Raises:
        VerifierModuleError: a verifier cannot be made, has no name or no finite weight, or has the name of another verifier.
    """
    verifiers: dict[str, VerifierFunction] = {}
    for cls in _verifier_classes():
        where = f"the verifier {cls.__name__} of {inspect.getsourcefile(cls) or cls.__module__}"
        try:
            verifier = cls()
        except Exception as error:  # whatever a user's class raises
            raise VerifierModuleError(f"{where} cannot be made without arguments: {error}") from error
        name = verifier.name
        if not isinstance(name, str) or not name or "/" in name:
            raise VerifierModuleError(f'{where} has no name: set `name = "my_verifier"`, without a slash')
        if not isinstance(verifier.weight, int | float) or not math.isfinite(verifier.weight):
            raise VerifierModuleError(f"{where} has weight {verifier.weight!r}: set a finite number")
        if name.lower() in verifiers:
            other = type(verifiers[name.lower()])
            raise VerifierModuleError(f"{where} has the name {name!r} of {other.__name__}: set another name")
        verifiers[name.lower()] = verifier
    return verifiers


def verifier_names() -> list[str]:
    """Every verifier's name, in lower case."""
    return sorted(_verifiers())


def verifier_weight(dataset: str) -> float:
    """Weight of the verifier of this `dataset` column. A reward is the score times this weight times `--verification_reward`."""
    return float(find_verifier(dataset, _verifiers()).weight)


def verifier_name(dataset_name: str, names: Collection[str]) -> str | None:
    """Which of `names` scores rows of this `dataset` column: its whole value, or the part before the first slash, or None."""
    dataset_name = dataset_name.lower()
    if dataset_name in names:
        return dataset_name
    family = dataset_name.partition("/")[0]
    return family if family in names else None


def find_verifier(dataset_name: str, verifiers: Mapping[str, VerifierFunction]) -> VerifierFunction:
    """The verifier for rows of this `dataset` column.

    Raises:
        ValueError: there is no such verifier.
    """
    name = verifier_name(dataset_name, verifiers)
    if name is None:
        raise ValueError(f"no verifier is called {dataset_name!r}; there are: {', '.join(sorted(verifiers))}")
    return verifiers[name]


def check_label(dataset: str, ground_truth: object) -> None:
    """Raises `ValueError` for a ground truth that the row's verifier cannot use."""
    find_verifier(dataset, _verifiers()).check_label(ground_truth)


def prepare_verifier(dataset: str) -> None:
    """Loads what scoring rows of this `dataset` column needs."""
    find_verifier(dataset, _verifiers()).prepare(dataset)


def prepare_label(dataset: str, ground_truth: object) -> None:
    """Loads what scoring against this ground truth needs."""
    find_verifier(dataset, _verifiers()).prepare_label(ground_truth)


def score_response(
    dataset: str, ground_truth: object, token_ids: list[int], text: str, query: str | None = None
) -> VerificationResult:
    """Scores one response to the prompt `query` with the row's verifier. An error in the verifier is not caught."""
    return find_verifier(dataset, _verifiers())(token_ids, text, ground_truth, query)


@functools.cache
def _verifiers() -> dict[str, VerifierFunction]:
    return build_all_verifiers()
