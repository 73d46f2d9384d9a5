"""A mixture of experts at ZeRO stage 3: the main memory that each rank takes while it loads, and the weights that it gets."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import TIMEOUT_S, make_args
from model_families import family_config
from ranks import Rank, started_ranks

from open_instruct.device import current_device
from open_instruct.learners.models import _load_model
from open_instruct.learners.stage3_loading import experts_on_rank_0

MIB = 2**20
NUM_RANKS = 2


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer of 16 experts of 4 MiB, which are 64 of 65 MiB of the model, and a router whose buffer holds numbers."""
    from transformers import AutoModelForCausalLM

    config = family_config("deepseek_v3")
    config.num_hidden_layers, config.first_k_dense_replace = 1, 0
    config.n_routed_experts, config.moe_intermediate_size = 16, 4 * MIB // (4 * 3 * config.hidden_size)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.model.layers[0].mlp.gate.e_score_correction_bias.copy_(torch.arange(16.0))
    directory = tmp_path_factory.mktemp("mixture")
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def ranks(ray_session: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    with started_ranks(ray_session, NUM_RANKS, tmp_path_factory.mktemp("ranks"), __name__) as ranks:
        yield ranks


@pytest.mark.parametrize("rank", [0, 1])
def test_other_ranks_stack_shapes_alone(mixture: Path, rank: int) -> None:
    """The experts have no numbers on other ranks; the router's buffer has, because every rank copies its own."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.integrations import deepspeed

    model = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32)
    before = deepspeed._apply_weight_conversions_to_state_dict
    with experts_on_rank_0(rank):
        tensors = deepspeed._apply_weight_conversions_to_state_dict(
            model, load_file(mixture / "model.safetensors"), get_model_conversion_mapping(model)
        )
    assert deepspeed._apply_weight_conversions_to_state_dict is before
    expected = model.state_dict()
    assert {name: tensor.shape for name, tensor in tensors.items()} == {n: t.shape for n, t in expected.items()}
    stacked = {name for name, tensor in tensors.items() if tensor.device.type == "meta"}
    assert stacked == (
        {f"model.layers.0.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")} if rank else set()
    )
    assert all(torch.equal(tensors[name], expected[name]) for name in expected.keys() - stacked)


def loaded(rank: Rank, path: str) -> tuple[float, dict[str, torch.Tensor]]:
    """MiB of private memory that this rank took at most while it loaded, and its whole weights and buffers afterwards."""
    import deepspeed

    args = make_args(model_name_or_path=path, deepspeed_stage=3, attn_implementation="eager")
    device = current_device(kind="cpu")
    config = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}
    peak, is_done = [0], threading.Event()
    process = psutil.Process()

    def private() -> int:
        memory = process.memory_info()
        return memory.rss - memory.shared

    def watch() -> None:
        while not is_done.is_set():
            peak[0] = max(peak[0], private())
            time.sleep(0.001)

    before = private()
    watcher = threading.Thread(target=watch)
    watcher.start()
    model = _load_model(args, device, config, None).model
    is_done.set()
    watcher.join()
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return (peak[0] - before) / MIB, weights


@pytest.mark.extended
@pytest.mark.alone
def test_only_rank_0_holds_the_experts_while_they_load(ray_session: Any, ranks: list[Any], mixture: Path) -> None:
    from transformers import AutoModelForCausalLM

    (of_rank_0, weights_0), (of_rank_1, weights_1) = ray_session.get(
        [rank.call.remote(loaded, str(mixture)) for rank in ranks], timeout=TIMEOUT_S
    )
    expected = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32).state_dict()
    assert "model.layers.0.mlp.gate.e_score_correction_bias" in expected
    for weights in (weights_0, weights_1):
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    assert of_rank_0 > 64, "rank 0 has all experts, and its share of the model"
    assert of_rank_1 < of_rank_0 - 48, "rank 1 has its share, and a layer that is handed out"
