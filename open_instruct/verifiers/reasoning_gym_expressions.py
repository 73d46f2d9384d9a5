"""Reads expressions that a model wrote, without running them: a strict grammar, and limits on the size of every result."""

import ast
import math
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

MAX_EXPRESSION = 2000
"""Longest mathematical expression, in characters."""
MAX_DIGITS = 30
"""Most digits of one number in an expression."""
MAX_POWER = 1000
"""Largest exponent on a number. On a term with a variable the largest exponent is `MAX_DEGREE`."""
MAX_DEGREE = 64
MAX_BITS = 4096
"""Most bits of a number that an expression evaluates to."""
_CIRCULAR = ("sin", "cos", "tan", "sec", "csc", "cot")
_SPECIAL = ("exp", "log", "ln", "sqrt", "cbrt", "Abs", "sign", "erf", "erfi", "Ei", "li", "Si", "Ci", "Shi", "Chi")
FUNCTIONS = frozenset(_SPECIAL) | {f"{arc}{name}{h}" for name in _CIRCULAR for arc in ("", "a") for h in ("", "h")}
"""Functions that an expression may call, with one or two arguments."""
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.UAdd, ast.USub)


def parse_expression(text: str, local_dict: dict[str, Any] | None = None) -> Any:
    """`sympy.parse_expr` of an expression that `check_expression` accepts.

    Raises:
        ValueError: `check_expression` refuses the expression.
    """
    from sympy.parsing.sympy_parser import parse_expr

    return parse_expr(check_expression(text, names=frozenset(local_dict or ())), local_dict=local_dict)


def check_expression(text: str, *, names: frozenset[str] = frozenset()) -> str:
    """The expression without spaces around it, if it is allowed.

    An allowed expression consists of numbers, `names`, single letters, `pi`, calls of `FUNCTIONS`, and `+ - * / **` with
    parentheses. Its numbers stay within `MAX_BITS` bits, and its degree within `MAX_DEGREE`.

    Raises:
        ValueError: the expression is not allowed.
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
    """(bits, degree): an upper bound on the bits of the numbers that a node evaluates to, and its degree in its variables."""
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
    """Value of an exponent that consists only of literals, without powers: `2`, `-1/2`, `(3)`; None for any other exponent."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return float(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = _number(operand)
            return None if value is None else -value
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _number(operand)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div() as op, right=right):
            first, second = _number(left), _number(right)
            if first is None or second is None or (isinstance(op, ast.Div) and second == 0):
                return None
            apply = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
            return apply[type(op)](first, second)
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
    """Value of an expression such as `(0x1f & 0xab) - 3`: integers, `+ - * & | ^ << >> ~` and parentheses.

    Raises:
        ValueError: the text holds anything else, or is too long, or a value becomes too large.
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
            first, second = _integer(left), _integer(right)
            if isinstance(op, ast.LShift | ast.RShift) and not 0 <= second <= MAX_BITS:
                _refuse(node)
            result = _INTEGER_OPERATORS[type(op)](first, second)
            return result if result.bit_length() <= MAX_BITS else _refuse(node)
    return _refuse(node)


# --- exact arithmetic -------------------------------------------------------------------------------------------------

_FRACTION_OPERATORS: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def exact_value(text: str) -> tuple[Fraction, list[int]]:
    """Exact value of an expression such as `(8 - 2) * 4 / 1`, and the integers in it: [8, 2, 4, 1].

    Raises:
        ValueError: the text holds anything but integers, `+ - * /`, parentheses and spaces, is too long, or divides by zero.
    """
    if len(text) > MAX_EXPRESSION or not re.fullmatch(r"[0-9+*/()\s-]+", text):
        raise ValueError(f"no arithmetic expression: {text[:80]!r}")
    numbers: list[int] = []
    try:
        return _exact(ast.parse(text.strip(), mode="eval").body, numbers), numbers
    except (SyntaxError, RecursionError, MemoryError, ZeroDivisionError) as err:
        raise ValueError(f"no arithmetic expression: {text[:80]!r}") from err


def _exact(node: ast.AST, numbers: list[int]) -> Fraction:
    match node:
        case ast.Constant(value=int() as value):
            numbers.append(value)
            return Fraction(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_exact(operand, numbers)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _exact(operand, numbers)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _FRACTION_OPERATORS:
            return _FRACTION_OPERATORS[type(op)](_exact(left, numbers), _exact(right, numbers))
    return _refuse(node)
