"""What a run that is too large is told: nothing that it was given already, and nothing that would change nothing."""

from typing import Any

import pytest
from conftest import make_args

from open_instruct.device import Device
from open_instruct.run.main_memory import NodeLoad
from open_instruct.run.memory_advice import less_main_memory, smaller_learners

GPU, CPU = Device("cuda", "bfloat16", "sdpa"), Device("cpu", "float32", "sdpa")
LOADS = [NodeLoad("10.0.0.1", 2, 1, None)]


def args_on(monkeypatch: pytest.MonkeyPatch, device: Device, **options: Any) -> Any:
    args = make_args(**{"load_ref_policy": True, "beta": 0.05, **options})
    monkeypatch.setattr(type(args), "device", device)
    return args


@pytest.mark.parametrize(
    ("option", "proposal"),
    [
        ({"use_peft": True}, "--use_peft"),
        ({"gradient_checkpointing": True}, "--gradient_checkpointing"),
        ({"deepspeed_offload_optimizer": True}, "--deepspeed_offload_optimizer"),
        ({"deepspeed_stage": 3}, "--deepspeed_stage"),
        ({"load_ref_policy": False, "beta": 0.0}, "--load_ref_policy"),
        ({"use_peft": True}, "--load_ref_policy"),  # an adapter's reference is the model below it
    ],
)
def test_what_was_given_is_not_proposed(monkeypatch: pytest.MonkeyPatch, option: dict[str, Any], proposal: str) -> None:
    assert proposal in smaller_learners(args_on(monkeypatch, GPU))
    assert proposal not in smaller_learners(args_on(monkeypatch, GPU, **option))


def test_on_cpu_nothing_is_moved_to_main_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "offload" not in smaller_learners(args_on(monkeypatch, CPU))


def test_a_row_is_never_proposed_shorter_than_a_prompt_with_its_response(monkeypatch: pytest.MonkeyPatch) -> None:
    args = args_on(monkeypatch, GPU)
    assert "a smaller --pack_length" in smaller_learners(
        args_on(monkeypatch, GPU, pack_length=2 * args.max_sequence_length)
    )
    assert "a smaller --pack_length" not in smaller_learners(
        args_on(monkeypatch, GPU, pack_length=args.max_sequence_length)
    )


def test_only_what_is_in_force_is_proposed_to_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "left out" not in less_main_memory(args_on(monkeypatch, GPU), LOADS)
    told = less_main_memory(args_on(monkeypatch, GPU, colocate=True, use_peft=True), LOADS)
    assert told.endswith("each of these left out: --colocate.")
    assert "--use_peft" not in told
    assert "fewer learners" not in less_main_memory(args_on(monkeypatch, GPU), [NodeLoad("10.0.0.1", 1, 1, None)])
