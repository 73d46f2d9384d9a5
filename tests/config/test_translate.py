"""Launch scripts of open-instruct as lines of this project."""

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from open_instruct.config.cli import parse_args
from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.config.open_instruct_options import ForeignOptions
from open_instruct.config.translate import DIFFERENT, arguments_of, as_text, surroundings, translated
from open_instruct.registry import option_kinds

ROOT = Path(__file__).parents[2]
LINES = dict(line.split("\t") for line in Path(__file__).with_name("open_instruct_lines.txt").read_text().splitlines())
SCRIPT = r"""#!/bin/bash
# python open_instruct/grpo_fast.py --seed 1
for beta in 0.0 0.1; do
uv run python mason.py --cluster x -- source configs/setup.sh \&\& python open_instruct/grpo_fast.py \
    --model_name_or_path "$MODEL" \
    --output-dir /out/$NAME \
    --dataset_mixer_list data/a.jsonl 1.0 \
    --number_samples_per_prompt=8 \
    --stop_strings "</answer>" "two words" \
    --oe_eval_tasks a,b::c \
    --push_to_hub False \
    --tools python \
    --mask_tool_use True \
    --kl_estimator kl3 \
    --async_steps 4 --apply_verif true \
    --mystery 1 && echo done
done
"""


def test_a_script_becomes_a_line_and_what_differs() -> None:
    words = arguments_of(SCRIPT.replace("=8 \\\n", "=8 \\ \n"))  # a space behind a backslash, as some have
    assert words is not None
    line, notes = translated(words)
    assert shlex.join(line) == (
        "--model_name_or_path '$MODEL' --output_dir '/out/$NAME' --dataset_mixer_list data/a.jsonl 1.0 "
        "--num_samples_per_prompt_rollout 8 --stop_strings '</answer>' 'two words' --tools python --kl_estimator 2 "
        "--async_steps 4 --apply_verifiable_reward true"
    )
    assert notes["number_samples_per_prompt"] == "is num_samples_per_prompt_rollout here"
    assert notes["oe_eval_tasks"] == "left out: Ai2's own machines"
    assert notes["mask_tool_use"] == "left out: it asks for nothing"
    assert notes["mystery"].startswith("NOT KNOWN")
    assert notes["async_steps"] == DIFFERENT["async_steps"]
    text = as_text(line, notes)
    assert text.startswith('python open_instruct/grpo_fast.py \\\n    --model_name_or_path "$MODEL" \\\n')
    assert "# --gradient_checkpointing, which is not named: off unless asked for; there it is always on" in text


WITH_VARIABLES = r"""
DATA="rows.jsonl 1.0 more.jsonl 0.5"
STEPS=4
NAME='my run'
python mason.py --env A=1 --env B=$STEPS --secret KEY=mine --num_nodes 2 -- PROGRAM grpo_fast.py \
    --dataset_mixer_list ${DATA} --exp-name "${NAME} é" --total_episodes $((5 * 32 * $STEPS)) \
    --tool_configs '{"cost": "$5"}' "{\"a\": $(echo 1)}" {} --output_dir=/out/"$NAME"/x\ y # a comment
"""


def test_the_shell_makes_the_same_words_of_a_translated_line() -> None:
    """A variable without quotation marks is several words, and arithmetic is one."""
    words = arguments_of(WITH_VARIABLES)
    assert words is not None
    program = as_text(*translated(words)).replace("python open_instruct/grpo_fast.py", "printf '%s\\n'")
    there, here = (
        subprocess.run(["bash", "-c", text], capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
        for text in (
            WITH_VARIABLES.replace("python mason.py", "#").replace("PROGRAM grpo_fast.py", "\nprintf '%s\\n'"),
            WITH_VARIABLES.partition("python")[0] + program,
        )
    )
    assert there[there.index("--output_dir=/out/my run/x y")] == "--output_dir=/out/my run/x y"
    there[-1:] = ["--output_dir", "/out/my run/x y"]
    assert here == ["--exp_name" if word == "--exp-name" else word for word in there]
    assert here[1:5] == ["rows.jsonl", "1.0", "more.jsonl", "0.5"]
    assert here[here.index("--total_episodes") + 1] == "640"


def line_of(script: str) -> str:
    """The translated words, separated by spaces."""
    words = arguments_of(script)
    assert words is not None
    return " ".join(translated(words)[0])


ARRAY = """ARGS=(
    --model_name_or_path "$MODEL"   # the model
    --number_samples_per_prompt 8
)
python open_instruct/grpo_fast.py "${ARGS[@]}" --seed 3
"""


def test_an_array_of_the_script_is_translated() -> None:
    assert line_of(ARRAY) == "--model_name_or_path $MODEL --num_samples_per_prompt_rollout 8 --seed 3"
    assert surroundings(ARRAY) == ["variables of the script: MODEL"]
    behind = 'MORE=(--beta 0.0)\nARGS=(--exp-name x "${MORE[@]}")\npython grpo_fast.py --seed 3 "${ARGS[@]}"'
    assert line_of(behind) == "--seed 3 --exp_name x --beta 0.0"


@pytest.mark.parametrize(
    ("script", "name"),
    [
        ('python grpo_fast.py "${ARGS[@]}" --seed 3', "ARGS"),  # defined elsewhere
        ('ARGS=(--beta 0)\nARGS+=(--lora_r 8)\npython grpo_fast.py --seed 3 "${ARGS[@]}"', "ARGS"),
        ("python grpo_fast.py $EXTRA --seed 3", "EXTRA"),
        ('EXTRA="--beta 0"\npython grpo_fast.py --seed 3 $EXTRA', "EXTRA"),
    ],
)
def test_a_variable_with_options_stays_and_is_named(script: str, name: str) -> None:
    words = arguments_of(script)
    assert words is not None
    text = as_text(*translated(words), surroundings(script))
    [word] = [word for word in script.splitlines()[-1].split() if name in word]
    assert word in text.partition("\n\n")[0]
    assert f"# the options in {name} are not looked at" in text


def test_an_array_that_holds_itself_is_named() -> None:
    script = 'ARGS=("${ARGS[@]}" --beta 0)\npython grpo_fast.py "${ARGS[@]}"'
    assert line_of(script) == "${ARGS[@]} --beta 0"
    assert "the options in ARGS are not looked at, and stay as they are" in surroundings(script)


@pytest.mark.parametrize(
    "behind",
    [
        ">> train.log",
        "&> f",
        "&>>f",
        ">log.txt 2>err.txt",
        "> log.txt 2>&1 &",
        "2>&1 | tee log.txt",
        "&> >(tee log.txt)",
        "< /dev/null",
        "; done",
        "&& echo done",
        "|| exit 1",
        ") || exit",
        r"\&\& echo done",
        r"\; echo done",
    ],
)
def test_a_command_ends_where_the_shell_ends_it(behind: str) -> None:
    for between in (" ", "" if behind[0] in ";)" else " "):
        assert (
            line_of(f"python open_instruct/grpo_fast.py --beta 0.1 --seed 3{between}{behind}") == "--beta 0.1 --seed 3"
        )


def test_options_behind_a_redirection_and_quoted_signs_are_kept() -> None:
    assert line_of("python grpo_fast.py > log --seed 3") == "--seed 3"
    assert (
        line_of("python grpo_fast.py --stop_strings ';' '>' 'a|b' \"&\" --seed 3")
        == "--stop_strings ; > a|b & --seed 3"
    )
    assert line_of("for lr in 1 2; do python grpo_fast.py --learning_rate $lr --seed 3; done") == (
        "--learning_rate $lr --seed 3"
    )


@pytest.mark.parametrize("between", [" && ", "\n", "; "])
def test_further_calls_are_counted(between: str) -> None:
    script = f"python grpo_fast.py --seed 1{between}python open_instruct/grpo_fast.py --seed 2 --beta 0.0"
    assert line_of(script) == "--seed 1"
    assert surroundings(script) == ["the script calls grpo_fast.py 2 times: only the first call is translated"]
    assert surroundings("ls open_instruct/grpo_fast.py\npython open_instruct/grpo_fast.py --seed 2") == []


def test_earlier_options_are_translated_by_their_values() -> None:
    line, notes = translated(shlex.split("--truncated_importance_sampling_ratio_cap 2.0 --max_tool_calls 3 3"))
    assert shlex.join(line) == "--rho_clamp_upper_bound 2.0 --use_rho_correction True --max_steps 3"
    assert notes["truncated_importance_sampling_ratio_cap"].startswith("is --rho_clamp_upper_bound 2.0 --use_rho")
    assert notes["max_tool_calls"] == f"is --max_steps 3 here; {DIFFERENT['max_steps']}"
    line, notes = translated(shlex.split("--truncated_importance_sampling_ratio_cap 0 --max_tool_calls 3 5"))
    assert line == ["--use_rho_correction", "False"]
    assert notes["max_tool_calls"].startswith("NOT HERE: one limit holds")
    line, notes = translated(shlex.split("--eval_freq 5 --max_tool_calls"))
    assert line == ["--local_eval_every", "5", "--max_steps"]
    assert notes["eval_freq"] == "is local_eval_every here; also after the last step"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--local_eval_every 7 --eval_freq 5", {"local_eval_every": 7}),
        ("--eval_freq 5 --local_eval_every 7", {"local_eval_every": 7}),
        ("--eval_freq 5 --eval_freq 6", {"local_eval_every": 6}),
        ("--eval_freq 5 --local_eval_freq 6", {"local_eval_every": 5}),
        ("--eval_freq 5 --local_eval_ev 7", {"local_eval_every": 7}),
        (
            "--rho_clamp_upper_bound 4 --truncated_importance_sampling_ratio_cap 3",
            {"rho_clamp_upper_bound": 4.0, "use_rho_correction": True},
        ),
        ("--use_rho_correction False --truncated_importance_sampling_ratio_cap 3", {"use_rho_correction": False}),
    ],
)
def test_a_translated_line_means_what_the_line_itself_does(line: str, expected: dict[str, Any]) -> None:
    model = ["--model_name_or_path", "m"]
    before = parse_args([*model, *shlex.split(line)], GRPOConfig, foreign=ForeignOptions())
    after = parse_args([*model, *translated(shlex.split(line))[0]], GRPOConfig)
    assert before == after
    assert {name: getattr(after, name) for name in expected} == expected


def test_a_name_of_open_instruct_is_no_abbreviation() -> None:
    line, notes = translated(["--tokenizer_name", "X", "--tokenizer_name_or", "Y"])
    assert line == ["--tokenizer_name_or_path", "Y"]
    assert notes["tokenizer_name"].startswith("left out: ")


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ('"--output_dir=$OUT"', '--output_dir "$OUT"'),
        ('\'--tool_configs={"a": "$5"}\'', '--tool_configs \'{"a": "$5"}\''),
        ('--output_dir="$OUT"', '--output_dir "$OUT"'),
    ],
)
def test_a_quoted_option_keeps_its_quotation_marks(word: str, expected: str) -> None:
    words = arguments_of(f"python grpo_fast.py {word} --seed 3")
    assert words is not None
    text = as_text(*translated(words))
    assert text.startswith(f"python open_instruct/grpo_fast.py \\\n    {expected} \\\n    --seed 3\n")


OVER_TWO_LINES = """python open_instruct/grpo_fast.py --tools search --tool_configs '{"a": 1,
 "b": 2}' --seed 3
echo "done"
"""


def test_a_quotation_may_go_over_several_lines() -> None:
    assert line_of(OVER_TWO_LINES) == '--tools search --tool_configs {"a": 1,\n "b": 2} --seed 3'
    assert surroundings(OVER_TWO_LINES) == []
    told = as_text(*translated(arguments_of(OVER_TWO_LINES) or []))
    printed = told.replace("python open_instruct/grpo_fast.py", "printf '%s\\0'")
    done = subprocess.run(["bash", "-c", printed], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split("\0")[2:4] == ["--tool_configs", '{"a": 1,\n "b": 2}']


def test_a_quotation_without_an_end_is_told() -> None:
    script = "python grpo_fast.py --seed 3 --run_name 'a\necho b\n"
    assert line_of(script) == "--seed 3 --run_name a"
    assert surroundings(script) == ["a quotation has no end: what stands behind it may be missing here"]
    assert surroundings('bash -c "python grpo_fast.py --seed 3"\necho "b"') == []
    assert line_of('bash -c "python grpo_fast.py --seed 3"\necho "b"') == "--seed 3"


def test_an_unknown_option_is_said_to_be_unknown_here_alone() -> None:
    assert translated(["--mystery", "1"]) == ([], {"mystery": "NOT KNOWN here"})


def test_what_the_launcher_was_told_is_named() -> None:
    assert surroundings(WITH_VARIABLES) == [
        "in the environment: A=1",
        "in the environment: B=$STEPS",
        "in the environment: KEY",
        "on 2 nodes: docs/guides/multi_node.md says how",
        "variables of the script: DATA, NAME, STEPS",
    ]


def test_a_tool_that_is_not_here_is_named() -> None:
    _, notes = translated(["--tools", "python", "generic_sandbox", "dr_agent_mcp"])
    assert notes["tools"].startswith("NOT HERE: generic_sandbox: it needs Docker")
    assert "NOT HERE: dr_agent_mcp: it is Ai2's package" in notes["tools"]
    assert translated(["--tools", "python"])[1] == {"tools": DIFFERENT["tools"]}


@pytest.mark.parametrize("script", LINES)
def test_translated_lines_are_understood_without_notes(script: str) -> None:
    line, notes = translated(shlex.split(LINES[script]))
    assert not [note for note in notes.values() if note.startswith("NOT KNOWN")]
    parse_args(line, GRPOConfig)  # nothing foreign is left in it


def test_what_differs_is_ours_and_stands_in_the_documentation() -> None:
    assert set(DIFFERENT) <= set(option_kinds(GRPOConfig))
    page = (ROOT / "docs/guides/coming_from_open_instruct.md").read_text()
    missing = [
        name for name, text in DIFFERENT.items() if f"| `{name}` | {text.replace('|', chr(92) + '|')} |" not in page
    ]
    assert missing == []


@pytest.mark.parametrize(
    ("text", "code"), [("python open_instruct/grpo_fast.py --seed 3", 0), ("echo hello", 2), ("", 2)]
)
def test_from_the_shell(text: str, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "open_instruct.config.translate"],
        input=text,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        check=False,
    )
    assert done.returncode == code
    assert ("--seed 3" in done.stdout) if code == 0 else ("no call of grpo_fast.py" in done.stderr)


def test_the_script_may_be_named_and_help_is_there(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("python open_instruct/grpo_fast.py --seed 3")
    told = {}
    for word in (str(tmp_path / "run.sh"), "--help", "nowhere.sh"):
        command = [sys.executable, "-m", "open_instruct.config.translate", word]
        told[word] = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False
        )
    named, helped, missing = told.values()
    assert (named.returncode, helped.returncode, missing.returncode) == (0, 0, 2)
    assert "--seed 3" in named.stdout
    assert "Variables and arithmetic of the shell stay" in helped.stdout
    assert missing.stderr == "nowhere.sh: it cannot be read (No such file or directory). Check the path.\n"
