"""A jail for a process that handles output of a model.

    environment(extra)         variables for the new process: only harmless ones, so that it inherits no key
    limit_resources(jail)      memory, open files                                 setrlimit
    restrict_files(jail)       reads below `jail.readable`, and nothing else      Landlock, which also forbids network and signals
    restrict_calls(jail)       no network, no processes, no signals, no writing   a seccomp filter, which refuses unlisted calls
    confine(jail)              the last three; `confine_files` and `confine_calls` for a process that forks in between

A process calls these functions on itself. It calls `restrict_calls` once it only needs to compute and to use files and sockets
that are already open. Neither the process nor its children can undo the restrictions. The functions work on Linux on x86-64 and
aarch64; `missing()` says what this kernel lacks.

The filter lists the allowed system calls, not the forbidden ones, so a system call that is added to Linux later is refused too.
The numbers are from the kernel's `asm/unistd_64.h` (x86-64) and `asm-generic/unistd.h` (aarch64), the constants from
`linux/landlock.h`, `linux/seccomp.h` and `linux/audit.h`.
"""

import ctypes
import errno
import functools
import os
import platform
import resource
import stat
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

GIB = 2**30
HARMLESS_VARIABLES = ("PATH", "HOME", "LANG", "LANGUAGE", "TZ", "LD_LIBRARY_PATH", "PYTHONHASHSEED", "VIRTUAL_ENV")
"""Variables that a jailed process inherits from its parent, in addition to `LC_*`."""

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
"""Variables for processes of which there are many."""


@dataclass(frozen=True)
class Jail:
    """What a jailed process may use."""

    readable: tuple[str, ...] = ()
    """Files, and directories with everything below them. Paths that do not exist are ignored."""
    memory_bytes: int = GIB
    """Private memory (heap, anonymous maps). Address space may be four times this, because libraries map more than they use."""
    cpu_s: int = 600
    """CPU time in seconds of one core, limited from `limit_to_computing` on."""
    open_files: int = 256
    is_whole: bool = True
    """Whether a kernel that lacks a part of the jail raises `JailError`. If not, the other parts hold."""


class JailError(RuntimeError):
    """This machine's kernel did not provide a part of the jail."""


def missing() -> list[str]:
    """The parts of a jail that this kernel does not offer, each with the reason; empty if it offers all parts."""
    reasons = []
    if _machine() is None:
        reasons.append(
            f"seccomp and Landlock are used only on Linux on x86-64 and aarch64, and this is {platform.platform()}"
        )
        return reasons
    if landlock_version() == 0:
        reasons.append(
            "Landlock is missing (it needs Linux 5.13 or newer, with landlock in its list of security modules)"
        )
    if not has_filters():
        reasons.append("seccomp filters are missing (they need a kernel with CONFIG_SECCOMP_FILTER)")
    return reasons


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """The environment of a new jailed process, without keys, tokens and proxies; `extra` is added to it."""
    variables = {
        name: value for name, value in os.environ.items() if name in HARMLESS_VARIABLES or name.startswith("LC_")
    }
    return variables | dict(extra)


def python_files(modules: Iterable[str] = ()) -> tuple[str, ...]:
    """Files and directories that Python must read to import installed packages, `modules`, and everything that they import.

    From `sys.path` only directories of the installation are included, because another directory may be a user's home.
    """
    installation = [sys.prefix, sys.base_prefix, *(path for path in sys.path if path.endswith(("-packages", ".zip")))]
    system = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache", "/etc/localtime"]
    harmless = ["/usr/share/zoneinfo", "/dev/null", "/dev/urandom"]
    return (*installation, *system, *harmless, *filter(None, map(_top_of_module, modules)))


def _top_of_module(name: str) -> str | None:
    """The package's directory, or the module's file."""
    module = sys.modules[name.partition(".")[0]]
    file = getattr(module, "__file__", None)
    if file is None:
        return next(iter(getattr(module, "__path__", ())), None)
    return os.path.dirname(file) if hasattr(module, "__path__") else file


# --- whole jails ------------------------------------------------------------------------------------------------------


def confine(jail: Jail) -> None:
    """Shut this process in."""
    confine_files(jail)
    confine_calls(jail)


def confine_files(jail: Jail) -> None:
    """The first half: memory and files. Processes that are forked later are in it, too."""
    limit_resources(jail)
    if jail.is_whole or landlock_version():
        restrict_files(jail)


def confine_calls(jail: Jail) -> None:
    """The second half, after which this process can only compute and use what is open."""
    limit_to_computing(jail)
    if jail.is_whole or has_filters():
        restrict_calls(jail)


# --- limits -----------------------------------------------------------------------------------------------------------


def limit_resources(jail: Jail) -> None:
    """Limit memory, open files and core dumps of this process and of the processes that it forks."""
    for name, limit in (
        (resource.RLIMIT_DATA, jail.memory_bytes),
        (resource.RLIMIT_AS, 4 * jail.memory_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, jail.open_files),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        _lower(name, limit)


def limit_to_computing(jail: Jail) -> None:
    """Limit CPU time, and let no file grow and no process start. Every kernel has these limits, even a kernel without seccomp."""
    _lower(resource.RLIMIT_CPU, jail.cpu_s)
    _lower(resource.RLIMIT_FSIZE, 0)
    _lower(resource.RLIMIT_NPROC, 0)  # holds for every user except root


def _lower(name: int, limit: int) -> None:
    hard = resource.getrlimit(name)[1]
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(name, (limit, limit))


# --- Landlock ---------------------------------------------------------------------------------------------------------

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
"""Number of kinds of access to files, by version of Landlock; 16 since version 5."""


def landlock_version() -> int:
    """Version of the kernel's Landlock; 0 if it has none."""
    if _machine() is None:
        return 0
    version_flag = 1
    return max(_libc().syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), version_flag), 0)


def restrict_files(jail: Jail) -> None:
    """From now on this process can open only the files in `jail.readable`, and only for reading. It can make no TCP connection
    (since Linux 6.7), and cannot signal a process outside the jail (since 6.12).

    This holds for the calling thread and for threads that start later, so call it before the process has other threads. Raises
    `JailError` if the kernel has no Landlock.
    """
    version = landlock_version()
    if version == 0:
        raise JailError("this kernel has no Landlock")
    _no_new_privileges()
    rights = struct.pack(
        "QQQ",
        (1 << _FILE_RIGHTS.get(version, 16)) - 1,
        0b11 if version >= 4 else 0,  # binding and connecting TCP
        0b11 if version >= 6 else 0,  # abstract sockets, signals
    )
    size = 8 if version < 4 else 16 if version < 6 else 24  # older kernels know a shorter structure
    ruleset = _call(_LANDLOCK_CREATE, rights, ctypes.c_size_t(size), 0)
    for path in jail.readable:
        _allow_reading(ruleset, path)
    _call(_LANDLOCK_RESTRICT, ruleset, 0)
    os.close(ruleset)


def _allow_reading(ruleset: int, path: str) -> None:
    try:
        file = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    rights = _READ_FILE | (_READ_DIR if stat.S_ISDIR(os.fstat(file).st_mode) else 0)
    path_beneath = 1
    _call(_LANDLOCK_ADD, ruleset, path_beneath, struct.pack("=Qi", rights, file), 0)
    os.close(file)


# --- seccomp ----------------------------------------------------------------------------------------------------------


def has_filters() -> bool:
    """Whether this process can give the kernel a filter of system calls."""
    return _machine() is not None and os.path.exists("/proc/sys/kernel/seccomp/actions_avail")


_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _SECCOMP_MODE_FILTER = 22, 38, 2

_CALLS: dict[str, tuple[int | None, int | None]] = {
    # memory and threads
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "brk": (12, 214),
    "futex": (202, 98),
    "set_robust_list": (273, 99),
    "rseq": (334, 293),
    "membarrier": (324, 283),
    "arch_prctl": (158, None),
    "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123),
    "exit": (60, 93),
    "exit_group": (231, 94),
    # signals to itself
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sigaltstack": (131, 132),
    "restart_syscall": (219, 128),
    # what is open
    "read": (0, 63),
    "write": (1, 64),
    "readv": (19, 65),
    "writev": (20, 66),
    "pread64": (17, 67),
    "lseek": (8, 62),
    "close": (3, 57),
    "dup": (32, 23),
    "fstat": (5, 80),
    "getdents64": (217, 61),
    "poll": (7, None),
    "ppoll": (271, 73),
    "select": (23, None),
    "pselect6": (270, 72),
    # what there is
    "stat": (4, None),
    "lstat": (6, None),
    "newfstatat": (262, 79),
    "statx": (332, 291),
    "access": (21, None),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "readlink": (89, None),
    "readlinkat": (267, 78),
    "getcwd": (79, 17),
    # time, and who it is
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115),
    "nanosleep": (35, 101),
    "gettimeofday": (96, 169),
    "times": (100, 153),
    "getrusage": (98, 165),
    "getrlimit": (97, 163),
    "getrandom": (318, 278),
    "getpid": (39, 172),
    "getppid": (110, 173),
    "gettid": (186, 178),
    "getuid": (102, 174),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getegid": (108, 177),
    "uname": (63, 160),
    "sysinfo": (99, 179),
}
"""System calls that are allowed with any arguments, with their numbers on x86-64 and on aarch64."""
_WITH_ARGUMENTS: dict[str, tuple[int | None, int | None]] = {
    "mmap": (9, 222),
    "open": (2, None),
    "openat": (257, 56),
    "clone": (56, 220),
    "prlimit64": (302, 261),
    "ioctl": (16, 29),
    "fcntl": (72, 25),
    "prctl": (157, 167),
    "kill": (62, 129),
    "tgkill": (234, 131),
    "clone3": (435, 435),
    "openat2": (437, 437),
}
"""System calls whose arguments decide whether they are allowed; numbers as above."""
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | 0o20000000  # the last is O_TMPFILE without O_DIRECTORY
_MAP_SHARED, _MAP_ANONYMOUS = 0x01, 0x20
_CLONE_THREAD = 0x00010000
_HARMLESS_IOCTLS = (0x5401, 0x5413, 0x5450, 0x5451)  # is it a terminal, its size; whether a child inherits the file
_HARMLESS_FCNTLS = (0, 1, 2, 3, 4, 1030)  # duplicate, flags
_HARMLESS_PRCTLS = (15, 16)  # the thread's name


def restrict_calls(jail: Jail) -> None:
    """From now on this process can compute, read the files that it may read, and write to files that are open already. Any other
    system call fails.

    Raises `JailError` if the kernel has no filters.
    """
    limit_to_computing(jail)
    machine = _machine()
    if machine is None:
        raise JailError(f"no filter for {platform.platform()}")
    _no_new_privileges()
    program = _program(machine)
    buffer = ctypes.create_string_buffer(program)
    filter_program = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    if _libc().prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, filter_program, 0, 0):
        raise JailError(f"the kernel takes no seccomp filter: {os.strerror(ctypes.get_errno())}")


def _program(machine: "_Machine") -> bytes:
    """The filter as instructions for the kernel. It compares a call with each listed call in turn, and refuses other calls."""
    lines = [_line(_LOAD, 4), *_unless_equal(machine.audit, [_line(_RETURN, _KILL)]), _line(_LOAD, 0)]
    for numbers in _CALLS.values():
        number = numbers[machine.column]
        if number is not None:
            lines += [_line(_EQUAL, number, 0, 1), _line(_RETURN, _ALLOW)]
    for name, numbers in _WITH_ARGUMENTS.items():
        number = numbers[machine.column]
        if number is not None:
            body = _body(name)
            lines += [_line(_EQUAL, number, 0, len(body)), *body]
    return b"".join([*lines, _line(_RETURN, _ERROR | errno.EPERM)])


def _body(name: str) -> list[bytes]:
    """Instructions that allow or refuse a call by its arguments."""
    refuse, allow = _line(_RETURN, _ERROR | errno.EPERM), _line(_RETURN, _ALLOW)
    if name in ("open", "openat"):
        no_access = _line(_RETURN, _ERROR | errno.EACCES)
        return [_argument(1 if name == "open" else 2), _line(_ANY_BIT, _WRITING, 0, 1), no_access, allow]
    if name == "mmap":  # shared anonymous memory is refused, because RLIMIT_DATA does not count it
        return [_argument(3), _line(_ANY_BIT, _MAP_ANONYMOUS, 0, 2), _line(_ANY_BIT, _MAP_SHARED, 0, 1), refuse, allow]
    if name == "clone":
        return [_argument(0), _line(_ANY_BIT, _CLONE_THREAD, 1, 0), refuse, allow]
    if name == "prlimit64":  # allowed only without a new limit; then the call reads the current limit
        return [_argument(2), _line(_EQUAL, 0, 0, 2), _argument(2, high=True), _line(_EQUAL, 0, 1, 0), refuse, allow]
    if name in ("kill", "tgkill"):
        return [_argument(0), _line(_EQUAL, os.getpid(), 1, 0), refuse, allow]
    if name in ("clone3", "openat2"):  # libraries fall back on the older calls, whose arguments a filter can read
        return [_line(_RETURN, _ERROR | errno.ENOSYS)]
    values = {"ioctl": _HARMLESS_IOCTLS, "fcntl": _HARMLESS_FCNTLS, "prctl": _HARMLESS_PRCTLS}[name]
    choices = [line for value in values for line in (_line(_EQUAL, value, 0, 1), allow)]
    return [_argument(0 if name == "prctl" else 1), *choices, refuse]


def _line(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def _argument(number: int, *, high: bool = False) -> bytes:
    return _line(_LOAD, 16 + 8 * number + (4 if high else 0))


def _unless_equal(value: int, lines: Sequence[bytes]) -> list[bytes]:
    return [_line(_EQUAL, value, len(lines), 0), *lines]


# --- the kernel -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Machine:
    column: int
    """Column in the tables of system call numbers."""
    audit: int
    """The kernel's number for the instruction set. A call from another instruction set (32 bits) ends the process."""


def _machine() -> _Machine | None:
    if sys.platform != "linux" or struct.calcsize("P") != 8 or sys.byteorder != "little":
        return None
    return {"x86_64": _Machine(0, 0xC000003E), "aarch64": _Machine(1, 0xC00000B7)}.get(platform.machine())


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _call(number: int, *arguments: object) -> int:
    result = _libc().syscall(number, *arguments)
    if result < 0:
        raise JailError(f"Landlock: {os.strerror(ctypes.get_errno())}")
    return result


def _no_new_privileges() -> None:
    if _libc().prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise JailError(f"PR_SET_NO_NEW_PRIVS: {os.strerror(ctypes.get_errno())}")


def be_killed_first() -> None:
    """If memory runs out, the kernel kills this process before other processes."""
    Path("/proc/self/oom_score_adj").write_text("1000")
