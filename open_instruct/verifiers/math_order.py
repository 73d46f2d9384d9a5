r"""Products whose factors may not be exchanged: of vectors and matrices, `\vec a\times\vec b`, `PDP^{-1}`, `a^{-1}ba`.

Of plain capitals nothing is known: they may be numbers (`PV = nRT`), points or matrices, and other rules compare them.
"""

import re

_MARKED = re.compile(r"\\(?:vec|mathbf|boldsymbol|bm|textbf|overrightarrow|hat) *(?:\{ *([A-Za-z]) *\}|([A-Za-z]))")
_CONJUGATE = re.compile(r"([A-Za-z])\^\{-1\}[ A-Za-z]*\1(?![A-Za-z^])|(?<![A-Za-z])([A-Za-z]) *[A-Za-z]+ *\2\^\{-1\}")


def products_in_order(text: str) -> tuple[str, ...]:
    """The vectors and bold letters of each term, with the sign between them, or a whole text that holds a conjugate; empty if no
    term has two different ones. A dot product has no order."""
    if _CONJUGATE.search(text):
        return (re.sub(r"\s", "", text),)
    marked = _MARKED.sub(lambda match: f" @{match[1] or match[2]} ", text)
    products = []
    for term in re.split(r"[-+=(),]", marked):
        letters = re.findall("@[A-Za-z]", term)
        if len(set(letters)) > 1:
            is_dot = r"\cdot" in term
            products.append(" ".join(sorted(letters)) if is_dot else "×".join(letters))
    return tuple(sorted(products))
