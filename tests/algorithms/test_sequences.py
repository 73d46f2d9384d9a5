"""Which tokens belong to one sequence."""

import torch

from open_instruct.algorithms.sequences import number_sequences, sequence_means

POSITIONS = torch.tensor([[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]])


def test_sequences_are_numbered_over_all_rows() -> None:
    assert number_sequences(POSITIONS).tolist() == [[0, 0, 0, 1, 1], [2, 2, 2, 2, 2]]
    assert number_sequences(torch.zeros(1, 3, dtype=torch.long)).tolist() == [[0, 1, 2]]


def test_means_are_over_the_trained_tokens_of_each_sequence() -> None:
    values = torch.tensor(
        [[1.0, 0.0, 3.0, 0.0, 0.0], [1.0, 2.0, 3.0, 4.0, 5.0]], dtype=torch.float64, requires_grad=True
    )
    mask = torch.tensor([[True, False, True, False, False], [True] * 5])
    means = sequence_means(values, mask, number_sequences(POSITIONS))
    assert means.tolist() == [[2.0, 2.0, 2.0, 0.0, 0.0], [3.0] * 5]
    means[0, 0].backward()
    assert values.grad is not None
    assert values.grad.tolist() == [[0.5, 0.5, 0.5, 0.0, 0.0], [0.0] * 5]
