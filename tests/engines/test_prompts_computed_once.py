"""A real engine, in a process of its own: which tokens it computes for responses to one prompt, before and after new weights."""

from collections.abc import Callable, Iterator
from typing import Any

import counting_engine
import pytest
from conftest import TIMEOUT_S, make_args

from open_instruct.run.rollout_manager import engine_options

pytestmark = pytest.mark.extended
NUM_RESPONSES = 8
PROMPT = list(range(5, 75))
"""70 tokens: two whole blocks, and six tokens that are not shared."""
SHARED = 64


@pytest.fixture(scope="module")
def first_step(ray_session: Any) -> Iterator[Callable[[str, int], int]]:
    """`CountingEngine.first_step` of an actor, whose environment variables are its own."""
    args = make_args()
    options = engine_options(args, args.device, seed=1, max_model_len=256)
    ray_session.cloudpickle.register_pickle_by_value(counting_engine)  # workers cannot import it
    actor = ray_session.remote(counting_engine.CountingEngine).options(num_cpus=0).remote(options)

    def tokens(name: str, version: int) -> int:
        return ray_session.get(actor.first_step.remote(name, version, PROMPT, NUM_RESPONSES), timeout=TIMEOUT_S)

    yield tokens
    ray_session.kill(actor)


def test_a_prompt_is_computed_once_for_all_its_responses(first_step: Callable[[str, int], int]) -> None:
    own = len(PROMPT) - SHARED
    assert first_step("first", 0) == SHARED + NUM_RESPONSES * own
    assert first_step("again", 0) == NUM_RESPONSES * own


def test_new_weights_use_nothing_that_older_weights_have_computed(first_step: Callable[[str, int], int]) -> None:
    own = len(PROMPT) - SHARED
    first_step("old", 1)
    assert first_step("new", 2) == SHARED + NUM_RESPONSES * own
