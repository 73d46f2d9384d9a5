"""Skills for coding agents, made from the pages of docs/start: the same text, under the names that agents look for.

python scripts/skill_pages.py      writes skills/<name>/SKILL.md
"""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
START = ROOT / "docs" / "start"


@dataclass(frozen=True)
class Skill:
    name: str
    description: str
    """When an agent should read it: the one sentence that it sees beforehand."""
    pages: tuple[str, ...]
    """Of docs/start, in the order in which they are read."""

    @property
    def path(self) -> Path:
        return ROOT / "skills" / self.name / "SKILL.md"


SKILLS = (
    Skill(
        "train-a-model",
        "Train a language model with GRPO in this repository: first run, data, memory. Read before starting a training run.",
        ("five_minutes", "your_own_data", "will_it_fit"),
    ),
    Skill(
        "add-a-reward",
        "Write a reward for this repository's GRPO training, try it, and see that it cannot be fooled.",
        ("your_own_reward",),
    ),
    Skill(
        "why-a-run-does-not-learn",
        "Find out why a training run of this repository does not learn: signals, red flags, cures, a run of zeros.",
        ("what_to_watch",),
    ),
)


def text_of(skill: Skill) -> str:
    """The pages one after the other, with links that hold where the skill lies."""
    head = f"---\nname: {skill.name}\ndescription: {json.dumps(skill.description)}\n---\n"
    return "\n".join([head, *(moved(START / f"{page}.md", skill.path.parent) for page in skill.pages)])


def moved(page: Path, folder: Path) -> str:
    """The text of a page, as it has to stand in another folder."""

    def link(match: re.Match[str]) -> str:
        path, mark, anchor = match[1].partition("#")
        target = (page.parent / path).resolve() if path else page
        return match[0] if "://" in match[1] else f"]({os.path.relpath(target, folder)}{mark}{anchor})"

    return re.sub(r"\]\(([^)\s]+)\)", link, page.read_text())


if __name__ == "__main__":
    for skill in SKILLS:
        skill.path.parent.mkdir(parents=True, exist_ok=True)
        skill.path.write_text(text_of(skill))
