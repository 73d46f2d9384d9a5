"""Finds the program in a response, in the blocks of code after the thoughts."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from open_instruct.verifiers.code_choice import choose_program
from open_instruct.verifiers.text_verifiers import behind_thoughts

LONGEST_PROGRAM = 200_000
"""In characters."""
_PYTHON = re.compile(r"\{?\.?(?:i?python|pypy|py)[\d.]*(?![\w+#-])", re.IGNORECASE)
_ON_A_LINE = ("python", "python3", "py")


@dataclass
class _Block:
    fence: str
    indent: int
    language: str
    lines: list[str] = field(default_factory=list)
    is_closed: bool = False

    @property
    def may_be_python(self) -> bool:
        return not self.language or _PYTHON.match(self.language) is not None

    @property
    def code(self) -> str:
        """The code without the block's indentation, which a block in a list has. A first line that only names the language is
        also removed, because `olmo_thinker_code_rlzero` asks for such a line."""
        has_language = not self.language and self.lines and self.lines[0].strip().lower() in _ON_A_LINE
        lines = self.lines[1:] if has_language else self.lines
        return "".join(re.sub(rf"^[ \t]{{0,{self.indent}}}", "", line) + "\n" for line in lines)

    def is_fence(self, line: str) -> bool:
        """Whether a line closes the block, or opens the next block before this one is closed. A fence with more indentation
        belongs to a text inside the program."""
        inner = line.lstrip(" \t")
        return inner.startswith(self.fence) and len(line) - len(inner) <= self.indent + 3

    def add(self, line: str) -> None:
        """Add a line of code. A single fence at its end (print(1)```) closes the block."""
        before, marks, after = line.rpartition(self.fence)
        if marks and before.strip() and not after.strip() and marks not in before and marks[0] == "`":
            self.is_closed, line = True, before
        self.lines.append(line)


def program_in(response: str, *, is_script: bool = False) -> str:
    """The program in a response: of several blocks the one that `choose_program` takes, else the last.

    Only blocks that are in Python or name no language count, or, if there are none, blocks in any language. A block without an
    end counts only if there is no other, because the response may have been cut there. Without any block, the whole text.

    Args:
        is_script: whether the program is run for what it writes, and not for its functions.
    """
    text = response.rpartition("</think>")[2]
    blocks = list(_blocks(text.replace("\r\n", "\n")))
    candidates = [block for block in blocks if block.is_closed] or blocks
    python = [block.code for block in candidates if block.may_be_python]
    program = choose_program(python, is_script=is_script) if len(python) > 1 else None
    if program is None:
        program = python[-1] if python else candidates[-1].code if candidates else behind_thoughts(text)
    return program[:LONGEST_PROGRAM]


def _blocks(text: str) -> Iterator[_Block]:
    block: _Block | None = None
    for line in text.split("\n"):
        if block is None:
            block = _opened(line)
            continue
        if not block.is_fence(line):
            block.add(line)
        if block.is_closed or block.is_fence(line):
            block.is_closed = True
            yield block
            rest = line.lstrip(" \t").lstrip(block.fence[0]) if block.is_fence(line) else ""
            begins_with_language = rest[:1].strip() and block.fence not in rest  # ```python, unlike: ``` and ```python
            block = _opened(line if begins_with_language else rest)
    if block is not None:
        yield block


def _opened(line: str) -> _Block | None:
    """The block that a line opens, if any. A fence after other words opens a block only if nothing but a language follows it."""
    for mark in "`~":
        before, marks, info = line.rpartition(3 * mark)
        before, language = before.rstrip(mark), info.strip()
        if not marks or mark in language:
            continue
        if not before.strip():
            return _Block(line[len(before) : len(line) - len(info)], len(before), language)
        if mark == "`" and " " not in language and before.count(marks) % 2 == 0:
            return _Block(marks, len(before) - len(before.lstrip(" \t")), language)
    return None
