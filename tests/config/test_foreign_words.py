"""Options of TRL, verl and prime-rl: a message names the option that means the same, and never one that is only spelled alike."""

from pathlib import Path

import pytest

from open_instruct.config.cli import UsageError, is_a_slip, make_config, parse_args
from open_instruct.config.foreign_words import COMMON, PROJECTS, Meaning, table
from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.config.open_instruct_options import RENAMED, WITHOUT_EFFECT
from open_instruct.registry import option_kinds

ROOT = Path(__file__).parents[2]
OPTIONS = option_kinds(GRPOConfig)
MODEL = ["--model_name_or_path", "m", "--dataset_mixer_list", "d.jsonl", "1.0"]


def mistakes_of(*words: str) -> list[str]:
    with pytest.raises(UsageError) as caught:
        parse_args([*MODEL, *words], GRPOConfig)
    return caught.value.mistakes


@pytest.mark.parametrize("words", [*PROJECTS.values(), COMMON], ids=[*PROJECTS, "common"])
def test_each_meaning_is_an_option_that_exists_or_says_why_there_is_none(words: dict[str, Meaning]) -> None:
    for name, (options, note, _) in words.items():
        assert options or note, name
        assert set(options) <= set(OPTIONS), name


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--num_generations 8", "TRL's num_generations is --num_samples_per_prompt_rollout here."),
        ("--max_completion_length 8", "TRL's max_completion_length is --response_length here."),
        ("--max-completion-length=8", "TRL's max_completion_length is --response_length here."),
        ("--lr 1e-6", "--lr: no such option. It is --learning_rate here."),
        ("--num_train_epochs 1", "is --total_episodes here (epochs × rows × num_samples_per_prompt_rollout)"),
        (
            "actor_rollout_ref.rollout.n=8",
            "verl's actor_rollout_ref.rollout.n is --num_samples_per_prompt_rollout here.",
        ),
        ("data.train_batch_size=8", "verl's data.train_batch_size is --num_unique_prompts_rollout here"),
        ("--output_dir out +data.train_batch_size=8", "is --num_unique_prompts_rollout here"),
        ("--trainer.optim.lr 1e-6", "prime-rl's trainer.optim.lr is --learning_rate here."),
        (
            "--orchestrator.rollouts-per-example 8",
            "prime-rl's orchestrator.rollouts_per_example is --num_samples_per_prompt_rollout here.",
        ),
        ("--orchestrator.batch-size 64", "the samples of a step are the product of the two"),
        ("--orchestrator.eval.skip_first_step", "eval.skip_first_step is --eval_on_step_0 here (the opposite)."),
        ("--vllm_mode colocate", "TRL's vllm_mode is --colocate or --single_gpu_mode here"),
        ("--vllm_enable_sleep_mode", "is --colocate or --engine_sleep_after_s here"),
        ("--max_async_level 2", "is --async_steps or --max_staleness_allowed here."),
        ("--adam_beta2 0.95", "TRL's adam_beta2 has no counterpart here: AdamW has PyTorch's betas, 0.9 and 0.999."),
    ],
)
def test_a_word_of_another_project_is_answered_with_the_option_of_the_same_meaning(words: str, expected: str) -> None:
    (mistake,) = mistakes_of(*words.split())
    assert expected in mistake


def test_words_in_a_file_are_known_too(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("num_generations: 8\n")
    (mistake,) = mistakes_of("--config", str(tmp_path / "c.yaml"))
    assert mistake.endswith(
        "num_generations: no such option. TRL's num_generations is num_samples_per_prompt_rollout here."
    )


@pytest.mark.parametrize(
    "name",
    [
        *("num_generations", "max_completion_length", "max_length_of_answer"),
        *("num_prompts", "eval_batch_size", "top_entropy_quantile", "rollout_length", "log_dir"),
    ],
)
def test_no_hint_goes_to_an_option_of_another_meaning(name: str) -> None:
    assert not [option for option in OPTIONS if is_a_slip(name, option)]


@pytest.mark.parametrize(
    ("slip", "option"),
    [
        ("respons_length", "response_length"),
        ("sead", "seed"),
        ("no_seed", "seed"),
        ("learing_rate", "learning_rate"),
        ("num_sample_per_prompt_rollout", "num_samples_per_prompt_rollout"),
        ("samples_per_prompt_rollout", "num_samples_per_prompt_rollout"),
    ],
)
def test_a_slip_is_still_recognised(slip: str, option: str) -> None:
    assert is_a_slip(slip, option)


def test_max_steps_alone_does_not_become_a_conversation() -> None:
    """TRL's users mean training steps by it."""
    (mistake,) = mistakes_of("--max_steps", "3")
    assert mistake.startswith("--max_steps 3: here it is the most calls of tools in a conversation")
    assert "give --total_episodes" in mistake
    assert "in place of --max_steps" in mistake  # with both there would be conversations
    assert "--rollout_workflow conversation" in mistake


def test_max_steps_alone_is_refused_where_options_come_from_a_program() -> None:
    given = {"model_name_or_path": "m", "dataset_mixer_list": ["d.jsonl", "1.0"], "max_steps": 3}
    with pytest.raises(UsageError, match="--max_steps 3: here it is the most calls of tools in a conversation"):
        make_config(GRPOConfig, given)
    assert make_config(GRPOConfig, given | {"total_episodes": 64}).max_steps == 3


@pytest.mark.parametrize("project", PROJECTS)
def test_options_that_exclude_each_other_are_never_asked_for_together(project: str) -> None:
    together = [meaning.options for meaning in PROJECTS[project].values() if meaning.joiner == "with"]
    assert not [options for options in together if {"colocate", "single_gpu_mode"} <= {*options}]


@pytest.mark.parametrize(
    "name",
    [
        *("report_to", "logging_steps", "resume_from_checkpoint", "eval_strategy", "save_strategy", "push_to_hub"),
        *("per_device_eval_batch_size", "dataset_config", "adam_beta1", "adam_beta2", "chat_template_kwargs"),
        *("vllm_server_host", "vllm_server_port", "vllm_server_base_url", "vllm_server_timeout"),
        *("top_entropy_quantile", "rollout_func", "environment_factory"),
    ],
)
def test_usual_words_of_trl_have_a_meaning(name: str) -> None:
    assert name in PROJECTS["TRL"]


@pytest.mark.parametrize(
    "words",
    [
        "--max_steps 3 --tools calculator",
        "--max_steps 3 --rollout_workflow conversation",
        "--max_steps 3 --total_episodes 64",
        "--max_steps 3 --pool_size 2",
        "--max_steps 3 --environment_modules my_envs.py",
    ],
)
def test_max_steps_bounds_a_conversation_where_something_says_so(words: str) -> None:
    args = parse_args([*MODEL, *words.split()], GRPOConfig)
    assert (args.rollout_workflow, args.max_steps) == ("conversation", 3)


def test_no_foreign_word_is_an_option_under_its_own_name_with_a_different_meaning_untold() -> None:
    """A word that exists here too is taken as it is meant here; these are all of them, and the page names each."""
    same_spelling = {name for words in PROJECTS.values() for name in words if name in OPTIONS}
    assert same_spelling == {"max_steps", "per_device_train_batch_size", "output_dir", "report_to"}
    accepted_from_open_instruct = {name for words in PROJECTS.values() for name in words} & {*WITHOUT_EFFECT, *RENAMED}
    assert accepted_from_open_instruct == {
        *("gradient_accumulation_steps", "logging_steps", "resume_from_checkpoint", "push_to_hub")
    }


def test_the_page_has_the_tables() -> None:
    page = (ROOT / "docs/guides/coming_from_trl_verl_prime_rl.md").read_text()
    for project, words in PROJECTS.items():
        assert f"## {project}\n\n{table(words)}\n" in page, (
            "put the output of python -m open_instruct.config.foreign_words there"
        )
