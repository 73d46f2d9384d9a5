"""The interface of a verifier, and its results."""

import asyncio
import inspect
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from open_instruct.chat_codec import TAGS
from open_instruct.config.verifier_options import VerifierConfig
from open_instruct.verifiers.labels import texts_of


class NotScored(Exception):
    """A verifier cannot score a response, for a reason that is not the response's fault. The message says why.

    Args:
        cost: US dollars that were spent anyway.
    """

    def __init__(self, why: str = "", *, cost: float = 0.0) -> None:
        super().__init__(why)
        self.cost = cost


@dataclass(frozen=True)
class VerificationResult:
    """A verifier's result for one response."""

    score: float
    """In [0, 1]; 1 is right."""
    cost: float = 0.0
    """US dollars spent on judging; metric `objective/verifier_cost`."""
    reasoning: str | None = None
    """Why the verifier gave this score, if it can say. Log and transcripts show it, and `answer`."""
    answer: str | None = None
    """What the verifier read as the answer; "" if the response has none in the form that it reads. None: it does not say."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.score <= 1.0:
            raise ValueError(f"a verifier's score lies in [0, 1], got {self.score}")
        if not 0.0 <= self.cost < math.inf:
            raise ValueError(f"a verifier's cost is a number of US dollars, got {self.cost}")


class VerifierFunction:
    """Scores one response. A verifier has no state, so any process may use it.

    A subclass sets `name` (and `weight`, if it is not 1) in its body or through `super().__init__("name", weight=0.5)`. It
    overrides `__call__`, which runs in the jail and can only compute, or `async_call`, which runs outside the jail.
    """

    name: str = ""
    """The part of the `dataset` column before any slash that names this verifier. Upper and lower case are the same."""
    weight: float = 1.0
    """The reward of a response is its score times this weight times `--verification_reward`."""

    tags: tuple[str, ...] = TAGS
    """Tags that the verifier looks for. A response shows them to the verifier even if the tokenizer marks them as special
    tokens, which a decoded text otherwise lacks."""

    forms: tuple[str, ...] = ()
    """The forms in which the verifier reads an answer, with `{}` in its place, such as `<answer>{}</answer>`. A row whose label
    scores 0 in all of them is refused before a run (`responses_with`)."""

    def __init__(self, name: str | None = None, weight: float | None = None, verifier_config: Any = None) -> None:
        """`verifier_config` holds the options of the verifiers that come with the project."""
        self.name = self.name if name is None else name
        self.weight = self.weight if weight is None else weight
        self.verifier_config = VerifierConfig() if verifier_config is None else verifier_config

    def __call__(
        self, tokenized_prediction: list[int], prediction: str, label: object, query: str | None = None
    ) -> VerificationResult:
        """Scores `prediction`, whose token ids are `tokenized_prediction`, against the row's ground truth `label`.

        `query` is the text of the prompt, as the model has seen it; with the reasoning cache it is the problem.

        Raises:
            ValueError: this verifier does not understand the label. A bad prediction never raises an error; it scores 0.
        """
        raise NotImplementedError(f"{type(self).__name__} scores outside the jail: use async_call")

    async def async_call(
        self, tokenized_prediction: list[int], prediction: str, label: object, query: str | None = None
    ) -> VerificationResult:
        """As `__call__`, for a verifier that asks a server or starts a process. It is awaited in the controller's process,
        outside the jail, like hundreds of other calls. It must not compute for long: nothing else is scored meanwhile.

        As in open-instruct, `super().async_call` runs `__call__` in a thread.

        Raises:
            NotScored: this response cannot be scored; the message says why.
        """
        return await asyncio.to_thread(self, tokenized_prediction, prediction, label, query)

    async def close(self) -> None:
        """Closes what `async_call` has opened. Called on the same event loop, after the last response is scored."""

    @classmethod
    def get_config_class(cls) -> type[VerifierConfig]:
        """The class of `verifier_config`: `VerifierConfig`, or a dataclass derived from it whose further fields have defaults."""
        return VerifierConfig

    @classmethod
    def is_outside(cls) -> bool:
        """Whether responses are scored by `async_call`, because a subclass overrides it."""
        return cls.async_call is not VerifierFunction.async_call

    @classmethod
    def is_complete(cls) -> bool:
        """Whether this class can score, in either way. If not, it is only a base class."""
        return not inspect.isabstract(cls) and (cls.is_outside() or cls.__call__ is not VerifierFunction.__call__)

    @property
    def outside_timeout_s(self) -> float | None:
        """Seconds that one `async_call` may take, retries included; None: `--verifier_timeout_s`."""
        return None

    def check_label(self, label: object) -> None:
        """Raises the `ValueError` that scoring against this label would raise, so that bad data is refused before a run.

        By default this scores an empty response to an empty prompt. For a verifier outside the jail the default checks nothing.
        Override it if scoring takes long or costs money.
        """
        if not self.is_outside():
            is_a_result(self([], "", label, ""))

    def scoring_rule(self, label: object) -> str:
        """For a message to the user: what a response to a row with this label must have to be scored above 0.

        By default the first sentence of the docstring of the class; "" if it has none.
        """
        bases = type(self).__mro__
        classes = bases[: bases.index(VerifierFunction)]
        text = next((cls.__doc__ for cls in classes if cls.__doc__), "")
        return re.split(r"(?<=\.)\s", " ".join(text.split()), maxsplit=1)[0]

    def answers_in(self, label: object) -> list[str]:
        """The answers of which any is right."""
        return texts_of(label)

    def responses_with(self, label: object) -> Iterable[str]:
        """Responses that state the label itself as the answer; by default the label's answers in each of `forms`.

        A row is refused before a run if all of them score 0, because then no response is right. Without any, the label is not
        tried. By default a label is tried only if it holds a tag or words of a form, because nothing else breaks a form.
        """
        answers = self.answers_in(label)
        marks = ["<", *(words for form in self.forms for words in form.split("{}") if words)]
        if not any(mark in answer for mark in marks for answer in answers):
            return ()
        return [form.format(answer) for answer in answers for form in self.forms]

    def try_label(self, label: object) -> None:
        """Raises `ValueError` if the label matches no spelling of itself (`responses_with`). A class derived from a verifier with
        `forms` or `responses_with` inherits neither, because it may read other forms."""
        if not {"forms", "responses_with"} & vars(type(self)).keys():
            return
        responses = list(self.responses_with(label))
        if responses and not any(self([], response, label, "").score > 0 for response in responses):
            raise ValueError(
                f"no response can match the ground truth {label!r:.80}: {self.name} gives 0 to the label itself, stated as "
                f"{responses[0]!r:.120}. Give only the answer, without tags, without the words before it, and with all braces "
                "closed"
            )

    def prepare(self, dataset: str) -> None:
        """Loads everything slow that scoring rows with this value of the `dataset` column needs."""

    def prepare_label(self, label: object) -> None:
        """Loads everything slow that scoring against this label needs."""


def is_a_result(result: object) -> VerificationResult:
    """The result of a verifier, checked. Raises `TypeError` if it is no result, such as a bare number."""
    if not isinstance(result, VerificationResult):
        raise TypeError(f"a verifier must give VerificationResult(score), got {result!r:.80}")
    return result
