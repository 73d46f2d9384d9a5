"""Temporary files of engines go with them, and those of engines that were killed with the next one."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from open_instruct.engines import engine_files
from open_instruct.engines.engine_files import PREFIX, RPC_DIRECTORY, EngineFiles, remove_own_files

OTHER_ENGINE = """
import sys, time
from open_instruct.engines.engine_files import EngineFiles
with EngineFiles().take_temporary_files():
    print("at work", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """In the place of the directory of temporary files, with a path as short."""
    directory = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    monkeypatch.setattr(engine_files, "_files", [])
    for name in (RPC_DIRECTORY, "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, "")  # given back after the test
        monkeypatch.delenv(name)
    yield directory
    remove_own_files()
    shutil.rmtree(directory)


def directories(temporary: Path) -> set[Path]:
    return set(temporary.glob(f"{PREFIX}*"))


def test_an_engine_takes_its_temporary_files_with_it(temporary: Path) -> None:
    files = EngineFiles()
    with files.take_temporary_files():
        Path(tempfile.mkdtemp(), "socket").touch()
        assert os.environ[RPC_DIRECTORY] == str(files.path)
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"].startswith(str(temporary / "torchinductor"))
    assert tempfile.gettempdir() == str(temporary)
    assert directories(temporary) == {files.path}
    remove_own_files()
    assert not directories(temporary)


def test_what_a_killed_engine_leaves_goes_when_the_next_starts(temporary: Path) -> None:
    words = [sys.executable, "-c", OTHER_ENGINE]
    other = subprocess.Popen(words, env={**os.environ, "TMPDIR": str(temporary)}, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "at work\n"
    (left,) = directories(temporary)
    first = EngineFiles()
    assert directories(temporary) == {left, first.path}  # the other one is alive
    other.kill()
    other.wait()
    second = EngineFiles()
    assert directories(temporary) == {first.path, second.path}  # and so is this process


def test_a_path_that_is_too_long_for_sockets_is_not_used(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = temporary / ("x" * 60) / ("y" * 60)
    deep.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    files = EngineFiles()
    assert (files.path, files.env) == (None, {})
    with files.take_temporary_files():
        assert tempfile.gettempdir() == str(deep)
    assert not directories(deep)
