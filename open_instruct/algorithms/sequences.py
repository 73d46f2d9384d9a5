"""Which tokens of a micro-batch belong to one sequence, and sums over sequences. Rows may be packed."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def number_sequences(position_ids: "torch.Tensor") -> "torch.Tensor":
    """(B, T) int64: tokens of one sequence have one number, from 0. A sequence begins with each row, and wherever `position_ids`,
    (B, T), do not increase. For positions `[[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]]` it is `[[0, 0, 0, 1, 1], [2, 2, 2, 2, 2]]`."""
    begins = position_ids.new_ones(position_ids.shape)
    begins[:, 1:] = position_ids[:, 1:] <= position_ids[:, :-1]
    return (begins.flatten().cumsum(0) - 1).view_as(position_ids)


def sequence_means(values: "torch.Tensor", mask: "torch.Tensor", sequence_ids: "torch.Tensor") -> "torch.Tensor":
    """(B, T): at each token the mean of `values` over the trained tokens (`mask`) of its sequence. `values` must be 0
    elsewhere."""
    ids = sequence_ids.flatten()
    sums = values.new_zeros(values.numel())  # there are no more sequences than tokens
    counts = values.new_zeros(values.numel())
    sums = sums.index_add(0, ids, values.flatten())
    counts.index_add_(0, ids, mask.flatten().to(values.dtype))
    return (sums / counts.clamp(min=1))[ids].view_as(values)
