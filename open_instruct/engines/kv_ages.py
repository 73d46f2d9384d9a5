"""How old the keys and values were that a response attended to.

A token's key and value are computed once and then used for all later tokens. Where weights change meanwhile, tokens of the new
version attend to keys and values of an old version. The *age* of a response is the version that sampled its newest token minus
the oldest version whose keys and values the response attended to. Example: version 7 continues a prompt whose keys and values
version 4 computed, so the age is 3.

    prefix cache                     keys and values of a response                                     age
    off                              computed when the request began, kept until it ends               newest - first version
    on, emptied with new weights     of running requests too: all computed again                       0
    on, kept (`--vllm_keep_prefix_cache`)    of earlier requests too, whichever version computed them  see `KvAges`
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from open_instruct.data_types import Completion

CacheUse = Literal["off", "emptied", "kept"]


class KvAges:
    """The versions that computed the blocks of one engine's cache. A block is identified by its tokens and all tokens before it,
    as vLLM does.

    Args:
        block_size: tokens of a block.
        num_blocks: blocks that the cache holds. The versions of this many blocks are remembered, those computed last.
    """

    def __init__(self, use: CacheUse, *, block_size: int, num_blocks: int) -> None:
        self._use = use
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._versions: OrderedDict[int, int] = OrderedDict()

    def aged(self, prompt: np.ndarray, num_cached: int | None, completions: Sequence[Completion]) -> list[Completion]:
        """The completions of one request with `Completion.kv_age`.

        Args:
            prompt: (Q,) int32.
            num_cached: tokens of the prompt whose keys and values were in the cache when the request began. For a request with
                several responses vLLM gives the number of the response that ended last; it counts blocks that the first
                response has computed.
        """
        if self._use == "kept":
            oldest = self._oldest_of_prompt(prompt, num_cached or 0)
            return [replace(one, kv_age=self._age_of_kept(prompt, num_cached or 0, oldest, one)) for one in completions]
        return [replace(one, kv_age=_age(one, 0 if self._use == "off" else -1)) for one in completions]

    def forget(self) -> None:
        """Forget all blocks, because the cache was emptied."""
        self._versions.clear()

    def _oldest_of_prompt(self, prompt: np.ndarray, num_cached: int) -> int | None:
        """The oldest version among the cached blocks of a prompt; None if none was cached, or if none is remembered."""
        blocks = self._blocks(prompt)[: num_cached // self._block_size]
        known = [self._versions[block] for block in blocks if block in self._versions]
        return min(known, default=None)

    def _age_of_kept(self, prompt: np.ndarray, num_cached: int, oldest: int | None, one: Completion) -> int | None:
        if not one.version_spans:
            return None
        first = one.version_spans[0][0]
        self._remember(np.concatenate([prompt, one.token_ids]), num_cached, first)
        return one.version_spans[-1][0] - min(first, first if oldest is None else oldest)

    def _remember(self, token_ids: np.ndarray, num_cached: int, version: int) -> None:
        """Note that `version` or a newer version computed the blocks after the cached tokens, and `version` or an older version
        the cached blocks."""
        blocks, num_blocks_cached = self._blocks(token_ids), num_cached // self._block_size
        for block in blocks[:num_blocks_cached]:
            self._versions[block] = min(self._versions.get(block, version), version)
        for block in blocks[num_blocks_cached:]:
            self._versions[block] = version
            self._versions.move_to_end(block)
        while len(self._versions) > self._num_blocks:
            self._versions.popitem(last=False)

    def _blocks(self, token_ids: np.ndarray) -> list[int]:
        """The identity of each full block."""
        identity, blocks = 0, []
        for begin in range(0, len(token_ids) - self._block_size + 1, self._block_size):
            identity = hash((identity, token_ids[begin : begin + self._block_size].tobytes()))
            blocks.append(identity)
        return blocks


def _age(one: Completion, oldest: int) -> int | None:
    """The newest version minus the version of the span at position `oldest`."""
    if not one.version_spans:
        return None
    return one.version_spans[-1][0] - one.version_spans[oldest][0]
