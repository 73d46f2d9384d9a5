"""The map from the source documents to this project points at things that exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
TARGETS = re.findall(r"`([\w/.]+\.py):([\w.]+)`", (ROOT / "docs" / "reference" / "source_systems.md").read_text())


def defined_names(path: Path) -> set[str]:
    """Functions, classes, methods (`Class.method`) and variables at the top of a module."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, FUNCTIONS | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, FUNCTIONS)}
        if isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def test_there_are_targets() -> None:
    assert len(TARGETS) >= 15


@pytest.mark.parametrize(("path", "name"), TARGETS)
def test_target_exists(path: str, name: str) -> None:
    assert name in defined_names(ROOT / path)
