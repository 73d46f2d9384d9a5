"""The tables of docs/start/will_it_fit.md are what `scripts/will_it_fit.py` writes, for models of the true sizes."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import will_it_fit

from open_instruct import grpo_fast

WEIGHTS = {
    "SmolLM2-135M": 134_515_008,
    "Qwen3-0.6B": 596_049_920,
    "Llama-3.2-1B": 1_235_814_400,
    "Qwen3-1.7B": 1_720_574_976,
    "Llama-3.2-3B": 3_212_749_824,
    "Qwen3-4B": 4_022_468_096,
    "Llama-3.1-8B": 8_030_261_248,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-32B": 32_762_123_264,
}
"""Number of weights of the published models."""


def test_models_have_as_many_weights_as_the_published_ones() -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    for name, shape in will_it_fit.SHAPES.items():
        fields = shape.config()
        config = AutoConfig.for_model(fields.pop("model_type"), **fields)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        assert sum(parameter.numel() for parameter in model.parameters()) == WEIGHTS[name], name


@pytest.mark.parametrize("name", ["SmolLM2-135M", "Llama-3.2-1B"])
def test_rows_of_the_page_are_up_to_date(name: str) -> None:
    assert will_it_fit.row(name, will_it_fit.ONE_GPU) in will_it_fit.PAGE.read_text(), "run scripts/will_it_fit.py"


@pytest.mark.extended
def test_the_tables_are_up_to_date() -> None:
    assert will_it_fit.tables() in will_it_fit.PAGE.read_text(), "run scripts/will_it_fit.py"


def test_a_card_of_the_page_gets_the_same_answer_from_the_command(tmp_path: Path) -> None:
    """Llama-3.2-1B is trained whole with 24 GB and offloads with less."""
    name = "Llama-3.2-1B"
    (tmp_path / "config.json").write_text(json.dumps(will_it_fit.SHAPES[name].config()))
    of_all = will_it_fit.needs_of(name, will_it_fit.ONE_GPU)["all"]
    words = will_it_fit.command(will_it_fit.ONE_GPU).split()
    for gib, code in ((of_all.on_gpu / 2**30 * 1.01, 0), (of_all.on_gpu / 2**30 * 0.99, 1)):
        with pytest.raises(SystemExit) as ended:
            grpo_fast.main(["--model_name_or_path", str(tmp_path), "--gpu_memory", str(gib), *words])
        assert ended.value.code == code
