"""What code could try that a model wrote, once it runs in a process of ours. Read by tests/system/test_sandbox.py.

Each attack is Python that ends without an exception where it succeeds. `{canary}` is a file with a secret that everybody may
write, `{directory}` its directory, `{port}` a port of 127.0.0.1 where somebody listens, `{parent}` a process outside.
"""

from dataclasses import dataclass

PRELUDE = """
import asyncio, ctypes, glob, http.client, mmap, multiprocessing, multiprocessing.shared_memory, os, pty, resource, shutil, signal
import socket, sqlite3, struct, subprocess, sys, tempfile, threading, time
import encodings.idna, multiprocessing.popen_fork
libc = ctypes.CDLL(None, use_errno=True)
def syscall(number, *arguments):
    result = libc.syscall(number, *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
def must(result):
    if not result:
        raise OSError("nothing came of it")
    return result
"""


@dataclass(frozen=True)
class Attack:
    name: str
    code: str
    harmless: bool = True
    """Succeeds outside a jail as root and does no damage there: so the test knows that it is a real attack."""


def _attacks(harmless: bool, codes: dict[str, str]) -> list[Attack]:
    return [Attack(name, code, harmless) for name, code in codes.items()]


READING = _attacks(
    True,
    {
        "read a file": "open('{canary}').read()",
        "read the list of users": "open('/etc/passwd').read()",
        "read the host's name": "open('/etc/hostname').read()",
        "read through a directory's descriptor": "os.open('passwd', os.O_RDONLY, dir_fd=os.open('/etc', os.O_RDONLY))",
        "read through the root of the process": "open('/proc/self/root/etc/passwd').read()",
        "read through the working directory": "os.chdir('/etc'); open('passwd').read()",
        "list the root": "os.listdir('/')",
        "list a home": "os.listdir(os.path.expanduser('~root'))",
        "walk over everything": "must(glob.glob('{directory}/*'))",
        "its own environment as a file": "open('/proc/self/environ').read()",
        "the parent's environment": "open('/proc/{parent}/environ', 'rb').read()",
        "the parent's command line": "open('/proc/{parent}/cmdline', 'rb').read()",
        "the parent's memory": "open('/proc/{parent}/mem', 'rb')",
        "the parent's files": "os.listdir('/proc/{parent}/fd')",
        "who else is there": "must([one for one in os.listdir('/proc') if one.isdigit()])",
        "copy a file": "must(shutil.copyfileobj(open('{canary}'), sys.stdout) is None)",
        "a data base": "sqlite3.connect('file:{canary}?mode=ro', uri=True).execute('select 1').fetchall(); open('{canary}')",
        "an environment variable with a key": "os.environ['WANDB_API_KEY']",
        "a key by another name": "os.environ['HF_TOKEN']",
        "the tests themselves": "open({tests!r}).read()",
    },
)
WRITING = _attacks(
    True,
    {
        "write a file": "open('{directory}/written', 'w').write('x')",
        "append to a file": "open('{canary}', 'a').write('')",
        "open for reading and writing": "open('{canary}', 'r+')",
        "truncate a new file": "open('{directory}/truncated', 'w').truncate(10)",
        "a new file by its descriptor": "os.open('{directory}/created', os.O_CREAT | os.O_RDONLY)",
        "a file without a name": "os.open('{directory}', os.O_TMPFILE | os.O_RDWR)",
        "a temporary file": "tempfile.NamedTemporaryFile()",
        "a directory": "os.mkdir('{directory}/made')",
        "a symbolic link": "os.symlink('/etc/passwd', '{directory}/symbolic')",
        "a hard link": "os.link('{canary}', '{directory}/hard')",
        "a pipe with a name": "os.mkfifo('{directory}/pipe')",
        "a file's mode": "os.chmod('{canary}', 0o666)",
        "a file's times": "os.utime('{canary}')",
        "a file's extended attribute": "os.setxattr('{canary}', 'user.x', b'x')",
        "shared memory": "multiprocessing.shared_memory.SharedMemory(create=True, size=64).unlink()",
        "memory as a file": "os.memfd_create('x')",
        "memory that no limit counts": "mmap.mmap(-1, 4096)",
        "a data base of its own": "sqlite3.connect('{directory}/base').execute('create table x (y)')",
    },
)
NETWORK = _attacks(
    True,
    {
        "TCP": "socket.create_connection(('127.0.0.1', {port}), 2)",
        "TCP by asyncio": "asyncio.run(asyncio.open_connection('127.0.0.1', {port}))",
        "a web page": "http.client.HTTPConnection('127.0.0.1', {port}, timeout=2).connect()",
        "UDP": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port}))",
        "a UNIX socket": "socket.socket(socket.AF_UNIX)",
        "a pair of sockets": "socket.socketpair()",
        "listening": "socket.create_server(('127.0.0.1', 0))",
        "the kernel's messages": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
        "raw packets": "socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)",
    },
)
PROCESSES = _attacks(
    True,
    {
        "fork": "os.fork() or os._exit(0)",
        "a program": "subprocess.run(['true'], check=True)",
        "a shell": "must(os.system('true') == 0)",
        "a shell by libc": "must(libc.system(b'true') == 0)",
        "a spawned program": "os.waitpid(os.posix_spawn('/bin/true', ['true'], {{}}), 0)",
        "a terminal": "pty.fork()[0] or os._exit(0)",
        "a pool": "multiprocessing.get_context('fork').Process(target=int).start()",
        "becoming another program": "os.execv('/bin/true', ['true'])",
        "the parent is there": "os.kill({parent}, 0)",
        "a process by its descriptor": "os.pidfd_open({parent})",
        "the priority of another": "os.setpriority(os.PRIO_PROCESS, {parent}, os.getpriority(os.PRIO_PROCESS, {parent}))",
        "another session": "os.fork() or (os.setsid(), os._exit(0))",
    },
)
KERNEL = _attacks(
    True,
    {
        "new namespaces": "syscall({unshare}, 0x10000000)",
        "another root": "os.chroot('/')",
        "another user": "os.setuid(os.getuid())",
        "another group": "os.setgroups([])",
        "higher limits": "resource.setrlimit(resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE))",
        "a key of the kernel": "syscall({keyctl}, 0, -3, 0)",
        "events of the processor": "syscall({io_uring_setup}, 1, ctypes.create_string_buffer(120))",
        "outliving its parent": "must(libc.prctl(1, 0, 0, 0, 0) == 0)",
        "another filter": "must(libc.prctl(38, 1, 0, 0, 0) == 0)",
    },
)
DAMAGE = _attacks(
    False,
    {
        "delete a file": "os.unlink('{canary}')",
        "rename a file": "os.rename('{canary}', '{directory}/renamed')",
        "empty a file": "os.truncate('{canary}', 0)",
        "empty a file as it is opened": "os.open('{canary}', os.O_TRUNC)",
        "delete a tree": "shutil.rmtree('{directory}')",
        "kill the parent": "os.kill({parent}, signal.SIGKILL)",
        "stop the parent": "os.kill({parent}, signal.SIGSTOP)",
        "kill the group": "os.killpg(0, signal.SIGKILL)",
        "kill everybody": "os.kill(-1, signal.SIGKILL)",
        "kill a thread of the parent": "syscall({tgkill}, {parent}, {parent}, 9)",
        "queue a signal": "syscall({rt_sigqueueinfo}, {parent}, 9, ctypes.create_string_buffer(128))",
        "trace the parent": "syscall({ptrace}, 16, {parent}, 0, 0)",
        "read the parent's memory": (
            "piece = ctypes.create_string_buffer(8); vector = struct.pack('PN', ctypes.addressof(piece), 8)\n"
            "must(syscall({process_vm_readv}, {parent}, vector, 1, vector, 1, 0))"
        ),
        "mount": "must(libc.mount(b'none', b'/mnt', b'tmpfs', 0, None) == 0)",
        "a program in the kernel": "syscall({bpf}, 0, ctypes.create_string_buffer(128), 128)",
        "restart the machine": "syscall({reboot}, 0xfee1dead, 672274793, 0, None)",
        "a device": "os.mknod('{directory}/device', 0o020666, os.makedev(1, 1))",
        "all memory": "x = b'a' * (8 * 2**30)",
        "all memory, bit by bit": "x = []\nwhile len(x) < 4000: x.append(bytearray(2**20))",
        "all memory, shared": "x = mmap.mmap(-1, 16 * 2**30)",
        "fork bomb": "while True: os.fork()",
        "all descriptors": "x = [os.dup(1) for _ in range(5000)]",
        "a whole disk": "os.posix_fallocate(os.open('{directory}/large', os.O_CREAT | os.O_RDWR), 0, 2**30)",
        "no end": "while True: pass",
    },
)
ATTACKS = [*READING, *WRITING, *NETWORK, *PROCESSES, *KERNEL, *DAMAGE]
NUMBERS = {
    "x86_64": {
        "unshare": 272,
        "keyctl": 250,
        "io_uring_setup": 425,
        "tgkill": 234,
        "rt_sigqueueinfo": 129,
        "ptrace": 101,
        "process_vm_readv": 310,
        "bpf": 321,
        "reboot": 169,
    },
    "aarch64": {
        "unshare": 97,
        "keyctl": 219,
        "io_uring_setup": 425,
        "tgkill": 131,
        "rt_sigqueueinfo": 138,
        "ptrace": 117,
        "process_vm_readv": 270,
        "bpf": 280,
        "reboot": 142,
    },
}
"""System calls, by machine."""
