"""Whether thoughts are open where the answer of a sample begins, which its tokens show and its row does not.

prompt       | policy                                  | tool              | policy
… <think>    | I look up.</think> <search>x</search>   | <output>…</output> | So <answer>42</answer>
  open         closed                                    closed               ◄── a verifier reads this
"""

import numpy as np

from open_instruct.chat_codec import END_THINK, THINK, ChatCodec
from open_instruct.data_types import Sample

LONGEST_ENDING = 32
"""Tokens at the end of a prompt that certainly hold a last `<think>` and the space behind it."""


def prompt_before_answer(prompt: str, sample: Sample, codec: ChatCodec) -> str:
    """The prompt of a row, which ends with `<think>` exactly if thoughts are open where the sample's answer begins."""
    is_open = thoughts_are_open(sample, codec)
    if is_open == prompt.rstrip().endswith(THINK):
        return prompt
    return f"{prompt}{THINK}" if is_open else prompt.rstrip().removesuffix(THINK)


def thoughts_are_open(sample: Sample, codec: ChatCodec) -> bool:
    """Whether the model is still thinking in front of its answer. The prompt, or a template between two turns, begins thoughts
    with its last word; the model begins them with the first word of what it says. A turn that ends, ends its thoughts."""
    is_open = _text(sample.prompt_ids[-LONGEST_ENDING:], codec).endswith(THINK)
    start = sample.answer_start
    ids = sample.response_ids[:start]
    is_own = np.ones(start, bool) if sample.loss_mask is None else sample.loss_mask[:start].astype(bool)
    begins = [0, *(np.flatnonzero(np.diff(is_own)) + 1).tolist()] if start else []
    for begin, end in zip(begins, [*begins, start][1:], strict=True):
        text = _text(ids[begin:end], codec)
        ends_turn = any(codec.control_token(token_id) for token_id in ids[begin:end].tolist())
        if is_own[begin]:
            _, closing, rest = text.rpartition(END_THINK)
            is_open = not ends_turn and ((is_open and not closing) or rest.lstrip().startswith(THINK))
        else:
            is_open = text.endswith(THINK) or (is_open and not ends_turn)
    return is_open


def _text(ids: np.ndarray, codec: ChatCodec) -> str:
    return codec.decode(ids.tolist()).rstrip()
