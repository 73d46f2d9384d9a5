"""How old the keys and values were that a response attended to.

A token's key and value are computed once and then used for all later tokens. Where weights change meanwhile, tokens of the new
version attend to keys and values of an old version. The *age* of a response is the version that sampled its newest token minus
the oldest version whose keys and values the response attended to. Example: version 7 continues a prompt whose keys and values
version 4 computed, so the age is 3.

    use of the cache   keys and values of a response                                                    age
    by_version         computed from its admission on, or before by requests of the same version        newest - version then
    recomputed         with new weights, those of running requests are computed again                   0
    kept               of earlier requests too, whichever version computed them                         see `KvAges`

`--vllm_recompute_kv_cache` and `--vllm_keep_prefix_cache` choose the last two.

vLLM does not say when it computes a prompt: it may let a request wait, and it may compute a long prompt in several steps. Keys
and values therefore count as those of the version at the request's admission. So the age is too high for a request that vLLM let
wait past an update. It is too low at most for a block that `KvAges` forgets too early.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from open_instruct.data_types import Completion

CacheUse = Literal["by_version", "recomputed", "kept"]


class KvAges:
    """The versions that computed the blocks of one engine's cache. A block is identified by its tokens, all tokens before it and
    the salt of its request, as vLLM does.

    Args:
        block_size: tokens of a block.
        num_blocks: blocks that the cache holds. The versions of this many blocks are remembered, those used last. A block of a
            request that runs while this many others are used is forgotten before vLLM drops it; it then counts as new.
    """

    def __init__(self, use: CacheUse, *, block_size: int, num_blocks: int) -> None:
        self._use = use
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._versions: OrderedDict[int, int] = OrderedDict()
        """The version of each block; the block that was used last comes last."""

    @property
    def keeps_old_blocks(self) -> bool:
        """Whether requests may use keys and values that older weights have computed."""
        return self._use == "kept"

    def salt(self, version: int, *, needs_fresh: bool) -> str:
        """The part of the prefix cache that a request admitted at `version` shares. "" is the part that all versions share.

        Args:
            needs_fresh: the request may use nothing that older weights have computed.
        """
        all_share = self._use == "recomputed" or (self.keeps_old_blocks and not needs_fresh)
        return "" if all_share else f"version {version}"

    def note_admitted(self, prompt: np.ndarray, *, version: int, salt: str = "") -> None:
        """Note a request (prompt: (Q,) int32) that the engine takes while it serves `version`. vLLM gives the blocks of the
        prompt to other requests as soon as they are full, long before this request ends."""
        if self.keeps_old_blocks:
            for block in self._blocks(prompt, salt):
                self._note(block, self._versions.get(block, version))
            self._trim()

    def aged(
        self,
        prompt: np.ndarray,
        num_cached: int | None,
        completions: Sequence[Completion],
        *,
        version: int,
        salt: str = "",
    ) -> list[Completion]:
        """The completions of one request with `Completion.kv_age`.

        Args:
            prompt: (Q,) int32.
            num_cached: tokens of the prompt whose keys and values were in the cache when the request began. For a request with
                several responses vLLM gives the number of the response that ended last; it counts blocks that the first
                response has computed.
            version: version at the request's admission.
            salt: the name of the part of the cache that the request shares.
        """
        if self._use == "recomputed":
            return [replace(response, kv_age=0 if response.version_spans else None) for response in completions]
        oldest: int | None = version
        if self.keeps_old_blocks:
            oldest = self._oldest_of_cached(self._blocks(prompt, salt)[: self._num_whole(num_cached or 0)], version)
            for response in completions:
                self._remember(np.concatenate([prompt, response.token_ids]), num_cached or 0, version, salt)
        return [replace(response, kv_age=_age(response, oldest)) for response in completions]

    def forget(self) -> None:
        """Forget all blocks, because the cache was emptied."""
        self._versions.clear()

    def _oldest_of_cached(self, blocks: Sequence[int], version: int) -> int | None:
        """The oldest version among these blocks, which were in the cache, and `version`; None if a block is not remembered."""
        oldest = version
        for block in blocks:
            if block not in self._versions:
                return None
            oldest = min(oldest, self._versions[block])
        return oldest

    def _remember(self, token_ids: np.ndarray, num_cached: int, version: int, salt: str) -> None:
        """Note that `version` or a newer version computed the blocks after the cached tokens, and `version` or an older version
        the cached blocks."""
        blocks, num_whole = self._blocks(token_ids, salt), self._num_whole(num_cached)
        # vLLM drops the end of a sequence first, so the end counts as used before the beginning.
        for block in reversed(blocks[num_whole:]):
            self._note(block, version)
        for block in reversed(blocks[:num_whole]):
            self._note(block, min(self._versions.get(block, version), version))
        self._trim()

    def _note(self, block: int, version: int) -> None:
        self._versions[block] = version
        self._versions.move_to_end(block)

    def _trim(self) -> None:
        while len(self._versions) > self._num_blocks:
            self._versions.popitem(last=False)

    def _num_whole(self, num_tokens: int) -> int:
        return num_tokens // self._block_size

    def _blocks(self, token_ids: np.ndarray, salt: str) -> list[int]:
        """The identity of each full block."""
        identity, blocks = hash(salt), []
        for begin in range(0, len(token_ids) - self._block_size + 1, self._block_size):
            identity = hash((identity, token_ids[begin : begin + self._block_size].tobytes()))
            blocks.append(identity)
        return blocks


def _age(completion: Completion, oldest: int | None) -> int | None:
    """The newest version of a completion minus `oldest`; None if one of the two is not known."""
    return None if oldest is None or not completion.version_spans else completion.version_spans[-1][0] - oldest
