"""Registries of losses, advantages, workflows and other parts that a run chooses by name. A user's file may add entries.

    LOSSES: Registry[Loss] = Registry("loss", flag="loss_fn")

    @LOSSES.register("dapo", options=ClipOptions)
    def dapo_loss(inputs, options): ...

An entry may bring options of its own: a dataclass whose fields become flags of the command line, with the string under a field as
the flag's help. `option_groups` collects these dataclasses from all registered entries.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from types import NoneType, UnionType
from typing import Any, Generic, Literal, TypeVar, get_args, get_type_hints

T = TypeVar("T")
Group = TypeVar("Group")


@dataclass(kw_only=True)
class NoOptions:
    """Of an entry that has no options of its own"""


@dataclass(frozen=True)
class Entry(Generic[T]):
    """What is registered under a name."""

    name: str
    value: T
    options: type[Any] = NoOptions
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Further facts that the registration gives, such as the denominator that a loss is meant to have."""


class UnknownName(ValueError):
    """Nothing is registered under the name. The message lists the registered names."""


class Registry(Generic[T]):
    """Entries by name, in the order in which they were registered.

    Args:
        what: a noun for messages, such as `loss`.
        flag: the option that chooses an entry by name.
    """

    def __init__(self, what: str, *, flag: str) -> None:
        self.what = what
        self.flag = flag
        self._entries: dict[str, Entry[T]] = {}
        _REGISTRIES.append(self)

    def register(self, name: str, *, options: type[Any] = NoOptions, **facts: Any) -> Callable[[T], T]:
        """A decorator that registers a function or class under `name`.

        Registering the same definition again replaces it, because a module that is loaded twice in one process must not fail.

        Raises:
            ValueError: the name belongs to another definition, or an option to the options of another entry.
        """

        def register(value: T) -> T:
            other = self._entries.get(name)
            if other is not None and _where(other.value) != _where(value):
                raise ValueError(f"{_where(value)}: the {self.what} {name!r} exists already ({_where(other.value)})")
            _check_flags(options, _where(value))
            self._entries[name] = Entry(name, value, options, facts)
            return value

        return register

    def __getitem__(self, name: str) -> Entry[T]:
        if name not in self._entries:
            raise UnknownName(f"there is no {self.what} called {name!r}; there are: {', '.join(self._entries)}")
        return self._entries[name]

    def fact(self, name: str, fact: str, default: Any = None) -> Any:
        """A fact that an entry's registration gives; `default` if it gives none, or if there is no such entry."""
        return self._entries[name].facts.get(fact, default) if name in self._entries else default

    def __iter__(self) -> Iterator[Entry[T]]:
        return iter(self._entries.values())

    @property
    def names(self) -> list[str]:
        return list(self._entries)


_REGISTRIES: list[Registry[Any]] = []


def option_groups() -> list[type[Any]]:
    """The option dataclasses of all registered entries, each once."""
    groups = {entry.options: None for registry in _REGISTRIES for entry in registry if fields(entry.options)}
    return list(groups)


def _check_flags(options: type[Any], where: str) -> None:
    new = {field.name for field in fields(options)}
    for group in option_groups():
        names = new & {field.name for field in fields(group)}
        if names and _where(group) != _where(options):
            raise ValueError(f"{where}: the option {sorted(names)[0]!r} exists already ({_where(group)})")


def _where(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


# --- options that choose an entry -------------------------------------------------------------------------------------

_CHOICES = "choices"
NO_FLAG: Mapping[str, Any] = {"is_flag": False}
"""Metadata that mark a field of an option class as not an option."""


def chosen_from(registry: Registry[Any], default: str) -> Any:
    """A field of an option class whose value is the name of an entry."""
    return field(default=default, metadata={_CHOICES: registry})


def option_fields(config_cls: type[Any]) -> "list[Field[Any]]":
    """The fields of an option class that are options."""
    return [option for option in fields(config_cls) if option.metadata.get("is_flag", True)]


def option_kinds(config_cls: type[Any]) -> dict[str, Any]:
    """The annotation of each option. An option that chooses an entry has a `Literal` of the names that are registered now."""
    hints = get_type_hints(config_cls)
    kinds = {}
    for option in option_fields(config_cls):
        registry = option.metadata.get(_CHOICES)
        if registry is None:
            kinds[option.name] = hints[option.name]
        else:
            kinds[option.name] = Literal[tuple(registry.names)]  # pyrefly: ignore[invalid-literal]
    return kinds


def is_switch(kind: Any) -> bool:
    """Whether an option of this annotation is True or False, and may therefore stand on the command line without a value. It is
    also a switch if it may be None, because its default follows from other options."""
    return kind is bool or (isinstance(kind, UnionType) and set(get_args(kind)) == {bool, NoneType})


def chosen_entries(options: Any) -> Iterator[tuple[Registry[Any], str]]:
    """Each registry that an option chooses from, with the chosen name."""
    for option in fields(options):
        if _CHOICES in option.metadata:
            yield option.metadata[_CHOICES], getattr(options, option.name)


def options_of(args: Any, group: type[Group]) -> Group:
    """The part of a run's options that a group declares; options that `args` lacks have the group's default."""
    own = getattr(args, "own_options", {})
    values = {}
    for option in fields(group):  # type: ignore[arg-type]
        if option.name in own:
            values[option.name] = own[option.name]
        elif hasattr(args, option.name):
            values[option.name] = getattr(args, option.name)
    return group(**values)
