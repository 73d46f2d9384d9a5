r"""What `math` reads whole or not at all: tiny values, relations, alternatives, words, bases, tags. Each right answer
stands beside near misses, which must stay wrong. The values are worked out by hand."""

import time

import pytest

from open_instruct.verifiers import math_equivalence
from open_instruct.verifiers.math_syntax import read_expression
from open_instruct.verifiers.math_tokens import Unreadable
from open_instruct.verifiers.registry import score_response

RIGHT, WRONG = 1.0, 0.0


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> None:
    math_equivalence.prepare()


def score(label: str, text: str) -> float:
    return score_response("math", label, [], text).score


def score_boxed(label: str, answer: str) -> float:
    return score(label, rf"Thus it is $\boxed{{{answer}}}$.")


def score_both_ways(left: str, right: str) -> set[float]:
    return {score_boxed(left, right), score_boxed(right, left)}


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}"),
        ("10^{-25}", "10^{-26}"),
        ("2^{-50}", "0.0"),
        ("2^{-50}", "0"),
        (r"(\frac{1}{2^{50}}, 1)", "(0.0, 1)"),
        (r"\{2^{-60}, 1\}", r"\{2^{-61}, 1\}"),
        ("[0, 10^{-13}]", "[0, 0.0]"),
        (r"\sqrt{2}\cdot 10^{-30}", r"\sqrt{3}\cdot 10^{-30}"),
        (r"1+10^{-40}\sqrt{2}", "1"),
        ("x+2^{-200}", "x"),
        (r"\sqrt{10^{200}+1}", "10^{100}"),
        ("e^{-100}", "0"),
        ("10^{-400}", "0"),
        ("2x+3y=10^{-30}", "2x+3y=0"),
    ],
)
def test_tiny_numbers_and_differences_count(left: str, right: str) -> None:
    assert score_both_ways(left, right) == {WRONG}
    assert score_both_ways(left, left) == {RIGHT}


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (r"\frac{1}{2^{99}}", "2^{-99}"),
        (r"6.02\times 10^{23}", "602000000000000000000000"),
        ("1e-5", "0.00001"),
        ("1E+16", "10000000000000000"),
        ("-2.5e3", "-2500"),
        ("0.00000000000025", r"2.5 \cdot 10^{-13}"),
        (r"10^{-25}\sqrt{8}", r"2\cdot 10^{-25}\sqrt{2}"),
        ("101_2", "5"),
        ("2516_8", "1358"),
        ("A3_{16}", "163"),
        ("12_{10}", "12"),
        (r"0.\overline{3}", r"\frac{1}{3}"),
        (r"0.1\overline{6}", r"\frac{1}{6}"),
        (r"1.\overline{27}", r"\frac{14}{11}"),
        (r"2\frac{1}{2}", "2.5"),
        (r"{5 \choose 2}", "10"),
        (r"\binom{n}{2}", r"\frac{n(n-1)}{2}"),
        (r"\mathrm{e}^2", "e^2"),
        ("i^2", "-1"),
        ("(2+3i)(1-i)", "5+i"),
        (r"e^{i\pi}", "-1"),
        (r"\sin 30^\circ", r"\frac{1}{2}"),
        (r"\sqrt[3]{-8}", "-2"),
        (r"\sqrt{5+2\sqrt{6}}", r"\sqrt{2}+\sqrt{3}"),
        (r"\lfloor 5/2 \rfloor", "2"),
        (r"\sqrt(2)", r"\sqrt{2}"),
    ],
)
def test_equal_values_in_other_spellings(left: str, right: str) -> None:
    assert score_both_ways(left, right) == {RIGHT}


@pytest.mark.parametrize(
    "rest",
    [
        *(
            "\\sqrt(2)",
            "^",
            "+",
            "-",
            "\\cdot",
            "*",
            "/",
            "=",
            "^{}",
            "\\frac{",
            "\\sqrt",
            "|",
            ",",
            "_",
            "!",
            "_2",
            "'",
        ),
        *("\\left(2", ")", "]", "(", "\\}", "\\\\", "\\dots", "...", "\\,4", " 4", "\\overline{3}", "\\text{or}"),
        *("\\pm 1", "\\%", "^T", "^{\\top}", "^\\prime", "\\circ", ":4", "\\to 4", "\\mid 4", "<4", "\\neq 4", "''"),
        *("x", "i", "\\pi", "\\infty", "\\begin{pmatrix}1\\end{pmatrix}", "&", "#", "@", ";4", "²", "½"),
        *("\\quad 4", "\\quad x", "\\text{ or }4"),
    ],
)
def test_readable_beginning_is_not_the_formula(rest: str) -> None:
    """3 followed by anything that changes it, or that makes no sense."""
    assert score_boxed("3", f"3{rest}") == WRONG
    assert score_boxed(r"\frac{3}{7}", rf"\frac{{3}}{{7}}{rest}") == WRONG
    assert score_boxed("(3, 1)", f"(3{rest}, 1)") == WRONG
    assert score_boxed(r"\sqrt{5}", rf"\sqrt{{5}}{rest}") == WRONG


@pytest.mark.parametrize(
    ("label", "answer"),
    [
        ("10", "10_2"),
        ("f(x)", "f'(x)"),
        ("f(x)", "f(y)"),
        ("f(2)", "2f"),
        ("A", "A^T"),
        ("A", "A'"),
        ("x", "x_1"),
        ("z", r"\overline{z}"),
        ("v", r"\hat{v}"),
        (r"\sin 30", r"\sin 30^\circ"),
        ("e", "2.718281828459045"),
        ("x+C", "x+c"),
        (r"\sqrt{x^2}", "x"),
        (r"\ln|x|", r"\ln x"),
        ("x", r"x+0\infty"),
        ("1", r"\frac{\infty}{\infty}"),
        (r"\infty", r"2\infty"),
        (r"\infty", r"-\infty"),
        (r"\sin^{-1}x", r"\frac{1}{\sin x}"),
        (r"\sin x^2", r"\sin^2 x"),
        (r"\sqrt{-4}", "-2"),
        (r"\frac{1}{0}", r"\infty"),
    ],
)
def test_marks_on_a_name_and_near_misses_count(label: str, answer: str) -> None:
    assert score_both_ways(label, answer) == {WRONG}


@pytest.mark.parametrize(
    "text",
    [
        *("1/2x", r"\sin x/2", "2^3^4", "x!!", "2^{3}4", r"\frac123", r"\sqrt12", r"\sin(x)^2", r"3\frac{4}{2}"),
        *("||", "x y z w)", "word", "1.2.3", ""),
    ],
)
def test_text_with_two_meanings_or_none_is_not_read(text: str) -> None:
    with pytest.raises(Unreadable):
        read_expression(text)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (r"x\leq 3", r"x \le 3"),
        (r"x\leqslant 3", "x <= 3"),
        (r"x\leq \frac{1}{2}", r"x \leq 0.5"),
        (r"1 \leq x \leq 2", r"2 \ge x \geq 1"),
        (r"x \geq 2", r"2 \leq x"),
        (r"x\neq 3", r"3 \ne x"),
        (r"x \lt \sqrt{8}", r"2\sqrt{2} > x"),
        ("0<a<b", "b>a>0"),
        (r"x<1 \text{ or } x>2", r"x>2 \text{ or } 1>x"),
        (r"x \ne 0, 1", r"x \neq 0, 1"),
    ],
)
def test_relations_are_compared_side_by_side(left: str, right: str) -> None:
    assert score_both_ways(left, right) == {RIGHT}


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (r"x\leq 3", "x<3"),
        (r"x\leq 3", "3"),
        (r"x\leq 3", "x=3"),
        (r"x\leq 3", r"3\leq x"),
        (r"x\leq 3", r"y\leq 3"),
        (r"x\leq 3", r"x\leq 4"),
        (r"x\neq 3", "x=3"),
        (r"x\neq 3", "3"),
        ("1<x<2", r"1<x\leq 2"),
        ("1<x<2", "1<x"),
        ("1<x<2", "2<x<1"),
        (r"x<1 \text{ or } x>2", r"x<1"),
        (r"x<1 \text{ or } x>2", r"x<2 \text{ or } x>1"),
        (r"[0,1]", r"0\leq x\leq 1"),
        ("5", r"x \in 5"),
    ],
)
def test_other_relations_are_wrong(left: str, right: str) -> None:
    assert score_both_ways(left, right) == {WRONG}


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ("1, 2, 3", r"1, 2, \text{ and } 3", RIGHT),
        ("1, 2", r"1 \text{ and } 2", RIGHT),
        ("1, 2", r"2 \text{ and } 1", WRONG),
        ("1, 2", r"1 \mbox{ or } 2", RIGHT),
        ("1, 2", r"2 \text{ or } 1", RIGHT),
        ("1, 2", r"1 \text{ or } 3", WRONG),
        ("1, 2", "2, 1", WRONG),
        (r"x=1 \text{ or } x=2", r"x=2 \quad\text{or}\quad x=1", RIGHT),
        (r"x=1, y=2 \text{ or } x=3, y=4", r"x=3, y=4 \text{ or } x=1, y=2", RIGHT),
        (r"x=1, y=2 \text{ or } x=3, y=4", r"x=1, y=4 \text{ or } x=3, y=2", WRONG),
        ("x=3, y=4", "y=4, x=3", RIGHT),
        ("x=3, y=4", "y=3, x=4", WRONG),
        ("x=3, y=4", "x=3, z=4", WRONG),
        (r"\pm 5", "5, -5", RIGHT),
        (r"\pm 5", "-5, 5", RIGHT),
        (r"\pm 5", r"\{-5, 5\}", RIGHT),
        (r"\pm 5", r"x = 5 \text{ or } x = -5", RIGHT),
        (r"\pm 5", "5", WRONG),
        (r"\pm 5", "5, -4", WRONG),
        (r"\pm 5", r"\pm 6", WRONG),
        (r"\pm 5", "[-5, 5]", WRONG),
        (r"\pm 1, \pm 2", "-2, -1, 1, 2", RIGHT),
        (r"\{\pm 1\}", r"\{1, -1\}", RIGHT),
        (r"1\pm\sqrt{2}", r"1-\sqrt{2}, 1+\sqrt{2}", RIGHT),
        (r"1\pm\sqrt{2}", r"1+\sqrt{2}", WRONG),
        (r"\frac{-1\pm\sqrt{5}}{2}", r"\frac{-1\mp\sqrt{5}}{2}", RIGHT),
        (r"(-\infty, 2)\cup(3,\infty)", r"(3,\infty)\cup(-\infty,2)", RIGHT),
        (r"(-\infty, 2)\cup(3,\infty)", r"(3,\infty)\cup(-\infty,2]", WRONG),
        (r"(-\infty, 2)\cup(3,\infty)", r"(-\infty,2)", WRONG),
        (r"[0,1)\cup\{2\}", r"\{2\}\cup[0,1)", RIGHT),
        (r"\emptyset", r"\varnothing", RIGHT),
        (r"\emptyset", r"\{\emptyset\}", WRONG),
        (r"10\%, 20\%", r"10 \%, 20\%", RIGHT),
        (r"10\%, 20\%", "10, 20", WRONG),
    ],
)
def test_lists_alternatives_and_sets(left: str, right: str, expected: float) -> None:
    assert score_both_ways(left, right) == {expected}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<answer>42</answer>", RIGHT),
        ("<answer>$42$</answer>", RIGHT),
        (r"<answer>So it is \boxed{42}.</answer>", RIGHT),
        ("$7$, so <answer>42</answer>", RIGHT),
        (r"\boxed{41} no: <answer>42</answer>", RIGHT),
        (r"<answer>41</answer> no: \boxed{42}", RIGHT),
        (r"<answer>42</answer> no: \boxed{41}", WRONG),
        ("<answer>41</answer>", WRONG),
        ("<answer>42 or 43</answer>", WRONG),
        ("<answer>42</answer><answer>41</answer>", WRONG),
        ("<answer></answer> $42$", WRONG),
        ("6*7 is 42\n#### 42", RIGHT),
        ("Take $x=7$.\n#### 42\n", RIGHT),
        ("42\n#### 41", WRONG),
        ("#### 42\nand so on, in two\nlines", WRONG),
        ("**Final Answer**\n42", RIGHT),
        ("### Final Answer\n\n$42$", RIGHT),
        ("**Final Answer**\n$$42$$", RIGHT),
        ("**Final Answer:**\n42", RIGHT),
        ("Final Answer\n42.", RIGHT),
        ("**Final Answer**\n41", WRONG),
        ("**Final Answer**\n42 or 43", WRONG),
        ("42...", WRONG),
        ("$42...$", WRONG),
    ],
)
def test_marks_of_answers(text: str, expected: float) -> None:
    assert score("42", text) == expected


@pytest.mark.parametrize(
    "part",
    [
        *(
            "\\sin(",
            "\\sqrt{",
            "(x+",
            "x^{",
            "e^{",
            "\\frac{1}{",
            "|",
            "f(",
            "\\ln(",
            "\\binom{9}{",
            "-",
            "2^",
            "\\sin ",
        ),
        *("\\sin x+", "x^{999}+", "1/3^{24000}+", "9^{9999}", "\\frac{x}{7}+", "x!+", "\\sqrt{x}+", "(1+x)(", "\\pm "),
        *(
            "\\tan 10^{299}+",
            "\\binom{10^{299}}{300}+",
            "\\log_2 3^{99}+",
            "x^{0.5}+",
            "{",
            "\\left(",
            "'",
            "∨",
            "<",
            "x<",
        ),
        "\\text{ or }",
    ],
)
def test_no_expression_takes_long(part: str) -> None:
    closing = {"(": ")", "{": "}"}
    opened = "".join(closing.get(sign, "") for sign in reversed(part))
    number = 280 // len(part + opened)
    shorter = min(number, 35)
    texts = [part * number + "2", part * number + "x" + opened * number, part * shorter + "y" + opened * shorter]
    started = time.process_time()  # a busy machine does not count
    for text in texts:
        math_equivalence.are_equal(text, "x+3")
    math_equivalence.are_equal(texts[-1], f"{texts[-1]}+0")
    assert time.process_time() - started < 10


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("|x-10|", "10-x"),
        (r"\sqrt{(x-7)^2}", "7-x"),
        ("|x-4|", "4-x"),
        (r"\frac{|x-10|}{x-10}", "-1"),
        (r"((x-10)^2)^{\frac{1}{2}}", "10-x"),
        (r"\lfloor x/10\rfloor", r"\lfloor x/20\rfloor"),
        (r"\lfloor x\rfloor+\lfloor -x\rfloor", "-1"),
        (r"\lfloor x/17 \rfloor", r"\lceil x/17 \rceil - 1"),
        (r"\binom{n}{41}", "0"),
        (r"\arccos(\cos x)", "|x|"),
        (r"\arctan(\tan x)", "x"),
        ("|ab|", "ab"),
        ("|x-10^7|", "10^7-x"),
        ("|3x-100|+|3x-101|", "|6x-201|"),
        ("|x^2-500x+62499|", "x^2-500x+62499"),  # -1 at 250, and no number in it is near
        (r"\left|\frac{x^2-500x+62499}{x}\right|", r"\frac{x^2-500x+62499}{|x|}"),
        (r"\sqrt{(x^2-500x+62499)^2}", "x^2-500x+62499"),
        ("|x^2-500xy+62499y^2|", "x^2-500xy+62499y^2"),
        ("|x^3-750x^2+187499x-15624750|", "x^3-750x^2+187499x-15624750"),
        ("|x^3-750x^2+187499x-15624750|", "|x-250|(x^2-500x+62499)"),
        ("|x^3-1000x^2+249999x|", "|x|(x^2-1000x+249999)"),  # below 0 between 499 and 501
        (r"|x^4-1000x^3+249999x^2|", "x^4-1000x^3+249999x^2"),
        (r"|x-\sqrt{50}|+|x-\sqrt{51}|", r"|2x-\sqrt{50}-\sqrt{51}|"),
        ("x^{50}+|x-10|", "x^{50}+10-x"),
        ("|x-10|=3y", "10-x=3y"),
    ],
)
def test_expressions_that_differ_far_from_zero_or_between_two_numbers_differ(left: str, right: str) -> None:
    assert score_both_ways(left, right) == {WRONG}


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (r"\sqrt{(x-100)^2}", "|100-x|"),
        ("|x^2-500x+62499|", "|x-249||x-251|"),
        ("|x^3-60x^2+1100x-6000|", "|(x-10)(x-20)(x-30)|"),
        ("|x^2-500xy+62499y^2|", "|x-249y||x-251y|"),
        ("|x^3-8|", "|8-x^3|"),
        ("|x|^3", "|x^3|"),
        (r"\sqrt{\frac{x}{y}}", r"\frac{\sqrt{x}}{\sqrt{y}}"),
        (r"\sqrt{2}\sqrt{x-100}", r"\sqrt{2x-200}"),
        (r"\ln\frac{x}{y}", r"\ln x-\ln y"),
        (r"\frac{n!}{(n-2)!}", "n(n-1)"),
        ("2x-6y=14", "x-3y=7"),
        (r"\sqrt[3]{x^3}", "x"),
        (r"\sqrt{\sin \pi}", "0"),
    ],
)
def test_expressions_that_are_equal_wherever_both_are_real_are_equal(left: str, right: str) -> None:
    assert score_both_ways(left, right) == {RIGHT}


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("0", "e^{-1500}"),
        ("e^{-1500}", "e^{-1600}"),
        ("e^{-2000}", "2e^{-2000}"),
        ("5", "5+e^{-1500}"),
        ("x", "x+e^{-1500}"),
        ("1-e^{-2000}", "1"),
        (r"\pi^{-2000}", "e^{-2000}"),
        (r"(\sqrt2/2)^{5000}", "0"),
        (r"\sin(e^{-1500})", "0"),
        (r"\tanh 2000", "1"),
        (r"\sqrt{2}(1-10^{-5000})", r"\sqrt{2}"),
        (r"\sqrt2+10^{-400}", r"\sqrt2"),
        (r"\frac{1}{\cosh 2000}", "0"),
    ],
)
def test_no_number_is_too_small_to_count(left: str, right: str) -> None:
    assert score_both_ways(left, right) == {WRONG}
    assert score_both_ways(left, left) == score_both_ways(right, right) == {RIGHT}


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ("HT", "TH", WRONG),
        ("TF", "FT", WRONG),
        ("AC", "CA", WRONG),
        ("No", "oN", WRONG),
        ("IV", "VI", WRONG),
        ("ab", "ba", WRONG),
        ("A C", "C A", WRONG),
        ("(AC)", "(CA)", WRONG),
        ("HT, TT", "TH, TT", WRONG),
        (r"\{HT, TT\}", r"\{TH, TT\}", WRONG),
        (r"\sqrt AB", r"\sqrt{AB}", WRONG),
        ("HT", r"\text{HT}", RIGHT),
        ("AC+BC", "BC+AC", RIGHT),
        ("2ab", "2ba", RIGHT),
        ("xy", r"x \cdot y", RIGHT),
    ],
)
def test_two_letters_alone_are_no_product(left: str, right: str, expected: float) -> None:
    assert score_both_ways(left, right) == {expected}


@pytest.mark.parametrize(
    ("text", "latex"),
    [
        ("2π", r"2\pi"),
        ("πr²", r"\pi r^2"),
        ("√2", r"\sqrt{2}"),
        ("√12", r"2\sqrt{3}"),
        ("√3/2", r"\frac{\sqrt3}{2}"),
        ("√(x+1)", r"\sqrt{x+1}"),
        ("√π", r"\sqrt{\pi}"),
        ("∛8", "2"),
        ("x²", "x^2"),
        ("2⁻¹⁰", r"\frac{1}{1024}"),
        ("½", "0.5"),
        ("3½", r"3\frac{1}{2}"),
        ("2×3", "6"),
        ("10÷4", "2.5"),
        ("6.02×10²³", r"6.02\times 10^{23}"),
        ("x ≤ 2", r"x \leq 2"),
        ("x ⩾ 2", r"x \geqslant 2"),
        ("x ≠ 3", r"x \neq 3"),
        ("(−∞, 2) ∪ [3, ∞)", r"(-\infty,2)\cup[3,\infty)"),
        ("x ∈ [1, 2]", "[1,2]"),
        ("1 ± √2", r"1\pm\sqrt{2}"),
        ("x₁+x₂", "x_1+x_2"),
        ("101₂", "5"),
        ("α+Δλ", r"\alpha+\Delta\lambda"),
        ("⌊x⌋", r"\lfloor x\rfloor"),
        ("∠ABC", r"\angle ABC"),
        (r"25π\text{ cm²}", r"25\pi\text{ cm}^2"),
        ("（1，2）", "(1,2)"),
        ("𝑥²", "x^2"),
    ],
)
def test_signs_of_unicode_are_commands_of_latex(text: str, latex: str) -> None:
    assert score_both_ways(text, latex) == {RIGHT}


@pytest.mark.parametrize(
    ("text", "latex"),
    [
        ("√2x", r"\sqrt{2x}"),
        ("√2x", r"\sqrt{2}x"),
        ("√x²", "x"),
        ("x²3", "x^{23}"),
        ("3½", "3"),
        ("2π", "2"),
        ("4²", "4"),
    ],
)
def test_signs_of_unicode_with_two_meanings_are_not_read(text: str, latex: str) -> None:
    assert score_both_ways(text, latex) == {WRONG}
