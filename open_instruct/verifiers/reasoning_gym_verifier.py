"""The verifier of reasoning-gym's tasks."""

import functools
import json

from open_instruct.system.sandbox import missing
from open_instruct.verifiers.answer_reading import extract_answer
from open_instruct.verifiers.base import VerificationResult, VerifierFunction
from open_instruct.verifiers.reasoning_gym_data import PARAMETERS, PREFIX, decode_item, make_dataset
from open_instruct.verifiers.reasoning_gym_scorers import EXECUTING_TASKS, Scorer, mend
from open_instruct.verifiers.thoughts import answer_part, why_no_answer


class ReasoningGymVerifier(VerifierFunction):
    """Gives the last complete `<answer>...</answer>` after the thoughts to the task's own scorer; 0 if the response has none.

    Partial credit follows the task: `score_answer` of `chain_sum`, for example, gives a score between 0 and 1 to an answer that
    contains the right answer.
    """

    name = "reasoning_gym"

    def __call__(
        self, tokenized_prediction: list[int], prediction: str, label: object, query: str | None = None
    ) -> VerificationResult:
        item, scorer = self._item_and_scorer(label)
        text = answer_part(prediction, query)
        answer = extract_answer(text or "")
        if answer is None:
            return VerificationResult(0.0, reasoning=why_no_answer(text, "<answer>...</answer>"), answer="")
        return VerificationResult(float(scorer.score_answer(answer, item)), answer=answer)

    def scoring_rule(self, label: object) -> str:
        item = decode_item(str(label))
        task = item.get("metadata", {}).get("source_dataset")
        return f"{task} compares the last <answer>…</answer> with its own answer, {item['answer']}"

    def answers_in(self, label: object) -> list[str]:
        answer = decode_item(str(label)).get("answer")
        return [answer] if isinstance(answer, str) else []

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
