"""The directory of a trained model, for models of which Transformers would not write every file."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_args

from open_instruct.learners.model_files import save_model_files
from open_instruct.learners.weight_sync import DeepSpeedWeightSource


@pytest.mark.parametrize("changed", [{"do_sample": None, "temperature": 0.6, "top_p": 0.9}, {}], ids=["refused", "own"])
def test_a_saved_model_keeps_its_generation_config(tied_model: str, tmp_path: Path, changed: dict[str, Any]) -> None:
    """Transformers does not write sampling options without `do_sample` itself."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    base, saved = tmp_path / "base", tmp_path / "saved"
    shutil.copytree(tied_model, base)
    file = base / "generation_config.json"
    content = {name: value for name, value in (json.loads(file.read_text()) | changed).items() if value is not None}
    file.write_text(json.dumps(content))
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    args = make_args(model_name_or_path=str(base))
    save_model_files(saved, args, model, DeepSpeedWeightSource(model, zero_stage=0), rank=0)
    expected = GenerationConfig.from_pretrained(base).to_dict()
    assert GenerationConfig.from_pretrained(saved).to_dict() == expected == model.generation_config.to_dict()
    again = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())
