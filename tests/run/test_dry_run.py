"""`--dry_run` as a user runs it."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import TINY_MODEL, make_args
from model_families import build_model

from open_instruct import grpo_fast
from open_instruct.cluster.placement_plan import Node
from open_instruct.config.cli import parse_args
from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.device import Device
from open_instruct.device_memory import DeviceMemory, memory_of_machine_bytes
from open_instruct.engines.engine_memory import EngineMemory, engine_memory, page_locked_bytes, teacher_memory
from open_instruct.learners.memory_estimate import LearnerMemory, MainMemory
from open_instruct.run import dry_run, main_memory, teachers
from open_instruct.run.dry_run import _rows, _shortage
from open_instruct.run.main_memory import NodeLoad, node_bytes, node_loads

ROOT = Path(__file__).parents[2]
SUMS = "reasoning_gym/chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=1&size=64&seed=7"
GIB = 2**30


@pytest.mark.parametrize("further", [[], ["--use_peft"]], ids=["dense with a teacher", "mixture with adapters"])
def test_everything_is_said_and_nothing_is_written(tmp_path: Path, further: list[str]) -> None:
    if further:
        build_model("qwen3_moe", tmp_path / "mixture")
    model = str(tmp_path / "mixture") if further else str(TINY_MODEL)
    words = ["--model_name_or_path", model, "--dataset_mixer_list", SUMS, "1.0", "--dry_run", *further]
    words += ["--output_dir", str(tmp_path / "out"), "--num_unique_prompts_rollout", "4", "--total_episodes", "64"]
    words += ["--max_prompt_token_length", "64", "--response_length", "32", "--pack_length", "128"]
    words += [] if further else ["--teacher_model_name_or_path", model]
    done = subprocess.run(
        [sys.executable, str(ROOT / "open_instruct/grpo_fast.py"), *words],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said = {
        line.strip().partition("   ")[0]: line.strip().partition("   ")[2].strip() for line in done.stdout.splitlines()
    }
    assert said["workflow"] == "single_turn (the default)"
    assert said["training steps"] == "4"
    assert said["samples per step"] == "16 (4 prompts × 4)"
    assert said["tokens per step"] == f"{16 * 96:,} at most"
    assert said["learners"].startswith("1 on ")
    assert said["workers of engines"].startswith("1 on ")
    assert "memory of each learner" in said
    assert ("memory of each teacher's worker" in said) == (not further)
    assert said["activations"].endswith("MiB")
    [node] = [text for name, text in said.items() if name.startswith("main memory on ")]
    assert node.endswith(" are there")
    assert said["key-value cache"].endswith("tokens")
    assert not (tmp_path / "out").exists()


GPU, CPU = Device("cuda", "bfloat16", "sdpa"), Device("cpu", "float32", "sdpa")


def learner_of(weights: int, **options: Any) -> LearnerMemory:
    known: dict[str, Any] = {"gradients": 0, "optimizer": 0, "reference": 0, "activations": 0, "program": 0}
    return LearnerMemory(weights=weights, **{**known, **options})


ENGINE = EngineMemory(weights=GIB, cache=GIB, num_cached_tokens=10_000, program=GIB, asleep=2 * GIB)


def options_on(monkeypatch: pytest.MonkeyPatch, device: Device, **options: Any) -> Any:
    args = make_args(**options)
    monkeypatch.setattr(type(args), "device", device)
    return args


@pytest.mark.parametrize(
    ("total_gib", "options", "problem"),
    [
        (6, {}, ""),
        (4, {}, "This run needs 5,120 MiB on a GPU that has 4,096 MiB."),
        (None, {}, ""),
        (7, {"single_gpu_mode": True}, "This run needs 8,192 MiB on a GPU"),
        (
            6,
            {"colocate": True},
            "This run needs 7,168 MiB on a GPU",
        ),  # awake learner, the engine's weights, a buffer and its copy
    ],
)
def test_what_does_not_fit_on_a_gpu_is_said(
    monkeypatch: pytest.MonkeyPatch, total_gib: int | None, options: dict[str, Any], problem: str
) -> None:
    monkeypatch.setattr(DeviceMemory, "total_bytes", lambda self: total_gib and total_gib * GIB)
    args = options_on(monkeypatch, GPU, **options)
    said = _shortage(args, [NodeLoad("10.0.0.1", 1, 1, 99 * GIB)], learner_of(5 * GIB, update=GIB // 2), ENGINE)
    assert said.startswith(problem)
    assert bool(said) == bool(problem)


def test_an_update_needs_the_weights_of_a_learner_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """14 billion weights in bfloat16 on 4 learners at stage 3, which share their GPUs with engines: moments, masters, gradients
    and reference (63 GiB) have left the GPU by then, so 77 GiB in training are the peak, and not 102 in the update."""
    monkeypatch.setattr(DeviceMemory, "total_bytes", lambda self: 80 * GIB)
    args = options_on(monkeypatch, GPU, colocate=True, deepspeed_stage=3, num_learners_per_node=[4])
    learner = learner_of(
        9 * GIB, gradients=20 * GIB, optimizer=39 * GIB, reference=4 * GIB, activations=5 * GIB, update=28 * GIB
    )
    engine = replace(ENGINE, weights=28 * GIB, cache=40 * GIB)
    assert _shortage(args, [NodeLoad("10.0.0.1", 4, 4, None)], learner, engine) == ""
    monkeypatch.setattr(DeviceMemory, "total_bytes", lambda self: 76 * GIB)
    said = _shortage(args, [NodeLoad("10.0.0.1", 4, 4, None)], learner, engine)
    assert said.startswith("This run needs 77.0 GiB on a GPU that has 76.0 GiB")


def test_weights_of_a_sleeping_engine_are_page_locked_in_powers_of_two() -> None:
    """Of Qwen3-8B's layers: queries, keys and values are one tensor of 48 MiB, gate and up one of 192."""
    mib = 2**20
    tensors = {
        **{
            f"layers.0.self_attn.{name}_proj.weight": size * mib
            for name, size in (("q", 32), ("k", 8), ("v", 8), ("o", 32))
        },
        **{f"layers.0.mlp.{name}_proj.weight": 96 * mib for name in ("gate", "up", "down")},
        "layers.0.input_layernorm.weight": 8192,
    }
    assert page_locked_bytes(tensors) == (64 + 32 + 256 + 128) * mib + 8192


def test_an_engine_whose_cache_holds_no_response_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM would refuse to start."""
    monkeypatch.setattr(DeviceMemory, "total_bytes", lambda self: 80 * GIB)
    args = options_on(monkeypatch, GPU, single_gpu_mode=True, vllm_gpu_memory_utilization=0.25)
    engine = EngineMemory(weights=30 * GIB, cache=0, num_cached_tokens=0, program=0)
    said = _shortage(args, [NodeLoad("10.0.0.1", 1, 1, None)], learner_of(5 * GIB), engine)
    assert said.startswith(
        "An engine gets 20.0 GiB of each GPU and has weights of 30.0 GiB there: its cache would hold 0 tokens"
    )
    enough = replace(engine, num_cached_tokens=args.max_sequence_length)
    assert _shortage(args, [NodeLoad("10.0.0.1", 1, 1, None)], learner_of(5 * GIB), enough) == ""


def test_a_teacher_needs_memory_too(monkeypatch: pytest.MonkeyPatch) -> None:
    load, learner = NodeLoad("10.0.0.1", 1, 1, 12 * GIB), learner_of(5 * GIB)
    assert _shortage(options_on(monkeypatch, CPU), [load], learner, ENGINE) == ""
    args = options_on(monkeypatch, CPU, teacher_model_name_or_path=str(TINY_MODEL), teacher_num_engines=2)
    said = dict(_rows(args, [load], learner, ENGINE, ENGINE))
    assert said["memory of each teacher's worker"] == "3,072 MiB"
    assert said["main memory on 10.0.0.1"] == "14.0 GiB; 12.0 GiB are there"
    assert _shortage(args, [load], learner, ENGINE, ENGINE).startswith("This run needs 14.0 GiB of main memory")
    several = [replace(load, num_workers=0), NodeLoad("10.0.0.2", 0, 1, None)]  # nobody knows on which it will be
    assert _shortage(args, several, learner, ENGINE, ENGINE) == ""


def test_a_teacher_is_counted_by_its_own_model_and_size(tmp_path: Path) -> None:
    build_model("llama", tmp_path)
    args = make_args(teacher_model_name_or_path=str(tmp_path), vllm_tensor_parallel_size=1)
    teacher = teacher_memory(args, GPU)
    assert teacher is not None
    assert teacher.weights != engine_memory(args, GPU).weights
    halved = teacher_memory(replace(args, teacher_tensor_parallel_size=2), GPU)
    assert halved is not None
    assert halved.weights == teacher.weights // 2
    assert teacher_memory(make_args(), GPU) is None


def test_a_teacher_whose_cache_holds_no_response_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceMemory, "total_bytes", lambda self: 80 * GIB)
    args = options_on(monkeypatch, GPU, teacher_model_name_or_path=str(TINY_MODEL))
    teacher = EngineMemory(weights=140 * GIB, cache=0, num_cached_tokens=0, program=0)
    [said] = _shortage(args, [NodeLoad("10.0.0.1", 1, 1, None)], learner_of(5 * GIB), ENGINE, teacher).splitlines()
    assert said.startswith("An engine of the teacher gets 72.0 GiB of each GPU and has weights of 140.0 GiB there")
    assert "--teacher_tensor_parallel_size" in said


def test_a_teacher_without_a_place_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """Learner and engine have their places; what is left holds no engine of the teacher with two places."""
    removed: list[Any] = []
    node = Node("own", "10.0.0.1", {"CPU": 0.6}, {"CPU": 0.2})
    monkeypatch.setattr(teachers.bundles, "cluster_nodes", lambda: [node])
    monkeypatch.setattr(dry_run, "create_placement_groups", lambda args: {"actor": ("a group", [])})
    monkeypatch.setattr(dry_run, "remove_placement_group", removed.append)
    args = options_on(monkeypatch, CPU, teacher_model_name_or_path=str(TINY_MODEL), teacher_tensor_parallel_size=2)
    with pytest.raises(SystemExit) as ended:
        dry_run._loads(args)
    assert ended.value.code == 2
    assert removed == ["a group"]
    said = capsys.readouterr().err
    assert "--teacher_tensor_parallel_size 2" in said
    assert "the teacher: no node has room for engine 1 of 1, 2 places" in said


@pytest.mark.parametrize(
    ("device", "options", "load", "needed_gib"),
    [
        (CPU, {}, (1, 1), 5 + 3 + 2),  # weights are in Ray's objects once
        (CPU, {}, (2, 0), 2 * 5),
        (CPU, {"vllm_tensor_parallel_size": 2}, (0, 2), 2 * 3 + 2 + 2 * 2),  # and in each of two processes
        (GPU, {}, (8, 8), 8 * 7),
        (GPU, {"colocate": True}, (8, 8), 8 * 7 + 8 * 2),
        (GPU, {"engine_sleep_after_s": 1.0}, (0, 8), 8 * 2),
        (GPU, {"engine_sleep_after_s": 1.0, "engine_sleep_level": 2}, (0, 8), 0),
        (replace(CPU, chosen_transport="shm"), {}, (2, 0), 2 * 5 + 2 * 1),  # a buffer of 1 GiB in shared memory
        (replace(GPU, chosen_transport="ray_object"), {}, (0, 2), 2 + 2 * 2),
    ],
)
def test_main_memory_of_a_node_is_that_of_its_learners_and_engines(
    monkeypatch: pytest.MonkeyPatch, device: Device, options: dict[str, Any], load: tuple[int, int], needed_gib: int
) -> None:
    args = options_on(monkeypatch, device, **options)
    main = MainMemory(optimizer=7 * GIB) if device.kind == "cuda" else MainMemory()
    learner = learner_of(5 * GIB, in_main_memory=main, update=2 * GIB)
    assert node_bytes(args, learner, ENGINE, NodeLoad("10.0.0.1", *load, None)) == needed_gib * GIB


def test_experts_are_in_main_memory_once_while_they_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mixture of 30 billion weights in 16 bits on 8 learners: 58 GiB on the node of the first one, not 464, nor on others."""
    args = options_on(monkeypatch, GPU, deepspeed_stage=3, num_learners_per_node=[8, 8])
    learner = learner_of(9 * GIB, stacked=58 * GIB)
    first, second = NodeLoad("10.0.0.1", 8, 0, None, has_first_learner=True), NodeLoad("10.0.0.2", 8, 0, None)
    assert [node_bytes(args, learner, ENGINE, load) for load in (first, second)] == [58 * GIB, 0]
    offloads = replace(learner, in_main_memory=MainMemory(optimizer=10 * GIB, weights=2 * GIB))
    assert node_bytes(args, offloads, ENGINE, first) == 8 * 12 * GIB  # more than 8 x 2 + 58 while they load
    assert node_bytes(args, replace(offloads, stacked=90 * GIB), ENGINE, first) == (8 * 2 + 90) * GIB


@pytest.mark.parametrize("device", [CPU, GPU], ids=["cpu", "cuda"])
def test_what_does_not_fit_in_main_memory_is_said_with_the_node(
    monkeypatch: pytest.MonkeyPatch, device: Device
) -> None:
    monkeypatch.setattr(DeviceMemory, "total_bytes", lambda self: None)
    args = options_on(monkeypatch, device, deepspeed_offload_optimizer=device is GPU)
    learner = learner_of(5 * GIB, in_main_memory=MainMemory(optimizer=5 * GIB) if device is GPU else MainMemory())
    loads = [NodeLoad(f"10.0.0.{number}", 2, 0, memory) for number, memory in enumerate((10 * GIB, 9 * GIB, None))]
    said = _shortage(args, loads, learner, ENGINE)
    assert said.startswith("This run needs 10.0 GiB of main memory on 10.0.0.1, which has 9,216 MiB.")
    assert "What makes it smaller:" in said
    assert said.count("main memory on") == 1
    assert ("each of these left out: --deepspeed_offload_optimizer" in said) == (device is GPU)


@pytest.mark.parametrize(
    ("words", "workflow"),
    [
        ([], "single_turn (the default)"),
        (["--tools", "calculator", "--max_steps", "3"], "conversation (because of --tools, --max_steps)"),
        (["--rollout_workflow", "conversation"], "conversation (--rollout_workflow)"),
    ],
)
def test_the_workflow_is_told_with_what_chose_it(
    monkeypatch: pytest.MonkeyPatch, words: list[str], workflow: str
) -> None:
    args = parse_args(["--model_name_or_path", str(TINY_MODEL), *words], GRPOConfig)
    monkeypatch.setattr(GRPOConfig, "device", CPU)
    said = dict(_rows(args, [NodeLoad("10.0.0.1", 1, 0, None)], learner_of(5 * GIB), ENGINE))
    assert said["workflow"] == workflow


def test_what_is_not_known_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    args = options_on(monkeypatch, CPU)
    learner = learner_of(5 * GIB, activations=None, why_unknown="it asks for numbers")
    said = dict(_rows(args, [NodeLoad("10.0.0.1", 1, 0, None)], learner, ENGINE))
    assert said["memory of each learner"] == "5,120 MiB and activations"
    assert said["  activations"] == "not known: it asks for numbers"
    assert said["main memory on 10.0.0.1"] == "5,120 MiB and activations; not known how much is there"


def test_a_node_has_what_ray_found_free_there(monkeypatch: pytest.MonkeyPatch) -> None:
    own, other, silent = (
        {"NodeID": name, "NodeManagerAddress": f"address of {name}", "Resources": resources}
        for name, resources in (("own", {}), ("other", {"memory": 6.0, "object_store_memory": 2.0}), ("silent", {}))
    )
    context = SimpleNamespace(get_node_id=lambda: "own")
    ray = SimpleNamespace(nodes=lambda: [own, other, silent], get_runtime_context=lambda: context)
    monkeypatch.setattr(main_memory, "ray", ray)
    assert node_loads(["own", "other", "other"], ["other", "silent"]) == [
        NodeLoad("address of own", 1, 0, memory_of_machine_bytes(), has_first_learner=True),
        NodeLoad("address of other", 2, 1, 8),
        NodeLoad("address of silent", 0, 1, None),
    ]


CONFIG = {"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
CONFIG |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
"""The shape of Qwen3-0.6B."""


@pytest.fixture
def config_alone(tmp_path: Path) -> str:
    """A directory that holds `config.json` and nothing else."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"tie_word_embeddings": True}))
    return str(tmp_path)


def answer(model: str, *words: str) -> int:
    """The exit code of `--dry_run`, started in this process."""
    lengths = ["--max_prompt_token_length", "256", "--response_length", "256", "--pack_length", "512"]
    with pytest.raises(SystemExit) as ended:
        grpo_fast.main(["--model_name_or_path", model, "--dry_run", *lengths, *words])
    return int(str(ended.value.code))


def test_a_config_alone_answers_for_gpus_that_are_not_here(
    config_alone: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Neither a GPU, nor weights, tokenizer, data or Ray."""
    monkeypatch.setattr(dry_run, "ray_cluster", lambda *_: pytest.fail("Ray was started"))
    assert answer(config_alone, "--gpu_memory", "24", "--num_gpus", "1", "--colocate") == 0
    text = capsys.readouterr().out
    assert re.search("computed for +1 GPU of 24.0 GiB each", text)
    assert re.search("optimizer +6,821 MiB", text)  # 12 bytes for each of 596,049,920 weights


def test_a_gpu_that_is_too_small_is_told_what_would_help(config_alone: str, capsys: pytest.CaptureFixture) -> None:
    given = "--gpu_memory", "8", "--num_gpus", "1", "--colocate"
    assert answer(config_alone, *given) == 1
    text = capsys.readouterr().out
    assert re.search(r"needs 1\d\.\d GiB on a GPU that has 8,192 MiB", text)
    assert re.search(r"--use_peft +saves +\d+\.\d GiB\n", text)
    assert "--num_learners_per_node" not in text  # there is one GPU
    assert re.search("With --use_peft it needs [3-7].. GiB, which fits.", text)
    assert answer(config_alone, *given, "--use_peft", "--gradient_checkpointing") == 0


@pytest.mark.parametrize(
    ("words", "mistake"),
    [
        (["--gpu_memory", "24", "--num_gpus", "1"], "the run needs 2 GPUs"),
        (["--num_gpus", "1"], "Set gpu_memory too"),
        (["--gpu_memory", "24", "--device_type", "cpu"], "on CPU there is no GPU whose memory counts"),
    ],
)
def test_a_machine_that_cannot_be_meant_is_a_mistake(
    config_alone: str, capsys: pytest.CaptureFixture, words: list[str], mistake: str
) -> None:
    assert answer(config_alone, *words) == 2
    assert mistake in capsys.readouterr().err
