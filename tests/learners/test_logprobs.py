"""Log-probs in chunks against plain formulas, and on a small Qwen3 in both layouts."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from model_families import _DENSE, FAMILIES, change, family_config
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from open_instruct.config.model_support import attends_fully, logits_scale_and_cap
from open_instruct.data_types import CollatedBatchData, TrainingSample
from open_instruct.learners import cpu_linear, shared_attention
from open_instruct.learners.logprobs import (
    LogProbModel,
    chunked_log_probs,
    entropy_from_logits,
    log_softmax_and_gather,
)
from open_instruct.learners.models import _drop_nothing
from open_instruct.rollouts.collation import collate_packed, collate_padded, pack_rows, pad_rows
from open_instruct.rollouts.shared_prompts import Shared

VOCAB = 50

# ------------------------------------------------------------------------------------------- chunks against formulas


def make_inputs(
    num_tokens: int = 7, hidden: int = 5, vocab: int = VOCAB, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, head weight, bias and labels."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    labels = torch.randint(vocab, (num_tokens,), generator=generator)
    return normal(num_tokens, hidden), normal(vocab, hidden), normal(vocab), labels


@pytest.mark.parametrize("chunk_elements", [1, 2 * VOCAB, 3 * VOCAB + 1, 2**24])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_chunked_log_probs_equal_the_plain_formula(
    chunk_elements: int, temperature: float, with_bias: bool, softcap: float | None
) -> None:
    hidden, weight, bias, labels = make_inputs()
    logits = hidden @ weight.T + (bias if with_bias else 0)
    logits = (logits if softcap is None else softcap * (logits / softcap).tanh()) / temperature
    logprobs, entropy = chunked_log_probs(
        hidden,
        weight,
        labels,
        temperature=temperature,
        chunk_elements=chunk_elements,
        bias_V=bias if with_bias else None,
        softcap=softcap,
    )
    torch.testing.assert_close(logprobs, log_softmax_and_gather(logits, labels))
    torch.testing.assert_close(entropy, entropy_from_logits(logits))
    assert logprobs.requires_grad


@pytest.mark.parametrize("wanted", [(True, True, True), (True, False, False), (False, True, False)])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_gradients_are_exact(wanted: tuple[bool, bool, bool], softcap: float | None) -> None:
    hidden, weight, bias, labels = make_inputs(num_tokens=5, vocab=6)
    for tensor, wants in zip((hidden, weight, bias), wanted, strict=True):
        tensor.requires_grad_(wants)

    def both(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return chunked_log_probs(
            hidden, weight, labels, temperature=0.8, chunk_elements=12, bias_V=bias, softcap=softcap
        )

    assert torch.autograd.gradcheck(both, (hidden, weight, bias))
    for result in (0, 1):  # the gradient of the other is None
        assert torch.autograd.gradcheck(lambda *inputs, r=result: both(*inputs)[r], (hidden, weight, bias))


@pytest.mark.parametrize("by_onednn", [False, True])
def test_float32_values_and_gradients_are_those_of_float64(monkeypatch: pytest.MonkeyPatch, by_onednn: bool) -> None:
    monkeypatch.setattr(cpu_linear, "pays_off", lambda dtype: by_onednn and dtype == torch.float32)

    def values_and_gradients(dtype: torch.dtype) -> list[torch.Tensor]:
        hidden, weight, bias, labels = make_inputs(num_tokens=37, hidden=48, dtype=torch.float32)
        hidden, weight, bias = (tensor.detach().to(dtype).requires_grad_() for tensor in (hidden, weight, bias))
        logprobs, entropy = chunked_log_probs(hidden, weight, labels, chunk_elements=8 * VOCAB, bias_V=bias)
        weighted = logprobs * torch.linspace(-1, 1, 37) + entropy
        gradients = torch.autograd.grad(weighted.sum(), (hidden, weight, bias))
        return [logprobs, entropy, *gradients]

    for ours, exact in zip(values_and_gradients(torch.float32), values_and_gradients(torch.float64), strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=2e-5)


def test_several_labels_of_a_token_have_exact_log_probs_and_gradients() -> None:
    hidden, weight, bias, _ = make_inputs(num_tokens=5, vocab=6)
    labels = torch.tensor([[0, 1, 5], [2, 2, 2], [5, 4, 3], [1, 0, 1], [3, 3, 0]])

    def several(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return chunked_log_probs(hidden, weight, labels, temperature=0.8, chunk_elements=12, bias_V=bias)

    logprobs, entropy = several(hidden, weight, bias)
    logits = (hidden @ weight.T + bias) / 0.8
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).gather(1, labels))
    torch.testing.assert_close(entropy, entropy_from_logits(logits))
    assert torch.autograd.gradcheck(several, (hidden, weight, bias))


def test_bfloat16_inputs_get_a_float32_softmax_and_a_float32_sum_over_chunks() -> None:
    hidden, weight, _, labels = make_inputs(num_tokens=512, hidden=16, dtype=torch.bfloat16)
    logprobs, entropy = chunked_log_probs(hidden, weight, labels, chunk_elements=VOCAB)
    assert logprobs.dtype == entropy.dtype == torch.float32
    exact = log_softmax_and_gather((hidden @ weight.T).float(), labels)
    torch.testing.assert_close(logprobs, exact)

    logprobs.sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.bfloat16
    (exact_grad,) = torch.autograd.grad(
        log_softmax_and_gather(hidden.double() @ weight.double().T, labels).sum(), weight
    )
    # 512 chunks added up in bfloat16 would be off by several per cent.
    assert (weight.grad - exact_grad).norm() / exact_grad.norm() < 5e-3


class LargestTensor(TorchDispatchMode):
    """Notes how many elements the largest tensor made by any operation has."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.numel = max([self.numel, *sizes])
        return result


@pytest.mark.parametrize("chunk_rows", [1, 4])
def test_no_tensor_of_tokens_times_vocabulary_is_ever_made(chunk_rows: int) -> None:
    num_tokens, hidden_size, vocab = 256, 8, 1000
    hidden, weight, _, labels = make_inputs(num_tokens, hidden_size, vocab)
    with LargestTensor() as largest:
        logprobs, _ = chunked_log_probs(hidden, weight, labels, chunk_elements=chunk_rows * vocab)
        assert chunk_rows * vocab <= largest.numel <= max(chunk_rows * vocab, weight.numel())
        logprobs.sum().backward()
        assert largest.numel == weight.numel(), "the weight's gradient is the largest there is"
    with LargestTensor() as largest:
        log_softmax_and_gather(hidden @ weight.T, labels)
    assert largest.numel == num_tokens * vocab, "the measuring works"


# ------------------------------------------------------------------------------------------- a language model


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def model(request: pytest.FixtureRequest) -> LogProbModel:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=request.param,
        initializer_range=0.3,  # far from uniform, so that attention to the wrong token shows
    )
    return LogProbModel(Qwen3ForCausalLM(config).float())


@pytest.fixture
def samples() -> list[TrainingSample]:
    rng = np.random.default_rng(0)
    return [
        TrainingSample(
            query=rng.integers(VOCAB, size=q, dtype=np.int32),
            response=rng.integers(VOCAB, size=r, dtype=np.int32),
            mask=np.ones(r, dtype=bool),
            logprobs=np.zeros(r, dtype=np.float32),
            advantage=1.0,
        )
        for q, r in [(3, 9), (1, 4), (6, 17), (2, 1)]
    ]


def trained_logprobs(model: LogProbModel, batch: CollatedBatchData, temperature: float = 0.9) -> torch.Tensor:
    """Log-probs of all trained tokens, one sample after another."""
    ids, positions = torch.from_numpy(batch.query_responses), torch.from_numpy(batch.position_ids)
    logprobs, _, _ = model(ids, positions, temperature)
    return logprobs[torch.from_numpy(batch.response_masks[:, 1:])]


def gradients(model: LogProbModel, logprobs: torch.Tensor) -> dict[str, torch.Tensor]:
    weights = torch.linspace(-1, 1, len(logprobs))  # as advantages would: another factor for each token
    model.zero_grad()
    (logprobs * weights).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_log_prob_model_equals_full_logits(model: LogProbModel, samples: list[TrainingSample]) -> None:
    batch = collate_padded(samples, pad_token_id=0)
    ids, positions = torch.from_numpy(batch.query_responses), torch.from_numpy(batch.position_ids)
    logits = model.model(input_ids=ids, position_ids=positions, use_cache=False).logits[:, :-1] / 0.9
    expected = log_softmax_and_gather(logits, ids[:, 1:].long())
    logprobs, entropy, _ = model(ids, positions, 0.9)
    assert logprobs.shape == entropy.shape == (len(samples), ids.shape[1] - 1)
    assert logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy, entropy_from_logits(logits.detach()), rtol=0, atol=1e-5)

    trained = torch.from_numpy(batch.response_masks[:, 1:])
    ours, theirs = gradients(model, logprobs[trained]), gradients(model, expected[trained])
    assert ours.keys() == theirs.keys() == {name for name, _ in model.named_parameters()}
    for name, grad in ours.items():
        assert (grad - theirs[name]).norm() <= 1e-5 * theirs[name].norm(), name


def test_log_probs_of_other_tokens_are_those_of_the_full_logits(
    model: LogProbModel, samples: list[TrainingSample]
) -> None:
    batch = collate_padded(samples, pad_token_id=0)
    ids, positions = torch.from_numpy(batch.query_responses), torch.from_numpy(batch.position_ids)
    others = torch.randint(VOCAB, (*ids.shape, 3), generator=torch.Generator().manual_seed(0))
    logprobs, _, of_others = model(ids, positions, 0.9, others)
    logits = model.model(input_ids=ids, position_ids=positions, use_cache=False).logits[:, :-1] / 0.9
    torch.testing.assert_close(of_others, logits.log_softmax(-1).gather(-1, others[:, 1:]))
    alone, _, nothing = model(ids, positions, 0.9)
    assert torch.equal(logprobs, alone)
    assert nothing.shape == (*alone.shape, 0)


def test_log_probs_of_some_tokens_alone_are_those_of_all_and_so_are_their_gradients(
    model: LogProbModel, samples: list[TrainingSample]
) -> None:
    batch = collate_padded(samples, pad_token_id=0)
    ids, positions = torch.from_numpy(batch.query_responses), torch.from_numpy(batch.position_ids)
    wanted = torch.from_numpy(batch.response_masks)
    logprobs, entropy, _ = model(ids, positions, 0.9)
    some, some_entropy, _ = model(ids, positions, 0.9, None, wanted)
    for ours, full in ((some, logprobs), (some_entropy, entropy)):
        torch.testing.assert_close(ours[wanted[:, 1:]], full[wanted[:, 1:]])
        assert (ours[~wanted[:, 1:]] == 0).all()
    expected = gradients(model, logprobs[wanted[:, 1:]])
    for name, gradient in gradients(model, some[wanted[:, 1:]]).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5)


def test_both_layouts_equal_one_sequence_at_a_time(model: LogProbModel, samples: list[TrainingSample]) -> None:
    alone = torch.cat([trained_logprobs(model, collate_padded([sample], 0)) for sample in samples])
    expected = gradients(model, alone)
    for collate in (collate_padded, collate_packed):
        logprobs = trained_logprobs(model, collate(samples, 0))
        torch.testing.assert_close(logprobs, alone, rtol=0, atol=1e-5)
        for name, grad in gradients(model, logprobs).items():
            assert (grad - expected[name]).norm() <= 1e-5 * expected[name].norm(), (collate.__name__, name)


def test_packed_sequences_would_see_each_other_without_their_positions(
    model: LogProbModel, samples: list[TrainingSample]
) -> None:
    """The test above would notice: positions that do not restart change the log-probs."""
    batch = collate_packed(samples, 0)
    ids = torch.from_numpy(batch.query_responses)
    wrong, _, _ = model(ids, torch.arange(ids.shape[1])[None], 0.9)
    wrong = wrong[torch.from_numpy(batch.response_masks[:, 1:])]
    assert (wrong - trained_logprobs(model, batch)).abs().max() > 0.1


SHARING = [family for family in FAMILIES if attends_fully(family_config(family))]


def test_most_families_can_share_prompts() -> None:
    assert {"llama", "qwen2", "qwen3", "olmo2", "qwen3_moe", "mixtral", "smollm3", "deepseek_v3"} <= set(SHARING)
    assert not {"gemma3_text", "olmo3", "mistral", "gpt_oss", "falcon_h1"} & set(SHARING)


@pytest.mark.parametrize("fill", [pad_rows, pack_rows])
@pytest.mark.parametrize(("family", "short"), [*((family, 64) for family in SHARING), ("qwen3", 0), ("llama", 0)])
def test_a_shared_prompt_gives_the_log_probs_and_gradients_of_single_sequences(
    monkeypatch: pytest.MonkeyPatch, fill: Any, family: str, short: int
) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(shared_attention, "SHORT_QUERIES", short)  # 0: torch's fused attention
    torch.manual_seed(0)
    model = LogProbModel(AutoModelForCausalLM.from_config(family_config(family)).eval())
    rng = np.random.default_rng(0)

    def sample(query: np.ndarray, num_tokens: int) -> TrainingSample:
        response = rng.integers(3, 300, num_tokens).astype(np.int32)
        ones = np.ones(num_tokens)
        return TrainingSample(query, response, ones.astype(bool), 0 * ones.astype(np.float32), 1.0)

    queries = [rng.integers(3, 300, length).astype(np.int32) for length in (9, 4)]
    groups = [
        [sample(queries[0], n) for n in (5, 1, 7)],
        [sample(queries[1], n) for n in (4, 2)],
        [sample(queries[1], 6)],
    ]
    batch = fill([Shared(group) for group in groups], 0)
    mask = torch.from_numpy(batch.response_masks)
    shared, _, _ = model(
        torch.from_numpy(batch.query_responses).long(),
        torch.from_numpy(batch.position_ids).long(),
        0.9,
        None,
        mask,
        torch.from_numpy(batch.segments),
        torch.from_numpy(batch.branches),
        torch.from_numpy(batch.predictors),
    )
    shared = shared[mask[:, 1:]]
    alone = torch.cat([trained_logprobs(model, collate_padded([one], 0)) for group in groups for one in group])
    torch.testing.assert_close(shared, alone, rtol=1e-5, atol=1e-5)
    ours, expected = gradients(model, shared), gradients(model, alone)
    for name, gradient in expected.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-5)


def test_gradients_of_a_shared_prompt_always_add_up_in_the_same_order(
    model: LogProbModel, samples: list[TrainingSample]
) -> None:
    """All responses begin after the same token. By indexing, its gradients would be added with atomics, in any order."""
    batch = pack_rows([Shared([replace(one, query=samples[0].query) for one in samples])], 0)
    columns = batch.segments, batch.branches, batch.predictors
    ids, positions, mask, *others = map(
        torch.from_numpy, (batch.query_responses, batch.position_ids, batch.response_masks, *columns)
    )
    logprobs, _, _ = model(ids, positions, 0.9, None, mask, *others)
    operations, ahead = set(), [logprobs.grad_fn]
    while ahead:
        one = ahead.pop()
        if one is not None and one not in operations:
            operations.add(one)
            ahead += [before for before, _ in one.next_functions]
    assert "EmbeddingBackward0" in {one.name() for one in operations}
    assert "IndexBackward0" not in {one.name() for one in operations}


def test_rows_of_padding_alone_attend_to_nothing() -> None:
    nothing = torch.zeros(2, 5, dtype=torch.int64)
    query, key = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    parts = shared_attention.find_parts(nothing, nothing)
    attended, _ = shared_attention.attend(torch.nn.Module(), query, key, key, None, parts=parts)
    assert torch.equal(attended, torch.zeros(2, 5, 4, 8))


@pytest.mark.parametrize("only_wanted", [False, True])
@pytest.mark.parametrize("collate", [collate_padded, collate_packed])
def test_a_batch_without_trained_tokens_has_zero_gradients(
    model: LogProbModel, collate: Any, *, only_wanted: bool
) -> None:
    """Dummies fill up: every rank must run a backward pass, and this one must not move the weights."""
    nothing = TrainingSample(np.array([0, 0]), np.array([], int), np.array([], bool), np.array([]), 0.0)
    batch = collate([nothing], 0)
    mask = torch.from_numpy(batch.response_masks)
    wanted = mask if only_wanted else None
    ids, positions = torch.from_numpy(batch.query_responses), torch.from_numpy(batch.position_ids)
    logprobs, _, _ = model(ids, positions, 1.0, None, wanted)
    (logprobs * mask[:, 1:]).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() == 0, name


def test_the_head_weight_is_read_once_in_a_forward(
    model: LogProbModel, samples: list[TrainingSample], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each read may be a collective under ZeRO-3, so the number must not depend on the batch."""
    head = model.model.get_output_embeddings()
    assert head is not None
    reads = []

    class Head:
        bias = None

        @property
        def weight(self) -> torch.Tensor:
            reads.append(1)
            return head.weight

    monkeypatch.setattr(model.model, "get_output_embeddings", Head)
    for num_forwards, batch in enumerate([collate_padded(samples, 0), collate_packed(samples[:1], 0)], start=1):
        trained_logprobs(model, batch)
        assert len(reads) == num_forwards


@pytest.mark.parametrize("family", ["granite", "granitemoe", "cohere2", "gemma2"])
def test_log_prob_model_scales_and_caps_logits_as_the_model_does(family: str) -> None:
    from transformers import AutoModelForCausalLM

    full = AutoModelForCausalLM.from_config(family_config(family), dtype=torch.float32).eval()
    change(full, seed=1, size=0.1)
    ids = torch.randint(3, 300, (2, 12), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(12).expand(2, -1)
    with torch.no_grad():
        logits = full(input_ids=ids, position_ids=positions, use_cache=False).logits[:, :-1].float()
        ours, entropy, _ = LogProbModel(full)(ids, positions, 0.7)
    assert logits_scale_and_cap(full.config) != (1.0, None)
    torch.testing.assert_close(ours, log_softmax_and_gather(logits / 0.7, ids[:, 1:]))
    torch.testing.assert_close(entropy, entropy_from_logits(logits / 0.7))


def test_logits_that_are_changed_in_an_unknown_way_are_refused(model: LogProbModel) -> None:
    model.model.config.final_logit_softcapping, model.model.config.logit_scale = 30.0, 2.0
    with pytest.raises(ValueError, match="in a way not known here"):
        LogProbModel(model.model)


# ------------------------------------------------------------------------------------------- plain formulas


def test_entropy_of_a_uniform_distribution() -> None:
    torch.testing.assert_close(entropy_from_logits(torch.zeros(3, 8)), torch.full((3,), float(np.log(8))))


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("seed_oss", {"attention_dropout": 0.5, "residual_dropout": 0.5}),
        ("gpt2", {"attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5, "n_layer": 2, "n_embd": 64, "n_head": 4}),
    ],
)
def test_nothing_is_dropped_in_training(family: str, options: dict[str, Any]) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{**_DENSE, **FAMILIES.get(family, {}), **options})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).train()
    ids = torch.arange(3, 23)[None]
    model.eval()
    expected = model(input_ids=ids, use_cache=False).logits
    model.train()
    assert not torch.allclose(model(input_ids=ids, use_cache=False).logits, expected, atol=1e-3)
    _drop_nothing(model)
    torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, expected)
