"""Rows that several verifiers score. The reward of a response is the sum of the weighted scores, as in open-instruct.

dataset: ["math", "max_length"], ground_truth: ["42", "500"]  ─►  "math + max_length", ["42", "500"]
"""

from collections.abc import Sequence

from open_instruct.verifiers.scoring_processes import Scored

SEPARATOR = " + "
"""Separates the names of a row's verifiers in the `dataset` of a prompt."""


def names_of_verifiers(dataset: str) -> list[str]:
    """The values of the `dataset` column that a row's `dataset` stands for."""
    return dataset.split(SEPARATOR)


def is_rubric(name: str) -> bool:
    """Whether a verifier's name in a row means the verifier `rubric`."""
    return name.partition("/")[0].strip().lower() == "rubric"


def checks_of_row(dataset: str, ground_truth: object) -> list[tuple[str, object]]:
    """Each verifier of a row, with its ground truth."""
    names = names_of_verifiers(dataset)
    if len(names) == 1:
        return [(dataset, ground_truth)]
    assert isinstance(ground_truth, list), (dataset, ground_truth)
    return list(zip(names, ground_truth, strict=True))


def combined(results: Sequence[Sequence[Scored]], weights: Sequence[float]) -> list[Scored]:
    """One score for each of G responses that K verifiers have scored: the weighted mean, which is 1 if all scores are 1.

    A response that any of the verifiers has not scored is not scored.

    Args:
        results: (K, G).
        weights: (K,) positive.
    """
    total = sum(weights)
    means = []
    for verdicts in zip(*results, strict=True):
        cost = sum(verdict.cost for verdict in verdicts)
        failures = [verdict.failure or "" for verdict in verdicts if verdict.score is None]
        if failures:
            means.append(Scored(None, failures[0], cost))
        else:
            score = (
                sum(weight * (verdict.score or 0.0) for verdict, weight in zip(verdicts, weights, strict=True)) / total
            )
            means.append(Scored(min(score, 1.0), None, cost))
    return means
