"""A real engine that keeps its prefix cache (`--vllm_keep_prefix_cache`) while weights change."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import TIMEOUT_S, make_args
from one_learner import Learner
from whole_runs import EVALUATION, Process, command, rows

from open_instruct.data_types import EVAL, TRAIN, GenerationResult, PromptRequest, SamplingConfig
from open_instruct.engines.weight_update_client import UpdateReport

pytestmark = pytest.mark.slow
NUM_PROMPT_TOKENS = 300
CONFIG = SamplingConfig(max_tokens=12, ignore_eos=True, seed=1)
ROUNDING = 1e-4


class KeptCache:
    """An engine on queues, and a learner."""

    def __init__(self, ray: Any) -> None:
        from open_instruct.run import rollout_manager

        self._ray = ray
        args = make_args(vllm_enable_prefix_caching=True, vllm_keep_prefix_cache=True)
        self._queues = rollout_manager.create_queues(args)
        self._engines = rollout_manager.create_rollout_engines(args, None, queues=self._queues, max_model_len=512)
        ray.get([engine.ready.remote() for engine in self._engines], timeout=TIMEOUT_S)
        self._served = [engine.process_queue_continuously.remote() for engine in self._engines]
        self.learner = Learner(ray, self._engines, args)
        assert self.learner.connect(0) == {}

    def send(self) -> UpdateReport:
        return self.learner.send()

    def answer(self, prompt: np.ndarray, marker: str) -> GenerationResult:
        """The engine's answer to a request from the queue."""
        request = PromptRequest(prompt, CONFIG, 0, f"{marker}-{self.learner.version}", self.learner.version, marker)
        self._queues[0].put([request])
        (result,) = self._queues[1].get(timeout=TIMEOUT_S)
        return result

    def close(self) -> None:
        for engine in self._engines:
            self._ray.kill(engine)
        for queue in self._queues:
            queue.shutdown(force=True)


@pytest.fixture
def kept_cache(ray_session: Any) -> Iterator[KeptCache]:
    cluster = KeptCache(ray_session)
    yield cluster
    cluster.close()


def test_evaluations_compute_with_one_version_and_training_shares_older_blocks(kept_cache: KeptCache) -> None:
    """The learner, which computes everything anew, is what a fresh engine would be."""
    prompt = np.random.default_rng(0).integers(5, 370, NUM_PROMPT_TOKENS).astype(np.int32)
    learner = kept_cache.learner
    kept_cache.answer(prompt, TRAIN)
    for version in (1, 2):
        kept_cache.send()
        trained = kept_cache.answer(prompt, TRAIN)
        assert trained.samples[0].kv_age == version
        assert learner.difference_of([prompt], [trained]) > 10 * ROUNDING
        evaluated = kept_cache.answer(prompt, EVAL)
        assert evaluated.samples[0].kv_age == 0
        assert learner.difference_of([prompt], [evaluated]) < ROUNDING
    assert learner.difference(0, [prompt], replace(CONFIG, needs_fresh_cache=True)) < ROUNDING


def test_on_policy_run_with_shared_prefixes_goes_on_and_corrects(tmp_path: Path) -> None:
    """Prompts share a system prompt of several blocks of the cache."""
    system_prompt = tmp_path / "system.txt"
    system_prompt.write_text(" ".join(f"Rule {number}: be brief." for number in range(40)))
    words = command(
        tmp_path / "out",
        async_steps=0,
        system_prompt_override_file=system_prompt,
        max_prompt_token_length=700,
        pack_length=1024,
        dataset_mixer_eval_list=EVALUATION,
        local_eval_every=2,
        vllm_enable_prefix_caching=True,
        vllm_keep_prefix_cache=True,
        filter_zero_std_samples=False,
    )
    code, output = Process(words).wait()
    assert code == 0, output[-3000:]
    steps = [row for row in rows(tmp_path / "out" / "metrics.jsonl") if row["training_step"] > 0]
    assert max(row["kv_age/max"] for row in steps) > 0, json.dumps(steps)
    assert all(row["max_sample_age"] == 0 and "val/rho_weight" in row for row in steps)
