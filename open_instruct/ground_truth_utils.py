"""Verifiers: how good a response is, told from its text and the row's ground truth.

A row's `dataset` column names its verifier: `gsm8k`, `math`, `string_matcher`, or `reasoning_gym/<task>`, where the part before
the slash is the name. To add one, subclass `VerifierFunction` and set its `name`; nothing has to be registered.
"""

import functools
import json
import math
import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import ClassVar

from open_instruct.reasoning_gym_data import PARAMETERS, PREFIX, decode_item, make_dataset
from open_instruct.reasoning_gym_scorers import EXECUTING_TASKS, Scorer, mend
from open_instruct.sandbox import missing


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

    def prepare_label(self, label: object) -> None:  # noqa: B027 - most need nothing
        """Loads what scoring against this label needs, where that takes time."""


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
        _refuse_without_jail(self._item_and_scorer(label)[0]["metadata"]["source_dataset"])

    def prepare(self, dataset: str) -> None:
        task = dataset.removeprefix(PREFIX)
        _refuse_without_jail(task)
        _scorer(task, "{}")

    def prepare_label(self, label: object) -> None:
        self._item_and_scorer(label)

    def _item_and_scorer(self, label: object) -> tuple[dict, Scorer]:
        if not isinstance(label, str):
            raise ValueError(f"a reasoning_gym ground truth is the item's JSON text, got {type(label).__name__}")
        item = decode_item(label)
        task = item.get("metadata", {}).get("source_dataset")
        if not isinstance(task, str):
            raise ValueError("a reasoning_gym ground truth names its task in metadata.source_dataset")
        return item, _scorer(task, json.dumps(item.get(PARAMETERS, {}), sort_keys=True))


def _refuse_without_jail(task: str) -> None:
    reasons = missing() if task in EXECUTING_TASKS else []
    if reasons:
        raise ValueError(
            f"reasoning_gym/{task}: its scorer evaluates what a model wrote, for which this machine has no jail: "
            f"{'; '.join(reasons)}. Leave the task out, or run on a kernel that has it."
        )


@functools.lru_cache(maxsize=256)
def _scorer(task: str, parameters: str) -> Scorer:
    """`score_answer` is a method of the dataset: one of one row per task and parameters. Making it may take seconds."""
    return mend(task, make_dataset(PREFIX + task, task, json.loads(parameters) | {"size": 1, "seed": 0}))


class GSM8KVerifier(VerifierFunction):
    """1 if the last number in the response equals the label: `$1,234.50.` is 1234.5, `7` equals `7.0`."""

    name = "gsm8k"

    def __call__(
        self, tokenized_prediction: list[int], prediction: str, label: object, query: str | None = None
    ) -> VerificationResult:
        text = _single(label).rpartition("####")[2]
        wanted = last_number(text)
        if wanted is None or len(_NUMBER.findall(text)) > 1:
            raise ValueError(f"a gsm8k ground truth holds one number, got {label!r:.80}")
        return VerificationResult(float(last_number(prediction) == wanted))


class StringMatcherVerifier(VerifierFunction):
    """1 if the last complete `<answer>...</answer>` is the label, but for case, punctuation, articles and spaces.

    What stands before a digit, and symbols such as `+`, `-`, `/`, `%` and `#`, are no punctuation: `3.14` is not `314`.
    """

    name = "string_matcher"

    def __call__(
        self, tokenized_prediction: list[int], prediction: str, label: object, query: str | None = None
    ) -> VerificationResult:
        wanted = normalize_answer(_single(label))
        if not wanted:
            raise ValueError(f"a string_matcher ground truth holds a word, a number or a symbol, got {label!r:.80}")
        answer = extract_answer(prediction)
        if answer is None:
            return VerificationResult(0.0, reasoning="no <answer>...</answer>")
        return VerificationResult(float(normalize_answer(answer) == wanted))


class MathVerifier(VerifierFunction):
    """1 if the last `\\boxed{…}` equals the label: as a number where both are numbers, else as LaTeX but for its spacing.

    `3` and `3\\text{ cm}` are equal, `3\\text{ m}` and `3\\text{ cm}` are not; `42` and `42\\%` are not.
    """

    name = "math"

    def __call__(
        self, tokenized_prediction: list[int], prediction: str, label: object, query: str | None = None
    ) -> VerificationResult:
        wanted, unit = _math_value(_single(label))
        if wanted == "":
            raise ValueError(f"a math ground truth holds a number or LaTeX, got {label!r:.80}")
        answer = boxed_answer(prediction)
        if answer is None:
            return VerificationResult(0.0, reasoning=r"no \boxed{…}")
        value, unit_of_answer = _math_value(answer)
        units_agree = unit == unit_of_answer or ("" in (unit, unit_of_answer) and "%" not in (unit, unit_of_answer))
        return VerificationResult(float(value == wanted and units_agree))


def _single(label: object) -> str:
    """A label as text; open-instruct's data wraps some in a list of one."""
    if isinstance(label, list) and len(label) == 1:
        label = label[0]
    is_number = isinstance(label, int | float) and not isinstance(label, bool) and math.isfinite(label)
    if not is_number and not isinstance(label, str):
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


MAX_NUMBER = 1000
"""Longer ones, in characters, are no numbers: Python takes quadratic time to read them."""
_IGNORED = re.compile(r"\\(?:left|right|displaystyle|quad|qquad)(?![A-Za-z])|\\[!,;: ]|\\?\$|~")
_SPACES = re.compile(r"(?<![0-9]) | (?![0-9])")
"""Single ones, but for those between two digits: `4 2` is not 42."""
_THOUSANDS = re.compile(r"(?<=[0-9])(?:\{,\}|\\,|,)(?=[0-9]{3}(?![0-9]))")
_UNIT = re.compile(r"(.+?)(?:\\(?:text|mathrm|mbox)\{([^{}]*)\}|\\?(%))")
_PLAIN_NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)")
_FRACTION = re.compile(r"([-+]?)(?:\\frac\{([-+]?[0-9]+)\}\{([-+]?[0-9]+)\}|([0-9]+)/([0-9]+))")


def _math_value(latex: str) -> tuple[Fraction | str, str]:
    """A number exactly, where it is one; else LaTeX without spacing. And the unit behind a number."""
    text = latex.strip().rstrip(".").replace("\N{MINUS SIGN}", "-").replace("{,}", ",")
    text = _IGNORED.sub(" ", _THOUSANDS.sub(",", text))
    if whole := re.fullmatch(r"\s*\\text\{([^{}]*)\}\s*", text):
        text = whole[1]
    text = re.sub(r"\\[dt]frac", r"\\frac", _SPACES.sub("", " ".join(text.split())))
    # one digit needs no braces in LaTeX
    text = re.sub(r"\\(sqrt|frac)([0-9])", r"\\\1{\2}", text)
    text = re.sub(r"(\\frac\{[^{}]*\})([0-9])", r"\1{\2}", text)
    if len(text) > MAX_NUMBER:
        return text, ""
    with_unit = _UNIT.fullmatch(text)
    number = _exactly(with_unit[1]) if with_unit else None
    if with_unit and number is not None:
        return number, (with_unit[2] or with_unit[3] or "").strip()
    number = _exactly(text)
    return (text if number is None else number), ""


def _exactly(text: str) -> Fraction | None:
    """The number that a text is, if it is one."""
    if fraction := _FRACTION.fullmatch(text):
        sign, top, bottom, plain_top, plain_bottom = fraction.groups()
        denominator = int(bottom or plain_bottom)
        return int(f"{sign}1") * Fraction(int(top or plain_top), denominator) if denominator else None
    if re.fullmatch(r"[-+]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]*)?", text):
        text = text.replace(",", "")
    return Fraction(Decimal(text)) if _PLAIN_NUMBER.fullmatch(text) else None


_MINUS = "-\N{MINUS SIGN}\N{EN DASH}"
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_NUMBER = re.compile(rf"([{_MINUS}]?)\$?([{_MINUS}]?)({_DIGITS})([eE][-+]?[0-9]+)?(?:/([0-9]+)(?![0-9/]))?")
_BEGINS_INSIDE = re.compile(r"[0-9][:/_]|(?<![0-9])[0-9]{1,3}(?:\.[0-9]{3})+,")
"""What may stand before a number that is only the rest of something: a time, a date, `1_42`, `1.000,42`."""
_GOES_ON = re.compile(r"[:/_][0-9]|[\N{SUPERSCRIPT TWO}\N{SUPERSCRIPT THREE}\N{SUPERSCRIPT ONE}\u2070-\u2079]")


def last_number(text: str) -> Fraction | None:
    """The last number in a text, exactly; None where there is none, or where the last digits belong to something else.

    Commas between thousands, a dollar sign, a power of ten (`1e3`) and a denominator (`1/2`) belong to it, a full stop does not.
    A minus counts unless it stands right behind a digit, letter or bracket (`9-4` ends in 4). Times, dates and powers are no
    numbers: `12:42`, `42²`.
    """
    last = next(iter(deque(_NUMBER.finditer(text), maxlen=1)), None)
    if last is None or len(last[0]) > MAX_NUMBER or _GOES_ON.match(text, last.end()):
        return None
    before = text[max(last.start() - 40, 0) : last.start()]
    if any(match.end() == len(before) for match in _BEGINS_INSIDE.finditer(before)):
        return None
    first_sign, second_sign, digits, exponent, denominator = last.groups()
    if exponent and len(exponent) > 4:
        return None
    number = Fraction(Decimal(digits.replace(",", "") + (exponent or "")))
    if denominator:
        if not int(denominator):
            return None
        number /= int(denominator)
    is_behind_something = before[-1:].isalnum() or before[-1:] in (")", "]")
    is_negative = bool(second_sign) or (bool(first_sign) and not is_behind_something)
    return -number if is_negative else number


_PUNCTUATION = re.compile(r"""[.,:;!?](?![0-9])|["'`()\u2018\u2019\u201c\u201d]""")


def normalize_answer(text: str) -> str:
    """Lower case, without punctuation, English articles and superfluous spaces (after SQuAD, Rajpurkar et al. 2016).

    An article stays where nothing else is left: `A` may be the answer to a multiple choice.
    """
    text = re.sub(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))", "", text.lower())
    words = _PUNCTUATION.sub("", text).split()
    return " ".join([word for word in words if word not in ("a", "an", "the")] or words)


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


def prepare_label(dataset: str, ground_truth: object) -> None:
    """Loads what scoring against this ground truth needs."""
    find_verifier(dataset, _verifiers()).prepare_label(ground_truth)


def score_response(dataset: str, ground_truth: object, token_ids: list[int], text: str) -> VerificationResult:
    """Scores one response with the row's verifier. What a verifier raises, this raises."""
    return find_verifier(dataset, _verifiers())(token_ids, text, ground_truth)


@functools.cache
def _verifiers() -> dict[str, VerifierFunction]:
    return build_all_verifiers()
