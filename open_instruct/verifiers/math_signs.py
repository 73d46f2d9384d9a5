r"""Signs of Unicode in LaTeX: `\pi` for π, `x^2` for x², `\sqrt{2}` for √2. What has two meanings (`√2x`) stays as it is."""

import re
import unicodedata

_GREEK = {
    sign: f"\\{unicodedata.name(sign).split()[-1].lower()} "
    for sign in "αβγδεζηθικμνξπρστυφχψω"  # λ has another name in Unicode
}
_CAPITALS = {
    sign: f"\\{unicodedata.name(sign).split()[-1].capitalize()} "
    for sign in "ΓΔΘΞΠΣΥΦΨΩ"  # and so has Λ
}
_COMMANDS = {
    "λΛϕϵϑℓ": ("lambda", "Lambda", "phi", "epsilon", "vartheta", "ell"),
    "×÷·⋅∙•": ("times", "div", "cdot", "cdot", "cdot", "cdot"),
    "∞∪∩∈∠△": ("infty", "cup", "cap", "in", "angle", "triangle"),
    "⩽⩾≦≧": ("leq", "geq", "leq", "geq"),
    "⌊⌋⌈⌉": ("lfloor", "rfloor", "lceil", "rceil"),
}
_FRACTIONS = {
    sign: r"\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", sign).split("\N{FRACTION SLASH}"))
    for sign in "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
}
_SIGNS = str.maketrans(
    {
        **_GREEK,
        **_CAPITALS,
        **{sign: f"\\{name} " for signs, names in _COMMANDS.items() for sign, name in zip(signs, names, strict=True)},
        **_FRACTIONS,
        **{sign: rf"\mathbb{{{unicodedata.normalize('NFKC', sign)}}}" for sign in "ℝℤℕℚℂ"},
        "\N{MINUS SIGN}": "-",
        "\N{FRACTION SLASH}": "/",
        "\N{PRIME}": "'",
        "\N{DIVIDES}": "|",
    }
)
_COMPATIBLE = re.compile("[\uff01-\uff5e\U0001d400-\U0001d7ff]+")
"""Full-width signs and letters of a font: `（` and `𝑥`."""
_EN_DASH = re.compile("(?:(?<=[(\\[{,=+*/<>&^])|(?<=\\A)) *\N{EN DASH}(?=[0-9.A-Za-z\\\\(])")
"""A dash that is a minus, because nothing stands before it: `1–2` may be a range."""
_RAISED, _LOWERED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "₀₁₂₃₄₅₆₇₈₉ₙ"
_RAISED_PART, _LOWERED_PART = re.compile(f"[{_RAISED}]+(?=([0-9])?)"), re.compile(f"[{_LOWERED}]+")
_PLAIN_OF = str.maketrans(_RAISED + _LOWERED, "0123456789+-n" + "0123456789n")
_ROOT = re.compile(r"([√∛∜])\s*(?:([0-9]+(?:\.[0-9]+)?|[A-Za-z])(?![0-9.]*[A-Za-z0-9(\[{\\^!√∛∜])|(?=[({\\]))")
_INDEX = {"√": "", "∛": "[3]", "∜": "[4]"}


def in_latex(text: str) -> str:
    """The text with commands of LaTeX in place of mathematical signs of Unicode."""
    if text.isascii():
        return text
    text = _EN_DASH.sub("-", _COMPATIBLE.sub(lambda match: unicodedata.normalize("NFKC", match[0]), text)).translate(
        _SIGNS
    )
    text = _LOWERED_PART.sub(lambda match: f"_{{{match[0].translate(_PLAIN_OF)}}}", text)
    return _ROOT.sub(_root, _RAISED_PART.sub(_power, text))


def _power(match: re.Match[str]) -> str:
    exponent = match[0].translate(_PLAIN_OF)
    return f"^{exponent}" if len(exponent) == 1 and not match[1] else f"^{{{exponent}}}"


def _root(match: re.Match[str]) -> str:
    return rf"\sqrt{_INDEX[match[1]]}" + (f"{{{match[2]}}}" if match[2] else "")
