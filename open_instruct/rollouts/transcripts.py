"""Writes the responses of a training step as text for people (`--save_traces`), and marks who wrote each token.

    ──── train-17, sample 3, row 12 (math): reward 1, advantage 0.61, stop
    prompt      │ <|user|>12 + 34 = ?<|end|><|assistant|>
    trained v4  │ <calculator>12 + 34</calculator>
    given       │ <output>
                │ 46
                │ </output>
    trained v5  │ <answer>46</answer><|end|>
    ground truth│ 46
    verifier    │ math: score 1, read 46

`trained v4` marks tokens that weights of version 4 sampled, `too old v1` tokens that version 1 sampled and that are left out of
the loss, and `given` tokens that a tool, an environment or the chat template wrote. In a group that is left out, `sampled v4`
marks the tokens that version 4 sampled.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from open_instruct.data_types import Sample, TrainingSample
from open_instruct.scored_groups import FunctionRewards, Reading, ScoredGroup

Decode = Callable[[list[int]], str]
WIDTH = 12
HEAD = "──── "
"""Beginning of a headline, and of no other line."""


def transcript(
    sample: Sample,
    trained: TrainingSample | None,
    decode: Decode,
    *,
    ground_truth: str = "",
    verdicts: Sequence[str] = (),
) -> str:
    """One sample as text: a block for the prompt, for every stretch of tokens with the same writer, version and mask, for the
    ground truth, if it is given, and for what each verifier says. `trained` is None if the sample is left out.

    A character whose bytes are divided between two stretches is shown as U+FFFD in both.
    """
    mask = None if trained is None else trained.mask
    blocks = [block("prompt", decode(sample.prompt_ids.tolist()))]
    blocks += [block(label, decode(ids.tolist())) for label, ids in stretches(sample, mask)]
    blocks += [block("ground truth", ground_truth)] if ground_truth else []
    blocks += [block("verifier", verdict) for verdict in verdicts]
    return "\n".join(blocks)


def stretches(sample: Sample, mask: np.ndarray | None) -> Iterator[tuple[str, np.ndarray]]:
    """The response in stretches: a label, and (S,) token ids.

    Args:
        mask: (R,) bool, True on tokens that are trained on; None if the sample is left out.
    """
    num_tokens = len(sample.response_ids)
    sampled = np.ones(num_tokens, bool) if sample.loss_mask is None else sample.loss_mask
    versions = np.repeat(*np.array(sample.version_spans or [(0, 0)], dtype=np.int64).T)
    uses = ["sampled"] * num_tokens if mask is None else ["trained" if is_trained else "too old" for is_trained in mask]
    labels = [f"{uses[at]} v{versions[at]}" if sampled[at] else "given" for at in range(num_tokens)]
    begins = 0
    for at in range(1, num_tokens + 1):
        if at == num_tokens or labels[at] != labels[begins]:
            yield labels[begins], sample.response_ids[begins:at]
            begins = at


def verdicts(group: ScoredGroup, position: int) -> list[str]:
    """What each verifier and each reward function says of a sample: `gsm8k: score 0, read 45`, `short: reward -0.6`. Empty for a
    sample that none sees. After a resume only the score of a verifier is known."""
    if not group.samples[position].is_judged:
        return []
    parts = group.by_verifier
    readings = [own[position] for own in group.readings] or [Reading()] * len(parts)
    texts = [_verdict(part.name, part.scores[position], own) for part, own in zip(parts, readings, strict=False)]
    return texts + [_of_function(function, position) for function in group.functions]


def _of_function(function: FunctionRewards, position: int) -> str:
    reward = function.rewards[position]
    logged = [f"{column} {values[position]}" for column, values in function.extra.items()]
    parts = ["not scored" if np.isnan(reward) else f"reward {reward:.4g}", *logged]
    return f"{function.name}: {', '.join(parts)}"


def _verdict(name: str, score: float, reading: Reading) -> str:
    parts = [f"{name}: score {score:.4g}"]
    if reading.answer is not None:
        parts.append(f"read {reading.answer}" if reading.answer else "read no answer")
    return ", ".join(parts) + (f" ({reading.reasoning})" if reading.reasoning else "")


def block(label: str, text: str) -> str:
    """A label and the lines of a text beside it."""
    first, *rest = text.split("\n")
    lines = [f"{label:<{WIDTH}}│ {first}", *(f"{'':<{WIDTH}}│ {line}" for line in rest)]
    return "\n".join(line.rstrip() for line in lines)


def write_transcripts(path: Path, entries: Sequence[tuple[str, str]], *, begins_anew: bool = True) -> None:
    """Append transcripts, each with a headline, to the file of a step, or begin the file with them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "\n".join(f"{HEAD}{headline}\n{text}\n" for headline, text in entries)
    with open(path, "wb" if begins_anew else "ab", buffering=0) as file:
        file.write(("" if begins_anew else "\n").encode() + text.encode(errors="replace"))
