"""What a verifier is, and what it says of a response."""

import asyncio
import inspect
import math
from dataclasses import dataclass
from typing import Any

from open_instruct.config.verifier_options import VerifierConfig


class NotScored(Exception):
    """A verifier cannot say anything of a response, through no fault of the response. The text says why.

    Args:
        cost: US dollars that were spent nevertheless.
    """

    def __init__(self, why: str = "", *, cost: float = 0.0) -> None:
        super().__init__(why)
        self.cost = cost


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


class VerifierFunction:
    """Scores one response. A verifier has no state, so that any process may score with it.

    A subclass sets `name` (and `weight`, if it is not 1) in its body or through `super().__init__("name", weight=0.5)`. It
    overrides `__call__`, which runs in the jail and can do nothing but compute, or `async_call`, which runs outside.
    """

    name: str = ""
    """Value of the `dataset` column before any slash; upper and lower case are the same."""
    weight: float = 1.0
    """The reward of a response is its score times this weight times `--verification_reward`."""

    def __init__(self, name: str | None = None, weight: float | None = None, verifier_config: Any = None) -> None:
        """`verifier_config` holds the options of the verifiers that come with the project."""
        self.name = self.name if name is None else name
        self.weight = self.weight if weight is None else weight
        self.verifier_config = VerifierConfig() if verifier_config is None else verifier_config

    def __call__(
        self, tokenized_prediction: list[int], prediction: str, label: object, query: str | None = None
    ) -> VerificationResult:
        """Scores `prediction`, whose token ids are `tokenized_prediction`, against the row's ground truth `label`.

        `query` is the text of the prompt, as the model has seen it; with the reasoning cache `query` is the problem.

        Raises:
            ValueError: this verifier does not understand the label. A bad prediction never raises, it scores 0.
        """
        raise NotImplementedError(f"{type(self).__name__} scores outside the jail: use async_call")

    async def async_call(
        self, tokenized_prediction: list[int], prediction: str, label: object, query: str | None = None
    ) -> VerificationResult:
        """What `__call__` does, for a verifier that asks a server or starts a process. It is awaited in the controller's process,
        outside the jail, beside hundreds of others, and must not compute for long: nothing else is scored meanwhile.

        As with open-instruct, `super().async_call` is `__call__` in a thread.

        Raises:
            NotScored: nothing is known of this response, for the reason that the text gives.
        """
        return await asyncio.to_thread(self, tokenized_prediction, prediction, label, query)

    async def close(self) -> None:
        """Ends what `async_call` has opened, on the same event loop, when nothing is scored any more."""

    @classmethod
    def get_config_class(cls) -> type[VerifierConfig]:
        """The class of `verifier_config`: `VerifierConfig`, or a dataclass made from it; its further fields have defaults."""
        return VerifierConfig

    @classmethod
    def is_outside(cls) -> bool:
        """Whether `async_call` scores: a subclass overrides it."""
        return cls.async_call is not VerifierFunction.async_call

    @classmethod
    def is_complete(cls) -> bool:
        """Whether this class scores in either way. If not, it is a base of others."""
        return not inspect.isabstract(cls) and (cls.is_outside() or cls.__call__ is not VerifierFunction.__call__)

    @property
    def outside_timeout_s(self) -> float | None:
        """Seconds that one `async_call` may take, retries included; None: `--verifier_timeout_s`."""
        return None

    def check_label(self, label: object) -> None:
        """Raises the `ValueError` that scoring against this label would raise, so that bad data is refused before a run.

        By default this scores an empty response to an empty prompt; outside the jail it looks at nothing. Override it if scoring
        takes long or costs money.
        """
        if not self.is_outside():
            is_a_result(self([], "", label, ""))

    def prepare(self, dataset: str) -> None:
        """Loads whatever is slow to load and needed to score rows with this value of the `dataset` column."""

    def prepare_label(self, label: object) -> None:
        """Loads whatever is slow to load and needed to score against this label."""


def is_a_result(said: object) -> VerificationResult:
    """What a verifier has said. Raises `TypeError` if it is no result, such as a bare number."""
    if not isinstance(said, VerificationResult):
        raise TypeError(f"a verifier must give VerificationResult(score), got {said!r:.80}")
    return said


def single_label(label: object) -> str:
    """A label as text. Some of open-instruct's data wraps the label in a list of one."""
    if isinstance(label, list) and len(label) == 1:
        label = label[0]
    is_number = isinstance(label, int | float) and not isinstance(label, bool) and math.isfinite(label)
    if not is_number and not isinstance(label, str):
        raise ValueError(f"this verifier needs one text or number as ground truth, got {label!r:.80}")
    return str(label)
