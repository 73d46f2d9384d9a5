"""Rubrics that change during a run (`--apply_evolving_rubric_reward`), as in open-instruct.

    a step's groups with a rubric ─► a model compares the responses of each ─► new criteria, which count from then on

Criteria in the data stay. Of the criteria that were found for a question, only the newest `--max_active_rubrics` count: with
weight +1 if good responses meet them, and -1 if bad ones do. The model is asked in parallel with training, so steps do not wait.
"""

import asyncio
import json
import logging
import os
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from open_instruct.chat_codec import END_THINK
from open_instruct.config.verifier_options import VerifierConfig
from open_instruct.system.event_loop_thread import EventLoopThread
from open_instruct.verifiers.base import NotScored
from open_instruct.verifiers.judge import client_of
from open_instruct.verifiers.judge_prompts import CRITERION, longest_label, new_criteria_question
from open_instruct.verifiers.rubric_verifier import Criterion, read_rubric
from open_instruct.verifiers.text_verifiers import judged_part

logger = logging.getLogger(__name__)

MODEL = "RUBRIC_GENERATION_MODEL"
"""Environment variable that names another model than `--llm_judge_model`."""
WEIGHTS = {"positive_rubrics": 1.0, "negative_rubrics": -1.0}
MOST_NEW = 5
"""Criteria that one comparison may give of each kind."""


@dataclass
class QuestionRubric:
    """The criteria that have been found for one question."""

    active: list[Criterion] = field(default_factory=list)
    num_inactive: int = 0
    """Number of criteria that newer ones have replaced."""


class EvolvingRubrics:
    """Finds new criteria and adds them to labels. Belongs to the controller; any thread may call it.

    Args:
        max_active: most found criteria that count for a question at the same time, in addition to the criteria in the data.
        directory: for one file per step with the questions and the found criteria; None: no files are written.
    """

    def __init__(self, config: VerifierConfig, max_active: int, directory: Path | None = None) -> None:
        model = os.environ.get(MODEL) or config.llm_judge_model
        self._client = client_of(replace(config, llm_judge_model=model))
        self._max_active = max_active
        self._directory = directory
        self._calls = EventLoopThread("evolving rubrics")
        self._lock = threading.Lock()
        self._found: dict[str, QuestionRubric] = {}
        self._counts: Counter[str] = Counter()
        self._cost = 0.0

    def label(self, label: object) -> object:
        """The label with the criteria that were found for its question."""
        question, criteria = read_rubric(label)
        with self._lock:
            active = list(self._found.get(_key(label), QuestionRubric()).active)
        if not active:
            return label
        return {"query": question, "rubrics": [asdict(criterion) for criterion in (*criteria, *active)]}

    def learn(self, training_step: int, groups: Sequence[tuple[object, Sequence[str]]]) -> Future[None] | None:
        """Have the responses to each label compared, in the form in which a rubric's judge sees them. Returns at once; new
        criteria count as soon as they are found."""
        if not groups:
            return None
        try:
            return self._calls.submit(lambda: self._learn(training_step, groups))
        except RuntimeError:  # the run ends
            return None

    def take_metrics(self) -> dict[str, float]:
        """Metrics of the comparisons since the last call, under open-instruct's names; empty before the first comparison."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
            cost, self._cost = self._cost, 0.0
            sizes = [len(rubric.active) for rubric in self._found.values()]
            num_inactive = sum(rubric.num_inactive for rubric in self._found.values())
        num_asked = counts["asked"]
        if not num_asked and not sizes:
            return {}
        metrics: dict[str, float] = {
            "evolving_rubrics/total_active": sum(sizes),
            "evolving_rubrics/total_inactive": num_inactive,
            "evolving_rubrics/num_overrides": len(sizes),
            "evolving_rubrics/num_active_rubrics": sum(sizes) / max(len(sizes), 1),
        }
        if num_asked:
            metrics |= {
                "evolving_rubrics/valid_rate": counts["answered"] / num_asked,
                "evolving_rubrics/skipped": num_asked - counts["answered"],
                "evolving_rubrics/num_new_rubrics": counts["new"] / num_asked,
                "evolving_rubrics/avg_gt_rubrics": counts["of the data"] / num_asked,
                "evolving_rubrics/cost": cost,
            }
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """The found criteria as JSON values. Running comparisons are left out."""
        with self._lock:
            return {key: asdict(rubric) for key, rubric in self._found.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`."""
        self._found = {
            key: QuestionRubric([Criterion(**criterion) for criterion in rubric["active"]], rubric["num_inactive"])
            for key, rubric in state.items()
        }

    def close(self) -> None:
        """Give up the running comparisons."""
        self._calls.close(self._client.close)

    async def _learn(self, training_step: int, groups: Sequence[tuple[object, Sequence[str]]]) -> None:
        records = await asyncio.gather(*(self._compare(label, responses) for label, responses in groups))
        if self._directory is not None:
            try:
                self._directory.mkdir(parents=True, exist_ok=True)
                lines = [json.dumps(record) + "\n" for record in records]
                (self._directory / f"evolving_rubrics_step_{training_step:06d}.jsonl").write_text("".join(lines))
            except OSError as error:
                logger.warning("rubrics could not be kept in %s: %s", self._directory, error.strerror or error)

    async def _compare(self, label: object, responses: Sequence[str]) -> dict[str, Any]:
        """Ask for new criteria, and add them to the question's rubric. Returns a record for the step's file."""
        question, criteria = read_rubric(label)
        key = _key(label)
        with self._lock:
            all_criteria = [*criteria, *self._found.get(key, QuestionRubric()).active]
        parts = [judged_part(response) or "" for response in responses]
        candidates: list[Criterion] | None = None
        try:
            candidates = await self._ask(question, parts, all_criteria)
        except NotScored as error:
            with self._lock:
                self._cost += error.cost
            logger.warning("no new criteria for a rubric: %s", error)
        with self._lock:
            self._counts.update({"asked": 1, "of the data": len(criteria), "answered": candidates is not None})
            if candidates:
                self._take(key, criteria, candidates)
        return {
            "query": question,
            "responses": parts,
            "existing": [criterion.description for criterion in all_criteria],
            "new": None if candidates is None else [asdict(criterion) for criterion in candidates],
        }

    async def _ask(
        self, question: str, responses: Sequence[str], criteria: Sequence[Criterion]
    ) -> list[Criterion] | None:
        """New criteria, without descriptions that are so long that the judge's question would have no room for a response."""
        max_tokens = self._client.max_question_tokens
        descriptions = [criterion.description for criterion in criteria]
        judgement = await self._client.ask(
            new_criteria_question(question, responses, descriptions, max_tokens=max_tokens)
        )
        with self._lock:
            self._cost += judgement.cost
        candidates, limit = read_new_criteria(judgement.text), longest_label(CRITERION, max_tokens)
        if candidates is None:
            return None
        return [criterion for criterion in candidates if len(criterion.description) <= limit]

    def _take(self, key: str, criteria: Sequence[Criterion], candidates: Sequence[Criterion]) -> None:
        """Add new criteria to a question's rubric. Comparisons for one question may run at once and find the same criteria."""
        rubric = self._found.setdefault(key, QuestionRubric())
        texts = {criterion.description for criterion in (*criteria, *rubric.active)}
        additions = {criterion.description: criterion for criterion in candidates if criterion.description not in texts}
        self._counts["new"] += len(additions)
        queue = [*rubric.active, *additions.values()]
        active = queue[-self._max_active :]
        self._found[key] = QuestionRubric(active, rubric.num_inactive + len(queue) - len(active))


def _key(label: object) -> str:
    """The key of a label's rubric. As in open-instruct, rows with the same question share the criteria that are found for it."""
    question, criteria = read_rubric(label)
    return question or json.dumps([asdict(criterion) for criterion in criteria])


def read_new_criteria(answer: str) -> list[Criterion] | None:
    """The criteria in an answer `{"positive_rubrics": [{"description": …}], "negative_rubrics": […]}`; None for any other
    answer."""
    text = answer.rpartition(END_THINK)[2]
    start, end = text.find("{"), text.rfind("}")
    try:
        rubrics = json.loads(text[start : end + 1])
    except (ValueError, RecursionError):
        return None
    if not isinstance(rubrics, dict) or not WEIGHTS.keys() & rubrics.keys():
        return None
    criteria = []
    for kind, weight in WEIGHTS.items():
        items = rubrics.get(kind) or []
        for item in items[:MOST_NEW] if isinstance(items, list) else []:
            description = item.get("description") if isinstance(item, dict) else None
            if isinstance(description, str) and description.strip():
                criteria.append(Criterion(description.strip(), weight))
    return criteria
