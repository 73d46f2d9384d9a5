"""A learner takes its share of the cores anew while it computes."""

import torch

from open_instruct.learners.cpu_threads import take_share_in_layers
from open_instruct.system.shared_cores import SharedCores


class CountedCores(SharedCores):
    num_calls = 0

    def compute(self) -> None:
        self.num_calls += 1


def test_share_is_taken_before_every_linear_layer_forward_and_backward() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    cores = CountedCores()
    take_share_in_layers(model, cores)
    out = model(torch.ones(3, 4))
    assert cores.num_calls == 2
    out.sum().backward()
    assert cores.num_calls == 4
    with torch.no_grad():
        model(torch.ones(3, 4))
    assert cores.num_calls == 6


def test_gradients_are_those_without_sharing() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    x, weights = torch.linspace(-1, 1, 12).view(3, 4), list(model.parameters())
    alone = torch.autograd.grad(model(x).square().sum(), weights)
    take_share_in_layers(model, SharedCores())
    shared = torch.autograd.grad(model(x).square().sum(), weights)
    assert all(torch.equal(one, other) for one, other in zip(alone, shared, strict=True))
