"""A real engine, in this process: which tokens it computes for responses to one prompt, before and after new weights."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from conftest import make_args

from open_instruct.data_types import SamplingConfig
from open_instruct.engines.kv_ages import KvAges
from open_instruct.engines.vllm_engine import VLLMEngine, make_engine, sampling_params
from open_instruct.run.rollout_manager import engine_options

pytestmark = pytest.mark.extended
NUM_RESPONSES = 8
PROMPT = np.arange(5, 75, dtype=np.int32)
"""70 tokens: two whole blocks, and six tokens that are not shared."""
SHARED = 64


class CountingEngine:
    """vLLM's engine, and the number of tokens of each step."""

    def __init__(self) -> None:
        args = make_args()
        options = engine_options(args, args.device, seed=1, max_model_len=256)
        self.engine = VLLMEngine(make_engine(options, 0), timeout_s=60.0)
        self.ages = KvAges("by_version", block_size=32, num_blocks=64)
        self.num_tokens: list[int] = []
        core = self.engine.engine_core.engine_core
        schedule = core.scheduler.schedule

        def counted(*args: Any, **kwargs: Any) -> Any:
            scheduled = schedule(*args, **kwargs)
            self.num_tokens.append(scheduled.total_num_scheduled_tokens)
            return scheduled

        core.scheduler.schedule = counted

    def first_step(self, name: str, version: int) -> int:
        """Tokens of the step that begins `NUM_RESPONSES` responses to the prompt, which the engine then finishes."""
        del self.num_tokens[:]
        prompt = {"prompt_token_ids": PROMPT.tolist(), "cache_salt": self.ages.salt(version, needs_fresh=False)}
        self.engine.add_request(
            name, prompt, sampling_params(SamplingConfig(n=NUM_RESPONSES, max_tokens=2, ignore_eos=True))
        )
        while self.engine.has_unfinished_requests():
            self.engine.step()
        return self.num_tokens[0]


@pytest.fixture(scope="module")
def counting() -> Iterator[CountingEngine]:
    one = CountingEngine()
    yield one
    one.engine.shutdown()


def test_a_prompt_is_computed_once_for_all_its_responses(counting: CountingEngine) -> None:
    own = len(PROMPT) - SHARED
    assert counting.first_step("first", 0) == SHARED + NUM_RESPONSES * own
    assert counting.first_step("again", 0) == NUM_RESPONSES * own


def test_new_weights_use_nothing_that_older_weights_have_computed(counting: CountingEngine) -> None:
    own = len(PROMPT) - SHARED
    counting.first_step("old", 1)
    assert counting.first_step("new", 2) == SHARED + NUM_RESPONSES * own
