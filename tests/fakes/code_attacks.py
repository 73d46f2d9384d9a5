"""Programs that try to get out, to do harm, or to be right without being right.

Each of `BREAKS_OUT` is the body of `attack()`, which returns something true where it succeeds; the program's function then gives
the right answer, so that an attack that succeeds passes the test. Each of `PRETENDS` is a program that should fail the test
`assert f(2) == 4`. Each of `WANTS_TO_BE_ASKED` is a program and a test that it should fail, which it passes if the test lets it
say whether it is right.
"""

import textwrap

BREAKS_OUT = {
    "write a file": "open('/tmp/attack', 'w').write('x'); return True",
    "write into the working directory": "open('attack', 'w').write('x'); return True",
    "append to a module": "import json; open(json.__file__, 'a'); return True",
    "make a directory": "import os; os.mkdir('/tmp/attack_dir'); return True",
    "remove a file": "import os; os.remove('/etc/hostname'); return True",
    "rename": "import os; os.rename('/etc/hostname', '/etc/h'); return True",
    "link": "import os; os.symlink('/etc/passwd', '/tmp/attack_link'); return True",
    "change rights": "import os; os.chmod('/tmp', 0o777); return True",
    "read passwords": "return open('/etc/passwd').read()",
    "read the shadow": "return open('/etc/shadow').read()",
    "list the root": "import os; return os.listdir('/')",
    "list the home": "import os; return os.listdir(os.path.expanduser('~'))",
    "read the environment of others": "return open('/proc/1/environ', 'rb').read()",
    "read its own environment": "import os; return [k for k in os.environ if 'KEY' in k or 'TOKEN' in k]",
    "read the parent's memory": "import os; return open(f'/proc/{os.getppid()}/mem', 'rb').read(1)",
    "read the parent's files": "import os; return os.listdir(f'/proc/{os.getppid()}/fd')",
    "read its own maps": "return open('/proc/self/maps').read()",
    "a socket": "import socket; return socket.socket()",
    "a socket of the machine": "import socket; return socket.socket(socket.AF_UNIX)",
    "a pair of sockets": "import socket; return socket.socketpair()",
    "a raw socket": "import socket; return socket.socket(socket.AF_INET, socket.SOCK_RAW)",
    "resolve a name": "import socket; return socket.gethostbyname('localhost')",
    "fetch a page": "import urllib.request; return urllib.request.urlopen('http://127.0.0.1:1', timeout=1)",
    "fork": "import os; return os.fork() > 0",
    "spawn": "import subprocess; return subprocess.run(['true']).returncode == 0",
    "a shell": "import os; return os.system('true') == 0",
    "popen": "import os; return os.popen('echo x').read()",
    "posix_spawn": "import os; return os.posix_spawn('/bin/true', ['true'], {})",
    "exec": "import os; os.execv('/bin/true', ['true'])",
    "multiprocessing": "import multiprocessing as m; p = m.Process(target=print); p.start(); return True",
    "kill the parent": "import os; os.kill(os.getppid(), 9); return True",
    "kill everybody": "import os; os.kill(-1, 9); return True",
    "kill the group": "import os; os.killpg(0, 9); return True",
    "stop the parent": "import os, signal; os.kill(os.getppid(), signal.SIGSTOP); return True",
    "ask whether the parent is there": "import os; os.kill(os.getppid(), 0); return True",
    "trace the parent": "import ctypes, os; return ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0",
    "read another's memory": """
        import ctypes, os
        b = ctypes.create_string_buffer(8)
        class V(ctypes.Structure): _fields_ = [('b', ctypes.c_void_p), ('n', ctypes.c_size_t)]
        v = V(ctypes.addressof(b), 8)
        return ctypes.CDLL(None).process_vm_readv(os.getppid(), ctypes.byref(v), 1, ctypes.byref(v), 1, 0) == 8
    """,
    "be another user": "import os; os.setuid(0 if os.getuid() else 1); return True",
    "a new namespace": "import ctypes; return ctypes.CDLL(None).unshare(0x10000000) == 0",
    "mount": "import ctypes; return ctypes.CDLL(None).mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0",
    "change the root": "import os; os.chroot('/tmp'); return True",
    "change the directory": "import os; os.chdir('/tmp'); return True",
    "raise a limit": "import resource; resource.setrlimit(resource.RLIMIT_CPU, (9999, 9999)); return True",
    "be nicer to itself": "import os; os.nice(-5); return True",
    "a file in memory": "import os; return os.memfd_create('x')",
    "shared memory": "from multiprocessing import shared_memory as s; return s.SharedMemory(create=True, size=8)",
    "a shared map": "import mmap; return mmap.mmap(-1, 8)",
    "a message queue": "import ctypes; return ctypes.CDLL(None).msgget(1234, 0o1600) >= 0",
    "set the clock": "import time; time.clock_settime(time.CLOCK_REALTIME, 0); return True",
    "reboot": "import ctypes; return ctypes.CDLL(None).reboot(0x01234567) == 0",
    "the kernel's keys": "import ctypes; return ctypes.CDLL(None).syscall(250, 0, -3, 1) >= 0",
    "watch files": "import ctypes; return ctypes.CDLL(None).inotify_init() >= 0",
    "new filters": "import ctypes; return ctypes.CDLL(None).prctl(22, 2, 0, 0, 0) == 0",
    "a timer that signals": "import signal; signal.setitimer(signal.ITIMER_REAL, 1); return True",
    "write to the controller": "import os; return os.write(3, b'\\\\0' * 8 + b'{}') and False",
    "find the test in memory": "import gc; return any('== 4' in o for o in gc.get_objects() if isinstance(o, str))",
    "find the test in frames": """
        import sys
        frame = sys._getframe()
        while frame:
            if '== 4' in repr(frame.f_locals) + repr([k for k in frame.f_globals if k == 'assert f(2) == 4']): return True
            frame = frame.f_back
        return False
    """,
}

PRETENDS = {
    "exit": "import sys; sys.exit(0)",
    "exit hard": "import os; os._exit(0)",
    "exit when called": "import os\ndef f(x): os._exit(0)",
    "exit softly when called": "def f(x): raise SystemExit(0)",
    "equal to everything": "class E:\n    def __eq__(self, o): return True\ndef f(x): return E()",
    "an int equal to everything": "class E(int):\n    def __eq__(self, o): return True\ndef f(x): return E(3)",
    "a text equal to everything": "class E(str):\n    def __eq__(self, o): return True\ndef f(x): return E('3')",
    "a list that is true": "class E(list):\n    def __eq__(self, o): return True\ndef f(x): return E()",
    "a result that is true": "class E:\n    def __bool__(self): return True\n"
    "    def __getattr__(self, n): return self\ndef f(x): return E()",
    "other builtins": "import builtins\nbuiltins.AssertionError = None\n"
    "builtins.isinstance = lambda *a: True\ndef f(x): return 3",
    "other json": 'import json\njson.dumps = lambda o, **k: \'{"done": true, "error": null}\'\ndef f(x): return 3',
    "an answer of its own": 'import os, struct\nm = b\'{"done": true, "error": null}\'\n'
    "def f(x):\n    os.write(3, struct.pack('!Q', len(m)) + m)\n    os._exit(0)",
    "an answer before it is asked": 'import os, struct\nm = b\'{"done": true, "error": null}\'\n'
    "os.write(3, struct.pack('!Q', len(m)) + m)\ndef f(x): return 3",
    "names that are no names": 'import os, struct\nm = b\'{"names": ["assert", "__builtins__"], "error": null}\'\n'
    "os.write(3, struct.pack('!Q', len(m)) + m)\ndef f(x): return 3",
    "broken messages": "import os\ndef f(x):\n    os.write(3, b'\\xff' * 100)\n    return 4",
    "nested messages": "def f(x):\n    v = []\n    for _ in range(100): v = [v]\n    return v",
    "endless": "def f(x):\n    while True: pass",
    "endless import": "while True: pass",
    "sleep": "import time\ndef f(x): time.sleep(1000)",
    "sleep at the start": "import time; time.sleep(1000)",
    "recursion": "def f(x): return f(x)",
    "memory": "def f(x): return len(bytearray(8 * 2**30)) and 4",
    "memory bit by bit": "def f(x):\n    v = []\n    while True: v.append(bytearray(2**20))",
    "a flood": "def f(x): return 'x' * 2**26",
    "a flood of prints": "def f(x):\n    while True: print('x' * 10**6)",
    "threads": "import threading, time\ndef f(x):\n    while True: threading.Thread(target=time.sleep, args=(99,)).start()",
    "a crash": "import ctypes\ndef f(x): ctypes.string_at(0)",
    "an abort": "import os\ndef f(x): os.abort()",
    "no function": "g = 4",
    "no program": "f(x) = 4",
    "nothing": "",
    "null bytes": "\0",
    "deep nesting": "x = " + "(" * 5000 + ")" * 5000,
    "a generator": "def f(x):\n    while True: yield 4",
}

_CLOSE = "assert abs(f(2) - 1.41421) < 1e-4"
_SETS = "assert set(f([1, 2])) == set([2, 3])"
_WRONG = "def f(x): return 0\n"
_SAYS_YES = "class E:\n    def {name}(self, *a): return True\ndef f(x): return E()"

WANTS_TO_BE_ASKED = {
    "its own abs": (_WRONG + "def abs(x): return 0", _CLOSE),
    "its own set": (_WRONG + "def set(x): return 0", _SETS),
    "its own sorted": (_WRONG + "def sorted(x): return 0", "assert sorted(f(2)) == sorted([2, 1])"),
    "its own list": (_WRONG + "def list(x): return 0", "assert list(f(2)) == list((1, 2))"),
    "its own tuple": (_WRONG + "tuple = lambda x: 0", "assert tuple(f(2)) == tuple([1, 2])"),
    "its own all": (_WRONG + "def all(x): return True", "assert all(a == b for a, b in zip([f(2)], [4]))"),
    "its own isinstance": (_WRONG + "def isinstance(*a): return True", "assert isinstance(f(2), str)"),
    "its own types": (_WRONG + "class str:\n    def __new__(c, x): return 0", "assert str(f(2)) == str(1.5)"),
    "its own round": (_WRONG + "round = lambda *a: 0", "assert round(f(2), 2) == round(1.41421, 2)"),
    "a value for a builtin": (_WRONG + "len = abs", "assert len(f(2)) == 0"),
    "its own math": (
        _WRONG + "class math:\n    isclose = staticmethod(lambda *a, **k: True)",
        "assert math.isclose(f(2), 1.41421)",
    ),
    "its own math behind an import": (
        "import math\n" + _WRONG + "class math:\n    isclose = staticmethod(lambda *a, **k: True)",
        "assert math.isclose(f(2), 1.41421)",
    ),
    "its own numpy": (_WRONG + "class np:\n    allclose = lambda *a: True", "assert np.allclose(f(2), [1.5])"),
    "its own isclose": (_WRONG + "def isclose(*a, **k): return True", "assert isclose(f(2), 1.41421)"),
    "its own Counter": (_WRONG + "def Counter(x): return 0", "assert Counter(f(2)) == Counter([1, 2])"),
    "an import by another name": ("from math import floor as abs\n" + _WRONG, _CLOSE),
    "a module by another name": ("import operator as math\n" + _WRONG, "assert math.isclose(f(2), 1.41421)"),
    "a tool by another name": (
        "from operator import truth as isclose\n" + _WRONG,
        "assert isclose(f(2) + 1.41421)",
    ),
    "the end of the process by another name": ("from sys import exit as f", "assert f(0) == 4"),
    "its own abs beside a library's name": (
        "def add(a, b): return 0\ndef abs(x): return 2",
        "assert abs(add(1, -3)) == 2",
    ),
    "both sides its own": (
        "def sorted(x): return 0\ndef list(x): return 0",
        "assert sorted([3, 1]) == list((1, 3))",
    ),
    "Python's instead of its own": ("def f(x): return 0", "assert sorted([3, 1]) == [1, 3]"),
    "another than the one tested": (
        "def abs(x): return 0\ndef round(*a): return 0",
        "x = round(2.567, 2)\nassert abs(x - 2.57) < 1e-9",
    ),
    "in it": (_SAYS_YES.format(name="__contains__"), "assert 3 in f(2)"),
    "begins with it": (_SAYS_YES.format(name="startswith"), "assert f(2).startswith('ab')"),
    "a part of it": (_SAYS_YES.format(name="issubset"), "assert f(2).issubset({1, 2})"),
    "all of it": (_SAYS_YES.format(name="all"), "assert f(2).all()"),
    "nothing between": ("class E:\n    def __sub__(self, o): return 0\ndef f(x): return E()", _CLOSE),
    "nothing between, from the right": (
        "class E:\n    def __rsub__(self, o): return 0\ndef f(x): return E()",
        "assert abs(1.41421 - f(2)) < 1e-4",
    ),
    "smaller and larger": (
        "class E:\n    def __lt__(self, o): return True\n    __gt__ = __lt__\ndef f(x): return E()",
        "assert 1.41 < f(2) < 1.42",
    ),
    "a hash": (
        "class E:\n    def __eq__(self, o): return True\n    def __hash__(self): return 4\ndef f(x): return E()",
        "assert f(2) in {1, 4}",
    ),
    "not unequal": ("class E:\n    def __ne__(self, o): return False\ndef f(x): return E()", "assert not f(2) != 4"),
    "an array": (
        "class E:\n    __array_priority__ = 99\n    def __array__(self, *a): return 4\n"
        "    __array_interface__ = {'data': (0, True), 'shape': (1,), 'typestr': '<i8', 'version': 3}\n"
        "    def __array_ufunc__(self, *a, **k): return True\ndef f(x): return E()",
        "import numpy\nassert numpy.allclose(f(2), [1.5])",
    ),
    "items that are equal to everything": (
        "class E:\n    def __eq__(self, o): return True\ndef f(x):\n    yield E()\n    yield E()",
        "assert list(f(2)) == [1, 2]",
    ),
    "the end of a loop": ("def f(x): raise StopIteration", "assert all(x == 4 for x in map(f, [1, 2]))"),
    "an end of the test": ("def f(g): g(0)", "import sys\nf(sys.exit)\nassert False"),
    "an assertion passed over": (
        "def f(g):\n    try: g(3)\n    except BaseException: pass",
        "def check(x): assert x == 4\nf(check)",
    ),
    "an exception of the name": ("class f(Exception):\n    def __eq__(self, o): return True", "assert f(2) == 4"),
    "the imports that are there": ("", "assert gcd(12, 18) == 6"),
}


def program(body: str) -> str:
    """The program of an entry of `BREAKS_OUT`."""
    body = textwrap.indent(textwrap.dedent(body).strip().replace("\\\\0", "\\0"), "    ")
    return (
        f"def attack():\n{body}\n"
        "def f(x):\n    try:\n        return 4 if attack() else 0\n    except BaseException as e:\n        return repr(e)\n"
    )
