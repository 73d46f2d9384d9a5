"""Rows of several sequences in the GPU's layout, with torch's kernels replaced by their definition, which runs on CPU.

The kernels themselves: `test_on_gpu.py`.
"""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from model_families import _DENSE, FAMILIES, family_config
from trained_rows import LAYOUTS, arguments_of, batch_of, make_groups, outcome

from open_instruct.config.model_support import attends_fully, has_recurrent_layers
from open_instruct.learners import flash_attention
from open_instruct.learners.logprobs import LogProbModel
from open_instruct.rollouts.collation import collate_padded, pack_rows
from open_instruct.rollouts.shared_prompts import Shared

GROUPS = make_groups([(19, [5, 1, 30]), (4, [4, 2]), (1, [6])])
REFUSED = {"gpt_oss", "falcon_h1"}
TRAINED = [family for family in FAMILIES if family not in REFUSED and not has_recurrent_layers(family_config(family))]


def varlen_attn_by_definition(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, ends_of_queries: torch.Tensor, ends_of_keys: torch.Tensor,
    most_queries: int, most_keys: int, *, scale: float | None, window_size: tuple[int, int], enable_gqa: bool,
) -> torch.Tensor:  # fmt: skip
    """(Q, heads, head size) of `torch.nn.attention.varlen.varlen_attn`; the last query of a part looks at its last key."""
    assert ends_of_queries.dtype == ends_of_keys.dtype == torch.int32
    assert ends_of_queries[-1] == len(queries)
    assert ends_of_keys[-1] == len(keys) == len(values)
    assert (int(ends_of_queries.diff().max()), int(ends_of_keys.diff().max())) == (most_queries, most_keys)
    back, ahead = window_size
    outs = []
    pairs = zip(pairwise(ends_of_queries.tolist()), pairwise(ends_of_keys.tolist()), strict=True)
    for (start, end), (first, last) in pairs:
        distances = torch.arange(first - last + end - start, end - start)[None] - torch.arange(end - start)[:, None]
        mask = (distances <= ahead) & ((distances >= -back) | torch.tensor(back < 0))
        one = (states.transpose(0, 1)[None] for states in (queries[start:end], keys[first:last], values[first:last]))
        out = F.scaled_dot_product_attention(*one, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


@pytest.fixture(autouse=True)
def kernels_by_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attention, "varlen_attn", varlen_attn_by_definition)
    monkeypatch.setattr(flash_attention, "DTYPES", (torch.float32,))


def test_nearly_all_families_are_tried() -> None:
    assert {"llama", "qwen3", "qwen3_moe", "mistral", "gemma3_text", "olmo3", "deepseek_v3"} <= set(TRAINED)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", TRAINED)
def test_every_layout_gives_the_log_probs_and_gradients_of_single_sequences(family: str, layout: str) -> None:
    if "shared" in layout and not attends_fully(family_config(family)):
        pytest.skip("has windows")
    config = family_config(family)
    alone = [outcome(config, collate_padded([one], 0), "sdpa") for group in GROUPS for one in group]
    expected = torch.cat([logprobs for logprobs, _ in alone])
    logprobs, gradients = outcome(config, batch_of(GROUPS, layout), "flash_attention_2")
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)
    assert all(torch.isfinite(gradient).all() for gradient in gradients.values())
    reference, wanted = outcome(config, batch_of(GROUPS, "padded"), "sdpa")
    torch.testing.assert_close(reference, expected, rtol=1e-5, atol=1e-5)
    for name, gradient in wanted.items():
        torch.testing.assert_close(
            gradients[name], gradient, rtol=1e-4, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_spans_of_rows_that_are_padded_for_a_group_of_learners() -> None:
    spans = flash_attention.find_spans(torch.tensor([[0, 1, 0, 1, 2]]), num_columns=6)
    assert spans.ends_of_queries.tolist() == spans.ends_of_keys.tolist() == [0, 2, 6]
    assert (spans.most_queries, spans.most_keys, spans.keys) == (4, 4, None)


def test_spans_of_responses_that_share_a_prompt() -> None:
    batch = pack_rows([Shared(GROUPS[1])], 0)
    segments, branches = torch.from_numpy(batch.segments), torch.from_numpy(batch.branches)
    spans = flash_attention.find_spans_of_shared(segments, branches, num_columns=12)
    assert spans.ends_of_queries.tolist() == [0, 4, 8, 10, 12]
    assert spans.ends_of_keys.tolist() == [0, 4, 12, 18, 20]
    assert spans.keys is not None
    assert spans.keys.tolist() == [*range(4), *range(8), *range(4), 8, 9, 10, 11]
    assert (spans.most_queries, spans.most_keys) == (4, 8)


def test_values_narrower_than_keys_and_other_dtypes_come_back_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attention, "DTYPES", (torch.bfloat16, torch.float16))
    query, key, value = torch.randn(2, 4, 5, 16), torch.randn(2, 2, 5, 16), torch.randn(2, 2, 5, 8)
    spans = flash_attention.find_spans(torch.arange(5).repeat(2, 1), num_columns=5)
    out, _ = flash_attention.attend(torch.nn.Module(), query, key, value, None, parts=spans)
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2)
    assert out.dtype == torch.float32
    assert out.shape == expected.shape
    torch.testing.assert_close(out, expected, rtol=0.02, atol=0.02)
    assert not torch.equal(out, expected)


@pytest.mark.parametrize("implementation", ["sdpa", "flash_attention_2"])
def test_layers_that_do_not_pass_on_what_is_one_sequence_are_an_error(implementation: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("stablelm", **(_DENSE | {"num_hidden_layers": 1}))
    model = LogProbModel(AutoModelForCausalLM.from_config(config).eval(), attn_implementation=implementation)
    with pytest.raises(ValueError, match="StableLmAttention does not pass on which tokens are one sequence"):
        model(**arguments_of(batch_of(GROUPS, "packed, shared")))


def test_a_model_that_was_loaded_otherwise_gets_the_attention_that_is_named() -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(family_config("qwen3"), attn_implementation="sdpa")
    assert LogProbModel(model).model.config._attn_implementation == "sdpa_of_shared_prompts"
    model = LogProbModel(model, attn_implementation="flash_attention_2").model
    assert model.config._attn_implementation == flash_attention.ATTENTION
    assert "flash" not in flash_attention.ATTENTION, "Transformers looks for a package then"
