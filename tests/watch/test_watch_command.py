"""The command line: what it prints, what it refuses, and its page of the documentation."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from made_records import copy_of, make_large, shared_record

from open_instruct.watch.__main__ import help_of_views, main, read_words
from open_instruct.watch.json_text import to_text
from open_instruct.watch.mistakes import Mistake
from open_instruct.watch.runs import Runs
from open_instruct.watch.views import VIEWS, answer

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "watch.md"


def said(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main([str(shared_record().directory), "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_views_are_printed_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    runs = Runs([shared_record().directory])
    assert said(capsys, "why", "train-17") == answer(runs, "why", {"prompt_id": "train-17"})
    worst = said(capsys, "step", "5", "--worst", "3")
    assert worst == answer(runs, "step", {"step": "5", "sort": "worst", "limit": "3"})
    assert len(worst["samples"]) == 3
    assert list(said(capsys, "curves", "--names", "reward")["values"]) == ["all_groups/scores"]
    assert said(capsys) == answer(runs, "runs", {})


def test_samples_of_a_step_come_before_its_groups(capsys: pytest.CaptureFixture[str]) -> None:
    names = list(said(capsys, "step", "5", "--worst", "3"))
    assert names.index("samples") < names.index("groups")


@pytest.mark.parametrize(
    "value", [{}, [], None, "é\n", [1, 2.5, None, "a"], {"a": [], "b": {}, "c": [[1, 2], [{"d": [True, "x"]}]]}, [[]]]
)
def test_json_has_lists_of_scalars_on_a_line(value: Any) -> None:
    text = to_text(value)
    assert json.loads(text) == value
    assert "[1, 2" not in json.dumps(value) or "[1, 2" in text


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("step 40 --worst 3", {"step": "40", "sort": "worst", "limit": "3"}),
        ("step --worst 3 40", {"step": "40", "sort": "worst", "limit": "3"}),
        ("step 40 --random", {"step": "40", "sort": "random", "limit": "1"}),
        (
            "step 40 --min-reward=-1 --text two words --limit 2",
            {"step": "40", "min_reward": "-1", "text": "two words", "limit": "2"},
        ),
        ("step 40 --max_reward -1", {"step": "40", "max_reward": "-1"}),
        ("curves --names reward entropy", {"names": "reward,entropy"}),
        ("row train.jsonl line 7 --run 1", {"row": "train.jsonl line 7", "run": "1"}),
        ("flips plus 0 5", {"set": "plus", "version": "0", "other": "5"}),
        ("sample 3 train-9 0 --attempt 1", {"step": "3", "prompt_id": "train-9", "sample": "0", "attempt": "1"}),
        ("lanes", {}),
    ],
)
def test_words_become_arguments(line: str, values: dict[str, str]) -> None:
    assert read_words(line.split()) == (line.split()[0], values)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("wy train-3", "there is no view 'wy'. Did you mean why? The views are: runs, options, curves, step,"),
        ("step 40", "the record has no step 40. It has 13 steps from 1 to 13; the nearest is 13."),
        ("step", "step needs 'step': step STEP [--run]"),
        ("step five", "step has to be a whole number, not 'five'."),
        ("step 5 --min_reward high", "min_reward has to be a number, not 'high'."),
        ("step 5 --sorted worst", "step has no argument 'sorted'. Its arguments are: step, run, verifier,"),
        ("step 5 6", "'6' is one word too many: step STEP"),
        (
            "evaluation 3 plus",
            "the record has no evaluation of plus at version 3. It has: minus at 0, plus at 0, minus at 5, plus at 5.",
        ),
        ("search", "search needs 'text'"),
        ("step 5 --limit -1", "limit has to be 0 or more, not -1."),
        ("step 5 --offset -2", "offset has to be 0 or more, not -2."),
        ("step 5 --outcome lost", "step 5 has no outcome 'lost'. It has to be one of: consumed, "),
        ("step 5 --verifier none", "step 5 has no verifier 'none'. It has to be one of: "),
        ("export_rows 5 --source none", "step 5 has no source 'none'. It has to be one of: train."),
        (
            "step 5 --worst 3 --best 3",
            "--worst and --best are two orders. Give one of: best, worst, longest, shortest,",
        ),
        ("lanes 5 3", "the steps 5 and 3 are reversed: lanes 3 5."),
        ("curves --run 4", "there is no run 4: 1 were found, numbered from 0."),
    ],
)
def test_what_a_user_can_correct_is_one_sentence_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], line: str, sentence: str
) -> None:
    assert main([str(shared_record().directory), "--json", *line.split()]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert sentence in output.err
    assert output.err.count("\n") == 1


@pytest.mark.parametrize("words", [["row", ""], ["why", ""], ["search", ""], ["step", "", "--worst", "3"]])
def test_empty_argument_is_one_sentence_and_exit_code_2(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert main([str(shared_record().directory), "--json", *words]) == 2
    assert re.fullmatch(rf"watch: {words[0]} needs '\w+': .*\n", capsys.readouterr().err)


def test_option_that_cannot_be_is_one_sentence_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, absent = str(shared_record().directory), tmp_path / "absent"
    second = str(copy_of(shared_record(), tmp_path / "second"))
    for words, sentence in (
        ([run, second, "--export", str(tmp_path / "x.html")], "--export writes the page of one run, and 2 are given."),
        ([run, "--port", "99999"], "--port 99999: a port is a number from 1 to 65535."),
        (
            [run, str(absent), "--json", "runs"],
            f"{absent}: there is no such directory. Give the --output_dir of a run,",
        ),
        ([run, "--export", str(absent / "x.html")], f"there is no directory {absent}. Make it, or give another"),
    ):
        assert main(words) == 2
        error = capsys.readouterr().err
        assert sentence in error
        assert error.count("\n") == 1
    assert not absent.exists()


def test_directory_without_a_run_is_a_sentence_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"watch: {tmp_path}: no run is in there. Give the --output_dir of a run, or a folder that holds such directories.\n"
    )


def test_command_reads_a_run_without_ray_vllm_or_torch() -> None:
    code = (
        "import sys; from open_instruct.watch.__main__ import main; code = main(sys.argv[1:])\n"
        "heavy = {'ray', 'vllm', 'torch', 'deepspeed', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\nsys.exit(code)"
    )
    words = [str(shared_record().directory), "--json", "sample", "5", "train-20", "0"]
    outcome = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False, timeout=120
    )
    assert outcome.returncode == 0, outcome.stderr
    assert json.loads(outcome.stdout)["prompt_id"] == "train-20"


def test_command_writes_nothing_into_the_run(tmp_path: Path) -> None:
    directory = copy_of(shared_record(), tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in directory.rglob("*")}
    for line in ("runs", "curves", "step 5", "why train-3", "row 7", "cost", "lanes", "evaluations"):
        assert main([str(directory), "--json", *line.split()]) in (0, 2)
    assert main([str(directory), "--follow"]) == 0
    assert {path: path.stat().st_mtime_ns for path in directory.rglob("*")} == before


def test_help_names_every_view_with_what_it_shows() -> None:
    for view in VIEWS.values():
        assert f"{view.usage}\n    {view.help}" in help_of_views()
        assert len(view.help) > 30


def test_help_of_one_view_is_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(shared_record().directory), "--json", "help", "step"]) == 0
    assert capsys.readouterr().out == f"{VIEWS['step'].usage}\n    {VIEWS['step'].help}\n"
    assert main([str(shared_record().directory), "--json", "help", "stip"]) == 2
    assert "Did you mean step?" in capsys.readouterr().err


def test_page_has_every_view_with_its_arguments() -> None:
    table = PAGE.read_text().partition("## The views")[2].partition("## ")[0]
    assert re.findall(r"^\| `(\w+.*?)` \|", table, flags=re.MULTILINE) == [view.usage for view in VIEWS.values()]


def test_page_explains_every_number_of_cost_and_every_lane() -> None:
    runs = Runs([shared_record().directory])
    text = PAGE.read_text().partition("## Numbers of cost")[2]
    view = answer(runs, "cost", {})
    names = {*view, *view["tokens"], *view["seconds"]} - {"torn", "seconds", "solved"}
    assert [name for name in names if not re.search(rf"`[^`]*\b{name}\b[^`]*`", text)] == []
    lanes = answer(runs, "lanes", {})["lanes"]
    assert [lane["name"] for lane in lanes if f"`{lane['name']}`" not in text] == []
    kinds = {span["kind"] for lane in lanes for span in lane["spans"]}
    assert [kind for kind in kinds if f"`{kind}`" not in text] == []


def test_commands_for_the_twelve_questions_are_views() -> None:
    table = PAGE.read_text().partition("## Twelve questions")[2].partition("## The views")[0]
    rows = re.findall(r"^\| .*\? \| (.*) \|$", table, flags=re.MULTILINE)
    assert len(rows) == 12
    runs = Runs([shared_record().directory])
    for commands in (re.findall(r"`([a-z]+(?: [^`]*)?)`", row) for row in rows):
        name, values = read_words(shlex.split(commands[0]))
        problem = ""
        try:
            answer(runs, name, values)
        except Mistake as mistake:  # its numbers are of a longer run
            problem = str(mistake)
        assert re.search(r"^$|(has|have) no step|is no row", problem)


def test_large_run_opens_in_two_seconds_and_500_mb(tmp_path: Path) -> None:
    """2,000 steps × 512 samples. The seconds are those of the CPU, because other tests run beside this one."""
    make_large(tmp_path / "out", num_steps=2000, num_samples=512)
    code = (
        "import json, re, resource, sys; from open_instruct.watch.runs import Runs\n"
        "from open_instruct.watch.views import answer\n"
        "runs = Runs(sys.argv[1:]); answer(runs, 'runs', {}); curves = answer(runs, 'curves', {})\n"
        "usage = resource.getrusage(resource.RUSAGE_SELF)\n"
        # The peak of its own: ru_maxrss begins with that of the process that started it.
        "peak = re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]\n"
        "print(json.dumps([len(curves['step']), usage.ru_utime + usage.ru_stime, int(peak) / 1024]))"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    outcome = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    num_steps, seconds, megabytes = json.loads(outcome.stdout)
    assert num_steps == 2000
    assert seconds < 2
    assert megabytes < 500
