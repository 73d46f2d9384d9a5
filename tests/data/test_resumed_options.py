"""The table of options that a resumed run may change (`docs/guides/preemption.md`) has each; the identity lets each change."""

import dataclasses
import re
import typing
from pathlib import Path
from typing import Any

import pytest
from conftest import make_args

from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.data import run_identity
from open_instruct.registry import option_fields, option_kinds
from open_instruct.workflows.base import WORKFLOWS, identity_options

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "preemption.md"
MUST_STAY = {*run_identity.OPTIONS, *(name for workflow in WORKFLOWS.names for name in identity_options(workflow))}
COMPARED_BY_CONTENT = "compared by what they come to"


def table() -> list[tuple[list[str], str]]:
    """The options of each row, and what the row says."""
    section = PAGE.read_text().partition("## With other options")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    cells = [line.strip("| ").split(" | ") for line in lines]
    return [(re.findall(r"`(\w+)`", options), meaning) for options, meaning in cells]


def test_each_option_that_may_change_is_in_one_row() -> None:
    names = [name for options, _ in table() for name in options]
    assert len(names) == len(set(names)), sorted(name for name in names if names.count(name) > 1)
    assert set(names) == {field.name for field in option_fields(GRPOConfig)} - MUST_STAY


def another(kind: Any, value: Any) -> Any:
    """A value of an option that is not `value`."""
    choices = typing.get_args(kind)
    if typing.get_origin(kind) is typing.Literal:
        return next(choice for choice in choices if choice != value)
    if typing.get_origin(kind) in (list, dict):
        return [*value, "another"] if isinstance(value, list) else {**value, "another": 1}
    if choices:  # or None
        return another(choices[0], value)
    if kind is bool:
        return not value
    return f"another {value}" if kind is str else (value or 0) + kind(1)


MAY_CHANGE = [options for options, meaning in table() if not meaning.startswith(COMPARED_BY_CONTENT)]


@pytest.mark.parametrize("names", MAY_CHANGE, ids=lambda names: names[0])
def test_options_of_the_table_are_not_part_of_the_identity(names: list[str]) -> None:
    args, kinds = make_args(), option_kinds(GRPOConfig)
    for name in names:
        changed = dataclasses.replace(args, **{name: another(kinds[name], getattr(args, name))})
        assert getattr(changed, name) != getattr(args, name)
        assert not run_identity.differences(run_identity.run_identity(args), run_identity.run_identity(changed)), name
