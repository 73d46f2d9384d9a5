"""The verifier `rubric`: a judge looks at a response once for each criterion of the row.

A label is `{"query": …, "rubrics": [{"description": …, "weight": 1.0}, …]}`, or its JSON, as in open-instruct. A criterion that a
good response does not meet has a weight below 0.
"""

import asyncio
import json
import math
import os
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass, replace

from open_instruct.config.verifier_options import VerifierConfig
from open_instruct.verifiers.base import NotScored, VerificationResult, VerifierFunction
from open_instruct.verifiers.judge import client_of
from open_instruct.verifiers.judge_prompts import CRITERION
from open_instruct.verifiers.text_verifiers import judged_part
from open_instruct.verifiers.thoughts import NEVER_ENDS

MODEL = "RUBRIC_JUDGE_MODEL"
"""Environment variable that names another judge than `--llm_judge_model`."""
DESCRIPTIONS = ("description", "rubric_item", "Ingredient")


@dataclass(frozen=True)
class Criterion:
    """An item of a rubric."""

    description: str
    weight: float


class RubricVerifier(VerifierFunction):
    """The sum of scores times weights, divided by the sum of absolute weights, at least 0. Each score is 0, 0.5 or 1.

    A criterion that the judge cannot score leaves the whole response not scored.
    """

    name = "rubric"

    def __init__(self, verifier_config: VerifierConfig | None = None) -> None:
        super().__init__(verifier_config=verifier_config)
        config = self.verifier_config
        self._client = client_of(replace(config, llm_judge_model=os.environ.get(MODEL) or config.llm_judge_model))

    @property
    def outside_timeout_s(self) -> float:
        return self._client.longest_wait_s

    async def async_call(
        self, tokenized_prediction: list[int], prediction: str, label: object, query: str | None = None
    ) -> VerificationResult:
        question, criteria = read_rubric(label)
        response = judged_part(prediction, query)
        if response is None:
            return VerificationResult(0.0, reasoning=NEVER_ENDS)
        query = question or query or ""
        judgements = await _all(
            self._client.judge(CRITERION, query=query, response=response, label=criterion.description)
            for criterion in criteria
        )
        total = sum(
            judgement.score * criterion.weight for judgement, criterion in zip(judgements, criteria, strict=True)
        )
        share = total / sum(abs(criterion.weight) for criterion in criteria)
        reasons = "\n".join(judgement.reasoning or "" for judgement in judgements)
        return VerificationResult(min(max(share, 0.0), 1.0), sum(judgement.cost for judgement in judgements), reasons)

    def check_label(self, label: object) -> None:
        self._client.check(self.name)
        for criterion in read_rubric(label)[1]:
            self._client.check_length(CRITERION, criterion.description, f"{self.name}: a criterion")

    async def close(self) -> None:
        await self._client.close()


async def _all(judgements: Iterable[Awaitable[VerificationResult]]) -> list[VerificationResult]:
    """The results of all judgements. If one raises an error, it is raised when all are done, with the cost of all."""
    results = await asyncio.gather(*judgements, return_exceptions=True)
    errors = [error for error in results if isinstance(error, BaseException)]
    if not errors:
        return [result for result in results if isinstance(result, VerificationResult)]
    if isinstance(errors[0], NotScored):
        errors[0].cost = sum(result.cost for result in results if isinstance(result, VerificationResult | NotScored))
    raise errors[0]


def read_rubric(label: object) -> tuple[str, list[Criterion]]:
    """The question of a label, which may be empty, and its criteria.

    Raises:
        ValueError: the label is no rubric, or has no criterion with a weight.
    """
    if isinstance(label, list) and len(label) == 1:
        label = label[0]
    if isinstance(label, str):
        try:
            label = json.loads(label)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"a rubric must be {{query, rubrics}} or its JSON, got {label!r:.80}") from error
    rubrics = label.get("rubrics") if isinstance(label, dict) else None
    if not isinstance(label, dict) or not isinstance(rubrics, list) or not rubrics:
        raise ValueError(f"a rubric must be {{query, rubrics}} with at least one criterion, got {label!r:.80}")
    criteria = [_criterion(item) for item in rubrics]
    if not any(criterion.weight for criterion in criteria):
        raise ValueError("each criterion of the rubric has the weight 0")
    return str(label.get("query") or label.get("Question") or ""), criteria


def _criterion(item: object) -> Criterion:
    fields = item if isinstance(item, dict) else {}
    description = next((fields[name] for name in DESCRIPTIONS if fields.get(name)), None)
    weight = fields.get("weight", 1.0)
    if not isinstance(description, str):
        raise ValueError(f"a criterion must be {{description, weight}}, got {item!r:.80}")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise ValueError(f"the weight of a criterion must be a number, got {weight!r:.40}")
    return Criterion(description, float(weight))
