"""Makes the output directory of a run that never ran: a record, metrics, prompts and options, written by the real writers.

`make_record(directory)` writes a run of 12 steps with two evaluation sets, whose first start was killed in step 8 after a
checkpoint of step 6. Its groups hold everything that a record can: several versions in a response, groups that steps left out,
a group that was too old and came again, one that was not scored and came again, a response that was not scored, cut responses,
a tool's answer, thoughts, a conversation in two rows, a character of several tokens. Step 13 is open.
"""

import atexit
import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from open_instruct.algorithms.advantages import group_advantages
from open_instruct.data_types import GenerationResult, MiniBatch, Sample, TokenStatistics, TrainingSample
from open_instruct.record.journal import Journal
from open_instruct.record.places import RECORD
from open_instruct.record.samples import RecordedGroup
from open_instruct.record.writer import RecordWriter
from open_instruct.report.metrics_file import MetricsWriter
from open_instruct.rollouts.training_samples import training_samples
from open_instruct.scored_groups import UNSCORED, FunctionRewards, Reading, ScoredGroup, ScorePart

TINY_MODEL = Path(__file__).parents[2] / "assets" / "tiny_model"
BEGAN = 1_780_000_000.0
"""Unix time at which the run began."""
STEP_S, REWARD = 10.0, 10.0
"""Seconds of a step, and `--verification_reward`."""
NUM_ROWS = 10
TRAIN, TEST = "data/train.jsonl", "data/test.jsonl"
SETS = ("plus", "minus")
EVALUATED = {
    0: [("right", "wrong"), ("wrong", "wrong"), ("right", "right"), ("wrong", "wrong")],
    5: [("right", "right"), ("wrong", "right"), ("wrong", "right"), ("wrong", "wrong")],
}
"""Kinds of the answers to each item of a set, by version."""
KILLED_IN, CHECKPOINT = 8, 6
EFFECTS = (
    ("generate", "generate-0", 0.0, 0.75),
    ("calculator", "calculator-0", 0.75, 0.5),
    ("environment", "environment-0", 1.25, 0.25),
    ("generate", "generate-1", 1.5, 0.5),
)
"""Of a group with a tool, whose generation takes 2 s."""
STANDARD = ("right", "wrong", "right", "thought")


@cache
def tokenizer() -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(TINY_MODEL / "tokenizer.json"))


def ids(text: str) -> np.ndarray:
    """(R,) int32."""
    return np.array(tokenizer().encode(text, add_special_tokens=False).ids, dtype=np.int32)


@dataclass(frozen=True)
class Plan:
    """One group to make."""

    number: int
    """Number of its prompt, which is `train-<number>`."""
    step: int
    kinds: Sequence[str] = STANDARD
    """Kind of each sample: `right`, `wrong`, `thought`, `cut`, `tool`, `first` and `second` part of a conversation, `odd`."""
    outcome: str = "consumed"
    attempt: int = 0
    set: str | None = None
    age: int = 0
    """Versions between the newest weights and the oldest that sampled a token."""
    first_sample: int = 0


@dataclass
class MadeRecord:
    """What was written, and from what."""

    directory: Path
    groups: dict[int, list[RecordedGroup]] = field(default_factory=dict)
    """By step; of steps that were trained twice the second time."""
    evaluations: dict[tuple[int, str], list[RecordedGroup]] = field(default_factory=dict)
    learner_logprobs: dict[int, list[np.ndarray]] = field(default_factory=dict)
    """By step what each rank said of its tokens."""


def make_record(
    directory: Path, *, num_steps: int = 12, end: str | None = "done", is_resumed: bool = True
) -> MadeRecord:
    """Write a run into an empty directory. `end`: why it ended; None if it was killed or still runs."""
    maker = _Maker(directory, num_steps)
    maker.options()
    if is_resumed:
        maker.start(1, after_step=0)
        maker.steps(range(1, KILLED_IN), opens=KILLED_IN)
        maker.start(2, after_step=CHECKPOINT)
        maker.steps(range(CHECKPOINT + 1, num_steps + 1), opens=num_steps + 1)
    else:
        maker.start(1, after_step=0)
        maker.steps(range(1, num_steps + 1), opens=num_steps + 1)
    if end is not None:
        maker.end(end)
    return maker.made


def plans(step: int) -> list[Plan]:
    """The groups of a step: four that it trains on, and those that it leaves out."""
    first = 5 * (step - 1)
    taken = [
        Plan(first, step, age=1 if step > 1 else 0),
        Plan(first + 1, step, ("right", "cut", "wrong", "tool")),
        Plan(first + 2, step, ("first", "second", "right", "wrong"), age=2 if step > 2 else 0),
        Plan(first + 3, step, ("odd", "right", "right", "wrong")),
    ]
    others = {
        0: Plan(first + 4, step, ("right",) * 4, "zero_std"),
        1: Plan(first + 4, step, ("wrong",) * 4, "zero_std"),
        2: Plan(first + 4, step, ("cut",) * 4, "masked"),
    }
    left_out = [others[step % 3]]
    if step == 3:
        left_out.append(Plan(5 * 3, step, outcome="too_old", age=2))
    if step == 5:
        left_out.append(Plan(first + 1, step, ("unscored",), UNSCORED, first_sample=4))
    if step == 9:
        left_out.append(Plan(5 * 9, step, ("unscored", "right"), UNSCORED, age=1))
    if step in (4, 10):
        taken[0] = replace(taken[0], attempt=1)
    return [*taken, *left_out]


class _Maker:
    """Writes the files of a run in the order in which a run does."""

    def __init__(self, directory: Path, num_steps: int) -> None:
        self.made = MadeRecord(directory)
        self._num_steps = num_steps
        directory.mkdir(parents=True, exist_ok=True)
        self._journal = Journal(directory / RECORD)
        self._writer: RecordWriter | None = None
        self._metrics = MetricsWriter(directory / "metrics.jsonl")
        self._prompts = MetricsWriter(directory / "prompts.jsonl")
        self._num_tokens = 0

    def options(self) -> None:
        options = {
            "run_name": "made",
            "model_name_or_path": str(TINY_MODEL),
            "tokenizer_name_or_path": str(TINY_MODEL),
            "total_episodes": self._num_steps * 4 * 4,
            "num_unique_prompts_rollout": 4,
            "num_samples_per_prompt_rollout": 4,
            "max_staleness_allowed": 2,
            "verification_reward": REWARD,
            "learning_rate": 2e-5,
            "seed": 1,
        }
        content = {
            "started": "2026-05-28T20:26:40+00:00",
            "command": "open_instruct/grpo_fast.py --seed 1 --learning_rate 2e-5",
            "directory": str(TINY_MODEL.parents[1]),
            "host": "a-machine",
            "versions": {},
            "given": {"seed": "1", "learning_rate": "2e-5"},
            "derived": {"run_name": "made", "max_staleness_allowed": 2},
            "in_force": options,
            "evaluation_sets": [],
        }
        (self.made.directory / "options.json").write_text(json.dumps(content, indent=1))

    def start(self, number: int, *, after_step: int) -> None:
        if self._writer is not None:
            self._writer.close(60.0)
        at = _end_of(after_step) if number == 1 else _end_of(KILLED_IN) + 60.0
        self._journal.start(command=["grpo_fast.py"], title="made", host="a-machine", process=1, unix=at)
        self._writer = RecordWriter(self.made.directory / RECORD, after_step)
        for writer in (self._metrics, self._prompts):
            writer.truncate_after(after_step if after_step else -1)
        checkpoint = f"step_{after_step}" if after_step else None
        self._journal.event("loop", after_step=after_step, checkpoint=checkpoint, unix=at)
        if not after_step:
            self._evaluate(0, at)

    def end(self, reason: str) -> None:
        self._journal.end(reason, 0 if reason == "done" else 1)
        if self._writer is not None:
            self._writer.close(60.0)

    def steps(self, steps: range, *, opens: int) -> None:
        assert self._writer is not None
        for step in steps:
            self._step(step)
        for plan in plans(opens)[:2]:
            self._writer.add(opens, self._add(plan))
        unix = _end_of(opens) - 1.0
        self._writer.note({"kind": "issued", "prompt_id": "train-64", "unix": unix, "attempt": 0, "version": opens - 1})
        assert self._writer.flush(60.0)
        assert not self._writer.failure, self._writer.failure

    def _add(self, plan: Plan) -> RecordedGroup:
        return recorded(plan)

    def _step(self, step: int) -> None:
        assert self._writer is not None
        entries = [self._add(plan) for plan in plans(step)]
        for entry in entries:
            result = entry.group.result
            about = {"prompt_id": result.prompt_id, "unix": result.token_statistics.start_time - 0.5}
            self._writer.note({"kind": "issued", **about, "attempt": entry.attempt, "version": result.issue_version})
            if result.prompt_id == "train-8":
                failure = {"engine": 1, "cause": "it took longer than 600 s", "is_tried_again": True}
                self._writer.note({"kind": "given_up", **about, **failure})
                self._writer.note({"kind": "lost", **about})
            if entry.outcome == UNSCORED and not entry.first_sample:
                failure = {"engine": 1, "cause": "not scored: timeout", "is_tried_again": True}
                self._writer.note({"kind": "given_up", **about, "unix": about["unix"] + 3.0, **failure})
            self._writer.add(step, entry)
        consumed = [entry.group for entry in entries if entry.outcome == "consumed"]
        samples = training_samples(
            consumed,
            verification_reward=REWARD,
            advantages=partial(group_advantages, name="centered"),
            mask_truncated_completions=True,
            masks=[[_not_too_old(sample, step) for sample in group.samples] for group in consumed],
        )
        ranks = divided(samples)
        values = [learner_values([samples[number] for number in numbers_of(batches)], step) for batches in ranks]
        self._writer.sent(step, ranks, samples)
        self._writer.commit(step, values)
        assert self._writer.flush(60.0)
        self.made.groups[step] = entries
        self.made.learner_logprobs[step] = [own["logprobs"] for own in values if own["logprobs"] is not None]
        self._tell(step, entries, samples)

    def _tell(self, step: int, entries: Sequence[RecordedGroup], samples: Sequence[TrainingSample]) -> None:
        """Metrics, prompts and events of a trained step."""
        groups = [entry for entry in entries if entry.outcome not in ("too_old", UNSCORED)]
        rewards = [float(value) for entry in groups for value in _of_ends(entry)]
        self._num_tokens += sum(len(sample.response) for sample in samples)
        ended = _end_of(step)
        row = {
            "all_groups/scores": float(np.mean(rewards)),
            "all_groups/val/sequence_lengths": float(np.mean([len(s.response) for s in samples])),
            "batch/filtered_prompts_pct": sum(entry.outcome != "consumed" for entry in groups) / len(groups),
            "val/num_total_tokens": self._num_tokens,
            "num_steps_off_policy": float(step % 2),
            "num_steps_off_policy_max": min(2, step - 1),
            "debug/vllm_vs_local_logprob_diff_mean": 0.01,
            "optim/grad_norm": 0.5 + 0.01 * step,
            "time/total": STEP_S,
            "time/trainer_waiting_for_data": 3.0,
            "time/learners": 6.0,
            "time/weight_sync": 1.0,
            "engine_restarts": int(step >= 9),
            "learner_response_tokens_per_second_step": 123.0,
            **({"engines/busy_share": 0.05 * step} if step > 1 else {}),
            "batch/response_lengths": {"edges": [0, 1, 2], "counts": [1, 2]},
        }
        if step in (2, 5):
            row["objective/verifier_cost"] = 0.25
        parts = {"waited_s": 3.0, "trained_s": 6.0, "sync_s": 1.0}
        if step in (4, 7):
            facts = {"text": f"the rule of step {step}", "cure": "Do something.", "link": "docs/start/what_to_watch.md"}
            self._journal.event("health", rule="slow_step", step=step, unix=ended, **facts)
        self._journal.event("sync", began=ended - 1.0, seconds=1.0, version=step, unix=ended)
        self._journal.event("step", step=step, seconds=STEP_S, unix=ended, **parts)
        self._metrics.write(step, row)
        fates = groups
        rows = [
            {"prompt_id": e.group.result.prompt_id, "row": e.row, "index": e.group.result.index, "fate": e.outcome}
            for e in fates
        ]
        self._prompts.write(step, {"prompts": rows})
        if step % 3 == 0:
            self._journal.event("checkpoint", step=step, began=ended, seconds=0.5, unix=ended + 0.5)
        if step == 5:
            self._journal.event(
                "warning", level="WARNING", text="alert at step 5: a metric is above its limit", unix=ended
            )
            self._evaluate(5, ended)
        if step == 10:
            self._journal.event("warning", level="ERROR", text="engine 1 died and is replaced", unix=ended)

    def _evaluate(self, version: int, at: float) -> None:
        assert self._writer is not None
        self._journal.event("evaluation_started", version=version, sets=list(SETS), unix=at)
        metrics = {}
        for number, name in enumerate(SETS):
            turned = EVALUATED[version]
            entries = [
                recorded(Plan(10 * number + item, version, kinds, "measured", set=name))
                for item, kinds in enumerate(turned)
            ]
            self.made.evaluations[version, name] = entries
            self._writer.measured(version, name, entries)
            metrics[f"eval/{name}/pass_at_1"] = float(np.mean([entry.group.scores for entry in entries]))
        self._metrics.add(version, metrics)
        self._journal.event("evaluation", version=version, unix=at + 2.0)


def _end_of(step: int) -> float:
    return BEGAN + 100.0 + STEP_S * step


def _of_ends(entry: RecordedGroup) -> np.ndarray:
    """Rewards of the conversations of a group."""
    return entry.rewards[[not sample.goes_on for sample in entry.group.samples]]


def _not_too_old(sample: Sample, step: int) -> np.ndarray:
    """(R,) bool: from step 7 on, tokens of an age of two versions are too old."""
    versions = np.repeat(*np.array(sample.version_spans).T)
    return (step - 1 - versions < 2) | (step < 7)


def recorded(plan: Plan) -> RecordedGroup:
    """The group of a plan, with rewards that follow from its kinds."""
    kinds = {"unscored": np.nan, "right": 1.0, "thought": 1.0, "tool": 1.0, "first": 1.0, "second": 1.0, "odd": 0.5}
    scores = np.array([kinds.get(kind, 0.0) for kind in plan.kinds], dtype=np.float32)
    samples = [_sample(plan, position, kind) for position, kind in enumerate(plan.kinds)]
    marker = plan.set or "train"
    began = _end_of(plan.step) - (0.0 if plan.set else STEP_S) + 0.5 * (plan.number % 5) - 8.0 * plan.age
    statistics = TokenStatistics(
        20,
        sum(len(s.response_ids) for s in samples),
        2.0,
        began,
        tool_time=0.5 if "tool" in plan.kinds else 0.0,
        effects=EFFECTS if "tool" in plan.kinds else (),
    )
    row = f"{TEST} line {plan.number + 1}" if plan.set else f"{TRAIN} line {plan.number % NUM_ROWS + 1}"
    result = GenerationResult(
        samples=samples,
        index=plan.number % NUM_ROWS,
        prompt_id=f"{marker}-{plan.number}" if not plan.set else f"eval-{plan.step}-{plan.number}",
        issue_version=_newest(plan) - plan.age,
        engine_id=plan.number % 2,
        token_statistics=statistics,
    )
    readings = (
        tuple(
            Reading(reasoning="not scored: timeout")
            if np.isnan(score)
            else Reading("7" if score == 1 else "8" if score else "")
            for score in scores
        ),
    )
    group = ScoredGroup(result, "math", scores, score_s=0.25, readings=readings)
    if plan.number % 5 == 3:  # a second verifier and a reward function
        parts = (ScorePart("math", 1.0, scores), ScorePart("format", 0.5, np.ones(len(scores), dtype=np.float32)))
        function = FunctionRewards(
            "brevity", 2.0, -0.1 * np.arange(len(scores)), 0.01, extra={"words": ["3"] * len(scores)}
        )
        group = replace(group, parts=parts, functions=(function,))
    rewards = np.asarray(group.rewards(REWARD), dtype=float)
    return RecordedGroup(
        group,
        rewards,
        row,
        plan.set or "train",
        str(plan.number % NUM_ROWS + 4),
        plan.outcome,
        plan.attempt,
        plan.step,
        began + 2.5,
        plan.set,
        first_sample=plan.first_sample,
        masks_cut_off=True,
    )


def _newest(plan: Plan) -> int:
    return plan.step if plan.set else plan.step - 1


def _sample(plan: Plan, position: int, kind: str) -> Sample:
    number = plan.number % NUM_ROWS
    prompt = ids(f"<|user|>What is {number} + 4?<|end|><|assistant|>")
    texts = {
        "right": f"The answer is {number + 4}. <answer>{number + 4}</answer><|end|>",
        "unscored": f"The answer is {number + 3} or more.<|end|>",
        "wrong": f"The answer is {number + 5 + position}. <answer>{number + 5 + position}</answer><|end|>",
        "thought": f"<think>{number} and 4 make {number + 4}</think><answer>{number + 4}</answer><|end|>",
        "cut": f"Let me check {number} + 4 = {position} and once more",
        "first": f"<think>first {number}</think>half way",
        "second": f"<answer>{number + 4}</answer><|end|>",
        "odd": f"日本 {number + 4} <answer>{number + 4}</answer><|end|>",
    }
    mask, start = None, 0
    if kind == "tool":
        parts = [
            ids(f"<calculator>{number} + 4</calculator>"),
            ids(f"<output>{number + 4}</output>"),
            ids(f"<answer>{number + 4}</answer><|end|>"),
        ]
        response = np.concatenate(parts)
        mask = np.concatenate([np.full(len(part), at != 1) for at, part in enumerate(parts)])
        start = len(parts[0]) + len(parts[1])
    else:
        response = ids(texts[kind])
    logprobs = (
        -np.random.default_rng([plan.step, plan.number, position]).gamma(0.5, 0.6, len(response)).astype(np.float32)
    )
    newest, half = _newest(plan), len(response) // 2
    spans = [(newest - plan.age, half), (newest, len(response) - half)] if plan.age else [(newest, len(response))]
    return Sample(
        prompt,
        response,
        logprobs if mask is None else np.where(mask, logprobs, 0).astype(np.float32),
        "length" if kind == "cut" else "stop",
        spans,
        loss_mask=mask,
        answer_start=start,
        goes_on=kind == "first",
        kv_age=plan.age,
        number=position + 1 if kind in ("first", "second") else 0,
    )


def divided(samples: Sequence[TrainingSample]) -> list[list[MiniBatch]]:
    """The samples on two ranks, in micro-batches of two. Without arrays, which the record does not look at."""
    ranks = [list(range(rank, len(samples), 2)) for rank in range(2)]
    return [
        [MiniBatch([], 0, samples_of_micro_batches=tuple(tuple(own[at : at + 2]) for at in range(0, len(own), 2)))]
        for own in ranks
    ]


def numbers_of(batches: Sequence[MiniBatch]) -> list[int]:
    """The samples of a rank in the order in which the learner reads them."""
    return [number for batch in batches for micro_batch in batch.samples_of_micro_batches for number in micro_batch]


def learner_values(samples: Sequence[TrainingSample], step: int) -> dict[str, np.ndarray | None]:
    """What a learner says of its trained tokens: a little less than the engine, and a correction."""
    engine = np.concatenate([np.zeros(0, np.float32), *(sample.logprobs[sample.mask] for sample in samples)])
    noise = np.random.default_rng([7, step, len(engine)]).normal(0, 0.02, len(engine)).astype(np.float32)
    logprobs = np.minimum(engine + noise, 0).astype(np.float32)
    return {"logprobs": logprobs, "correction": np.minimum(np.exp(logprobs - engine), 2.0).astype(np.float32)}


def make_large(
    directory: Path, *, num_steps: int, num_samples: int, num_tokens: int = 200, num_metrics: int = 250
) -> None:
    """A run of many large steps in seconds: all steps are links to the file of one step, so their column `step` is 1."""
    made = directory / "record" / "steps"
    writer = RecordWriter(directory / RECORD, 0)
    random = np.random.default_rng(0)
    for number in range(num_samples // 8):
        samples = [
            Sample(
                random.integers(0, 300, 40, dtype=np.int32),
                random.integers(0, 300, num_tokens, dtype=np.int32),
                -random.random(num_tokens, dtype=np.float32),
                "stop",
                [(0, num_tokens)],
            )
            for _ in range(8)
        ]
        statistics = TokenStatistics(40, 8 * num_tokens, 2.0, BEGAN)
        result = GenerationResult(samples, number, f"train-{number}", 0, number % 4, statistics)
        group = ScoredGroup(result, "math", random.integers(0, 2, 8).astype(np.float32))
        rewards = np.asarray(group.rewards(REWARD), dtype=float)
        place = f"{TRAIN} line {number + 1}"
        writer.add(1, RecordedGroup(group, rewards, place, "train", "7", "zero_std", 0, 1, BEGAN))
    writer.commit(1)
    assert writer.flush(120.0)
    writer.close(10.0)
    first = made / "000001.parquet"
    for step in range(2, num_steps + 1):
        (made / f"{step:06d}.parquet").hardlink_to(first)
    row = {f"some/metric_{number}": number + 0.123456789 for number in range(num_metrics)}
    row |= {f"some/histogram_{number}": {"edges": list(range(21)), "counts": [1] * 20} for number in range(8)}
    row |= {"all_groups/scores": 1.0, "val/num_total_tokens": 5, "time/total": 3.0}
    rest = json.dumps(row)[1:]
    with open(directory / "metrics.jsonl", "w") as file:
        file.writelines(f'{{"training_step": {step}, {rest}\n' for step in range(1, num_steps + 1))
    prompts = json.dumps(
        [
            {"prompt_id": f"train-{n}", "row": f"{TRAIN} line {n + 1}", "index": n, "fate": "zero_std"}
            for n in range(num_samples // 8)
        ]
    )
    with open(directory / "prompts.jsonl", "w") as file:
        file.writelines(f'{{"training_step": {step}, "prompts": {prompts}}}\n' for step in range(1, num_steps + 1))
    journal = Journal(directory / RECORD)
    journal.start(command=["grpo_fast.py"], title="large", unix=BEGAN)
    for step in range(1, num_steps + 1):
        ended = BEGAN + 3.0 * step
        journal.event("sync", began=ended - 0.1, seconds=0.1, version=step, unix=ended)
        journal.event("step", step=step, seconds=3.0, waited_s=1.0, trained_s=1.9, sync_s=0.1, unix=ended)


@cache
def shared_record() -> MadeRecord:
    """The run of `make_record`, for tests that only read it."""
    directory = Path(tempfile.mkdtemp(prefix="made-record-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return make_record(directory / "out")


def copy_of(made: MadeRecord, directory: Path) -> Path:
    """A copy to change."""
    return Path(shutil.copytree(made.directory, directory))
