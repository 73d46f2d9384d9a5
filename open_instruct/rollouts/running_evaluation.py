"""One evaluation while it is in flight: which prompts are still to be issued, which came back, which were given up.

    next_row ─► engines ─► begin_scoring ─► verifiers ─► add ─► groups, once `is_complete`
       ▲           │                                      ▲
       │           │                           │          └── fail for the last time: the prompt scores 0
       │           │                           └── leave_out: a verifier failed, so nothing is known of the prompt
       └───────────┴── fail, and lost with an engine

A prompt is tried again with the same seed. Another seed would favour answers that are short enough for the time limit, and two
evaluations would differ by more than their weights.
"""

import logging
from collections import Counter, deque
from collections.abc import Collection, Sequence
from typing import Any

from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.data.prompt_dataset import PromptDataset
from open_instruct.data_types import GenerationResult, Moment
from open_instruct.rollouts.evaluation_measures import EvaluationMeasures, Outcomes, rows_of_sets
from open_instruct.scored_groups import ScoredGroup, UnscoredGroup
from open_instruct.system.counted import counted_are
from open_instruct.system.work_threads import WorkThreads
from open_instruct.workflows.base import Workflow

logger = logging.getLogger(__name__)


PREFIX = "eval-"
"""Start of the ids of evaluation prompts."""


def is_of_evaluation(prompt_id: str) -> bool:
    return prompt_id.startswith(PREFIX)


class Evaluation:
    """The evaluation of one version. Not thread-safe: the controller's lock guards it.

    Args:
        version: the weights that are evaluated.
        rows: the rows of the evaluation data that are measured, one prompt for each.
        sets: the names of the sets that these rows are, for the metrics.
        max_attempts: how often the engines may fail on a prompt. The loss of a prompt with its engine is not a failure.
    """

    def __init__(self, version: int, rows: Sequence[int], *, max_attempts: int, sets: Sequence[str] = ()) -> None:
        self.version = version
        self.sets = sets
        self.num_rows = len(rows)
        self.began = Moment()
        self.seconds = 0.0
        """Time from the start to the last result so far."""
        self._max_attempts = max_attempts
        self._to_issue = deque(rows)
        self._out: set[int] = set()
        """Rows that were issued and did not come back."""
        self._being_scored: set[int] = set()
        self._groups: dict[int, ScoredGroup] = {}
        self._failures: Counter[int] = Counter()
        self._last_causes: dict[int, str] = {}
        """Cause of the last failure, for each row that was given up."""
        self._left_out: dict[int, UnscoredGroup] = {}

    def prompt_id(self, row: int) -> str:
        return f"{PREFIX}{self.version}-{row}"

    def next_row(self) -> int | None:
        """The row of the next prompt for the engines; None if no prompt waits to be issued."""
        while self._to_issue:
            row = self._to_issue.popleft()
            if not self._has(row):  # else a result arrived after all
                self._out.add(row)
                return row
        return None

    def measures(self, result: GenerationResult) -> bool:
        """Whether the result belongs to this evaluation and not to another one."""
        return result.is_eval and result.issue_version == self.version

    def begin_scoring(self, result: GenerationResult) -> bool:
        """A result has arrived. Returns whether it must be scored; a second copy must not."""
        _check_versions(result, self.version)
        row = result.index
        if self._has(row):
            return False
        self._out.discard(row)
        self._being_scored.add(row)
        return True

    def _has(self, row: int) -> bool:
        """Whether an answer of the engines has arrived."""
        return row in self._groups or row in self._being_scored or row in self._left_out

    def add(self, group: ScoredGroup) -> None:
        """A result was scored."""
        self._being_scored.discard(group.result.index)
        self._groups[group.result.index] = group
        self.seconds = self.began.elapsed_s()

    def leave_out(self, row: int, group: UnscoredGroup) -> None:
        """A result was not scored: the evaluation is complete without it."""
        self._being_scored.discard(row)
        self._left_out[row] = group
        self.seconds = self.began.elapsed_s()

    def fail(self, group: ScoredGroup | UnscoredGroup) -> bool | None:
        """The engines broke a group off. Its prompt is issued again; after `max_attempts` failures it is given up and counts with
        the scores of `group`, or is left out. Returns whether it is issued again; None if the prompt is not with the engines any
        more."""
        result = group.result
        assert result is not None, "a group that is given up has its result"
        row = result.index
        if row not in self._out:
            return None
        self._out.discard(row)
        self._failures[row] += 1
        if self._failures[row] < self._max_attempts:
            self._to_issue.append(row)
            return True
        if isinstance(group, UnscoredGroup):
            self._left_out[row] = group
        else:
            self._groups[row] = group
        self._last_causes[row] = result.error
        self.seconds = self.began.elapsed_s()
        return False

    def recover(self, present: Collection[str]) -> int:
        """An engine died: issue the prompts again that were sent, are not back and are not among `present`. Returns how many."""
        rows = [row for row in sorted(self._out) if self.prompt_id(row) not in present]
        self._out.difference_update(rows)
        self._to_issue.extend(rows)
        return len(rows)

    @property
    def num_done(self) -> int:
        """Number of prompts that are scored, given up or left out."""
        return len(self._groups) + len(self._left_out)

    @property
    def is_complete(self) -> bool:
        return self.num_done == self.num_rows

    def outcomes(self, rows: Collection[int] | None = None) -> Outcomes:
        """What became of these rows, or of all, in the order of the data."""
        groups = [group for row, group in sorted(self._groups.items()) if rows is None or row in rows]
        left_out = [group for row, group in sorted(self._left_out.items()) if rows is None or row in rows]
        return Outcomes(groups, left_out)

    @property
    def num_given_up(self) -> int:
        return len(self._last_causes)

    def why_given_up(self) -> str:
        """For the log, if prompts were given up."""
        causes = Counter(self._last_causes.values()).most_common(3)
        treatment = "left out" if self._last_causes.keys() <= self._left_out.keys() else "counted as wrong"
        return (
            f"evaluation of version {self.version}: {self.num_given_up} of {self.num_rows} prompts given up after "
            f"{self._max_attempts} attempts, {treatment} ({'; '.join(f'{cause}: {number}' for cause, number in causes)}). "
            "With a higher --generation_timeout, or a lower --eval_response_length, they would come to their end."
        )

    @property
    def in_words(self) -> str:
        """How far the evaluation is."""
        return f"evaluation of version {self.version}: {self.num_done} of {self.num_rows} done"

    def describe_missing(self) -> str:
        """For a message to the user: which prompts are missing."""
        names = ", ".join(self.prompt_id(row) for row in sorted(self._out)[:8])
        return (
            f"{counted_are(len(self._out), 'prompt')} not back from the engines ({names or 'none'}), "
            f"{counted_are(len(self._being_scored), 'prompt')} being scored, {len(self._to_issue)} still to be issued"
        )


def _check_versions(result: GenerationResult, version: int) -> None:
    versions = {span[0] for sample in result.samples for span in sample.version_spans}
    assert versions <= {version}, (
        f"{result.prompt_id} was to measure version {version} but was sampled by {sorted(versions)}"
    )


class Evaluations:
    """At most one evaluation at a time, of all sets of the evaluation data or of some. `held_out` is None if there are none."""

    def __init__(
        self, args: GRPOConfig, threads: WorkThreads, workflow: Workflow, held_out: PromptDataset | None
    ) -> None:
        self.current: Evaluation | None = None
        self.answers: Sequence[ScoredGroup] = ()
        """The last evaluation's answers, in the order of the data."""
        self.unscored: Sequence[ScoredGroup] = ()
        """The responses that the last evaluation leaves out, because a verifier failed."""
        self._args = args
        self._threads = threads
        self._measures = EvaluationMeasures(args, workflow)
        self._sets = {} if held_out is None else rows_of_sets(args, held_out)

    def start(self, version: int, sets: Sequence[str] | None = None) -> None:
        """Let the prompts of these sets be issued, or of all. The engines must keep `version` until the evaluation is
        collected."""
        assert self._sets, "there is no evaluation dataset"
        names = [name for name in self._sets if sets is None or name in sets]
        rows = [row for name in names for row in self._sets[name]]
        assert rows, f"no evaluation set is called {' or '.join(sets or ())}"
        with self._threads.lock:
            self._threads.raise_error()
            assert self.current is None, f"the evaluation of version {self.current.version} is not collected"
            attempts = self._args.max_generation_attempts
            self.current = Evaluation(version, rows, max_attempts=attempts, sets=names)
            self._threads.lock.notify_all()

    def go_on_with(self, version: int) -> None:
        """Start the evaluation of `version`, unless it is under way. An evaluation of another version is given up."""
        with self._threads.lock:
            self.give_up_others(version)
            if self.current is None:
                self.start(version)

    def give_up_others(self, version: int) -> None:
        """The engines have `version` or are being sent it now, so an evaluation of other weights can no longer end; its caller
        has timed out. Results that still arrive for it are recognised by their version and dropped."""
        with self._threads.lock:
            if self.current is not None and self.current.version != version:
                logger.warning(
                    "the evaluation of version %d is given up, because version %d has come: %s",
                    self.current.version,
                    version,
                    self.current.describe_missing(),
                )
                self.give_up()

    def collect(self, timeout_s: float) -> dict[str, Any]:
        """`eval/*` metrics of the evaluation under way. Waits for its last result, and raises `TimeoutError` after `timeout_s`,
        or at once when the evaluation is given up."""
        evaluation = self.current
        assert evaluation is not None, "no evaluation was started"
        with self._threads.lock:
            self._threads.wait_for(lambda: evaluation.is_complete or self.current is not evaluation, timeout_s)
            if not evaluation.is_complete:
                has_time = self.current is not evaluation
                why = "when it was given up" if has_time else f"after {timeout_s:g} s"
                raise TimeoutError(
                    f"evaluation: {evaluation.num_done} of {evaluation.num_rows} results {why}; {evaluation.describe_missing()}"
                    + ("" if has_time else ". Where it only takes longer, raise --eval_timeout_s")
                )
            if self.current is evaluation:  # else another evaluation took its place
                self.current = None
        if evaluation.num_given_up:
            logger.warning("%s", evaluation.why_given_up())
        outcomes = evaluation.outcomes()
        self.answers = self._measures.answers(outcomes)
        self.unscored = [group.unscored for group in outcomes.left_out if group.unscored is not None]
        by_set = {name: evaluation.outcomes(self._sets[name]) for name in evaluation.sets}
        is_whole = len(by_set) == len(self._sets)
        metrics = self._measures.of_evaluation(outcomes, by_set, is_whole=is_whole)
        metrics |= {f"eval/model_step_{name}": evaluation.version for name in ("min", "mean", "max")}
        metrics["time/eval"] = evaluation.seconds  # not up to now: the driver asks once the next step is trained
        return metrics

    def give_up(self) -> None:
        """Forget the evaluation under way."""
        with self._threads.lock:
            self.current = None
            self._threads.lock.notify_all()

    def measured_by(self, result: GenerationResult) -> Evaluation | None:
        """The evaluation under way, if the result is part of it."""
        return self.current if self.current is not None and self.current.measures(result) else None

    def recover(self, present: set[str]) -> int:
        """Issue the prompts again that were lost with an engine. Returns how many. See `Evaluation.recover`."""
        return self.current.recover(present) if self.current is not None else 0
