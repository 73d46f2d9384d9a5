"""docs/reference/options.md and docs/reference/api.md are what the code says now."""

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import reference_pages

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.mark.parametrize("name", ["options", "api"])
def test_page_is_made_from_the_present_code(name: str) -> None:
    """In a process of its own, because other tests register workflows and losses of theirs."""
    code = f"import sys, reference_pages; sys.stdout.write(reference_pages.{name}_page())"
    result = subprocess.run([sys.executable, "-c", code], cwd=SCRIPTS, stdout=subprocess.PIPE, check=True)
    page = (reference_pages.REFERENCE / f"{name}.md").read_bytes()
    assert page == result.stdout, "run python scripts/reference_pages.py"


def test_every_name_of_the_api_is_described() -> None:
    page = reference_pages.api_page()
    names = [name for _, names in reference_pages.API.values() for name in names]
    assert [name for name in names if f"### {name}\n" not in page] == []
