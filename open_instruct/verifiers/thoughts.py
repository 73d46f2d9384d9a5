"""Divides a response into its thoughts and its answer. Every verifier that reads text reads only the answer."""

import re

from open_instruct.chat_codec import END_THINK, THINK

NEVER_ENDS = "the thoughts never end, so there is no answer"
"""Why such a response scores 0."""
_BEGUN = re.compile(rf"(?:\A|\n|[.!?;}}\])$>])[^\S\n]*{re.escape(THINK)}")
"""Thoughts that begin behind something whole; `the tag <think>` and `split("<think>")` only mention them."""


def why_no_answer(answer: str | None, form: str) -> str:
    """Why a verifier read no answer in an `answer_part`: the thoughts never end, or there is no such `form`."""
    return NEVER_ENDS if answer is None else f"no {form}"


def answer_part(response: str, prompt: str | None = None) -> str | None:
    """The text after the last `</think>`, or the whole response if it holds no thoughts.

    None if thoughts were begun and never ended: such a response has no answer. Thoughts begin with the first word of the response
    (or of what follows other thoughts), with the last word of `prompt`, or behind a line, a sentence, a formula or a tag. A
    `<think>` anywhere else is a word like any other.
    """
    _, end, answer = response.rpartition(END_THINK)
    begun_by_prompt = not end and prompt is not None and prompt.rstrip().endswith(THINK)
    return None if begun_by_prompt or _BEGUN.search(answer) else answer
