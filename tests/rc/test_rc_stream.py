"""The stream of turns: read while it is written, torn, resumed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from open_instruct.rc.stream import (
    EntryTooLarge,
    NotAStream,
    StreamWriter,
    read_stream,
    read_trajectories,
    resume_stream,
)
from open_instruct.workflows.rc.types import TrainingText

LARGE = 1 << 20


def trajectory(number: int, num_turns: int = 4) -> list[TrainingText]:
    return [
        TrainingText(
            text=f"turn {step} \N{SNOWMAN}\n",
            prompt_ids=np.array([1, 2, step], np.int32),
            response_ids=np.array([7, 8], np.int32),
            logprobs=np.array([-0.1, -1e-7], np.float32),
            reward=None if step % 2 else 0.5,
            finished=step != 1,
            group_id=f"p{number}",
            trajectory_id=f"p{number}/0",
            metadata={"cycle_step": step, "turn_type": "reasoning", "nested": {"a": [1, None]}},
        )
        for step in range(num_turns)
    ]


def as_values(turn: TrainingText) -> dict[str, Any]:
    return turn.to_json()


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "stream.jsonl"
    with StreamWriter(path, max_entry_bytes=LARGE) as stream:
        stream.write(trajectory(0))
        assert len(list(read_stream(path))) == 4  # by another reader, while it is open
        stream.write(trajectory(1, 2))
    turns = list(read_stream(path))
    assert [as_values(turn) for turn in turns] == [as_values(turn) for turn in [*trajectory(0), *trajectory(1, 2)]]
    assert turns[0].prompt_ids.dtype == np.int32
    assert turns[0].logprobs.tolist() == trajectory(0)[0].logprobs.tolist()
    assert [len(turns) for turns in read_trajectories(path)] == [4, 2]


@pytest.mark.parametrize("cut", [1, 30, 400])
def test_a_torn_end_is_read_past_and_cut_off_on_resuming(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "stream.jsonl"
    with StreamWriter(path, max_entry_bytes=LARGE) as stream:
        stream.write(trajectory(0))
        size = path.stat().st_size
        stream.write(trajectory(1))
    with open(path, "rb+") as file:
        file.truncate(path.stat().st_size - cut)
    assert 4 <= len(list(read_stream(path))) < 8
    assert [turns[0].trajectory_id for turns in resume_stream(path)] == ["p0/0"]
    assert path.stat().st_size == size
    with StreamWriter(path, max_entry_bytes=LARGE) as stream:
        stream.write(trajectory(1))
    assert [turns[0].trajectory_id for turns in read_trajectories(path)] == ["p0/0", "p1/0"]


BROKEN = [b"not json\n", b"[]\n", b'{"text": "x"}\n', b"\xff\n", b"\n", b"[" * 100_000 + b"\n"]


@pytest.mark.parametrize("broken", [b"{", *BROKEN])
def test_broken_lines_are_passed_over_by_readers(tmp_path: Path, broken: bytes) -> None:
    path = tmp_path / "stream.jsonl"
    with StreamWriter(path, max_entry_bytes=LARGE) as stream:
        stream.write(trajectory(0))
    with open(path, "ab") as file:
        file.write(broken)
    assert len(list(read_stream(path))) == 4


@pytest.mark.parametrize("broken", BROKEN, ids=range(6))
@pytest.mark.parametrize("first", [True, False])
def test_a_stream_of_another_version_is_not_cut(tmp_path: Path, broken: bytes, first: bool) -> None:
    """A kill tears the last line alone; whole lines that cannot be read are somebody's data."""
    path = tmp_path / "stream.jsonl"
    with StreamWriter(path, max_entry_bytes=LARGE) as stream:
        stream.write(trajectory(0))
    content = broken + path.read_bytes() if first else path.read_bytes() + broken
    path.write_bytes(content)
    with pytest.raises(NotAStream, match=f"line {1 if first else 5} is no turn"):
        list(resume_stream(path))
    assert path.read_bytes() == content


ALTERED: list[dict[str, Any]] = [
    {"num_turns": "4"},
    {"num_turns": None},
    {"num_turns": 5},
    {"num_turns": 0},
    {"trajectory_id": None},  # a name of its own for each line
]


@pytest.mark.parametrize("altered", ALTERED, ids=str)
def test_a_stream_whose_trajectories_never_become_complete_is_not_cut(tmp_path: Path, altered: dict[str, Any]) -> None:
    path = tmp_path / "stream.jsonl"
    with StreamWriter(path, max_entry_bytes=LARGE) as stream:
        for number in range(3):
            stream.write(trajectory(number))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    changed = [
        json.dumps(line | {key: f"t{number}" if value is None and key != "num_turns" else value})
        for number, line in enumerate(lines)
        for key, value in altered.items()
    ]
    path.write_text("\n".join(changed) + "\n")
    content = path.read_bytes()
    with pytest.raises(NotAStream, match=r"line \d+ (is no turn|begins another trajectory)"):
        list(resume_stream(path))
    assert path.read_bytes() == content


@pytest.mark.parametrize(("tail", "may_be_torn"), [(b"x" * 1_000_000, False), (b"\0" * 500, True), (b'{"te\0\0', True)])
def test_of_a_line_without_an_end_the_beginning_decides(tmp_path: Path, tail: bytes, may_be_torn: bool) -> None:
    """A loss of power may leave zeros in place of what was written last."""
    path = tmp_path / "stream.jsonl"
    with StreamWriter(path, max_entry_bytes=LARGE) as stream:
        stream.write(trajectory(0))
    content = path.read_bytes()
    path.write_bytes(content + tail)
    if may_be_torn:
        assert len(list(resume_stream(path))) == 1
        assert path.read_bytes() == content
    else:
        with pytest.raises(NotAStream, match="line 5 is no turn"):
            list(resume_stream(path))
        assert path.read_bytes() == content + tail


def test_there_may_be_nothing_to_resume(tmp_path: Path) -> None:
    assert list(resume_stream(tmp_path / "absent.jsonl")) == []
    (tmp_path / "torn.jsonl").write_bytes(b'{"tex')
    assert list(resume_stream(tmp_path / "torn.jsonl")) == []
    assert (tmp_path / "torn.jsonl").read_bytes() == b""


def test_of_a_trajectory_with_an_entry_that_is_too_large_nothing_is_written(tmp_path: Path) -> None:
    path = tmp_path / "stream.jsonl"
    turns = trajectory(0)
    turns[2].text = "x" * 2000
    with StreamWriter(path, max_entry_bytes=1000) as stream:
        with pytest.raises(EntryTooLarge, match="allows 1000"):
            stream.write(turns)
        stream.write(trajectory(1))
    assert {turn.trajectory_id for turn in read_stream(path)} == {"p1/0"}


def test_lines_are_strict_json(tmp_path: Path) -> None:
    path = tmp_path / "stream.jsonl"
    turns = trajectory(0, 1)
    turns[0].reward = float("nan")
    with StreamWriter(path, max_entry_bytes=LARGE) as stream, pytest.raises(ValueError, match="not JSON compliant"):
        stream.write(turns)
    with StreamWriter(path, max_entry_bytes=LARGE) as stream:
        stream.write(trajectory(0))
    assert json.loads(path.read_text().splitlines()[0])["num_turns"] == 4
