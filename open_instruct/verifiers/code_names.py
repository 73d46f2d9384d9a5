"""Which names a test takes from the program, and which from Python.

A program may give its functions any name, so it could define `abs` or a class `math`, and then `assert abs(f(2) - 1.4) < 1e-4`
would ask the program whether it is right. So only the test decides, and not what the program defines:

    ordinary names            `f`            from the program
    builtins and tools        `abs`, `math`  Python's own, in a test that uses an ordinary name
    a test without ordinary names            the one builtin or tool under test from the program: `assert sum(10, 15) == 6`
"""

import ast
import builtins
import functools
import importlib
import symtable
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

OFTEN_IMPORTED = (
    "bisect collections copy datetime decimal fractions functools heapq itertools json math operator random re statistics "
    "string typing numpy"
)
"""Modules that programs often need, separated by spaces."""
_MODULES = {name: name for name in f"{OFTEN_IMPORTED} io os sys time unittest".split()} | {"np": "numpy"}
"""Modules that a test may use without an import, as in `math.isclose`."""
_TOOLS = {
    name: module
    for module, names in {
        "collections": "Counter OrderedDict defaultdict deque",
        "copy": "deepcopy",
        "decimal": "Decimal",
        "fractions": "Fraction",
        "math": "inf isclose nan",
        "numpy": "allclose array_equal",
        "numpy.testing": "assert_allclose",
        "typing": "Any Callable Dict Iterable List Optional Sequence Tuple Union",
    }.items()
    for name in names.split()
}
"""Names that tests apply to expected values, with their modules. These names need no import either."""


@dataclass(frozen=True)
class Names:
    """The names that a test gets."""

    own: dict[str, Any]
    """Names and values from Python's modules."""
    of_program: frozenset[str]


def names_given(test: str, offered: Collection[str], program: str) -> Names:
    """The names that a test gets from Python, and from those that a program offers.

    Raises:
        NameError: the test names no function of the program, or it is not clear which function it tests.
    """
    tree, imported = ast.parse(test), _imported(program)
    used = _used(test)
    protected = {name for name in used if _is_protected(name, tree)}
    if used and protected == used:
        tested = _tested(tree, used)
        if tested not in offered and tested not in imported:
            raise NameError(f"name {tested!r} is not defined")
        own = dict(_own(used if tested not in offered else used - {tested}, imported))
        return Names(own, frozenset({tested} & set(offered)))
    own = dict(_own(protected, imported)) | {name: imported[name] for name in used - protected if name in imported}
    hidden = own.keys() | vars(builtins).keys() | _TOOLS.keys()
    return Names(own, frozenset(name for name in offered if name.isidentifier() and name not in hidden))


def _used(test: str) -> set[str]:
    """Names that a test reads and does not bind itself."""
    return names_read_only(symtable.symtable(test, "test", "exec"))


def names_read_only(top: symtable.SymbolTable) -> set[str]:
    """Names that a module reads and does not bind itself."""
    bound = {one.get_name() for one in top.get_symbols() if one.is_assigned() or one.is_imported()}
    inside = {one.get_name() for table in _below(top) for one in table.get_symbols() if one.is_global()}
    read = {one.get_name() for one in top.get_symbols() if one.is_referenced()} | inside
    return {name for name in read - bound if not name.startswith("__")}


def _below(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    for child in table.get_children():
        yield child
        yield from _below(child)


def _is_protected(name: str, tree: ast.AST) -> bool:
    if hasattr(builtins, name) or name in _TOOLS:
        return True
    return name in _MODULES and _occurrences(tree, name) == sum(
        isinstance(node, ast.Attribute) and _is_name(node.value, name) for node in ast.walk(tree)
    )  # used only as in `math.…`, because `copy` may also be a function of the program


def _tested(tree: ast.AST, used: set[str]) -> str:
    """The function that a test without ordinary names tests. It is the only name, or the only name that is called with nothing
    but literals, so that neither another function's result nor the expected value reaches it."""
    candidates = [name for name in used if len(used) == 1 or _takes_literals(tree, name)]
    if len(candidates) != 1:
        raise NameError(f"the test may mean the program's or Python's {', '.join(sorted(used))}")
    return candidates[0]


def _takes_literals(tree: ast.AST, name: str) -> bool:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _is_name(node.func, name)]
    given: list[ast.AST] = [one for call in calls for one in (*call.args, *call.keywords)]
    has_names = any(isinstance(node, ast.Name) for one in given for node in ast.walk(one))
    return bool(calls) and not has_names and len(calls) == _occurrences(tree, name)


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _occurrences(tree: ast.AST, name: str) -> int:
    return sum(_is_name(node, name) for node in ast.walk(tree))


def _own(names: Iterable[str], imported: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in names:
        if hasattr(builtins, name):
            continue
        if name in imported:
            yield name, imported[name]
        elif name in _TOOLS:
            yield name, getattr(importlib.import_module(_TOOLS[name]), name)
        elif name in _MODULES:
            yield name, importlib.import_module(_MODULES[name])


@functools.lru_cache(1)
def _imported(program: str) -> dict[str, Any]:
    """The names that the program itself imports from well-known modules, because tests are often written for programs that
    `import math`. A function must keep its name: `from operator import truth as close` gives nothing."""
    try:
        tree, top = ast.parse(program), symtable.symtable(program, "program", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    names: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.Import):
            known = [one for one in node.names if one.name in OFTEN_IMPORTED.split()]
            modules = {one.asname or one.name: one.name for one in known}
            names |= {
                name: importlib.import_module(one) for name, one in modules.items() if _MODULES.get(name, one) == one
            }
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module in OFTEN_IMPORTED.split():
            public = _public(importlib.import_module(node.module))
            kept = [one.name for one in node.names if one.asname in (None, one.name)]
            names |= public if "*" in kept else {name: public[name] for name in kept if name in public}
    bound_again = {one.get_name() for one in top.get_symbols() if one.is_assigned()}
    return {name: value for name, value in names.items() if name not in bound_again}


def _public(module: ModuleType) -> dict[str, Any]:
    listed = getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")])
    values = {name: getattr(module, name, None) for name in listed}
    return {name: value for name, value in values.items() if value is not None and not isinstance(value, ModuleType)}
