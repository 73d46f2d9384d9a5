r"""Reads one mathematical expression in LaTeX, all of it or not at all.

    sum      = [sign] product {sign product}
    product  = power {[* or / or nothing] power}
    power    = base ["!"] ["^" exponent]
    base     = number | name | (sum) | \frac{sum}{sum} | \sqrt[sum]{sum} | \sin power | …

Whatever this grammar does not know raises `Unreadable`: a bracket without its partner, an operator without its operand, a word, a
command that is not listed, and text with two meanings (`1/2x`, `\sin x/2`, `2^3^4`). So no expression is equal to another because
only its beginning was read.
"""

import re
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction

from open_instruct.verifiers.answer_reading import POWER_OF_TEN
from open_instruct.verifiers.math_tokens import (
    ACCENTS,
    ANGLES,
    BINOMIALS,
    CLOSING,
    FONTS,
    FRACTIONS,
    FUNCTIONS,
    GREEK,
    INVERSES,
    ONE,
    OVER,
    PERHAPS_FUNCTIONS,
    PLAIN_FUNCTIONS,
    ROUNDED,
    STRUCTURES,
    TIMES,
    Node,
    Unreadable,
    is_number,
    number_in_base,
    number_of,
    tokens_of,
)

MOST_DEPTH = 40
_LETTERS_AS_DIGITS = re.compile(r"(?=[A-Z]*[0-9])(?=[0-9]*[A-F])([0-9A-F]+)_\{?(1[1-6])\}?")
"""`A3_{16}`, which is 163."""


def read_expression(latex: str) -> Node:
    """The expression that the whole text stands for. Raises `Unreadable`."""
    if POWER_OF_TEN.fullmatch(latex.strip()):
        return Node("number", value=Fraction(Decimal(latex.strip())))
    if digits := _LETTERS_AS_DIGITS.fullmatch(latex.strip()):
        return Node("number", value=number_in_base(digits[1], int(digits[2])))
    reader = _Reader(tokens_of(latex))
    if r"\infty" in reader.tokens and len([token for token in reader.tokens if token not in "+-"]) > 1:
        raise Unreadable("arithmetic with infinity")
    node = reader.read_content()
    if reader.next:
        raise Unreadable(f"not read: {reader.next}")
    return node


@dataclass
class _Cursor:
    """A position in a list of tokens."""

    tokens: list[str]
    position: int = 0

    @property
    def next(self) -> str:
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def take(self, token: str = "") -> str:
        head = self.next
        if not head or (token and head != token):
            raise Unreadable(f"{token or 'an operand'} is missing before {head or 'the end'}")
        self.position += 1
        return head

    def read_raw(self) -> list[str]:
        """The tokens in braces, or a single token."""
        if self.next != "{":
            return [self.take_sign()]
        start = self.position + 1
        end = self.closing(self.position)
        self.position = end + 1
        return self.tokens[start:end]

    def take_sign(self) -> str:
        """The next token, unless it has several letters, of which TeX takes the first alone."""
        token = self.take()
        if len(token) > 1 and token.isalpha():
            raise Unreadable("letters without braces")
        return token

    def closing(self, opening: int) -> int:
        """The position of the bracket that closes the bracket at `opening`."""
        depth = 0
        for position in range(opening, len(self.tokens)):
            depth += (self.tokens[position] in ("(", "{")) - (self.tokens[position] in (")", "}"))
            if depth == 0:
                return position
        raise Unreadable("a bracket without its partner")

    def read_primes(self) -> str:
        primes = ""
        while True:
            behind = self.tokens[self.position : self.position + 4]
            if behind[:1] == ["'"]:
                length = 1
            elif behind[:2] == ["^", r"\prime"]:
                length = 2
            elif behind == ["^", "{", r"\prime", "}"]:
                length = 4
            else:
                return primes
            primes += "'"
            self.position += length


@dataclass
class _Reader(_Cursor):
    """Reads tokens from left to right. Each method reads one part of the grammar and stops behind it."""

    depth: int = 0
    in_bars: list[bool] = field(default_factory=lambda: [False])
    """For each bracket around the position, whether it is a bar: then the next bar closes it."""
    in_angle: bool = False
    """Inside the argument of a trigonometric function, where degrees differ from numbers."""
    open_function_ends: int = -1
    """The position behind the last function whose argument has no brackets."""

    # --- sums and products --------------------------------------------------------------------------------------------

    def read_sum(self) -> Node:
        self.depth += 1
        if self.depth > MOST_DEPTH:
            raise Unreadable("too many brackets in brackets")
        sign = self.take() if self.next in ("+", "-") else "+"
        total = self.read_product()
        if sign == "-":
            total = Node("minus", (total,))
        while self.next in ("+", "-"):
            sign = self.take()
            term = self.read_product()
            total = Node("sum", (total, Node("minus", (term,)) if sign == "-" else term))
        self.depth -= 1
        return total

    def read_product(self) -> Node:
        product, may_go_on = self.read_factor(), True
        while True:
            if self.next in TIMES or self.next in OVER:
                operator = self.take()
                if operator in OVER and self.open_function_ends == self.position - 1:
                    raise Unreadable("a division behind a function without brackets")
                sign = self.take() if self.next in ("+", "-") else "+"
                factor = self.read_factor()
                factor = Node("minus", (factor,)) if sign == "-" else factor
                may_go_on = operator not in OVER
                product = Node("product" if may_go_on else "quotient", (product, factor))
            elif self.begins_factor():
                if not may_go_on or (is_number(self.next) and self.tokens[self.position - 1] != "!"):
                    raise Unreadable("two meanings: a factor behind a division, or a number behind a factor")
                product = Node("product", (product, self.read_factor()))
            else:
                return product

    def begins_factor(self) -> bool:
        token = self.next
        if token == "|":
            return not self.in_bars[-1]
        if token[:1] == "\\":
            name = token[1:]
            return name in GREEK | FUNCTIONS | ACCENTS | FONTS | STRUCTURES or token in ROUNDED
        return token != "" and (token in "([{" or token.isalpha() or is_number(token))

    def read_factor(self) -> Node:
        base = self.read_base()
        while True:
            if self.next == "!":
                self.take()
                base = Node("factorial", (base,))
                if self.next in ("!", "^"):
                    raise Unreadable("two meanings behind a factorial")
            elif self.next == "^":
                self.take()
                if (degrees := self.read_degrees(base)) is not None:
                    base = degrees
                    continue
                base = Node("power", (base, self.read_exponent()))
                if self.next in ("^", "!"):
                    raise Unreadable("a power of a power without brackets")
            elif self.next in ("\N{DEGREE SIGN}", r"\degree"):
                self.take()
                base = self.in_degrees(base)
            else:
                return base

    def read_degrees(self, base: Node) -> Node | None:
        for tokens in ([r"\circ"], ["{", r"\circ", "}"]):
            if self.tokens[self.position : self.position + len(tokens)] == tokens:
                self.position += len(tokens)
                return self.in_degrees(base)
        return None

    def in_degrees(self, base: Node) -> Node:
        """An angle in degrees as a number: 30 for 30°, but π/6 inside sin, because `\\sin 30` is another number."""
        if not self.in_angle:
            return base
        return Node("quotient", (Node("product", (base, Node("pi"))), Node("number", value=Fraction(180))))

    def read_exponent(self) -> Node:
        """A sum in braces, or a single sign: `x^2y` is x²y. Of a number without braces all digits count: `2^10` is 1024."""
        if self.next == "{":
            return self.read_brackets()
        if self.next in ("+", "-"):
            sign = self.take()
            exponent = self.read_exponent()
            return Node("minus", (exponent,)) if sign == "-" else exponent
        if self.next in FRACTIONS:
            return self.read_fraction()
        return number_of(self.take()) if is_number(self.next) else self.read_symbol()

    # --- single parts -------------------------------------------------------------------------------------------------

    def read_base(self) -> Node:
        token = self.next
        name = token[1:] if token[:1] == "\\" else ""
        if is_number(token):
            return self.read_number()
        if token in CLOSING:
            return self.read_brackets()
        if token in FRACTIONS:
            return self.read_fraction()
        if token in BINOMIALS:
            fraction = self.read_fraction()  # it has two arguments too
            return Node("binomial", fraction.arguments)
        if token == r"\sqrt":
            return self.read_root()
        if name in FUNCTIONS or token == r"\operatorname":
            return self.read_function()
        return self.read_name()

    def read_number(self) -> Node:
        """A number, a number in another base (`101_2`), or a mixed number (`1\\frac{2}{3}`)."""
        token = self.take()
        if self.next == "_":
            base = self.read_index()
            return Node("number", value=number_in_base(token, int(base) if base.isdecimal() and len(base) < 3 else 0))
        number = number_of(token)
        if not token.isdecimal() or self.next not in FRACTIONS:
            return number
        fraction = self.read_fraction()
        if self.next in ("^", "!"):
            raise Unreadable("two meanings behind a fraction")
        above, below = fraction.arguments
        if not above.operation == below.operation == "number":
            return Node("product", (number, fraction))
        if not 0 < Fraction(above.value) < Fraction(below.value):
            raise Unreadable("a number before a fraction: neither a product nor a mixed number")
        return Node("sum", (number, fraction))

    def read_content(self) -> Node:
        """A sum, or two with `\\choose` or `\\over` between them."""
        content = self.read_sum()
        if self.next in (r"\choose", r"\over"):
            content = Node("binomial" if self.take() == r"\choose" else "quotient", (content, self.read_sum()))
        return content

    def read_brackets(self) -> Node:
        opening = self.take()
        self.in_bars.append(opening == "|")
        content = self.read_content() if opening == "{" else self.read_sum()
        self.take(CLOSING[opening])
        self.in_bars.pop()
        return Node(ROUNDED[opening], (content,)) if opening in ROUNDED else content

    def read_fraction(self) -> Node:
        self.take()
        if is_number(self.next) and len(self.next) == 2 and self.next.isdecimal():
            above, below = self.take()  # `\\frac12`
            return Node("quotient", (number_of(above), number_of(below)))
        return Node("quotient", (self.read_argument(), self.read_argument()))

    def read_root(self) -> Node:
        self.take()
        index = self.read_brackets() if self.next == "[" else Node("number", value=Fraction(2))
        return Node("root", (self.read_brackets() if self.next == "(" else self.read_argument(), index))

    def read_argument(self) -> Node:
        """What TeX takes as an argument: a sum in braces, a digit, a letter or a Greek letter."""
        if self.next == "{":
            return self.read_brackets()
        if not is_number(self.next):
            return self.read_symbol()
        if len(self.next) != 1 or (self.position + 1 < len(self.tokens) and is_number(self.tokens[self.position + 1])):
            raise Unreadable("digits without braces")
        return number_of(self.take())

    def read_symbol(self) -> Node:
        """A letter or a Greek letter without index."""
        token = self.take_sign()
        if token == r"\pi" or token in ("e", "i"):
            return Node(token.lstrip("\\"))
        if token.isalpha() or token[1:] in GREEK:
            return Node("name", value=token)
        raise Unreadable(f"not an operand: {token}")

    # --- functions and names ------------------------------------------------------------------------------------------

    def read_function(self) -> Node:
        name = "".join(self.read_raw()) if self.take() == r"\operatorname" else self.tokens[self.position - 1]
        name = name.lstrip("\\")
        if name not in FUNCTIONS:
            raise Unreadable(f"not a function: {name}")
        base: tuple[Node, ...] = (Node("number", value=Fraction(10)),) if name in ("log", "lg") else ()
        if name == "log" and self.next == "_":
            self.take()
            base = (self.read_exponent(),)
        power = self.read_exponent() if self.next == "^" and self.take() else ONE
        if power == Node("minus", (ONE,)):
            name, power = INVERSES.get(name, ""), ONE
        was_in_angle, self.in_angle = self.in_angle, name in ANGLES
        is_closed = self.next in CLOSING and self.next != "{"
        argument = self.read_brackets() if is_closed else self.read_open_argument()
        self.in_angle = was_in_angle
        if not name or (is_closed and self.next in ("^", "!")):
            raise Unreadable("two meanings: a power of a function or of its argument")
        value = Node("log" if name == "lg" else name, (argument, *base))
        return value if power == ONE else Node("power", (value, power))

    def read_open_argument(self) -> Node:
        """The argument of a function without brackets: all factors up to the next sign or function, 2x in `\\sin 2x\\cos x`."""
        argument = self.read_factor()
        while self.begins_factor() and self.next[1:] not in FUNCTIONS | {"operatorname"}:
            if self.next in CLOSING or is_number(self.next):
                raise Unreadable("two meanings: a bracket or a number behind the argument of a function")
            argument = Node("product", (argument, self.read_factor()))
        self.open_function_ends = self.position
        return argument

    def read_name(self) -> Node:
        """A letter with index and primes, or with an accent; and its arguments, if it is a function."""
        token = self.take()
        command = token[1:]
        if token[:1] == "\\" and command in ACCENTS:
            return Node("name", value=f"{command} {''.join(self.read_raw())}")
        if token[:1] == "\\" and command in FONTS:
            letters = self.read_raw()
            if len(letters) != 1 or not letters[0].isalpha() or len(letters[0]) > 1:
                raise Unreadable("a word")
            token = letters[0]
        elif not token.isalpha() and command not in GREEK | {"pi"}:
            raise Unreadable(f"not an operand: {token}")
        index = self.read_index() if self.next == "_" else ""
        primes = self.read_primes()
        if not index and self.next == "_":
            index = self.read_index()
        if not index and not primes and token in ("e", "i", r"\pi"):
            return Node(token.lstrip("\\"))
        name = token + (f"_{{{index}}}" if index else "") + primes
        return self.read_call(name) if self.is_called(token, has_primes=bool(primes)) else Node("name", value=name)

    def read_index(self) -> str:
        self.take("_")
        index = "".join(self.read_raw())
        if len(index) > 1 and index[0].isdecimal() and self.tokens[self.position - 1] != "}":
            raise Unreadable("digits without braces")
        return index

    def is_called(self, letter: str, *, has_primes: bool) -> bool:
        """Whether brackets behind a name hold its arguments (`f(x)`, `P(2)`, `y'(0)`), and are no factor (`x(x+1)`)."""
        if letter in PLAIN_FUNCTIONS and self.tokens[self.position : self.position + 6] == [*"^{-1}", "("]:
            return True
        if self.next != "(":
            return False
        inner = self.tokens[self.position + 1 : self.closing(self.position)]
        is_single = len(inner) == 1 or "," in inner
        is_probable = letter in PERHAPS_FUNCTIONS and not {"+", "-"} & set(inner)
        return has_primes or letter in PLAIN_FUNCTIONS or is_single or is_probable

    def read_call(self, name: str) -> Node:
        if self.next == "^":
            self.position += 5
            name += "^-1"
        self.take("(")
        self.in_bars.append(False)
        arguments = [self.read_sum()]
        while self.next == ",":
            self.take()
            arguments.append(self.read_sum())
        self.take(")")
        self.in_bars.pop()
        return Node("call", tuple(arguments), name)
