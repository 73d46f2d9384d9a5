"""Programs that try to get out, to do harm, or to be right without being right.

Each of `BREAKS_OUT` is the body of `attack()`, which returns something true where it succeeds; the program's function then gives
the right answer, so that an attack that succeeds passes the test. Each of `PRETENDS` is a program that should fail the test
`assert f(2) == 4`.
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


def program(body: str) -> str:
    """The program of an entry of `BREAKS_OUT`."""
    body = textwrap.indent(textwrap.dedent(body).strip().replace("\\\\0", "\\0"), "    ")
    return (
        f"def attack():\n{body}\n"
        "def f(x):\n    try:\n        return 4 if attack() else 0\n    except BaseException as e:\n        return repr(e)\n"
    )
