"""What a reader has to hold in mind at once stays small."""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "open_instruct"
MODULE_LINES = 500
CLASS_LINES = 300
CLASS_METHODS = 25
FUNCTION_LINES = 60


def too_large(path: Path) -> Iterator[str]:
    """Names what is larger than the limits in a module."""
    source = path.read_text()
    if (num_lines := len(source.splitlines())) > MODULE_LINES:
        yield f"{path.name}: {num_lines} lines"
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        num_lines = (node.end_lineno or 0) - node.lineno + 1
        is_class = isinstance(node, ast.ClassDef)
        if num_lines > (CLASS_LINES if is_class else FUNCTION_LINES):
            yield f"{path.name}: {node.name} has {num_lines} lines"
        num_methods = sum(isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) for part in node.body)
        if is_class and num_methods > CLASS_METHODS:
            yield f"{path.name}: {node.name} has {num_methods} methods"


def test_modules_classes_and_functions_are_within_their_limits() -> None:
    assert [mistake for path in sorted(PACKAGE.rglob("*.py")) for mistake in too_large(path)] == []


def test_what_is_too_large_is_named(tmp_path: Path) -> None:
    methods = "".join(f"    def method_{i}(self): pass\n" for i in range(CLASS_METHODS + 1))
    body = "    pass\n" * FUNCTION_LINES
    path = tmp_path / "large.py"
    path.write_text(f"class Wide:\n{methods}def long():\n{body}" + "\n" * MODULE_LINES)
    assert [name.split()[1] for name in too_large(path)][1:] == ["Wide", "long"]
