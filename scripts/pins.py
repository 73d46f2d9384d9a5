"""Resolve requirements-cpu.txt and requirements.txt anew from the groups of pyproject.toml (`make pins`).

Each is one list for Python 3.11, 3.12 and 3.13: every pin fits all three. What is pinned stays as it is where it still
fits; remove a line to have its newest version taken.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import wheel_files
from uv_flags import find_flags

ROOT = Path(__file__).parents[1]
# Unused on CPU: vLLM's CPU build asks for the first three, whose registry builds are for CUDA and break `import
# transformers`; triton (1 GB) is asked for by libraries that do without it when there is no GPU.
NOT_ON_CPU = ["torchvision", "torchaudio", "torchcodec", "triton"]
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# What uv adds to every line because of `environments` in pyproject.toml. A list that is for one platform says so in
# its name; with the marker, installing it elsewhere would install nothing and call that success.
EVERY_LINE = (
    " ; python_full_version < '3.14' and implementation_name == 'cpython' and platform_machine == 'x86_64'"
    " and platform_python_implementation == 'CPython' and sys_platform == 'linux'"
)


def resolve(group: str, target: Path, use: str, *flags: str) -> bool:
    """Whether the group could be resolved. Starts from the pins in `target` and writes there only when it could."""
    with tempfile.TemporaryDirectory() as directory:
        draft = Path(directory) / target.name
        draft.write_text(target.read_text())
        command = [str(Path(sys.executable).with_name("uv")), "pip", "compile", "--universal"]
        command += ["--python-version", "3.11", "--fork-strategy", "fewest", "--index-strategy", "unsafe-best-match"]
        command += ["--group", group, "--no-annotate", "--quiet", "--output-file", str(draft)]
        command += ["--custom-compile-command", f"make pins   ({use})", *flags]
        if subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, timeout=900).returncode:
            return False
        target.write_text(draft.read_text().replace(EVERY_LINE, ""))
        return True


def local_torch(directory: Path, flags: list[str]) -> list[str]:
    """Options to resolve with wheels of torch that lie on disk, also where there is one for a single Python.

    What a wheel of torch asks for does not depend on the Python it is built for, so a link under the name of another
    Python's wheel resolves to the same list. It is only read, never installed.
    """
    places = [flag for flag in flags if flag.startswith(("--find-links", "--index-url"))]
    for place in (Path(flag.partition("=")[2]) for flag in places):
        for wheel in place.glob("torch-*+cpu-cp311-cp311-*.whl"):
            for python in ("cp312", "cp313"):
                (directory / wheel.name.replace("cp311", python)).symlink_to(wheel)
    return [*places, f"--find-links={directory}"]


def resolve_cpu(target: Path, excludes: Path) -> bool:
    """torch's CPU build comes from where pip is told to look, else from PyTorch's own index."""
    common = ("cpu", target, "installed by scripts/setup_cpu.sh", "--excludes", str(excludes))
    with tempfile.TemporaryDirectory() as directory:
        local = local_torch(Path(directory), find_flags())
        return resolve(*common, *local) or resolve(*common, "--extra-index-url", TORCH_CPU_INDEX)


def resolve_gpu(target: Path, cpu: Path, constraints: Path) -> bool:
    """With the versions that the CPU list has."""
    shared = [line for line in cpu.read_text().splitlines() if not line.startswith(("torch==", "intel-", "#"))]
    constraints.write_text("\n".join(shared) + "\n")
    return resolve("gpu", target, "installed by scripts/setup_gpu.sh", "--constraints", str(constraints))


def main() -> None:
    cpu, gpu = ROOT / "requirements-cpu.txt", ROOT / "requirements.txt"
    with tempfile.TemporaryDirectory() as directory:
        notes = Path(directory) / "notes.txt"
        notes.write_text("\n".join(NOT_ON_CPU) + "\n")
        if not resolve_cpu(cpu, notes) or not resolve_gpu(gpu, cpu, notes):
            raise SystemExit("could not resolve the pins; see above. Nothing was written for the list that failed.")
    wheel_files.main(str(gpu), str(ROOT / "requirements-files.txt"))


if __name__ == "__main__":
    main()
