"""Sign changes of polynomials, which are known because each polynomial is a product of its factors."""

import itertools

import pytest

from open_instruct.verifiers.math_roots import sign_changes


def product_of(roots: list[float]) -> list[float]:
    coefficients = [1.0]
    for root in roots:
        shifted = [0.0, *coefficients]
        coefficients = [high - root * low for high, low in itertools.zip_longest(shifted, coefficients, fillvalue=0.0)]
    return coefficients


@pytest.mark.parametrize(
    ("roots", "expected"),
    [
        ([], []),
        ([7], [7]),
        ([249, 251], [249, 251]),
        ([10, 20, 30], [10, 20, 30]),
        ([-4, -4, 9], [9]),  # two equal roots change no sign
        ([5, 5, 5], [5]),
        ([-3, -2, -1, 0, 1, 2], [-3, -2, -1, 0, 1, 2]),
    ],
)
def test_sign_changes_of_a_product_are_its_roots(roots: list[float], expected: list[float]) -> None:
    assert sign_changes(product_of(roots)) == pytest.approx(expected, abs=1e-3)


def test_polynomials_without_real_roots_change_no_sign() -> None:
    assert sign_changes([1, 0, 1]) == []
    assert sign_changes([0, 0]) == []
