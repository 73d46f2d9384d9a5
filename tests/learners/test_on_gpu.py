"""What learners compute on a GPU is what they compute on CPU; without a GPU the same tests run on CPU alone."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trained_rows
from conftest import TIMEOUT_S
from model_families import family_config
from ranks import Rank, started_ranks
from trained_rows import LAYOUTS, Outcome, batch_of, make_groups

from open_instruct.learners.sequence_parallel import ATTENTION, SequenceParallel

KINDS = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BFLOAT16 = 2.0**-8
GROUPS = make_groups([(90, [50, 1, 83]), (40, [4, 61]), (7, [9])])


def need(kind: str) -> None:
    if kind == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")


def config() -> Any:
    config = family_config("qwen3")
    config.head_dim = 64
    return config


def outcome(kind: str, layout: str, attention: str = "sdpa", *, dtype: torch.dtype = torch.float32) -> Outcome:
    return trained_rows.outcome(config(), batch_of(GROUPS, layout), attention, kind=kind, dtype=dtype)


def assert_close(ours: Outcome, theirs: Outcome, *, logprobs: float, gradients: float) -> None:
    """`logprobs` is the largest difference, `gradients` that relative to the norm of each tensor."""
    assert (ours[0] - theirs[0]).abs().max() <= logprobs
    assert ours[1].keys() == theirs[1].keys()
    for name, gradient in theirs[1].items():
        error = float((ours[1][name] - gradient).norm() / gradient.norm())
        assert error <= gradients, f"{name}: {error:.1e}"


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("cpu", "packed"),
        ("cpu", "padded, shared"),
        *(pytest.param("cuda", layout, marks=pytest.mark.gpu) for layout in ("padded", "packed", "padded, shared")),
    ],
)
def test_every_layout_gives_what_padded_rows_give_on_cpu(kind: str, layout: str) -> None:
    need(kind)
    assert_close(outcome(kind, layout), outcome("cpu", "padded"), logprobs=1e-4, gradients=1e-3)


@pytest.mark.parametrize("layout", ["padded", "padded, shared"])
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_off_by_its_rounding(kind: str, layout: str) -> None:
    need(kind)
    ours, exact = outcome(kind, layout, dtype=torch.bfloat16), outcome("cpu", "padded")
    assert_close(ours, exact, logprobs=20 * BFLOAT16, gradients=20 * BFLOAT16)
    assert (ours[0] - exact[0]).abs().mean() <= 2 * BFLOAT16


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_flash_attention_tells_sequences_apart(layout: str) -> None:
    need("cuda")
    ours = outcome("cuda", layout, "flash_attention_2", dtype=torch.bfloat16)
    exact = outcome("cpu", "padded")
    assert_close(ours, exact, logprobs=20 * BFLOAT16, gradients=20 * BFLOAT16)
    assert (ours[0] - exact[0]).abs().mean() <= 2 * BFLOAT16


# ------------------------------------------------------------------------------------------- two ranks on one GPU


@pytest.fixture(scope="module")
def two_ranks(ray_session: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    with started_ranks(ray_session, 2, tmp_path_factory.mktemp("ranks"), __name__, "trained_rows", kind=kind) as ranks:
        yield SimpleNamespace(
            call=lambda function, *args: ray_session.get(
                [rank.call.remote(function, *args) for rank in ranks], timeout=TIMEOUT_S
            )
        )


def divided(rank: Rank, config: Any, kind: str, batch: Any, dtype: torch.dtype, attention: str) -> Outcome:
    ranks = SequenceParallel(size=2, rank=rank.rank, world_size=2, attn_implementation=attention, config=config)
    return trained_rows.outcome(config, batch, ATTENTION, kind=kind, dtype=dtype, sequence_parallel=ranks)


@pytest.mark.parametrize(
    ("layout", "dtype", "attention"),
    [
        ("packed", torch.float32, "sdpa"),
        ("padded, shared", torch.float32, "sdpa"),
        pytest.param("packed", torch.bfloat16, "flash_attention_2", marks=pytest.mark.gpu),
        pytest.param("packed, shared", torch.bfloat16, "flash_attention_2", marks=pytest.mark.gpu),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_that_divide_rows_give_what_whole_rows_give(
    two_ranks: SimpleNamespace, kind: str, layout: str, dtype: torch.dtype, attention: str
) -> None:
    need(kind)
    if attention != "sdpa" and kind == "cpu":
        pytest.skip("its kernels need a GPU")
    first, second = two_ranks.call(divided, config(), kind, batch_of(GROUPS, layout), dtype, attention)
    together = {name: gradient + second[1][name] for name, gradient in first[1].items()}
    assert torch.equal(first[0], second[0])
    exact = dtype == torch.float32
    limits = {"logprobs": 1e-4, "gradients": 1e-3} if exact else {"logprobs": 20 * BFLOAT16, "gradients": 20 * BFLOAT16}
    assert_close((first[0], together), outcome("cpu", "padded"), **limits)
