"""The verifier `ifeval`: how many of a row's instructions a response follows.

Ids, arguments and conditions are those of IFEval (arXiv:2311.07911) and of open-instruct's IFEvalG. Some conditions of IFEvalG
refuse a response that does what the sentence in the prompt says, or pass a response that does not. Then the sentence counts;
docs/guides/verifiers.md lists these conditions.
"""

import ast
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from open_instruct.verifiers.base import VerificationResult, VerifierFunction
from open_instruct.verifiers.instructions import copies, forms, keywords, languages, lengths
from open_instruct.verifiers.instructions.instruction import Instruction
from open_instruct.verifiers.text_verifiers import behind_thoughts

INSTRUCTIONS: dict[str, Instruction] = {
    **keywords.INSTRUCTIONS,
    **lengths.INSTRUCTIONS,
    **forms.INSTRUCTIONS,
    **copies.INSTRUCTIONS,
    **languages.INSTRUCTIONS,
}
"""Instructions by id."""


@dataclass(frozen=True)
class Constraint:
    """An instruction of a row, with its arguments."""

    id: str
    arguments: Mapping[str, Any]

    def is_followed(self, response: str) -> bool:
        return INSTRUCTIONS[self.id].follows(response, **self.arguments)


def read_constraints(label: object) -> list[Constraint]:
    """The constraints in a label. Some of open-instruct's rows have none.

    Raises:
        ValueError: the label has another form, an id is unknown, or its arguments do not fit.
    """
    mapping = single_mapping(label)
    if "func_name" in mapping:
        raise ValueError("this is a label of ifeval_old: give --remap_verifier ifeval=ifeval_old")
    ids, arguments = mapping.get("instruction_id"), mapping.get("kwargs")
    if not isinstance(ids, list) or not isinstance(arguments, list) or len(ids) != len(arguments):
        raise ValueError(f"instruction_id and kwargs must be lists of one length, got {label!r:.80}")
    return [_read_constraint(name, kwargs) for name, kwargs in zip(ids, arguments, strict=True)]


def _read_constraint(name: object, kwargs: object) -> Constraint:
    if not isinstance(name, str) or name not in INSTRUCTIONS:
        raise ValueError(f"no instruction is called {name!r}")
    if not isinstance(kwargs, Mapping | None):
        raise ValueError(f"{name}: its kwargs must be a mapping, got {kwargs!r:.60}")
    try:
        return Constraint(name, INSTRUCTIONS[name].read(kwargs or {}))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def single_mapping(label: object) -> dict[str, Any]:
    """The mapping in a label: a mapping, a list with only a mapping, or the text of either as JSON or as a Python literal.

    Raises:
        ValueError: the label has another form.
    """
    value = label
    for _ in range(5):  # such as a list of one text that holds a list of one mapping
        if isinstance(value, dict):
            return value
        if isinstance(value, str):
            value = _parsed(value)
        elif isinstance(value, list) and len(value) == 1:
            value = value[0]
        else:
            break
    raise ValueError(f"the ground truth must be a mapping, or a list of one, got {label!r:.80}")


def _parsed(label: str) -> object:
    try:
        return json.loads(label)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(label)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise ValueError(f"the ground truth is neither JSON nor a literal of Python: {label!r:.80}") from None


class IFEvalVerifier(VerifierFunction):
    """The share of the row's instructions that the response follows. Its thoughts and answer tags do not count."""

    name = "ifeval"

    def __call__(
        self, tokenized_prediction: list[int], prediction: str, label: object, query: str | None = None
    ) -> VerificationResult:
        constraints = read_constraints(label)
        answer = behind_thoughts(prediction.replace("<|assistant|>", ""), query)
        if not constraints or not answer:
            return VerificationResult(0.0)
        violations = [constraint.id for constraint in constraints if not constraint.is_followed(answer)]
        share = (len(constraints) - len(violations)) / len(constraints)
        return VerificationResult(share, reasoning=f"not followed: {', '.join(violations)}" if violations else None)

    def prepare(self, dataset: str) -> None:
        languages.load_profiles()
