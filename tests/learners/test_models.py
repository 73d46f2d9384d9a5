"""Models of learners, as they are loaded."""

from pathlib import Path

import pytest
from conftest import make_args
from model_families import family_config

from open_instruct.learners.models import _load_model


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
