"""Rows divided among ranks give the log-probs, gradients and steps of whole rows."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TIMEOUT_S
from learner_group import LEARNING_RATE, Learners, change_since_start, make_samples, plain_steps, relative_error
from model_families import FAMILIES, family_config
from ranks import Rank, started_ranks

from open_instruct.config.model_support import why_not_divided
from open_instruct.data_types import TrainingSample
from open_instruct.learners.logprobs import LogProbModel
from open_instruct.learners.sequence_parallel import ATTENTION, SequenceParallel
from open_instruct.rollouts.collation import collate_packed, collate_padded, pack_rows, pad_rows
from open_instruct.rollouts.shared_prompts import Shared

NUM_RANKS = 2
DIVISIBLE = [family for family in FAMILIES if not why_not_divided(family_config(family))]


@pytest.fixture(scope="module")
def two_ranks(ray_session: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    with started_ranks(ray_session, NUM_RANKS, tmp_path_factory.mktemp("ranks"), __name__) as ranks:
        yield SimpleNamespace(
            call=lambda function, *args: ray_session.get(
                [rank.call.remote(function, *args) for rank in ranks], timeout=TIMEOUT_S
            )
        )


@pytest.mark.parametrize("rank", [0, 1])
def test_slices_of_several_rows_have_no_gaps(rank: int) -> None:
    """The ranks gather the positions. A view of some columns has gaps if there are several rows."""
    place = object.__new__(SequenceParallel)
    place._size, place._rank = NUM_RANKS, rank
    ids, positions = torch.arange(10).view(2, 5), torch.arange(5).expand(2, 5)
    own_ids, own_positions, _, columns = place.slice_inputs(ids, positions, None)
    assert columns == range(3 * rank, 3 * rank + 3)
    assert own_positions.tolist() == [list(columns)] * 2
    assert own_ids.tolist() == ([[0, 1, 2], [5, 6, 7]] if rank == 0 else [[3, 4, 0], [8, 9, 0]])
    assert own_ids.is_contiguous()
    assert own_positions.is_contiguous()


def rows_of(layout: str) -> dict[str, Any]:
    """Arguments of `LogProbModel.forward` for a few samples of unequal length, some of which share a prompt."""
    rng = np.random.default_rng(0)

    def sample(query: np.ndarray, num_tokens: int) -> TrainingSample:
        response = rng.integers(3, 300, num_tokens).astype(np.int32)
        ones = np.ones(num_tokens)
        return TrainingSample(query, response, ones.astype(bool), 0 * ones.astype(np.float32), 1.0)

    queries = [rng.integers(3, 300, length).astype(np.int32) for length in (9, 4, 2)]
    groups = [[sample(queries[0], n) for n in (5, 1, 8)], [sample(queries[1], 6)], [sample(queries[2], 1)]]
    samples = [one for group in groups for one in group]
    batch: Any = {
        "padded": lambda: collate_padded(samples, 0),
        "packed": lambda: collate_packed(samples, 0),
        "padded, shared": lambda: pad_rows([Shared(group) for group in groups], 0),
        "packed, shared": lambda: pack_rows([Shared(group) for group in groups], 0),
    }[layout]()
    tensors = {name: torch.from_numpy(array.copy()) for name, array in vars(batch).items() if array is not None}
    ids = tensors["query_responses"].long()
    arguments: dict[str, Any] = {
        "input_ids": ids,
        "position_ids": tensors["position_ids"].long(),
        "temperature": 0.9,
        "other_ids": torch.stack([(ids + 1) % 300, (ids + 7) % 300], dim=2),
        "token_mask": tensors["response_masks"].bool(),
    }
    if "segments" in tensors:
        arguments |= {name: tensors[name] for name in ("segments", "branches", "predictors")}
    return arguments


def outcome(
    config: Any, layout: str, ranks: SequenceParallel | None, *, checkpointing: bool = False
) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    """What the model says about the rows, and the gradients of a sum of all of it in which each value has another factor."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa" if ranks is None else ATTENTION).eval()
    if checkpointing:
        model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    wrapped = LogProbModel(model, sequence_parallel=ranks)
    said = wrapped(**rows_of(layout))
    parts_of_sum = [(values * torch.linspace(0.5, 1.5, values.numel()).view_as(values)).sum() for values in said]
    torch.stack(parts_of_sum).sum().backward()
    gradients = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    return [values.detach().numpy() for values in said], gradients


def divided(rank: Rank, config: Any, layout: str, *, checkpointing: bool = False) -> Any:
    if not hasattr(rank, "sequence_parallel"):
        rank.sequence_parallel = SequenceParallel(  # type: ignore[attr-defined]
            size=rank.world_size,
            rank=rank.rank,
            world_size=rank.world_size,
            attn_implementation="sdpa",
            config=config,
        )
    return outcome(config, layout, rank.sequence_parallel, checkpointing=checkpointing)  # type: ignore[attr-defined]


@pytest.mark.parametrize("layout", ["padded", "packed", "padded, shared", "packed, shared"])
@pytest.mark.parametrize("family", DIVISIBLE)
def test_divided_rows_give_the_log_probs_and_gradients_of_whole_rows(
    two_ranks: SimpleNamespace, family: str, layout: str
) -> None:
    said, gradients = outcome(family_config(family), layout, None)
    by_rank = two_ranks.call(divided, family_config(family), layout)
    for of_rank, _ in by_rank:
        for ours, whole in zip(of_rank, said, strict=True):
            np.testing.assert_allclose(ours, whole, rtol=1e-5, atol=1e-5)
    for name, whole in gradients.items():
        total = sum(of_rank[name] for _, of_rank in by_rank)
        np.testing.assert_allclose(total, whole, rtol=1e-4, atol=2e-5, err_msg=name)
        assert not np.allclose(by_rank[0][1][name], whole, rtol=1e-4, atol=1e-7), "one rank did everything"


@pytest.mark.parametrize("layout", ["padded", "padded, shared"])
def test_activations_that_are_computed_again_exchange_heads_again(two_ranks: SimpleNamespace, layout: str) -> None:
    config = family_config("qwen3")
    _, gradients = outcome(config, layout, None)
    by_rank = two_ranks.call(lambda rank: divided(rank, config, layout, checkpointing=True))
    for name, whole in gradients.items():
        np.testing.assert_allclose(sum(of_rank[name] for _, of_rank in by_rank), whole, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("stage", "num_learners", "loss"), [(0, 2, "dapo"), (2, 2, "gspo"), (3, 2, "dr_grpo"), (3, 4, "cispo")], ids=str
)
def test_a_step_is_that_of_plain_torch(
    ray_session: Any, tied_model: str, tmp_path: Path, stage: int, num_learners: int, loss: str
) -> None:
    batches = [make_samples(15, seed=1), make_samples(9, seed=2), make_samples(7, seed=3)]
    denominator = {"gspo": "sequence", "dr_grpo": "constant"}.get(loss, "token")
    options: dict[str, Any] = {"lr_scheduler_type": "constant", "loss_fn": loss}
    learners = Learners(
        ray_session,
        deepspeed_stage=stage,
        num_learners_per_node=[num_learners],
        sequence_parallel_size=2,
        **options,
    )
    first, second, third = batches
    metrics = [
        learners.train(first, pack_length=128, pairs_per_token=2.0),
        learners.train_in_pieces([second[:2], second[2:7], second[7:], []], pack_length=128),
        learners.train(third, pack_length=128),
    ]
    change = change_since_start(tied_model, learners.weights(tmp_path / "model"))
    prompt, response = third[0].query, third[0].response
    scores = ray_session.get(learners.group.async_score([(prompt, response)]), timeout=TIMEOUT_S)
    learners.close()
    reference = plain_steps(tied_model, batches, [LEARNING_RATE] * 3, denominator=denominator)
    assert relative_error(change, reference) < 1e-4
    assert all(np.array_equal(of_rank[0], scores[0][0]) for of_rank in scores)
    alone = Learners(ray_session, num_learners_per_node=[1], **options)
    expected = [alone.train(samples, pack_length=128) for samples in batches]
    alone.close()
    for ours, whole in zip(metrics, expected, strict=True):
        for name in ("loss/policy_avg", "policy/entropy_avg", "optim/grad_norm", "val/ratio"):
            assert ours[name] == pytest.approx(whole[name], rel=1e-4, abs=1e-6), name
