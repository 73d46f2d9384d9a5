"""The terminal shows the views, and what models wrote is text."""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from made_records import copy_of, make_record, shared_record
from rich.console import Console

from open_instruct.watch.runs import Runs
from open_instruct.watch.terminal import follow, frame, plain, sparkline
from open_instruct.watch.views import answer


def told(runs: Runs, width: int = 120, *, is_terminal: bool = False) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=is_terminal, color_system=None)
    console.print(frame(runs, width))
    return console.file.getvalue()  # pyrefly: ignore


def test_runs_curves_step_reason_and_warnings_are_shown() -> None:
    runs = Runs([shared_record().directory])
    text = told(runs, 200)
    reward = answer(runs, "step", {"step": "12"})["summary"]["reward"]
    lines = [line.split() for line in text.splitlines()]
    assert ["made", "ended", "12/12", f"{reward:.4g}"] in [line[:4] for line in lines]
    assert "plus 50% (step 5)" in text
    assert any(line[:1] == ["reward"] and line[-1] == f"{reward:.4g}" for line in lines)
    assert "step 12: groups consumed 4, zero_std 1; all right 1, all wrong 0" in text
    assert f"reward {reward:.4g} (standard error " in text
    assert "; rewards -0.6 to 10: ▂" in text
    assert "worst: train-58 3" in text
    assert "best: train-55 0" in text
    assert "why: train-59 is line 10 of data/train.jsonl." in text
    assert "left it out, because all its responses have the same reward" in text
    assert "error in step 11: engine 1 died and is replaced" in text


@pytest.mark.parametrize("width", [40, 80, 250])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    assert max(map(len, told(Runs([shared_record().directory]), width).splitlines())) <= width


@pytest.mark.parametrize(("width", "height"), [(80, 24), (60, 16), (200, 50)])
def test_screen_fits_the_terminal(tmp_path: Path, width: int, height: int) -> None:
    for name in "abcdef":
        directory = copy_of(shared_record(), tmp_path / name)
        with open(directory / "record" / "events.jsonl", "a") as file:
            for number in range(5):
                event = {
                    "kind": "warning",
                    "unix": 1.0,
                    "level": "WARNING",
                    "text": f"warning {number}\n" + "word " * 300,
                }
                file.write(json.dumps(event) + "\n")
        os.truncate(directory / "record" / "evaluations" / "000005_plus.parquet", 0)
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(frame(Runs([tmp_path]), width, height))
    lines = console.file.getvalue().splitlines()  # pyrefly: ignore
    assert max(map(len, lines)) <= width
    assert len(lines) < height
    assert any(line.startswith("step 12: groups consumed 4") for line in lines)
    assert any(line.startswith("warning in step 13: warning 4 word") for line in lines)
    assert any(line.startswith("reward ▁") or " ▁" in line for line in lines) or height < 24


def test_cursor_is_back_after_sigterm() -> None:
    code = (
        "import sys; from rich.console import Console; from open_instruct.watch import terminal\n"
        "from open_instruct.watch.runs import Runs\n"
        "console = Console(force_terminal=True, width=80, height=24)\n"
        "sys.exit(terminal.follow(Runs(sys.argv[1:]), console))"
    )
    command = [sys.executable, "-c", code, str(shared_record().directory)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"TERM": "xterm"})
    assert process.stdout is not None
    text = ""
    while "step 12: groups" not in text:
        text += process.stdout.read(1)
    process.send_signal(signal.SIGTERM)
    text += process.communicate(timeout=60)[0]
    assert process.returncode == 143
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "shown after it was hidden"


def test_run_without_a_step_is_shown(tmp_path: Path) -> None:
    make_record(tmp_path / "out", num_steps=0, end=None, is_resumed=False)
    assert "no step has been trained yet" in told(Runs([tmp_path]))


def test_run_without_a_record_is_shown(tmp_path: Path) -> None:
    directory = copy_of(shared_record(), tmp_path / "out")
    (directory / "record").rename(tmp_path / "elsewhere")
    text = told(Runs([directory]))
    assert "no record" in text
    assert "7.042" in text, "its metrics are known"


def test_output_that_is_no_terminal_gets_it_once() -> None:
    console = Console(file=io.StringIO(), width=100)
    assert follow(Runs([shared_record().directory]), console) == 0
    assert console.file.getvalue().count("step 12: groups") == 1  # pyrefly: ignore


def test_control_characters_do_nothing_to_a_terminal() -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    console.print(plain("a\x1b[2J\x1b]0;title\x07[red]b[/red]\x9b1mc\rd"))
    assert console.file.getvalue() == "a�[2J�]0;title�[red]b[/red]�1mc�d\n"  # pyrefly: ignore


@pytest.mark.parametrize(
    ("values", "width", "bars"),
    [([0, 1, 2, 3, 4, 5, 6, 7], 20, "▁▂▃▄▅▆▇█"), ([1, 1], 20, "▁▁"), ([], 20, ""), ([0, 0, 7, 7], 2, "▁█")],
)
def test_sparkline(values: list[float], width: int, bars: str) -> None:
    assert sparkline(values, width) == bars
