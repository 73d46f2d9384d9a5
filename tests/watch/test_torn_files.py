"""A file of the record that is not whole: one sentence where it alone is asked for, and every other view goes on without it."""

import json
import os
import re
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from made_records import MadeRecord, copy_of, make_record, plans

from open_instruct.record.reader import RunRecord, TornFile
from open_instruct.watch.__main__ import main
from open_instruct.watch.export import _Views, page_of
from open_instruct.watch.mistakes import Mistake
from open_instruct.watch.runs import Runs
from open_instruct.watch.terminal import frame
from open_instruct.watch.views import answer

STEP = "record/steps/000005.parquet"
EVALUATION = "record/evaluations/000005_plus.parquet"
CURE = "copy it again, or look at another step."


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadeRecord:
    return make_record(tmp_path_factory.mktemp("made"))


@pytest.fixture(params=[0, 3, 2000], ids=lambda size: f"{size} bytes")
def directory(made: MadeRecord, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    copied = copy_of(made, tmp_path / "run")
    for name in (STEP, EVALUATION):
        os.truncate(copied / name, request.param)
    return copied


def test_reader_names_the_file(directory: Path) -> None:
    with pytest.raises(TornFile, match=rf"{STEP} is torn: [^;]+; {CURE}"):
        RunRecord(directory).samples(5)
    with pytest.raises(TornFile, match=rf"{EVALUATION} is torn: [^;]+; {CURE}"):
        RunRecord(directory).evaluation(5, "plus", ["row"])


def test_reader_names_a_file_whose_middle_is_torn(made: MadeRecord, tmp_path: Path) -> None:
    copied = copy_of(made, tmp_path / "run")
    content = bytearray((copied / STEP).read_bytes())
    content[4 : len(content) // 2] = bytes(len(content) // 2 - 4)
    (copied / STEP).write_bytes(content)
    with pytest.raises(TornFile, match="is torn"):
        RunRecord(copied).samples(5)


@pytest.mark.parametrize("words", ["step 5", "tokens 5", "staleness 5", "evaluation 5 plus", "flips plus 0 5"])
def test_view_of_the_file_is_one_sentence_and_exit_code_2(
    directory: Path, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    assert main([str(directory), "--json", *words.split()]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert re.fullmatch(rf"watch: \S+ is torn: [^;\n]+; {CURE}\n", output.err)


@pytest.mark.parametrize(
    ("name", "arguments", "files"),
    [
        ("cost", {}, [STEP, EVALUATION]),
        ("row", {"row": "train.jsonl line 1"}, [STEP, EVALUATION]),
        ("lanes", {}, [STEP, EVALUATION]),
        ("why", {"prompt_id": "train-20"}, [STEP]),
        ("evaluations", {}, [EVALUATION]),
        ("search", {"text": "no response has this"}, [STEP]),
        ("staleness", {}, []),
    ],
)
def test_view_of_several_files_goes_on_and_names_it(
    directory: Path, name: str, arguments: dict[str, str], files: list[str]
) -> None:
    view = answer(Runs([directory]), name, arguments)
    assert [sentence.split()[0] for sentence in view["torn"]] == files


def test_prompt_that_may_be_in_the_file_is_refused_with_its_name(directory: Path) -> None:
    with pytest.raises(Mistake, match=rf"has nothing of the prompt eval-5-1: .* {EVALUATION} is torn"):
        answer(Runs([directory]), "why", {"prompt_id": "eval-5-1"})


def test_runs_show_the_newest_evaluation_that_is_whole(directory: Path) -> None:
    (row,) = answer(Runs([directory]), "runs", {})
    assert {name: entry["version"] for name, entry in row["evaluations"].items()} == {"plus": 0, "minus": 5}
    assert row["torn"][0].startswith(f"{EVALUATION} is torn")


def test_cost_counts_the_steps_that_are_whole(made: MadeRecord, directory: Path) -> None:
    whole, rest = (answer(Runs([place]), "cost", {}) for place in (made.directory, directory))
    assert whole["torn"] == []
    assert (
        sum(whole["groups"].values()) - sum(rest["groups"].values()) == len(plans(5)) - 1
    )  # one holds the response of another that was not scored


def test_row_whose_only_step_is_torn_is_a_mistake_that_names_it(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.loads(line) for line in (directory / "prompts.jsonl").read_text().splitlines()]
    for prompt in next(line for line in lines if line["training_step"] == 5)["prompts"]:
        prompt["row"] = "elsewhere.jsonl line 1"
    (directory / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main([str(directory), "--json", "row", "elsewhere.jsonl line 1"]) == 2
    assert f"the record has no samples of elsewhere.jsonl line 1. {STEP} is torn" in capsys.readouterr().err


def test_exported_page_is_of_the_other_steps_and_says_so(directory: Path) -> None:
    runs = Runs([directory])
    page = page_of(_Views(runs, 0), largest_bytes=5_000_000)
    assert re.findall(r'id="step-(\d+)"', page).count("5") == 0
    assert len(re.findall(r'id="step-(\d+)"', page)) == 12


def test_terminal_says_so(directory: Path) -> None:
    from rich.console import Console

    for path in (directory / "record" / "steps").glob("*.parquet"):
        os.truncate(path, 0)
    console = Console(width=200, file=StringIO())
    console.print(frame(Runs([directory]), 200))
    text = console.file.getvalue()  # pyrefly: ignore
    assert f"{EVALUATION} is torn" in text
    assert "record/steps/000012.parquet is torn" in text


def test_torn_record_json_is_a_sentence(made: MadeRecord, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copied: Any = copy_of(made, tmp_path / "run")
    (copied / "record" / "record.json").write_bytes(b"")
    assert main([str(copied), "--json", "step", "5"]) == 2
    assert "record.json is torn" in capsys.readouterr().err
