"""What the command line of `open_instruct.export` refuses. What it writes is compared with a run's in `tests/runs`."""

from pathlib import Path

import pytest
from made_records import shared_record

from open_instruct import export


def refusal(capsys: pytest.CaptureFixture[str], directory: Path, *words: str) -> str:
    assert export.main([str(directory), "--form", "transcripts", *words]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_file_in_place_of_a_directory_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run = shared_record().directory
    assert (
        refusal(capsys, run, "--to", str(tmp_path / "file"))
        == f"export: --to {tmp_path / 'file'} is a file. Give a directory.\n"
    )
