"""Options as text, for messages to the user."""

import json
from typing import Any


def shown(args: Any, *names: str) -> str:
    """Options as a user would write them on the command line."""
    return " ".join(f"--{name} {_as_text(getattr(args, name))}" for name in names)


def _as_text(value: object) -> str:
    if isinstance(value, dict):
        return f"'{json.dumps(value)}'"
    if isinstance(value, list):
        return " ".join(map(str, value)) or "(empty)"
    return str(value) if str(value) else "(empty)"
