"""Calls of an engine whose core has a process of its own: whatever becomes of the core, the caller is told."""

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from open_instruct.data_types import Completion
from open_instruct.engines.vllm_engine import EngineCoreLost, VLLMEngine


class EngineDeadError(Exception):
    """By the name of vLLM's, which it raises where the core died of an error."""


def engine(**calls: Any) -> VLLMEngine:
    resources = SimpleNamespace(engine_dead=False)
    played = SimpleNamespace(engine_core=SimpleNamespace(resources=resources), resources=resources, **calls)
    return VLLMEngine(played, timeout_s=0.5)


def raises(error: Exception) -> Any:
    def call(*_: Any, **__: Any) -> None:
        raise error

    return call


def test_a_core_that_died_of_an_error_is_lost() -> None:
    with pytest.raises(EngineCoreLost, match="the engine core died; a step was under way") as caught:
        engine(step=raises(EngineDeadError("out of memory"))).step()
    assert isinstance(caught.value.__cause__, EngineDeadError)


def test_other_errors_of_a_call_are_those_of_the_caller() -> None:
    for error in (ValueError("no such method"), TimeoutError("of the call itself")):
        with pytest.raises(type(error), match=str(error)):
            engine(collective_rpc=raises(error)).collective_rpc("method")


def test_a_core_that_was_killed_or_does_not_answer_is_lost() -> None:
    never = threading.Event()
    silent = engine(sleep=lambda **_: never.wait(), step=lambda: never.wait())
    with pytest.raises(EngineCoreLost, match=r"did not answer pause in 0\.5 s"):
        silent.pause()
    killed = engine(step=lambda: never.wait())
    killed._engine.resources.engine_dead = True
    with pytest.raises(EngineCoreLost, match="the process of the engine core died; a step was under way"):
        killed.step()
    never.set()


@pytest.mark.parametrize(("said", "tokens"), [(None, 160), (64, 64)])
def test_tokens_in_the_cache_are_what_vllm_says(said: int | None, tokens: int) -> None:
    """Models that mix windows and full attention need several blocks for a token."""
    cache = SimpleNamespace(num_gpu_blocks=10, block_size=16, kv_cache_size_tokens=said)
    played = engine(vllm_config=SimpleNamespace(cache_config=cache))
    assert played.kv_cache_tokens == tokens


def test_a_cache_that_was_emptied_has_no_old_blocks() -> None:
    """As before each sleep, also where new weights leave the cache as it is."""
    cache = SimpleNamespace(num_gpu_blocks=10, block_size=4, enable_prefix_caching=True)
    played = engine(vllm_config=SimpleNamespace(cache_config=cache), reset_prefix_cache=lambda _: True)
    ages = played.kv_ages("kept")

    def age_of_second(version: int) -> int | None:
        said = Completion(np.array([9], np.int32), np.zeros(1, np.float32), "stop", [(version, 1)])
        ages.note_admitted(np.ones(8, np.int32), version=version)
        return ages.aged(np.ones(8, np.int32), 8, [said, said], version=version)[1].kv_age

    age_of_second(2)
    assert age_of_second(5) == 3
    played.reset_prefix_cache()
    assert age_of_second(6) == 0
