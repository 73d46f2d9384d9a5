"""Turns the token ids of a record into text, with the tokenizer of the run. Never downloads anything."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_FILE = "tokenizer.json"


class Decoder:
    """The tokenizer of a run, loaded when it is first needed.

    Without it a text is the token ids in brackets, `[17][42]`, and `problem` says why.
    """

    def __init__(self, directories: Sequence[Path], name: str) -> None:
        """Args:
        directories: where the tokenizer may be, the likeliest first.
        name: what the run's options say, a directory or a name on the hub.
        """
        self._directories = directories
        self._name = name
        self._lock = threading.Lock()
        self.problem: str | None = None
        """Why there is no tokenizer; None if there is one."""

    @cached_property
    def _tokenizer(self) -> "Tokenizer | None":
        from tokenizers import Tokenizer

        for file in self._files():
            try:
                tokenizer = Tokenizer.from_file(str(file))
                self.problem = None
                return tokenizer
            except Exception as error:  # the library raises nothing more exact
                self.problem = f"the tokenizer {file} cannot be read: {error}"
        self.problem = self.problem or (
            f"the tokenizer {self._name or 'of the run'} is not on this machine, so texts are token ids. Copy its "
            f"{TOKENIZER_FILE} to the run's directory."
        )
        return None

    def _files(self) -> Iterator[Path]:
        for directory in self._directories:
            if (file := directory / TOKENIZER_FILE).is_file():
                yield file
        if self._name and not Path(self._name).is_absolute():
            from huggingface_hub import try_to_load_from_cache

            try:
                cached = try_to_load_from_cache(self._name, TOKENIZER_FILE)
            except ValueError:  # it is no name of the hub
                return
            if isinstance(cached, str):
                yield Path(cached)

    def _get(self) -> "Tokenizer | None":
        with self._lock:
            return self._tokenizer

    def text(self, ids: Sequence[int]) -> str:
        """The text, with special tokens. Bytes that are no whole character become U+FFFD."""
        return self.texts([ids])[0]

    def texts(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """The text of each sequence."""
        tokenizer = self._get()
        if tokenizer is None:
            return ["".join(f"[{number}]" for number in ids) for ids in sequences]
        return tokenizer.decode_batch([list(ids) for ids in sequences], skip_special_tokens=False)

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """A text for each token; together they are the text. Where several tokens make one character, the last of them has it,
        and the others are empty."""
        tokenizer = self._get()
        if tokenizer is None:
            return [f"[{number}]" for number in ids]
        whole = self.text(ids)
        for texts in (_streamed(tokenizer, ids), _by_prefixes(tokenizer, ids)):
            text = "".join(texts)
            if texts and whole.startswith(text):
                texts[-1] += whole[len(text) :]  # bytes at the end that are no whole character
                return texts
        return ["" for _ in ids[1:]] + [whole] if len(ids) else []


def _streamed(tokenizer: "Tokenizer", ids: Sequence[int]) -> list[str]:
    """What each token adds to the text, as the library's stream gives it; as far as it comes."""
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=False)
    texts: list[str] = []
    with suppress(Exception):  # the library raises nothing more exact where a token changes the text before it
        for number in ids:
            texts.append(stream.step(tokenizer, number) or "")
    return texts if len(texts) == len(ids) else []


def _by_prefixes(tokenizer: "Tokenizer", ids: Sequence[int]) -> list[str]:
    """What each token adds to the text, from the texts of all beginnings: quadratic, but right for every decoder."""
    whole = tokenizer.decode(list(ids), skip_special_tokens=False)
    texts, at = [], 0
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(list(ids[:end]), skip_special_tokens=False)
        shared = max(at, common_length(text, whole))
        texts.append(whole[at:shared])
        at = shared
    return texts


def common_length(text: str, other: str) -> int:
    """Characters that two texts have in common at their beginning."""
    pairs = enumerate(zip(text, other, strict=False))
    return next((at for at, (own, its) in pairs if own != its), min(len(text), len(other)))
