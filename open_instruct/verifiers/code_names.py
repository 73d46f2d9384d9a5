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

    values: dict[str, Any]
    """Names and values from Python's modules."""
    exports: frozenset[str]


def names_given(test: str, exports: Collection[str], program: str) -> Names:
    """The names that a test gets from Python, and from those that a program offers.

    Raises:
        NameError: the test names no function of the program, or it is not clear which function it tests.
    """
    tree, imports = ast.parse(test), _imported(program)
    names = _used(test)
    python_names = {name for name in names if _is_protected(name, tree)}
    if names and python_names == names:
        function = _tested(tree, names)
        if function not in exports and function not in imports:
            raise NameError(f"name {function!r} is not defined")
        values = dict(_own(names if function not in exports else names - {function}, imports))
        return Names(values, frozenset({function} & set(exports)))
    values = dict(_own(python_names, imports)) | {
        name: imports[name] for name in names - python_names if name in imports
    }
    exclusions = values.keys() | vars(builtins).keys() | _TOOLS.keys()
    return Names(values, frozenset(name for name in exports if name.isidentifier() and name not in exclusions))


def _used(test: str) -> set[str]:
    """Names that a test reads and does not bind itself."""
    return names_read_only(symtable.symtable(test, "test", "exec"))


def names_read_only(top: symtable.SymbolTable) -> set[str]:
    """Names that a module reads and does not bind itself."""
    bindings = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    global_names = {symbol.get_name() for table in _below(top) for symbol in table.get_symbols() if symbol.is_global()}
    references = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_referenced()} | global_names
    return {name for name in references - bindings if not name.startswith("__")}


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


def _tested(tree: ast.AST, names: set[str]) -> str:
    """The function that a test without ordinary names tests. It is the only name, or the only name that is called with nothing
    but literals, so that neither another function's result nor the expected value reaches it."""
    candidates = [name for name in names if len(names) == 1 or _takes_literals(tree, name)]
    if len(candidates) != 1:
        raise NameError(f"the test may mean the program's or Python's {', '.join(sorted(names))}")
    return candidates[0]


def _takes_literals(tree: ast.AST, name: str) -> bool:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _is_name(node.func, name)]
    arguments: list[ast.AST] = [argument for call in calls for argument in (*call.args, *call.keywords)]
    has_names = any(isinstance(node, ast.Name) for argument in arguments for node in ast.walk(argument))
    return bool(calls) and not has_names and len(calls) == _occurrences(tree, name)


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _occurrences(tree: ast.AST, name: str) -> int:
    return sum(_is_name(node, name) for node in ast.walk(tree))


def _own(names: Iterable[str], imports: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in names:
        if hasattr(builtins, name):
            continue
        if name in imports:
            yield name, imports[name]
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
            aliases = [alias for alias in node.names if alias.name in OFTEN_IMPORTED.split()]
            modules = {alias.asname or alias.name: alias.name for alias in aliases}
            names |= {
                name: importlib.import_module(module)
                for name, module in modules.items()
                if _MODULES.get(name, module) == module
            }
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module in OFTEN_IMPORTED.split():
            members = _public(importlib.import_module(node.module))
            imports = [alias.name for alias in node.names if alias.asname in (None, alias.name)]
            names |= members if "*" in imports else {name: members[name] for name in imports if name in members}
    assignments = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned()}
    return {name: value for name, value in names.items() if name not in assignments}


def _public(module: ModuleType) -> dict[str, Any]:
    names = getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")])
    values = {name: getattr(module, name, None) for name in names}
    return {name: value for name, value in values.items() if value is not None and not isinstance(value, ModuleType)}
