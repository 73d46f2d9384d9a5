"""Responses to one prompt in one row, so that learners compute the prompt once (`--share_prompts`).

    prompt  response 0  response 1  response 2        positions:  0 1 2 | 3 4 5 | 3 4 | 3 4 5 6
                                                      branches:   0 0 0 | 1 1 1 | 2 2 | 3 3 3 3

Each response attends to the prompt and to itself, and goes on with the positions of the prompt. That is what the model computes
for the sequences one by one, but for rounding.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

import numpy as np

from open_instruct.data_types import TrainingSample

MOST_PAIRS = 2**26
"""Most pairs of tokens that the responses of a row may look at where attention has a mask of that size, 256 MiB in float32."""


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
        """Tokens of the prompt, then of each response."""
        return [len(self.query), *(len(sample.response) for sample in self.samples)]

    def positions(self) -> np.ndarray:
        """(tokens,) int32: positions in the sequence of each response."""
        start = len(self.query)
        parts = [np.arange(start), *(np.arange(start, start + length) for length in self.lengths[1:])]
        return np.concatenate(parts).astype(np.int32)

    def branches(self) -> np.ndarray:
        """(tokens,) int32: 0 on the prompt, the number of the response from 1 on the responses."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths).astype(np.int32)

    def predictors(self) -> np.ndarray:
        """(tokens,) int32: the token before each token in its sequence. For the first token of a response it is the last token of
        the prompt. The prompt's first token has none, and gets itself."""
        before = np.arange(-1, len(self) - 1)
        before[np.cumsum(self.lengths)[:-1]] = len(self.query) - 1
        return before.clip(min=0).astype(np.int32)


def share_prompts(
    samples: Sequence[TrainingSample], *, pairs_per_token: float | None, most_tokens: int, has_mask: bool = True
) -> list[Shared]:
    """Divide the samples into rows' worth of responses that share a prompt, as it costs least; in the given order.

    With a prompt of 500 tokens and 8 responses of 50, all share one: 900 tokens in place of 4400. With a prompt of 5 tokens and
    responses of 1000, none do: attention looks at 1000 * 1005 pairs of tokens for each response, because with a mask it cannot
    skip what is later, in place of 1005 * 1005 / 2. Without a mask (flash attention) it skips that, and all share.

    Args:
        pairs_per_token: what a token costs apart from attention, in pairs of tokens that attention looks at; None shares nothing.
        most_tokens: of a row.
        has_mask: whether attention has a mask of the tokens of a row where they share a prompt.
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
    """Of the responses before each."""
    own = 1 if has_mask else 0.5  # of the pairs within a response, half are with later tokens
    num_pairs = [0.0, *accumulate(length * (num_query + own * length) for length in lengths)]
    """Of a token of these responses with one of the prompt or of the same response."""

    def cost(start: int, end: int) -> float:
        """Of a row with the samples from `start` to `end`, in pairs; infinite where they may not share a row."""
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
    """The first sample of each run and the first after it."""
    return list(pairwise(num_samples * i // number for i in range(number + 1)))
