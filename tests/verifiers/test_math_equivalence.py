r"""Mathematical equivalence: what is the same in other words, and what only looks like it."""

import random
import time

import pytest

from open_instruct.verifiers import math_equivalence
from open_instruct.verifiers.math_equivalence import TookTooLong, are_equal, within
from open_instruct.verifiers.pool import VerifierPool
from open_instruct.verifiers.registry import score_response


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> None:
    math_equivalence.prepare()


SAME = [
    ("90", r"90^\circ"),
    (r"90^\circ", "90"),
    ("90", r"90^{\circ}"),
    ("18.50", r"\$18.50"),
    ("5", r"5\text{ cm}"),
    ("5", r"5 \text{ inches}"),
    ("5", "x=5"),
    ("2x+1", "y = 2x+1"),
    ("x=5", "5"),
    ("3x", "f(x) = 3x"),
    ("x^2+1", "1+x^2"),
    ("x^2+2x+1", "(x+1)^2"),
    (r"\frac{1}{\sqrt{3}}", r"\frac{\sqrt{3}}{3}"),
    (r"2\sqrt{2}", r"\sqrt{8}"),
    ("1024", "2^{10}"),
    ("24", "4!"),
    ("5040", "7!"),
    ("5", "5+0"),
    ("6", r"2\cdot 3"),
    (r"\frac{3\pi}{4}", r"\frac34\pi"),
    (r"\sqrt{2}", r"\sqrt2"),
    (r"2\sqrt{3}", r"2\sqrt3"),
    ("x^2", "x^{2}"),
    ("a_1", "a_{1}"),
    (r"-\frac{1}{2}", r"\frac{-1}{2}"),
    (r"\frac{-1}{2}", r"-\frac12"),
    ("12", "12_{10}"),
    ("12_{10}", "12"),
    (r"2\pi", r"2\pi\text{ cm}"),
    ("(1,2)", r"\left( 1 ,\; 2 \right)"),
    (r"(\frac{1}{2}, \sqrt{8})", r"(0.5, 2\sqrt{2})"),
    (r"[0,1)\cup(2,\infty)", r"[0, 1) \cup (2, \infty)"),
    (r"\{1, 2\}", r"\{2, 1\}"),
    (r"2\sin x\cos x", r"\sin(2x)"),
    (r"3\ln 2", r"\ln 8"),
    ("1000", "x = 1,000"),
    ("x = 1,000", "1000"),
    (r"1000\pi", r"1,000\pi"),
    (r"1,000\pi", r"1{,}000\pi"),
    ("1,000,000", "10^6"),
    ("10^6", "1,000,000"),
    (r"1,000\sqrt{2}, 2,000", r"1000\sqrt{2}, 2000"),
    ("100, 200", "100,200"),
    ("100,200", "100, 200"),
    ("x = 100, 200", "x = 100,200"),
    ("120", "5! = 120"),
    ("120", "5!=120"),
    ("120", "x = 5! = 120"),
    ("6", "n! = 6"),
    ("252", r"\frac{10!}{5!5!} = 252"),
    ("1", r"\lim_{x \to 0}\frac{\sin x}{x} = 1"),
    ("1", r"3^{100} \bmod 5 = 1"),
    ("6", r"\gcd(12, 18) = 6"),
    ("3", r"\lfloor \pi \rfloor = 3"),
    ("4", r"\deg(f) = 4"),
    (r"58,\!500", "58500"),
    (r"58,\!500", "58{,}500"),
    (r"58,\!500", "58,500"),
    (r"58,\!500", r"58,\! 500"),
    ("58500", r"58,\!500"),
    ("58500", r"58{,}\!500"),
    (r"1,\!000,\!000", "1000000"),
    (r"\$1,\!234.50", "1234.5"),
    (r"(1,\!000, 2)", "(1000, 2)"),
    (r"1,\!000\sqrt{8}", r"2000\sqrt{2}"),
]
OTHER = [
    ("42", r"42\text{ or }43"),
    ("42", "42, 43"),
    ("42", r"\text{not }42"),
    ("42", r"42\%"),
    ("0.5", r"50\%"),
    (r"3\text{ m}", r"3\text{ cm}"),
    (r"2\pi\text{ m}", r"2\pi\text{ cm}"),
    ("12", "1,2"),
    ("1,2", "2,1"),
    ("(1,2)", "(2,1)"),
    ("(1,2)", "[1,2]"),
    ("(1,2)", r"\{1,2\}"),
    ("(1,2)", "(1,2,3)"),
    ("1", "(1,1)"),
    ("5", "x>5"),
    ("5", r"x\neq 5"),
    ("5", r"x \in 5"),
    ("5", r"5\pm 1"),
    ("5", r"\pm 5"),
    ("5", r"\{5\}"),
    ("5", "5.0000001"),
    ("0.333", r"\frac{1}{3}"),
    (r"\frac{1}{3}", "0.333"),
    (r"\sqrt{2}", "1.41421356"),
    ("-5", "5"),
    ("x", "y"),
    ("y=5", "x>5"),
    ("2x+1", "2y+1"),
    ("4", "2+2=5"),
    ("4", "5=4"),
    ("1200", "(1,200)"),
    ("1200", r"\{1,200\}"),
    (r"1200\pi", r"(1,200\pi)"),
    ("1200", "x = 1, 200"),
    (r"1200\pi", r"1, 200\pi"),
    ("1200", "x = 1,20"),
    (r"12000\pi", r"12,00,0\pi"),
    (r"1000200\pi", r"1,000,20,0\pi"),
    (r"2000\pi", r"1,000\pi"),
    ("121", "5! = 121"),
    ("121", "5!=121"),
    ("5", "2!=5"),
    ("3", "x != 3"),
    ("3", "x!=3"),
    ("3", "x !  = 3"),
    ("3", "x_1!=3"),
    ("3", "f(2)!=3"),
    ("3", "x+2!=3"),
    ("3", r"\sin 2!=3"),
    ("3", "! = 3"),
    ("1", r"\gcd(12, 18) = 6"),
    ("4", r"\lfloor \pi \rfloor = 3"),
    ("1", r"3^{100} \equiv 1 = 1"),
    ("[0,1]", r"0\leq x\leq 1"),
    ("x=5", "x=5,y=6"),
    ("10", "1 0"),
    ("5i", "5"),
    (r"\infty", r"-\infty"),
    ("10", "10^{10^{10}}"),
    ("10", "10^{9999999999}"),
    ("10", "99999999!"),
    ("10", "10!!"),
    ("abc", "cba"),
    ("east", "seat"),
    ("5", "five"),
    ("1", r"\text{1 if x else 0}"),
    ("1", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    (r"\frac{1}{2}", r"\frac{1}{2"),
    ("x", "}" * 100),
    ("x", "(" * 250),
    ("x^2", "x^2" * 200),
    ("3, 125", "3125"),
    ("3125", "3, 125"),
    (r"58,\!500", "58, 500"),
    (r"58,\!500", "500"),
    (r"58,\!500", "58"),
    (r"5,\!8500", "58500"),
    (r"(1,\!2)", "(12)"),
]


@pytest.mark.parametrize(("label", "answer"), SAME)
def test_the_same_in_other_words(label: str, answer: str) -> None:
    assert score_response("math", label, [], rf"So it is $\boxed{{{answer}}}$.").score == 1


@pytest.mark.parametrize(("label", "answer"), OTHER)
def test_what_only_looks_like_it(label: str, answer: str) -> None:
    started = time.process_time()  # a busy machine does not count
    assert score_response("math", label, [], rf"So it is $\boxed{{{answer}}}$.").score == 0
    assert time.process_time() - started < 3


@pytest.mark.parametrize(
    ("text", "label", "score"),
    [
        ("The final answer is $5$. I hope it is correct.", "5", 1),
        (r"Final Answer: The final answer is $\frac{1}{2}$. I hope it is correct.", "0.5", 1),
        ("Final Answer: The final answer is $6$. I hope it is correct. $5$", "5", 0),
        ("so we get $x=3$, and are done", "3", 1),
        (r"so we get \(x+1\) at last", "1+x", 1),
        ("Step 1: 7.\nAnswer: $5$", "5", 1),
        ("Step 1: 7.\n**Answer:** 5", "5", 1),
        ("Answer: 5 or 6", "5", 0),
        ("42", "42", 1),
        ("not 42", "42", 0),
        ("42 or 43", "42", 0),
        ("The answer is 42", "42", 1),
        ("The answer is not 42", "42", 0),
        ("The answer is 42 or 43", "42", 0),
        ("It may be $42$ or $43$", "43", 0),
        ("It is not $42$", "42", 0),
        ("It isn't $42$", "42", 0),
        ("It is $42$, but perhaps 43", "42", 0),
        ("It is not 7. So $42$", "42", 1),
        (r"I put it in \boxed format. The final answer is $5$.", "5", 1),
        (r"\boxed{4", "4", 0),
        (r"$5$, so \boxed{}", "5", 0),
    ],
)
def test_answers_without_a_box(text: str, label: str, score: float) -> None:
    assert score_response("math", label, [], text).score == score


@pytest.mark.parametrize(
    "text",
    [
        "We can not have a negative number, so the answer is $42$.",
        "The probability of rolling a 1 or 2 is $42$.",
        "It is not 7, so $42$",
        "It is not 7, so it is $42$",
        "The answer is $42$ because it is not negative.",
        "The sum of the integers that are not divisible by 3 is $67$, and that of all is $42$",
        "The number of integers that are not divisible by 3 is $42$.",
        "It isn't 7; hence we have $42$",
        "The number of ways to choose neither of them equals $42$.",
        "It is not $7$ but $42$.",
        "Because either side may be chosen, we get $42$.",
        "Since $x$ can't be $7$, $x$ must be $42$.",
        "Either way the total is $42$.",
        "The total is $42$, which is not negative.",
        "Either $x = 1$ or $x = 2$, but $x$ is larger, so $x = 42$.",
        "Without loss of generality $42$ is the number, which is never reached.",
        "The final answer is $42$, because it is not negative.",
        "The final answer is $42$ since $x \\neq 7$.",
    ],
)
def test_a_denial_of_something_else_is_none(text: str) -> None:
    assert score_response("math", "42", [], text).score == 1


@pytest.mark.parametrize(
    "text",
    [
        "It can't be $42$",
        "It wasn't $42$",
        "It isn’t $42$",
        "I don't think it is $42$",
        "I am not sure that the answer is $42$",
        "The answer is not equal to $42$.",
        "The answer is not the number $42$.",
        "It cannot be $42$.",
        "It is never $42$",
        "So it is neither $41$ nor $42$.",
        "Perhaps it is $42$",
        "The answer might be $42$",
        "It is $41$ or $42$.",
        "It is 41, or the answer is $42$.",
        "$42$ is wrong",
        "$42$ would be incorrect.",
        "$42$ isn't it.",
        "We get $42$, which is not the answer.",
        "We get $42$ which cannot be right.",
        "It is not 7, and so not $42$.",
        "It is $42$, or maybe 43.",
        "It is $42$ or 43.",
        "It is $42$ (or 43).",
        "It is $42$ but that may be wrong.",
        "The final answer is $42$ as well as $43$.",
        "The final answer is $42$, because I guess. No, it is $43$.",
        "The final answer is $42$, since it is even, or $43$.",
    ],
)
def test_an_answer_that_is_denied_or_one_of_two_is_none(text: str) -> None:
    assert score_response("math", "42", [], text).score == 0


@pytest.mark.parametrize(
    "part",
    [
        "not ",
        "not'",
        "n't ",
        "or ",
        "'",
        "a'",
        "a-",
        ", or ",
        ",or",
        "either a a a ",
        "so ",
        ", the a",
        ", ",
        "( ",
        " ",
    ],
)
def test_denials_in_a_text_of_100_kb_take_no_time(part: str) -> None:
    started = time.process_time()  # a busy machine does not count
    for length in (100_000, 3_900):  # the second is looked at as a whole
        text = (part * length)[:length]
        for whole in (f"{text}$42$", f"$42${text}", f"not a{text}$42$", f"The final answer is $42$, as {text}"):
            score_response("math", "42", [], whole)
    assert time.process_time() - started < 1


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("The final answer is $5$. I hope it is correct.", 1),
        ("5", 1),
        (r"\boxed{5}", 0),
        ("so $5$ it is", 0),
    ],
)
def test_strict_math_takes_a_final_answer_alone(text: str, score: float) -> None:
    assert score_response("strict_math", "5", [], text).score == score


def test_what_takes_too_long_is_not_equal() -> None:
    def forever() -> bool:
        while True:
            len("")

    started = time.process_time()
    with pytest.raises(TookTooLong, match=r"more than 0\.2 s"):
        within(0.2, forever)
    assert time.process_time() - started < 1
    assert within(5, lambda: True)


def test_sympy_can_be_asked_in_the_jail() -> None:
    with VerifierPool(1, 10.0, ready=["math"]) as pool:
        [right, wrong] = pool.score_group("math", "x^2+2x+1", [[], []], [r"\boxed{(x+1)^2}", r"\boxed{(x+2)^2}"])
        assert (right.score, wrong.score) == (1.0, 0.0)
        assert not pool.counts


PIECES = [
    *(
        "\\boxed{",
        "}",
        "{",
        "$",
        "\\frac",
        "\\sqrt",
        "^",
        "_",
        "(",
        ")",
        ",",
        "=",
        "-",
        ".",
        " ",
        "\n",
        "!",
        "|",
        "\\left",
        "%",
    ),
    *(
        "0",
        "7",
        "12345678901234567890",
        "x",
        "or",
        "not",
        "\\text{",
        "\\pm",
        "∪",
        "½",
        "٣",
        "\ud7ff",
        "\u202e",
        "é",
        "\x00",
    ),
    *(
        "The final answer is ",
        "Answer: ",
        "<answer>",
        "</answer>",
        "</think>",
        "<finish>",
        "</finish>",
        "(" * 300,
        "9" * 500,
    ),
]


def hostile(seed: int, number: int) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices(PIECES, k=rng.randrange(1, 40))) for _ in range(number)]


LABELS = {
    "math": r"\frac{271}{3\sqrt{828}}",
    "strict_math": r"\frac{271}{3\sqrt{828}}",
    "gsm8k": "271828",
    "string_matcher": "euler's number",
    "flan": "euler's number",
    "puzzle": "euler's number",
    "re_search": '["euler\'s number", "e"]',
    "string_f1": "euler's number",
    "re_search_f1": "euler's number",
    "max_length": "100",
    "up_to_max_length": "100",
    "ifeval": {"instruction_id": ["keywords:existence"], "kwargs": [{"keywords": ["Euler's number"]}]},
    "ifeval_old": {"func_name": "verify_keywords", "keyword_list": ["Euler's number"]},
}
CODE_LABELS = {"code": ["assert f(271) == 828"], "code_stdio": [{"input": "271", "output": "828"}]}
"""Of verifiers that score outside the pool's processes."""


@pytest.mark.parametrize("name", LABELS)
def test_no_hostile_answer_is_right_or_raises(name: str) -> None:
    for text in hostile(7, 400):
        score = score_response(name, LABELS[name], [0] * 3000, text).score
        assert score <= (0.92 if "length" in name else 0.1), text


@pytest.mark.parametrize("name", [name for name in LABELS if "length" not in name])
@pytest.mark.parametrize(
    "text",
    [
        "9" * 1_000_000,
        "\\boxed{" + "9" * 1_000_000 + "}",
        "{" * 1_000_000,
        "\\boxed{" * 100_000 + "}" * 100_000,
        "<answer>" * 100_000,
        "<finish>" * 100_000,
        "$" * 1_000_000,
        "$a" * 500_000,
        "answer:" * 100_000,
        "final answer is " * 60_000,
        " " * 1_000_000 + "x",
        "x or " * 200_000,
    ],
    ids=lambda text: text[:12],
)
def test_long_answers_take_linear_time(name: str, text: str) -> None:
    started = time.process_time()  # a busy machine does not count
    assert score_response(name, LABELS[name], [], text).score <= 0.1
    assert time.process_time() - started < 5


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ten_thousand_hostile_answers_through_the_pool() -> None:
    with VerifierPool(2, 10.0, ready=sorted(LABELS)) as pool:
        for name, label in (LABELS | CODE_LABELS).items():
            if "length" in name:
                continue
            texts = hostile(8, 1200)
            futures = [
                pool.submit(name, label, [[]] * 50, texts[start : start + 50]) for start in range(0, len(texts), 50)
            ]
            for future in futures:
                for scored in future.result(timeout=600):
                    assert scored.score is not None, scored
                    assert scored.score <= 0.1
        assert not pool.counts


def test_equality_is_symmetric() -> None:
    for label, answer in SAME:
        assert are_equal(answer, label) or score_response("math", answer, [], rf"\boxed{{{label}}}").score == 1
