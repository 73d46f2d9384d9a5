"""How far the controller is with the batch of the next training step, and what else the driver has not been told yet. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from open_instruct.system.counted import counted, counted_are

LONGEST_BRIEF = 170
"""Characters of `BatchProgress.brief`, so that the line in the log that begins with it has at most 200."""
MOST_NAMED = 8
"""Prompts that an error names. There may be thousands, and the controller is asked every second."""


@dataclass(frozen=True)
class BatchProgress:
    """What came back from the engines for a training step, and what is still awaited."""

    training_step: int
    num_back: int
    """Groups that came back for this step."""
    num_usable: int
    """Of these, the groups that can be trained on."""
    num_masked: int
    """Of these, the groups in which every response was cut off at its length limit and is masked."""
    mean_score: float | None
    """Mean score of the groups that cannot be trained on; None if there are none."""
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

    def needs_a_warning(self, before: "BatchProgress | None") -> bool:
        """Whether something may be wrong: there is nothing to train on, the run is paused, or nothing at all has come since the
        progress `before`."""
        stands_still = before is not None and before.num_results == self.num_results
        return self.is_without_gradient or bool(self.pauses) or stands_still

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
            return "no group came back for this step yet"
        back = f"{counted(self.num_back, 'group')} came back for this step, {self.num_usable:,} can be trained on"
        num_alike = self.num_back - self.num_usable - self.num_masked
        causes = [f"scored alike: {num_alike:,}"] if num_alike else []
        causes += [f"cut off and masked: {self.num_masked:,}"] if self.num_masked else []
        if num_alike == self.num_back:
            causes = [f"all {causes[0]}, mean score {self.mean_score:.3g}"]
        return f"{back} ({', '.join(causes)})" if causes else back

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
