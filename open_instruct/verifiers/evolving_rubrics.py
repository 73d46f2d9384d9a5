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
        kept_in: directory for one file per step with the questions and the found criteria; None: no files are written.
    """

    def __init__(self, config: VerifierConfig, max_active: int, kept_in: Path | None = None) -> None:
        model = os.environ.get(MODEL) or config.llm_judge_model
        self._client = client_of(replace(config, llm_judge_model=model))
        self._max_active = max_active
        self._kept_in = kept_in
        self._calls = EventLoopThread("evolving rubrics")
        self._lock = threading.Lock()
        self._found: dict[str, QuestionRubric] = {}
        self._counts: Counter[str] = Counter()
        self._cost = 0.0

    def label(self, label: object) -> object:
        """The label with the criteria that were found for its question."""
        question, criteria = read_rubric(label)
        with self._lock:
            found = list(self._found.get(_key(label), QuestionRubric()).active)
        if not found:
            return label
        return {"query": question, "rubrics": [asdict(one) for one in (*criteria, *found)]}

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
            active = [len(one.active) for one in self._found.values()]
            num_inactive = sum(one.num_inactive for one in self._found.values())
        num_asked = counts["asked"]
        if not num_asked and not active:
            return {}
        metrics: dict[str, float] = {
            "evolving_rubrics/total_active": sum(active),
            "evolving_rubrics/total_inactive": num_inactive,
            "evolving_rubrics/num_overrides": len(active),
            "evolving_rubrics/num_active_rubrics": sum(active) / max(len(active), 1),
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
            return {key: asdict(one) for key, one in self._found.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`."""
        self._found = {
            key: QuestionRubric([Criterion(**criterion) for criterion in one["active"]], one["num_inactive"])
            for key, one in state.items()
        }

    def close(self) -> None:
        """Give up the running comparisons."""
        self._calls.close(self._client.close)

    async def _learn(self, training_step: int, groups: Sequence[tuple[object, Sequence[str]]]) -> None:
        records = await asyncio.gather(*(self._compare(label, responses) for label, responses in groups))
        if self._kept_in is not None:
            try:
                self._kept_in.mkdir(parents=True, exist_ok=True)
                lines = [json.dumps(record) + "\n" for record in records]
                (self._kept_in / f"evolving_rubrics_step_{training_step:06d}.jsonl").write_text("".join(lines))
            except OSError as error:
                logger.warning("rubrics could not be kept in %s: %s", self._kept_in, error.strerror or error)

    async def _compare(self, label: object, responses: Sequence[str]) -> dict[str, Any]:
        """Ask for new criteria, and add them to the question's rubric. Returns a record for the step's file."""
        question, of_data = read_rubric(label)
        key = _key(label)
        with self._lock:
            known = [*of_data, *self._found.get(key, QuestionRubric()).active]
        seen = [judged_part(response) or "" for response in responses]
        new: list[Criterion] | None = None
        try:
            new = await self._ask(question, seen, known)
        except NotScored as error:
            with self._lock:
                self._cost += error.cost
            logger.warning("no new criteria for a rubric: %s", error)
        with self._lock:
            self._counts.update({"asked": 1, "of the data": len(of_data), "answered": new is not None})
            if new:
                self._take(key, of_data, new)
        return {
            "query": question,
            "responses": seen,
            "existing": [one.description for one in known],
            "new": None if new is None else [asdict(one) for one in new],
        }

    async def _ask(self, question: str, responses: Sequence[str], known: Sequence[Criterion]) -> list[Criterion] | None:
        """New criteria, without descriptions that are so long that the judge's question would have no room for a response."""
        max_tokens = self._client.max_question_tokens
        criteria = [one.description for one in known]
        judgement = await self._client.ask(new_criteria_question(question, responses, criteria, max_tokens=max_tokens))
        with self._lock:
            self._cost += judgement.cost
        new, longest = read_new_criteria(judgement.text), longest_label(CRITERION, max_tokens)
        return None if new is None else [one for one in new if len(one.description) <= longest]

    def _take(self, key: str, of_data: Sequence[Criterion], new: Sequence[Criterion]) -> None:
        """Add new criteria to a question's rubric. Comparisons for one question may run at once and find the same criteria."""
        rubric = self._found.setdefault(key, QuestionRubric())
        known = {one.description for one in (*of_data, *rubric.active)}
        added = list({one.description: one for one in new if one.description not in known}.values())
        self._counts["new"] += len(added)
        active = [*rubric.active, *added]
        kept = active[-self._max_active :]
        self._found[key] = QuestionRubric(kept, rubric.num_inactive + len(active) - len(kept))


def _key(label: object) -> str:
    """The key of a label's rubric. As in open-instruct, rows with the same question share the criteria that are found for it."""
    question, criteria = read_rubric(label)
    return question or json.dumps([asdict(one) for one in criteria])


def read_new_criteria(answer: str) -> list[Criterion] | None:
    """The criteria in an answer `{"positive_rubrics": [{"description": …}], "negative_rubrics": […]}`; None for any other
    answer."""
    text = answer.rpartition(END_THINK)[2]
    start, end = text.find("{"), text.rfind("}")
    try:
        read = json.loads(text[start : end + 1])
    except (ValueError, RecursionError):
        return None
    if not isinstance(read, dict) or not WEIGHTS.keys() & read.keys():
        return None
    found = []
    for kind, weight in WEIGHTS.items():
        items = read.get(kind) or []
        for item in items[:MOST_NEW] if isinstance(items, list) else []:
            description = item.get("description") if isinstance(item, dict) else None
            if isinstance(description, str) and description.strip():
                found.append(Criterion(description.strip(), weight))
    return found
