"""The one place where text becomes token ids: a model's tokenizer and chat template."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

THINK, END_THINK = "<think>", "</think>"
OMISSION = "\n[…]\n"
"""Takes the place of the middle of a text that was left out."""


def special_tokens(tokenizer: "PreTrainedTokenizerBase") -> tuple[str, ...]:
    """Spellings that a tokenizer takes for control tokens wherever they stand in a text, longest first."""
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
        """One user message with the chat template around it. With `opens_think` the model's turn begins with the opening tag.

        Special tokens that the message spells out are left out, because the message holds text that a model wrote.
        """
        text = self.without_special_tokens(text)
        messages = [{"role": "user", "content": text}]
        rendered = str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        if opens_think and not rendered.rstrip().endswith(THINK):
            rendered += f"{THINK}\n"
        return self.encode(rendered)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens around it. The backend is asked first, because the tokenizer's own call
        takes five times as long."""
        if (backend := self._backend_for_whole_texts()) is not None:
            return backend.encode(text, add_special_tokens=False).ids
        return self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def encode_all(self, texts: list[str]) -> list[list[int]]:
        """`encode` of each text, on all cores."""
        if (backend := self._backend_for_whole_texts()) is not None:
            return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]
        return self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []

    def _backend_for_whole_texts(self) -> Any:
        """The backend, without truncation and padding that an earlier call may have left in it; None if there is none."""
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
        """The text without spelled-out special tokens, which would become real special tokens in a prompt.

        Nor does a new special token form when one is taken out of the middle of another: `<|e<|end|>nd|>` leaves nothing.
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
