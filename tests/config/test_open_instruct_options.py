"""Launch lines of open-instruct: what becomes of options that this project does not have.

`open_instruct_lines.txt` holds the command lines of its 61 scripts that call `grpo_fast.py` (August 2026): a script and its
options on each line, without the values of options that have no effect here.
"""

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from open_instruct.config import checks
from open_instruct.config.cli import UsageError, parse_args
from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.config.open_instruct_options import (
    BY_VALUE,
    OTHER_VALUES,
    REFUSED,
    RENAMED,
    WITHOUT_EFFECT,
    ForeignOptions,
)
from open_instruct.config.translate import options_in
from open_instruct.environments.mcp_tools import MCPTools
from open_instruct.registry import option_kinds
from open_instruct.workflows.conversations.options import SERVICES

LINES = dict(line.split("\t") for line in Path(__file__).with_name("open_instruct_lines.txt").read_text().splitlines())
OF_THIS_MACHINE = {
    "attention_can_run",
    "machine_has_room",
    "model_can_be_read",
    "model_family_can_be_trained",
    "model_has_enough_positions",
    "rows_can_be_divided",
    "layers_can_compute_again",
    "engines_can_divide_heads",
    "adapters_have_layers",
    "teacher_fits_the_model",
    "system_prompt_file_can_be_read",
    "outputs_can_be_written",
}
"""Rules that look at models, files and devices."""
BROKEN_THERE_TOO = "train/rlvr/grpo_fast_mini_old.sh"
"""A row of 256 tokens cannot hold a prompt of 256 and a response of 128."""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models and keys that scripts expect in it."""
    for name in ("RUBRIC_GENERATION_MODEL", "SERPER_API_KEY", "S2_API_KEY", "JINA_API_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setattr(MCPTools, "schemas", lambda config: [])  # no server is asked


def rules(args: GRPOConfig) -> Iterator[str]:
    for rule in checks.RULES:
        if rule.__name__ not in OF_THIS_MACHINE:
            yield from rule(args)


def parsed(line: str) -> tuple[GRPOConfig | None, ForeignOptions, list[str]]:
    foreign = ForeignOptions()
    try:
        return parse_args(shlex.split(line), GRPOConfig, foreign=foreign, validators=[rules]), foreign, []
    except UsageError as error:
        return None, foreign, error.mistakes


@pytest.mark.parametrize("script", LINES)
def test_every_launch_line_is_understood(script: str) -> None:
    """All options of all scripts are known. What is refused are tools that are not here."""
    args, _, mistakes = parsed(LINES[script])
    if script == BROKEN_THERE_TOO:
        assert [mistake.split(": ")[1] for mistake in mistakes] == [
            "the longest prompt with the longest response does not fit into a row. Set pack_length to 384 or more."
        ]
    elif absent := [name for name in SERVICES if name in LINES[script].split()]:
        assert mistakes == [f"--tools {name}: {SERVICES[name]}." for name in absent]
    else:
        assert mistakes == []
        assert args is not None


NOT_HERE = {
    "train/debug/envs/sandbox_lm_1gpu.sh": "generic_sandbox",
    "train/debug/envs/sandbox_lm_8gpu.sh": "generic_sandbox",
    "train/debug/envs/wordle_sandbox_lm_8gpu.sh": "generic_sandbox",
    "train/debug/tools/dr_tulu_parser_debug.sh": "dr_agent_mcp",
}
"""Scripts that ask for a tool that is not here, and the tool."""


def test_how_many_run() -> None:
    refused = [script for script in LINES if parsed(LINES[script])[0] is None]
    assert len(LINES) == 61
    assert sorted(refused) == sorted([*NOT_HERE, BROKEN_THERE_TOO])
    assert all(tool in LINES[script].split() for script, tool in NOT_HERE.items())


ONE_WORD: dict[Any, bool] = {"true": True, "false": False, "True": True, "False": False}


@pytest.mark.parametrize("script", LINES)
def test_every_option_of_a_line_has_the_value_that_it_says(script: str) -> None:
    """Whatever is not named as without effect is there, tools with their names and settings included."""
    foreign = ForeignOptions()
    args = parse_args(shlex.split(LINES[script]), GRPOConfig, foreign=foreign)
    names = set(option_kinds(GRPOConfig))
    for written, values in options_in(shlex.split(LINES[script])):
        if written in WITHOUT_EFFECT:
            assert foreign.notes[written] == WITHOUT_EFFECT[written]
            continue
        said: list[Any] = [*values]
        name = RENAMED.get(written, written)
        if name not in names and name.startswith("no_"):
            name, said = name.removeprefix("no_"), ["False"]
        [name] = [name] if name in names else [one for one in names if one.startswith(name)]  # an abbreviation
        said = [ONE_WORD.get(value, OTHER_VALUES.get(name, {}).get(value, value)) for value in said] or [True]
        got = getattr(args, name)
        if got == [] and not values:
            continue  # a variable of the script that held nothing when the lines were written down
        found = [as_number(one) for one in (got if isinstance(got, list) else [got])]
        assert found == list(map(as_number, said)), written


def as_number(value: Any) -> Any:
    """`5e-7` is 0.0000005, and "None" is None."""
    if isinstance(value, bool) or value in (None, "None"):
        return None if value == "None" else value
    try:
        return float(value)
    except ValueError:
        return value


def test_a_line_keeps_its_meaning() -> None:
    args, foreign, _ = parsed(LINES["train/rlvr/grpo_mini_base_fast.sh"])
    assert args is not None
    assert args.num_samples_per_prompt_rollout == 4  # --number_samples_per_prompt
    assert args.num_learners_per_node == [1]  # --actor_num_gpus_per_node
    assert args.apply_r1_style_format_reward  # --add_r1_style_format_reward, a bare switch
    assert args.non_stop_penalty_value == 0.0  # --penalty_reward_value
    told = foreign.warning()
    assert "--number_samples_per_prompt: taken as num_samples_per_prompt_rollout" in told
    assert "--reward_model_multiplier: open-instruct has dropped it; there is no reward model" in told


def test_no_name_is_in_two_tables() -> None:
    ours = set(option_kinds(GRPOConfig))
    tables = [set(WITHOUT_EFFECT), set(RENAMED), set(BY_VALUE), set(REFUSED), ours]
    assert sum(map(len, tables)) == len(set().union(*tables))
    assert set(RENAMED.values()) <= ours


def test_every_name_stands_in_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs/guides/coming_from_open_instruct.md").read_text()
    names = [*WITHOUT_EFFECT, *RENAMED, *BY_VALUE, *REFUSED]
    assert [name for name in names if f"`{name}`" not in page and f"`{name} " not in page] == []


MODEL = "--model_name_or_path m"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--truncated_importance_sampling_ratio_cap 3.0", {"rho_clamp_upper_bound": 3.0, "use_rho_correction": True}),
        ("--truncated_importance_sampling_ratio_cap 3 --async_steps 0", {"corrects_off_policy": True}),
        ("--truncated_importance_sampling_ratio_cap 0.0", {"use_rho_correction": False, "corrects_off_policy": False}),
        ("--truncated_importance_sampling_ratio_cap 3 --rho_clamp_upper_bound 4", {"rho_clamp_upper_bound": 4.0}),
        ("--tools calculator --max_tool_calls 7", {"max_steps": 7}),
        ("--tools calculator python --max_tool_calls 7 7", {"max_steps": 7}),
        ("--tools calculator --tool_tag_names sum", {"tool_call_names": ["sum"]}),
        ("--eval_freq 5", {"local_eval_every": 5}),
        ("--local_eval_freq 5", {"local_eval_every": 5}),
        ("--update_progress_every 5 --num_evals 10", {"local_eval_every": 100}),
        ("--search_api_endpoint None --code_tool_api_endpoint None", {}),
    ],
)
def test_options_of_older_scripts_keep_their_meaning(line: str, expected: dict[str, Any]) -> None:
    args, foreign, mistakes = parsed(f"{MODEL} {line}")
    assert args is not None, mistakes
    assert {name: getattr(args, name) for name in expected} == expected
    assert foreign.notes


@pytest.mark.parametrize(
    ("line", "cure"),
    [
        ("--truncated_importance_sampling_ratio_cap many", "--rho_clamp_upper_bound many: expected one number."),
        (
            "--max_tool_calls 3 5",
            "--max_tool_calls: one limit holds for the calls of all tools together. Write it as --max_steps",
        ),
        ("--search_api_endpoint http://x", "--tools search looks into a file of texts"),
        ("--number_documents_to_search 3", '--tools search --tool_configs \'{"index": "FILE", "num_results": 3}\''),
        ("--code_tool_api_endpoint http://x", '--tools python --tool_configs \'{"api_endpoint": "URL"}\''),
    ],
)
def test_options_of_older_scripts_that_cannot_be_had_name_the_cure(line: str, cure: str) -> None:
    args, _, mistakes = parsed(f"{MODEL} {line}")
    assert args is None
    (mistake,) = mistakes
    assert cure in mistake


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("--push_to_hub False", "--push_to_hub: models are written to output_dir; `hf upload` brings them to the hub"),
        ("--oe-eval-tasks a b c", "--oe_eval_tasks: Ai2's own machines"),
        ("--mask_tool_use true", "--mask_tool_use: asks for nothing that is not so"),
        ("--kl_estimator kl3", "--kl_estimator: kl3 is taken as 2"),
        ("--chat_template olmo123", "--chat_template_name: olmo123 is taken as None"),
    ],
)
def test_what_became_of_it_is_said(line: str, told: str) -> None:
    args, foreign, mistakes = parsed(f"{MODEL} {line}")
    assert args is not None, mistakes
    assert told in foreign.warning()


def test_what_is_refused_is_named_once() -> None:
    args, _, mistakes = parsed(f"{MODEL} --mask_tool_use false --max_steps 4 --total_episodes 64")
    assert args is None
    (mistake,) = mistakes
    assert mistake.startswith("--mask_tool_use: answers of tools are never trained on")


def test_an_option_of_conversations_chooses_them() -> None:
    args, _, mistakes = parsed(f"{MODEL} --tools calculator --max_steps 4")
    assert args is not None, mistakes
    assert (args.rollout_workflow, args.max_steps) == ("conversation", 4)
    args, _, mistakes = parsed(f"{MODEL} --tools calculator --rollout_workflow single_turn")
    assert args is None
    assert "the workflow single_turn has no such option" in mistakes[0]


def test_a_present_name_goes_before_an_earlier_one() -> None:
    args, foreign, _ = parsed(f"{MODEL} --number_samples_per_prompt 8 --num_samples_per_prompt_rollout 2")
    assert args is not None
    assert args.num_samples_per_prompt_rollout == 2
    assert foreign.notes == {"number_samples_per_prompt": "num_samples_per_prompt_rollout is given too, and holds"}
    assert "taken as" not in foreign.warning()
    args, foreign, _ = parsed(f"{MODEL} --rho_clamp_upper_bound 4 --truncated_importance_sampling_ratio_cap 3")
    assert args is not None
    assert (args.rho_clamp_upper_bound, args.use_rho_correction) == (4.0, True)
    assert list(foreign.notes.values()) == ["taken as use_rho_correction True"]


@pytest.mark.parametrize(
    ("in_file", "line", "expected", "note"),
    [
        ("local_eval_every: 10", "--eval_freq 5", {"local_eval_every": 5}, "taken as local_eval_every"),
        ("eval_freq: 10", "--local_eval_every 5", {"local_eval_every": 5}, "local_eval_every is given too, and holds"),
        (
            "use_rho_correction: false",
            "--truncated_importance_sampling_ratio_cap 2.5",
            {"use_rho_correction": True, "rho_clamp_upper_bound": 2.5},
            "taken as rho_clamp_upper_bound 2.5 use_rho_correction True",
        ),
        ("mask_tool_use: false", "--mask_tool_use", {}, "asks for nothing that is not so"),
    ],
)
def test_the_command_line_wins_under_every_name(
    tmp_path: Path, in_file: str, line: str, expected: dict[str, Any], note: str
) -> None:
    (tmp_path / "run.yaml").write_text(in_file)
    args, foreign, mistakes = parsed(f"{MODEL} --config {tmp_path / 'run.yaml'} {line}")
    assert args is not None, mistakes
    assert {name: getattr(args, name) for name in expected} == expected
    assert list(foreign.notes.values()) == [note]


def test_what_is_taken_is_told_apart_from_what_has_no_effect() -> None:
    _, foreign, _ = parsed(f"{MODEL} --eval_freq 5 --push_to_hub False --kl_estimator kl3")
    assert foreign.warning().splitlines() == [
        "These options are not this project's, and the run goes on without their effect:",
        "  --push_to_hub: models are written to output_dir; `hf upload` brings them to the hub",
        "These options have other names or values in this project:",
        "  --eval_freq: taken as local_eval_every",
        "  --kl_estimator: kl3 is taken as 2",
    ]


@pytest.mark.parametrize("value", ["", " True", " 1", " yes", "=t"])
def test_a_switch_that_asks_for_what_is_so_is_passed_over(value: str) -> None:
    args, _, mistakes = parsed(f"{MODEL} --mask_tool_use{value}")
    assert args is not None, mistakes


def test_without_foreign_options_nothing_is_said() -> None:
    assert ForeignOptions().warning() == ""
    assert parsed(MODEL)[1].notes == {}
