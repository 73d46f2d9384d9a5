"""Prefixes that old weights have computed are served to requests that come after an update."""

from collections.abc import Callable

import pytest
from exhibit import Exhibit

from open_instruct.engines.kv_ages import KvAges

EXHIBIT = Exhibit(
    reports=("NVIDIA-NeMo/RL #4018", "InternLM/lmdeploy #4917"),
    subject="engines and weights",
    happened="The engine kept its prefix cache when new weights came, so later requests with the same beginning attended "
    "to keys and values of weights that were up to 17 updates old, while the trainer scored all of it with the "
    "newest.",
    here="A request shares cached prefixes only with requests that came under the same version of the weights, unless "
    "`--vllm_keep_prefix_cache` asks for older ones too (`engines/kv_ages.py`).",
)
PREFIX = "system prompt"


class CachingEngine:
    """Remembers which version computed a prefix first."""

    def __init__(self) -> None:
        self.version = 0
        self.cache: dict[tuple[str, str], int] = {}

    def age_of(self, prefix: str, salt: str) -> int:
        """How many versions old the keys and values of a request are."""
        return self.version - self.cache.setdefault((salt, prefix), self.version)


def check(salt_of: Callable[[int], str]) -> None:
    engine = CachingEngine()
    for version in range(17):
        engine.version = version
        assert engine.age_of(PREFIX, salt_of(version)) == 0, version


def theirs(version: int) -> str:
    return ""


def ours(version: int) -> str:
    return KvAges("by_version", block_size=4, num_blocks=8).salt(version, needs_fresh=False)


def test_cache_that_outlives_an_update_is_caught() -> None:
    with pytest.raises(AssertionError):
        check(theirs)


def test_a_version_has_a_cache_of_its_own_here() -> None:
    check(ours)
