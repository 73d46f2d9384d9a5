r"""What `math` reads: labels that are solutions, answers without a box, matrices, names before an equals sign.

Each right answer stands beside near misses, which must stay wrong.
"""

import time

import pytest

from open_instruct.verifiers import math_equivalence
from open_instruct.verifiers.answer_reading import boxed_answer, math_value
from open_instruct.verifiers.math_answers import answer_of_label, math_answer
from open_instruct.verifiers.math_equivalence import are_equal
from open_instruct.verifiers.registry import check_label, score_response

RIGHT, WRONG = 1.0, 0.0


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> None:
    math_equivalence.prepare()


def score(label: object, text: str) -> float:
    return score_response("math", label, [], text).score


def score_boxed(label: str, answer: str) -> float:
    return score(label, rf"So it is $\boxed{{{answer}}}$.")


# --- labels -----------------------------------------------------------------------------------------------------------

SOLUTION = "The price of one pen is 21, so that of two pens is " + "21 + 21 = 42. We add the prices of the pens. " * 4
LABELS_OF_42 = [
    "42",
    "$42$",
    "$$42$$",
    r"\[42\]",
    r"\(42\)",
    "#### 42",
    SOLUTION + "\n#### 42",
    "The answer is 42",
    "The answer is $42$.",
    "The final answer is: $42$",
    "**Answer:** 42",
    SOLUTION + "Thus the answer is $42$.",
    SOLUTION + "The answer is 42.",
    r"\boxed{42}",
    r"$\boxed{42}$",
    r"$\boxed 42$",
    r"We have $x=42$, so the answer is $\boxed{42}$.",
    SOLUTION + r"Hence $\boxed{42}$.",
    r"First $\boxed{7}$; with it \[\boxed{x = 42}.\] That was all. #### 7",
]


@pytest.mark.parametrize("label", LABELS_OF_42)
def test_a_label_may_be_a_solution(label: str) -> None:
    check_label("math", label)
    for text in ("42", r"\boxed{42}", "The final answer is $42$.", r"\boxed{42.0}"):
        assert score(label, text) == RIGHT
    for text in ("43", r"\boxed{7}", r"\boxed{21}", r"\boxed{42\%}", label.replace("42", "43"), ""):
        assert score(label, text) == WRONG


@pytest.mark.parametrize(
    ("label", "answer"),
    [
        (r"\frac{1}{2}", "0.5"),
        ("(1, 2)", "(1,2)"),
        (r"\text{(A)}", "A"),
        (r"x \in [1,2]", r"x\in[1, 2]"),
        (r"x \in [1,2]", r"\left[1,2\right]"),
        ("2x+3y=6", "2x + 3y = 6"),
        ("10:30 am", "10:30 am"),
        ("Tuesday", "Tuesday"),
        (r"\text{There is no such triangle}", r"\text{There is no such triangle}"),
        (
            r"\begin{pmatrix} " + r"1 & 2 & 3 & 4 \\ " * 9 + r"\end{pmatrix}",
            r"\begin{pmatrix}" + r"1&2&3&4\\" * 9 + r"\end{pmatrix}",
        ),
        ("$1$, $2$", "1, 2"),
        (r"\(1\), \(2\)", r"\(1\), \(2\)"),
    ],
)
def test_short_labels_are_read_as_they_are(label: str, answer: str) -> None:
    check_label("math", label)
    assert score_boxed(label, answer) == RIGHT
    assert score_boxed(label, "7") == WRONG


@pytest.mark.parametrize(
    "label",
    [
        "We multiply both sides and see that the product is even. So the claim follows from the lemma, which ends the proof.",
        SOLUTION + "The answer is obtained by adding all of these prices.",
        SOLUTION + r"Hence $\boxed{42",
        r"So it is $\boxed{}$.",
        "#### ",
        "$$",
    ],
)
def test_a_label_without_an_answer_is_refused(label: str) -> None:
    with pytest.raises(ValueError, match=r"a math ground truth must hold .*\\boxed.*####.*The answer is"):
        check_label("math", label)


@pytest.mark.parametrize(
    "label", [r"He has 40 + 2 pens, so $\boxed{42}$.", "40 + 2\n#### 42", "40 + 2 pens. The answer is 42."]
)
def test_gsm8k_reads_solutions_as_labels_too(label: str) -> None:
    check_label("gsm8k", label)
    assert score_response("gsm8k", label, [], "It is 42.").score == RIGHT
    assert score_response("gsm8k", label, [], "It is 40.").score == WRONG


# --- answers without a box --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("label", "text", "expected"),
    [
        ("3", "Therefore, the final answer is:\n$3$", RIGHT),
        ("3", "Therefore, the final answer is:\n\n$$3$$", RIGHT),
        ("3", "Therefore, the final answer is:\n\\[3\\]", RIGHT),
        ("3", "Therefore, the final answer is:\r\n\\[\n3\n\\]\r\n", RIGHT),
        ("3", "**The final answer is:** **3**", RIGHT),
        ("7", "We note $y=7$.\n\nThe final answer is:\n$7$", RIGHT),
        ("7", "We note $y=7$.\n\nThe final answer is:\n$3$", WRONG),
        ("7", "We note $y=7$.\n\nThe final answer is:", WRONG),
        (":", "We note $y=7$.\n\nThe final answer is:", WRONG),
        ("3", "The final answer is $3$ dollars. I hope it is correct.", RIGHT),
        ("3", "The final answer is $3$ dollars. We are done.", RIGHT),
        ("3", "The final answer is $3$ dollars. No, it is $4$.", WRONG),
        (r"3\text{ cm}", "The final answer is $3$ cm. I hope it is correct.", RIGHT),
        (r"3\text{ m}", "The final answer is $3$ cm. I hope it is correct.", WRONG),
        ("3", "The final answer is $3$ million. I hope it is correct.", WRONG),
        ("3", "The final answer is $3$ percent. I hope it is correct.", WRONG),
        ("3", "The final answer is $3$%. I hope it is correct.", WRONG),
        (r"3\%", "The final answer is $3$%. I hope it is correct.", RIGHT),
        ("3", "The final answer is $3$, because the sum is odd.", RIGHT),
        ("3", "The final answer is $3$, or $4$.", WRONG),
        ("4", "The final answer is $3$ or $4$.", WRONG),
        ("3", "The final answer is $3$, not counting the others.", WRONG),
        ("1, 2", "The final answer is $1$, $2$.", RIGHT),
        ("3", "The final answer is $3$. This was to be found.", RIGHT),
        ("3", "The final answer is $3$. No, it is $4$.", WRONG),
        ("3", "The final answer is 3. This was to be found.", RIGHT),
        ("3", "The final answer is 3. No, it is 4.", WRONG),
        ("3", "The final answer is $3.\nThe other one paid $5.", RIGHT),
        ("18.5", r"The final answer is $\$18.50$.", RIGHT),
        ("3", "**Final Answer:** $3$", RIGHT),
        ("3", "We note $y=7$.\nAnswer:\n3", RIGHT),
        ("7", "We note $y=7$.\nAnswer:\n3", WRONG),
        ("3", "Answer:\n\nFrom $x=1$ we see that $y=3$", RIGHT),
    ],
)
def test_what_the_final_answer_is(label: str, text: str, expected: float) -> None:
    assert score(label, text) == expected


@pytest.mark.parametrize(
    ("label", "text", "expected"),
    [
        ("7", r"First $y=7$. But the question asks for \[ x = 3. \]", WRONG),
        ("3", r"First $y=7$. But the question asks for \[ x = 3. \]", RIGHT),
        ("3", "First $y=7$, and with it\n$$\nx = 3.\n$$", RIGHT),
        ("3", r"First \[ y = 7 \] and then $x=3$", RIGHT),
        ("3", "Thus $y=7$ and\n\\begin{align*}\nx &= 1+2 \\\\\n&= 3.\n\\end{align*}", RIGHT),
        ("7", "Thus $y=7$ and\n\\begin{align*}\nx &= 1+2 \\\\\n&= 3.\n\\end{align*}", WRONG),
        ("2", "\\[\\begin{aligned} y &= 2 \\\\ x &= 3 \\end{aligned}\\]", WRONG),
        ("3", "\\[\\begin{aligned} y &= 2 \\\\ x &= 3 \\end{aligned}\\]", RIGHT),
        ("4", "It is not\n\\[4\\]", WRONG),
        ("4", "It is\n\\[4\\]\nor perhaps less.", WRONG),
        ("4", "It is\n\\[4\\]\nOr so we hope.", RIGHT),
        ("3", r"It costs \$5 or \$6, and then $x=3$", WRONG),
        ("3", r"It costs \$5. Then $x=3$", RIGHT),
    ],
)
def test_the_last_formula_counts_displayed_or_not(label: str, text: str, expected: float) -> None:
    assert score(label, text) == expected


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"So $\boxed 3$.", "3"),
        (r"So \boxed 3.", "3"),
        (r"So \(\boxed3\), q. e. d.", "3"),
        (r"So $\boxed \frac12$", r"\frac12"),
        (r"So $\boxed {3}$", "3"),
        (r"So $\boxed 35$", "35"),
        (r"So $\boxed x$", "x"),
        (r"\boxed{4}, and the form \boxed 3 is TeX", "4"),
        (r"I put it in \boxed as I was asked", None),
        (r"\boxed{4", None),
        (r"\boxed", None),
    ],
)
def test_a_box_may_have_no_braces(text: str, answer: str | None) -> None:
    assert boxed_answer(text) == answer


# --- matrices ---------------------------------------------------------------------------------------------------------

COLUMN = r"\begin{pmatrix} -4 \\ 3 \end{pmatrix}"
SQUARE = r"\begin{pmatrix} 1 & -\frac{1}{2} \\ \sqrt{8} & 4 \end{pmatrix}"


@pytest.mark.parametrize(
    ("label", "answer"),
    [
        (COLUMN, r"\begin{pmatrix} -4\\3 \end{pmatrix}"),
        (COLUMN, r"\begin{pmatrix}-4\\ 3\\\end{pmatrix}"),
        (COLUMN, r"\begin{bmatrix} -4 \\ 3 \end{bmatrix}"),
        (COLUMN, r"\begin{matrix} -4 \\ 3 \end{matrix}"),
        (COLUMN, r"\left( \begin{array}{c} -4 \\[2pt] 3 \end{array} \right)"),
        (COLUMN, r"\left[ \begin{array}{r} -4 \\ 3.0 \end{array} \right]"),
        (COLUMN, r"\mathbf{v} = \begin{pmatrix} -4 \\ \frac{6}{2} \end{pmatrix}"),
        (SQUARE, r"\begin{pmatrix}1&-1/2\\2\sqrt2&4\end{pmatrix}"),
        (SQUARE, r"\begin{bmatrix}1&-0.5\\\sqrt{8}&4\end{bmatrix}"),
        (r"\begin{vmatrix} 1 & 2 \\ 3 & 4 \end{vmatrix}", r"\begin{vmatrix}1&2\\3&4\end{vmatrix}"),
        (r"\begin{vmatrix} 1 & 2 \\ 3 & 4 \end{vmatrix}", r"\left| \begin{array}{cc} 1&2\\3&4 \end{array} \right|"),
    ],
)
def test_matrices_are_compared_entry_by_entry(label: str, answer: str) -> None:
    assert score_boxed(label, answer) == RIGHT


@pytest.mark.parametrize(
    ("label", "answer"),
    [
        (COLUMN, r"\begin{pmatrix} -4 & 3 \end{pmatrix}"),
        (COLUMN, r"\begin{pmatrix} 3 \\ -4 \end{pmatrix}"),
        (COLUMN, r"\begin{pmatrix} 4 \\ 3 \end{pmatrix}"),
        (COLUMN, r"\begin{pmatrix} -4 \\ 3 \\ 0 \end{pmatrix}"),
        (COLUMN, r"\begin{pmatrix} -4 \\ \end{pmatrix}"),
        (COLUMN, r"\begin{pmatrix} -4 \\ 3 \end{bmatrix}"),
        (COLUMN, "(-4, 3)"),
        (COLUMN, "-4, 3"),
        ("(-4, 3)", COLUMN),
        (SQUARE, r"\begin{pmatrix}1&\sqrt{8}\\-1/2&4\end{pmatrix}"),
        (SQUARE, r"\begin{pmatrix}1\\-1/2\\\sqrt{8}\\4\end{pmatrix}"),
        (SQUARE, r"\begin{pmatrix}1&-1/2&\sqrt{8}\\4\end{pmatrix}"),
        (SQUARE, r"\begin{vmatrix}1&-1/2\\\sqrt{8}&4\end{vmatrix}"),
        (SQUARE, r"2\begin{pmatrix}1&-1/2\\\sqrt{8}&4\end{pmatrix}"),
        (r"\begin{vmatrix} 1 & 2 \\ 3 & 4 \end{vmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
        (r"\begin{Vmatrix} 1 & 2 \\ 3 & 4 \end{Vmatrix}", r"\begin{vmatrix}1&2\\3&4\end{vmatrix}"),
    ],
)
def test_other_matrices_are_wrong(label: str, answer: str) -> None:
    assert score_boxed(label, answer) == WRONG


# --- names before an equals sign --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        *(
            "f(2) = 3",
            "P(3)=3",
            r"\theta = 3",
            r"\lambda=3",
            "a_{n+1}=3",
            "AB = 3",
            "a+b = 3",
            "f^{-1}(2) = 3",
            "y'(0)=3",
        ),
        *(
            r"\overline{AB} = 3",
            "|AB| = 3",
            "[ABC] = 3",
            "Area = 3",
            r"\text{Area of }\triangle ABC = 3",
            r"\text{cost}=\$3",
        ),
        *("x = y = 3", "x = a + b = 3", r"x = \frac{6}{2} = 3", r"\text{Area} = \frac{1}{2}bh = 3", r"\frac{6}{2} = 3"),
        *(r"\mathbf{3}", r"x = \mathbf{3}", r"\boldsymbol{3}", r"\text{3}", r"{3}", r"\mathbf{\frac{9}{3}}"),
    ],
)
def test_a_name_or_an_expression_before_the_value(answer: str) -> None:
    assert score_boxed("3", answer) == RIGHT
    assert score_boxed("2", answer) == WRONG


@pytest.mark.parametrize(
    "answer",
    [
        *("3 = x", "x = 3 = 4", "x = 3 = y", "5 = 3", "2x = 3", "-x = 3", "= 3", "x =", "x == 3", "f(2) = -3"),
        *(
            "x != 3",
            "x ~= 3",
            "x /= 3",
            r"x \not= 3",
            r"x \neq 3",
            r"x \approx 3",
            "x > 3",
            r"\text{not }x = 3",
            "not x = 3",
        ),
        *("x = 3 or 4", "5 or x = 3", r"5\text{ or }x = 3", r"x = 5\text{ and }x = 3", "y=5 x=3", r"y=5 \quad x=3"),
        *(r"y = 3 \quad x = 5", r"x=5 \\ x=3", r"5\text{ for }x=3", r"f(x)=5\text{ for }x=3", "f(x)=5 for x=3"),
        *("x=3, y=4", "x=3; y=4", r"x \in \{3\}", r"\mathbb{3}", r"\mathbf{3}\mathbf{4}", r"\mathbf{3}4"),
    ],
)
def test_what_is_not_only_a_name_before_the_value(answer: str) -> None:
    assert score_boxed("3", answer) == WRONG


@pytest.mark.parametrize(
    ("label", "answer", "expected"),
    [
        ("30", r"\angle ABC = 30^\circ", RIGHT),
        (r"30^\circ", r"m\angle{ABC} = 30", RIGHT),
        ("12", r"\text{Area} = 12", RIGHT),
        ("12", r"\text{Area} = 12\text{ cm}^2", RIGHT),
        (r"12\text{ m}^2", r"\text{Area} = 12\text{ cm}^2", WRONG),
        ("(1, 2)", "(x, y) = (1, 2)", RIGHT),
        ("(1, 2)", "(x, y) = (2, 1)", WRONG),
        ("1, 2", "x = 1, x = 2", RIGHT),
        ("1, 2", "x = 2, x = 1", WRONG),
        ("[1, 2]", r"x \in [1, 2]", RIGHT),
        ("[1, 2]", r"x \in (1, 2]", WRONG),
        ("[1, 2]", r"x \notin [1, 2]", WRONG),
        ("x = 3", "3", RIGHT),
        ("x = 4", "x = 3", WRONG),
        ("x = 3", "y = 3", WRONG),
        ("x = 3", "2x = 3", WRONG),
        ("x = 3 or x = 4", "x = 3 or x = 4", RIGHT),
        ("x = 3 or x = 4", "4", WRONG),
        ("x = 3 or x = 4", "x = 3 = 4", WRONG),
        ("f(2) = 3", "3", RIGHT),
        ("f(2) = 3", "f(2) = 3", RIGHT),
        ("f(2) = 3", "f(3) = 3", WRONG),
        ("a_1 = 3", "a_2 = 3", WRONG),
        ("AB = 3", r"\overline{BA} = 3", RIGHT),
        ("AB = 3", "CD = 3", WRONG),
        ("A = 12", r"\text{Area} = 12", RIGHT),
        ("y = 2x+1", "f(x) = 2x+1", RIGHT),
        ("y = 2x+1", "2x-y+1 = 0", RIGHT),
        ("y = 2x+1", "2x-y-1 = 0", WRONG),
        ("y = 2x+1", "y = 2x-1", WRONG),
        ("f(x) = x^2", "f(x) = x^3", WRONG),
        ("2x+3y=6", "3y+2x=6", RIGHT),
        ("2x+3y=6", "6 = 3y + 2x", RIGHT),
        ("2x+3y=6", "4x+6y=12", RIGHT),
        ("2x+3y=6", "2x+3y=7", WRONG),
        ("2x+3y=6", "2x-3y=6", WRONG),
        ("2x+3y=6", "2y+3x=6", WRONG),
        ("2x+3y=6", "4x+6y=6", WRONG),
        ("2x+3y=6", "6", WRONG),
        ("2x+3y=6", "x = x", WRONG),
        ("2x+3y=6", "0 = 0", WRONG),
        ("xy=6", "6", WRONG),
        ("x(x+1)=6", "6", WRONG),
        (r"\frac{x^2}{9}+\frac{y^2}{16}=1", "16x^2+9y^2=144", RIGHT),
        ("x^2+y^2=4", "x^2+y^2=2", WRONG),
    ],
)
def test_names_and_equations(label: str, answer: str, expected: float) -> None:
    assert score_boxed(label, answer) == expected


@pytest.mark.parametrize("label", ["C", "(C)", r"\text{C}", r"\text{(C)}", r"\textbf{(C)}"])
def test_letters_of_a_choice(label: str) -> None:
    for answer in (
        "C",
        "(C)",
        r"\text{(C)}",
        r"\textbf{C}",
        r"\mathbf{(C)}",
        r"(\text{C})",
        r"\text{\textbf{C}}",
        r"\text{C.}",
    ):
        assert score_boxed(label, answer) == RIGHT
    for answer in (
        "A",
        r"\text{(A)}",
        r"\text{(B, C)}",
        r"\text{B or C}",
        r"\text{(C)}\text{(D)}",
        "CC",
        r"\text{not (C)}",
    ):
        assert score_boxed(label, answer) == WRONG


# --- time -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "part",
    [
        *(
            "$",
            "$$",
            "\\[",
            "\\(",
            "\\[x",
            "\\begin{align}",
            "\\begin{align}\\begin{aligned}",
            "\\\\",
            "\\$",
            "$a",
            "final answer is:\n",
        ),
        *(
            "answer:\n",
            "answer is ",
            "####",
            "\\boxed",
            "\\boxed ",
            "\\boxed{",
            "\\boxed 3",
            "\\boxed\n",
            "\\text{",
            "{",
            "{}",
            "(",
            "()",
        ),
        *(
            "\\begin{pmatrix}",
            "1&",
            "1\\\\",
            "\\end{pmatrix}",
            "=",
            "x=",
            "a_{",
            "\\text{a}",
            "word ",
            "3. a ",
            "\\quad",
            "[1,2]",
        ),
    ],
)
def test_no_answer_or_label_of_100_kb_takes_long(part: str) -> None:
    text = (part * 100_000)[:100_000]
    started = time.process_time()  # a busy machine does not count
    for whole in (text, f"{text}\nThe final answer is {text}", rf"\boxed{{{text}}}", f"Answer: ${text}"):
        math_answer(whole)
        answer_of_label(whole)
        score("42", whole)
    math_value(text)
    assert time.process_time() - started < 4


@pytest.mark.parametrize(
    "part", ["x=", "=", "a_{1}", "\\text{a}", "(", "((", "1&", "{", "\\quad", "x ", "|x|", "1,", "f(", "\\frac{"]
)
def test_no_comparison_takes_long(part: str) -> None:
    text = (part * 300)[:280]
    started = time.process_time()
    for answer in (text, f"{text}=3", rf"\begin{{pmatrix}}{text[:200]}\end{{pmatrix}}", f"({text})", f"x={text}=3"):
        are_equal(answer, "x+3")
        are_equal(answer, "2x+3y=6")
    assert time.process_time() - started < 15


def test_a_long_list_of_hard_elements_has_one_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def hard(left: str, right: str) -> bool:
        return math_equivalence.within(0.3, lambda: all(len("") == 0 for _ in iter(int, 1)))

    monkeypatch.setattr(math_equivalence, "_same_at_points", hard)
    monkeypatch.setattr(math_equivalence, "PATIENCE_IN_ALL_S", 0.5)
    elements = [f"x+{number}" for number in range(12)]
    started = time.thread_time()  # a busy machine does not count
    assert not are_equal(rf"\{{{','.join(elements)}\}}", rf"\{{{','.join(elements).replace('x', 'y')}\}}")
    assert time.thread_time() - started < 2
