"""Prefixes that old weights have computed are served to requests that come after an update."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from exhibit import Exhibit

from open_instruct.engines.weight_receiver import WeightReceiver
from open_instruct.weight_transports import RAY_OBJECT

EXHIBIT = Exhibit(
    reports=("NVIDIA-NeMo/RL #4018", "InternLM/lmdeploy #4917"),
    subject="engines and weights",
    happened="The engine kept its prefix cache when new weights came, so later requests with the same beginning attended "
    "to keys and values of weights that were up to 17 updates old, while the trainer scored all of it with the "
    "newest.",
    here="Each update ends with an empty prefix cache, running requests included, unless `--vllm_keep_prefix_cache` "
    "asks for the old one (`engines/weight_receiver.py`).",
)
PREFIX = "system prompt"


class CachingEngine:
    """Remembers which version computed a prefix first."""

    is_separate_process = False
    has_prefix_cache = True

    def __init__(self) -> None:
        self.version = 0
        self.cache: dict[str, int] = {}

    def collective_rpc(self, method: str, **_: Any) -> None:
        pass

    def pause(self) -> None:
        pass

    resume = pause

    def reset_prefix_cache(self, *, reset_running_requests: bool) -> None:
        assert reset_running_requests
        self.cache.clear()

    def set_weight_version(self, version: int) -> None:
        self.version = version

    def age_of(self, prefix: str) -> int:
        """How many versions old the keys and values of a request are."""
        return self.version - self.cache.setdefault(prefix, self.version)


def check(update: Callable[[CachingEngine, int], None]) -> None:
    engine = CachingEngine()
    for version in range(1, 18):
        assert engine.age_of(PREFIX) == 0, version
        update(engine, version)


def theirs(engine: CachingEngine, version: int) -> None:
    engine.set_weight_version(version)


def ours(engine: CachingEngine, version: int) -> None:
    sleep: Any = SimpleNamespace(resume=lambda _: None, weights_came=lambda: None)
    file = Path("/nonexistent/abort")
    receiver = WeightReceiver(engine, sleep, transport=RAY_OBJECT, version=version - 1, abort_file=file)  # type: ignore[arg-type]
    receiver.begin()
    receiver.receive({})
    receiver.finish(version)


def test_cache_that_outlives_an_update_is_caught() -> None:
    with pytest.raises(AssertionError):
        check(theirs)


def test_cache_is_empty_after_an_update_here() -> None:
    check(ours)
