"""Write down which files the wheels of requirements.txt own, so that a test can tell that no two own the same one.

    python scripts/wheel_files.py requirements.txt requirements-files.txt

Two wheels with one path between them overwrite each other when they are installed, and an installer that unpacks in
parallel does it in any order. The file list of a wheel stands at its end: about 100 KB are read of each, not gigabytes.
Where a pin has no wheel, one is built. A directory whose files all belong to one distribution is written as one line.
"""

import io
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
import zipfile
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

PYTHONS = [(3, 11), (3, 12), (3, 13)]
GLIBC = 31  # 2.31, the oldest that every pin has a wheel for
OLD_NAMES = {17: "manylinux2014_x86_64", 12: "manylinux2010_x86_64", 5: "manylinux1_x86_64"}
READ_BYTES = 1 << 18
LIMIT_S = 120


class RemoteFile(io.RawIOBase):
    """A file behind a URL, of which only the ranges that are read are fetched."""

    def __init__(self, url: str, size: int) -> None:
        self._url, self._size, self._position = url, size, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        end = min(self._position + len(buffer), self._size)
        if end <= self._position:
            return 0
        request = urllib.request.Request(self._url, headers={"Range": f"bytes={self._position}-{end - 1}"})
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            if answer.status != 206:
                raise OSError(f"{self._url}: the registry sent the whole file where a part was asked for")
            data = answer.read()
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


def ranked_tags(python: tuple[int, int]) -> dict[Tag, int]:
    """Every wheel tag that installs on this Python under Linux, the best with the lowest rank."""
    platforms = []
    for minor in range(GLIBC, 4, -1):
        platforms += [f"manylinux_2_{minor}_x86_64", *([OLD_NAMES[minor]] if minor in OLD_NAMES else [])]
    platforms.append("linux_x86_64")
    name = f"cp{python[0]}{python[1]}"
    tags = [*cpython_tags(python, platforms=platforms), *compatible_tags(python, name, platforms)]
    return {tag: rank for rank, tag in reversed(list(enumerate(tags)))}


def best_wheel(urls: Iterable[str], python: tuple[int, int]) -> str | None:
    """The URL of the wheel that an installer would take, None where none fits."""
    ranks = ranked_tags(python)
    fitting = []
    for url in urls:
        tags = parse_wheel_filename(url.rsplit("/", 1)[1])[3]
        if found := [ranks[tag] for tag in tags if tag in ranks]:
            fitting.append((min(found), url))
    return min(fitting)[1] if fitting else None


def installed_path(name: str) -> str:
    """Where a member of a wheel ends up, relative to site-packages; `scripts:x` and `data:x` lie outside of it."""
    top, _, rest = name.partition("/")
    if not top.endswith(".data"):
        return name
    kind, _, path = rest.partition("/")
    return path if kind in ("purelib", "platlib") else f"{kind}:{path}"


def wheel_paths(file: Any) -> set[str]:
    with zipfile.ZipFile(file) as wheel:
        return {installed_path(member.filename) for member in wheel.infolist() if not member.is_dir()}


def built_paths(pin: str) -> set[str]:
    """The files of a distribution that is published as source alone."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", directory, pin]
        subprocess.run(command, check=True, timeout=600)
        return wheel_paths(next(Path(directory).glob("*.whl")))


def package_paths(package: dict[str, Any]) -> set[str]:
    """Every path that one of the supported Pythons gets from this package of a pylock file."""
    sizes = {wheel["url"]: wheel["size"] for wheel in package.get("wheels", [])}
    chosen = {best_wheel(sizes, python) for python in PYTHONS}
    pin = f"{package['name']}=={package['version']}"
    if None in chosen:
        if chosen != {None} or "sdist" not in package:
            raise SystemExit(f"{pin} has no wheel for one of Python {PYTHONS}: {sorted(sizes)}")
        return built_paths(pin)
    files = (io.BufferedReader(RemoteFile(url, sizes[url]), READ_BYTES) for url in chosen if url)
    return set().union(*map(wheel_paths, files))


def whole_directories(paths: dict[str, set[str]]) -> dict[str, set[str]]:
    """Paths per owner, with `torch/` in place of all that lies in a directory which only one owner puts files into."""
    owners = defaultdict(set)
    for owner, files in paths.items():
        for file in files:
            for parent in Path(file).parents:
                owners[str(parent)].add(owner)

    def shortened(file: str) -> str:
        own = [str(parent) for parent in Path(file).parents if str(parent) != "." and len(owners[str(parent)]) == 1]
        return f"{own[-1]}/" if own else file

    return {owner: {shortened(file) for file in files} for owner, files in paths.items()}


def read_packages(requirements: str) -> list[dict[str, Any]]:
    """Pins with the URLs of all their files, as uv finds them."""
    uv = Path(sys.executable).with_name("uv")
    command = [uv, "pip", "compile", requirements, "--no-deps", "--universal", "--format", "pylock.toml", "--quiet"]
    locked = subprocess.run(
        [*map(str, command), "--python-version", "3.11"], check=True, timeout=600, stdout=subprocess.PIPE, text=True
    )
    return tomllib.loads(locked.stdout)["packages"]


def main(requirements: str, target: str) -> None:
    packages = read_packages(requirements)
    names = [f"{package['name']}=={package['version']}" for package in packages]
    with ThreadPoolExecutor(16) as pool:
        paths = dict(zip(names, pool.map(package_paths, packages), strict=True))
    lines = [f"# Made by scripts/wheel_files.py (make pins): the files of {Path(requirements).name}."]
    for name, entries in sorted(whole_directories(paths).items()):
        lines += [name, *(f"  {entry}" for entry in sorted(entries))]
    Path(target).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
