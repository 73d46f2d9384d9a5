"""The one place where text becomes token ids, with a model's tokenizer and chat template."""

import copy
import functools
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

THINK, END_THINK = "<think>", "</think>"
TAGS = (THINK, END_THINK, "<answer>", "</answer>", "<finish>", "</finish>")
"""Tags that a model writes as a part of its text. They stay in a decoded text even if the tokenizer marks them as special."""
OMISSION = "\n[…]\n"
"""Replaces the middle of a text that was left out."""


def special_tokens(tokenizer: "PreTrainedTokenizerBase") -> tuple[str, ...]:
    """Spellings that a tokenizer reads as control tokens anywhere in a text, longest first."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    spellings = {*tokenizer.all_special_tokens, *(token.content for token in added if token.special)}
    return tuple(sorted(filter(None, spellings), key=lambda spelling: (-len(spelling), spelling)))


def _tags_among(special: Sequence[str], tags: Collection[str], tokenizer: "PreTrainedTokenizerBase") -> frozenset[str]:
    """The tags that a tokenizer marks as special, without those that begin, end or pad a text."""
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    return frozenset(special).intersection(tags).difference(getattr(tokenizer, name, None) for name in names)


LITERAL = "\ue000"
"""Marks both ends of the number of a special token that a message spells out, so that the token passes the chat template as
text."""


def hide_special_tokens(text: str, spellings: Sequence[str]) -> str:
    """The text with each spelled-out special token replaced by its number in `spellings`, between two `LITERAL` marks."""
    text = text.replace(LITERAL, "")  # a private-use character: a text contains it only to deceive
    if not any(spelling in text for spelling in spellings):
        return text
    pattern = "|".join(re.escape(spelling) for spelling in spellings)  # longest spellings first
    return re.sub(pattern, lambda match: f"{LITERAL}{spellings.index(match[0])}{LITERAL}", text)


def show_special_tokens(text: str, spellings: Sequence[str]) -> str:
    """Undoes `hide_special_tokens`: puts the spellings back."""
    return _HIDDEN.sub(lambda match: spellings[int(match[1])] if int(match[1]) < len(spellings) else match[0], text)


def hidden_in(value: Any, spellings: Sequence[str]) -> Any:
    """A message, or a part of one, with `hide_special_tokens` applied to all texts in it."""
    if isinstance(value, str):
        return hide_special_tokens(value, spellings)
    if isinstance(value, Mapping):
        return {hidden_in(key, spellings): hidden_in(inner, spellings) for key, inner in value.items()}
    return [hidden_in(inner, spellings) for inner in value] if isinstance(value, list | tuple) else value


_HIDDEN = re.compile(f"{LITERAL}([0-9]{{1,6}}){LITERAL}")


class ChatCodec:
    """Encodes, decodes and shortens text, and puts a chat template around it.

    Args:
        tags: special tokens that count as text when tokens are decoded, unless they end texts or pad them.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", *, tags: Collection[str] = TAGS) -> None:
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._special_tokens = special_tokens(tokenizer)
        self._special_tags = _tags_among(self._special_tokens, tags, tokenizer)
        self._token_ids: dict[str, list[int]] = {}
        self._without_special: Any = None
        """A copy of the backend that knows no special tokens."""

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        return self._tokenizer

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
        """Token ids of a text, without special tokens around it. Uses the backend if there is one, because the tokenizer's own
        call takes five times as long."""
        if (backend := self._backend_for_whole_texts()) is not None:
            return backend.encode(text, add_special_tokens=False).ids
        return self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def encode_all(self, texts: list[str]) -> list[list[int]]:
        """`encode` of each text, on all cores."""
        if (backend := self._backend_for_whole_texts()) is not None:
            return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]
        return self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []

    def encode_hidden(self, text: str) -> list[int]:
        """Token ids of a rendered prompt in which `hide_special_tokens` has hidden special tokens: these become ordinary text."""
        token_ids: list[int] = []
        for number, part in enumerate(_HIDDEN.split(text)):
            token_ids += self._of_number(part) if number % 2 else self.encode(part)
        return token_ids

    def _of_number(self, digits: str) -> list[int]:
        """Token ids of a hidden special token. If a model wrote the marks around some other number: token ids of that text."""
        number = int(digits)
        if number < len(self._special_tokens):
            return self._as_text(self._special_tokens[number])
        return self.encode(f"{LITERAL}{digits}{LITERAL}")

    def encode_continued(self, text: str) -> list[int]:
        """`encode_hidden` of a text that follows other tokens. Some tokenizers add a space before the first word of a text; this
        method prevents that."""
        anchor = self._tokenizer.eos_token
        if not anchor or self._backend is None:
            return self.encode_hidden(text)
        first = self.encode(anchor)
        token_ids: list[int] = []
        for number, part in enumerate(_HIDDEN.split(text)):
            if number % 2:
                token_ids += self._of_number(part)
            elif part:
                token_ids += self.encode(anchor + part)[len(first) :]
        return token_ids

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, begins_turn: bool, tools: Sequence[Any] | None = None
    ) -> str:
        """The messages as the chat template renders them; with `begins_turn` the model's next turn begins at the end."""
        return str(
            self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=begins_turn, tools=list(tools) if tools else None
            )
        )

    def hidden(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message whose special tokens are hidden, so that they become ordinary text (`encode_hidden`)."""
        return hidden_in(message, self._special_tokens)

    def control_token(self, token_id: int) -> str:
        """The spelling of a special token; empty for any other token, and for a tag, which is text."""
        spelling = self._tokenizer.convert_ids_to_tokens(int(token_id))
        is_control = isinstance(spelling, str) and spelling in self._special_tokens
        return spelling if is_control and spelling not in self._special_tags else ""

    def ending(self, token_ids: Sequence[int]) -> str:
        """The control tokens with which a turn ends, as text; empty if the turn ends with any other token."""
        spellings: list[str] = []
        for token_id in reversed(token_ids):
            if not (spelling := self.control_token(token_id)):
                break
            spellings.append(spelling)
        return "".join(reversed(spellings))

    @property
    def control_tokens(self) -> tuple[str, ...]:
        """Spellings of the special tokens, longest first."""
        return self._special_tokens

    def decode_all(self, token_ids: list[int]) -> str:
        """The tokens as text, with special tokens."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))

    def _as_text(self, spelling: str) -> list[int]:
        """Token ids of a special token's spelling, as if the tokenizer had no special tokens."""
        if spelling not in self._token_ids:
            if self._without_special is None and self._backend is not None:
                self._without_special = copy.deepcopy(self._backend)  # other threads may be using the backend itself
                self._without_special.encode_special_tokens = True
            if self._without_special is not None:
                token_ids = self._without_special.encode(spelling, add_special_tokens=False).ids
            else:
                token_ids = self._tokenizer(spelling, add_special_tokens=False, split_special_tokens=True)["input_ids"]
            self._token_ids[spelling] = token_ids
        return self._token_ids[spelling]

    def _backend_for_whole_texts(self) -> Any:
        """The backend, after removing truncation and padding that an earlier call may have set; None if there is no backend."""
        if self._backend is not None:
            if self._backend.truncation is not None:
                self._backend.no_truncation()
            if self._backend.padding is not None:
                self._backend.no_padding()
        return self._backend

    def decode(self, token_ids: list[int]) -> str:
        """The tokens as text, without special tokens except for tags."""
        if not self._special_tags:
            return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))
        text_ids = [token_id for token_id in token_ids if token_id not in self._control_ids]
        return str(self._tokenizer.decode(text_ids, skip_special_tokens=False))

    @functools.cached_property
    def _control_ids(self) -> frozenset[int]:
        """Ids of the special tokens that are no tags."""
        spellings = [spelling for spelling in self._special_tokens if spelling not in self._special_tags]
        return frozenset(self._tokenizer.convert_tokens_to_ids(spellings))

    def without_special_tokens(self, text: str) -> str:
        """The text without spelled-out special tokens, which would become real special tokens in a prompt.

        Removing a special token from the middle of another never leaves a new special token: `<|e<|end|>nd|>` leaves nothing.
        """
        if not any(token in text for token in self._special_tokens):
            return text
        letters: list[str] = []
        for letter in text:
            letters.append(letter)
            for token in self._special_tokens:
                if letter == token[-1] and "".join(letters[-len(token) :]) == token:
                    del letters[-len(token) :]
                    break
        return "".join(letters)

    def shortened(self, text: str, max_tokens: int) -> str:
        """`text` with its middle left out, so that about `max_tokens` tokens remain."""
        token_ids = self.encode(text)
        if len(token_ids) <= max_tokens:
            return text
        num_kept = max(0, max_tokens - len(self.encode(OMISSION)))
        head, tail = token_ids[: (num_kept + 1) // 2], token_ids[len(token_ids) - num_kept // 2 :]
        return f"{self.decode(head)}{OMISSION}{self.decode(tail)}"
