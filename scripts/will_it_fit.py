"""Writes the tables of docs/start/will_it_fit.md: which models can be trained on which cards, as `--dry_run` computes it.

    python scripts/will_it_fit.py

Only the shapes of the models are needed, and they are written down here. Neither a GPU nor weights are needed.
"""

import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.engines.engine_memory import engine_memory
from open_instruct.learners.memory_estimate import learner_memory
from open_instruct.run.main_memory import NodeLoad, node_bytes
from open_instruct.run.memory_needs import needed_on_gpu

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/start/will_it_fit.md"
BEGIN, END = "<!-- made by scripts/will_it_fit.py -->", "<!-- end of what scripts/will_it_fit.py made -->"
GIB = 2**30
LEFT_FOR_PROGRAMS = 2 * GIB
"""Bytes of a card that the table leaves free: what CUDA and the programs of learner and engine take is not counted."""
CARDS = {
    "16 GB (T4)": 15360,
    "24 GB (A10, 4090)": 23028,
    "40 GB (A100)": 40960,
    "48 GB (L40S)": 46068,
    "80 GB (H100)": 81559,
    "141 GB (H200)": 143771,
}
"""MiB of memory that nvidia-smi shows for a card; of several cards of a size, for the smallest."""


class Shape(NamedTuple):
    """What memory depends on, of a model's config.json."""

    kind: str
    width: int
    inner: int
    layers: int
    heads: int
    key_value_heads: int
    head_size: int
    words: int
    tied: bool

    def config(self) -> dict[str, Any]:
        """The content of `config.json`."""
        return {
            "model_type": self.kind,
            "hidden_size": self.width,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_value_heads,
            "head_dim": self.head_size,
            "vocab_size": self.words,
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": 32768,
        }


SHAPES = {
    "SmolLM2-135M": Shape("llama", 576, 1536, 30, 9, 3, 64, 49152, True),
    "Qwen3-0.6B": Shape("qwen3", 1024, 3072, 28, 16, 8, 128, 151936, True),
    "Llama-3.2-1B": Shape("llama", 2048, 8192, 16, 32, 8, 64, 128256, True),
    "Qwen3-1.7B": Shape("qwen3", 2048, 6144, 28, 16, 8, 128, 151936, True),
    "Llama-3.2-3B": Shape("llama", 3072, 8192, 28, 24, 8, 128, 128256, True),
    "Qwen3-4B": Shape("qwen3", 2560, 9728, 36, 32, 8, 128, 151936, True),
    "Llama-3.1-8B": Shape("llama", 4096, 14336, 32, 32, 8, 128, 128256, False),
    "Qwen3-8B": Shape("qwen3", 4096, 12288, 36, 32, 8, 128, 151936, False),
    "Qwen3-14B": Shape("qwen3", 5120, 17408, 40, 40, 8, 128, 151936, False),
    "Qwen3-32B": Shape("qwen3", 5120, 25600, 64, 64, 8, 128, 151936, False),
}
LARGE = ["Qwen3-4B", "Llama-3.1-8B", "Qwen3-8B", "Qwen3-14B", "Qwen3-32B"]
LENGTHS = {"max_prompt_token_length": 1024, "response_length": 3072, "pack_length": 4096}
COMMON: dict[str, Any] = {
    "dry_run": True,
    "colocate": True,
    "gradient_checkpointing": True,
    "load_ref_policy": False,
    "beta": 0.0,
    **LENGTHS,
}
ONE_GPU: dict[str, Any] = {"deepspeed_stage": 2, "num_gpus": 1}
EIGHT_GPUS: dict[str, Any] = {
    "deepspeed_stage": 3,
    "num_gpus": 8,
    "num_learners_per_node": [8],
    "vllm_num_engines": 2,
    "vllm_tensor_parallel_size": 4,
}
WAYS: dict[str, dict[str, Any]] = {
    "all": {},
    "offload": {"deepspeed_offload_optimizer": True},
    "LoRA": {"use_peft": True},
}


class Needs(NamedTuple):
    """What a run needs, in bytes."""

    on_gpu: int
    """Without the cache of the engine, which takes what is left."""
    in_main_memory: int


def command(shared: dict[str, Any]) -> str:
    """The options of a table as a user writes them."""
    options = {**shared, **COMMON}
    words: list[str] = []
    for name, value in options.items():
        values = value if isinstance(value, list) else [value]
        words.append(f"--{name}" if value is True else f"--{name} {' '.join(map(str, values))}")
    return " ".join(words)


def needs(directory: str, options: dict[str, Any]) -> Needs:
    """What a run needs with the model in `directory`. The cache of the engine has room for one prompt with its response."""
    args = GRPOConfig(
        model_name_or_path=directory, gpu_memory=1.0, **COMMON, **options
    )  # too little: the cache is empty
    learner, engine = learner_memory(args, args.device), engine_memory(args, args.device)
    whole = GRPOConfig(model_name_or_path=directory, gpu_memory=1000.0, **COMMON, **options)
    cache = engine_memory(whole, whole.device)
    of_token = cache.cache / cache.num_cached_tokens
    of_engine = (engine.weights + of_token * args.max_sequence_length) / args.vllm_gpu_memory_utilization
    load = NodeLoad("", args.num_learners, args.num_engine_workers, None, has_first_learner=True)
    return Needs(max(needed_on_gpu(args, learner, engine), int(of_engine)), node_bytes(args, learner, engine, load))


def needs_of(name: str, shared: dict[str, Any]) -> dict[str, Needs]:
    """What each way of training a model needs."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(SHAPES[name].config()))
        return {way: needs(directory, {**shared, **options}) for way, options in WAYS.items()}


def row(name: str, shared: dict[str, Any]) -> str:
    """A row of a table: what each way needs, and for each card the first way that fits."""
    by_way = needs_of(name, shared)
    figures = [f"{need.on_gpu / GIB:.1f} · {need.in_main_memory / GIB:.0f}" for need in by_way.values()]
    return f"| {name} | {' | '.join([*figures, *(_way_on(mib * 2**20, by_way) for mib in CARDS.values())])} |"


def _way_on(card_bytes: int, by_way: dict[str, Needs]) -> str:
    fitting = (way for way, need in by_way.items() if need.on_gpu <= card_bytes - LEFT_FOR_PROGRAMS)
    return next(fitting, "–")


def table(names: Sequence[str], shared: dict[str, Any]) -> Iterator[str]:
    yield f"| model | {' | '.join([*WAYS, *CARDS])} |"
    yield "|" + "---|" * (1 + len(WAYS) + len(CARDS))
    yield from (row(name, shared) for name in names)


def tables() -> str:
    """What stands between the two marks of the page."""
    single, eight = "\n".join(table([*SHAPES], ONE_GPU)), "\n".join(table(LARGE, EIGHT_GPUS))
    return f"""{BEGIN}

**One GPU**, where learner and engine take turns. For each card the first of three ways that fits: *all* trains all weights;
*offload* too, with `--deepspeed_offload_optimizer`; *LoRA* trains adapters, with `--use_peft`. The figures are GiB on the
GPU · GiB of main memory.

{single}

```
{command(ONE_GPU)}
```

**Eight GPUs on one machine**, eight learners at ZeRO 3 and two engines of four GPUs each. GiB on each GPU · GiB of main
memory in all.

{eight}

```
{command(EIGHT_GPUS)}
```

{END}"""


def with_tables(page: str) -> str:
    """The page with new tables."""
    before, _, rest = page.partition(BEGIN)
    return before + tables() + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
