"""Losses, advantages and their options that a user brings in a file: found by name, with flags of their own."""

import dataclasses
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from whole_runs import Process, command, rows

from open_instruct.algorithms.advantages import ADVANTAGES, group_advantages
from open_instruct.algorithms.distillation import DISTILLATION_LOSSES
from open_instruct.algorithms.losses import LOSSES, ClipOptions
from open_instruct.algorithms.user_algorithm_check import (
    problem_with_advantage,
    problem_with_distillation_loss,
    problem_with_loss,
)
from open_instruct.config.algorithm_checks import own_advantage_can_be_computed, own_losses_can_be_computed
from open_instruct.config.checks import options_have_their_entry
from open_instruct.config.cli import UsageError, parse_args, read_lists
from open_instruct.config.extensions import MODULE_OPTIONS, config_class_with, plain_config, unused_modules
from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.environments.base import ENVIRONMENTS
from open_instruct.health import RULES
from open_instruct.option_limits import numbers_are_within_limits
from open_instruct.registry import NoOptions, Registry, UnknownName, option_kinds, options_of
from open_instruct.user_modules import import_user_module
from open_instruct.workflows.base import WORKFLOWS

LOSS = '''
    """A loss with the ratio of whole sequences (GSPO, arXiv:2507.18071), in one file."""

    from dataclasses import dataclass

    from open_instruct.algorithms.losses import LOSSES
    from open_instruct.algorithms.sequences import sequence_means
    from open_instruct.option_limits import POSITIVE, limited


    @dataclass(kw_only=True)
    class SequenceClipOptions:
        """Sequence-level ratio"""

        sequence_clip: float = limited(0.1, POSITIVE)
        """The ratio of a sequence is clipped at this distance from 1."""


    @LOSSES.register("toy_sequence", options=SequenceClipOptions)
    def sequence_loss(inputs, options):
        log_ratio = sequence_means(inputs.new_logprobs - inputs.old_logprobs, inputs.mask, inputs.sequence_ids)
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - options.sequence_clip, 1 + options.sequence_clip)
        loss = (-inputs.advantages * ratio).maximum(-inputs.advantages * clipped)
        return loss, {"policy/sequence_clipfrac": clipped != ratio}
'''
ADVANTAGE = """
    from open_instruct.algorithms.advantages import ADVANTAGES

    @ADVANTAGES.register("toy_leave_one_out")
    def leave_one_out(rewards_G, options):
        return (rewards_G - rewards_G.mean()) * len(rewards_G) / max(len(rewards_G) - 1, 1)
"""
MODEL = ["--model_name_or_path", "x"]


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A file with a loss and one with an advantage. What they register is forgotten after the test."""
    for registry in (LOSSES, ADVANTAGES):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    files = {"my_loss.py": LOSS, "my_advantage.py": ADVANTAGE}
    for name, text in files.items():
        (tmp_path / name).write_text(textwrap.dedent(text))
    return [str(tmp_path / name) for name in files]


def read(argv: list[str]) -> GRPOConfig:
    config_cls, mistakes = config_class_with(read_lists(argv, MODULE_OPTIONS, option_kinds(GRPOConfig)))
    assert not mistakes
    return plain_config(parse_args(argv, config_cls, validators=[lambda args: list(options_have_their_entry(args))]))


def test_a_loss_and_an_advantage_come_with_one_file_each(modules: list[str]) -> None:
    names = ["--loss_fn", "toy_sequence", "--advantage_normalization_type", "toy_leave_one_out"]
    args = read([*MODEL, "--algorithm_modules", *modules, *names, "--sequence_clip", "0.25"])
    assert type(args) is GRPOConfig
    assert pickle.loads(pickle.dumps(args)).own_options == {"sequence_clip": 0.25}
    options = options_of(args, LOSSES[args.loss_fn].options)
    assert dataclasses.asdict(options) == {"sequence_clip": 0.25}
    assert group_advantages(np.array([0.0, 1.0]), args.advantage_normalization_type).tolist() == [-1.0, 1.0]


def test_options_of_built_in_entries_are_those_of_the_run(modules: list[str]) -> None:
    args = read([*MODEL, "--clip_lower", "0.3", "--algorithm_modules", *modules])
    assert options_of(args, ClipOptions) == ClipOptions(clip_lower=0.3)
    assert options_of(args, NoOptions) == NoOptions()
    assert args.own_options == {"sequence_clip": 0.1}


def test_own_options_are_flags_with_help_and_in_yaml(
    modules: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "options.yaml"
    file.write_text(f"algorithm_modules: [{modules[0]}]\nloss_fn: toy_sequence\nsequence_clip: 0.5\n")
    assert read([*MODEL, "--config", str(file)]).own_options == {"sequence_clip": 0.5}
    with pytest.raises(SystemExit):
        read(["--help", "--algorithm_modules", *modules])
    text = " ".join(capsys.readouterr().out.split())
    assert "Sequence-level ratio: --sequence_clip NUMBER" in text
    assert "--loss_fn NAME One of dapo, grpo, dr_grpo, cispo, dppo_tv, gmpo, gspo, sapo, toy_sequence." in text


def test_options_that_name_modules_may_be_shortened(modules: list[str], tmp_path: Path) -> None:
    args = read([*MODEL, "--algorithm-mod", modules[0], "--loss_fn", "toy_sequence", "--sequence_clip", "0.25"])
    assert args.own_options == {"sequence_clip": 0.25}
    file = tmp_path / "options.yaml"
    file.write_text(f"algorithm_modules: [{modules[0]}]\nsequence_clip: 0.1\n")
    assert read([*MODEL, "--conf", str(file)]).algorithm_modules == [modules[0]]
    with pytest.raises(UsageError) as told:
        read([*MODEL, "--al", modules[0]])
    assert told.value.mistakes == ["--al: it could be --alerts or --algorithm_modules or --alpha. Write it in full."]


@pytest.mark.parametrize("name", ["masked_mean_axis", "eval_freq", "config", "help", "seed"])
def test_an_own_option_with_a_name_that_is_taken_is_told(modules: list[str], tmp_path: Path, name: str) -> None:
    path = tmp_path / f"takes_{name}.py"
    path.write_text(textwrap.dedent(LOSS).replace("sequence_clip", name).replace("toy_sequence", f"toy_{name}"))
    _, mistakes = config_class_with({"algorithm_modules": [str(path)]})
    (mistake,) = mistakes
    assert mistake.startswith(f"--{name}: an option of ")
    assert mistake.endswith("SequenceClipOptions has this name too. Rename it.")


@pytest.mark.parametrize(
    ("argv", "mistake"),
    [
        (
            ["--loss_fn", "toy_sequence"],
            "--loss_fn toy_sequence: expected one of dapo, grpo, dr_grpo, cispo, dppo_tv, gmpo, gspo, sapo.",
        ),
        (["--sequence_clip", "1"], "--sequence_clip: no such option. --help lists them all."),
        (["--algorithm_modules", "{loss}", "--sequence_clip", "x"], "--sequence_clip x: expected one number."),
        (
            ["--algorithm_modules", "{loss}", "--sequence_clip", "1"],
            "--loss_fn dapo --sequence_clip 1.0: the loss dapo has no such option. Leave it out, or set loss_fn to toy_sequence.",
        ),
        (
            ["--algorithm_modules", "{loss}", "--loss_fn", "toy_sequence", "--clip_lower", "0.5"],
            "--loss_fn toy_sequence --clip_lower 0.5: the loss toy_sequence has no such option. Leave it out, or set loss_fn "
            "to dapo or grpo or dr_grpo or cispo.",
        ),
    ],
)
def test_options_without_their_entry_are_mistakes(modules: list[str], argv: list[str], mistake: str) -> None:
    with pytest.raises(UsageError) as told:
        read([*MODEL, *(word.format(loss=modules[0]) for word in argv)])
    assert told.value.mistakes == [mistake]


def test_numbers_of_own_options_have_the_limits_of_their_fields(modules: list[str]) -> None:
    argv = [*MODEL, "--algorithm_modules", modules[0], "--loss_fn", "toy_sequence", "--sequence_clip", "-1"]
    config_cls, _ = config_class_with(read_lists(argv, MODULE_OPTIONS, option_kinds(GRPOConfig)))
    with pytest.raises(UsageError) as told:
        parse_args(argv, config_cls, validators=[lambda args: list(numbers_are_within_limits(args))])
    assert told.value.mistakes == ["--sequence_clip -1.0: out of range. Give more than 0."]


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("import nothing_like_this", "cannot be imported: ModuleNotFoundError: No module named 'nothing_like_this'."),
        (
            "from open_instruct.algorithms.losses import LOSSES\n@LOSSES.register('dapo')\ndef mine(i, o): ...",
            "the loss 'dapo' exists already (open_instruct.algorithms.losses.clipped_ratio.dapo_loss).",
        ),
        (
            LOSS.replace("sequence_clip:", "seed:").replace("toy_sequence", "toy_seed"),
            "--seed: an option of user_module_broken_",
        ),
        (
            LOSS.replace("sequence_clip:", "clip_lower:").replace("toy_sequence", "toy_clip"),
            "the option 'clip_lower' exists already (open_instruct.algorithms.losses.clipped_ratio.ClipOptions).",
        ),
    ],
)
def test_modules_that_cannot_be_used_are_mistakes(modules: list[str], tmp_path: Path, text: str, mistake: str) -> None:
    (tmp_path / "broken.py").write_text(textwrap.dedent(text))
    _, mistakes = config_class_with({"algorithm_modules": [str(tmp_path / "broken.py")]})
    assert len(mistakes) == 1
    assert mistake in mistakes[0]


LOSS_HEAD = (
    "from open_instruct.algorithms.losses import LOSSES\n@LOSSES.register('wrong')\ndef wrong(inputs, options):\n    "
)
ADVANTAGE_HEAD = (
    "from open_instruct.algorithms.advantages import ADVANTAGES\n@ADVANTAGES.register('wrong')\n"
    "def wrong(rewards_G, options):\n    "
)


@pytest.mark.parametrize(
    ("body", "mistake"),
    [
        (
            "return (inputs.advantages * inputs.new_logprobs).mean(), {}",
            "here (2, 6), got one number. Take no sum or mean",
        ),
        ("return (inputs.advantages * inputs.new_logprobs).mean(-1), {}", "here (2, 6), got (2,). Take no sum or mean"),
        (
            "return inputs.advantages * inputs.new_logprobs",
            "must give a pair: the loss of each token, and metrics by name",
        ),
        (
            "return inputs.new_logprobs, {'a': 1.0}",
            "the metric 'a' must be a tensor with a number for each token, here",
        ),
        ("return inputs.new_logprobs, {'a': inputs.mask / 0}", "the metric 'a' of the loss 'wrong' is not finite"),
        ("return inputs.advantages * inputs.old_logprobs, {}", "the loss 'wrong' has no gradient. Compute it from"),
        ("return inputs.new_logprobs.log(), {}", "the loss 'wrong' is not finite"),
        ("return (inputs.new_logprobs * 0).sqrt(), {}", "the gradient of the loss 'wrong' is not finite"),
        ("return inputs.nothing, {}", "it fails: AttributeError: 'LossInputs' object has no attribute 'nothing' ("),
        ("return inputs.ref_logprobs + inputs.new_logprobs, {}", "wrong.py, line 4). Mend it in its file"),
    ],
)
def test_a_loss_that_cannot_be_trained_with_is_told_before_the_run(
    modules: list[str], tmp_path: Path, body: str, mistake: str
) -> None:
    (tmp_path / "wrong.py").write_text(LOSS_HEAD + body)
    args = read(
        [*MODEL, "--algorithm_modules", str(tmp_path / "wrong.py"), "--loss_fn", "wrong", "--no_load_ref_policy"]
    )
    (told,) = own_losses_can_be_computed(args)
    assert told.startswith("--loss_fn wrong: ")
    assert mistake in told


@pytest.mark.parametrize(
    ("body", "words", "mistake"),
    [
        ("return rewards_G.mean()", [], "the advantage 'wrong' gave array(1.5"),
        ("return rewards_G.nothing", [], "object has no attribute 'nothing' ("),
        ("return rewards_G / rewards_G.std()", [], ""),
        (
            "return rewards_G / rewards_G.std()",
            ["--no_filter_zero_std_samples"],
            "it must give one finite number for each.",
        ),
    ],
)
def test_an_advantage_that_is_no_number_for_each_response_is_told_before_the_run(
    modules: list[str], tmp_path: Path, body: str, words: list[str], mistake: str
) -> None:
    (tmp_path / "wrong.py").write_text(ADVANTAGE_HEAD + body)
    name = ["--advantage_normalization_type", "wrong"]
    args = read([*MODEL, "--algorithm_modules", str(tmp_path / "wrong.py"), *name, *words])
    told = "".join(own_advantage_can_be_computed(args))
    assert told.startswith("--advantage_normalization_type wrong: ") == bool(mistake)
    assert mistake in told


def test_a_distillation_loss_that_is_no_number_for_each_token_is_told_before_the_run(
    modules: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DISTILLATION_LOSSES, "_entries", dict(DISTILLATION_LOSSES._entries))
    text = LOSS_HEAD.replace("losses import LOSSES", "distillation import DISTILLATION_LOSSES").replace(
        "@", "@DISTILLATION_"
    )
    (tmp_path / "wrong.py").write_text(text + "return inputs.new_logprobs.mean(), inputs.new_logprobs.detach()")
    words = ["--algorithm_modules", str(tmp_path / "wrong.py"), "--distillation_loss", "wrong"]
    assert list(own_losses_can_be_computed(read([*MODEL, *words]))) == []
    (told,) = own_losses_can_be_computed(read([*MODEL, *words, "--teacher_model_name_or_path", "x"]))
    assert (
        "the distillation loss 'wrong' must be a tensor with a number for each token, here (2, 6), got one number"
        in told
    )


def test_right_losses_and_advantages_pass_their_trial(modules: list[str]) -> None:
    names = ["--loss_fn", "toy_sequence", "--advantage_normalization_type", "toy_leave_one_out"]
    args = read([*MODEL, "--algorithm_modules", *modules, *names, "--no_filter_zero_std_samples"])
    assert [*own_losses_can_be_computed(args), *own_advantage_can_be_computed(args)] == []
    for entry in LOSSES:
        assert problem_with_loss(entry, entry.options(), has_reference=False) == ""
    for entry in ADVANTAGES:
        assert problem_with_advantage(entry, entry.options(), group_size=4, equal_rewards=True) == ""
    for entry in DISTILLATION_LOSSES:
        assert problem_with_distillation_loss(entry, entry.options()) == ""


NOUNS = {
    "algorithm_modules": "loss, advantage or distillation loss",
    "workflow_modules": "workflow",
    "environment_modules": "tool or environment",
    "health_modules": "rule of health",
}
WORKFLOW = """
    from open_instruct.workflows.base import WORKFLOWS, Workflow

    @WORKFLOWS.register("toy_workflow")
    class Toy(Workflow): ...
"""
ENVIRONMENT = """
    from open_instruct.environments.base import ENVIRONMENTS, Environment

    @ENVIRONMENTS.register("toy_environment")
    class Toy(Environment): ...
"""
RULE = """
    from open_instruct.health import RULES

    @RULES.register("toy_rule", metrics=["scores"])
    def toy_rule(rows): ...
"""


@pytest.fixture
def all_kinds(modules: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A file for each option that names modules."""
    for registry in (WORKFLOWS, ENVIRONMENTS, RULES):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    files = {"workflow_modules": WORKFLOW, "environment_modules": ENVIRONMENT, "health_modules": RULE}
    for option, text in files.items():
        (tmp_path / f"{option}.py").write_text(textwrap.dedent(text))
    return {"algorithm_modules": modules[0], **{option: str(tmp_path / f"{option}.py") for option in files}}


@pytest.mark.parametrize("option", MODULE_OPTIONS)
def test_a_module_that_registers_nothing_is_a_mistake(all_kinds: dict[str, str], tmp_path: Path, option: str) -> None:
    empty = tmp_path / "my_tools.py"
    empty.write_text("from open_instruct.algorithms.losses import LOSSES\n\ndef lookup(country: str) -> str: ...\n")
    for _ in range(2):
        _, (mistake,) = config_class_with({option: [all_kinds[option], str(empty)]})
        assert mistake.startswith(f"--{option} {empty}: it registers no {NOUNS[option]}. Register one there, or leave")
    elsewhere = next(file for other, file in all_kinds.items() if other != option)
    _, (mistake,) = config_class_with({option: [elsewhere]})
    assert f"it registers no {NOUNS[option]}." in mistake


def test_a_function_of_a_module_that_registers_nothing_is_named_as_a_tool(tmp_path: Path) -> None:
    (tmp_path / "my_tools.py").write_text("def lookup(country: str) -> str: ...\n")
    _, (mistake,) = config_class_with({"environment_modules": [str(tmp_path / "my_tools.py")]})
    assert mistake.endswith(f"needs no registration: --tools {tmp_path / 'my_tools.py'}:its_name.")


def test_a_module_of_which_nothing_is_used_is_told(all_kinds: dict[str, str], modules: list[str]) -> None:
    given = [*MODEL, "--algorithm_modules", *modules, "--workflow_modules", all_kinds["workflow_modules"]]
    loss, advantage, workflow = unused_modules(read(given))
    assert loss == f"--algorithm_modules {modules[0]}: nothing of it is used; --loss_fn toy_sequence would use it."
    assert advantage.endswith("--advantage_normalization_type toy_leave_one_out would use it.")
    assert workflow.endswith("--rollout_workflow toy_workflow would use it.")
    used = ["--loss_fn", "toy_sequence", "--rollout_workflow", "toy_workflow"]
    assert list(unused_modules(read([*given, *used]))) == [advantage]


def test_modules_that_were_imported_before_have_registered_what_they_define(all_kinds: dict[str, str]) -> None:
    import_user_module(all_kinds["workflow_modules"])
    for _ in range(2):
        assert config_class_with({option: [file] for option, file in all_kinds.items()})[1] == []


def test_a_module_may_register_by_importing_others(
    all_kinds: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "all_of_mine.py").write_text("import my_advantage, workflow_modules\n")
    for _ in range(2):
        given = {"algorithm_modules": ["all_of_mine"], "workflow_modules": ["all_of_mine"]}
        assert config_class_with(given)[1] == []


@pytest.mark.parametrize("option", MODULE_OPTIONS)
def test_a_missing_file_is_one_message_and_exit_code_2(option: str) -> None:
    """Beside that there is no model: to read one would take three times as long."""
    data = ["--dataset_mixer_list", "reasoning_gym/chain_sum?size=10", "1.0"]
    words = [sys.executable, "open_instruct/grpo_fast.py", *data, f"--{option}", "nowhere.py", "--seed", "1"]
    told = subprocess.run(
        words, capture_output=True, text=True, timeout=120, check=False, cwd=Path(__file__).parents[2]
    )
    assert told.returncode == 2
    assert told.stderr.count(f"--{option} nowhere.py: nowhere.py: there is no file") == 1
    assert "Traceback" not in told.stderr


def test_an_entry_may_be_registered_again_by_the_same_definition_only() -> None:
    registry: Registry[object] = Registry("thing", flag="thing")

    def mine() -> None: ...

    registry.register("mine")(mine)
    registry.register("mine")(mine)
    with pytest.raises(ValueError, match="the thing 'mine' exists already"):
        registry.register("mine")(test_a_missing_file_is_one_message_and_exit_code_2)
    with pytest.raises(UnknownName, match="there is no thing called 'yours'; there are: mine"):
        registry["yours"]


@pytest.mark.slow
def test_a_run_trains_with_a_loss_and_an_advantage_of_the_users(modules: list[str], tmp_path: Path) -> None:
    words = command(
        tmp_path / "out",
        algorithm_modules=modules,
        loss_fn="toy_sequence",
        advantage_normalization_type="toy_leave_one_out",
        sequence_clip=1e-9,
        num_mini_batches=2,
        filter_zero_std_samples=False,
    )
    code, output = Process(words).wait()
    assert code == 0, output[-3000:]
    last = rows(tmp_path / "out" / "metrics.jsonl")[-1]
    assert last["policy/sequence_clipfrac"] > 0
    assert "policy/clipfrac_avg" not in last
