"""Print what pip is configured to install from as options of uv, one a line.

uv does not read pip's configuration, so a machine whose registries stand there would be out of reach of it. Reads
`pip config list` of the interpreter that runs this file; needs nothing but the standard library.
"""

import ast
import subprocess
import sys

UV_FLAGS = {
    "index-url": "--index-url",
    "extra-index-url": "--extra-index-url",
    "find-links": "--find-links",
    "trusted-host": "--allow-insecure-host",
}


def parse_pip_config(listing: str) -> dict[str, list[str]]:
    """Values per option of `pip config list`; as in pip the environment wins over `[install]`, that over `[global]`."""
    found: dict[str, dict[str, str]] = {}
    for line in listing.splitlines():
        key, separator, value = line.partition("=")
        section, _, option = key.rpartition(".")
        if separator and option in UV_FLAGS:
            found.setdefault(option, {})[section] = str(ast.literal_eval(value))
    values = {}
    for option, sections in found.items():
        chosen = next((sections[name] for name in (":env:", "install", "global") if name in sections), "")
        # Environment variables part their values with spaces, files with line breaks too.
        values[option] = chosen.split()
    return values


def uv_flags(listing: str) -> list[str]:
    """Options for `uv pip` that make it look where pip looks."""
    return [f"{UV_FLAGS[option]}={value}" for option, values in parse_pip_config(listing).items() for value in values]


def find_flags() -> list[str]:
    """Options that stand for what pip of this interpreter is configured with."""
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    return uv_flags(listing)


def main() -> None:
    for flag in find_flags():  # of none not even an empty line, which would be an option of its own
        print(flag)


if __name__ == "__main__":
    main()
