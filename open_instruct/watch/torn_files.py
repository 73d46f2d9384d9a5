"""Views over several files of a record go on without those that are torn, and name them."""

from collections.abc import Callable, Iterable
from typing import TypeVar

from open_instruct.record.reader import TornFile

T = TypeVar("T")
S = TypeVar("S")


class TornFiles:
    """The files that a view goes on without."""

    def __init__(self) -> None:
        self._sentences: dict[str, None] = {}

    @property
    def sentences(self) -> list[str]:
        """What is wrong with each file, once; empty if all are whole."""
        return list(self._sentences)

    def read(self, make: Callable[[], T], default: T) -> T:
        """What `make` gives; `default` if it reads a torn file."""
        try:
            return make()
        except TornFile as error:
            self._sentences[str(error)] = None
            return default

    def whole(self, places: Iterable[S], read: Callable[[S], object]) -> list[S]:
        """The places, such as steps, that can be read."""
        return [place for place in places if self.read(lambda place=place: (read(place),), None) is not None]
