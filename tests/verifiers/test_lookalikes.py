r"""Answers that look like the right one and are another: `and` for `or`, mW for MW, `5 quadrillion` for 5."""

import pytest

from open_instruct.verifiers import math_equivalence
from open_instruct.verifiers.judge_answers import score_up_to
from open_instruct.verifiers.registry import score_response


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> None:
    math_equivalence.prepare()


def score_boxed(label: str, answer: str) -> float:
    return score_response("math", label, [], rf"\boxed{{{answer}}}").score


@pytest.mark.parametrize(
    ("label", "answer"),
    [
        (r"x>1 \text{ and } x<5", r"x>1 \text{ or } x<5"),
        (r"x<1 \text{ or } x>2", r"x<1 \text{ and } x>2"),
        (r"x=1 \text{ and } y=2", r"x=1 \text{ or } y=2"),
        (r"x \neq 1 \text{ and } x \neq 2", r"x \neq 1 \text{ or } x \neq 2"),
        (r"A \text{ and } B", r"A \text{ or } B"),
        (r"\text{even and positive}", r"\text{even or positive}"),
        (r"A \text{ and } B \text{ or } C", r"A \text{ or } B \text{ or } C"),
        (r"x<1, x>2", r"x<1 \text{ or } x>2"),
    ],
)
def test_conditions_with_and_are_not_conditions_with_or(label: str, answer: str) -> None:
    for one, other in ((label, answer), (answer, label)):
        assert score_boxed(one, other) == 0
        assert score_response("strict_math", one, [], f"The final answer is ${other}$.").score == 0
        assert score_boxed(one, one) == 1


@pytest.mark.parametrize(
    "solutions",
    [
        [r"1 \text{ and } 2", r"1 \text{ or } 2", "1, 2"],
        [r"x=1 \text{ and } x=2", r"x=1 \text{ or } x=2", "x=1, x=2", "x=2, x=1"],
        [r"(1,2) \text{ or } (3,4)", r"(1,2) \text{ and } (3,4)"],
        [r"5\text{ cm} \text{ or } 6\text{ cm}", r"5\text{ cm}, 6\text{ cm}"],
        [r"2a \text{ or } \sqrt{b}", r"2a, \sqrt{b}"],
    ],
)
def test_values_are_the_same_with_and_or_a_comma(solutions: list[str]) -> None:
    for label in solutions:
        for answer in solutions:
            assert score_boxed(label, answer) == 1


@pytest.mark.parametrize(
    ("label", "answer"),
    [
        (r"\$5", r"5\text{ cents}"),
        (r"\$5", r"5\text{ euros}"),
        (r"\$5\pi", r"5\pi\text{ cents}"),
        (r"5\text{ cents}", r"\$5"),
        (r"5\text{ MW}", r"5\text{ mW}"),
        (r"5\text{ MHz}", r"5\text{ mHz}"),
        (r"5\text{ mPa}", r"5\text{ MPa}"),
        (r"5\text{ MeV}", r"5\text{ meV}"),
        (r"5\text{ mm}", r"5\text{ Mm}"),
        (r"5\text{ mg}", r"5\text{ Mg}"),
        (r"5\text{ Mb}", r"5\text{ MB}"),
        (r"5\text{ Pa}", r"5\text{ pA}"),
        (r"5\text{ MW}\cdot", r"5\text{ mW}"),
        (r"5\pi\text{ MW}", r"5\pi\text{ mW}"),
        (r"5\text{ N/m}", r"5\text{ N·m}"),
        (r"5\text{ m/s}", r"5\text{ m s}"),
    ],
)
def test_another_unit_is_another_answer(label: str, answer: str) -> None:
    assert score_boxed(label, answer) == 0
    assert score_boxed(answer, label) == 0


@pytest.mark.parametrize(
    ("label", "answer"),
    [
        (r"5\text{ meters}", r"5\text{ Meters}"),
        (r"5\text{ mL}", r"5\text{ ml}"),
        (r"5\text{ MW}", r"5\,\mathrm{MW}"),
        (r"5\text{ km/h}", r"5\text{ km / h}"),
        (r"\$5", r"\$5.00"),
        (r"\$5", r"5\text{ dollars}"),
        (r"\$5", r"5\text{ USD}"),
        (r"5\text{ zorkmids}", "5"),
        (r"5\text{ zorkmids}", r"5\text{ zorkmids}"),
        ("5", r"5\text{ square feet}"),
        ("5", r"5\text{ different ways}"),
        ("5", r"5\text{ kilometers per hour}"),
        ("5", r"5\text{ m/s}^2"),
        ("5", r"5\text{ apples}"),
    ],
)
def test_a_unit_may_be_spelled_otherwise_or_be_missing(label: str, answer: str) -> None:
    assert score_boxed(label, answer) == 1


OTHER_NUMBERS = (
    "quadrillion|quintillion|lakh|crore|gross|score|bil|tril|doz|mio|mrd|kilo|mega|grand|tens|millionths|billionths|twelfths|"
    "sixteenths|eleventh|per mille|basis points|ppm|factorial|choose|fold|pairs|below|at most|at least|less|fewer|incorrect|"
    "million|dozen|score and two|squared|or more|myriad|zillion|at"
)


@pytest.mark.parametrize("words", OTHER_NUMBERS.split("|"))
def test_unknown_words_behind_a_number_make_another_answer(words: str) -> None:
    assert score_boxed("5", rf"5\text{{ {words}}}") == 0
    assert score_boxed(r"5\pi", rf"5\pi\text{{ {words}}}") == 0
    assert score_response("math", "5", [], f"The final answer is $5$ {words}.").score == 0
    assert score_response("math", "5", [], f"The answer is 5 {words}.").score == 0


@pytest.mark.parametrize(
    ("label", "answer"),
    [
        ("123", "0,123"),
        ("500", "0,500"),
        ("1234", "0,001,234"),
        ("123", "0{,}123"),
        ("123", r"0\,123"),
        ("123", r"0,\!123"),
    ],
)
def test_a_group_of_thousands_does_not_begin_with_zero(label: str, answer: str) -> None:
    assert score_boxed(label, answer) == 0
    assert score_boxed(rf"{label}\pi", rf"{answer}\pi") == 0
    assert score_response("gsm8k", label, [], f"It is {answer}.").score == 0
    assert score_response("string_matcher", label, [], f"<answer>{answer}</answer>").score == 0


@pytest.mark.parametrize(
    "answer",
    ["x=6=5", "x=4=5", r"x=\frac{10}{3}=5", "x=5=6=5", r"x = 6\text{ cm} = 5\text{ cm}", r"x=\sqrt{2}=5", "a+b=6=5"],
)
def test_a_chain_with_two_values_has_none(answer: str) -> None:
    assert score_boxed("5", answer) == 0
    assert score_boxed("x=5", answer) == 0


def test_a_chain_of_one_value_has_this_value() -> None:
    for answer in ("x=2+3=5", r"x=\frac{10}{2}=5", r"x=a+b=5"):
        assert score_boxed("5", answer) == 1


@pytest.mark.parametrize(
    "side",
    [
        "x/2",
        r"\sqrt{x}",
        r"\frac1x",
        r"\ln x",
        "x-5",
        "x+1",
        "x^2",
        "|x|",
        "2^x",
        "-x",
        "2x",
        r"\sqrt[3]{x}",
        r"x\cdot 3",
    ],
)
def test_an_equation_for_the_unknown_is_not_its_right_side(side: str) -> None:
    assert score_boxed("5", f"{side}=5") == 0


@pytest.mark.parametrize("side", ["x", "f(2)", "a+b", r"\theta", "x_1", "|AB|", "f(2)+1", "S"])
def test_a_symbol_or_an_expression_of_several_has_the_value_on_the_right(side: str) -> None:
    assert score_boxed("5", f"{side}=5") == 1


@pytest.mark.parametrize(
    "text",
    [
        r"<think>a</think>\boxed{41}<think>\boxed{42}",
        r"\boxed{41} <think>\boxed{42}",
        "It is $41$.\n<think>\\boxed{42}",
        r"It is 41. <think>\boxed{42}",
    ],
)
def test_thoughts_behind_an_answer_that_never_end_leave_none(text: str) -> None:
    assert score_response("math", "42", [], text).score == 0


@pytest.mark.parametrize(
    "text",
    [
        "Score: 10 is what the response wants. I give Score: 1",
        "Score: 7 (not Score: 3)",
        "Score: 7, or Score: 3\nWell.",
    ],
)
def test_a_judge_that_says_two_scores_has_given_none(text: str) -> None:
    assert score_up_to(10)(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "$42$? No.",
        "It is false that it is $42$",
        "It is false that it is $42$.",
        "The wrong answer is $42$.",
        "The incorrect answer is 42.",
        r"\boxed{42}\%",
        r"$\boxed{42}$%",
        r"-\boxed{42}",
        r"$-\boxed{42}$",
        r"$x = -\boxed{42}$",
        r"\boxed{42}^2",
        r"2^{\boxed{42}}^\boxed{42}^2",
        r"not \boxed{42}",
        r"It is not $\boxed{42}$.",
    ],
)
def test_an_answer_that_is_denied_or_goes_on_outside_its_box_is_not_paid(text: str) -> None:
    assert score_response("math", "42", [], text).score == 0


@pytest.mark.parametrize(
    ("label", "text"),
    [
        ("42", "The answer is **42**."),
        ("42", "Answer: **42**."),
        ("42", "The answer is *42*."),
        ("42", "The answer is `42`."),
        ("42", 'The answer is "42".'),
        ("42", "The answer is 42 because 6*7=42."),
        ("42", "The answer is 42, which is even."),
        ("-42", r"$-\boxed{42}$"),
        (r"42\%", r"\boxed{42}\%"),
        ("42", r"The answer - \boxed{42}"),
        ("42", "- \\boxed{42} is what I found."),
        ("42", r"It is not 41. So \boxed{42}."),
        ("10", r"\boxed{\binom52}"),
        (r"x\equiv 3\pmod{5}", r"\boxed{x\equiv 3\pmod 5}"),
        (r"\{2,3\}", r"\boxed{\lbrace 2,3\rbrace}"),
    ],
)
def test_right_answers_in_marks_or_before_a_reason_are_paid(label: str, text: str) -> None:
    assert score_response("math", label, [], text).score == 1


@pytest.mark.parametrize(
    ("label", "answer"),
    [
        (r"\vec a\times\vec b", r"\vec b\times\vec a"),
        (r"\vec a\times\vec b", r"\vec a\cdot\vec b"),
        (r"\mathbf{A}\mathbf{B}", r"\mathbf{B}\mathbf{A}"),
        ("P D P^{-1}", "D"),
        ("a^{-1}ba", "b"),
    ],
)
def test_factors_that_do_not_commute_stay_in_order(label: str, answer: str) -> None:
    assert score_boxed(label, answer) == score_boxed(answer, label) == 0
    assert score_boxed(label, label) == 1


@pytest.mark.parametrize(
    "response",
    [
        r"The answer is \boxed{42}. Actually, we can verify: 6*7 = 42.",
        r"\boxed{42}. There is no other solution; 43 fails.",
        r"\boxed{42}. Wait, that is wrong. It is $43$.",
        r"\boxed{42}!",
        r"**\boxed{42}**",
        r"Answer - \boxed{42}",
        r"\boxed{42}^\circ",
    ],
)
def test_what_a_text_says_behind_a_box_is_not_read(response: str) -> None:
    assert score_response("math", "42", [], response).score == 1
