"""One run in a directory, until its process ends; what cannot be written is said before anything starts."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from open_instruct.storage.output_directory import LOCK_FILE, UnusableDirectory, held, is_of_storage

HOLDER = """
import os, subprocess, sys, time
from pathlib import Path
from open_instruct.storage.output_directory import held
with held([Path(sys.argv[1])], "--output_dir"):
    child = subprocess.Popen(["sleep", "60"])
    forked = os.fork()
    if forked == 0:
        time.sleep(60)
    print(child.pid, forked, flush=True)
    time.sleep(60)
"""


def start_holder(directory: Path) -> tuple[subprocess.Popen, list[int]]:
    """Another process that has the directory, and its children, who must not."""
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(directory)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    return holder, [int(pid) for pid in holder.stdout.readline().split()]


def test_a_second_run_is_told_who_has_the_directory_until_that_one_is_dead(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    holder, children = start_holder(out)
    try:
        with pytest.raises(UnusableDirectory) as caught, held([out], "--output_dir"):
            pass
        assert str(caught.value).startswith(f"--output_dir {out}: another run is in it (process {holder.pid} of ")
        holder.send_signal(signal.SIGKILL)
        holder.wait(timeout=10)
        with held([out], "--output_dir"):  # though its children live
            assert f'"process": {os.getpid()}' in (out / LOCK_FILE).read_text()
    finally:
        for pid in [*children, holder.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def test_it_is_free_again_after_the_block(tmp_path: Path) -> None:
    with held([tmp_path, tmp_path / "checkpoints", tmp_path], "--output_dir"):
        pass
    holder, children = start_holder(tmp_path)
    assert len(children) == 2
    for pid in [*children, holder.pid]:
        os.kill(pid, signal.SIGKILL)
    holder.wait(timeout=10)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [LOCK_FILE]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.write_text(""), "File exists"),
        (lambda path: path.symlink_to(path), "File exists"),
        (lambda path: path.symlink_to(path.parent / "nowhere" / "else"), "File exists"),
    ],
    ids=["file", "circle", "dangling"],
)
def test_what_is_no_directory_is_named(tmp_path: Path, make: object, words: str) -> None:
    path = tmp_path / "out"
    make(path)  # type: ignore[operator]
    with pytest.raises(UnusableDirectory, match=words), held([path], "--output_dir"):
        pass


@pytest.mark.parametrize("path", ["/proc/x", "/dev/null/x", "x" * 300, "with\0nul"])
def test_paths_that_cannot_be_are_named(tmp_path: Path, path: str) -> None:
    with pytest.raises(UnusableDirectory, match="Give another directory"), held([tmp_path / path], "--output_dir"):
        pass


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UnusableDirectory, match="No space left on device"), held([tmp_path], "--output_dir"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_errors_of_storage_are_known() -> None:
    assert is_of_storage(OSError(errno.ENOSPC, "full"))
    assert is_of_storage(PermissionError(errno.EACCES, "not yours"))
    assert not is_of_storage(ConnectionResetError(errno.ECONNRESET, "gone"))
    assert not is_of_storage(ValueError("no"))
