"""Whole runs as a user starts them, each in a process group of its own."""

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from conftest import TINY_MODEL

SCRIPT = Path(__file__).parents[2] / "open_instruct" / "grpo_fast.py"
SUMS = "reasoning_gym/chain_sum?min_terms=2&max_terms=2&min_digits=2&max_digits=2"
EVALUATION = [f"{SUMS}&size=24&seed=20240", "1.0"]
MARK = "OPEN_INSTRUCT_TEST_RUN"
SHARED_MEMORY = "/dev/shm"


def command(output_dir: Path, **options: object) -> list[str]:
    settings: dict[str, object] = {
        "model_name_or_path": TINY_MODEL,
        "dataset_mixer_list": [f"{SUMS}&size=200&seed=7", "1.0"],
        "num_unique_prompts_rollout": 4,
        "num_samples_per_prompt_rollout": 4,
        "response_length": 16,
        "max_prompt_token_length": 64,
        "pack_length": 256,
        "total_episodes": 16 * 4,
        "learning_rate": 1e-3,
        "verification_reward": 1.0,
        "beta": 0.0,
        "load_ref_policy": False,
        "vllm_enforce_eager": True,
        "seed": 3,
        "output_dir": output_dir,
        **options,
    }
    words = [sys.executable, str(SCRIPT)]
    for name, value in settings.items():
        words += [f"--{name}", *(map(str, value) if isinstance(value, list) else [str(value)])]
    return words


class Process:
    """A run in a process group of its own, whose processes can be found again by a mark in their environment."""

    def __init__(self, words: list[str]) -> None:
        self.mark = uuid.uuid4().hex
        env = os.environ | {MARK: self.mark, "HF_HUB_OFFLINE": "1"}
        self.popen = subprocess.Popen(
            words, env=env, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def wait(self, timeout_s: float = 240.0) -> tuple[int, str]:
        output, _ = self.popen.communicate(timeout=timeout_s)
        return self.popen.returncode, output

    def wait_for_rows(self, path: Path, num: int) -> None:
        deadline = time.monotonic() + 240
        while not path.exists() or path.read_text().count("\n") < num:
            assert self.popen.poll() is None, self.popen.stdout and self.popen.stdout.read()
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def processes(self) -> list[tuple[int, str]]:
        """Process id and title of everything that the run has started and that is still there (zombies aside)."""
        found = []
        for directory in Path("/proc").glob("[0-9]*"):
            try:
                if f"{MARK}={self.mark}".encode() in (directory / "environ").read_bytes():
                    title = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    found.append((int(directory.name), title[:120]))
            except OSError:
                continue
        return found

    def left_behind(self) -> list[str]:
        return [title for _, title in self.processes()]

    def assert_nothing_is_left(self, shared_memory_before: set[str]) -> None:
        deadline = time.monotonic() + 15
        while (left := self.left_behind()) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not left
        assert_no_shared_memory_is_left(shared_memory_before)


def shared_memory() -> set[str]:
    return set(os.listdir(SHARED_MEMORY))


def assert_no_shared_memory_is_left(before: set[str]) -> None:
    """No file of `SHARED_MEMORY` that is not among `before` and that no process has mapped or open: others use theirs."""
    deadline = time.monotonic() + 15
    while left := _unused_shared_memory() - before:
        assert time.monotonic() < deadline, left
        time.sleep(0.5)


def _unused_shared_memory() -> set[str]:
    files = {entry.name: (entry.stat().st_dev, entry.inode()) for entry in _scan(SHARED_MEMORY)}
    used = {identity for process in Path("/proc").glob("[0-9]*") for identity in _files_in_use(process)}
    return {name for name, identity in files.items() if identity not in used}


def _scan(directory: str) -> Iterator[os.DirEntry[str]]:
    for entry in os.scandir(directory):
        with suppress(FileNotFoundError):
            entry.stat()
            yield entry


def _files_in_use(process: Path) -> Iterator[tuple[int, int]]:
    """Device and inode of each file in shared memory that a process has mapped or open."""
    with suppress(OSError):
        for line in (process / "maps").read_text().splitlines():
            if SHARED_MEMORY in line:
                device, inode = line.split()[3:5]
                major, minor = (int(part, 16) for part in device.split(":"))
                yield os.makedev(major, minor), int(inode)
    with suppress(OSError):
        for link in (process / "fd").iterdir():
            with suppress(OSError):
                if os.readlink(link).startswith(SHARED_MEMORY):
                    status = link.stat()
                    yield status.st_dev, status.st_ino


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def prompts_by_step(output_dir: Path) -> list[list[str]]:
    return [[prompt["row"] for prompt in row["prompts"]] for row in rows(output_dir / "prompts.jsonl")]


def assert_each_prompt_once(output_dir: Path) -> None:
    ids = [prompt["prompt_id"] for row in rows(output_dir / "prompts.jsonl") for prompt in row["prompts"]]
    assert sorted(int(i.removeprefix("train-")) for i in ids) == list(range(len(ids)))


def assert_ledger_balances(output_dir: Path) -> dict[str, Any]:
    """Of a finished run: issued = consumed + dropped, and every prompt has one fate. Returns the summary's counts."""
    counts = json.loads((output_dir / "summary.json").read_text())["prompts"]
    assert counts["issued"] == counts["consumed"] + sum(counts["dropped"].values())
    assert_each_prompt_once(output_dir)
    return counts
