"""Writes what a training step trains on as text for people (`--save_traces`), and marks who wrote each token.

    ──── train-17, sample 3, row 12 (math): reward 1, advantage 0.61, stop
    prompt      │ <|user|>12 + 34 = ?<|end|><|assistant|>
    trained v4  │ <calculator>12 + 34</calculator>
    given       │ <output>
                │ 46
                │ </output>
    trained v5  │ <answer>46</answer><|end|>

`trained v4` marks tokens that weights of version 4 sampled, `too old v1` tokens that version 1 sampled and that are left out of
the loss, and `given` tokens that a tool, an environment or the chat template wrote.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from open_instruct.data_types import Sample, TrainingSample
from open_instruct.storage.atomic_file import write_atomically

Decode = Callable[[list[int]], str]
WIDTH = 12


def transcript(sample: Sample, trained: TrainingSample, decode: Decode) -> str:
    """One sample as text: a block for the prompt and for every stretch of tokens with the same writer, version and mask.

    A character whose bytes are divided between two stretches is shown as U+FFFD in both.
    """
    blocks = [_block("prompt", decode(sample.prompt_ids.tolist()))]
    blocks += [_block(label, decode(ids.tolist())) for label, ids in stretches(sample, trained.mask)]
    return "\n".join(blocks)


def stretches(sample: Sample, mask: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """The response in stretches: a label, and (S,) token ids.

    Args:
        mask: (R,) bool, True on tokens that are trained on.
    """
    num_tokens = len(sample.response_ids)
    sampled = np.ones(num_tokens, bool) if sample.loss_mask is None else sample.loss_mask
    versions = np.repeat(*np.array(sample.version_spans or [(0, 0)], dtype=np.int64).T)
    labels = [
        "given" if not sampled[at] else f"{'trained' if mask[at] else 'too old'} v{versions[at]}"
        for at in range(num_tokens)
    ]
    begins = 0
    for at in range(1, num_tokens + 1):
        if at == num_tokens or labels[at] != labels[begins]:
            yield labels[begins], sample.response_ids[begins:at]
            begins = at


def _block(label: str, text: str) -> str:
    first, *others = text.split("\n")
    lines = [f"{label:<{WIDTH}}│ {first}", *(f"{'':<{WIDTH}}│ {line}" for line in others)]
    return "\n".join(line.rstrip() for line in lines)


def write_transcripts(path: Path, entries: Sequence[tuple[str, str]]) -> None:
    """Write a step's transcripts, each with a headline, to a file that a resumed run writes again."""
    text = "\n\n".join(f"──── {headline}\n{text}" for headline, text in entries)
    write_atomically(path, f"{text}\n".encode(errors="replace"))
