"""From the command line and YAML to options: how things are written, and what is said when they are written wrong."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from open_instruct.config.cli import UsageError, fail_with, field_help, parse_args
from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.config.option_values import convert
from open_instruct.registry import option_fields

MODEL = ["--model_name_or_path", "org/name"]


def parse(*argv: str) -> GRPOConfig:
    return parse_args([*MODEL, *argv], GRPOConfig)


def mistakes_of(*argv: str, **options: Any) -> list[str]:
    with pytest.raises(UsageError) as raised:
        parse_args(argv, GRPOConfig, **options)
    return raised.value.mistakes


@pytest.fixture
def yaml_file(tmp_path: Path) -> Path:
    return tmp_path / "run.yaml"


def test_without_options_the_defaults_hold() -> None:
    assert parse() == GRPOConfig(model_name_or_path="org/name")


@pytest.mark.parametrize(
    ("argv", "name", "expected"),
    [
        (["--seed", "3"], "seed", 3),
        (["--seed=3"], "seed", 3),
        (["--seed", "3", "--seed", "4"], "seed", 4),
        (["--local_eval_every", "-1"], "local_eval_every", -1),
        (["--learning_rate", "5e-7"], "learning_rate", 5e-7),
        (["--temperature", "1"], "temperature", 1.0),
        (["--run_name", "a=b c"], "run_name", "a=b c"),
        (["--run_name=a=b"], "run_name", "a=b"),
        (["--run_name", "None"], "run_name", None),
        (["--eval_temperature", "0"], "eval_temperature", 0.0),
        (["--loss_denominator", "128"], "loss_denominator", 128.0),
        (["--loss_denominator", "token"], "loss_denominator", "token"),
        (["--kl_estimator", "1"], "kl_estimator", 1),
        (["--lr_scheduler_type", "cosine"], "lr_scheduler_type", "cosine"),
        (["--num_learners_per_node", "4", "4"], "num_learners_per_node", [4, 4]),
        (["--dataset_mixer_list", "a", "1.0", "b", "20"], "dataset_mixer_list", ["a", "1.0", "b", "20"]),
        (["--stop_strings", "</answer>", "a b"], "stop_strings", ["</answer>", "a b"]),
        (["--stop_strings=--end"], "stop_strings", ["--end"]),
        (["--stop_strings"], "stop_strings", []),
        (["--stop_strings", '["</answer>"]'], "stop_strings", ["</answer>"]),
        (["--stop_strings", ' [ "a b", "c" ] '], "stop_strings", ["a b", "c"]),
        (['--stop_strings=["</answer>"]'], "stop_strings", ["</answer>"]),
        (["--stop_strings", "[]"], "stop_strings", []),
        (["--stop_strings", "[END]"], "stop_strings", ["[END]"]),
        (["--stop_strings", '["a"]', '["b"]'], "stop_strings", ['["a"]', '["b"]']),
        (["--stop_strings", "[1]"], "stop_strings", ["[1]"]),
        (["--stop_strings", "[0.5]"], "stop_strings", ["[0.5]"]),
        (["--stop_strings", "[null]"], "stop_strings", ["[null]"]),
        (["--num_learners_per_node", "[4, 4]"], "num_learners_per_node", [4, 4]),
        (["--dataset_mixer_list", '["a", 1.0, "b", 20]'], "dataset_mixer_list", ["a", "1.0", "b", "20"]),
        (["--verbose"], "verbose", True),
        (["--verbose", "true"], "verbose", True),
        (["--verbose", "False"], "verbose", False),
        (["--verbose=True"], "verbose", True),
        (["--no_load_ref_policy"], "load_ref_policy", False),
        (["--verbose", "yes"], "verbose", True),
        (["--verbose=1"], "verbose", True),
        (["--verbose", "T"], "verbose", True),
        (["--verbose", "n"], "verbose", False),
        (["--verbose", "0"], "verbose", False),
        (["--verb"], "verbose", True),
        (["--no-verb"], "verbose", False),
        (["--load-ref-policy", "no"], "load_ref_policy", False),
        (["--response-length", "77"], "response_length", 77),
        (["--response_len=77"], "response_length", 77),
        (["--vllm_enforce_eager"], "vllm_enforce_eager", True),
        (["--no_vllm_enforce_eager"], "vllm_enforce_eager", False),
        (["--no_use_rho_correction"], "use_rho_correction", False),
        (["--no_resampling", "0.5"], "no_resampling_pass_rate", 0.5),
        (["--no_verbose", "--verbose"], "verbose", True),
        (["--verbose", "--no_verbose"], "verbose", False),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_ways_to_write(argv: list[str], name: str, expected: object) -> None:
    value = getattr(parse(*argv), name)
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize("number", ["-1e-5", "-1.", "-.5", "-2E+3"])
def test_negative_number(number: str) -> None:
    assert parse("--learning_rate", number).learning_rate == float(number)
    assert parse(f"--learning_rate={number}").learning_rate == float(number)
    assert parse("--stop_strings", number, "x", number).stop_strings == [number, "x", number]


def test_an_open_instruct_launch_line() -> None:
    line = """--exp_name 0605_general_tool_use --beta 0.01 --num_unique_prompts_rollout 8 --pack_length 1024
        --num_samples_per_prompt_rollout 4 --num_mini_batches 1 --num_epochs 1 --learning_rate 3e-7
        --per_device_train_batch_size 1 --output_dir /tmp/out --kl_estimator 2 --stop_strings </answer>
        --dataset_mixer_list ai2-adapt-dev/rlvr_gsm8k_zs 64 --dataset_mixer_list_splits train
        --dataset_mixer_eval_list ai2-adapt-dev/rlvr_gsm8k_zs 16 --dataset_mixer_eval_list_splits train
        --max_prompt_token_length 512 --response_length 512 --temperature 1.0 --ground_truths_key ground_truth
        --sft_messages_key messages --total_episodes 200 --deepspeed_stage 2 --num_learners_per_node 1
        --vllm_num_engines 1 --vllm_tensor_parallel_size 1 --seed 1 --local_eval_every 1 --eval_on_step_0
        --single_gpu_mode --vllm_gpu_memory_utilization 0.3 --vllm_enforce_eager --gradient_checkpointing
        --lr_scheduler_type constant --async_steps 4 --with_tracking False"""
    args = parse(*line.split())
    assert args.dataset_mixer_list == ["ai2-adapt-dev/rlvr_gsm8k_zs", "64"]
    assert args.dataset_mixer_eval_list == ["ai2-adapt-dev/rlvr_gsm8k_zs", "16"]
    assert (args.eval_on_step_0, args.single_gpu_mode, args.vllm_enforce_eager) == (True, True, True)
    assert (args.with_tracking, args.deepspeed_stage, args.learning_rate) == (False, 2, 3e-7)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--respons_length", "3"], "--respons_length: no such option. Did you mean --response_length?"),
        (
            ["--rho-clamp", "3"],
            "--rho-clamp: it could be --rho_clamp_lower_bound or --rho_clamp_upper_bound. Write it in full.",
        ),
        (["--v", "3"], "--v: no such option. --help lists them all."),
        (["--qqqqqq"], "--qqqqqq: no such option. --help lists them all."),
        (["--no_seed"], "--no_seed: no such option. Did you mean --seed?"),
        (["-x"], "-x: no such option. --help lists them all."),
        (["--seed=1", "stray"], "'stray': belongs to no option. Options begin with --."),
        (["--seed", "1.5"], "--seed 1.5: expected one whole number."),
        (["--seed", "abc"], "--seed abc: expected one whole number."),
        (["--seed"], "--seed (nothing): expected one whole number."),
        (["--seed", "1", "2"], "--seed 1 2: expected one whole number."),
        (["--seed", "None"], "--seed None: expected one whole number."),
        (["--beta", "big"], "--beta big: expected one number."),
        (["--exp_name"], "--exp_name (nothing): expected one text (in YAML, quoted)."),
        (["--verbose", "maybe"], "--verbose maybe: expected True or False."),
        (["--verbose", "True", "False"], "--verbose True False: expected True or False."),
        (["--loss_fn", "ppo"], "--loss_fn ppo: expected one of dapo, grpo, dr_grpo, cispo, dppo_tv, gmpo, gspo, sapo."),
        (["--deepspeed_stage", "1"], "--deepspeed_stage 1: expected one of 0, 2, 3."),
        (["--num_learners_per_node", "4", "four"], "--num_learners_per_node 4 four: expected one whole number."),
        (["--config"], "--config (nothing): expected the path of one file."),
        (["--config", "a", "b"], "--config a b: expected the path of one file."),
        (["--config", "/no/such"], "--config /no/such: it cannot be read (No such file or directory). Check the path."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_each_mistake_of_writing(argv: list[str], expected: str) -> None:
    assert mistakes_of(*MODEL, *argv) == [expected]


def test_a_missing_required_option() -> None:
    assert mistakes_of() == ["--model_name_or_path: missing. It must be given."]
    assert mistakes_of("--model_name_or_path") == [
        "--model_name_or_path (nothing): expected one text (in YAML, quoted)."
    ]


def test_all_mistakes_at_once_and_none_that_rests_on_an_unreadable_value(yaml_file: Path) -> None:
    yaml_file.write_text("bta: 1\nseed: [1, 2]\nbeta: -1\n")

    def judge(args: GRPOConfig) -> list[str]:
        assert args.response_length == 256, "an unreadable value leaves the default"
        return [
            "--pack_length 9 --response_length 256: too small.",
            f"--beta {args.beta}: negative.",
            "rows: 3 broken.",
        ]

    mistakes = mistakes_of(
        *("stray", "--config", str(yaml_file), "--sed", "1", "--response_length", "long", "--pack_length", "9"),
        validators=[judge, lambda args: ["--model_name_or_path : empty."]],
    )
    assert mistakes == [
        "'stray': belongs to no option. Options begin with --.",
        "--sed: no such option. Did you mean --seed?",
        f"{yaml_file}: bta: no such option. Did you mean beta?",
        "--seed 1 2: expected one whole number.",
        "--response_length long: expected one whole number.",
        "--model_name_or_path: missing. It must be given.",
        "--beta -1.0: negative.",
        "rows: 3 broken.",
    ]


def test_validators_that_find_nothing_let_the_options_through() -> None:
    args = parse_args([*MODEL, "--seed", "5"], GRPOConfig, validators=[lambda args: []])
    assert args.seed == 5


# ---- YAML ----


def test_yaml_with_the_command_line_on_top(yaml_file: Path) -> None:
    yaml_file.write_text(
        "model_name_or_path: org/other\nseed: 1\nlearning_rate: 2e-6\nverbose: true\nrun_name: null\nbeta: 0\n"
        "dataset_mixer_list: [reasoning_gym/chain_sum, 1.0]\nnum_learners_per_node: 2\nstop_strings: []\n"
    )
    args = parse_args(["--seed", "9", "--config", str(yaml_file), "--no_verbose"], GRPOConfig)
    assert args.model_name_or_path == "org/other"
    assert (args.seed, args.verbose) == (9, False)
    assert (args.learning_rate, args.beta) == (2e-6, 0.0)
    assert args.dataset_mixer_list == ["reasoning_gym/chain_sum", "1.0"]
    assert (args.run_name, args.num_learners_per_node, args.stop_strings) == (None, [2], [])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sead: 1", "{path}: sead: no such option. Did you mean seed?"),
        ("1: 2", "{path}: 1: no such option. --help lists them all."),
        ("seed: 1.0", "--seed 1.0: expected one whole number."),
        ("seed: true", "--seed True: expected one whole number."),
        ("seed: null", "--seed None: expected one whole number."),
        ("seed: [1]", "--seed 1: expected one whole number."),
        ("beta: yes", "--beta True: expected one number."),
        ("exp_name: off", "--exp_name False: expected one text (in YAML, quoted)."),
        ("exp_name: 2026-01-01", "--exp_name 2026-01-01: expected one text (in YAML, quoted)."),
        ("exp_name: {a: 1}", "--exp_name {{'a': 1}}: expected one text (in YAML, quoted)."),
        ("verbose: 1", "--verbose 1: expected True or False."),
        ("verbose: []", "--verbose (nothing): expected True or False."),
        ("num_learners_per_node: [1, x]", "--num_learners_per_node 1 x: expected one whole number."),
        ("seed: 1\nbeta: [", "--config {path}: line 2 is not valid YAML. Write one `name: value` per line."),
        ("- seed", "--config {path}: it holds no options. Write one `name: value` per line."),
    ],
)
def test_each_mistake_in_yaml(yaml_file: Path, text: str, expected: str) -> None:
    yaml_file.write_text(text)
    assert mistakes_of(*MODEL, "--config", str(yaml_file)) == [expected.format(path=yaml_file)]


def test_text_is_what_stands_in_the_file(yaml_file: Path) -> None:
    yaml_file.write_text("run_name: 2024_10_01\nexp_name: 0123\nmodel_revision: 1234567.0e+8\nloss_denominator: 0x10\n")
    args = parse("--config", str(yaml_file))
    assert (args.run_name, args.exp_name, args.model_revision) == ("2024_10_01", "0123", "1234567.0e+8")
    assert args.loss_denominator == 16.0


def test_a_number_is_no_text_where_it_is_not_known_how_it_was_written() -> None:
    for number in (83, 1.5):
        with pytest.raises(ValueError, match="one text"):
            convert(number, str)
        with pytest.raises(ValueError, match="one text"):
            convert(number, str | None)
        assert convert(["a", number], list[str]) == ["a", str(number)]


def test_an_empty_yaml_file_changes_nothing(yaml_file: Path) -> None:
    yaml_file.write_text("# nothing yet\n")
    assert parse("--config", str(yaml_file)) == parse()


@given(st.integers(), st.floats(allow_nan=False), st.booleans())
def test_values_survive_being_written(number: int, real: float, switch: bool) -> None:
    assert convert(str(number), int) == convert(number, int) == number
    assert convert(repr(real), float) == convert(real, float) == real
    assert convert(str(switch), bool) == convert(switch, bool) == switch


# ---- Messages ----


def test_fail_with(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        fail_with(["--a 1: wrong.", "--b 2: wrong."], program="x.py")
    assert exit_.value.code == 2
    captured = capsys.readouterr()
    assert captured.err == "x.py: 2 mistakes:\n  1. --a 1: wrong.\n  2. --b 2: wrong.\n"
    assert captured.out == ""
    with pytest.raises(SystemExit):
        fail_with(["--a 1: wrong."])
    assert capsys.readouterr().err.startswith("grpo_fast.py: 1 mistake:\n")


def test_secrets_are_not_shown(capsys: pytest.CaptureFixture[str], yaml_file: Path) -> None:
    yaml_file.write_text("wandb_api_key: s3cret\nseed: [: s3cret")
    broken = mistakes_of(*MODEL, "--config", str(yaml_file))
    yaml_file.write_text("wandb_api_key: s3cret")
    unknown = mistakes_of(*MODEL, "--config", str(yaml_file), "--api_key", "s3cret", "--token=s3cret")
    looks_like_one = mistakes_of(*MODEL, "--seed", "hf_s3cretS3CRET", "--beta", "https://me:s3cret@host/x", "--loss_fn")
    assert len(unknown) == 3
    with pytest.raises(SystemExit):
        fail_with([*broken, *unknown, *looks_like_one])
    assert "s3cret" not in capsys.readouterr().err


def test_help_tells_every_option_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse_args(["--help"], GRPOConfig)
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    in_one_line = " ".join(text.split())
    help_by_field = field_help(GRPOConfig)
    for field in option_fields(GRPOConfig):
        _, help_text = help_by_field[field.name]
        assert help_text.endswith("."), f"{field.name} has no help"
        assert f"--{field.name} " in text
        assert " ".join(help_text.split()) in in_one_line
    assert "(default: ai2-adapt-dev/rlvr_gsm8k_zs 1.0)" in in_one_line
    assert "local directory or a name on the Hugging Face hub. (required)" in in_one_line
    assert "usage: grpo_fast.py --model_name_or_path TEXT [--config FILE]" in in_one_line


def test_help_is_grouped_in_the_order_of_the_config() -> None:
    titles = list(dict.fromkeys(title for title, _ in field_help(GRPOConfig).values()))
    generation = ["Run", "Model", "Tokenizer", "Data", "Rollout", "Reasoning cache", "Conversations"]
    generation += ["Agent programs", "Asynchronous training"]
    learning = [
        "Algorithm",
        "Distillation",
        "Rewards",
        "Length verifiers",
        "Code verifiers",
        "LLM judge",
        "Evolving rubrics",
    ]
    assert titles == [
        *generation,
        *learning,
        "Optimizer",
        "Learners",
        "LoRA",
        "vLLM",
        "Evaluation",
        "Saving",
        "Deadlines",
        "Tracking",
    ]


def test_the_command_line_needs_nothing_heavy() -> None:
    program = (
        "import sys; from open_instruct.config.cli import parse_args; from open_instruct.config.grpo_config import GRPOConfig;"
        "parse_args(['--model_name_or_path', 'x'], GRPOConfig);"
        "assert not {'torch', 'transformers', 'ray', 'vllm', 'deepspeed'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize("text", ['["a", b]', "['</answer>']", '["a" "b"]'])
def test_text_that_resembles_a_json_list_is_a_mistake_with_the_cure(text: str, yaml_file: Path) -> None:
    mistake = (
        f"""--stop_strings {text}: expected a list as JSON, as in '["a", "b"]', or its items one by one, as in a b."""
    )
    assert mistakes_of(*MODEL, "--stop_strings", text) == [mistake]
    assert mistakes_of(*MODEL, "--num_learners_per_node", '["x"]') == [
        '--num_learners_per_node ["x"]: expected one whole number.'
    ]


@pytest.mark.parametrize("text", ["""'["</answer>", "b"]'""", '["</answer>", "b"]', "\n- </answer>\n- b"])
def test_json_list_in_a_yaml_file_is_a_list(text: str, yaml_file: Path) -> None:
    yaml_file.write_text(f"stop_strings: {text}\n")
    assert parse("--config", str(yaml_file)).stop_strings == ["</answer>", "b"]
