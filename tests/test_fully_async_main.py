"""The YAML file: composition, every documented key, all mistakes in one message, and classes by dotted path."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import TINY_MODEL

from open_instruct.algorithms.losses import LOSSES
from open_instruct.config import yaml_files as yaml_door
from open_instruct.config.cli import UsageError
from open_instruct.config.yaml_files import CONFIG_DIRECTORY
from open_instruct.fully_async_main import compose, read
from open_instruct.rollouts.controller import RolloutController
from open_instruct.run.fully_async_trainer import FullyAsyncTrainer

ROOT = Path(__file__).parents[1]
SUMS = "reasoning_gym/chain_sum?min_terms=2&max_terms=2&size=30&seed=7"
DOCUMENTED: dict[str, Any] = {
    "staleness_threshold": 3,
    "max_staleness_allowed": 5,
    "min_batch_count": 1,
    "batch_timeout": 30.0,
    "generation_timeout": None,  # 30.0 there: too short for long responses of a large model
    "batch_generation_interval": 0.1,
    "max_sync_retries": 3,
    "sync_timeout": 600.0,  # 30.0 there: too short for large models
    "sync_retry_delay": 1.0,
}
"""Keys of `async_training` in the fully async policy's document, with their defaults where these suit large models too;
`max_queue_size` follows from the bound."""


def small(tmp_path: Path, *further: str) -> list[str]:
    """Overrides with which the shipped file fits this machine."""
    return [
        f"model.model_name_or_path={TINY_MODEL}",
        f"data.dataset_mixer_list=['{SUMS}','1.0']",
        "data.max_prompt_token_length=64",
        "rollout.response_length=32",
        "rollout.n_gpus_per_node=2",
        "trainer.n_gpus_per_node=1",
        "trainer.nnodes=1",
        f"trainer.output_dir={tmp_path / 'out'}",
        *further,
    ]


def mistakes_of(argv: list[str]) -> list[str]:
    with pytest.raises(UsageError) as caught:
        read(compose(argv))
    return caught.value.mistakes


def test_the_shipped_file_holds_the_documented_keys_and_defaults(tmp_path: Path) -> None:
    section = yaml.safe_load((CONFIG_DIRECTORY / "fully_async.yaml").read_text())["async_training"]
    assert {key: section[key] for key in DOCUMENTED} == DOCUMENTED
    assert section["max_queue_size"] is None
    args = read(compose(small(tmp_path))).args
    for key, value in DOCUMENTED.items():
        assert getattr(args, {"sync_timeout": "weight_sync_timeout_s"}.get(key, key)) == value, key
    assert (args.staleness_target, args.staleness_bound) == (3, 5)
    assert args.corrects_off_policy
    assert args.streaming


def test_a_head_node_without_a_gpu_can_say_that_the_cluster_has_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    [mistake, *_] = mistakes_of(small(tmp_path, "trainer.device=cuda"))
    assert mistake.startswith("trainer.device cuda: this machine has no GPU.")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.7:6379")
    assert read(compose(small(tmp_path, "trainer.device=cuda"))).args.device.kind == "cuda"


def test_overrides_win_and_need_no_plus(tmp_path: Path) -> None:
    overrides = small(
        tmp_path,
        "async_training.staleness_threshold=1",
        "async_training.alerts={max_sample_age: 3, time/total: 2.5}",
        "trainer.seed=7",
        "async_training.sync_timeout=60",
        "rollout.n_gpus_per_node=4",
        "rollout.vllm_tensor_parallel_size=2",
        "async_training.max_queue_size=2000",
    )
    args = read(compose(overrides)).args
    assert (args.staleness_threshold, args.seed, args.weight_sync_timeout_s) == (1, 7, 60.0)
    assert args.alerts == ["max_sample_age=3", "time/total=2.5"]
    assert (args.vllm_num_engines, args.vllm_tensor_parallel_size, args.num_learners_per_node) == (2, 2, [1])
    assert args.max_queue_size == 2000


def test_options_of_grpo_fast_serve_where_the_file_s_own_keys_are_null(tmp_path: Path) -> None:
    nulls = ["rollout.n_gpus_per_node=null", "trainer.n_gpus_per_node=null", "trainer.nnodes=null"]
    options = ["rollout.vllm_num_engines=3", "trainer.num_learners_per_node=[2]", "trainer.weight_sync_timeout_s=1800"]
    args = read(compose(small(tmp_path, *nulls, *options, "async_training.sync_timeout=null"))).args
    assert (args.vllm_num_engines, args.num_learners_per_node, args.weight_sync_timeout_s) == (3, [2], 1800.0)


def test_engines_are_counted_wherever_their_size_stands(tmp_path: Path) -> None:
    config = compose(small(tmp_path, "rollout.n_gpus_per_node=4"))
    config["vllm"] = {"vllm_tensor_parallel_size": 2}
    del config["rollout"]["vllm_tensor_parallel_size"]
    args = read(config).args
    assert (args.vllm_num_engines, args.vllm_tensor_parallel_size) == (2, 2)


def test_options_of_a_user_s_own_loss_need_no_plus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LOSSES, "_entries", dict(LOSSES._entries))
    (tmp_path / "loss_of_the_yaml_door.py").write_text(
        "from dataclasses import dataclass\n"
        "from open_instruct.algorithms.losses import LOSSES\n\n"
        "@dataclass(kw_only=True)\n"
        "class StrengthOptions:\n"
        '    """Strength"""\n\n'
        "    my_strength: float = 1.0\n"
        '    """How strong."""\n\n'
        '@LOSSES.register("yaml_door_loss", options=StrengthOptions)\n'
        "def loss(inputs, options):\n"
        "    return -options.my_strength * inputs.advantages * inputs.new_logprobs, {}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    own = ["algorithm.algorithm_modules=[loss_of_the_yaml_door]", "algorithm.loss_fn=yaml_door_loss"]
    args = read(compose(small(tmp_path, *own, "algorithm.my_strength=3"))).args
    assert args.own_options == {"my_strength": 3.0}
    mistakes = mistakes_of(small(tmp_path, *own, "algorithm.my_strenth=3"))
    assert mistakes == ["algorithm.my_strenth: no such option. Did you mean my_strength?"]


def test_async_steps_holds_where_the_thresholds_of_the_file_are_null(tmp_path: Path) -> None:
    nulls = ["async_training.staleness_threshold=null", "async_training.max_staleness_allowed=null"]
    args = read(compose(small(tmp_path, *nulls, "async_training.async_steps=0"))).args
    assert (args.staleness_target, args.staleness_bound) == (0, 0)


def test_tools_imply_conversations(tmp_path: Path) -> None:
    assert read(compose(small(tmp_path, "data.tools=[calculator]"))).args.rollout_workflow == "conversation"


def test_another_file(tmp_path: Path) -> None:
    text = (CONFIG_DIRECTORY / "fully_async.yaml").read_text().replace("nnodes: 2", "nnodes: 1")
    (tmp_path / "mine.yaml").write_text(text)
    config = compose(["--config-path", str(tmp_path), "--config-name", "mine"])
    assert config["trainer"]["nnodes"] == 1


WRONG = [
    (
        "async_training.stalenes_threshold=3",
        "async_training.stalenes_threshold: no such option. Did you mean staleness",
    ),
    ("async_training.staleness_threshold=many", "async_training.staleness_threshold many: expected one whole number."),
    (
        "async_training.max_staleness_allowed=2",
        "async_training.max_staleness_allowed 2 async_training.staleness_threshold 3",
    ),
    (
        "async_training.monitor=nowhere.monitor",
        "async_training.monitor nowhere.monitor: it cannot be loaded (ModuleNot",
    ),
    ("trainer.cls=pathlib.Path", "trainer.cls pathlib.Path: no subclass of FullyAsyncTrainer. Derive it from "),
    ("rollout.cls=os.getcwd", "rollout.cls os.getcwd: no subclass of RolloutController."),
    ("trainer.device=tpu", "trainer.device tpu: unknown. Choose one of auto, cuda, cpu."),
    (
        "rollout.vllm_tensor_parallel_size=4",
        "rollout.n_gpus_per_node 2 rollout.nnodes 1 rollout.vllm_tensor_parallel_size 4",
    ),
    ("trainer.n_gpus_per_node=0", "trainer.n_gpus_per_node 0 trainer.nnodes 1: expected whole numbers of 1 or more."),
    ("algorithm.seed=3 trainer.seed=3", "algorithm.seed: trainer.seed says the same. Keep one of them."),
    ("extra.lr=3", "extra.lr: no such option."),
    ("trainer.n_gpu_per_node=3", "trainer.n_gpu_per_node: no such option. Did you mean n_gpus_per_node?"),
    (
        "rollout.vllm_num_engines=1",
        "rollout.vllm_num_engines: rollout.n_gpus_per_node says the same. Set rollout.n_gpus_per_node to null, or leave out "
        "rollout.vllm_num_engines.",
    ),
    (
        "trainer.num_learners_per_node=[1,1] trainer.nnodes=2",
        "trainer.num_learners_per_node: trainer.n_gpus_per_node says the same. Set trainer.n_gpus_per_node and trainer.nnodes "
        "to null, or leave out trainer.num_learners_per_node.",
    ),
    (
        "trainer.weight_sync_timeout_s=1800",
        "trainer.weight_sync_timeout_s: async_training.sync_timeout says the same. Set async_training.sync_timeout to null, or",
    ),
    ("model.device_type=cpu trainer.device=cpu", "model.device_type: trainer.device says the same. Set trainer.device"),
    (
        "async_training.async_steps=0",
        "async_training.async_steps 0 async_training.staleness_threshold 3: both say how far",
    ),
    (
        "trainer.n_gpus_per_node=null trainer.nnodes=2",
        "trainer.nnodes 2: it has no effect without trainer.n_gpus_per_node. Give trainer.n_gpus_per_node too, or set "
        "trainer.nnodes to null.",
    ),
    ("model.model_revision=1234567e8", "model.model_revision 123456700000000.0: expected one text (in YAML, quoted)."),
    ("+extra.lr=3", "extra.lr: no such option."),
    (
        "~trainer.save_freq",
        "~trainer.save_freq: an option cannot be deleted. Write trainer.save_freq=null, which leaves its default.",
    ),
    ("~trainer.save_freq=100", "~trainer.save_freq=100: an option cannot be deleted. Write trainer.save_freq=null"),
    ("hydra.run.dir=here", "hydra.run.dir=here: hydra's own settings have no effect, because hydra only reads the"),
    ("~trainer.sede", "~trainer.sede: no such option. Did you mean seed?"),
    (
        "trainer.alpha=0.3",
        "trainer.alpha 0.3 ref_policy_update_freq None: it would have no effect. Set ref_policy_update_freq too, or leave "
        "out alpha. ref_policy_update_freq stands in no section of the file. Any section may have it, as in "
        "trainer.ref_policy_update_freq=VALUE.",
    ),
]


@pytest.mark.parametrize(("overrides", "expected"), WRONG, ids=[overrides for overrides, _ in WRONG])
def test_each_mistake_is_told_once_in_terms_of_the_file(tmp_path: Path, overrides: str, expected: str) -> None:
    mistakes = mistakes_of(small(tmp_path, *overrides.split()))
    assert len(mistakes) == 1, mistakes
    assert mistakes[0].startswith(expected)


def test_a_file_that_is_not_there_or_is_no_yaml(tmp_path: Path) -> None:
    assert "no such file" in mistakes_of(["--config-path", str(tmp_path)])[0]
    (tmp_path / "broken.yaml").write_text("trainer: [1\nrollout: 2")
    [mistake] = mistakes_of(["--config-path", str(tmp_path), "--config-name", "broken"])
    assert "not valid YAML" in mistake


def test_mistakes_end_the_program_before_anything_starts(tmp_path: Path) -> None:
    words = [sys.executable, str(ROOT / "open_instruct/fully_async_main.py"), *small(tmp_path, "trainer.sede=1")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-2:] == [
        "fully_async_main.py: 1 mistake:",
        "  1. trainer.sede: no such option. Did you mean seed?",
    ]
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_user_s_classes_are_found_in_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hooks_of_mine.py").write_text(
        "from open_instruct.run.fully_async_trainer import FullyAsyncTrainer\n"
        "from open_instruct.rollouts.controller import Rollouter\n"
        "class CustomFullyAsyncTrainer(FullyAsyncTrainer):\n    pass\n"
        "class CustomRollouter(Rollouter):\n    pass\n"
        "def custom_monitor(trainer_stats, rollouter_stats):\n    return {}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    yaml_door.let_user_modules_be_found()
    names = ("trainer.cls=hooks_of_mine.CustomFullyAsyncTrainer", "rollout.cls=hooks_of_mine.CustomRollouter")
    roles = read(compose(small(tmp_path, *names, "async_training.monitor=hooks_of_mine.custom_monitor"))).roles
    assert issubclass(roles.trainer, FullyAsyncTrainer)
    assert issubclass(roles.rollouter, RolloutController)
    assert roles.monitor is not None
    assert roles.monitor({}, {}) == {}
