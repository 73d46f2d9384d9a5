"""Checks that engines have the weights that the learners hold: both score the same tokens.

    new engine ── samples a few tokens ──► its log-probs ──┐
                                                           ├── they differ by more than a limit: the run ends
    learners ──── score the same tokens ─► their log-probs ┘

An engine is compared once, after its first weights and before it serves. Later steps compare log-probs that are
computed anyway (`MismatchWatch`). In float32 the largest difference of any token counts. In 16 bits the mean counts, because
rounding changes single unlikely tokens a lot: a token with log-prob -12 may differ by 0.3 while the mean difference is 0.01.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from open_instruct.cluster.failures import WeightsDiffer
from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.data_types import GenerationResult, SamplingConfig

logger = logging.getLogger(__name__)

NUM_PROMPTS = 4
NUM_PROMPT_TOKENS = 16
NUM_TOKENS = 16
"""Number of tokens that are sampled after each prompt."""
FIRST_TOKEN = 3
"""Lowest token id of the prompts. The prompts use the ids 3 to 66, because every vocabulary has these ids."""
DIFFERENCE = "debug/vllm_vs_local_logprob_diff_"
"""Prefix of two metrics of a step, before `max` or `mean`."""


class WeightAgreement:
    """Compares each engine once with the learners. Used by the parameter synchronizer.

    Args:
        components: `rollouts`, `learners`, `sharing` and `wait` of the run.
    """

    def __init__(self, args: GRPOConfig, components: Any) -> None:
        self._args = args
        self._components = components
        self._compared: set[Any] = set()
        self._loaded: dict[Any, dict[str, float] | None] = {}
        """Fingerprints of the engines' parameters right after they were read from disk."""

    def note_loaded(self, engines: Mapping[int, Any]) -> None:
        """Call before engines take version 0. The engines have loaded the same weights from disk, so the update must not change
        any parameter."""
        new = [engine for engine in engines.values() if engine not in self._compared]
        if not self._components.sharing.is_exclusive:  # otherwise the engines sleep, without weights
            self._loaded = dict(zip(new, self._fingerprints(new), strict=True))

    def check(self, engines: Mapping[int, Any], *, send_again: Callable[[], object]) -> None:
        """Compare those of `engines` (by position) that have not been compared yet. Raises `WeightsDiffer`.

        With `--colocate` the engines sleep while the learners score, and `send_again` gives them their weights back.
        """
        new = {number: engine for number, engine in engines.items() if engine not in self._compared}
        samples = {number: sample for number, sample in self._sample(new).items() if sample is not None}
        if not samples:
            return
        with self._components.sharing.weight_update():
            scores = {number: self._score(results) for number, results in samples.items()}
            if self._components.sharing.is_exclusive:
                send_again()
        for number, results in samples.items():
            engine_logprobs = np.concatenate([result.logprobs[0] for result in results])
            self._compare(number, new[number], np.abs(engine_logprobs.astype(np.float64) - scores[number]))
            self._compared.add(new[number])

    def _sample(self, engines: Mapping[int, Any]) -> dict[int, list[GenerationResult] | None]:
        """The answer of each engine to the prompts; None for a dead engine."""
        config = SamplingConfig(
            temperature=self._args.temperature,
            max_tokens=NUM_TOKENS,
            seed=self._args.seed,
            ignore_eos=True,
            needs_fresh_cache=True,
        )
        refs = [engine.generate_with_single_engine.remote(comparison_prompts(), config) for engine in engines.values()]
        answers = self._components.wait(
            refs, subject="a few tokens of each new engine", timeout_s=self._args.init_timeout_s, without_dead=True
        )
        return dict(zip(engines, answers, strict=True))

    def _score(self, results: Sequence[GenerationResult]) -> np.ndarray:
        """(R,) the learners' log-probs of all sampled tokens."""
        sequences = [(prompt, r.responses[0]) for prompt, r in zip(comparison_prompts(), results, strict=True)]
        scores = self._components.wait(
            self._components.learners.async_score(sequences),
            subject="the learners' log-probs of a few tokens",
            timeout_s=self._args.init_timeout_s,
        )
        return np.concatenate(scores[0])

    def _compare(self, number: int, engine: Any, difference_R: np.ndarray) -> None:
        measure, limit = measure_of(self._args), limit_of(self._args)
        largest, mean = float(difference_R.max()), float(difference_R.mean())
        if (largest if measure == "max" else mean) <= limit:  # NaN is no agreement
            message = "engine %d agrees with the learners: log-probs differ by %.1e at most, %.1e on average"
            logger.info(message, number, largest, mean)
            return
        raise WeightsDiffer(
            f"engine {number} does not compute what the learners compute: the log-probs of {len(difference_R)} tokens "
            f"differ by {largest:.3g} at most and {mean:.3g} on average, and the {measure} may be {limit:g} "
            f"(--logprob_mismatch_limit). {self._suspects(engine)} Training would go wrong without a word, so the run ends. "
            "docs/guides/models.md lists families that agree."
        )

    def _suspects(self, engine: Any) -> str:
        """Which parameters the fingerprints show to be wrong, as text for a message."""
        before, [after] = self._loaded.get(engine), self._fingerprints([engine])
        if before is None or after is None:
            return "The engine has other weights than the learners, or computes otherwise with them."
        names = sorted(before, key=lambda name: -_relative_change(before[name], after[name]))
        changed = [name for name in names if before[name] != after[name]]
        if not changed:
            return "All its weights are as it read them from disk, so it computes otherwise with the same weights."
        return f"Weights that it had read from disk already came out otherwise, most of all {', '.join(changed[:4])}."

    def _fingerprints(self, engines: Sequence[Any]) -> list[dict[str, float] | None]:
        return self._components.wait(
            [engine.weight_fingerprints.remote() for engine in engines],
            subject="fingerprints of engines' weights",
            timeout_s=self._args.init_timeout_s,
            without_dead=True,
        )


def _relative_change(before: float, after: float) -> float:
    return abs(after - before) / (abs(before) + 1e-12)


def comparison_prompts() -> list[np.ndarray]:
    """(Q,) int32 each: 3, 4, 5, …, then 19, 20, 21, … and so on. The text of these tokens does not matter."""
    starts = range(FIRST_TOKEN, FIRST_TOKEN + NUM_PROMPTS * NUM_PROMPT_TOKENS, NUM_PROMPT_TOKENS)
    return [np.arange(start, start + NUM_PROMPT_TOKENS, dtype=np.int32) for start in starts]


def measure_of(args: GRPOConfig) -> str:
    return "max" if args.device.dtype == "float32" else "mean"


def limit_of(args: GRPOConfig) -> float:
    if args.logprob_mismatch_limit is not None:
        return args.logprob_mismatch_limit
    return 1e-3 if args.device.dtype == "float32" else 0.1


class MismatchWatch:
    """Logs an error when the log-probs of engines and learners differ in a step, or ends the run (`--logprob_mismatch_action`).

    A step is judged only if the trained version sampled all its tokens (`max_sample_age` 0) and computed all keys and values that
    they attended to (`kv_age/max` 0), because log-probs of older weights differ for a good reason. Keys and values of older
    weights come from a kept prefix cache, or from a prompt that was computed on both sides of an update. With `--vllm_top_p`
    below 1 no step is judged, because the engine's log-probs are then normalised over the tokens that top-p has left.
    """

    def __init__(self, args: GRPOConfig) -> None:
        self._metric = DIFFERENCE + measure_of(args)
        self._limit = limit_of(args)
        self._stops = args.logprob_mismatch_action == "stop"
        self._can_judge = args.vllm_top_p == 1
        self._age_if_not_known = int(args.vllm_keep_prefix_cache)
        """Stands for `kv_age/max` where a user's workflow leaves out the ages of its samples. Only a kept cache makes keys and
        values older than all tokens of a step."""

    def check(self, training_step: int, metrics: Mapping[str, Any]) -> None:
        """Take the metrics of a training step. Raises `WeightsDiffer`."""
        difference = metrics.get(self._metric)
        # NaN is left to `NonfiniteWatch`.
        if (
            difference is None
            or not self._can_judge
            or metrics.get("max_sample_age", 1) > 0
            or metrics.get("kv_age/max", self._age_if_not_known) > 0
            or not difference > self._limit
        ):
            return
        message = (
            f"step {training_step}: {self._metric} is {difference:.3g} on tokens of the version that was trained, and may be "
            f"{self._limit:g} (--logprob_mismatch_limit). The engines have other weights than the learners, or compute otherwise"
        )
        if self._stops:
            raise WeightsDiffer(f"{message}, so the run ends (--logprob_mismatch_action stop)")
        logger.error("%s. The run goes on (--logprob_mismatch_action warn)", message)
