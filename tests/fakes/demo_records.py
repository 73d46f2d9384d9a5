"""Makes the output directory of a run as large as the demo's, without running it: sums, which the model slowly learns.

160 steps of 32 prompts × 8 responses of about 13 tokens; an evaluation every 20 steps; one engine replaced, one warning.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from made_records import TEST, TRAIN, _Maker, divided, ids, learner_values, numbers_of

from open_instruct.algorithms.advantages import group_advantages
from open_instruct.data_types import GenerationResult, Sample, TokenStatistics
from open_instruct.record.samples import RecordedGroup
from open_instruct.rollouts.training_samples import training_samples
from open_instruct.scored_groups import Reading, ScoredGroup

BEGAN = 1_780_000_000.0
STEP_S = 1.7
REWARD = 10.0
EVALUATION_EVERY = 20


@dataclass(frozen=True)
class Size:
    """How large the run is."""

    num_steps: int = 160
    num_prompts: int = 32
    num_samples: int = 8
    num_items: int = 64


def make_demo(directory: Path, size: Size | None = None, *, seed: int = 1, speed: float = 1.0) -> Path:
    """Write a run that ends well into an empty directory. `speed`: how fast it learns."""
    size = size or Size()
    maker = _DemoMaker(directory, size, seed, speed)
    maker.options()
    maker.start(1, after_step=0)
    for step in range(1, size.num_steps + 1):
        maker.train(step)
    maker.end("done")
    return directory


class _DemoMaker(_Maker):
    """Writes the files in the order in which a run does."""

    def __init__(self, directory: Path, size: Size, seed: int, speed: float) -> None:
        super().__init__(directory, size.num_steps)
        self._size = size
        self._speed = speed
        self._random = np.random.default_rng(seed)
        self._tokens = 0

    def train(self, step: int) -> None:
        """One step, with its metrics and events, and the evaluation after it."""
        assert self._writer is not None
        entries = [self._group(step, prompt) for prompt in range(self._size.num_prompts)]
        for entry in entries:
            self._writer.add(step, entry)
        consumed = [entry.group for entry in entries if entry.outcome == "consumed"]
        samples = training_samples(
            consumed,
            verification_reward=REWARD,
            advantages=partial(group_advantages, name="centered"),
            mask_truncated_completions=False,
        )
        ranks = divided(samples)
        values = [learner_values([samples[number] for number in numbers_of(batches)], step) for batches in ranks]
        self._writer.sent(step, ranks, samples)
        self._writer.commit(step, values)
        assert self._writer.flush(60.0)
        self._log(step, entries)
        if step % EVALUATION_EVERY == 0:
            self._evaluate(step, _end_of(step))

    def _log(self, step: int, entries: list[RecordedGroup]) -> None:
        rewards = np.concatenate([entry.rewards for entry in entries])
        lengths = [len(sample.response_ids) for entry in entries for sample in entry.group.samples]
        left_out = float(np.mean([entry.outcome != "consumed" for entry in entries]))
        self._tokens += sum(lengths)
        noise, ended = self._random.normal(0, 1, 8), _end_of(step)
        self._metrics.write(
            step,
            {
                "all_groups/scores": float(rewards.mean()),
                "all_groups/percent_solved_mean": float((rewards >= REWARD).mean()),
                "all_groups/val/sequence_lengths": float(np.mean(lengths)),
                "all_groups/val/stop_rate": 1.0,
                "batch/filtered_prompts_pct": left_out,
                "policy/entropy_avg": 1.4 * np.exp(-step / 70) + 0.1 + 0.02 * noise[0],
                "loss/total_avg": 0.01 * noise[1],
                "lr": 1e-3 * (1 - step / (2 * self._size.num_steps)),
                "debug/vllm_vs_local_logprob_diff_mean": 0.016 + 0.001 * noise[2],
                "debug/vllm_vs_local_logprob_diff_max": 0.09 + 0.01 * abs(noise[3]),
                "optim/grad_norm": 0.4 + 0.3 * np.exp(-step / 40) + 0.05 * abs(noise[4]),
                "val/num_total_tokens": self._tokens,
                "num_steps_off_policy": float(min(step - 1, 1)) * (0.6 + 0.1 * abs(noise[5])),
                "num_steps_off_policy_max": min(step - 1, 2),
                "engine_restarts": int(step >= 93),
                "time/total": STEP_S + 0.1 * abs(noise[6]),
                "time/trainer_waiting_for_data": 0.4 + 0.1 * abs(noise[7]),
                "time/learners": 1.0,
                "time/weight_sync": 0.15,
                "learner_response_tokens_per_second_step": sum(lengths) / STEP_S,
            },
        )
        parts = {"waited_s": 0.45, "trained_s": 1.0, "sync_s": 0.15}
        self._journal.event("sync", began=ended - 0.2, seconds=0.15, version=step, unix=ended)
        self._journal.event("step", step=step, seconds=STEP_S, unix=ended, **parts)
        self._prompts.write(step, {"prompts": [_prompt(entry) for entry in entries]})
        if step % 40 == 0:
            self._journal.event("checkpoint", step=step, began=ended, seconds=0.3, unix=ended + 0.3)
        if step == 92:
            self._journal.event("warning", level="ERROR", text="engine 1 died and is replaced", unix=ended)

    def _group(self, step: int, prompt: int, set_name: str | None = None) -> RecordedGroup:
        number = prompt if set_name else (step - 1) * self._size.num_prompts + prompt
        terms = np.random.default_rng([int(set_name is not None), number]).integers(2, 60, 2)
        skill = self._speed * step / 55 + self._random.normal(0, 0.4) - terms.sum() / 90
        chance = 1 / (1 + np.exp(-2.5 * skill))
        count = 1 if set_name else self._size.num_samples
        is_right = self._random.random(count) < chance
        age = (
            0
            if set_name or step == 1
            else int(self._random.random() < 0.6) + int(step > 2 and self._random.random() < 0.1)
        )
        samples = [self._sample(terms, bool(right), step - (not set_name), age) for right in is_right]
        return _recorded(samples, is_right, number, step, terms, set_name)

    def _sample(self, terms: np.ndarray, is_right: bool, newest: int, age: int) -> Sample:
        a, b = terms.tolist()
        value = a + b if is_right else a + b + int(self._random.choice([-10, -2, -1, 1, 2, 10]))
        forms = ("The answer is {v}. <answer>{v}</answer><|end|>", "{a} + {b} = {v} <answer>{v}</answer><|end|>")
        response = ids(forms[int(self._random.integers(2))].format(a=a, b=b, v=value))
        logprobs = -self._random.gamma(0.4, 0.5, len(response)).astype(np.float32)
        spans = [(newest - age, len(response) // 2), (newest, len(response) - len(response) // 2)]
        spans = [(newest, len(response))] if not age else spans
        return Sample(
            ids(f"<|user|>What is {a} + {b}?<|end|><|assistant|>"), response, logprobs, "stop", spans, kv_age=age
        )

    def _evaluate(self, version: int, at: float) -> None:
        assert self._writer is not None
        entries = [self._group(version, item, "sums") for item in range(self._size.num_items)]
        self._writer.measured(version, "sums", entries)
        self._journal.event("evaluation", version=version, unix=at + 0.5)
        if version:
            rights = float(np.mean([entry.group.scores for entry in entries]))
            self._metrics.add(version, {"eval/sums/pass_at_1": rights})


def _recorded(
    samples: list[Sample], is_right: np.ndarray, number: int, step: int, terms: np.ndarray, set_name: str | None
) -> RecordedGroup:
    scores = is_right.astype(np.float32)
    began = _end_of(step) - STEP_S + 0.04 * (number % 32)
    statistics = TokenStatistics(12, sum(len(sample.response_ids) for sample in samples), 0.3, began)
    readings = (tuple(Reading(str(terms.sum()) if right else str(terms.sum() + 1)) for right in is_right),)
    name = f"eval-{step}-{number}" if set_name else f"train-{number}"
    result = GenerationResult(
        samples=samples,
        index=number,
        prompt_id=name,
        issue_version=samples[0].version_spans[0][0],
        engine_id=number % 2,
        token_statistics=statistics,
    )
    group = ScoredGroup(result, "math", scores, score_s=0.02, readings=readings)
    outcome = "measured" if set_name else "consumed" if 0 < scores.sum() < len(scores) else "zero_std"
    place = f"{TEST} line {number + 1}" if set_name else f"{TRAIN} line {number % 3000 + 1}"
    rewards = np.asarray(group.rewards(REWARD), dtype=float)
    return RecordedGroup(
        group, rewards, place, set_name or "train", str(terms.sum()), outcome, 0, step, began + 0.4, set_name
    )


def _prompt(entry: RecordedGroup) -> dict[str, object]:
    result = entry.group.result
    return {"prompt_id": result.prompt_id, "row": entry.row, "index": result.index, "fate": entry.outcome}


def _end_of(step: int) -> float:
    return BEGAN + 100.0 + STEP_S * step
