"""The jail holds against code that has a process of ours to itself, whoever runs it."""

import importlib
import json
import os
import platform
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from attacks import ATTACKS, NUMBERS, PRELUDE, Attack

from open_instruct.system import sandbox
from open_instruct.system.sandbox import environment, missing, python_files

LIMIT_S = 60
NOBODY = 65534
SUCCEEDED, REFUSED, BROKEN = 0, 10, 11
"""How the process of an attack ends: nothing was raised, the system refused, or the attack itself is wrong."""
RUNNER = """
import json, os, signal, sys, traceback
from open_instruct.system.sandbox import Jail, limit_resources, python_files, restrict_calls, restrict_files
import open_instruct.verifiers.registry
setting = json.load(sys.stdin)
exec(setting["prelude"])
jail = Jail(readable=python_files(["open_instruct"]), memory_bytes=2**29, cpu_s=setting["cpu_s"])
def attempt(code):
    sys.stdout = sys.stderr
    if setting["user"]:
        os.setgroups([])
        os.setgid(setting["user"])
        os.setuid(setting["user"])
    if setting["is_jailed"]:
        limit_resources(jail)
        restrict_files(jail)
        restrict_calls(jail)
    try:
        exec(code, globals())
    except (OSError, MemoryError, KeyError, ValueError, sqlite3.Error):
        os._exit(10)
    except BaseException:
        traceback.print_exc()
        os._exit(11)
    os._exit(0)
for code in setting["codes"]:
    pid = os.fork()
    if pid == 0:
        os.setsid()
        attempt(code)
    status = os.waitpid(pid, 0)[1]
    print(os.waitstatus_to_exitcode(status), flush=True)
"""

needs_jail = pytest.mark.skipif(bool(missing()), reason="; ".join(missing()))


@pytest.fixture
def victim() -> Iterator[subprocess.Popen]:
    """A process outside."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


@pytest.fixture
def port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def run_attacks(
    attacks: list[Attack],
    directory: Path,
    victim: subprocess.Popen,
    port: int,
    *,
    user: int = 0,
    is_jailed: bool = True,
    cpu_s: int = 2,
) -> dict[str, int]:
    """How each attack's process ended: `SUCCEEDED`, `REFUSED`, `BROKEN`, or minus the signal that ended it."""
    canary = directory / "canary"
    canary.write_text("secret")
    canary.chmod(0o666)
    for path in (directory, directory.parent, directory.parent.parent):  # the jail shall keep it, not the file system
        path.chmod(0o777)
    facts = {"canary": canary, "directory": directory, "port": port, "parent": victim.pid, "tests": str(Path(__file__))}
    facts |= NUMBERS[platform.machine()]
    codes = [attack.code.format(**facts) for attack in attacks]
    setting = {"prelude": PRELUDE, "codes": codes, "user": user, "is_jailed": is_jailed, "cpu_s": cpu_s}
    secrets = {"WANDB_API_KEY": "secret", "HF_TOKEN": "secret"}
    process = subprocess.run(
        [sys.executable, "-P", "-c", RUNNER],
        input=json.dumps(setting),
        env={**(environment({}) if is_jailed else os.environ | secrets), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    codes_of_exit = [int(line) for line in process.stdout.splitlines() if line.lstrip("-").isdigit()]
    assert len(codes_of_exit) == len(attacks), process.stderr
    assert BROKEN not in codes_of_exit, process.stderr
    return dict(zip((attack.name for attack in attacks), codes_of_exit, strict=True))


def test_there_are_many_attacks() -> None:
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS) >= 60


@needs_jail
@pytest.mark.parametrize("user", [0, NOBODY], ids=["root", "nobody"])
def test_every_attack_fails(
    tmp_path: Path, victim: subprocess.Popen, port: int, user: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if user != os.getuid() and os.getuid() != 0:
        pytest.skip("only root can become somebody else")
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("HF_TOKEN", "secret")
    ends = run_attacks(ATTACKS, tmp_path, victim, port, user=user if os.getuid() == 0 else 0)
    assert [name for name, end in ends.items() if end == SUCCEEDED] == []
    assert ends["no end"] in (-signal.SIGXCPU, -signal.SIGKILL)
    assert victim.poll() is None
    assert Path(f"/proc/{victim.pid}/stat").read_text().split()[2] == "S"
    assert [path.name for path in tmp_path.iterdir()] == ["canary"]
    assert (tmp_path / "canary").read_text() == "secret"


@pytest.mark.skipif(os.getuid() != 0, reason="attacks succeed as root")
def test_attacks_are_real(tmp_path: Path, victim: subprocess.Popen, port: int) -> None:
    """Those that do no damage succeed where there is no jail: so it is the jail that stops them."""
    harmless = [attack for attack in ATTACKS if attack.harmless]
    ends = run_attacks(harmless, tmp_path, victim, port, is_jailed=False)
    assert [name for name, end in ends.items() if end != SUCCEEDED] == []


@needs_jail
@pytest.mark.skipif(platform.machine() != "x86_64", reason="calls of 32 bits are x86-64's")
def test_calls_of_another_instruction_set_end_the_process(tmp_path: Path, victim: subprocess.Popen, port: int) -> None:
    """Numbers of system calls mean something else there: 11 is `execve`, not `munmap`."""
    machine_code = b"\xb8\x14\x00\x00\x00\xcd\x80\xc3"  # mov eax, 20 (getpid); int 0x80; ret
    code = (
        "anything = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC\n"
        "page = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=anything)\n"
        f"page.write({machine_code!r})\n"
        "address = ctypes.addressof(ctypes.c_char.from_buffer(page))\n"
        "ctypes.CFUNCTYPE(ctypes.c_int)(address)()"
    )
    ends = run_attacks([Attack("int 0x80", code)], tmp_path, victim, port)
    assert ends == {"int 0x80": -signal.SIGSYS}


@needs_jail
def test_what_scoring_needs_goes_on(tmp_path: Path, victim: subprocess.Popen, port: int) -> None:
    # Its first import on a machine writes matplotlib's list of fonts. A fork server imports it before it goes into its jail.
    importlib.import_module("reasoning_gym")
    harmless = {
        "arithmetic": "assert sum(range(1000)) == 499500",
        "a library": "import sympy; assert sympy.simplify('x + x') == sympy.sympify('2*x')",
        "another library": "import reasoning_gym; reasoning_gym.create_dataset('word_ladder', size=1, seed=1)[0]",
        "threads": "t = threading.Thread(target=int); t.start(); t.join()" if os.getuid() == 0 else "pass",
        "time": "time.localtime(); time.sleep(0.01)",
        "randomness": "os.urandom(8)",
        "text": "'ä'.encode('latin-1').decode('utf-16', 'replace')",
    }
    attacks = [Attack(name, code) for name, code in harmless.items()]
    assert set(run_attacks(attacks, tmp_path, victim, port, cpu_s=60).values()) == {SUCCEEDED}


def test_environment_has_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "HF_TOKEN", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "https_proxy", "RAY_ADDRESS"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    variables = environment({"OMP_NUM_THREADS": "1"})
    assert "secret" not in variables.values()
    assert (variables["LC_ALL"], variables["OMP_NUM_THREADS"]) == ("C.UTF-8", "1")


def test_readable_files_are_the_installation_and_nothing_of_the_user(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    paths = python_files(["open_instruct"])
    assert str(tmp_path) not in paths
    assert str(Path(sandbox.__file__).parents[1]) in paths
    assert str(Path(sandbox.__file__).parents[2]) not in paths


@pytest.mark.parametrize(
    ("machine", "landlock", "words"),
    [("x86_64", 0, "Landlock is missing"), ("riscv64", 7, "on x86-64 and aarch64"), ("x86_64", 7, "")],
)
def test_what_a_kernel_lacks_is_named(monkeypatch: pytest.MonkeyPatch, machine: str, landlock: int, words: str) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(sandbox, "landlock_version", lambda: landlock)
    reasons = missing()
    assert [words in reason for reason in reasons] == ([True] if words else [])
