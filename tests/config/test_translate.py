"""Launch scripts of open-instruct as lines of this project."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from open_instruct.config.cli import parse_args
from open_instruct.config.grpo_config import GRPOConfig
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


def test_what_the_launcher_was_told_is_named() -> None:
    assert surroundings(WITH_VARIABLES) == [
        "in the environment: A=1",
        "in the environment: B=$STEPS",
        "in the environment: KEY",
        "on 2 nodes: docs/multi_node.md says how",
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
    page = (ROOT / "docs/coming_from_open_instruct.md").read_text()
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
