"""Documents: their links lead somewhere, the pages that code and messages name exist, and the site is built of all of them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import skill_pages  # noqa: E402

PAGES = sorted((ROOT / "docs").rglob("*.md"))
MARKDOWN = [*PAGES, *ROOT.glob("*.md"), *sorted((ROOT / "skills").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
MENTION = re.compile(r"\bdocs/[\w/.-]+\.md\b")
CODE_FOLDERS = ("open_instruct", "tests", "scripts", "benchmarks", "examples", "conf", ".ci", ".github")
CODE = [
    path for folder in CODE_FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in {".py", ".sh", ".yaml"}
]


def anchors(page: Path) -> set[str]:
    """What `page.md#anchor` may name: its headings, as code hosts and Sphinx spell them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    """Links of a page to files that are not there, or to headings that the other page does not have."""
    broken = []
    for link in LINK.findall(page.read_text()):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if re.match(r"https?://|mailto:", link):
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_broken_links_are_noticed(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# What counts, and why\n```bash\n# no heading\n```\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](other.md#what-counts-and-why) [b](other.md#no-heading) [c](none.md) [d](#e) [f](https://a.b/#c)"
    )
    assert broken_links(page) == ["other.md#no-heading", "none.md", "#e"]


def test_pages_that_code_and_documents_name_exist() -> None:
    absent = {
        f"{path.relative_to(ROOT)}: {page}"
        for path in [*CODE, *MARKDOWN, ROOT / "pyproject.toml"]
        for page in MENTION.findall(path.read_text())
        if not (ROOT / page).exists()
    }
    assert absent == set()


def test_every_page_is_in_the_contents_and_on_the_map() -> None:
    names = {str(page.relative_to(ROOT / "docs").with_suffix("")) for page in PAGES} - {"README"}
    contents = set(re.findall(r"^   (\w+/\w+)$", (ROOT / "docs" / "index.rst").read_text(), flags=re.MULTILINE))
    assert contents == names
    assert set(re.findall(r"\]\((\w+/\w+)\.md\)", (ROOT / "docs" / "README.md").read_text())) == names


@pytest.mark.parametrize("skill", skill_pages.SKILLS, ids=lambda skill: skill.name)
def test_skill_is_the_text_of_its_pages(skill: skill_pages.Skill) -> None:
    assert skill.path.read_text() == skill_pages.text_of(skill), "run python scripts/skill_pages.py"
    head = yaml.safe_load(skill.path.read_text().split("---")[1])
    assert head == {"name": skill.path.parent.name, "description": skill.description}


def test_readme_can_be_read_in_one_go() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_files_for_the_code_host_are_valid_and_call_the_project_s_own_checks() -> None:
    files = [path for pattern in ("*.yml", "*.yaml") for path in (ROOT / ".github").rglob(pattern)]
    contents = {path.name: yaml.safe_load(path.read_text()) for path in files}
    assert {"run": "bash .ci/run"} in contents["ci.yml"]["jobs"]["ci"]["steps"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] in (ROOT / "pyproject.toml").read_text()
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert f"ruff=={hooks[0]['rev'][1:]}\n" in (ROOT / "requirements-cpu.txt").read_text()


@pytest.mark.extended
def test_site_is_built_without_a_warning(tmp_path: Path) -> None:
    build = ["bash", str(ROOT / "scripts" / "build_docs.sh"), str(tmp_path)]
    outcome = subprocess.run(build, capture_output=True, text=True, timeout=300, check=False)
    assert outcome.returncode == 0, outcome.stderr
    assert (tmp_path / "searchindex.js").exists()
    assert "How answers are scored" in (tmp_path / "index.html").read_text()
