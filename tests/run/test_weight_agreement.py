"""An engine that computes something else than the learners ends the run; engines and learners are played."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import make_args

from open_instruct.cluster.failures import WeightsDiffer
from open_instruct.run.weight_agreement import (
    DIFFERENCE,
    NUM_PROMPTS,
    NUM_TOKENS,
    MismatchWatch,
    WeightAgreement,
    comparison_prompts,
)


class Engine:
    """Samples the same tokens as any other; `error` is what its log-probs are off by, token by token."""

    def __init__(self, error: float = 0.0, *, only_first: bool = False) -> None:
        self.num_asked = 0
        self._error = np.zeros(NUM_TOKENS, dtype=np.float32)
        self._error[: 1 if only_first else None] = error
        self.generate_with_single_engine = SimpleNamespace(remote=self._generate)
        self.weights = {"embed.weight": 4.0, "experts.w2_weight": 3.0, "norm.weight": 2.0}
        self.weight_fingerprints = SimpleNamespace(remote=lambda: dict(self.weights))

    def _generate(self, prompts: list[np.ndarray], config: Any) -> list[Any]:
        self.num_asked += 1
        assert (config.max_tokens, config.ignore_eos) == (NUM_TOKENS, True)
        tokens = np.arange(NUM_TOKENS, dtype=np.int32)
        return [SimpleNamespace(responses=[tokens], logprobs=[learner_logprobs(tokens) + self._error]) for _ in prompts]


def learner_logprobs(tokens: np.ndarray) -> np.ndarray:
    return (-1.0 - tokens / 10).astype(np.float32)


class Play:
    """The parts of a run, with learners that score by a formula."""

    def __init__(self, *, is_exclusive: bool = False, **options: Any) -> None:
        self.events: list[str] = []
        self.sharing = SimpleNamespace(is_exclusive=is_exclusive, weight_update=self._weights_travel)
        self.learners = SimpleNamespace(async_score=self._score)
        self.agreement = WeightAgreement(make_args(**options), self)

    @contextmanager
    def _weights_travel(self) -> Iterator[None]:
        self.events.append("learners awake")
        yield
        self.events.append("engines awake")

    def _score(self, sequences: list[tuple[np.ndarray, np.ndarray]]) -> list[list[np.ndarray]]:
        self.events.append("score")
        return [[learner_logprobs(response) for _, response in sequences]] * 2  # two ranks

    def wait(self, refs: Any, **_: Any) -> Any:
        return refs

    def check(self, *engines: Any, send_again: Callable[[], object] = lambda: None) -> None:
        self.agreement.check(dict(enumerate(engines)), send_again=send_again)


def test_comparison_prompts_are_of_different_small_token_ids() -> None:
    prompts = comparison_prompts()
    assert len({tuple(prompt) for prompt in prompts}) == NUM_PROMPTS
    assert max(prompt.max() for prompt in prompts) < 100


def test_engine_that_agrees_is_compared_once() -> None:
    play, engine, newcomer = Play(), Engine(5e-4), Engine()
    play.check(engine)
    play.check(engine, newcomer)
    assert (engine.num_asked, newcomer.num_asked) == (1, 1)


@pytest.mark.parametrize("only_first", [False, True])
def test_float32_engine_is_refused_when_one_token_differs(only_first: bool) -> None:
    with pytest.raises(WeightsDiffer, match=r"engine 1 does not compute .* differ by 0\.002 at most"):
        Play().check(Engine(), Engine(2e-3, only_first=only_first))


def test_bfloat16_engine_is_judged_by_the_mean() -> None:
    Play(model_dtype="bfloat16").check(Engine(0.9, only_first=True))  # 0.9 / 16 on average
    with pytest.raises(WeightsDiffer, match=r"the mean may be 0\.1"):
        Play(model_dtype="bfloat16").check(Engine(0.2))


def test_limit_can_be_set_and_nan_is_no_agreement() -> None:
    Play(logprob_mismatch_limit=0.5).check(Engine(0.4))
    with pytest.raises(WeightsDiffer, match="nan"):
        Play(logprob_mismatch_limit=0.5).check(Engine(float("nan")))


def test_dead_engine_is_left_to_its_supervisor() -> None:
    play, engine = Play(), Engine()
    play.wait = lambda refs, without_dead=False, **_: [None, *refs[1:]] if without_dead else refs
    play.check(Engine(9.0), engine)
    assert engine.num_asked == 1


def test_colocated_engines_sleep_while_learners_score_and_get_their_weights_again() -> None:
    play = Play(is_exclusive=True)
    play.check(Engine(), send_again=lambda: play.events.append("send"))
    assert play.events == ["learners awake", "score", "send", "engines awake"]


def test_weights_that_came_out_otherwise_are_named_worst_first() -> None:
    play, engine = Play(), Engine(0.1)
    play.agreement.note_loaded({0: engine})
    engine.weights |= {"norm.weight": 2.1, "experts.w2_weight": 9.0}
    with pytest.raises(WeightsDiffer, match=r"most of all experts\.w2_weight, norm\.weight\."):
        play.check(engine)


def test_engine_with_the_right_weights_is_said_to_compute_otherwise() -> None:
    play, engine = Play(), Engine(0.1)
    play.agreement.note_loaded({0: engine})
    with pytest.raises(WeightsDiffer, match="computes otherwise with the same weights"):
        play.check(engine)


def row(difference: float, *, age: int = 0, kv_age: int | None = 0) -> dict[str, float]:
    ages = {"max_sample_age": age} if kv_age is None else {"max_sample_age": age, "kv_age/max": kv_age}
    return {DIFFERENCE + "max": difference, DIFFERENCE + "mean": difference / 10, **ages}


def test_later_step_above_the_limit_ends_the_run() -> None:
    watch = MismatchWatch(make_args())
    watch.check(1, row(9e-4))
    with pytest.raises(WeightsDiffer, match=r"step 2: .*diff_max is 0\.0011.*so the run ends"):
        watch.check(2, row(1.1e-3))


def test_later_step_above_the_limit_is_told_and_the_run_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        MismatchWatch(make_args(logprob_mismatch_action="warn")).check(2, row(0.2))
    assert "step 2" in caplog.text
    assert "The run goes on" in caplog.text


@pytest.mark.parametrize("metrics", [row(0.2, age=1), row(0.2, kv_age=1), row(float("nan")), {"max_sample_age": 0}])
def test_steps_that_say_nothing_of_the_engines_weights_are_passed_over(metrics: dict[str, float]) -> None:
    MismatchWatch(make_args()).check(2, metrics)


def test_step_without_ages_of_its_cache_is_judged_unless_the_cache_is_kept() -> None:
    """A workflow of a user may leave `Sample.kv_age` out."""
    with pytest.raises(WeightsDiffer):
        MismatchWatch(make_args()).check(2, row(0.2, kv_age=None))
    kept = make_args(vllm_enable_prefix_caching=True, vllm_keep_prefix_cache=True)
    MismatchWatch(kept).check(2, row(0.2, kv_age=None))
    with pytest.raises(WeightsDiffer):
        MismatchWatch(kept).check(2, row(0.2))
