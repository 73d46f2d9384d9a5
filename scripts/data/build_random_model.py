"""Writes a model with the shape of a real one and random weights, for measuring speed and memory where no hub is in reach.

    python scripts/data/build_random_model.py --like Qwen/Qwen3-0.6B --output_dir out/random_model

What is there already is kept. The tokenizer is that of `assets/tiny_model`, which knows the first 384 tokens of the vocabulary.
Weights are bfloat16, as published.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
OF_QWEN3: dict[str, Any] = {
    "model_type": "qwen3", "vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8, "tie_word_embeddings": True,
}  # fmt: skip
TINY_MIXTURE = "tiny_mixture"
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-0.6B": OF_QWEN3 | {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
    },
    "Qwen/Qwen3-4B": OF_QWEN3 | {
        "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
    },
    TINY_MIXTURE: {
        "model_type": "qwen3_moe", "vocab_size": 384, "head_dim": 64, "num_key_value_heads": 2, "hidden_size": 256,
        "intermediate_size": 512, "moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2,
        "num_hidden_layers": 4, "num_attention_heads": 4,
    },
}  # fmt: skip
"""Of published models, from their `config.json`; and a mixture of experts for quick checks."""
DONE = "random_model_of.txt"
"""Written last: the model whose shape it has."""


def build(like: str, output_dir: Path) -> None:
    if (output_dir / DONE).exists() and (output_dir / DONE).read_text() == like:
        return
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "assets" / "tiny_model", model_max_length=40960)
    config = AutoConfig.for_model(
        **SHAPES[like], max_position_embeddings=40960, rope_parameters={"rope_theta": 1e6, "rope_type": "default"},
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, dtype=torch.bfloat16,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(output_dir)
    tokenizer.save_pretrained(output_dir)
    (output_dir / DONE).write_text(like)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--like", choices=SHAPES, default="Qwen/Qwen3-0.6B")
    parser.add_argument("--output_dir", type=Path, required=True)
    args = parser.parse_args()
    build(args.like, args.output_dir)


if __name__ == "__main__":
    main()
