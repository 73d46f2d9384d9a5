"""The one place where text becomes token ids: a model's tokenizer and chat template."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

THINK, END_THINK = "<think>", "</think>"
OMISSION = "\n[…]\n"
"""Stands where the middle of a text was left out."""


def special_tokens(tokenizer: "PreTrainedTokenizerBase") -> tuple[str, ...]:
    """Spellings of the tokens that a tokenizer takes for control tokens wherever they stand in a text, longest first."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    spellings = {*tokenizer.all_special_tokens, *(token.content for token in added if token.special)}
    return tuple(sorted(filter(None, spellings), key=lambda spelling: (-len(spelling), spelling)))


class ChatCodec:
    """Encodes, decodes and shortens text, and puts a chat template around it."""

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
