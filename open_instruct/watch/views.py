"""The views by name. Each is a function of the runs that were found and of plain arguments, and gives JSON values.

`answer(runs, "step", {"step": "40", "sort": "worst", "limit": "3"})` is what `--json` prints and what the page's server answers.
"""

import difflib
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from open_instruct.record.reader import NoRecord
from open_instruct.report.metrics_file import to_json_value
from open_instruct.watch import (
    views_conversations,
    views_curves,
    views_evaluation,
    views_group,
    views_prompt,
    views_run,
    views_step,
    views_time,
)
from open_instruct.watch.mistakes import Mistake
from open_instruct.watch.runs import Runs

COUNTS = ("limit", "offset", "steps")
"""Arguments that are no less than 0."""


@dataclass(frozen=True)
class Argument:
    """An argument of a view."""

    name: str
    kind: type
    """`int`, `float`, `str`, or `list` for several words."""
    is_required: bool
    is_positional: bool
    """Whether the command line takes it without its name, in this order."""
    default: Any = None

    def read(self, text: str) -> Any:
        """The value of a word of a command line or an address. Raises `Mistake` if it is none."""
        if self.kind is list:
            return [part for part in text.split(",") if part]
        try:
            value = self.kind(text)
        except ValueError:
            kinds = {int: "a whole number", float: "a number"}
            raise Mistake(f"{self.name} has to be {kinds[self.kind]}, not {text!r}.") from None
        if self.name in COUNTS and value < 0:
            raise Mistake(f"{self.name} has to be 0 or more, not {text}.")
        return value


@dataclass(frozen=True)
class View:
    """A view with its arguments."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Argument, ...]

    @property
    def help(self) -> str:
        """What the view shows, in a sentence."""
        return " ".join((self.function.__doc__ or "").split("\n\n")[0].split())

    @property
    def usage(self) -> str:
        """`step STEP [--sort …]`."""
        words = [
            argument.name.upper() if argument.is_required else f"[{argument.name.upper()}]"
            for argument in self.arguments
            if argument.is_positional
        ]
        return " ".join([self.name, *words, *(f"[--{a.name}]" for a in self.arguments if not a.is_positional)])

    def __call__(self, runs: Runs, values: Mapping[str, str]) -> Any:
        """JSON values. Raises `Mistake` if an argument is missing, unknown or no value."""
        by_name = {argument.name: argument for argument in self.arguments}
        if unknown := [name for name in values if name not in by_name]:
            raise Mistake(
                f"{self.name} has no argument {unknown[0]!r}. Its arguments are: {', '.join(by_name) or 'none'}."
            )
        if missing := [
            argument.name for argument in self.arguments if argument.is_required and not values.get(argument.name)
        ]:
            raise Mistake(f"{self.name} needs {missing[0]!r}: {self.usage}")
        arguments = {name: by_name[name].read(text) for name, text in values.items() if text != ""}
        try:
            return to_json_value(self.function(runs, **arguments))
        except NoRecord as error:  # a torn file
            raise Mistake(str(error)) from None


FUNCTIONS: tuple[Callable[..., Any], ...] = (
    views_run.runs,
    views_run.options,
    views_curves.curves,
    views_step.step,
    views_group.group,
    views_group.sample,
    views_step.tokens,
    views_prompt.why,
    views_prompt.row,
    views_step.search,
    views_step.export_rows,
    views_evaluation.evaluations,
    views_group.evaluation,
    views_group.evaluation_sample,
    views_evaluation.flips,
    views_time.lanes,
    views_conversations.conversations,
    views_time.staleness,
    views_time.cost,
    views_run.health,
)


def _view(function: Callable[..., Any]) -> View:
    hints = typing.get_type_hints(function)
    parameters = list(inspect.signature(function).parameters.values())[1:]
    arguments = (
        Argument(
            parameter.name,
            _kind(hints[parameter.name]),
            is_required=parameter.default is parameter.empty,
            is_positional=parameter.kind is parameter.POSITIONAL_OR_KEYWORD,
            default=None if parameter.default is parameter.empty else parameter.default,
        )
        for parameter in parameters
    )
    return View(function.__name__, function, tuple(arguments))


def _kind(hint: Any) -> type:
    """The type without None; `list` of a list."""
    if isinstance(hint, types.UnionType):
        hint = next(kind for kind in typing.get_args(hint) if kind is not type(None))
    return typing.get_origin(hint) or hint


VIEWS: dict[str, View] = {view.name: view for view in map(_view, FUNCTIONS)}


def view_of(name: str) -> View:
    """The view of this name. Raises `Mistake` if there is none."""
    if name not in VIEWS:
        near = difflib.get_close_matches(name, VIEWS, 1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise Mistake(f"there is no view {name!r}.{hint} The views are: {', '.join(VIEWS)}.")
    return VIEWS[name]


def answer(runs: Runs, name: str, values: Mapping[str, str]) -> Any:
    """What a view says, as JSON values. `values` are the arguments as text. Raises `Mistake` for what a user can correct."""
    return view_of(name)(runs, values)
