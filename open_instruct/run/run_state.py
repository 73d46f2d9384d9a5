"""The state file of a checkpoint. It holds the progress of a run, and this module checks it before a run resumes from it.

    {"identity": run_identity(…), "progress": {"training_step": 2, …}, "evaluation_of": null, "sets_under_way": []}

Anybody may have edited the file, so its shape is checked here, before any other code reads it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from open_instruct.data.run_identity import OPTIONS
from open_instruct.report.accuracies import Accuracies, Measure

Count = Annotated[int, Field(ge=0)]
Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Reward = Annotated[float, Field(allow_inf_nan=False)]
SetMeasure = dict[str, Reward | None]
"""`share` and `reward` of an evaluation set, as in `Measure`."""


@dataclass
class Progress:
    """The progress of a run. A checkpoint contains all of it."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")

    training_step: Count = 0
    episode: Count = 0
    num_total_tokens: Count = 0
    """Number of response tokens that were trained on."""
    num_total_prompt_tokens: Count = 0
    wall_seconds: Number = 0.0
    eval_accuracy_before: Number | None = None
    eval_accuracy_after: Number | None = None
    eval_reward_before: Reward | None = None
    eval_reward_after: Reward | None = None
    """As the accuracy, None too if the last evaluation measured only some of the sets."""
    eval_sets_before: dict[str, SetMeasure] = field(default_factory=dict)
    eval_sets_after: dict[str, SetMeasure] = field(default_factory=dict)
    """Of each evaluation set, by its name."""

    def take(self, accuracies: Accuracies, *, is_before: bool = False) -> None:
        """Remember an evaluation, of the weights before the first step if `is_before`; that one says nothing of training."""
        whole = accuracies.whole or Measure(None, None)
        measures = {
            name: {"share": measure.share, "reward": measure.reward} for name, measure in accuracies.of_sets.items()
        }
        if is_before:
            self.eval_accuracy_before, self.eval_reward_before = whole.share, whole.reward
            self.eval_sets_before |= measures
            return
        self.eval_accuracy_after, self.eval_reward_after = whole.share, whole.reward
        self.eval_sets_after |= measures


class _Shape(BaseModel):
    model_config = ConfigDict(strict=True)


class _Tokenizer(_Shape):
    name: str
    words: str
    chat_template: str
    special: str
    date: str | None


class _Rows(_Shape):
    rows: Count
    prompts: str
    ground_truths: str
    verifiers: str


class _Data(_Shape):
    """The part of an identity about data and tokenizer."""

    texts: dict[str, str | None]
    tokenizer: _Tokenizer
    train: _Rows
    eval: _Rows | None


class _Evaluation(_Shape):
    evaluation_of: Count | None
    sets_under_way: list[str] | None = None
    """Checkpoints of earlier versions have none."""


def mistake_in(state: Mapping[str, Any], training_step: int) -> str:
    """What is wrong with the state of a step's checkpoint, as text; "" if this program can resume from that state."""
    if not _is_identity(state.get("identity")):
        return "does not say of which run it is"
    progress = state.get("progress")
    if not isinstance(progress, dict) or not _is(Progress, progress):
        return "does not say where that run stood"
    if (step := progress.get("training_step")) != training_step:
        return f"is of step {step}, and its directory of step {training_step}"
    if not _is(_Evaluation, state):
        return "does not say which evaluation was under way"
    return ""


def _is_identity(value: Any) -> bool:
    """Whether `value` is an identity. An identity of an earlier version holds only options, at its top level. The part about the
    data must be complete or absent."""
    options = value.get("options", value) if isinstance(value, dict) else None
    if not isinstance(options, dict) or not options.keys() & set(OPTIONS):
        return False
    return not value.keys() & _Data.model_fields.keys() or _is(_Data, value)


def _is(shape: type, value: Any) -> bool:
    try:
        TypeAdapter(shape).validate_json(
            json.dumps(value)
        )  # strict mode accepts an object in place of a dataclass only in JSON
    except ValidationError:
        return False
    return True
