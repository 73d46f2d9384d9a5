"""docs/reference/options.md and docs/reference/api.md are what the code says now."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import reference_pages


@pytest.mark.parametrize("name", ["options", "api"])
def test_page_is_made_from_the_present_code(name: str) -> None:
    page = {"options": reference_pages.options_page, "api": reference_pages.api_page}[name]()
    assert (reference_pages.REFERENCE / f"{name}.md").read_text() == page, "run python scripts/reference_pages.py"


def test_every_name_of_the_api_is_described() -> None:
    page = reference_pages.api_page()
    names = [name for _, names in reference_pages.API.values() for name in names]
    assert [name for name in names if f"### {name}\n" not in page] == []
