"""Puts the responses to one prompt into one row, so that learners compute the prompt once (`--share_prompts`).

    prompt  response 0  response 1  response 2        positions:  0 1 2 | 3 4 5 | 3 4 | 3 4 5 6
                                                      branches:   0 0 0 | 1 1 1 | 2 2 | 3 3 3 3

Each response attends to the prompt and to itself, and its positions continue those of the prompt. Up to rounding, the model
computes the same values as for the sequences one by one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

import numpy as np

from open_instruct.data_types import TrainingSample

MOST_PAIRS = 2**26
"""Most pairs of tokens that the responses of a row may attend to if attention has a mask: a mask of 256 MiB in float32."""


@dataclass(frozen=True)
class Shared:
    """Responses that share a prompt, or a single sample."""

    samples: Sequence[TrainingSample]
    """At least one; all with the same query."""

    @property
    def query(self) -> np.ndarray:
        return self.samples[0].query

    def __len__(self) -> int:
        return len(self.query) + sum(len(sample.response) for sample in self.samples)

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of the prompt, then of each response."""
        return [len(self.query), *(len(sample.response) for sample in self.samples)]

    def positions(self) -> np.ndarray:
        """(tokens,) int32: the position of each token in its own sequence, prompt and response."""
        start = len(self.query)
        parts = [np.arange(start), *(np.arange(start, start + length) for length in self.lengths[1:])]
        return np.concatenate(parts).astype(np.int32)

    def branches(self) -> np.ndarray:
        """(tokens,) int32: 0 on the prompt, 1, 2, … on the first response, the second, and so on."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths).astype(np.int32)

    def predictors(self) -> np.ndarray:
        """(tokens,) int32: index of the token before each token in its sequence. For the first token of a response it is the last
        token of the prompt. The prompt's first token has no predecessor and gets its own index."""
        before = np.arange(-1, len(self) - 1)
        before[np.cumsum(self.lengths)[:-1]] = len(self.query) - 1
        return before.clip(min=0).astype(np.int32)


def share_prompts(
    samples: Sequence[TrainingSample], *, pairs_per_token: float | None, most_tokens: int, has_mask: bool = True
) -> list[Shared]:
    """Divide the samples, in the given order, into rows of responses that share a prompt, at the lowest cost.

    With a prompt of 500 tokens and 8 responses of 50 tokens, all responses share the prompt: 900 tokens instead of 4400. With a
    prompt of 5 tokens and responses of 1000, no responses share it: attention with a mask cannot skip later tokens, so it
    computes 1000 * 1005 pairs of tokens for each response instead of 1005 * 1005 / 2. Attention without a mask (flash attention)
    skips later tokens, so all responses share.

    Args:
        pairs_per_token: cost of a token apart from attention, in pairs of tokens that attention computes; None shares nothing.
        most_tokens: most tokens of a shared row.
        has_mask: whether attention needs a mask over the tokens of a row in which responses share a prompt.
    """
    if pairs_per_token is None:
        return [Shared([sample]) for sample in samples]
    divided = []
    for _, neighbours in groupby(samples, key=lambda sample: sample.query.tobytes()):
        divided += _divide(list(neighbours), pairs_per_token, most_tokens, has_mask=has_mask)
    return divided


def _divide(samples: list[TrainingSample], pairs_per_token: float, most_tokens: int, *, has_mask: bool) -> list[Shared]:
    """The cheapest division of samples with one query into runs of about the same number of samples."""
    num_query = len(samples[0].query)
    lengths = [len(sample.response) for sample in samples]
    num_tokens = [0, *accumulate(lengths)]
    """Number of tokens of the responses before each response."""
    share = 1 if has_mask else 0.5  # half of the pairs within a response are pairs with a later token
    num_pairs = [0.0, *accumulate(length * (num_query + share * length) for length in lengths)]
    """Number of pairs of a token of these responses with a token of the prompt or of the same response."""

    def cost(start: int, end: int) -> float:
        """Cost of a row with the samples from `start` to `end`, in pairs; infinite if they may not share a row."""
        tokens, pairs = num_query + num_tokens[end] - num_tokens[start], num_pairs[end] - num_pairs[start]
        if end - start == 1:
            return tokens * pairs_per_token + tokens**2 / 2
        if tokens > most_tokens or (has_mask and pairs > MOST_PAIRS):
            return math.inf
        return tokens * pairs_per_token + num_query**2 / 2 + pairs

    one_each = len(samples)
    divisions = [_runs(len(samples), number) for number in (one_each, *range(1, one_each))]
    cheapest = min(divisions, key=lambda runs: sum(cost(*run) for run in runs))
    return [Shared(samples[start:end]) for start, end in cheapest]


def _runs(num_samples: int, number: int) -> list[tuple[int, int]]:
    """For each run, the index of its first sample and of the first sample after it."""
    return list(pairwise(num_samples * i // number for i in range(number + 1)))
