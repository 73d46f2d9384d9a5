"""The commands of README and of the pages of docs/start run as they stand, with the files that the pages show."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "start").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
WITHOUT_RUN = ("source .venv/bin/activate", "bash scripts/test.sh")
"""What these tests run under anyway."""
FROM_A_HUB = re.compile(r"\bQwen/\S+")
DEMO = "out/cpu_demo"
MESSAGE = "What is 17 + 25?\n"
"""What the programs that read the terminal are told."""


def commands(page: Path) -> list[str]:
    """The commands in a page's blocks of bash: without comments, lines that go on joined."""
    text = "\n".join(block for language, block in BLOCK.findall(page.read_text()) if language == "bash")
    lines = re.sub(r"\s+# .*$", "", text.replace("\\\n", " "), flags=re.MULTILINE).splitlines()
    return [" ".join(line.split()) for line in lines if line.strip()]


COMMANDS = [(page, command) for page in PAGES for command in commands(page) if command not in WITHOUT_RUN]
QUICK = [(page, command) for page, command in COMMANDS if command.startswith("python") and DEMO not in command]
DEMOS = [command for _, command in COMMANDS if command.startswith("bash scripts/train/debug/cpu_")]
ON_A_RUN = [command for _, command in COMMANDS if DEMO in command and command not in DEMOS]


def test_every_command_is_run_by_a_test() -> None:
    assert {command for _, command in COMMANDS} == {command for _, command in QUICK} | {*DEMOS, *ON_A_RUN}
    assert len(QUICK) >= 5


def write_files(page: Path, folder: Path) -> None:
    """The files of a page: blocks of Python that begin with their name, and the rows, under the name that a command has."""
    for language, block in BLOCK.findall(page.read_text()):
        name = re.match(r"# (\w+\.py)\n", block)
        if language == "python" and name:
            (folder / name[1]).write_text(block)
        if language == "json":
            rows = {word for command in commands(page) for word in command.split() if word.endswith(".jsonl")}
            for word in rows:
                (folder / word).write_text(block)


def environment() -> dict[str, str]:
    path = f"{ROOT / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def run(command: str, folder: Path, *, timeout_s: float) -> str:
    outcome = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment(),
        input=MESSAGE,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert outcome.returncode == 0, f"{command}\n{outcome.stdout[-2000:]}\n{outcome.stderr[-4000:]}"
    return outcome.stdout + outcome.stderr


def test_help_is_as_the_pages_say(tmp_path: Path) -> None:
    (tmp_path / "open_instruct").symlink_to(ROOT / "open_instruct")
    assert "--dry_run" in run("python open_instruct/grpo_fast.py --help", tmp_path, timeout_s=60)


@pytest.mark.extended
@pytest.mark.parametrize(("page", "command"), QUICK, ids=[page.stem for page, _ in QUICK])
def test_quick_command_ends_well(page: Path, command: str, tmp_path: Path) -> None:
    for name in ("open_instruct", "assets"):
        (tmp_path / name).symlink_to(ROOT / name)
    write_files(page, tmp_path)
    run(FROM_A_HUB.sub("assets/tiny_model", command), tmp_path, timeout_s=300)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("command", sorted(set(DEMOS)))
def test_demo_runs_and_its_files_are_there(command: str, tmp_path: Path) -> None:
    output = tmp_path / "run"
    run(re.sub(r" --output_dir \S+", "", command) + f" --output_dir {output}", ROOT, timeout_s=2900)
    assert (output / "summary.json").exists()
    if command.endswith("cpu_demo.sh"):
        for look in ON_A_RUN:
            assert run(look.replace(DEMO, str(output)), ROOT, timeout_s=60)
