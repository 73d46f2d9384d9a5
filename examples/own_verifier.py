r"""A verifier of your own: part of the reward for an answer that is nearly right.

    python open_instruct/grpo_fast.py --config conf/tiny_sums.yaml --output_dir out/own_verifier \
        --dataset_mixer_list assets/judged_sums_train.jsonl 1.0 --dataset_mixer_eval_list assets/judged_sums_eval.jsonl 1.0 \
        --verifier_modules examples/own_verifier.py --remap_verifier general-quality_ref=near

A row's column `dataset` names its verifier, and `ground_truth` is the label that the verifier is given. Rows of yours would say
`"dataset": "near"`; those of this command name another verifier, which `--remap_verifier` replaces.

Verifiers score in processes without files, network or further processes. One that asks a server overrides `async_call`. A
function in TRL's form, which also sees the other columns of a row, is in own_reward.py. More: docs/guides/verifiers.md.
"""

import math
import re

from open_instruct.ground_truth_utils import VerificationResult, VerifierFunction

WITHIN = 10.0
"""An answer that is this far from the label has no reward."""
_ANSWER = re.compile(r"<answer>\s*(-?\d{1,9}(?:\.\d{1,9})?)\s*</answer>")


class Near(VerifierFunction):
    """1 for the label in answer tags, and less the further the number there is from it."""

    # The sentence above is shown to you if a step finds nothing to train on.

    name = "near"
    weight = 1.0  # reward = score * weight * --verification_reward; a row may name several verifiers, whose rewards are added
    forms = ("<answer>{}</answer>",)  # a row whose label scores 0 when stated like this is refused before the run

    def __call__(
        self, tokenized_prediction: list[int], prediction: str, label: object, query: str | None = None
    ) -> VerificationResult:
        right = number_of(label)
        answers = _ANSWER.findall(prediction)
        if len(answers) != 1:  # none, or several to choose from
            return VerificationResult(0.0, reasoning=f"{len(answers)} answers in tags")
        distance = abs(float(answers[0]) - right)
        return VerificationResult(max(0.0, 1.0 - distance / WITHIN), reasoning=f"{distance:g} away")


def number_of(label: object) -> float:
    """The label as a number.

    Raises:
        ValueError: it is none. All labels are tried before a run, which then ends with file and row of those that are refused.
    """
    number = float(str(label))
    if not math.isfinite(number):
        raise ValueError(f"{label!r} is no finite number")
    return number
