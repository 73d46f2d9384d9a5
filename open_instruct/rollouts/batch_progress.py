"""How far the controller is with the batch of the next training step, and what else the driver has not been told yet. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from open_instruct.scored_groups import ScoredGroup, last_samples
from open_instruct.system.counted import counted, counted_are

LONGEST_BRIEF = 220
"""Characters of `BatchProgress.brief`, beyond which less important parts are left out."""
RIGHT = 1.0 - 1e-6
"""A score of at least this counts as 1."""
LONG_S = 300.0
"""Seconds without any result, after which the log's line about a step is a warning."""
MOST_NAMED = 8
"""Prompts that an error names. There may be thousands, and the controller is asked every second."""


@dataclass(frozen=True)
class Returned:
    """Counts over the groups that came back for a training step."""

    num_all_wrong: int = 0
    """Groups in which every response scored 0."""
    num_all_right: int = 0
    """Groups in which every response scored 1."""
    num_responses: int = 0
    num_cut_off: int = 0
    """Responses that ended at their length limit."""
    num_not_scored: int = 0
    """Responses that no verifier scored. They are not among `num_responses`."""
    sum_of_scores: float = 0.0

    def with_group(self, group: ScoredGroup) -> "Returned":
        """The counts with a further group."""
        (answers,) = last_samples([group])
        scores = answers.outcomes
        return Returned(
            self.num_all_wrong + bool(len(scores) and scores.max() <= 0),
            self.num_all_right + bool(len(scores) and scores.min() >= RIGHT),
            self.num_responses + len(scores),
            self.num_cut_off + sum(sample.finish_reason == "length" for sample in answers.samples),
            self.num_not_scored + group.num_not_scored,
            self.sum_of_scores + float(scores.sum()),
        )

    def __str__(self) -> str:
        """`mean score 0.12, all 0: 2, all 1: 0, cut off: 12 of 24 responses`; "" if there is no response."""
        parts = []
        if self.num_responses:
            mean = self.sum_of_scores / self.num_responses
            parts = [f"mean score {mean:.3g}", f"all 0: {self.num_all_wrong:,}", f"all 1: {self.num_all_right:,}"]
        if self.num_cut_off:
            parts.append(f"cut off: {self.num_cut_off:,} of {counted(self.num_responses, 'response')}")
        if self.num_not_scored:
            parts.append(f"not scored: {self.num_not_scored:,}")
        return ", ".join(parts)


@dataclass(frozen=True)
class BatchProgress:
    """What came back from the engines for a training step, and what is still awaited."""

    training_step: int
    num_prompts: int
    """Groups that a step consists of, if enough of them can be trained on."""
    num_back: int
    """Groups that came back for this step."""
    num_usable: int
    """Of these, the groups that can be trained on."""
    num_masked: int
    """Of these, the groups in which every response was cut off at its length limit and is masked."""
    returned: Returned
    version: int
    """Prompts of this version are admitted."""
    num_waited_for: int
    """Prompts that are not back."""
    first_waited_for: Sequence[str]
    """The first of them in the order of issue, at most `MOST_NAMED`, each with its version."""
    num_being_scored: int
    of_teacher: str
    """How many of these the teacher has, as text; "" without a teacher."""
    num_waiting: int
    """Groups that are complete and that no step has taken."""
    evaluation: str = ""
    """How far the evaluation under way is; "" if there is none."""
    pauses: Sequence[str] = field(default_factory=tuple)
    num_results: int = 0
    """Responses and evaluation results that have come since the start, to see whether anything comes."""

    @property
    def is_without_gradient(self) -> bool:
        """Whether groups came back and none of them can be trained on."""
        return self.num_back > 0 and self.num_usable == 0

    def needs_a_warning(self, unchanged_s: float) -> bool:
        """Whether something may be wrong: there is nothing to train on in as many groups as a step has, the run is paused, or
        nothing at all has come for a long time. The first responses of a run may well take a minute.

        Args:
            unchanged_s: how long `num_results` has been what it is.
        """
        finds_nothing = self.is_without_gradient and self.num_back >= self.num_prompts
        return finds_nothing or bool(self.pauses) or unchanged_s >= LONG_S

    @property
    def brief(self) -> str:
        """One line that begins with what came back."""
        text = self._back
        for part in self._awaited:
            if len(text) + len(part) + 2 <= LONGEST_BRIEF:
                text += f"; {part}"
        return text

    @property
    def _back(self) -> str:
        if not self.num_back:
            return f"none of {counted(self.num_prompts, 'group')} is back yet"
        masked = f", {self.num_masked:,} of them cut off and masked" if self.num_masked else ""
        is_are = "is" if self.num_back == 1 else "are"
        return (
            f"{self.num_back:,} of {counted(max(self.num_prompts, self.num_back), 'group')} {is_are} back{masked}, "
            f"{self.num_usable:,} can be trained on: {self.returned}"
        )

    @property
    def shortest(self) -> str:
        """A few words for the live line."""
        return f"step {self.training_step}: {self.num_back}/{max(self.num_prompts, self.num_back)} groups" + (
            f", {self.returned}" if self.num_back else ""
        )

    @property
    def _awaited(self) -> list[str]:
        """What is still awaited, the most important first."""
        parts = [f"paused: {', '.join(self.pauses)}"] if self.pauses else []
        parts += [self.evaluation] if self.evaluation else []
        parts.append(f"{counted_are(self.num_waited_for, 'prompt')} not back from the engines")
        parts += [f"{counted_are(self.num_being_scored, 'group')} being scored"] if self.num_being_scored else []
        parts += [f"the first is {self.first_waited_for[0]}"] if self.first_waited_for else []
        return parts

    def __str__(self) -> str:
        """The brief line and all details, for an error."""
        names = ", ".join(self.first_waited_for)
        paused = f"; paused: {', '.join(self.pauses)}" if self.pauses else ""
        evaluation = f"; {self.evaluation}" if self.evaluation else ""
        return (
            f"{self._back}; step {self.training_step} is being put together, prompts of version {self.version} are admitted, "
            f"{counted_are(self.num_waited_for, 'prompt')} not back from the engines ({names or 'none'}), "
            f"{counted_are(self.num_being_scored, 'group')} being scored{self.of_teacher}, "
            f"{counted_are(self.num_waiting, 'group')} waiting{evaluation}{paused}"
        )


@dataclass(frozen=True)
class RolloutNews:
    """What the driver has not been told yet. It asks every second while it waits."""

    warnings: Sequence[str]
    evaluation_is_complete: bool
    """Whether the evaluation under way can be taken without waiting."""
    left_out: dict[int, list[dict[str, object]]]
    """Prompts that steps have left out, as rows of `prompts.jsonl`, by step."""
    progress: BatchProgress
    samples: Sequence[str] = ()
    """Responses to show in the log (`sample_display.py`)."""
