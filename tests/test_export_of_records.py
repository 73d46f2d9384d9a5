"""What the command line of `open_instruct.export` refuses. What it writes is compared with a run's in `tests/runs`."""

from pathlib import Path

import pytest
from made_records import shared_record

from open_instruct import export
from open_instruct.record.reader import RunRecord


def refusal(capsys: pytest.CaptureFixture[str], directory: Path, *words: str) -> str:
    assert export.main([str(directory), "--form", "transcripts", *words]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("20-10", "--steps 20-10 is reversed: --steps 10-20."),
        ("ten", "--steps ten: give a number, or two with a - between them, such as 10-20, or 10-."),
        ("13-20", "the record has no such step; it has 1 to 12."),
    ],
)
def test_steps_that_cannot_be_are_refused(capsys: pytest.CaptureFixture[str], text: str, problem: str) -> None:
    assert refusal(capsys, shared_record().directory, "--steps", text).endswith(f"{problem}\n")


@pytest.mark.parametrize(
    ("text", "steps", "note"),
    [
        ("10-", [10, 11, 12], ""),
        ("10", [10], ""),
        ("3-5", [3, 4, 5], ""),
        ("11-20", [11, 12], "export: --steps 11-20: the record ends at 12\n"),
    ],
)
def test_steps_are_those_of_the_record(
    capsys: pytest.CaptureFixture[str], text: str, steps: list[int], note: str
) -> None:
    assert export._chosen(RunRecord(shared_record().directory), list(range(1, 13)), text) == steps
    assert capsys.readouterr().err == note


def test_file_in_place_of_a_directory_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run = shared_record().directory
    assert (
        refusal(capsys, run, "--to", str(tmp_path / "file"))
        == f"export: --to {tmp_path / 'file'} is a file. Give a directory.\n"
    )
