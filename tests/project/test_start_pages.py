"""What README and the pages of docs/start say of options, metrics and messages holds: each of them exists."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from open_instruct.config.checks import collect_mistakes
from open_instruct.config.cli import parse_args
from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.registry import option_fields
from open_instruct.report.metric_names import find
from open_instruct.watch.__main__ import SHORTCUTS

ROOT = Path(__file__).parents[2]
START = ROOT / "docs" / "start"
PAGES = [ROOT / "README.md", *sorted(START.glob("*.md"))]
OPTIONS = {field.name for field in option_fields(GRPOConfig)} | {"help", "config"}
OWN_PROGRAMS = {
    option
    for name in ("chat.py", "doctor.py", "export.py", "watch/__main__.py")
    for option in re.findall(r'add_argument\(\s*"--(\w+)"', (ROOT / "open_instruct" / name).read_text())
} | set(SHORTCUTS)
OTHER_PROGRAMS = {"shm-size", "ipc", "dtype", "enforce-eager"}
"""Options of docker and of vLLM."""
METRIC = re.compile(
    r"`((?:all_groups|batch|val|policy|debug|optim|objective|eval|time|engines|tools)/[\w/<>]+|num_steps_\w+)`"
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_options_that_a_page_names_exist(page: Path) -> None:
    named = set(re.findall(r"(?<![\w-])--([a-z][\w-]*)", page.read_text()))
    assert sorted(named - OPTIONS - OWN_PROGRAMS - OTHER_PROGRAMS) == []


def test_metrics_that_the_pages_name_exist() -> None:
    named = {metric for page in PAGES for metric in METRIC.findall(page.read_text())}
    assert len(named) > 20
    assert sorted(metric for metric in named if find(metric.replace("<name>", "calculator")) is None) == []


def messages() -> Iterator[str]:
    """Every text of the program's source, with `…` in place of what is put into it."""
    for path in (ROOT / "open_instruct").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield re.sub(r"\{\w+\}|%[sdg]|%\.\d[a-z]", "…", node.value)


def test_messages_among_the_common_questions_are_the_program_s() -> None:
    headings = re.findall(r"^### `(.*)`$", (START / "common_questions.md").read_text(), flags=re.MULTILINE)
    texts = set(messages())
    assert len(headings) > 10
    assert [heading for heading in headings if not any(heading in text for text in texts)] == []


PAPERS = re.findall(r"^\| ([^|]+) \| \[[^|]+\| `(--[^`]+)` \|$", (START / "papers.md").read_text(), flags=re.MULTILINE)


def test_every_paper_is_tried() -> None:
    assert len(PAPERS) == (START / "papers.md").read_text().count("| `--")


@pytest.mark.parametrize(("method", "options"), PAPERS, ids=[method for method, _ in PAPERS])
def test_options_of_a_paper_are_accepted_together(method: str, options: str) -> None:
    run = f"--model_name_or_path {ROOT}/assets/tiny_model --dataset_mixer_list reasoning_gym/chain_sum 1.0"
    options = options.replace("assets/", f"{ROOT}/assets/")
    parse_args([*shlex.split(run), *shlex.split(options)], GRPOConfig, validators=[collect_mistakes])
