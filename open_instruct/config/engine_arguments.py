"""`--vllm_engine_args`: arguments of vLLM's engines that this project has no option for."""

import ast
import difflib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from open_instruct.config.grpo_config import GRPOConfig, enforces_eager

OPTION = "--vllm_engine_args"
SET_BY: dict[str, str] = {
    "model": "--model_name_or_path sets it",
    "revision": "--model_revision sets it",
    "tokenizer": "--tokenizer_name_or_path sets it",
    "tokenizer_revision": "--tokenizer_revision sets it",
    "trust_remote_code": "--trust_remote_code sets it",
    "dtype": "--model_dtype sets it",
    "max_model_len": "--max_prompt_token_length and --response_length set it",
    "max_num_seqs": "--vllm_max_num_seqs sets it",
    "tensor_parallel_size": "--vllm_tensor_parallel_size sets it",
    "gpu_memory_utilization": "--vllm_gpu_memory_utilization sets it",
    "enforce_eager": "--vllm_enforce_eager sets it",
    "enable_prefix_caching": "--vllm_enable_prefix_caching sets it",
    "enable_sleep_mode": "--colocate and --engine_sleep_after_s set it",
    "weight_transfer_config": "--weight_transport sets it",
    "seed": "--seed sets it",
    "logprobs_mode": "training needs the log-probs of the distribution that was sampled",
    "generation_config": "only a run's options say how to sample",
    "distributed_executor_backend": "it follows from the device",
    "worker_extension_cls": "the workers' part of weight updates is there",
    "disable_log_stats": "the run has metrics of its own",
    "data_parallel_size": "--vllm_num_engines sets the number of engines",
    "pipeline_parallel_size": "weight updates reach one stage alone; --vllm_tensor_parallel_size divides a model",
    "hf_token": "options are written to files; set HF_TOKEN in the environment",
}
"""vLLM's arguments that a run sets, or must not have, with the reason."""
CHANGES_SAMPLES = (
    *("kv_cache_dtype", "quantization", "quantization_config", "hf_overrides", "hf_config_path"),
    *(
        "config_format",
        "load_format",
        "model_impl",
        "disable_sliding_window",
        "logits_processors",
        "speculative_config",
    ),
)
"""Arguments that change which text an engine samples; a resumed run needs the same. The others change speed and memory."""


def engine_arguments_are_free(args: GRPOConfig) -> Iterator[str]:
    """A rule of `checks.py`."""
    arguments = _known_arguments()
    set_by_device = args.device.engine_kwargs(
        max_model_len=args.max_sequence_length, gpu_memory_utilization=1.0, enforce_eager=enforces_eager(args)
    )
    for name in args.vllm_engine_args:
        if name in SET_BY:
            yield f"{OPTION} {name}: it cannot be given here, because {SET_BY[name]}. Leave it out."
        elif name in set_by_device:
            where = "CPU" if args.device.kind == "cpu" else "GPU"
            yield f"{OPTION} {name}: it cannot be given here, because on {where} it follows from the device. Leave it out."
        elif arguments is not None and name not in arguments:
            near = difflib.get_close_matches(name.replace("-", "_"), arguments, n=1)
            cure = f"Did you mean {near[0]}?" if near else "They are the fields of vllm.EngineArgs."
            yield f"{OPTION} {name}: vLLM's engine has no such argument. {cure}"


def arguments_that_change_samples(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that belong to a run's identity."""
    return {name: value for name, value in arguments.items() if name in CHANGES_SAMPLES}


@cache
def _known_arguments() -> frozenset[str] | None:
    """The names of vLLM's arguments, read from its source, because importing vLLM takes seconds. None without vLLM."""
    package = find_spec("vllm")
    path = Path(package.origin if package and package.origin else "").parent / "engine/arg_utils.py"
    if not path.is_file():
        return None
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs":
            fields = [part.target for part in node.body if isinstance(part, ast.AnnAssign)]
            return frozenset(field.id for field in fields if isinstance(field, ast.Name))
    return None
