"""What the tests of a row may do with a program."""

import asyncio
import math

import pytest
from code_attacks import WANTS_TO_BE_ASKED

from open_instruct.verifiers.code_names import names_given
from open_instruct.verifiers.code_runs import CodeRuns

LIMIT_S = 2.0
DOUBLE = "def f(x): return 2 * x"


def passed(*pairs: tuple[str, str]) -> list[bool]:
    """Whether each program passes its test."""

    async def run() -> list[bool]:
        processes = CodeRuns()
        try:
            runs = (processes.run_tests(code, [test], LIMIT_S) for code, test in pairs)
            return [result.passed for (result,) in await asyncio.gather(*runs)]
        finally:
            processes.close()

    return asyncio.run(run())


# --- what a program must not be asked ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fooled() -> dict[str, bool]:
    return dict(zip(WANTS_TO_BE_ASKED, passed(*WANTS_TO_BE_ASKED.values()), strict=True))


@pytest.mark.parametrize("name", WANTS_TO_BE_ASKED)
def test_a_program_does_not_say_whether_it_is_right(fooled: dict[str, bool], name: str) -> None:
    assert not fooled[name]


def test_a_program_is_not_told_what_is_expected() -> None:
    """It passes if it has seen 1.41421 in any call."""
    program = "seen = []\ndef f(x): seen.append(x); return 0\ndef {name}(*a): seen.extend(a); return 0\n"
    program += "def told(): return any('1.41' in repr(x) for x in seen)"
    tests = {
        name: f"try: assert {text}\nexcept Exception: pass\nassert told()"
        for name, text in {
            "abs": "abs(f(2) - 1.41421) < 1e-4",
            "round": "round(f(2), 3) == round(1.41421, 3)",
            "isclose": "isclose(f(2), 1.41421)",
            "set": "set([f(2)]) == set([1.41421])",
        }.items()
    }
    assert passed(*((program.format(name=name), test) for name, test in tests.items())) == [False] * len(tests)


def test_a_well_known_name_is_the_module_of_that_name() -> None:
    names = names_given("assert math.isclose(f(2), isclose)", ["f", "g", "math", "isclose"], "import operator as math")
    assert names.values == {"math": math, "isclose": math.isclose}
    assert names.exports == {"f", "g"}


@pytest.mark.parametrize(
    "test",
    [
        "assert sorted([3, 1]) == list((1, 3))",
        "x = sorted([3, 1])\ny = list((1, 3))\nassert x == y",
        "assert sorted(list((3, 1))) == max([1, 3], [0])",
    ],
)
def test_a_test_that_may_mean_python_or_the_program_is_refused(test: str) -> None:
    with pytest.raises(NameError, match="the program's or Python's list"):
        names_given(test, ["list", "max", "sorted"], "")


# --- what a test may do -----------------------------------------------------------------------------------------------

POINT = "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\n    y: int = 0\n"
VECTOR = (
    POINT
    + "    def __add__(self, o): return P(self.x + o.x, self.y + o.y)\n    def __lt__(self, o): return self.x < o.x\n"
)
STACK = """
class Stack:
    size = 0
    def __init__(self): self.items = []
    def push(self, x): self.items.append(x); self.size += 1
    def __len__(self): return len(self.items)
    def __getitem__(self, n): return self.items[n]
    def __setitem__(self, n, x): self.items[n] = x
    def __iter__(self): return iter(self.items)
    def __str__(self): return f"Stack{self.items}"
    def startswith(self, x): return self.items[:1] == [x]
"""
NODE = "class Node:\n    def __init__(self, val, next=None): self.val = val; self.next = next\n"
COUNT = "def f(n):\n    while True:\n        yield n\n        n += 1"
GIVEN: dict[str, tuple[str, str]] = {
    "a map": ("def f(x): return map(str, x)", "assert list(f([1, 2])) == ['1', '2'] and set(f([3])) == {'3'}"),
    "a filter": ("def f(x): return filter(None, x)", "assert sorted(f([0, 2, 1])) == [1, 2]"),
    "a zip": ("def f(x): return zip(x, x)", "assert list(f([1])) == [(1, 1)]"),
    "a range": ("def f(x): return range(x)", "assert list(f(3)) == [0, 1, 2] and f(3) == range(3) and len(f(3)) == 3"),
    "keys": ("def f(x): return x.keys()", "assert list(f({1: 2})) == [1] and f({1: 2}) == {1}"),
    "values": ("def f(x): return x.values()", "assert list(f({1: 2})) == [2]"),
    "items": ("def f(x): return x.items()", "assert dict(f({1: 2})) == {1: 2}"),
    "a Counter": (
        "import collections\ndef f(x): return collections.Counter(x)",
        "assert f('aab').most_common(1) == [('a', 2)]",
    ),
    "a deque": (
        "from collections import deque\ndef f(x): return deque(x)",
        "from collections import deque\nassert f([1, 2]) == deque([1, 2])",
    ),
    "a generator": (
        COUNT,
        "g = f(3)\nassert next(g) == 3 and next(g) == 4\nassert [x for x, _ in zip(g, range(3))] == [5, 6, 7]",
    ),
    "a loop that ends early": (COUNT, "g = f(0)\nfor x in g:\n    if x == 5: break\nassert next(g) == 6"),
    "a long generator": ("def f(n):\n    yield from range(n)", "assert sum(f(2000)) == 1999000"),
    "large items": ("def f(n):\n    for _ in range(n): yield 'x' * 10**5", "assert len(''.join(f(30))) == 3 * 10**6"),
    "a generator that fails": (
        "def f():\n    yield 1\n    raise KeyError(2)",
        "g = f()\nassert next(g) == 1\ntry: next(g)\nexcept KeyError as e: assert e.args == (2,)\nelse: assert False",
    ),
    "dates": (
        "from datetime import date, datetime, timedelta\n"
        "def f(d): return [d + timedelta(days=1), datetime(2020, 1, 2, 3), timedelta(2, 3)]",
        "from datetime import *\nassert f(date(2020, 2, 28)) == [date(2020, 2, 29), datetime(2020, 1, 2, 3), timedelta(2, 3)]",
    ),
    "fractions": (
        "from fractions import Fraction\ndef f(x): return Fraction(x, 3)",
        "from fractions import Fraction as Q\nassert f(2) == Q(2, 3)",
    ),
    "decimals": (
        "from decimal import Decimal\ndef f(x): return Decimal(x) + 1",
        "import decimal\nassert f('0.1') == decimal.Decimal('1.1')",
    ),
    "long numbers": (DOUBLE, "assert f(10**6000) == 2 * 10**6000"),
    "a dataclass": (
        "from __future__ import annotations\n" + POINT,
        "p = P(1)\nassert p.x == 1 and p == P(1, 0) and p != P(2) and not p == (1, 0)",
    ),
    "objects without __eq__": (NODE, "n = Node(1)\nassert n == n and Node(1) != Node(1)"),
    "attributes": (
        STACK,
        "s = Stack()\ns.push(3)\nassert s.size == 1 and s.items == [3] and Stack.size == 0 and not hasattr(s, 'x')",
    ),
    "attributes that are set": (
        NODE,
        "a = Node(1)\na.next = Node(2)\nassert a.next.val == 2\na.next = None\nassert a.next is None",
    ),
    "a linked list": (
        NODE + "def f(n):\n    last = None\n    while n: n.next, last, n = last, n, n.next\n    return last",
        "node, seen = f(Node(1, Node(2, Node(3)))), []\n"
        "while node:\n    seen.append(node.val)\n    node = node.next\nassert seen == [3, 2, 1]",
    ),
    "the same object": (NODE + "def f(n): return n", "n = Node(1)\nassert f(n) is n and f(n) is not Node(1)"),
    "len, items, str": (
        STACK,
        "s = Stack()\nassert len(s) == 0 and not s\ns.push(3)\ns.push(4)\ns[0] = 5\n"
        "assert len(s) == 2 and s[0] == 5 and s[-1:] == [4] and str(s) == f'{s}' == 'Stack[5, 4]'",
    ),
    "loops over objects": (
        STACK,
        "s = Stack()\ns.push(3)\nassert list(s) == [3] and 3 in s and 4 not in s and [*s, *s] == [3, 3]",
    ),
    "a method of a text's name": (STACK, "s = Stack()\ns.push(3)\nassert s.startswith(3) and not s.startswith(4)"),
    "operators between objects": (VECTOR, "assert P(1, 2) + P(3, 4) == P(4, 6)\nassert sorted([P(2), P(1)])[0].x == 1"),
    "objects as arguments": (POINT + "def f(p, q=None): return p.x + q.x", "assert f(P(1), q=P(2)) == 3"),
    "isinstance": (POINT, "assert isinstance(P(1), P) and not isinstance(1, P)"),
    "a copy": (STACK, "import copy\ns = Stack()\nt = copy.deepcopy(s)\nt.push(1)\nassert len(s) == 0 and len(t) == 1"),
    "no inner names, which numpy would believe": (
        "class E: __array_interface__ = 3\ndef f(): return E()",
        "assert not hasattr(f(), '__array_interface__')",
    ),
    "vars": (POINT, "assert vars(P(1)) == {'x': 1, 'y': 0}"),
    "an exception": (
        "def f(x):\n    if x < 0: raise ValueError('negative', x)",
        "try: f(-1)\nexcept ValueError as e: assert e.args == ('negative', -1)\nelse: assert False",
    ),
    "an exception of another module": (
        "import json\ndef f(x): json.loads(x)",
        "try: f('{')\nexcept ValueError: pass\nelse: assert False",
    ),
    "an exception of the program": (
        "class Empty(LookupError): pass\ndef f(): raise Empty('x')",
        "for kind in (Empty, LookupError):\n    try: f()\n    except kind as e: assert str(e) == 'x'\n    else: assert False",
    ),
    "another exception": ("def f(x): return x[0]", "try:\n    f([])\n    assert False\nexcept IndexError: pass"),
    "math of the program": (
        "import math\ndef f(x): return math.sqrt(x)",
        "assert math.isclose(f(2), 1.41421, abs_tol=1e-4)",
    ),
    "isclose of the program": (
        "from math import *\ndef f(x): return sqrt(x)",
        "assert isclose(f(2), 1.41421, abs_tol=1e-4)",
    ),
    "a class from an import of the program": (
        "from datetime import datetime\ndef f(d): return d.year",
        "assert f(datetime(2020, 1, 1)) == 2020",
    ),
    "a module from an import of the program": (
        "import datetime as dt\ndef f(d): return d.year",
        "assert f(dt.datetime(2020, 1, 1)) == 2020",
    ),
    "an import that is the answer": ("from math import gcd", "assert gcd(12, 18) == 6"),
    "a constant": ("MOD = 10**9 + 7\ndef f(x): return x % MOD", "assert f(MOD + 2) == 2 and MOD == 1000000007"),
    "a constant that is an object": (STACK + "stack = Stack()", "stack.push(1)\nassert len(stack) == 1"),
    "a function of a builtin's name": ("def sum(a, b): return a * b", "assert sum(10, 15) == 150"),
    "a function of a builtin's name beside builtins": (
        "def round(x, n=0): return int(x)",
        "assert abs(round(2.567, 2) - 2) < 1e-9 and str(round(2)) == '2'",
    ),
    "a function of a module's name": ("def copy(x): return [x]\ndef f(x): return x", "assert copy(f(1)) == [1]"),
    "two functions": ("def inverse(x): return 1 / x\ndef f(x): return 1 / x", "assert inverse(f(2)) == 2"),
    "a function with __init__": (
        "class S:\n    def __init__(self, self_=1): self.n = self_",
        "assert S(self_=2).n == 2",
    ),
    "a lambda": ("def f(g, x): return g(x)", "assert f(lambda x: x + 1, 2) == 3"),
    "functions of Python": (
        "def f(g, x): return list(map(g, x))",
        "import math\nassert f(str, [1]) == ['1'] and f(math.sqrt, [4]) == [2]",
    ),
    "a key": (
        "def f(x, key=None): return sorted(x, key=key)",
        "assert f([1, -2], key=abs) == f([1, -2], key=lambda x: -x) == [1, -2]",
    ),
    "a function that calls the program": (
        "def f(g): return g(3)\ndef h(x): return 2 * x",
        "assert f(lambda x: h(x) + f(lambda y: y)) == 9 and f(h) == 6",
    ),
    "a function that is called with functions": (
        "def f(g): return g(lambda x: x + 1)",
        "assert f(lambda h: h(2)) == 3",
    ),
    "a function that fails": (
        "def f(g):\n    try: g()\n    except KeyError: return 'failed'",
        "def g(): raise KeyError(1)\nassert f(g) == 'failed'",
    ),
    "a decorator": ("def twice(g):\n    return lambda x: g(g(x))", "@twice\ndef g(x): return x + 1\nassert g(1) == 3"),
    "an iterator": ("def f(x): return sum(x)", "assert f(iter([1, 2])) == f(x for x in range(3)) == f(range(3)) == 3"),
    "names without an import": (
        "def f(x: List[int]) -> Optional[int]:\n    heapq.heapify(x)\n    return Counter(x), gcd(4, 6), pow(2, 3, 5)",
        "assert f([2, 1]) == ({1: 1, 2: 1}, 2, 3)",
    ),
    "a dataclass of the test": (
        DOUBLE,
        "from __future__ import annotations\nimport dataclasses\n"
        "@dataclasses.dataclass\nclass A:\n    x: int\nassert f(A(2).x) == 4",
    ),
    "deep recursion": ("def f(n): return n and 1 + f(n - 1)", "assert f(20000) == 20000"),
    "much printing": ("def f(x):\n    print('x' * 10**6)\n    return x", "assert f(2) == 2"),
}


@pytest.fixture(scope="module")
def results() -> dict[str, bool]:
    return dict(zip(GIVEN, passed(*GIVEN.values()), strict=True))


@pytest.mark.parametrize("name", GIVEN)
def test_a_test_may_use(results: dict[str, bool], name: str) -> None:
    assert results[name]


@pytest.mark.parametrize(
    ("code", "test"),
    [
        ("class V:\n    def __mul__(self, n): return 6", "assert V() * 3 == 6"),
        ("class V:\n    def __contains__(self, n): return True", "assert 3 in V()"),
        (
            "class V:\n    def __enter__(self): return 1\n    def __exit__(self, *a): pass",
            "with V() as v: assert v == 1",
        ),
        ("def f(x): return x.val", "class Node: val = 3\nassert f(Node()) == 3"),
        ("class V: pass", "class W(V): pass"),
    ],
)
def test_what_the_docs_call_unsupported_fails(code: str, test: str) -> None:
    assert passed((code, test)) == [False]
