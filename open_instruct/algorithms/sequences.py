"""Which tokens of a micro-batch belong to one sequence, and sums over sequences. Rows may be packed."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def number_sequences(position_ids: "torch.Tensor") -> "torch.Tensor":
    """(B, T) int64: the number of each token's sequence, from 0. A sequence begins with each row, and wherever `position_ids`,
    (B, T), do not increase. Positions `[[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]]` give `[[0, 0, 0, 1, 1], [2, 2, 2, 2, 2]]`."""
    begins = position_ids.new_ones(position_ids.shape)
    begins[:, 1:] = position_ids[:, 1:] <= position_ids[:, :-1]
    return (begins.flatten().cumsum(0) - 1).view_as(position_ids)


def sequence_sums(values: "torch.Tensor", sequence_ids: "torch.Tensor") -> "torch.Tensor":
    """(B, T): at each token the sum of `values` over the tokens of its sequence."""
    ids = sequence_ids.flatten()
    sums = values.new_zeros(values.numel()).index_add(0, ids, values.flatten())  # no more sequences than tokens
    return sums[ids].view_as(values)


def sequence_means(values: "torch.Tensor", mask: "torch.Tensor", sequence_ids: "torch.Tensor") -> "torch.Tensor":
    """(B, T): at each token the mean of `values` over the trained tokens (`mask`) of its sequence. `values` must be 0
    elsewhere."""
    counts = sequence_sums(mask.to(values.dtype), sequence_ids)
    return sequence_sums(values, sequence_ids) / counts.clamp(min=1)
