r"""Products whose factors may not be exchanged: of vectors and matrices, `\vec a\times\vec b`, `PDP^{-1}`, `a^{-1}ba`."""

import re

_MARKED = re.compile(r"\\(?:vec|mathbf|boldsymbol|bm|textbf|overrightarrow|hat) *(?:\{ *([A-Za-z]) *\}|([A-Za-z]))")
_CONJUGATE = re.compile(r"([a-z])\^\{-1\}[ a-z]*\1(?![a-z^])|([a-z]) *[a-z]+ *\2\^\{-1\}")


def products_in_order(text: str) -> tuple[str, ...]:
    """Capitals, vectors and bold letters in each term, with the signs between them; empty if no term has two different ones."""
    marked = _MARKED.sub(lambda match: f" @{match[1] or match[2]} ", text)
    if _CONJUGATE.search(text):
        return (re.sub(r"\s", "", text),)
    terms = re.split(r"[-+=(),]", re.sub(r"\^\{?-1\}?", "'", marked).replace(" ", ""))
    order = []
    for term in terms:
        letters = re.findall(r"(?:@[A-Za-z]|(?<![\\A-Za-z_{@])[A-Z](?![a-z(_])|(?<=[A-Z])[A-Z])'?", term)
        if len({letter.strip("'") for letter in letters}) > 1:
            sign = "×" if "@" in term and r"\times" in term else ""
            order.append(sign + " ".join(letters))
    return tuple(sorted(order))
