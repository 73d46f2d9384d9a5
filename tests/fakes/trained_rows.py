"""Samples of unequal length in every layout of a batch, and what a model makes of them."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from open_instruct.data_types import CollatedBatchData, TrainingSample
from open_instruct.learners.attention import register
from open_instruct.learners.logprobs import LogProbModel
from open_instruct.rollouts.collation import collate_packed, collate_padded, pack_rows, pad_rows
from open_instruct.rollouts.shared_prompts import Shared

Groups = Sequence[Sequence[TrainingSample]]
Outcome = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""Log-probs of the trained tokens, and gradients by name; float32, on CPU."""
LAYOUTS = "padded", "packed", "padded, shared", "packed, shared"


def make_groups(lengths: Sequence[tuple[int, Sequence[int]]]) -> Groups:
    """For each group the length of its prompt, and those of its responses."""
    rng = np.random.default_rng(0)

    def sample(query: np.ndarray, num_tokens: int) -> TrainingSample:
        response = rng.integers(3, 300, num_tokens).astype(np.int32)
        return TrainingSample(query, response, np.ones(num_tokens, bool), np.zeros(num_tokens, np.float32), 1.0)

    queries = [rng.integers(3, 300, length).astype(np.int32) for length, _ in lengths]
    return [[sample(query, n) for n in responses] for query, (_, responses) in zip(queries, lengths, strict=True)]


def batch_of(groups: Groups, layout: str) -> CollatedBatchData:
    if "shared" in layout:
        return (pack_rows if "packed" in layout else pad_rows)([Shared(group) for group in groups], 0)
    return (collate_packed if "packed" in layout else collate_padded)([one for group in groups for one in group], 0)


def arguments_of(batch: CollatedBatchData, kind: str = "cpu") -> dict[str, Any]:
    """Those of `LogProbModel.forward`."""
    arrays = {name: array for name, array in vars(batch).items() if array is not None}
    given = {name: torch.from_numpy(array.copy()).to(kind) for name, array in arrays.items()}
    return {
        "input_ids": given["query_responses"].long(),
        "position_ids": given["position_ids"].long(),
        "temperature": 0.9,
        "token_mask": given["response_masks"].bool(),
        **{name: given.get(name) for name in ("segments", "branches", "predictors")},
    }


def outcome(
    config: Any, batch: CollatedBatchData, attention: str, *, kind: str = "cpu", dtype: torch.dtype = torch.float32,
    sequence_parallel: Any = None, prepare: Callable[[torch.nn.Module], None] = lambda model: None,
) -> Outcome:  # fmt: skip
    """Of one model and the same tokens, in any layout. Each trained token's log-prob has another factor in the loss.
    `prepare` may change the model first."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    name = attention if sequence_parallel is not None else register(attention)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=name, dtype=torch.float32).eval()
    prepare(model)
    wrapped = LogProbModel(model.to(kind, dtype), sequence_parallel=sequence_parallel)
    arguments = arguments_of(batch, kind)
    logprobs, _, _ = wrapped(**arguments)
    logprobs = logprobs[arguments["token_mask"][:, 1:]]
    (logprobs * torch.linspace(-1, 1, len(logprobs), device=kind)).sum().backward()
    gradients = {name: p.grad.float().cpu() for name, p in wrapped.named_parameters() if p.grad is not None}
    return logprobs.detach().float().cpu(), gradients
