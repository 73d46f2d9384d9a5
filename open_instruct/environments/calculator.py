"""The calculator: arithmetic without Python."""

import ast
import math
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from open_instruct.environments.base import ENVIRONMENTS, Schema, ToolEnvironment, ToolError, schema

MOST_CHARACTERS = 1000
LARGEST = 10**100
LONGEST_POWER = 200
"""Digits of a power that is computed exactly. A longer one is computed to 16 digits."""
TOO_LARGE = "Error: the numbers become too large"
Number = int | float | Fraction

_TWO: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_ONE: dict[type[ast.AST], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "sqrt": math.sqrt,
    "abs": abs,
    "round": lambda number, digits=None: round(number, _few(digits)),
    "floor": math.floor,
    "ceil": math.ceil,
    "min": min,
    "max": max,
    "gcd": math.gcd,
    "factorial": lambda number: math.factorial(number) if number <= 70 else _too_large(),
    "exp": math.exp,
    "log": math.log,
    "sin": math.sin,
    "cos": math.cos,
    "tan": math.tan,
}
_CONSTANTS = {"pi": math.pi, "e": math.e}


def calculate(expression: str) -> str:
    """The value of an arithmetic expression: exact for whole numbers and fractions, else to twelve digits.

    Raises:
        ToolError: it is no arithmetic, or its numbers become too large.
    """
    text = (
        expression.replace("×", "*").replace("÷", "/").replace("−", "-").replace("^", "**").strip().rstrip("=").strip()
    )
    if len(text) > MOST_CHARACTERS:
        raise ToolError(f"Error: an expression may have {MOST_CHARACTERS} characters")
    try:
        return shown_number(_value(ast.parse(text, mode="eval").body))
    except ToolError:
        raise
    except ZeroDivisionError as error:
        raise ToolError("Error: division by zero") from error
    except OverflowError as error:
        raise ToolError(TOO_LARGE) from error
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise ToolError(f"Error: {expression.strip()[:80]!r} is not an arithmetic expression") from error


def shown_number(value: Number) -> str:
    """`3`, `2.5`, or twelve digits."""
    if isinstance(value, Fraction):
        return str(value.numerator) if value.denominator == 1 else shown_number(float(value))
    if isinstance(value, float):
        return str(int(value)) if value == int(value) and abs(value) < 1e15 else f"{value:.12g}"
    return str(value)


def _value(node: ast.AST) -> Number:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return _bounded(node.value)
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.UnaryOp) and type(node.op) in _ONE:
        return _ONE[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Div):
            exact = not isinstance(left, float) and not isinstance(right, float)
            return _bounded(Fraction(left) / Fraction(right) if exact else left / right)
        if isinstance(node.op, ast.Pow):
            exact = _digits(left) * abs(right) <= LONGEST_POWER
            return _bounded(left**right if exact else float(left) ** float(right))
        if type(node.op) in _TWO:
            return _bounded(_TWO[type(node.op)](left, right))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        function = _FUNCTIONS.get(node.func.id)
        if function is not None:
            return _bounded(function(*map(_value, node.args)))
    raise ValueError("not arithmetic")


def _digits(value: Number) -> float:
    """By how many digits a power of the value grows with each further factor."""
    if isinstance(value, float):
        return 0.0
    exact = Fraction(value)
    return math.log10(max(abs(exact.numerator), exact.denominator))


def _few(digits: int | None) -> int | None:
    """Places to round to. Python computes the power of ten first, however large it is."""
    if digits is not None and abs(digits) > LONGEST_POWER:
        _too_large()
    return digits


def _bounded(value: Number) -> Number:
    if isinstance(value, complex) or abs(value) > LARGEST or (isinstance(value, float) and not math.isfinite(value)):
        _too_large()
    if isinstance(value, Fraction) and value.denominator > LARGEST:
        return float(value)
    return value


def _too_large() -> int:
    raise ToolError(TOO_LARGE)


@ENVIRONMENTS.register("calculator")
class Calculator(ToolEnvironment):
    """Values of arithmetic expressions."""

    is_stateless = True

    @classmethod
    def schemas(cls, config: Mapping[str, Any]) -> list[Schema]:
        parameters = {"expression": {"type": "string", "description": "such as (12 + 34) * 5 or sqrt(2)"}}
        return [schema("calculator", "Gives the value of an arithmetic expression.", parameters)]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        return calculate(str(arguments.get("expression", "")))
