"""From texts to prompts and back: templates with named fields, think tags, and the chat template as token ids."""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

THINK, END_THINK = "<think>", "</think>"
REASONING_FIELDS = ("problem", "curr_summary")
SUMMARIZATION_FIELDS = ("problem", "existing_summary", "reasoning")
OMISSION = "\n[…]\n"
"""Stands where the middle of a text was left out."""

FILE_PREFIX = "file:"
"""A template that begins so is the path of a file that holds it."""
REASONING_TEMPLATE = """Solve this problem step by step.

Problem: {problem}

Previous work: {curr_summary}

Continue your reasoning:
"""
SUMMARIZATION_TEMPLATE = """Summarize the solution progress.

Problem: {problem}

Previous summary: {existing_summary}

New reasoning: {reasoning}

Provide a concise updated summary:
"""

ReasoningPart = Literal["thoughts", "answer", "both"]

_BRACES = re.compile(r"\{\{(?P<literal>\w*)\}\}|(?P<command>\\[A-Za-z]+)?\{(?P<name>[A-Za-z_]\w*)\}")


# --- templates --------------------------------------------------------------------------------------------------------


def fill_template(template: str, values: Mapping[str, str]) -> str:
    """`template` with each `{name}` of `values` replaced, in one pass: braces in a value mean nothing.

    `{{name}}` stands for `{name}`; all other braces, and those right after a LaTeX command, stand for themselves.
    """

    def replace(match: re.Match[str]) -> str:
        if match["literal"] is not None:
            return "{" + match["literal"] + "}"
        is_field = match["command"] is None and match["name"] in values
        return values[match["name"]] if is_field else match[0]

    return _BRACES.sub(replace, template)


def read_template(template: str) -> str:
    """The template itself, or what the file holds that it names. Raises `OSError` or `UnicodeDecodeError`."""
    if not template.startswith(FILE_PREFIX):
        return template
    return Path(template.removeprefix(FILE_PREFIX).strip()).read_text()


def required_of_summaries(style: str) -> tuple[str, ...]:
    """Fields that a summarization template needs: a summary that takes the place of the one before has to see it."""
    return ("reasoning",) if style == "append" else ("existing_summary", "reasoning")


def template_mistakes(template: str, *, known: Collection[str], required: Collection[str]) -> list[str]:
    """What is wrong with a template; empty if nothing is."""
    found = {match["name"] for match in _BRACES.finditer(template) if match["name"] and not match["command"]}
    unknown = sorted(found - set(known))
    listing = ", ".join(f"{{{name}}}" for name in known)
    mistakes = [
        f"{{{name}}} is no field. There are {listing}; write {{{{{name}}}}} where braces are meant." for name in unknown
    ]
    return mistakes + [
        f"it lacks {{{name}}}. Write it where that text shall stand." for name in required if name not in found
    ]


# --- think tags -------------------------------------------------------------------------------------------------------


def thoughts_of(raw: str) -> str:
    """What was thought: the text up to the first closing tag; all of it where no tag closes."""
    return _without_tags(raw.partition(END_THINK)[0])


def answer_of(raw: str) -> str:
    """What is said after the last thought; empty inside a thought that was never closed."""
    if THINK not in raw and END_THINK not in raw:
        return raw
    spoken = raw.rpartition(END_THINK)[2]
    return _without_tags(spoken.partition(THINK)[0])


def reasoning_for_summary(raw: str, part: ReasoningPart) -> str:
    """The part of a reasoning turn that its summary is made from, without think tags."""
    if part == "thoughts":
        return thoughts_of(raw)
    if part == "answer":
        return answer_of(raw).strip()
    if END_THINK not in raw:
        return _without_tags(raw)
    return f"Thoughts:\n{thoughts_of(raw)}\n\nAnswer:\n{answer_of(raw).strip()}"


def with_opening_tag(raw: str) -> str:
    """A raw output whose prompt opened the thought: it begins with the tag, once."""
    return raw if raw.lstrip().startswith(THINK) else THINK + raw


def summary_of(raw: str) -> str:
    """A summary without the thoughts that led to it."""
    return answer_of(raw).strip()


def _without_tags(text: str) -> str:
    return text.replace(THINK, "").replace(END_THINK, "").strip()


# --- token ids --------------------------------------------------------------------------------------------------------


def special_tokens(tokenizer: "PreTrainedTokenizerBase") -> tuple[str, ...]:
    """Spellings of the tokens that a tokenizer takes for control tokens wherever they stand in a text, longest first."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    spellings = {*tokenizer.all_special_tokens, *(token.content for token in added if token.special)}
    return tuple(sorted(filter(None, spellings), key=lambda spelling: (-len(spelling), spelling)))


class ChatCodec:
    """A model's tokenizer and chat template: the one place where text becomes token ids."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._special_tokens = special_tokens(tokenizer)

    def chat_prompt(self, text: str, *, opens_think: bool = False) -> list[int]:
        """One user message, the chat template around it once; with `opens_think` the model's turn begins with the tag.

        Special tokens that the message spells out are left out: it holds what a model wrote, put together from pieces.
        """
        text = self.without_special_tokens(text)
        messages = [{"role": "user", "content": text}]
        rendered = str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        if opens_think and not rendered.rstrip().endswith(THINK):
            rendered += f"{THINK}\n"
        return self.encode(rendered)

    def encode(self, text: str) -> list[int]:
        """Without special tokens around it. The tokenizer's own call takes five times as long: it is the second choice."""
        if (backend := self._backend_for_whole_texts()) is not None:
            return backend.encode(text, add_special_tokens=False).ids
        return self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def encode_all(self, texts: list[str]) -> list[list[int]]:
        """`encode` of each, on all cores."""
        if (backend := self._backend_for_whole_texts()) is not None:
            return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]
        return self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []

    def _backend_for_whole_texts(self) -> Any:
        """Without the truncation and padding that somebody else's call may have left in it; None where there is none."""
        if self._backend is not None:
            if self._backend.truncation is not None:
                self._backend.no_truncation()
            if self._backend.padding is not None:
                self._backend.no_padding()
        return self._backend

    def decode(self, token_ids: list[int]) -> str:
        """As text, without special tokens."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def without_special_tokens(self, text: str) -> str:
        """What a model wrote, safe inside a prompt: spelled-out special tokens would become real ones there.

        Nor do any come about where one is taken out of another's middle: `<|e<|end|>nd|>` leaves nothing.
        """
        if not any(token in text for token in self._special_tokens):
            return text
        kept: list[str] = []
        for letter in text:
            kept.append(letter)
            for token in self._special_tokens:
                if letter == token[-1] and "".join(kept[-len(token) :]) == token:
                    del kept[-len(token) :]
                    break
        return "".join(kept)

    def shortened(self, text: str, max_tokens: int) -> str:
        """`text` with its middle left out, so that about `max_tokens` tokens remain."""
        token_ids = self.encode(text)
        if len(token_ids) <= max_tokens:
            return text
        kept = max(0, max_tokens - len(self.encode(OMISSION)))
        head, tail = token_ids[: (kept + 1) // 2], token_ids[len(token_ids) - kept // 2 :]
        return f"{self.decode(head)}{OMISSION}{self.decode(tail)}"
