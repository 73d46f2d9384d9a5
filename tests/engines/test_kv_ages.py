"""How old keys and values are. Blocks have four tokens."""

import numpy as np
import pytest

from open_instruct.data_types import Completion
from open_instruct.engines.kv_ages import CacheUse, KvAges


def completion(*spans: tuple[int, int], token: int = 9) -> Completion:
    number = sum(length for _, length in spans)
    return Completion(np.full(number, token, np.int32), np.zeros(number, np.float32), "stop", list(spans))


def ids(number: int, token: int = 1) -> np.ndarray:
    return np.full(number, token, np.int32)


def ages(use: CacheUse, num_blocks: int = 100) -> KvAges:
    return KvAges(use, block_size=4, num_blocks=num_blocks)


def age(
    account: KvAges,
    prompt: np.ndarray,
    num_cached: int,
    *spans: tuple[int, int],
    admitted: int | None = None,
    salt: str = "",
) -> int | None:
    """The age of a response to a prompt that was admitted at version `admitted`, by default that of the first token."""
    version = spans[0][0] if admitted is None and spans else admitted or 0
    account.note_admitted(prompt, version=version, salt=salt)
    (aged,) = account.aged(prompt, num_cached, [completion(*spans)], version=version, salt=salt)
    return aged.kv_age


def test_within_a_version_the_age_is_what_happened_during_the_request() -> None:
    assert age(ages("by_version"), ids(8), 0, (3, 5)) == 0
    assert age(ages("by_version"), ids(8), 0, (3, 5), (4, 1), (6, 2)) == 3


def test_with_a_recomputed_cache_nothing_is_older_than_the_newest_token() -> None:
    assert age(ages("recomputed"), ids(8), 4, (3, 5), (6, 2)) == 0


def test_a_kept_cache_is_as_old_as_its_oldest_block() -> None:
    account = ages("kept")
    assert age(account, ids(8), 0, (2, 4)) == 0  # computes two blocks of the prompt and one of the response
    conversation = np.concatenate([ids(8), ids(4, token=9), ids(4, token=5)])
    assert age(account, conversation[:12], 12, (4, 4)) == 2
    assert age(account, conversation, 12, (5, 4)) == 3
    longer = np.concatenate([conversation, ids(4, token=9)])
    assert age(account, longer, 0, (6, 1)) == 0  # nothing was in the cache, so all of it is computed anew …
    assert age(account, longer, 20, (7, 1)) == 1  # … and is younger from then on


def test_a_kept_block_is_known_by_all_tokens_before_it() -> None:
    account = ages("kept")
    age(account, np.concatenate([ids(4, token=1), ids(4, token=2)]), 0, (1, 1))
    age(account, np.concatenate([ids(4, token=3), ids(4, token=2)]), 0, (5, 1))
    assert age(account, np.concatenate([ids(4, token=3), ids(4, token=2)]), 8, (6, 1)) == 1


def test_blocks_that_the_responses_to_one_prompt_share_are_remembered() -> None:
    """Of 8 responses the last one finds the prompt in the cache, because the first one has computed it."""
    account = ages("kept")
    account.note_admitted(ids(8), version=2)
    [*aged] = account.aged(ids(8), 8, [completion((2, 1))] * 8, version=2)
    assert [one.kv_age for one in aged] == [0] * 8
    assert age(account, ids(12), 8, (9, 1)) == 7


def test_a_cached_block_is_no_younger_than_any_request_that_found_it() -> None:
    account = ages("kept")
    account.aged(ids(8), 8, [completion((5, 1))], version=5)  # who has computed it is still under way, since version 3
    account.aged(ids(8), 8, [completion((3, 9))], version=3)
    assert age(account, ids(8), 8, (6, 1)) == 3


def test_only_the_blocks_that_the_cache_can_hold_are_remembered() -> None:
    account = ages("kept", num_blocks=2)
    age(account, ids(8, token=1), 0, (1, 1))
    age(account, ids(8, token=2), 0, (2, 1))
    assert len(account._versions) == 2
    assert age(account, ids(8, token=2), 8, (5, 1)) == 3


def test_blocks_of_a_request_that_still_runs_have_their_age() -> None:
    """vLLM shares a block as soon as it is full. One request has run since version 4 when another begins at version 6."""
    account = ages("kept")
    account.note_admitted(ids(8), version=4)
    assert age(account, ids(8), 8, (6, 1)) == 2
    account.aged(ids(8), 0, [completion((4, 1), (7, 1))], version=4)
    assert age(account, ids(8), 8, (7, 1)) == 3


@pytest.mark.parametrize("use", ["off", "kept"])
def test_a_prompt_that_is_computed_on_both_sides_of_an_update_is_as_old_as_its_beginning(use: CacheUse) -> None:
    assert age(ages(use), ids(8), 0, (5, 4), admitted=4) == 1


def test_requests_with_a_salt_share_blocks_among_themselves_alone() -> None:
    account = ages("kept")
    age(account, ids(8), 0, (2, 1))
    assert age(account, ids(8), 0, (5, 1), salt="version 5") == 0
    assert age(account, ids(8), 8, (6, 1), salt="version 5") == 1
    assert age(account, ids(8), 8, (6, 1)) == 4


def test_a_block_that_is_used_again_and_again_is_not_forgotten() -> None:
    """A system prompt is never the oldest of vLLM's blocks, however many other blocks come and go."""
    account, system = ages("kept", num_blocks=4), ids(4)
    age(account, system, 0, (1, 1))
    for version in range(2, 9):
        assert age(account, np.concatenate([system, ids(8, token=100 + version)]), 4, (version, 1)) == version - 1


def test_the_age_of_a_cached_block_that_was_forgotten_is_not_known() -> None:
    account = ages("kept", num_blocks=2)
    account.note_admitted(ids(8), version=1)
    age(account, ids(8, token=2), 0, (2, 1))
    (aged,) = account.aged(ids(8), 8, [completion((3, 1))], version=1)
    assert aged.kv_age is None


@pytest.mark.parametrize("use", ["by_version", "recomputed", "kept"])
def test_the_age_of_nothing_is_not_known(use: CacheUse) -> None:
    assert age(ages(use), ids(8), 0) is None
