"""What learners compute on a GPU is what they compute on CPU; without a GPU the same tests run on CPU alone."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TIMEOUT_S
from model_families import family_config
from ranks import Rank, started_ranks

from open_instruct.data_types import CollatedBatchData, TrainingSample
from open_instruct.learners.attention import register
from open_instruct.learners.logprobs import LogProbModel
from open_instruct.learners.sequence_parallel import ATTENTION, SequenceParallel
from open_instruct.rollouts.collation import collate_packed, collate_padded, pack_rows, pad_rows
from open_instruct.rollouts.shared_prompts import Shared

KINDS = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BFLOAT16 = 2.0**-8
Outcome = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""Log-probs of the trained tokens, and gradients by name; float32, on CPU."""


def need(kind: str) -> None:
    if kind == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")


def groups() -> list[list[TrainingSample]]:
    rng = np.random.default_rng(0)

    def sample(query: np.ndarray, num_tokens: int) -> TrainingSample:
        response = rng.integers(3, 300, num_tokens).astype(np.int32)
        return TrainingSample(query, response, np.ones(num_tokens, bool), np.zeros(num_tokens, np.float32), 1.0)

    queries = [rng.integers(3, 300, length).astype(np.int32) for length in (90, 40, 7)]
    return [
        [sample(queries[0], n) for n in (50, 1, 83)],
        [sample(queries[1], n) for n in (4, 61)],
        [sample(queries[2], 9)],
    ]


def batch_of(layout: str) -> CollatedBatchData:
    if "shared" in layout:
        fill = pack_rows if "packed" in layout else pad_rows
        return fill([Shared(group) for group in groups()], 0)
    samples = [one for group in groups() for one in group]
    return collate_packed(samples, 0) if layout == "packed" else collate_padded(samples, 0)


def config() -> Any:
    config = family_config("qwen3")
    config.head_dim = 64
    return config


def outcome(
    kind: str,
    layout: str,
    config: Any,
    *,
    dtype: torch.dtype = torch.float32,
    attention: str = "sdpa",
    parts: Any = None,
) -> Outcome:
    """Of one model and the same tokens, in any layout. Each trained token's log-prob has another factor in the loss."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    name = attention if parts is not None else register(attention)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=name, dtype=torch.float32).eval()
    model = LogProbModel(model.to(kind, dtype), parts=parts)
    arrays = {name: array for name, array in vars(batch_of(layout)).items() if array is not None}
    given = {name: torch.from_numpy(array.copy()).to(kind) for name, array in arrays.items()}
    trained = given["response_masks"].bool()
    rows = {name: given.get(name) for name in ("segments", "branches", "predictors")}
    logprobs, _, _ = model(given["query_responses"].long(), given["position_ids"].long(), 0.9, wanted=trained, **rows)
    logprobs = logprobs[trained[:, 1:]]
    (logprobs * torch.linspace(-1, 1, len(logprobs), device=kind)).sum().backward()
    gradients = {name: p.grad.float().cpu() for name, p in model.named_parameters() if p.grad is not None}
    return logprobs.detach().float().cpu(), gradients


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
        ("cpu", "shared"),
        *(pytest.param("cuda", layout, marks=pytest.mark.gpu) for layout in ("padded", "packed", "shared")),
    ],
)
def test_every_layout_gives_what_padded_rows_give_on_cpu(kind: str, layout: str) -> None:
    need(kind)
    assert_close(outcome(kind, layout, config()), outcome("cpu", "padded", config()), logprobs=1e-4, gradients=1e-3)


@pytest.mark.parametrize("layout", ["padded", "shared"])
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_off_by_its_rounding(kind: str, layout: str) -> None:
    need(kind)
    ours, exact = outcome(kind, layout, config(), dtype=torch.bfloat16), outcome("cpu", "padded", config())
    assert_close(ours, exact, logprobs=20 * BFLOAT16, gradients=20 * BFLOAT16)
    assert (ours[0] - exact[0]).abs().mean() <= 2 * BFLOAT16


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["padded", "packed", "shared", "packed and shared"])
def test_flash_attention_tells_sequences_apart(layout: str) -> None:
    need("cuda")
    ours = outcome("cuda", layout, config(), dtype=torch.bfloat16, attention="flash_attention_2")
    exact = outcome("cpu", "padded", config())
    assert_close(ours, exact, logprobs=20 * BFLOAT16, gradients=20 * BFLOAT16)
    assert (ours[0] - exact[0]).abs().mean() <= 2 * BFLOAT16


# ------------------------------------------------------------------------------------------- two ranks on one GPU


@pytest.fixture(scope="module")
def two_ranks(ray_session: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    with started_ranks(ray_session, 2, tmp_path_factory.mktemp("ranks"), __name__, kind=kind) as ranks:
        yield SimpleNamespace(
            call=lambda function, *args: ray_session.get(
                [rank.call.remote(function, *args) for rank in ranks], timeout=TIMEOUT_S
            )
        )


def divided(rank: Rank, config: Any, kind: str, layout: str, dtype: torch.dtype, attention: str) -> Outcome:
    parts = SequenceParallel(size=2, rank=rank.rank, world_size=2, attn_implementation=attention, config=config)
    return outcome(kind, layout, config, dtype=dtype, attention=ATTENTION, parts=parts)


@pytest.mark.parametrize(
    ("layout", "dtype", "attention"),
    [
        ("packed", torch.float32, "sdpa"),
        ("shared", torch.float32, "sdpa"),
        pytest.param("packed", torch.bfloat16, "flash_attention_2", marks=pytest.mark.gpu),
        pytest.param("packed and shared", torch.bfloat16, "flash_attention_2", marks=pytest.mark.gpu),
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
    first, second = two_ranks.call(divided, config(), kind, layout, dtype, attention)
    together = {name: gradient + second[1][name] for name, gradient in first[1].items()}
    assert torch.equal(first[0], second[0])
    exact = dtype == torch.float32
    limits = {"logprobs": 1e-4, "gradients": 1e-3} if exact else {"logprobs": 20 * BFLOAT16, "gradients": 20 * BFLOAT16}
    assert_close((first[0], together), outcome("cpu", "padded", config()), **limits)
