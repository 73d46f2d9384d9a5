"""Chooses the program among several blocks of Python in a response.

The program is the last block that can be parsed, is more than values and names, unlike sample output, and does what the program
is run for: a script reads or writes, other programs define functions. If no block does it, the last one counts. Names that the
block needs may come from earlier blocks. If it defines no function and only uses those of earlier blocks, as a demonstration
does, the program is the definitions.

    def f …  |  print(f(2))          ─►  def f …
    def f …  |  def g: … f …         ─►  def f …, def g …
    print(3) |  3                    ─►  print(3)
    print(3) |  result = 3           ─►  print(3)
"""

import ast
import builtins
import re
import symtable
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from open_instruct.verifiers.code_names import names_read_only
from open_instruct.verifiers.code_programs import usual_names

MOST_PARSED = 30_000
"""Most characters of blocks that are parsed, from the last block on. Parsing them takes half a second at worst."""
FILE_NAME = "program"
LONG_NUMBER = re.compile(r"(?<![\w.])[0-9][0-9_]{4000,}(?![\w.])")
"""A number in a program that Python would refuse to parse in this process, because converting its digits takes long."""
_SPEAKING = ("print", "input", "open", "stdin", "stdout")

warnings.filterwarnings("ignore", category=SyntaxWarning, module=f"^{FILE_NAME}$")  # about what a model wrote


@dataclass(frozen=True)
class _Part:
    """A block that is a program."""

    code: str
    functions: frozenset[str]
    """Functions and classes that the block defines."""
    binds: frozenset[str]
    """All names that the block defines, imports or assigns."""
    needs: frozenset[str]
    """Names that the block reads and does not bind."""
    acts: bool
    """Whether the block reads or writes, or calls its own functions, when it is run."""
    is_output: bool
    """Whether the block only gives names to values, as sample output may (`result = 3`). Other blocks may need the names."""

    @property
    def gives(self) -> frozenset[str]:
        """Names that other blocks may need from this one. Names that every program has are among them only if the block defines
        them as functions."""
        return self.functions | {
            name for name in self.binds if name not in usual_names() and not hasattr(builtins, name)
        }


def choose_program(blocks: Sequence[str], *, is_script: bool) -> str | None:
    """The program in these blocks, in order; None if none of them is a program.

    Args:
        is_script: whether the program is run for what it writes. Then a block that only uses functions belongs to the program,
            unless the definitions already write something themselves.
    """
    parts = [part for block in _newest(blocks) if (part := _part(block)) is not None][::-1]
    position = _position_of_program(parts, is_script=is_script)
    if position is None:
        return None
    earlier, last = parts[:position], parts[position]
    is_demonstration = _uses_functions(last, earlier)
    program = _needed(last, earlier, with_further_functions=is_demonstration)
    if not is_demonstration or (is_script and not any(part.acts for part in program)):
        program.append(last)
    return "\n".join(part.code for part in program)


def _position_of_program(parts: Sequence[_Part], *, is_script: bool) -> int | None:
    """The position of the block that is run, or that demonstrates the program; None if all blocks are output."""
    candidates = [position for position, part in enumerate(parts) if not part.is_output]
    matches = [
        position
        for position in candidates
        if (parts[position].acts if is_script else parts[position].functions)
        or _uses_functions(parts[position], parts[:position])
    ]
    return max(matches or candidates, default=None)


def _uses_functions(part: _Part, earlier: Sequence[_Part]) -> bool:
    """Whether a block uses functions of earlier blocks and defines none."""
    return not part.functions and any(part.needs & block.functions for block in earlier)


def without_long_numbers(code: str) -> str:
    """Code with a short number in place of numbers of thousands of digits, for a look at its syntax."""
    return LONG_NUMBER.sub("9", code)


def _newest(blocks: Sequence[str]) -> Iterator[str]:
    """The blocks from the last on, as many as may be parsed."""
    num_letters = 0
    for block in reversed(blocks):
        num_letters += len(block)
        if num_letters > MOST_PARSED:
            return
        yield block


def _part(block: str) -> _Part | None:
    """The block, if it is a program."""
    code = without_long_numbers(block)
    try:
        tree, top = ast.parse(code, FILE_NAME), symtable.symtable(code, FILE_NAME, "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if all(map(_is_output, tree.body)):
        return None
    functions = frozenset(_functions(tree))
    binds = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    acts = any(name in functions or name in _SPEAKING for name in _names_at_once(tree))
    is_output = all(_is_output(statement) or _names_a_value(statement) for statement in tree.body)
    return _Part(block, functions, frozenset(binds), frozenset(names_read_only(top)), acts, is_output)


def _is_output(statement: ast.stmt) -> bool:
    """Whether a statement does nothing, so that it is probably sample output: `3`, `True`, `[1, 2]`, `Total: 3`."""
    if isinstance(statement, ast.AnnAssign):
        return statement.value is None
    if not isinstance(statement, ast.Expr):
        return isinstance(statement, ast.Pass)
    return not any(isinstance(node, ast.Call | ast.Await | ast.NamedExpr) for node in ast.walk(statement))


def _names_a_value(statement: ast.stmt) -> bool:
    """Whether a statement only gives a name to a value that is written out: `result = [1, 2]`, `x: int = 3`."""
    if not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is None:
        return False
    is_computed = (ast.Name, ast.Call, ast.Await, ast.NamedExpr, ast.Lambda)
    return not any(isinstance(node, is_computed) for node in ast.walk(statement.value))


def _functions(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def _names_at_once(tree: ast.Module) -> Iterator[str]:
    """Names and attributes that are used when a block is run, and not only when its functions are called."""
    parents: list[ast.AST] = [tree]
    while parents:
        for node in ast.iter_child_nodes(parents.pop()):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
                continue
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                yield node.id
            elif isinstance(node, ast.Attribute):
                yield node.attr
            parents.append(node)


def _needed(last: _Part, earlier: Sequence[_Part], *, with_further_functions: bool) -> list[_Part]:
    """The earlier blocks that `last` needs, in order. A name comes from the last block that gives it.

    Args:
        with_further_functions: whether blocks that only define other functions are kept as well.
    """
    parts: list[_Part] = []
    needs, names = set(last.needs), set(last.binds)
    for part in reversed(earlier):
        is_needed = needs & (part.gives - names)
        defines_more = with_further_functions and not part.acts and part.functions - names
        if is_needed or defines_more:
            parts.insert(0, part)
            names |= part.binds
            needs |= part.needs
    return parts
