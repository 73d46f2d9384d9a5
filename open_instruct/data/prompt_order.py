"""The order in which prompts are issued: every epoch is shuffled separately, from the seed."""

import numpy as np


class PromptOrder:
    """Says which row the n-th issued prompt is. Every epoch goes through all rows in its own shuffled order.

    The order depends only on `seed` and the number of rows, so a resumed run needs only the number of prompts issued so far.
    """

    def __init__(self, num_rows: int, seed: int) -> None:
        if num_rows < 1:
            raise ValueError(f"there is no order of {num_rows} rows")
        self.num_rows = num_rows
        self.seed = seed
        self._permutations: dict[int, np.ndarray] = {}

    def __getitem__(self, issue_number: int) -> tuple[int, int]:
        """`(epoch, row)` of the prompt with this issue number, counted from 0. With 10 rows, issue number 23 is in epoch 2."""
        if issue_number < 0:
            raise IndexError(f"prompts are numbered from 0, got {issue_number}")
        epoch, position = divmod(issue_number, self.num_rows)
        return epoch, int(self._permutation(epoch)[position])

    def _permutation(self, epoch: int) -> np.ndarray:
        if epoch not in self._permutations:
            # Two permutations are kept, because right after an epoch has begun, prompts of the last epoch may be issued again.
            for old in sorted(self._permutations)[:-1]:
                del self._permutations[old]
            self._permutations[epoch] = np.random.default_rng([self.seed, epoch]).permutation(self.num_rows)
        return self._permutations[epoch]


def prompt_index(issue_number: int, num_rows: int, seed: int) -> int:
    """The row of one issued prompt. Each call shuffles a whole epoch, whereas `PromptOrder` keeps the shuffled epoch."""
    return PromptOrder(num_rows, seed)[issue_number][1]
