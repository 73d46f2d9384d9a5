"""Verifiers: how good a response is, told from its text and the row's ground truth.

A row's `dataset` column names its verifier: `gsm8k`, `math`, `string_matcher`, or `reasoning_gym/<task>`, where the part before
the slash is the name. To add one, subclass `VerifierFunction` and set its `name`; nothing has to be registered.
"""

import functools
import json
import re
import string
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import ClassVar, Protocol

from open_instruct.reasoning_gym_data import PARAMETERS, PREFIX, decode_item, make_dataset


@dataclass(frozen=True)
class VerificationResult:
    """What a verifier found."""

    score: float
    """In [0, 1]; 1 is right."""
    cost: float = 0.0
    """US dollars spent on judging."""
    reasoning: str | None = None
    """Why, where the verifier can say."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.score <= 1.0:
            raise ValueError(f"a verifier's score lies in [0, 1], got {self.score}")


class VerifierFunction(ABC):
    """Scores one response. Without state, so that any process may do it."""

    name: ClassVar[str]
    """What the `dataset` column says, before any slash; lower case."""
    weight: ClassVar[float] = 1.0
    """Multiplies the score on its way into the reward."""

    @abstractmethod
    def __call__(
        self, tokenized_prediction: list[int], prediction: str, label: object, query: str | None = None
    ) -> VerificationResult:
        """Scores `prediction`, whose token ids are `tokenized_prediction`, against the row's ground truth `label`.

        Raises:
            ValueError: the label is not one that this verifier understands. A bad prediction never raises: it scores 0.
        """

    def check_label(self, label: object) -> None:
        """Raises the `ValueError` that scoring against this label would raise, so that data is refused before a run."""
        self([], "", label)

    def prepare(self, dataset: str) -> None:  # noqa: B027 - most need nothing
        """Loads what scoring rows of this `dataset` column needs, where that takes time."""


class ReasoningGymVerifier(VerifierFunction):
    """The task's own scorer, on the last complete `<answer>...</answer>`; 0 without one.

    Partial credit is the task's: `score_answer` of `chain_sum`, for one, gives a part of 1 to an answer that contains
    the right one.
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
        self._item_and_scorer(label)

    def prepare(self, dataset: str) -> None:
        _scorer(dataset.removeprefix(PREFIX), "{}")

    def _item_and_scorer(self, label: object) -> tuple[dict, "_Scorer"]:
        if not isinstance(label, str):
            raise ValueError(f"a reasoning_gym ground truth is the item's JSON text, got {type(label).__name__}")
        item = decode_item(label)
        task = item.get("metadata", {}).get("source_dataset")
        if not isinstance(task, str):
            raise ValueError("a reasoning_gym ground truth names its task in metadata.source_dataset")
        return item, _scorer(task, json.dumps(item.get(PARAMETERS, {}), sort_keys=True))


class _Scorer(Protocol):
    def score_answer(self, answer: str, entry: dict) -> float: ...


@functools.lru_cache(maxsize=256)
def _scorer(task: str, parameters: str) -> _Scorer:
    """`score_answer` is a method of the dataset: one of one row per task and parameters. Making it may take seconds."""
    return make_dataset(PREFIX + task, task, json.loads(parameters) | {"size": 1, "seed": 0})


class GSM8KVerifier(VerifierFunction):
    """1 if the last number in the response equals the label: `$1,234.50.` is 1234.5, `7` equals `7.0`."""

    name = "gsm8k"

    def __call__(
        self, tokenized_prediction: list[int], prediction: str, label: object, query: str | None = None
    ) -> VerificationResult:
        wanted = last_number(_single(label))
        if wanted is None:
            raise ValueError(f"a gsm8k ground truth holds a number, got {label!r}")
        return VerificationResult(float(last_number(prediction) == wanted))


class StringMatcherVerifier(VerifierFunction):
    """1 if the last complete `<answer>...</answer>` is the label, but for case, punctuation, articles and spaces."""

    name = "string_matcher"

    def __call__(
        self, tokenized_prediction: list[int], prediction: str, label: object, query: str | None = None
    ) -> VerificationResult:
        wanted = normalize_answer(_single(label))
        answer = extract_answer(prediction)
        if answer is None:
            return VerificationResult(0.0, reasoning="no <answer>...</answer>")
        return VerificationResult(float(normalize_answer(answer) == wanted))


class MathVerifier(VerifierFunction):
    """1 if the last `\\boxed{…}` equals the label: as a number where both are numbers, else as LaTeX but for its spacing."""

    name = "math"

    def __call__(
        self, tokenized_prediction: list[int], prediction: str, label: object, query: str | None = None
    ) -> VerificationResult:
        wanted = _math_value(_single(label))
        answer = boxed_answer(prediction)
        if answer is None:
            return VerificationResult(0.0, reasoning=r"no \boxed{…}")
        return VerificationResult(float(_math_value(answer) == wanted))


def _single(label: object) -> str:
    """A label as text; open-instruct's data wraps some in a list of one."""
    if isinstance(label, list) and len(label) == 1:
        label = label[0]
    if isinstance(label, bool) or not isinstance(label, str | int | float):
        raise ValueError(f"this verifier needs one text or number as ground truth, got {label!r:.80}")
    return str(label)


def extract_answer(text: str) -> str | None:
    """What stands in the last complete `<answer>...</answer>`, stripped; None without one.

    Of `<answer>1<answer>2</answer>` it is 2: the opening tag counts that stands last before a closing one. (The pattern
    of `reasoning_gym.utils.extract_answer` starts at the first opening tag and gives `1<answer>2`.) Linear in the
    text's length.
    """
    last_close = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(last_close, 0))
    if start < 0:
        return None
    start += len("<answer>")
    return text[start : text.index("</answer>", start)].strip()


def boxed_answer(text: str) -> str | None:
    """What stands in the last complete `\\boxed{…}`, braces inside it included; None without one."""
    best = (-1, 0)
    open_braces: list[tuple[int, bool]] = []  # where the content begins, and whether it is a box's
    for match in re.finditer(r"(\\boxed)?\{|\}", text):
        if match[0] != "}":
            open_braces.append((match.end(), match[1] is not None))
        elif open_braces:
            begin, is_box = open_braces.pop()
            best = max(best, (begin, match.start())) if is_box else best
    return text[best[0] : best[1]].strip() if best[0] >= 0 else None


_SPACING = re.compile(r"\\(?:left|right|displaystyle|!|,|;|:|quad|qquad|%)(?![A-Za-z])|\\ |[\s$%]|^\\text\{([^{}]*)\}$")
_FRACTION = re.compile(r"(-?)\\[dt]?frac\{?(\d+)\}?\{?(\d+)\}?|(-?)(\d+)/(\d+)")


def _math_value(latex: str) -> Fraction | str:
    """A number exactly, where it is one; else LaTeX without spacing."""
    text = _SPACING.sub(lambda match: match[1] or "", latex).rstrip(".")
    plain = text.replace(",", "") if re.fullmatch(r"-?\d{1,3}(,\d{3})+(\.\d+)?", text) else text
    fraction = _FRACTION.fullmatch(plain)
    try:
        if fraction:
            sign, top, bottom = fraction.groups()[:3] if fraction[2] else fraction.groups()[3:]
            return Fraction(int(f"{sign}{top}"), int(bottom))
        return Fraction(Decimal(plain)) if re.fullmatch(r"[-+]?(\d+(\.\d*)?|\.\d+)", plain) else text
    except ZeroDivisionError:
        return text


_NUMBER = re.compile(r"-?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|-?\$?\.\d+", re.ASCII)


def last_number(text: str) -> Decimal | None:
    """The last number in a text, exactly; commas between thousands and a dollar sign belong to it, a full stop does
    not.

    A minus counts unless it stands right behind a digit, letter or bracket (`9-4` ends in 4).
    """
    numbers = list(_NUMBER.finditer(text))
    if not numbers:
        return None
    last = numbers[-1]
    digits = last.group().replace(",", "").replace("$", "")
    if (
        digits.startswith("-")
        and last.start() > 0
        and (text[last.start() - 1].isalnum() or text[last.start() - 1] in ")]")
    ):
        digits = digits[1:]
    return Decimal(digits)


def normalize_answer(text: str) -> str:
    """Lower case, without punctuation, English articles and superfluous spaces (SQuAD, Rajpurkar et al. 2016)."""
    text = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(word for word in text.split() if word not in ("a", "an", "the"))


def verifier_names() -> list[str]:
    """Every verifier's name; makes none of them."""
    return sorted(cls.name for cls in VerifierFunction.__subclasses__())


def build_all_verifiers() -> dict[str, VerifierFunction]:
    """One of each subclass of `VerifierFunction`, by name."""
    # A subclass that cannot be made lacks `__call__`: Python says so here, at the first use.
    return {cls.name: cls() for cls in VerifierFunction.__subclasses__()}  # pyrefly: ignore[bad-instantiation]


def verifier_name(dataset_name: str, names: Collection[str]) -> str | None:
    """Which of `names` scores rows of this `dataset` column: the whole of it, or what stands before the first slash."""
    dataset_name = dataset_name.lower()
    if dataset_name in names:
        return dataset_name
    family = dataset_name.partition("/")[0]
    return family if family in names else None


def find_verifier(dataset_name: str, verifiers: Mapping[str, VerifierFunction]) -> VerifierFunction:
    """The verifier for rows of this `dataset` column.

    Raises:
        ValueError: there is none.
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


def score_response(dataset: str, ground_truth: object, token_ids: list[int], text: str) -> VerificationResult:
    """Scores one response with the row's verifier. What a verifier raises, this raises."""
    return find_verifier(dataset, _verifiers())(token_ids, text, ground_truth)


@functools.cache
def _verifiers() -> dict[str, VerifierFunction]:
    return build_all_verifiers()
