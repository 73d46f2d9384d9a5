"""Adds a LoRA adapter to its weight. A learner does it before it sends its weights. If only the adapters are sent, each engine
does it."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

IN_PEFT_FILES = "base_model.model."
"""peft's prefix of the name of every weight."""


@dataclass(frozen=True)
class BaseOfAdapter:
    """A model as its files have it, to which separately sent adapters are added. It is sent to engines as a dictionary, so that
    it can pass through msgpack."""

    dtypes: dict[str, str]
    """The names of all its weights, and the dtypes in which the learner holds them."""
    scaling: float
    """s in `W + s B A` (`learners/lora.py`)."""

    def merged(
        self, files: Iterable[tuple[str, torch.Tensor]], adapter: Mapping[str, torch.Tensor], device: torch.device | str
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The learner's weights, bit for bit if learner and engine compute on the same kind of processor.

        Args:
            files: names and tensors of the model's files. Tensors that the learner lacks, such as a tied head, are skipped.
            adapter: weights of the adapters by their names in peft's files.
            device: the device on which adapted weights are computed.

        Raises ValueError if `files` lack a weight.
        """
        missing = set(self.dtypes)
        for name, tensor in files:
            if name not in missing:
                continue
            missing.remove(name)
            weight = tensor.to(getattr(torch, self.dtypes[name]))
            a, b = (adapter.get(f"{IN_PEFT_FILES}{name.removesuffix('weight')}lora_{part}.weight") for part in "AB")
            if a is not None and b is not None:
                weight = add_low_rank(weight.to(device), a.to(device), b.to(device), self.scaling)
            yield name, weight
        if missing:
            names = ", ".join(sorted(missing)[:4])
            raise ValueError(
                f"the model's files lack {names}, which the learner has. Save the model anew with `save_pretrained`, so that its "
                "files have the names that Transformers gives them."
            )


@torch.no_grad()
def add_low_rank(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float) -> torch.Tensor:
    """`weight + scaling * b @ a`, computed in float32, returned in the weight's dtype. Shapes: (out, in), (r, in), (out, r)."""
    return torch.addmm(weight.float(), b.float(), a.float(), alpha=scaling).to(weight.dtype)
