"""reasoning-gym's scorers, where the library's own run what a model wrote, or can be pleased without solving anything.

`mend(task, dataset)` gives the scorer of a task. Most are the library's. Of reasoning-gym 0.1.25 these are not:

    string_insertion, spiral_matrix, binary_matrix, n_queens    `eval(answer)`; here `ast.literal_eval`
    number_sorting, bitwise_arithmetic                          `eval` of the ground truth; here literals, and integer arithmetic
    simple_integration, intermediate_integration,               `sympy.parse_expr(answer)`, which is `eval` with every builtin;
    polynomial_multiplication                                   here behind `check_expression`
    countdown, puzzle24                                         the same, and `720e0+0e0*(31+11)` or `1*2*3*4` was right on every
                                                                row; here exact arithmetic on the row's own numbers
    game_of_life_halting                                        any text was right where the answer is True
    game_of_life                                                an empty board had 0.95 on every row
    coin_flip, complex_arithmetic                               `0` and `nan` were right on every row
    gsm_symbolic                                                `-42`, `not 42` and `42 or 7` were right where the answer is 42
    knights_knaves                                              any words between the names and the roles, `not` among them
    letter_jumble, spell_backward                               the right answer with anything behind it

Before any of them `is_written` looks at numbers, and `_FORMS` at what else an answer to a task may consist of. What the library's
rules give for a wrong answer (partial credit) is kept in the first five lines and wherever nothing is said.
"""

import ast
import json
import math
import re
import sys
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any, Protocol

from open_instruct.verifiers.reasoning_gym_expressions import exact_value, integer_value, parse_expression

MAX_ANSWER = 4096
"""Longest answer that is looked at, in characters, unless the right one is over a quarter of it: some scorers are quadratic."""
MAX_FORMULA = 400
"""Longest answer to propositional_logic, in characters: the library's parser is quadratic, and recurs for each `¬`."""
MAX_TURNS = 2000
"""Most turns of a cube in one answer: `R9` counts as nine."""


class Scorer(Protocol):
    """What scores the answers to one task."""

    def score_answer(self, answer: str, entry: dict) -> float: ...


def mend(task: str, dataset: Any) -> Scorer:
    """The scorer of `task`, of which `dataset` is one in reasoning-gym; what it is given is neither run nor endless."""
    module: Any = sys.modules[type(dataset).__module__]
    if task in _EVALUATED:
        module.eval = _EVALUATED[task]  # goes before the builtin of this name, in this module alone
    if task in ("simple_integration", "intermediate_integration"):
        module.sympy = _Guarded(module.sympy)
    elif task == "polynomial_multiplication":
        module.sp = _Guarded(module.sp)
    return _Checked(_REPLACED.get(task, dataset.score_answer), _FORMS.get(task))


class _Checked:
    """A scorer that sees an answer only if the answer has a reasonable length and is written as the task asks for it."""

    def __init__(self, score: Callable[[str, dict], float], has_form: Callable[[str], object] | None) -> None:
        self._score = score
        self._has_form = has_form

    def score_answer(self, answer: str, entry: dict) -> float:
        right = str(entry["answer"])
        if len(answer) > max(MAX_ANSWER, 4 * len(right)) or not is_written(answer, right):
            return 0.0
        if answer and self._has_form and not self._has_form(answer.strip()):
            return 0.0
        return float(self._score(answer, entry))


class _Guarded:
    """sympy, whose `parse_expr` looks before it evaluates."""

    def __init__(self, sympy: Any) -> None:
        self._sympy = sympy._sympy if isinstance(sympy, _Guarded) else sympy

    def __getattr__(self, name: str) -> Any:
        return parse_expression if name == "parse_expr" else getattr(self._sympy, name)


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


# --- how an answer is written -----------------------------------------------------------------------------------------

_PLAIN_NUMBER = r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?"
_NUMBER = rf"(?:{_PLAIN_NUMBER}|[-+]?[0-9]{{1,3}}(?:,[0-9]{{3}})+(?:\.[0-9]*)?)"
_is_number = re.compile(_NUMBER).fullmatch


def is_written(answer: str, right: str) -> bool:
    """Whether the numbers in an answer are written as people write them, and not merely so that Python can read them.

    Where the right answer is 42, `4_2`, `4,2`, `4 2` and `\u0664\u0662` are not; `42`, `+42.0`, `4.2e1` and any text with more
    than a number in it are. Where the right answer is 1000, `1,000` is, too. Underscores between digits, and digits other than
    0 to 9, are no way to write any answer but one that has them itself.
    """
    if any(char.isdecimal() and not char.isascii() and char not in right for char in answer):
        return False
    if re.search("[0-9]_[0-9]", answer) and not re.search("[0-9]_[0-9]", right):
        return False
    if not _is_number(right.strip()) or _is_number(answer.strip()):
        return True
    try:
        float(re.sub(r"[,\s]", "", answer))
    except ValueError:
        return True
    return False


def _is_formula(answer: str) -> bool:
    """Whether an answer is a formula of propositional logic in single letters, such as `(P → ¬Q) ∧ R`.

    The library takes whatever stands between two operators for a variable, and tries all 2ⁿ assignments of n variables.
    """
    text = "".join(answer.split())
    if len(answer) > MAX_FORMULA or not _SPELLS_FORMULA(text):
        return False
    depth = 0
    for char in text:
        depth += (char == "(") - (char == ")")
        if depth < 0:
            return False
    return depth == 0


_SPELLS_FORMULA = re.compile(r"[(¬]*[A-Z]\)*(?:[∧∨→↔][(¬]*[A-Z]\)*)*").fullmatch
_SPELLS_TURN = re.compile(r"[0-9]{0,2}[^\s0-9]{1,4}([0-9]{0,2})").fullmatch


def _is_turns(answer: str) -> bool:
    """Whether an answer turns a cube, as `R U2 F'` does, and not for ever, as `R9999999` does."""
    turns = [_SPELLS_TURN(part) for part in answer.split()]
    return all(turns) and sum(int(turn[1] or 1) for turn in turns if turn) <= MAX_TURNS


_COMPLEX = r" ?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)?[ijIJ]?"
_CLOCK = r"-?[0-9]{1,6}:[0-5][0-9](?::[0-5][0-9](?:\.[0-9]{3})?)?"
_FORMS: dict[str, Callable[[str], object]] = {
    "complex_arithmetic": re.compile(rf"\(?[-+]?{_COMPLEX}(?: ?[-+]{_COMPLEX})?\)?").fullmatch,
    "fraction_simplification": re.compile(
        r"\$?\s*(?:-?[0-9]+\s*/\s*-?[0-9]+|\\d?frac\s*\{\s*[0-9]+\s*\}\s*\{\s*[0-9]+\s*\})\s*\$?"
    ).fullmatch,
    "kakurasu": re.compile(r"[01\s,\[\]]+").fullmatch,
    "polynomial_equations": re.compile(rf'""|{_PLAIN_NUMBER}(?:\s*,\s*{_PLAIN_NUMBER})*').fullmatch,
    "prime_factorization": re.compile(r"[0-9]+(?:\s*×\s*[0-9]+)*").fullmatch,
    "propositional_logic": _is_formula,
    "quantum_lock": re.compile(r"[A-Ca-c\s,>→-]+").fullmatch,
    "rubiks_cube": _is_turns,
    "rush_hour": re.compile(r"(?:[A-Z][-+][0-9]{1,2}[\s,]*)+").fullmatch,
    "sokoban": re.compile(r"[UDLR\s,]+").fullmatch,
    "survo": re.compile(r"[0-9\s-]+").fullmatch,
    "time_intervals": re.compile(rf"-?[0-9]{{1,9}}(?: days?)?|(?:-?[0-9]{{1,9}} days,\s*)?{_CLOCK}").fullmatch,
}
"""What an answer may look like to tasks whose scorers pass over what they do not understand, or take for ever on it.

Each is asked about the answer without the spaces around it, unless the answer is empty.
"""


# --- scorers of our own -----------------------------------------------------------------------------------------------


def _score_countdown(answer: str, entry: dict) -> float:
    """1 for all of the row's numbers, each once, that come to the target; 0.05 for other arithmetic and 0.01 for the rest."""
    return _score_arithmetic(answer, entry, target=entry["metadata"]["target"], wrong=0.05)


def _score_puzzle24(answer: str, entry: dict) -> float:
    """1 for all of the row's numbers, each once, that come to 24; else 0.01."""
    return _score_arithmetic(answer, entry, target=24, wrong=0.01)


def _score_arithmetic(answer: str, entry: dict, *, target: int, wrong: float) -> float:
    try:
        value, numbers = exact_value(answer)
    except ValueError:
        return 0.01
    return 1.0 if value == target and sorted(numbers) == sorted(entry["metadata"]["numbers"]) else wrong


def _score_halting(answer: str, entry: dict) -> float:
    """1 for the right one of True and False; the library takes `bool(answer)`, which is True for any text."""
    return float(answer.strip().lower() == str(entry["answer"]).strip().lower())


def _score_life(answer: str, entry: dict) -> float:
    """Of the cells that live on the right board or on the answered one, the share that lives on both; 1 for equal boards.

    The library counts dead cells too, of which nearly all boards mostly consist. 0 for a board of another size.
    """
    right = json.loads(entry["answer"])
    try:
        board = json.loads(answer)
    except (ValueError, RecursionError):
        return 0.0
    if not isinstance(board, list) or not all(isinstance(row, list) for row in board):
        return 0.0
    if board == right:
        return 1.0
    if [len(row) for row in board] != [len(row) for row in right]:
        return 0.0
    alive = {(x, y) for x, row in enumerate(board) for y, cell in enumerate(row) if cell == 1}
    wanted = {(x, y) for x, row in enumerate(right) for y, cell in enumerate(row) if cell == 1}
    return len(alive & wanted) / max(len(alive | wanted), 1)


def _score_coin_flip(answer: str, entry: dict, tolerance: float = 1e-4) -> float:
    """1 within the library's tolerance, else the share of digits that agree, of the longer of both (it takes the shorter: 0).

    The tolerance is no excuse for 0, or for less, where the right answer is 0.00003.
    """
    probability, right = _ratio(answer), _ratio(entry["answer"])
    if probability is None or right is None:
        return 0.0
    if abs(probability - right) <= tolerance and (probability > 0) == (right > 0):
        return 1.0
    one, other = f"{probability:.10g}", f"{right:.10g}"
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return same / max(len(one), len(other))


def _ratio(text: str) -> float | None:
    """A number, or two with a slash between them."""
    top, slash, bottom = (part.strip() for part in text.partition("/"))
    if not _is_number(top) or (slash and not _is_number(bottom)):
        return None
    denominator = float(bottom.replace(",", "")) if slash else 1.0
    return float(top.replace(",", "")) / denominator if denominator else None


_QUANTITY = re.compile(rf"([-+]?)\$?({_NUMBER})%?\.?").fullmatch


def _score_quantity(answer: str, entry: dict) -> float:
    """1 for the right number and 0.01 for another; the library takes the first digits that it finds, without their sign."""
    quantity = _QUANTITY(answer.strip())
    if not quantity:
        return 0.0
    number = Decimal(quantity[2].replace(",", "")) * (-1 if quantity[1] == "-" else 1)
    return 1.0 if number == Decimal(str(entry["answer"])) else 0.01


def _score_knights(answer: str, entry: dict) -> float:
    """The library's: 1, or more than 0.3 by the share of right roles; 0 unless the answer gives each person one role alone."""
    wanted, said = _roles(entry["answer"]), _roles(answer)
    if not wanted or not said or wanted.keys() != said.keys():
        return 0.0
    share = Fraction(sum(said[name] == role for name, role in wanted.items()), len(wanted))
    return 0.0 if share == 0 else float(Fraction(3, 10) + Fraction(7, 10) * share)


def _roles(text: str) -> dict[str, str] | None:
    """`Zoey is a hero, and Aria is a fool.` as {zoey: hero, aria: fool}; None where that is not all that it says."""
    from reasoning_gym.logic.knights_knaves import VALID_ROLES

    words = [word for word in re.split(r"[\s.,()]+", text.lower()) if word not in ("", "is", "a", "an", "and")]
    names, roles = words[::2], words[1::2]
    says_more = len(names) != len(roles) or len(set(names)) < len(names) or not VALID_ROLES.issuperset(roles)
    return None if says_more else dict(zip(names, roles, strict=True))


def _score_words(answer: str, entry: dict) -> float:
    """The share of words in their place, of the longer of the right answer and this one."""
    return _share(answer.lower().split(), entry["answer"].lower().split())


def _score_letters(answer: str, entry: dict) -> float:
    """The share of letters in their place, of the longer of the right answer and this one."""
    return _share(list(answer.lower()), list(entry["answer"].lower()))


def _share(parts: list[str], right: list[str]) -> float:
    return sum(one == other for one, other in zip(parts, right, strict=False)) / max(len(parts), len(right), 1)


def _score_complex(answer: str, entry: dict) -> float:
    """The library's exp(-distance); 0 for what is not finite, which it takes for the right answer."""
    from reasoning_gym.algebra.complex_arithmetic import ComplexArithmeticDataset

    try:
        distance = abs(ComplexArithmeticDataset.parse_string_to_complex(answer) - complex(*entry["metadata"]["result"]))
    except (ValueError, TypeError, OverflowError):
        return 0.0
    return math.exp(-distance) if math.isfinite(distance) else 0.0


_REPLACED: dict[str, Callable[[str, dict], float]] = {
    "coin_flip": _score_coin_flip,
    "complex_arithmetic": _score_complex,
    "countdown": _score_countdown,
    "game_of_life": _score_life,
    "game_of_life_halting": _score_halting,
    "gsm_symbolic": _score_quantity,
    "knights_knaves": _score_knights,
    "letter_jumble": _score_words,
    "puzzle24": _score_puzzle24,
    "spell_backward": _score_letters,
}
