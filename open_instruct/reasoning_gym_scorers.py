"""reasoning-gym's scorers, where the library's own run what a model wrote, or can be pleased with one constant.

`mend(task, dataset)` gives the scorer of a task. Most are the library's. Of reasoning-gym 0.1.25 these are not:

    string_insertion, spiral_matrix, binary_matrix, n_queens    `eval(answer)`; here `ast.literal_eval`
    number_sorting, bitwise_arithmetic                          `eval` of the ground truth; here literals, and integer arithmetic
    countdown, puzzle24, simple_integration,                    `sympy.parse_expr(answer)`, which is `eval` with every builtin;
    intermediate_integration, polynomial_multiplication         here behind `check_expression`
    game_of_life_halting                                        any text was right where the answer is True
    coin_flip, complex_arithmetic                               `0` and `nan` were right on every row
    chain_sum                                                   `4_2`, `4,2` and `\u0664\u0662` were right where the answer is 42

The first three lines keep the library's rules and partial credit; only what its `eval` may see is less. chain_sum keeps them for
numbers as they are written.
"""

import ast
import math
import operator
import re
import sys
from collections.abc import Callable
from typing import Any, Protocol

MAX_ANSWER = 4096
"""Longest answer that is looked at, in characters, unless the right one is over a quarter of it: some scorers are quadratic."""
MAX_EXPRESSION = 2000
"""Longest mathematical expression, in characters."""
MAX_DIGITS = 30
"""Of one number in an expression."""
MAX_POWER = 1000
"""Largest exponent on a number; on anything with a variable `MAX_DEGREE`."""
MAX_DEGREE = 64
MAX_BITS = 4096
"""Of a number that an expression comes to."""
_CIRCULAR = ("sin", "cos", "tan", "sec", "csc", "cot")
_SPECIAL = ("exp", "log", "ln", "sqrt", "cbrt", "Abs", "sign", "erf", "erfi", "Ei", "li", "Si", "Ci", "Shi", "Chi")
FUNCTIONS = frozenset(_SPECIAL) | {f"{arc}{name}{h}" for name in _CIRCULAR for arc in ("", "a") for h in ("", "h")}
"""That an expression may call, with one or two arguments."""
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.UAdd, ast.USub)


class Scorer(Protocol):
    """What scores the answers to one task."""

    def score_answer(self, answer: str, entry: dict) -> float: ...


def mend(task: str, dataset: Any) -> Scorer:
    """The scorer of `task`, of which `dataset` is one in reasoning-gym; what it is given is neither run nor endless."""
    module: Any = sys.modules[type(dataset).__module__]
    if task in _EVALUATED:
        module.eval = _EVALUATED[task]  # goes before the builtin of this name, in this module alone
    if task in ("countdown", "puzzle24"):
        module.parse_expr = parse_expression
    elif task in ("simple_integration", "intermediate_integration"):
        module.sympy = _Guarded(module.sympy)
    elif task == "polynomial_multiplication":
        module.sp = _Guarded(module.sp)
    return _Bounded(_REPLACED.get(task, dataset.score_answer))


class _Bounded:
    """A scorer that looks at no answer that is much longer than the right one."""

    def __init__(self, score: Callable[[str, dict], float]) -> None:
        self._score = score

    def score_answer(self, answer: str, entry: dict) -> float:
        if len(answer) > max(MAX_ANSWER, 4 * len(str(entry["answer"]))):
            return 0.0
        return float(self._score(answer, entry))


class _Guarded:
    """sympy, whose `parse_expr` looks before it evaluates."""

    def __init__(self, sympy: Any) -> None:
        self._sympy = sympy._sympy if isinstance(sympy, _Guarded) else sympy

    def __getattr__(self, name: str) -> Any:
        return parse_expression if name == "parse_expr" else getattr(self._sympy, name)


# --- expressions ------------------------------------------------------------------------------------------------------


def parse_expression(text: str, local_dict: dict[str, Any] | None = None) -> Any:
    """`sympy.parse_expr` of an expression that `check_expression` lets through.

    Raises:
        ValueError: it does not.
    """
    from sympy.parsing.sympy_parser import parse_expr

    return parse_expr(check_expression(text, names=frozenset(local_dict or ())), local_dict=local_dict)


def check_expression(text: str, *, names: frozenset[str] = frozenset()) -> str:
    """The expression as it came, but for spaces around it.

    It consists of numbers, `names`, single letters, `pi`, calls of `FUNCTIONS`, and `+ - * / **` with parentheses; and it does
    not come to a number of more than `MAX_BITS` bits, or to a degree of more than `MAX_DEGREE`.

    Raises:
        ValueError: it is anything else.
    """
    text = text.strip()
    if len(text) > MAX_EXPRESSION:
        raise ValueError(f"an expression of {len(text)} characters")
    if digits := re.search(rf"[0-9]{{{MAX_DIGITS + 1}}}", text):
        raise ValueError(f"a number of over {MAX_DIGITS} digits: {digits[0]}…")
    try:
        tree = ast.parse(text, mode="eval").body
        _size(tree, names)
    except (SyntaxError, RecursionError, MemoryError) as err:
        raise ValueError(f"no expression: {text[:80]!r}") from err
    return text


def _size(node: ast.AST, names: frozenset[str]) -> tuple[float, int]:
    """(bits, degree): how many bits the numbers in a node come to at most, and its degree in its variables."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return math.log2(max(abs(value), 2)) if math.isfinite(value) else _refuse(node), 0
        case ast.Name(id=name) if name in names or name == "pi" or (len(name) == 1 and name.isascii()):
            return 1.0, 1
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if (
            name in FUNCTIONS and 1 <= len(arguments) <= 2
        ):
            sizes = [_size(argument, names) for argument in arguments]
            if any(isinstance(part, ast.Constant) for part in arguments):  # exp(10**9) is a number like any other
                _check(max(bits for bits, _ in sizes) * 2, 0)
            return max(bits for bits, _ in sizes), max(degree for _, degree in sizes) + 1
        case ast.UnaryOp(op=ast.UAdd() | ast.USub(), operand=operand):
            return _size(operand, names)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_size(left, names), right, names)
        case ast.BinOp(left=left, op=op, right=right) if isinstance(op, _OPERATORS):
            (bits, degree), (other_bits, other_degree) = _size(left, names), _size(right, names)
            return _check(
                bits + other_bits, degree + other_degree if isinstance(op, ast.Mult) else max(degree, other_degree)
            )
    return _refuse(node)


def _power(base: tuple[float, int], exponent: ast.AST, names: frozenset[str]) -> tuple[float, int]:
    bits, degree = base
    value = _number(exponent)
    if value is None:  # something with a variable in it, such as 2**x
        exponent_bits, exponent_degree = _size(exponent, names)
        if exponent_degree == 0:
            _refuse(exponent)
        return _check(bits + exponent_bits, degree + exponent_degree + 1)
    if abs(value) > (MAX_POWER if degree == 0 else MAX_DEGREE):
        _refuse(exponent)
    return _check(bits * max(abs(value), 1), math.ceil(degree * max(abs(value), 1)))


def _number(node: ast.AST) -> float | None:
    """What an exponent of literals alone comes to, such as `2`, `-1/2`, `(3)`; no powers in it."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return float(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = _number(operand)
            return None if value is None else -value
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _number(operand)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div() as op, right=right):
            one, other = _number(left), _number(right)
            if one is None or other is None or (isinstance(op, ast.Div) and other == 0):
                return None
            apply = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
            return apply[type(op)](one, other)
    return None


def _check(bits: float, degree: int) -> tuple[float, int]:
    if bits > MAX_BITS or degree > MAX_DEGREE:
        raise ValueError("an expression that comes to too much")
    return bits, degree


def _refuse(node: ast.AST) -> Any:
    raise ValueError(f"not allowed in an expression: {type(node).__name__}")


# --- integers ---------------------------------------------------------------------------------------------------------

_INTEGER_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
}


def integer_value(text: str) -> int:
    """What `(0x1f & 0xab) - 3` comes to: integers, `+ - * & | ^ << >> ~` and parentheses.

    Raises:
        ValueError: it is anything else, or too large.
    """
    if len(text) > MAX_EXPRESSION:
        raise ValueError(f"an expression of {len(text)} characters")
    try:
        return _integer(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as err:
        raise ValueError(f"no expression: {text[:80]!r}") from err


def _integer(node: ast.AST) -> int:
    match node:
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_integer(operand)
        case ast.UnaryOp(op=ast.Invert(), operand=operand):
            return ~_integer(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _INTEGER_OPERATORS:
            one, other = _integer(left), _integer(right)
            if isinstance(op, ast.LShift | ast.RShift) and not 0 <= other <= MAX_BITS:
                _refuse(node)
            result = _INTEGER_OPERATORS[type(op)](one, other)
            return result if result.bit_length() <= MAX_BITS else _refuse(node)
    return _refuse(node)


_EVALUATED: dict[str, Callable[[str], Any]] = {
    "string_insertion": ast.literal_eval,
    "spiral_matrix": ast.literal_eval,
    "binary_matrix": ast.literal_eval,
    "n_queens": ast.literal_eval,
    "number_sorting": ast.literal_eval,
    "bitwise_arithmetic": integer_value,
}
"""What stands in for `eval` in the modules of these tasks."""
EXECUTING_TASKS = frozenset(
    (
        *_EVALUATED,
        "countdown",
        "puzzle24",
        "simple_integration",
        "intermediate_integration",
        "polynomial_multiplication",
    )
)
"""Tasks whose scorers evaluate text. Beside the checks here they need the jail: see `sandbox.missing`."""


# --- scorers of our own -----------------------------------------------------------------------------------------------

_DECIMAL = re.compile(r"[-+]?(?:[0-9]{1,30}(?:\.[0-9]{0,30})?|\.[0-9]{1,30})(?:[eE][-+]?[0-9]{1,3})?")


def _score_halting(answer: str, entry: dict) -> float:
    """1 for the right one of True and False; the library takes `bool(answer)`, which is True for any text."""
    return float(answer.strip().lower() == str(entry["answer"]).strip().lower())


def _score_coin_flip(answer: str, entry: dict, tolerance: float = 1e-4) -> float:
    """1 within the library's tolerance, else the share of digits that agree, of the longer of both (it takes the shorter: 0)."""
    probability, right = _ratio(answer), _ratio(entry["answer"])
    if probability is None or right is None:
        return 0.0
    if abs(probability - right) <= tolerance:
        return 1.0
    one, other = f"{probability:.10g}", f"{right:.10g}"
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return same / max(len(one), len(other))


def _ratio(text: str) -> float | None:
    """A decimal number, or two with a slash between them."""
    top, slash, bottom = text.replace(",", "").strip().partition("/")
    if not _DECIMAL.fullmatch(top.strip()) or (slash and not _DECIMAL.fullmatch(bottom.strip())):
        return None
    denominator = float(bottom) if slash else 1.0
    return float(top) / denominator if denominator else None


_PLAIN = re.compile(r"[-+]?(?:[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)(?:\.[0-9]*)?")


def _score_sum(answer: str, entry: dict) -> float:
    """The library's, which gives partial credit too; no full one to a text that merely Python reads as the number."""
    from reasoning_gym.utils import compute_decimal_reward

    score = float(compute_decimal_reward(answer, oracle_answer=entry["answer"], strip_commas=True))
    return score if score < 1.0 or _PLAIN.fullmatch(answer.strip()) else 0.0


def _score_complex(answer: str, entry: dict) -> float:
    """The library's exp(-distance); 0 for what is not finite, which it takes for the right answer."""
    from reasoning_gym.algebra.complex_arithmetic import ComplexArithmeticDataset

    try:
        distance = abs(ComplexArithmeticDataset.parse_string_to_complex(answer) - complex(*entry["metadata"]["result"]))
    except (ValueError, TypeError, OverflowError):
        return 0.0
    return math.exp(-distance) if math.isfinite(distance) else 0.0


_REPLACED: dict[str, Callable[[str, dict], float]] = {
    "chain_sum": _score_sum,
    "game_of_life_halting": _score_halting,
    "coin_flip": _score_coin_flip,
    "complex_arithmetic": _score_complex,
}
