"""Models of learners, as they are loaded."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_args
from model_families import family_config

from open_instruct.learners.models import _load_model, train_mode


def test_a_model_is_not_loaded_with_an_attention_that_cannot_compute_it(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    config = family_config("gemma2")
    config.attn_logit_softcapping = 50.0
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    capping, plain = (
        make_args(model_name_or_path=str(tmp_path), attn_implementation=name, deepspeed_stage=0)
        for name in ("eager", "auto")
    )
    assert _load_model(capping, capping.device, {}, None).model.config._attn_implementation == "eager"
    with pytest.raises(ValueError, match="--attn_implementation sdpa: it caps attention scores"):
        _load_model(plain, plain.device, {}, None)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.1}),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.1}),
    ],
)
def test_a_mixture_of_experts_draws_nothing_in_training(family: str, options: dict[str, Any]) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 384, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 1}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes, **heads, **options)).eval()
    ids = torch.randint(3, 300, (2, 64))
    with torch.no_grad():
        of_engine = model(ids).logits
        assert not torch.equal(model.train()(ids).logits, of_engine)
        train_mode(model)
        assert torch.equal(model(ids).logits, of_engine)
    assert model.training
    assert model.model.layers[0].training  # gradient checkpointing asks it
