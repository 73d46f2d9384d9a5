"""Scorers that replace reasoning-gym's own, where those run text that a model wrote, or reward answers that solve nothing.

`mend(task, dataset)` gives the scorer of a task. Most scorers are the library's. For reasoning-gym 0.1.25 these are not:

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
    letter_jumble, spell_backward, word_sorting                 the right answer with anything after it

Before a scorer sees an answer, `is_written` checks the numbers in it, and `_FORMS` checks the rest of its form. A wrong answer
gets the library's partial credit in the first five lines, and wherever nothing else is said.
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
"""Longest answer that is scored, in characters, because some scorers take quadratic time. If the right answer is long, an answer
may have four times its length: 8000 characters for a right answer of 2000."""
MAX_FORMULA = 400
"""Longest answer to propositional_logic, in characters, because the library's parser is quadratic and recurses for each `¬`."""
MAX_TURNS = 2000
"""Most turns of a cube in one answer: `R9` counts as nine."""


class Scorer(Protocol):
    """Scores the answers to one task."""

    def score_answer(self, answer: str, entry: dict) -> float: ...


def mend(task: str, dataset: Any) -> Scorer:
    """The scorer of `task`, made from `dataset`, a dataset of that task. It runs no answer, and an answer cannot keep it busy."""
    module: Any = sys.modules[type(dataset).__module__]
    if task in _EVALUATED:
        module.eval = _EVALUATED[task]  # hides the builtin `eval` in this module alone
    if task in ("simple_integration", "intermediate_integration"):
        module.sympy = _Guarded(module.sympy)
    elif task == "polynomial_multiplication":
        module.sp = _Guarded(module.sp)
    return _Checked(_REPLACED.get(task, dataset.score_answer), _FORMS.get(task))


class _Checked:
    """Passes an answer on to a scorer only if the answer has a reasonable length and is written as the task asks for it.

    An answer at which the scorer raises an error scores 0, for example `null` where boxnet expects a list: if such answers were
    not scored, a policy would not learn to avoid them. If the scorer also raises at the row's own answer, the label is at fault.
    """

    def __init__(self, score: Callable[[str, dict], float], has_form: Callable[[str], object] | None) -> None:
        self._score = score
        self._has_form = has_form

    def score_answer(self, answer: str, entry: dict) -> float:
        target = str(entry["answer"])
        if len(answer) > max(MAX_ANSWER, 4 * len(target)) or not is_written(answer, target):
            return 0.0
        if answer and self._has_form and not self._has_form(answer.strip()):
            return 0.0
        try:
            score = float(self._score(answer, entry))
        except _FAULTS_OF_THE_MACHINE:
            raise
        except Exception:  # a scorer may raise anything at an answer that it did not expect
            self._score(_known_answer(entry), entry)  # raises too if the label is at fault
            return 0.0
        return score if 0.0 <= score <= 1.0 else 0.0


_FAULTS_OF_THE_MACHINE = (MemoryError, OSError, ImportError)


def _known_answer(entry: dict) -> str:
    """An answer that a row's scorer understands: the row's own answer or example, or, in `boxnet`, a plan without steps."""
    metadata = entry.get("metadata", {})
    candidates = (entry["answer"], metadata.get("example_answer"), metadata.get("example_correct_answer"))
    return next((answer for answer in candidates if isinstance(answer, str)), "[]")


class _Guarded:
    """sympy with a `parse_expr` that checks an expression before evaluating it."""

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
"""Functions that replace `eval` in the modules of these tasks."""
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
"""Tasks whose scorers evaluate text. In addition to the checks here they need the jail: see `sandbox.missing`."""


# --- how an answer is written -----------------------------------------------------------------------------------------

_PLAIN_NUMBER = r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?"
_NUMBER = rf"(?:{_PLAIN_NUMBER}|[-+]?[0-9]{{1,3}}(?:,[0-9]{{3}})+(?:\.[0-9]*)?)"
_is_number = re.compile(_NUMBER).fullmatch


def is_written(answer: str, target: str) -> bool:
    """Whether the numbers in an answer are written as people write them, and not merely in a way that Python can read.

    If the right answer is 42, `4_2`, `4,2`, `4 2` and `\u0664\u0662` are not written so; `42`, `+42.0`, `4.2e1` and any text with
    more than a number in it are. If the right answer is 1000, `1,000` is written so too. Underscores between digits, and digits
    other than 0 to 9, are refused unless the right answer itself has them.
    """
    if any(char.isdecimal() and not char.isascii() and char not in target for char in answer):
        return False
    if re.search("[0-9]_[0-9]", answer) and not re.search("[0-9]_[0-9]", target):
        return False
    if not _is_number(target.strip()) or _is_number(answer.strip()):
        return True
    try:
        float(re.sub(r"[,\s]", "", answer))
    except ValueError:
        return True
    return False


def _is_formula(answer: str) -> bool:
    """Whether an answer is a formula of propositional logic in single letters, such as `(P → ¬Q) ∧ R`.

    The library would take any text between two operators for a variable, and try all 2ⁿ assignments of n variables.
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
    """Whether an answer is a list of turns of a cube, such as `R U2 F'`, with at most `MAX_TURNS` turns (`R9999999` has more)."""
    turns = [_SPELLS_TURN(part) for part in answer.split()]
    return all(turns) and sum(int(turn[1] or 1) for turn in turns if turn) <= MAX_TURNS


_COMPLEX = r" ?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)?[ijIJ]?"
_CLOCK = r"-?[0-9]{1,6}:[0-5][0-9](?::[0-5][0-9](?:\.[0-9]{3})?)?"
_FORMS: dict[str, Callable[[str], object]] = {
    "advanced_geometry": re.compile(rf"\(?\s*{_PLAIN_NUMBER}(?:\s*,\s*{_PLAIN_NUMBER})?(?:\s*\))?\s*°?").fullmatch,
    "complex_arithmetic": re.compile(rf"\(?[-+]?{_COMPLEX}(?: ?[-+]{_COMPLEX})?\)?").fullmatch,
    "fraction_simplification": re.compile(
        r"\$?\s*(?:-?[0-9]+\s*/\s*-?[0-9]+|\\d?frac\s*\{\s*[0-9]+\s*\}\s*\{\s*[0-9]+\s*\})\s*\$?"
    ).fullmatch,
    "kakurasu": re.compile(r"[01\s,\[\]]+").fullmatch,
    "number_sorting": re.compile(r"\[[\s\"'0-9.,eE+-]*\]").fullmatch,
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
"""Checks of an answer's form, by task, for scorers that ignore parts that they do not understand, or take very long on them.

The check gets the answer without the spaces around it. An empty answer is not checked.
"""


# --- scorers of our own -----------------------------------------------------------------------------------------------


def _score_countdown(answer: str, entry: dict) -> float:
    """1 if the answer uses each of the row's numbers once and gives the target; 0.05 for other arithmetic, else 0.01."""
    return _score_arithmetic(answer, entry, target=entry["metadata"]["target"], wrong_score=0.05)


def _score_puzzle24(answer: str, entry: dict) -> float:
    """1 if the answer uses each of the row's numbers once and its value is 24; else 0.01."""
    return _score_arithmetic(answer, entry, target=24, wrong_score=0.01)


def _score_arithmetic(answer: str, entry: dict, *, target: int, wrong_score: float) -> float:
    try:
        value, numbers = exact_value(answer)
    except ValueError:
        return 0.01
    return 1.0 if value == target and sorted(numbers) == sorted(entry["metadata"]["numbers"]) else wrong_score


def _score_halting(answer: str, entry: dict) -> float:
    """1 for the right answer, True or False. The library takes `bool(answer)`, which is True for any text."""
    return float(answer.strip().lower() == str(entry["answer"]).strip().lower())


def _score_life(answer: str, entry: dict) -> float:
    """Cells that live on both boards, right and answered, divided by cells that live on at least one of them; 1 for equal boards.

    0 for a board of another size. The library counts dead cells too, and most cells of nearly all boards are dead.
    """
    target = json.loads(entry["answer"])
    try:
        board = json.loads(answer)
    except (ValueError, RecursionError):
        return 0.0
    if not isinstance(board, list) or not all(isinstance(row, list) for row in board):
        return 0.0
    if board == target:
        return 1.0
    if [len(row) for row in board] != [len(row) for row in target]:
        return 0.0
    cells = {(x, y) for x, row in enumerate(board) for y, cell in enumerate(row) if cell == 1}
    target_cells = {(x, y) for x, row in enumerate(target) for y, cell in enumerate(row) if cell == 1}
    return len(cells & target_cells) / max(len(cells | target_cells), 1)


def _score_coin_flip(answer: str, entry: dict, tolerance: float = 1e-4) -> float:
    """1 within the library's tolerance, else the number of leading characters that agree over the length of the longer number.

    (The library divides by the length of the shorter number, so the answer `0` gets 1.) The tolerance does not make 0, or a
    negative number, right if the right answer is 0.00003.
    """
    probability, target = _ratio(answer), _ratio(entry["answer"])
    if probability is None or target is None:
        return 0.0
    if abs(probability - target) <= tolerance and (probability > 0) == (target > 0):
        return 1.0
    digits, target_digits = f"{probability:.10g}", f"{target:.10g}"
    shorter, longer = sorted((len(digits), len(target_digits)))
    length = next((i for i, (a, b) in enumerate(zip(digits, target_digits, strict=False)) if a != b), shorter)
    return length / longer


def _ratio(text: str) -> float | None:
    """A number, or two with a slash between them."""
    top, slash, bottom = (part.strip() for part in text.partition("/"))
    if not _is_number(top) or (slash and not _is_number(bottom)):
        return None
    denominator = float(bottom.replace(",", "")) if slash else 1.0
    return float(top.replace(",", "")) / denominator if denominator else None


_QUANTITY = re.compile(rf"([-+]?)\$?({_NUMBER})%?\.?").fullmatch


def _score_quantity(answer: str, entry: dict) -> float:
    """1 for the right number, 0.01 for another number. The library takes the first digits in the answer, without their sign."""
    quantity = _QUANTITY(answer.strip())
    if not quantity:
        return 0.0
    number = Decimal(quantity[2].replace(",", "")) * (-1 if quantity[1] == "-" else 1)
    return 1.0 if number == Decimal(str(entry["answer"])) else 0.01


def _score_knights(answer: str, entry: dict) -> float:
    """The library's score: 0.3 + 0.7 * share of right roles, or 0 if no role is right. Also 0 if the answer does not give each
    person exactly one role, or says anything else."""
    target, roles = _roles(entry["answer"]), _roles(answer)
    if not target or not roles or target.keys() != roles.keys():
        return 0.0
    share = Fraction(sum(roles[name] == role for name, role in target.items()), len(target))
    return 0.0 if share == 0 else float(Fraction(3, 10) + Fraction(7, 10) * share)


def _roles(text: str) -> dict[str, str] | None:
    """`Zoey is a hero, and Aria is a fool.` as {zoey: hero, aria: fool}; None if the text says anything else."""
    from reasoning_gym.logic.knights_knaves import VALID_ROLES

    words = [word for word in re.split(r"[\s.,()]+", text.lower()) if word not in ("", "is", "a", "an", "and")]
    names, roles = words[::2], words[1::2]
    says_more = len(names) != len(roles) or len(set(names)) < len(names) or not VALID_ROLES.issuperset(roles)
    return None if says_more else dict(zip(names, roles, strict=True))


def _score_words(answer: str, entry: dict) -> float:
    """Words in their right place, divided by the number of words in the longer of the right answer and this answer."""
    return _share(answer.lower().split(), entry["answer"].lower().split())


def _score_sorted_words(answer: str, entry: dict) -> float:
    """Words in their right place, divided by the number of words in the longer of the right list and this one; at least 0.2 for
    the right words in another order."""
    words, target = [word.strip() for word in answer.split(",")], entry["metadata"]["sorted_words"]
    return max(_share(words, target), 0.2 if sorted(words) == sorted(target) else 0.0)


def _score_letters(answer: str, entry: dict) -> float:
    """Letters in their right place, divided by the number of letters in the longer of the right answer and this answer."""
    return _share(list(answer.lower()), list(entry["answer"].lower()))


def _share(parts: list[str], targets: list[str]) -> float:
    return sum(part == target for part, target in zip(parts, targets, strict=False)) / max(len(parts), len(targets), 1)


def _score_complex(answer: str, entry: dict) -> float:
    """The library's exp(-distance), but 0 for a number that is not finite, which the library takes for the right answer."""
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
    "word_sorting": _score_sorted_words,
}
