"""Expressions that a model wrote, read without running them: only what a strict grammar allows, and only what stays small."""

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


# --- exact arithmetic -------------------------------------------------------------------------------------------------

_FRACTION_OPERATORS: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def exact_value(text: str) -> tuple[Fraction, list[int]]:
    """What `(8 - 2) * 4 / 1` comes to, and the integers in it: [8, 2, 4, 1].

    Raises:
        ValueError: it holds anything but integers, `+ - * /`, parentheses and spaces, is too long, or divides by zero.
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
