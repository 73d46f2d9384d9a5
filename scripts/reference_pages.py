"""The reference that is made from the code: every option, and the classes and functions that users' files import.

python scripts/reference_pages.py      writes docs/reference/options.md and docs/reference/api.md
"""

import dataclasses
import importlib
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from open_instruct.config.cli import field_help
from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.option_limits import limits_of
from open_instruct.registry import option_fields, option_kinds

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"
OPTIONS_PAGE, API_PAGE = REFERENCE / "options.md", REFERENCE / "api.md"
OPTIONS_INTRODUCTION = """# Options

`python scripts/reference_pages.py` writes this page anew, from the option classes in `open_instruct/config/` and beside workflows
and losses.

An option is written `--name value` or `--name=value`, a list `--name a b c` or as JSON, a switch `--name`, `--name False` or
`--no_name`. A name may be shortened as long as it is clear. `--config run.yaml` reads options from a file; the command line wins.
Options of a loss, an advantage or a workflow of yours are in `--help` when its file is named.
"""
API_INTRODUCTION = """# Python API

`python scripts/reference_pages.py` writes this page anew, from docstrings. These are the names that files of yours
import, to start a run or for a reward, a loss, an environment, a workflow. Everything else may change from one version to the
next.
"""
API: dict[str, tuple[str, tuple[str, ...]]] = {
    "A run from Python": ("open_instruct", ("GRPO", "GRPOResult", "RunFailed")),
    "Verifiers": ("open_instruct.ground_truth_utils", ("VerifierFunction", "VerificationResult", "NotScored")),
    "Tools and environments": (
        "open_instruct.environments.base",
        ("Environment", "Opening", "Observation", "Ending", "Turn", "ToolCall", "ToolError", "user_message", "schema"),
    ),
    "Workflows": ("open_instruct.workflows.base", ("Workflow", "Context", "Trajectory", "Lengths", "OwnPrompt")),
    "Samples and requests": ("open_instruct.data_types", ("Sample", "PromptRequest", "SamplingConfig")),
    "Losses": ("open_instruct.algorithms.losses.base", ("LossInputs",)),
    "Registries": ("open_instruct.registry", ("Registry", "chosen_from")),
    "Options of your own": ("open_instruct.option_limits", ("limited", "Limits")),
}


def options_page() -> str:
    """The text of `docs/reference/options.md`."""
    kinds, limits = option_kinds(GRPOConfig), limits_of(GRPOConfig)
    fields = {field.name: field for field in option_fields(GRPOConfig)}
    groups: dict[str, list[str]] = defaultdict(list)
    for name, (title, text) in field_help(GRPOConfig).items():
        numbers = f" ({limits[name]})" if name in limits else ""
        row = f"| `--{name}` | {shown_kind(kinds[name])}{numbers} | {shown_default(fields[name])} | {in_a_cell(text)} |"
        groups[title].append(row)
    head = "| option | values | default | |\n|---|---|---|---|"
    parts = [f"## {title}\n\n{head}\n" + "\n".join(rows) + "\n" for title, rows in groups.items()]
    return "\n".join([OPTIONS_INTRODUCTION, *parts])


def shown_kind(kind: Any) -> str:
    """What may be written for an option of an annotation: `whole number`, ``one of `a`, `b` ``."""
    plain = {bool: "switch", int: "whole number", float: "number", str: "text", dict[str, Any]: "JSON object"}
    if kind in plain:
        return plain[kind]
    parts = [part for part in get_args(kind) if part is not NoneType]
    if get_origin(kind) is Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if get_origin(kind) is list:
        return f"list of {shown_kind(parts[0])}"
    return " or ".join(map(shown_kind, parts))


def shown_default(field: "dataclasses.Field[Any]") -> str:
    """The default as one would write it; empty where the help says what it is."""
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
        return f"`{' '.join(map(str, value))}`" if value else ""
    if field.default is dataclasses.MISSING:
        return "required"
    return "" if field.default is None else f"`{field.default}`"


def in_a_cell(text: str) -> str:
    """A help text as a cell of a table; pages that it names are links."""
    text = re.sub(r"docs/([\w/]+)/(\w+)\.md", r"[\2](../\1/\2.md)", " ".join(text.split()))
    return re.sub(r"<([^>]*)>", r"`<\1>`", text).replace("|", "\\|")


def api_page() -> str:
    """The text of `docs/reference/api.md`."""
    parts = [API_INTRODUCTION]
    for title, (module_name, names) in API.items():
        module = importlib.import_module(module_name)
        parts.append(f"## {title}\n\n`from {module_name} import {', '.join(names)}`\n")
        parts += [described(getattr(module, name)) for name in names]
    return "\n".join(parts)


def described(subject: Any) -> str:
    """A class with its public methods, or a function, with signatures and docstrings."""
    lines = [f"### {subject.__name__}", "", f"`{signature_of(subject)}`", "", docstring_of(subject)]
    if inspect.isclass(subject):
        lines += ["", *field_lines(subject)] if dataclasses.is_dataclass(subject) else []
        lines += ["", *(line for name, method in own_methods(subject) for line in method_lines(name, method))]
    return re.sub(r" +$", "", "\n".join(lines), flags=re.MULTILINE).rstrip() + "\n"


def own_methods(subject: type[Any]) -> Iterator[tuple[str, Any]]:
    """Public methods and properties that the class itself defines and describes, in their order."""
    for name, method in vars(subject).items():
        function = getattr(method, "fget", None) or getattr(method, "__func__", method)
        if (not name.startswith("_") or name == "__call__") and inspect.isfunction(function) and function.__doc__:
            yield name, method


def method_lines(name: str, method: Any) -> list[str]:
    """One item of a list: the method as it is written, and what it does."""
    if isinstance(method, property):
        shown, function = f"`{name}`", method.fget
    else:
        function = getattr(method, "__func__", method)
        prefix = "async " if inspect.iscoroutinefunction(function) else ""
        shown = f"`{prefix}{name}{parameters_of(function)}`"
    return [f"- {shown}: " + docstring_of(function).replace("\n", "\n  "), ""]


STARS: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


def parameters_of(function: Any) -> str:
    """`(self, turn)`: names alone, because annotations make a line hard to read."""
    names = []
    for parameter in inspect.signature(function).parameters.values():
        stars = STARS.get(parameter.kind, "")
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        if parameter.name not in ("self", "cls"):
            names.append(f"{stars}{parameter.name}{default}")
    return f"({', '.join(names)})"


def signature_of(subject: Any) -> str:
    if inspect.isclass(subject):
        bases = ", ".join(base.__name__ for base in subject.__bases__ if base is not object)
        return f"class {subject.__name__}({bases})" if bases else f"class {subject.__name__}"
    return f"{subject.__name__}{parameters_of(subject)}"


def field_lines(subject: type[Any]) -> list[str]:
    """One item of a list for each field of a dataclass."""
    help_texts = field_help(subject)
    shown = {field.name: f"- `{field.name}: {annotation_of(field)}`" for field in dataclasses.fields(subject)}
    return [f"{line}: {' '.join(help_texts[name][1].split())}".removesuffix(": ") for name, line in shown.items()]


def annotation_of(field: "dataclasses.Field[Any]") -> str:
    kind = field.type.__name__ if isinstance(field.type, type) and not get_args(field.type) else str(field.type)
    return kind.strip("\"'").replace("open_instruct.", "")


def docstring_of(subject: Any) -> str:
    """The docstring, its `Args:` and the like as they stand, in a block that keeps their lines."""
    text = inspect.getdoc(subject) or ""
    sections = re.split(r"\n\n(?=(?:Args|Returns|Raises|Yields):\n)", text)
    return "\n\n".join([sections[0], *(f"```text\n{section}\n```" for section in sections[1:])])


if __name__ == "__main__":
    OPTIONS_PAGE.write_text(options_page())
    API_PAGE.write_text(api_page())
