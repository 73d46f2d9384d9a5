"""Set-up finds or fetches a Python, and says what a machine lacks for the GPU stack. Machines are pretended through PATH."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = [
    *("awk", "basename", "bash", "cat", "cp", "cut", "dirname", "flock", "getconf", "grep", "head"),
    *("mkdir", "mktemp", "rm", "sed", "sort", "tail", "touch", "uname"),
]
REAL_PYTHON = f'exec {sys.executable} "$@"'
NO_VERSION = 'echo "pyenv: python3.11: command not found" >&2; exit 127'
# An old Python: no version check passes, and all that it can do is install a uv that says what it was asked for.
OLD_PYTHON = """
case "$*" in
    *--target*) while [[ "$1" != --target ]]; do shift; done; mkdir -p "$2/bin"; cp "$UV" "$2/bin/uv" ;;
    -V) echo Python 3.9.2 ;;
    *) exit 1 ;;
esac
"""
UV = 'echo "$*" >>"$LOG"; case "$2" in find) echo /fetched/python3.11 ;; esac'


class Machine:
    """A tree with the set-up scripts and a PATH with nothing but what a test puts there."""

    def __init__(self, place: Path) -> None:
        self.root, self.bin, self.log = place / "tree", place / "bin", place / "log"
        self.bin.mkdir()
        (self.root / "scripts").mkdir(parents=True)
        for script in (ROOT / "scripts").glob("setup*.sh"):
            shutil.copy(script, self.root / "scripts")
        for name in ("requirements.txt", "requirements-cpu.txt", "pyproject.toml"):
            shutil.copy(ROOT / name, self.root)
        for tool in TOOLS:
            (self.bin / tool).symlink_to(str(shutil.which(tool)))

    def put(self, name: str, body: str) -> Path:
        file = self.bin / name
        file.write_text(f"#!/usr/bin/env bash\n{body}\n")
        file.chmod(0o755)
        return file

    def run(self, command: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        names = {"PATH": str(self.bin), "LOG": str(self.log), "HOME": os.environ.get("HOME", "/"), **environment}
        return subprocess.run(
            ["/usr/bin/env", "bash", "-c", command],
            cwd=self.root,
            env=names,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def find_python(self, **environment: str) -> "subprocess.CompletedProcess[str]":
        return self.run("source scripts/setup.sh; find_python", **environment)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def put_gpu(machine: Machine, driver: str = "580.95.05") -> None:
    machine.put("python3.11", REAL_PYTHON)
    machine.put("nvidia-smi", f"echo {driver}; echo {driver}")
    machine.put("df", "echo title; echo disk 1 1 104857600")
    (machine.bin / "gcc").symlink_to(str(shutil.which("gcc")))


@pytest.mark.parametrize("name", ["python3.11", "python3.12", "python3.13", "python3", "python"])
def test_set_up_takes_the_python_that_is_there(machine: Machine, name: str) -> None:
    python = machine.put(name, REAL_PYTHON)
    assert machine.find_python().stdout.strip() == str(python)


def test_set_up_passes_by_a_python_that_does_not_start(machine: Machine) -> None:
    machine.put("python3.11", NO_VERSION)
    python = machine.put("python3.13", REAL_PYTHON)
    assert machine.find_python().stdout.strip() == str(python)


def test_set_up_refuses_a_named_python_of_another_version(machine: Machine) -> None:
    machine.put("python3.11", REAL_PYTHON)
    machine.put("old", OLD_PYTHON)
    result = machine.find_python(PYTHON="old")
    assert result.returncode == 1
    assert "PYTHON=old is Python 3.9.2; needed is Python 3.11, 3.12 or 3.13." in result.stderr


def test_set_up_fetches_python_with_the_pinned_uv(machine: Machine, tmp_path: Path) -> None:
    uv = machine.put("fake-uv", UV)
    machine.put("python3", OLD_PYTHON)
    result = machine.find_python(UV=str(uv))
    assert result.stdout.strip() == "/fetched/python3.11", result.stderr
    assert machine.log.read_text().splitlines() == [
        "python install --quiet 3.11",
        "python find --managed-python 3.11",
    ]


def test_set_up_fetches_python_with_the_uv_that_is_there(machine: Machine) -> None:
    machine.put("uv", UV)
    assert machine.find_python().stdout.strip() == "/fetched/python3.11"


@pytest.mark.parametrize("uv", ["exit 1", None])
def test_set_up_without_any_python_says_what_to_do(machine: Machine, uv: str | None) -> None:
    if uv:
        machine.put("uv", uv)
    result = machine.run("bash scripts/setup_cpu.sh")
    assert result.returncode == 1
    assert "needs Python 3.11, 3.12 or 3.13, found none" in result.stderr
    assert "PYTHON=/path/to/python3.11 bash scripts/setup_cpu.sh" in result.stderr
    assert not (machine.root / ".venv").exists()


def test_cpu_set_up_leaves_the_gpu_stack_alone(machine: Machine) -> None:
    command = 'source scripts/setup.sh; choose_stack cpu; echo "$STACK $(basename "$PINS")"'
    assert machine.run(command).stdout == "cpu requirements-cpu.txt\n"
    (machine.root / ".venv").mkdir()
    (machine.root / ".venv" / ".setup-done").write_text(f"{machine.root}, for GPUs\nPython 3.11.7\nab -\n")
    assert machine.run(command).stdout == "gpu requirements.txt\n"


@pytest.mark.skipif(not Path(sysconfig.get_path("include"), "Python.h").exists(), reason="needs Python's headers")
def test_gpu_check_passes_on_a_machine_that_has_all(machine: Machine) -> None:
    put_gpu(machine)
    result = machine.run("bash scripts/setup_gpu.sh --check")
    assert result.returncode == 0, result.stderr
    assert "this machine has what the stack for GPUs needs" in result.stderr


@pytest.mark.parametrize(
    ("driver", "said"),
    [
        ("echo 550.54.15; echo 550.54.15", "the NVIDIA driver is 550.54.15, and CUDA 13 needs 580 or newer."),
        ("echo 'No devices were found'; exit 6", "nvidia-smi fails (No devices were found), so no GPU is in reach."),
        (None, "there is no nvidia-smi, so no NVIDIA driver. Install driver 580 or newer"),
    ],
)
def test_gpu_check_names_the_driver(machine: Machine, driver: str | None, said: str) -> None:
    put_gpu(machine)
    (machine.bin / "nvidia-smi").unlink()
    if driver:
        machine.put("nvidia-smi", driver)
    result = machine.run("bash scripts/setup_gpu.sh")
    assert result.returncode == 1
    assert said in result.stderr
    assert not (machine.root / ".venv").exists()


def test_gpu_check_names_a_missing_compiler(machine: Machine) -> None:
    put_gpu(machine)
    (machine.bin / "gcc").unlink()
    result = machine.run("bash scripts/setup_gpu.sh --check")
    assert result.returncode == 1
    assert (
        "there is no C compiler (gcc), and Triton compiles at run time. On Debian and Ubuntu: apt install build-es"
        in (result.stderr)
    )


def test_gpu_check_names_missing_headers(machine: Machine) -> None:
    put_gpu(machine)
    nowhere = 'case "$2" in *sysconfig*) echo /nowhere ;; *) ' + REAL_PYTHON + " ;; esac"
    machine.put("python3.11", nowhere)
    result = machine.run("bash scripts/setup_gpu.sh --check")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    assert result.returncode == 1
    assert "has no headers (/nowhere/Python.h), which Triton compiles with." in result.stderr
    assert f"apt install {version}-dev" in result.stderr


def test_gpu_check_names_a_compiler_that_does_not_compile(machine: Machine) -> None:
    put_gpu(machine)
    machine.put("broken", "exit 1")
    assert "broken cannot compile against" in machine.run("bash scripts/setup_gpu.sh --check", CC="broken").stderr


def test_gpu_check_names_old_libraries_and_small_disks_and_advises_on_shared_memory(machine: Machine) -> None:
    put_gpu(machine)
    (machine.bin / "getconf").unlink()
    machine.put("getconf", "echo glibc 2.28")
    machine.put("df", 'echo title; case "$2" in /dev/shm) echo shm 65536 0 65536 ;; *) echo disk 1 1 10485760 ;; esac')
    error = machine.run("bash scripts/setup_gpu.sh --check").stderr
    assert "  - glibc is 2.28, and the wheels need 2.31 or newer (Ubuntu 20.04, Debian 11, RHEL 9)." in error
    assert "  - 10 GB are free under" in error
    assert "note: /dev/shm has 64 MB." in error


def test_gpu_set_up_says_all_that_is_missing_at_once_and_can_be_told_to_go_on(machine: Machine) -> None:
    machine.put("python3.11", REAL_PYTHON)
    error = machine.run("bash scripts/setup_gpu.sh").stderr
    for said in ["no nvidia-smi", "no C compiler", "0 GB are free", "GPU_CHECKS=off bash scripts/setup_gpu.sh"]:
        assert said in error
    assert machine.run("bash scripts/setup_gpu.sh --check", GPU_CHECKS="off").returncode == 0
