"""Finds the answer in the text of a mathematical response, and in a label that is a whole solution.

Text that offers two answers is returned unchanged, and then it equals no label. Every search looks only at the last `LAST_PART`
characters, or takes time linear in the length of the text.
"""

import re

from open_instruct.verifiers.answer_reading import boxed_answer, boxed_span, extract_answer, without_full_stop

LONGEST_WHOLE = 100
"""Longest response, in characters, that may be an answer as a whole."""
LONGEST_ANSWER = 400
LAST_PART = 4000
"""Characters at the end of a response that are searched for an answer without a box."""
_DISPLAY = (
    r"\$\$(?P<dollars>(?:[^$\\]|\\.)+?)\$\$|\\\[(?P<brackets>.+?)\\\]"
    r"|\\begin\{(?P<kind>equation|align|gather|multline)(?P<star>\*?)\}(?P<environment>.+?)\\end\{(?P=kind)(?P=star)\}"
)
_display = re.compile(_DISPLAY, re.DOTALL)
_formula = re.compile(
    rf"\\[\\$]|{_DISPLAY}|\$(?P<dollar>(?:[^$\\]|\\.)+?)\$|\\\((?P<parentheses>.+?)\\\)",
    re.DOTALL,
)
"""A formula; or `\\\\` or `\\$`, which is matched here so that it does not begin a formula."""
_box_begins = re.compile(r"\\(?:boxed|fbox)[ \t\n]*\{")
_LINES = re.compile(r"\\begin\{(aligned|split|gathered)\}(.*)\\end\{\1\}", re.DOTALL)
_BODIES = ("dollars", "brackets", "environment", "dollar", "parentheses")
_FINAL = re.compile(r"final answer is\b", re.IGNORECASE)
_STATED = re.compile(r"\b(?:answer|option|choice|result) is\b:?", re.IGNORECASE)
_ANSWER_LINE = re.compile(
    r"^ *(?:\*\*)?(?:final )?answer(?:\*\*)?:|^[ \t#*_]*(?:the )?(?:final )?answer[ \t*_]*$",
    re.IGNORECASE | re.MULTILINE,
)
"""`Answer:` at the beginning of a line, or a heading such as `**Final Answer**`."""
_MARKED_LINE = re.compile(r"(?:\A|\n)[ \t]*####[ \t]*([^#\s][^\n]*)\Z")
"""The last line of a response in the form of GSM8K's solutions: `#### 42`."""
_STATED_IN_LABEL = re.compile(r"\banswer(?: is\b|(?:\*\*)?:)", re.IGNORECASE)
_END_OF_STATEMENT = re.compile(r"\n|I hope it is correct", re.IGNORECASE)
_NOT = r"(?:not|nor|neither|never|cannot|[a-z]+n['\u2019]t)"
_OFFERS_MORE = re.compile(rf"\b(?:or|either|perhaps|maybe|unless|but|no|wrong|{_NOT})\b|[0-9$\\]", re.IGNORECASE)
_UNLESS = re.compile(
    rf"\b(?:{_NOT}|perhaps|maybe|possibly|if|whether|unless|no|wrong|incorrect|false|doubt)\b", re.IGNORECASE
)
"""Denies or doubts the statement behind it."""
_REASON = re.compile(r"[,;]?\s*(?:because|since|as(?! well\b))\b", re.IGNORECASE)
_SECOND = re.compile(r"\b(?:or|but|perhaps|maybe|unless)\b[^$\\0-9]*[$\\0-9]", re.IGNORECASE)
"""A second answer in addition to the first."""
_REMARK = re.compile(r"[.,;:!()]|because\b|since\b|as\b|which\b", re.IGNORECASE)
"""The beginning of a text that may follow an answer without changing it. `million`, for example, would change it."""


def math_answer(text: str) -> str | None:
    """The answer in a response; None if there is none.

    The answer is the last `\\boxed{…}` or `<answer>…</answer>`, and of the text in these tags the part that this function finds
    in it. Without either, it is what `Final Answer: The final answer is $…$.`, a last line `#### …` or `Answer: …`, or the line
    below a heading `Final Answer` says. Without these, it is the last formula (`$…$`, `\\(…\\)`, `$$…$$`, `\\[…\\]`), unless its
    sentence denies it or offers another. Without any formula, it is what `The answer is …` says, or the whole response, if that
    is short enough to be an answer.
    """
    answer = extract_answer(text)
    if answer is not None and not _box_begins.search(text, text.rfind("</answer>")):
        return _whole_of_tags(answer) or math_answer(answer)
    if (answer := boxed_answer(text)) is not None or _box_begins.search(text):
        return None if answer is None else _with_surroundings(text, answer)
    if (answer := final_answer(text)) is not None:
        return answer
    end = _last_part(text)
    if match := _MARKED_LINE.search(end.rstrip()):
        return _statement(match[1])
    if (answer := _answer_line(end)) is not None:
        return answer
    formulas = [match for match in _formula.finditer(end) if match.lastgroup]
    if not formulas:
        return _stated_answer(end) or whole_answer(text)
    formula = _last_that_is_no_reason(end, formulas)
    return None if _is_hedged(end, formula) else _body(formula)


_BEFORE_BOX = re.compile(
    rf"(?:(?P<minus>(?:\A|[$(=\s])-)|\b{_NOT} +(?:\$+|\\[(\[])? *)(?:\\(?:boxed|fbox)[ \t\n]*)\{{\Z", re.IGNORECASE
)
"""A minus or a denial right before a box. A dash with a space behind it is no minus: `Answer - \\boxed{42}`."""
_BEHIND_BOX = re.compile(
    r"(?P<percent>[$ ]*(?:\\[)\]])? *(?:\\?%|\\text\{ *percent *\}|percent\b))|\^\{?[0-9]", re.IGNORECASE
)
"""A sign of percent or a power right behind a box. `^\\circ` are degrees; what a text says behind a box is not read."""


def _with_surroundings(text: str, answer: str) -> str | None:
    """The answer in the last box with a minus or a sign of percent outside of it; None if other signs make it a part of something
    (`\\boxed{42}^2`), or a word denies it (`not \\boxed{42}`)."""
    begin, end = boxed_span(text)
    if begin < 0:
        return answer
    before, behind = _BEFORE_BOX.search(text[max(begin - 60, 0) : begin]), _BEHIND_BOX.match(text, end + 1)
    if before and (before["minus"] is None or not answer.replace(".", "").isdecimal()):
        return None
    if behind and behind["percent"] is None:
        return None
    return ("-" if before else "") + answer + ("\\%" if behind else "")


def _last_that_is_no_reason(text: str, formulas: list[re.Match[str]]) -> re.Match[str]:
    """The last formula that does not only give a reason for the one before it: 7 in `It is $7$, since $8$ is impossible.`"""
    formulas = list(formulas)
    while len(formulas) > 1:
        between = text[formulas[-2].end() : formulas[-1].start()]
        is_reason = re.search(r"\b(?:since|because)\b", between, re.IGNORECASE) and not re.search(
            r"[.?!]\s|\n\n", between
        )
        if not is_reason or _FOLLOWS.search(between):
            break
        formulas.pop()
    return formulas[-1]


def _whole_of_tags(content: str) -> str | None:
    """The text in `<answer>…</answer>`, if it is one formula without dollars, such as a matrix of several lines; else None."""
    is_one = "\n" not in content or content.startswith(("\\begin", "\\left"))
    is_plain = (
        len(content) <= LONGEST_ANSWER
        and not re.search(r"\\(?:boxed|fbox)", content)
        and not re.search(r"\$|\\[(\[]|answer", content)
    )
    return " ".join(content.split()) if content and is_one and is_plain else None


def _answer_line(end: str) -> str | None:
    """The answer in the last line `Answer: …`, or the formula or single short line after `Answer:` at the end of the text."""
    for match in reversed(list(_ANSWER_LINE.finditer(end))):
        behind = end[match.end() :]
        below = behind.strip("* \r\n")
        formula = _formula.match(below)
        is_formula = formula is not None and not below[formula.end() :].strip(" .")
        begins_here = behind.partition("\n")[0].strip(" *\r") != ""
        if begins_here or is_formula or ("$" not in below and whole_answer(below)):
            return _statement(behind)
    return None


def final_answer(text: str) -> str | None:
    """The answer in `The final answer is $…$. I hope it is correct.` (Minerva, arXiv:2206.14858, appendix D). None without this
    sentence, and an empty text if nothing follows `is`."""
    end = _last_part(text)
    matches = list(_FINAL.finditer(end))
    return _statement(end[matches[-1].end() :]) if matches else None


def _stated_answer(end: str) -> str | None:
    """42 in `So the answer is 42.`, the last such statement; None if the text behind it offers something else."""
    matches = list(_STATED.finditer(end))
    if not matches:
        return None
    line, _, behind = end[matches[-1].end() :].partition("\n")
    before = re.split(r"[.?!]\s|\n", end[: matches[-1].start()])[-1]
    is_denied = _UNLESS.search(before) or _OFFERS_MORE.search(behind)
    return None if is_denied else _statement(line) or None


def whole_answer(text: str) -> str | None:
    """The whole response, if it is one short line; else None."""
    text = text.strip()
    return text if text and len(text) <= LONGEST_WHOLE and "\n" not in text else None


def answer_of_label(label: str) -> str | None:
    """The answer in a label: in its last box, after its last `####`, or after `The answer is`; else the label itself.

    None if a box has no end, or if the label is a long text in none of these forms.
    """
    if "\\boxed" in label or "\\fbox" in label:
        return boxed_answer(label)
    if "####" in label:
        return _without_delimiters(label.rpartition("####")[2].strip().partition("\n")[0])
    is_prose = len(label) > LONGEST_WHOLE and _num_words(label) > 5
    end = _last_part(label)
    if matches := list(_STATED_IN_LABEL.finditer(end)):
        answer = _statement(end[matches[-1].end() :])
        if answer and (not is_prose or _num_words(answer) <= 3):
            return answer
    return None if is_prose else _without_delimiters(label)


# --- parts of a text --------------------------------------------------------------------------------------------------


def _last_part(text: str) -> str:
    """The end of a text. It begins with a whole line if possible, so that no formula is cut in two."""
    if len(text) <= LAST_PART:
        return text
    end = text[-LAST_PART:]
    return end.partition("\n")[2] or end


def _body(formula: re.Match[str]) -> str:
    body = next(formula[name] for name in _BODIES if name in formula.re.groupindex and formula[name] is not None)
    lines = _LINES.fullmatch(body.strip())
    if lines or formula["environment"] is not None:
        body = _last_equation(lines[2] if lines else body)
    return without_full_stop(body.strip().rstrip(",;"))


def _last_equation(lines: str) -> str:
    """The last equation, `x = 1 + 2 = 3` for `x &= 1 + 2 \\\\ &= 3`: the last line, and the lines before it that it continues."""
    rows = [row.replace("&", " ").strip() for row in lines.split("\\\\")]
    rows = [row for row in rows if row] or [""]
    start = next((number for number in range(len(rows) - 1, -1, -1) if not rows[number].startswith("=")), 0)
    return " ".join(rows[start:])


def _statement(text: str) -> str:
    """The answer at the beginning of `text`, which follows `the final answer is`: a formula, even on one of the next lines, with
    a unit in words after it; or the rest of the line."""
    text = text.lstrip(" \t\r\n:*")
    line = _END_OF_STATEMENT.split(text, maxsplit=1)[0].strip(" \t\r*")
    formula = _formula.match(line) or _display.match(text)
    if formula is None or not formula.lastgroup:
        return _first_sentence(line)
    behind = _END_OF_STATEMENT.split(text[formula.end() :], maxsplit=1)[0].strip(" \t\r*")
    if behind in ("%", "\\%", "%.", "\\%."):
        return _body(formula) + "\\%"
    if _is_remark(behind):
        return _body(formula)
    words, _, remark = behind.partition(". ")
    unit = words.rstrip(".").split()
    is_unit = len(unit) <= 3 and all(word.replace(".", "").replace("/", "").isalpha() for word in unit)
    if is_unit and not _OFFERS_MORE.search(remark):
        return f"{_body(formula)}\\text{{ {' '.join(unit)}}}"
    return without_full_stop(line).strip("$")


def _is_remark(text: str) -> bool:
    """Whether the text after a formula leaves the answer as it is: `, because it is not negative.` does, `, or $4$` and
    `. No, it is $4$` do not."""
    if not text:
        return True
    if _REASON.match(text):
        reason, *rest = re.split(r"[.?!](?:\s|$)", text, maxsplit=1)
        return not _SECOND.search(reason) and not _OFFERS_MORE.search("".join(rest))
    return _REMARK.match(text) is not None and not _OFFERS_MORE.search(text)


_MARKED = re.compile(r"\A(?:([`\"])([^`\"]+?)[.!]?\1|\**([^*]+?)[.!]?\*{1,2})[.!]?\Z")
"""`**42**.`, `*42*`, `"42".`, or the same in code."""


def _first_sentence(line: str) -> str:
    """A line as an answer. A further sentence after a number or a formula is left out if it is only a remark."""
    line = _MARKED.sub(r"\2\3", line)
    match = re.match(r"(.{0,400}?[0-9)}\]])[.!] +(.*)", line)
    if match and not _OFFERS_MORE.search(match[2]):
        line = match[1]
    number = re.match(r"[-+]?[0-9](?:[0-9.,/]*[0-9])?(?=,? (?:because|since|as|which)\b)", line)
    if number and _is_remark(line[number.end() :].lstrip(" ,")):
        line = number[0]
    return without_full_stop(line[: LONGEST_ANSWER + 1]).strip("$")


_VERB = r"(?:is|are|was|were|equals?|gives?|get|gets|have|has|makes?|leaves?|yields?|becomes?|must|will|would)"
_UP_TO_IT = rf"(?:\s+(?!{_VERB}\b)[\w'\u2019-]+){{0,4}}[\s(\"*]*\Z"
"""The text from a denial to the formula: a few words without a verb, because a verb would begin another statement."""
_FOLLOWS = re.compile(
    r"[,;:]\s+(?:and\s+(?!then\b)|but\s+)?(?:so|hence|thus|therefore|then|consequently|it follows|it is|it must be|"
    r"we (?:get|have|find|obtain|see|conclude)|(?:this|that|which) (?:is|gives|means|implies|leaves|yields)|giving|leaving|"
    r"making|(?:the|our|its|their|my) [\w ]{0,40}?(?:is|are|equals|becomes|must be))\b"
    r"|(?<!not )(?<!or )\b(?:hence|thus|therefore|then|so)\b(?=\s+(?:the|we|it|there|that|this|our|[a-z]\b))",
    re.IGNORECASE,
)
"""The beginning of a conclusion. A denial before it does not concern the conclusion."""
_DENIED = re.compile(
    rf"\b{_NOT}\b(?:\s+(?:be|been|equal|equals|have|get|give|become|make)\b)?{_UP_TO_IT}"
    rf"|\b{_NOT}\s+(?:think|believe|say|claim|sure|certain|true|right|correct|the case)\b"
    rf"|\b(?:or|either){_UP_TO_IT}|\bor\s+\\?\$(?:(?!\b{_VERB}\b)[^.]){{0,80}}\Z"
    r"|\bor\s+(?:else\s+)?(?:(?:the|my|our) answer|it|that|this)\s+(?:is|equals|(?:may|might|could) be)\s*\Z"
    r"|\b(?:wrong|false|incorrect|untrue|impossible|unlikely|doubtful) (?:that\b|to\b|[a-z]+ (?:is|was|would be)\s*\Z)"
    r"|\b(?:perhaps|maybe|possibly)\b|\b(?:may|might|could) (?:also )?be\s*\Z",
    re.IGNORECASE,
)
_DENIED_BEHIND = re.compile(
    rf"[\s,;()*-]*(?:(?:is|was|are|can|may|does|would|might)\s+(?:be\s+)?)?"
    rf"(?:{_NOT}|or|but|perhaps|maybe|unless|wrong|incorrect|false|impossible|invalid|excluded|extraneous|rejected)\b"
    rf"|[\s,;()*-]*(?:which|that|this|it)\s+(?:\w+\s+){{0,2}}?(?:wrong|incorrect|false|impossible|"
    rf"{_NOT}\s+(?:be\s+)?(?:(?:the|our|my)\s+)?(?:answer|right|correct|true|possible|valid|allowed))\b"
    r"|[\s,;()*-]*(?:[a-z]+\s+){0,2}or\s+(?:[$\\]|[0-9])"
    r"|[^.]*?[,;(]\s*(?:or|but|perhaps|maybe|rather)\b[^.]*?(?:[$\\]|[0-9])",
    re.IGNORECASE,
)


def _is_hedged(text: str, formula: re.Match[str]) -> bool:
    """Whether the last formula's sentence denies it or offers another formula: `not $4$`, `$4$ or $5$`, `$4$, or maybe 5`."""
    before, behind = text[: formula.start()], text[formula.end() :]
    if _display.fullmatch(formula[0]):  # a formula on a line of its own, in the middle of its sentence
        before, behind = before.rstrip(), behind.lstrip() if behind.lstrip()[:1].islower() else behind
    start = max(before.rfind(end) for end in (". ", "\n", "? ", "! "))
    sentence_before = "" if before.endswith((".", "?", "!")) else before[start + 1 :]
    if re.match(r"\s*\?(?!\s*yes\b)", behind, re.IGNORECASE):
        return True
    sentence_behind = re.split(r"[.?!](?:\s|$)|\n", behind, maxsplit=1)[0]
    clause = sentence_before[max((match.end() for match in _FOLLOWS.finditer(sentence_before)), default=0) :]
    return _DENIED.search(clause) is not None or _DENIED_BEHIND.match(sentence_behind) is not None


# --- labels -----------------------------------------------------------------------------------------------------------


def _without_delimiters(text: str) -> str:
    """`42` of `$42$`; any other text as it is."""
    text = text.strip()
    formula = _formula.match(text)
    return _body(formula) if formula and formula.lastgroup and formula.end() == len(text) else text


def _num_words(text: str) -> int:
    """Number of words with three or more letters. LaTeX commands do not count."""
    without_names = re.sub(r"\\(?:begin|end)\{[a-z*]*\}(?:\{[lcr| ]*\})?|\\[A-Za-z]+", " ", text)
    return len(re.findall(r"[^\W\d_]{3,}", without_names))
