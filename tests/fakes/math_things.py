r"""Kinds of mathematical things, each drawn at random and spelled in all its forms, with answers that are not the thing."""

import random
from collections.abc import Callable
from fractions import Fraction

from math_edge_things import EDGES
from math_spellings import Spelling, Thing, frac, in_base, latex, num, other, plain, plain_decimal, raised, repeating

WORDS = ("east", "west", "even", "odd", "Monday", "Friday", "red", "blue", "parallel", "isosceles", "cone", "ellipse")
UNITS = ("cm", "m", "kg", "inches", "dollars", "seconds")


def whole_number(rng: random.Random) -> Thing:
    value = rng.randint(1001, 9_999_999) * rng.choice((1, 10, 1000))
    grouped = f"{value:,}"
    base = rng.randint(2, 9)
    spellings = [
        Spelling("digits", str(value)),
        Spelling("thousands with `,`", grouped),
        Spelling("thousands with `{,}`", grouped.replace(",", "{,}")),
        Spelling("thousands with a thin space", grouped.replace(",", r"\,")),
        Spelling("thousands with a space", grouped.replace(",", " "), is_read=False),
        Spelling("decimal zeros", f"{value}.00"),
        Spelling("name before `=`", f"x = {value}"),
        Spelling("font", rf"\mathbf{{{value}}}"),
        Spelling("sum", f"{value - 17} + 17"),
        Spelling("product", rf"2 \cdot \frac{{{value}}}{{2}}"),
        Spelling("power of ten", rf"{plain_decimal(Fraction(value, 1000))} \times 10^{{3}}"),
        Spelling("exponent `1e3`", f"{plain_decimal(Fraction(value, 1000))}e3"),
        Spelling("Unicode", f"{plain_decimal(Fraction(value, 1000))}×10³"),
        Spelling("other base", f"{in_base(value, base)}_{{{base}}}"),
    ]
    wrong = [str(other(rng, Fraction(value))) for _ in range(2)]
    return Thing(spellings, [*wrong, f"{in_base(value, base)}", rf"{value}\%", rf"\frac{{1}}{{{value}}}", f"{value}!"])


def fraction(rng: random.Random) -> Thing:
    value = frac(rng)
    factor = rng.randint(2, 9)
    unreduced = rf"\frac{{{value.numerator * factor}}}{{{value.denominator * factor}}}"
    spellings = [
        Spelling(r"`\frac`", latex(value)),
        Spelling(r"`\dfrac`", latex(value, "dfrac")),
        Spelling("slash", plain(value)),
        Spelling("not reduced", unreduced),
        Spelling("repeating decimal", repeating(value)),
        Spelling("quotient", rf"{value.numerator} \div {value.denominator}"),
        Spelling("negative power", rf"{value.numerator} \cdot {value.denominator}^{{-1}}"),
    ]
    whole, rest = divmod(abs(value.numerator), value.denominator)
    if whole:
        sign = "-" if value < 0 else ""
        spellings.append(Spelling("mixed number", rf"{sign}{whole}\frac{{{rest}}}{{{value.denominator}}}"))
    rounded = f"{float(value):.6f}"
    if Fraction(rounded) != value:
        spellings.append(Spelling("rounded decimal", rounded, is_read=False))
    return Thing(spellings, [latex(other(rng, value)), plain(other(rng, value)), latex(value) + r"\pi"])


def decimal(rng: random.Random) -> Thing:
    value = Fraction(num(rng, 99_999), 10 ** rng.randint(1, 6))
    text = plain_decimal(value)
    spellings = [
        Spelling("decimal", text),
        Spelling("more zeros", text + ("00" if "." in text else ".00")),
        Spelling(r"`\frac`", latex(value)),
        Spelling("money", rf"\${text}" if value > 0 else text),
        Spelling("exponent `1e-3`", f"{plain_decimal(value * 1000)}e-3"),
    ]
    return Thing(
        spellings, [plain_decimal(value + Fraction(1, 10**9)), plain_decimal(-value), text + r"\%", text + "..."]
    )


def tiny(rng: random.Random) -> Thing:
    base, exponent = rng.choice((2, 3, 5, 10)), rng.randint(20, 120)
    spellings = [
        Spelling("negative power", f"{base}^{{-{exponent}}}"),
        Spelling("one over a power", rf"\frac{{1}}{{{base}^{{{exponent}}}}}"),
        Spelling("slash", f"1/{base}^{{{exponent}}}"),
        Spelling("power of a fraction", rf"\left(\frac{{1}}{{{base}}}\right)^{{{exponent}}}"),
        Spelling("Unicode", f"{base}{raised(-exponent)}"),
    ]
    return Thing(
        spellings, [f"{base}^{{-{exponent + 1}}}", f"{base}^{{{exponent}}}", "0", "0.0", f"{base + 1}^{{-{exponent}}}"]
    )


def radical(rng: random.Random) -> Thing:
    factor, under, plus = rng.randint(2, 12), rng.choice((2, 3, 5, 6, 7, 10, 11)), rng.randint(1, 20)
    approximation = f"{plus + factor * under**0.5:.10f}"
    spellings = [
        Spelling("root", rf"{plus}+{factor}\sqrt{{{under}}}"),
        Spelling("other order", rf"{factor}\sqrt{{{under}}} + {plus}"),
        Spelling("all under the root", rf"{plus}+\sqrt{{{factor**2 * under}}}"),
        Spelling("root below the line", rf"{plus}+\frac{{{factor * under}}}{{\sqrt{{{under}}}}}"),
        Spelling("fractional power", rf"{plus}+{factor}\cdot {under}^{{\frac{{1}}{{2}}}}"),
        Spelling("one fraction", rf"\frac{{{2 * plus}+{2 * factor}\sqrt{{{under}}}}}{{2}}"),
        Spelling(r"`\sqrt(2)`", rf"{plus}+{factor}\sqrt({under})"),
        Spelling("Unicode", f"{plus} + {factor}√{under}"),
        Spelling("Unicode with halves", f"{plus}½ + {factor}√{under} − ½"),
        Spelling("decimal", approximation, is_read=False),
    ]
    wrong = [
        rf"{plus}-{factor}\sqrt{{{under}}}",
        rf"{plus}+{factor}\sqrt{{{under + 1}}}",
        rf"{plus + 1}+{factor}\sqrt{{{under}}}",
    ]
    return Thing(spellings, [*wrong, f"{plus}+{factor}", rf"{plus}+{factor}\sqrt[3]{{{under}}}"])


def constant(rng: random.Random) -> Thing:
    value, exponent = abs(frac(rng)), rng.randint(2, 9)
    spellings = [
        Spelling(r"fraction before π", rf"{latex(value)}\pi + e^{{{exponent}}}"),
        Spelling(r"π in the fraction", rf"\frac{{{value.numerator}\pi}}{{{value.denominator}}}+e^{{{exponent}}}"),
        Spelling(r"`\mathrm{e}`", rf"\mathrm{{e}}^{{{exponent}}} + {latex(value)}\pi"),
        Spelling(r"`\exp`", rf"\exp({exponent}) + {latex(value)} \cdot \pi"),
        Spelling("Unicode", f"{plain(value)} · π + e{raised(exponent)}"),
    ]
    return Thing(
        spellings, [rf"{latex(other(rng, value))}\pi + e^{{{exponent}}}", rf"{latex(value)}\pi + e^{{{exponent + 1}}}"]
    )


def logarithm(rng: random.Random) -> Thing:
    base, exponent = rng.randint(2, 9), rng.randint(2, 6)
    spellings = [
        Spelling(r"`\ln`", rf"{exponent}\ln {base}"),
        Spelling(r"`\ln` of a power", rf"\ln {base**exponent}"),
        Spelling("brackets", rf"\ln\left({base}^{{{exponent}}}\right)"),
        Spelling("quotient of logarithms", rf"\frac{{\log {base**exponent}}}{{\log e}}"),
    ]
    return Thing(
        spellings,
        [rf"{exponent + 1}\ln {base}", rf"\ln {base**exponent + 1}", rf"{exponent}\log {base}", rf"{exponent}"],
    )


def trigonometric(rng: random.Random) -> Thing:
    factor = rng.randint(2, 9)
    spellings = [
        Spelling("double angle", rf"{factor}\sin(2x)"),
        Spelling("functions without brackets", rf"{2 * factor}\sin x\cos x"),
        Spelling("powers of functions", rf"\frac{{{2 * factor}\sin^2 x\cos x}}{{\sin x}}"),
    ]
    return Thing(spellings, [rf"{factor}\sin x", rf"{factor}\cos(2x)", rf"{factor}\sin(2y)", rf"{factor + 1}\sin(2x)"])


def polynomial(rng: random.Random) -> Thing:
    first, second = rng.sample([n for n in range(-9, 10) if n], 2)
    total, product = -(first + second), first * second

    def signed(n: int) -> str:
        return f"+{n}" if n >= 0 else str(n)

    expanded = f"x^2{signed(total)}x{signed(product)}"
    spellings = [
        Spelling("expanded", expanded),
        Spelling("factors", f"(x{signed(-first)})(x{signed(-second)})"),
        Spelling("other order", f"{product}{signed(total)}x+x^{{2}}"),
        Spelling("Unicode", f"x²{signed(total)}x{signed(product)}".replace("-", "−")),
        Spelling("name before `=`", f"f(x) = {expanded}"),
    ]
    return Thing(
        spellings,
        [
            f"x^2{signed(total + 1)}x{signed(product)}",
            f"x^2{signed(total)}x{signed(-product)}",
            expanded.replace("x", "t"),
        ],
    )


def complex_number(rng: random.Random) -> Thing:
    real, imaginary = rng.randint(1, 30), rng.randint(2, 30)
    spellings = [
        Spelling("sum", f"{real}+{imaginary}i"),
        Spelling("other order", f"{imaginary}i+{real}"),
        Spelling(r"`\mathrm{i}`", rf"{real}+{imaginary}\mathrm{{i}}"),
        Spelling("product", f"i({imaginary}-{real}i)"),
    ]
    return Thing(
        spellings, [f"{real}-{imaginary}i", f"{real}+{imaginary}", f"{real}+{imaginary}j", f"{real + 1}+{imaginary}i"]
    )


def counted(rng: random.Random) -> Thing:
    above = rng.randint(6, 14)
    below = rng.randint(2, above // 2 - 1)
    value = 1
    for k in range(below):
        value = value * (above - k) // (k + 1)
    spellings = [
        Spelling("digits", str(value)),
        Spelling(r"`\binom`", rf"\binom{{{above}}}{{{below}}}"),
        Spelling(r"`\choose`", rf"{{{above} \choose {below}}}"),
        Spelling("factorials", rf"\frac{{{above}!}}{{{below}!\,{above - below}!}}"),
    ]
    return Thing(spellings, [rf"\binom{{{above}}}{{{below + 1}}}", rf"\frac{{{above}}}{{{below}}}", f"{value + 1}"])


def bounds(rng: random.Random) -> tuple[Fraction, Fraction]:
    low, high = sorted((frac(rng), frac(rng)))
    return (low, high) if low < high else (low, low + 1)


def interval(rng: random.Random) -> Thing:
    low, high = bounds(rng)
    left, right = rng.choice("(["), rng.choice(")]")
    turned = {"(": "[", "[": "(", ")": "]", "]": ")"}
    spellings = [
        Spelling("brackets", f"{left}{latex(low)}, {latex(high)}{right}"),
        Spelling(r"`\left`, `\right`", rf"\left{left} {plain(low)} ,\, {plain(high)} \right{right}"),
        Spelling(r"`x \in`", rf"x \in {left}{latex(low)}, {repeating(high)}{right}"),
        Spelling(
            "inequality",
            f"{latex(low)} {'<=' if left == '[' else '<'} x {'<=' if right == ']' else '<'} {latex(high)}",
            is_read=False,
        ),
    ]
    wrong = [f"{turned[left]}{latex(low)}, {latex(high)}{right}", f"{left}{latex(low)}, {latex(high)}{turned[right]}"]
    return Thing(
        spellings, [*wrong, f"{left}{latex(low - 1)}, {latex(high)}{right}", rf"\{{{latex(low)}, {latex(high)}\}}"]
    )


def union_of_intervals(rng: random.Random) -> Thing:
    points = sorted(rng.sample(range(-40, 40), 3))
    first, second = rf"(-\infty, {points[0]})", f"({points[1]}, {points[2]}]"
    spellings = [
        Spelling("in order", rf"{first} \cup {second}"),
        Spelling("other order", rf"{second} \cup {first}"),
        Spelling("Unicode", f"(−∞, {points[0]}) ∪ {second}"),
    ]
    wrong = [
        first,
        rf"{first} \cap {second}",
        rf"{first} \cup ({points[1]}, {points[2]})",
        rf"(-\infty, {points[0]}] \cup {second}",
    ]
    return Thing(spellings, wrong)


def elements(rng: random.Random, count: int) -> list[Fraction]:
    values: list[Fraction] = []
    while len(values) < count:
        values += [value for value in [frac(rng)] if value not in values]
    return values


def joined(values: list[Fraction], spell: Callable[[Fraction], str] = latex) -> str:
    return ", ".join(map(spell, values))


def set_of_numbers(rng: random.Random) -> Thing:
    values = elements(rng, rng.randint(2, 4))
    shuffled = rng.sample(values, len(values))
    spellings = [
        Spelling("in order", rf"\{{{joined(values)}\}}"),
        Spelling("any order", rf"\{{{joined(shuffled, plain)}\}}"),
        Spelling(r"`\left\{`", rf"\left\{{ {joined(shuffled, repeating)} \right\}}"),
        Spelling("list", joined(values), is_read=False),
    ]
    changed = [other(rng, values[0]), *values[1:]]
    changed = changed if set(changed) != set(values) else [values[0] + 1000, *values[1:]]
    return Thing(
        spellings,
        [
            rf"\{{{joined(changed)}\}}",
            rf"\{{{joined(values[1:])}\}}",
            f"({joined(values)})",
            rf"\{{{joined(values)}, 99\}}",
        ],
    )


def point(rng: random.Random) -> Thing:
    values = elements(rng, rng.randint(2, 4))
    rows = joined(values).replace(", ", r" \\ ")
    spellings = [
        Spelling("brackets", f"({joined(values)})"),
        Spelling(r"`\left`, `\right`", rf"\left( {joined(values, plain)} \right)"),
        Spelling("name before `=`", f"P = ({joined(values, repeating)})"),
        Spelling("column", rf"\begin{{pmatrix}} {rows} \end{{pmatrix}}", is_read=False),
    ]
    return Thing(
        spellings,
        [f"({joined(values[::-1])})", f"[{joined(values)})", f"({joined([*values[:-1], other(rng, values[-1])])})"],
    )


def list_of_numbers(rng: random.Random) -> Thing:
    values = elements(rng, 3)
    shown = list(map(latex, values))
    spellings = [
        Spelling("commas", ", ".join(shown)),
        Spelling("`and` before the last", rf"{shown[0]}, {shown[1]} \text{{ and }} {shown[2]}"),
        Spelling("comma and `and`", rf"{shown[0]}, {shown[1]}, \text{{ and }} {shown[2]}"),
        Spelling("`or`, any order", rf"{shown[2]}, {shown[0]} \text{{ or }} {shown[1]}", is_read=False),
    ]
    return Thing(
        spellings, [", ".join(shown[::-1]), ", ".join(shown[:2]), rf"{shown[0]} \text{{ or }} {shown[1]}", shown[0]]
    )


def alternatives(rng: random.Random) -> Thing:
    middle, under = rng.randint(1, 30), rng.choice((2, 3, 5, 7))
    low, high = rf"{middle}-\sqrt{{{under}}}", rf"{middle}+\sqrt{{{under}}}"
    spellings = [
        Spelling(r"`\pm`", rf"{middle}\pm\sqrt{{{under}}}"),
        Spelling("Unicode", f"{middle} ± √{under}"),
        Spelling("`or`", rf"{high} \text{{ or }} {low}"),
        Spelling("`or` with names", rf"x = {low} \text{{ or }} x = {high}"),
        Spelling("set", rf"\{{{low}, {high}\}}", is_read=False),
        Spelling("list", f"{low}, {high}", is_read=False),
    ]
    return Thing(spellings, [low, high, rf"\pm\sqrt{{{under}}}", rf"{middle + 1}\pm\sqrt{{{under}}}", f"{low}, {low}"])


def square_matrix(rng: random.Random) -> Thing:
    a, b, c, d = elements(rng, 4)

    def rows(environment: str, spell: Callable[[Fraction], str] = latex) -> str:
        inner = rf"{spell(a)} & {spell(b)} \\ {spell(c)} & {spell(d)}"
        return rf"\begin{{{environment}}} {inner} \end{{{environment}}}"

    spellings = [
        Spelling("`pmatrix`", rows("pmatrix")),
        Spelling("`bmatrix`", rows("bmatrix", plain)),
        Spelling(
            "`array`",
            rows("pmatrix")
            .replace(r"\begin{pmatrix}", r"\left(\begin{array}{cc}")
            .replace(r"\end{pmatrix}", r"\end{array}\right)"),
        ),
    ]
    swapped = rf"\begin{{pmatrix}} {latex(a)} & {latex(c)} \\ {latex(b)} & {latex(d)} \end{{pmatrix}}"
    return Thing(
        spellings,
        [
            swapped,
            rows("vmatrix"),
            rf"({latex(a)}, {latex(b)}, {latex(c)}, {latex(d)})",
            rows("pmatrix").replace(latex(d), latex(d + 1000)),
        ],
    )


def inequality(rng: random.Random) -> Thing:
    low, high = bounds(rng)
    spellings = [
        Spelling(r"`<`, `\leq`", rf"{latex(low)} < x \leq {latex(high)}"),
        Spelling(r"`\lt`, `\leqslant`", rf"{plain(low)} \lt x \leqslant {plain(high)}"),
        Spelling("other direction", rf"{latex(high)} \geq x > {latex(low)}"),
        Spelling("`>=`", f"{plain(high)} >= x > {plain(low)}"),
        Spelling("Unicode", f"{plain(low)} < x ≤ {plain(high)}"),
        Spelling("interval", f"({latex(low)}, {latex(high)}]", is_read=False),
    ]
    wrong = [
        rf"{latex(low)} \leq x \leq {latex(high)}",
        rf"{latex(low)} < x < {latex(high)}",
        rf"{latex(low)} > x \geq {latex(high)}",
    ]
    return Thing(
        spellings,
        [
            *wrong,
            rf"x \leq {latex(high)}",
            rf"{latex(low)} < y \leq {latex(high)}",
            latex(high),
            rf"{latex(low)} < x \neq {latex(high)}",
        ],
    )


def line(rng: random.Random) -> Thing:
    a, b, c = rng.randint(2, 9), rng.randint(2, 9), rng.randint(1, 30)
    k = rng.randint(2, 5)
    spellings = [
        Spelling("equation", f"{a}x+{b}y={c}"),
        Spelling("sides exchanged", f"{c} = {b}y + {a}x"),
        Spelling("multiple", f"{a * k}x + {b * k}y = {c * k}"),
        Spelling("zero on one side", f"{a}x+{b}y-{c}=0"),
    ]
    return Thing(
        spellings, [f"{a}x-{b}y={c}", f"{a}x+{b}y={c + 1}", f"{a * k}x+{b * k}y={c}", str(c), f"{a}x+{b}z={c}"]
    )


def named_values(rng: random.Random) -> Thing:
    x, y = elements(rng, 2)
    spellings = [
        Spelling("names", f"x = {latex(x)}, y = {latex(y)}"),
        Spelling("any order", f"y = {plain(y)}, x = {plain(x)}"),
        Spelling("`and`", rf"x = {latex(x)} \text{{ and }} y = {latex(y)}"),
    ]
    return Thing(
        spellings,
        [
            f"x = {latex(y)}, y = {latex(x)}",
            f"x = {latex(x)}",
            f"x = {latex(x)}, z = {latex(y)}",
            f"x = {latex(x)}, y = {latex(other(rng, y))}",
        ],
    )


def with_unit(rng: random.Random) -> Thing:
    value, unit = rng.randint(2, 5000), rng.choice(UNITS)
    another = rng.choice([one for one in UNITS if one != unit])
    spellings = [
        Spelling(r"`\text`", rf"{value}\text{{ {unit}}}"),
        Spelling(r"`\mathrm`", rf"{value}\ \mathrm{{{unit}}}"),
        Spelling("no unit", str(value), is_read=False),
        Spelling("more zeros", rf"{value}.0\text{{ {unit}}}"),
    ]
    return Thing(
        spellings,
        [
            rf"{value}\text{{ {another}}}",
            rf"{value + 1}\text{{ {unit}}}",
            rf"{value}\text{{ million}}",
            rf"{value}\text{{ {unit}}}^2",
            rf"{value}\%",
        ],
    )


def percentage(rng: random.Random) -> Thing:
    value = Fraction(rng.randint(1, 999), 10)
    text = plain_decimal(value)
    spellings = [
        Spelling(r"`\%`", rf"{text}\%"),
        Spelling("space before the sign", rf"{text} \%"),
        Spelling("`percent`", rf"{text}\text{{ percent}}"),
        Spelling("fraction of 1", plain_decimal(value / 100), is_read=False),
    ]
    return Thing(spellings, [text, rf"{plain_decimal(value + 1)}\%", rf"-{text}\%", rf"{text}\text{{ cm}}"])


def word(rng: random.Random) -> Thing:
    text, another = rng.sample(WORDS, 2)
    spellings = [
        Spelling("word", text),
        Spelling(r"`\text`", rf"\text{{{text}}}"),
        Spelling("bold", rf"\textbf{{{text}}}"),
    ]
    return Thing(
        spellings, [another, rf"\text{{not {text}}}", rf"\text{{{text} or {another}}}", text[::-1], f"{text} {another}"]
    )


def choice(rng: random.Random) -> Thing:
    letter, another = rng.sample("ABCDE", 2)
    spellings = [
        Spelling("letter", letter),
        Spelling("brackets", f"({letter})"),
        Spelling(r"`\text`", rf"\text{{({letter})}}"),
        Spelling("bold", rf"\textbf{{({letter})}}"),
    ]
    return Thing(
        spellings, [another, f"({another})", f"{letter}{another}", rf"\text{{{letter} or {another}}}", f"{letter}'"]
    )


KINDS: dict[str, Callable[[random.Random], Thing]] = {
    "whole number": whole_number,
    "fraction": fraction,
    "decimal": decimal,
    "tiny number": tiny,
    "root": radical,
    "π and e": constant,
    "logarithm": logarithm,
    "trigonometry": trigonometric,
    "polynomial": polynomial,
    "complex number": complex_number,
    "binomial coefficient": counted,
    "interval": interval,
    "union": union_of_intervals,
    "set": set_of_numbers,
    "tuple": point,
    "list": list_of_numbers,
    "alternatives": alternatives,
    "matrix": square_matrix,
    "inequality": inequality,
    "equation": line,
    "named values": named_values,
    "unit": with_unit,
    "percentage": percentage,
    "word": word,
    "choice": choice,
    **EDGES,
}
