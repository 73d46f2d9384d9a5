"""Weights that change without being trained, and what an engine then computes beside the learner."""

from types import SimpleNamespace

import numpy as np
import torch

from open_instruct.data_types import GenerationResult


def change(module: torch.nn.Module, *, seed: int) -> None:
    """As if it had been trained."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)


def largest_difference(
    pair: SimpleNamespace, prompts: list[np.ndarray], results: list[GenerationResult], temperature: float
) -> float:
    """Between the engine's log-probs and the learner's, over all sampled tokens."""
    largest = 0.0
    for prompt, result in zip(prompts, results, strict=True):
        for response, logprobs in zip(result.responses, result.logprobs, strict=True):
            ids = torch.from_numpy(np.concatenate([prompt, response])).long()[None]
            with torch.no_grad():
                ours, _, _ = pair.model(ids, torch.arange(ids.shape[1])[None], temperature)
            difference = ours[0, len(prompt) - 1 :].numpy() - logprobs
            largest = max(largest, float(np.abs(difference).max()))
    return largest
