"""Families that cannot be trained exactly are refused before anything starts."""

from pathlib import Path

import pytest
from conftest import make_args
from model_families import FAMILIES, family_config

from open_instruct.config_checks import collect_mistakes
from open_instruct.model_support import logits_scale_and_cap, why_refused

REASONS = [
    ("gpt_oss", "attention sinks"),
    ("falcon_h1", "recurrent layers"),
    ("deepseek_v3", "latent attention on CPU"),
]
REFUSED = {family for family, _ in REASONS}


@pytest.mark.parametrize(
    ("family", "reason"),
    REASONS,
)
def test_refused_family_is_named_with_reason_and_cure(tmp_path: Path, family: str, reason: str) -> None:
    family_config(family).save_pretrained(tmp_path)
    [mistake] = [one for one in collect_mistakes(make_args(model_name_or_path=str(tmp_path))) if "of type" in one]
    assert mistake.startswith(f"--model_name_or_path {tmp_path}: a model of type {family} is not supported")
    assert reason in mistake
    assert "Choose a model of a family that docs/models.md lists" in mistake


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - REFUSED))
def test_other_families_are_not_refused(family: str) -> None:
    assert (
        why_refused(family_config(family), device_kind="cpu", attn_implementation="sdpa", max_sequence_length=96)
        is None
    )


def test_capped_attention_needs_an_implementation_that_caps() -> None:
    config = family_config("gemma2")
    config.attn_logit_softcapping = 50.0
    refused = why_refused(config, device_kind="cpu", attn_implementation="sdpa", max_sequence_length=96)
    assert "attn_logit_softcapping=50" in (refused or "")
    assert (
        why_refused(config, device_kind="cpu", attn_implementation="flash_attention_2", max_sequence_length=96) is None
    )


def test_window_that_is_wider_in_the_engine_is_refused_for_sequences_beyond_it() -> None:
    config = family_config("cohere2")
    assert (
        why_refused(config, device_kind="cpu", attn_implementation="sdpa", max_sequence_length=config.sliding_window)
        is None
    )
    refused = why_refused(
        config, device_kind="cpu", attn_implementation="sdpa", max_sequence_length=config.sliding_window + 1
    )
    assert "one token wider in the engine" in (refused or "")


def test_logits_of_a_family_are_scaled_or_capped_as_its_config_says() -> None:
    assert logits_scale_and_cap(family_config("qwen3")) == (1.0, None)
    assert logits_scale_and_cap(family_config("granite")) == (0.25, None)
    assert logits_scale_and_cap(family_config("cohere")) == (0.25, None)
    assert logits_scale_and_cap(family_config("gemma2")) == (1.0, 5.0)
