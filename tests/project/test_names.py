"""A variable is named after what it holds, by a noun: a participle or a pronoun says only where its value comes from."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("open_instruct", "examples")
PARTICIPLES = (
    "asked came done found given gone got held kept known left lost made meant said seen sent shown spent stuck taken told "
    "wanted written"
)
PRONOUNS = "himself it itself one ones others that them these they this those what which"
WORDS = re.compile(rf"_*(?:{'|'.join(f'{PARTICIPLES} {PRONOUNS}'.split())})")
PHRASES = re.compile(r"_*(?:of|the)_\w+")
"""Phrases name no variable. A field may have one, because it is read after the name of its object: `accuracies.of_sets`."""
EXCEPTIONS = {
    ("open_instruct/config/grpo_config.py", "given"): "a field of the options; options.json has it under this name",
    ("open_instruct/environments/", "done"): "what environments return beside the reward, as in Gymnasium",
    ("open_instruct/environments/", "left"): "the operand beside `right`",
    ("open_instruct/registry.py", "what"): "an argument of a class that docs/reference/api.md describes",
    ("open_instruct/verifiers/", "left"): "the operand or side beside `right`",
}
"""Why a name is right nevertheless, by file or folder, and name."""


def bindings(tree: ast.AST) -> Iterator[tuple[int, str, bool]]:
    """Line and name of each variable, argument and field, and whether it is a field."""
    fields = {
        statement.target
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for statement in node.body
        if isinstance(statement, ast.AnnAssign)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=str(name), ctx=ast.Store()) | ast.arg(arg=str(name)) | ast.alias(asname=str(name)):
                yield node.lineno, name, node in fields
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield node.lineno, name, False
            case ast.MatchMapping(rest=str(name)):
                yield node.lineno, name, False


def poor_names(source: str) -> Iterator[tuple[int, str]]:
    """Line and name of each variable, argument and field that is not named by a noun."""
    for line, name, is_field in sorted(bindings(ast.parse(source))):
        if WORDS.fullmatch(name) or (PHRASES.fullmatch(name) and not is_field):
            yield line, name


def test_variables_are_named_by_nouns() -> None:
    mistakes = []
    used = set()
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        place = path.relative_to(ROOT).as_posix()
        for line, name in poor_names(path.read_text()):
            exceptions = {entry for entry in EXCEPTIONS if place.startswith(entry[0]) and name == entry[1]}
            used |= exceptions
            mistakes += [] if exceptions else [f"{place}:{line}: {name}"]
    assert mistakes == []
    assert used == EXCEPTIONS.keys(), "an exception is no longer needed"


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("found = 1", ["found"]),
        ("_found: int = 1", ["_found"]),
        ("held += 1", ["held"]),
        ("rows, (*others, last) = value", ["others"]),
        ("def name(asked, *, what=1, **given): ...", ["asked", "given", "what"]),
        ("sort(key=lambda one: one.size)", ["one"]),
        ("sizes = [one.size for one in samples]", ["one"]),
        ("for _one in samples: ...", ["_one"]),
        ("if (told := tell()): ...", ["told"]),
        ("with lock as held: ...", ["held"]),
        ("try: ...\nexcept OSError as this: ...", ["this"]),
        ("match value:\n    case [which, *those]: ...", ["those", "which"]),
        ("import numpy as it", ["it"]),
        ("of_prompt, the_row = value", ["of_prompt", "the_row"]),
        ("class Sample:\n    taken: int\n    of_prompt: int\n    def look(self, of_row): ...", ["of_row", "taken"]),
        ("FOUND, iteration, offset, theme, tone, item, needs_one = value", []),
        ("result = found(one=held.kept)", []),
        ("'found = 1'  # held = 1", []),
    ],
)
def test_every_kind_of_binding_is_looked_at(source: str, names: list[str]) -> None:
    assert sorted(name for _, name in poor_names(source)) == names


def test_a_mistake_has_its_line() -> None:
    assert list(poor_names("rows = 1\n\nfor row in rows:\n    kept = row")) == [(4, "kept")]
