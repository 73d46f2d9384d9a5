"""What a run that is too large is told: nothing that it was given already, and nothing that would change nothing."""

from typing import Any

import pytest
from conftest import make_args

from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.device import Device
from open_instruct.run.main_memory import NodeLoad
from open_instruct.run.memory_advice import advice, changes, less_main_memory, savings
from open_instruct.run.memory_needs import needed_on_device

GPU, CPU = Device("cuda", "bfloat16", "sdpa"), Device("cpu", "float32", "sdpa")
LOADS = [NodeLoad("10.0.0.1", 2, 1, None)]
MIB = 2**20


def args_on(monkeypatch: pytest.MonkeyPatch, device: Device, **options: Any) -> Any:
    args = make_args(**{"load_ref_policy": True, "beta": 0.05, **options})
    monkeypatch.setattr(type(args), "device", device)
    return args


def proposals(args: Any) -> str:
    return ", ".join(change.text for change in changes(args))


@pytest.mark.parametrize(
    ("option", "proposal"),
    [
        ({"use_peft": True}, "--use_peft"),
        ({"gradient_checkpointing": True}, "--gradient_checkpointing"),
        ({"deepspeed_stage": 2, "deepspeed_offload_optimizer": True}, "--deepspeed_offload_optimizer"),
        ({"deepspeed_stage": 3}, "--deepspeed_stage"),
        ({"load_ref_policy": False, "beta": 0.0}, "--load_ref_policy"),
        ({"use_peft": True}, "--load_ref_policy"),  # an adapter's reference is the model below it
    ],
)
def test_what_was_given_is_not_proposed(monkeypatch: pytest.MonkeyPatch, option: dict[str, Any], proposal: str) -> None:
    assert proposal in proposals(args_on(monkeypatch, GPU))
    assert proposal not in proposals(args_on(monkeypatch, GPU, **option))


def test_on_cpu_nothing_is_moved_to_main_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "offload" not in proposals(args_on(monkeypatch, CPU))


def test_a_row_is_never_proposed_shorter_than_a_prompt_with_its_response(monkeypatch: pytest.MonkeyPatch) -> None:
    args = args_on(monkeypatch, GPU)
    length = args.max_sequence_length
    assert f"--pack_length {length} " in proposals(args_on(monkeypatch, GPU, pack_length=2 * length))
    shorter = proposals(args_on(monkeypatch, GPU, pack_length=length))
    assert f"--response_length 16 --pack_length {length - 16}" in shorter


@pytest.mark.parametrize("device", [GPU, CPU], ids=["cuda", "cpu"])
def test_each_saving_is_the_difference_of_two_counts(monkeypatch: pytest.MonkeyPatch, device: Device) -> None:
    """The tiny model has 0.64 million weights, and rows of 512 tokens."""
    computed = {saving.change.text: saving for saving in savings(args_on(monkeypatch, device), needed_on_device)}
    recomputing = args_on(monkeypatch, device, gradient_checkpointing=True)
    expected = needed_on_device(args_on(monkeypatch, device)) - needed_on_device(recomputing)
    assert computed["--gradient_checkpointing"].num_bytes == expected > MIB
    assert [s.num_bytes for s in computed.values()] == sorted((s.num_bytes for s in computed.values()), reverse=True)


def test_what_saves_nothing_is_not_proposed_and_the_first_that_are_enough_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def needed(args: GRPOConfig) -> int:
        return (1000 - 600 * args.use_peft - 300 * args.gradient_checkpointing) * MIB

    args = args_on(monkeypatch, GPU)
    text = advice(args, 150 * MIB, needed)
    assert "offload" not in text
    assert text.splitlines()[-1] == "With --use_peft and --gradient_checkpointing it needs 100 MiB, which fits."
    assert advice(args, 450 * MIB, needed).endswith("With --use_peft it needs 400 MiB, which fits.")
    assert advice(args, 50 * MIB, needed).endswith("All of them together need 100 MiB, which is still too much.")
    assert advice(args, 50 * MIB, lambda _: 100 * MIB) == ""


def test_only_what_is_in_force_is_proposed_to_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "left out" not in less_main_memory(args_on(monkeypatch, GPU), LOADS)
    told = less_main_memory(args_on(monkeypatch, GPU, colocate=True, use_peft=True), LOADS)
    assert told.endswith("each of these left out: --colocate.")
    assert "--use_peft" not in told
    assert "fewer learners" not in less_main_memory(args_on(monkeypatch, GPU), [NodeLoad("10.0.0.1", 1, 1, None)])
