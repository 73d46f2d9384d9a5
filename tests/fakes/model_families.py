"""Which families of models are trained exactly: engine and learner compared after weights have changed.

    python tests/fakes/model_families.py                     # every family: about 5 minutes on 2 quiet cores
    python tests/fakes/model_families.py --families qwen3_moe --seeds 1 2 3

For each family a random model of about 0.4 M parameters is written to disk. A real engine (`LLMRayActor` around vLLM, in this
process) loads it; the learner's side is `LogProbModel` with `DeepSpeedWeightSource`. Three times all weights change and go to the
engine through its update calls; then the engine samples, the learner scores the same tokens, and the largest difference of their
log-probs is taken. One line of JSON per family.
"""

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

VOCABULARY = 384
NUM_UPDATES = 3
EXACT = 1e-5
"""Largest difference of log-probs, in float32, of a family that counts as exact."""
LIMIT_S = 380.0
"""Deadline of one family."""
TESTS = Path(__file__).parents[1]

_DENSE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}
_MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_ALTERNATING = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32},
    "mistral": {"head_dim": 32, "sliding_window": 16},
    "olmo2": {},
    "olmo3": _ALTERNATING,
    "phi3": {},
    "gemma3_text": {"head_dim": 32, "query_pre_attn_scalar": 32, "tie_word_embeddings": True, **_ALTERNATING},
    "smollm3": {"no_rope_layers": [1, 0]},
    "qwen3_moe": {"head_dim": 32, **_MOE},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4, "intermediate_size": 64},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64, "head_dim": 32},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 32,
        "intermediate_size": 64,
        **_ALTERNATING,
    },
    "deepseek_v3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    },
    "granite": {"logits_scaling": 4.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5},
    "granitemoe": {"logits_scaling": 4.0, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64},
    "cohere": {"logit_scale": 0.25, "tie_word_embeddings": True},
    "cohere2": {
        "logit_scale": 0.25,
        "tie_word_embeddings": True,
        "head_dim": 32,
        **_ALTERNATING,
        "sliding_window": 128,  # beyond it the family is refused
    },
    "gemma2": {
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "final_logit_softcapping": 5.0,
        "attn_logit_softcapping": None,
        "tie_word_embeddings": True,
        **_ALTERNATING,
    },
    "falcon_h1": {},
    "glm4": {"head_dim": 32},
    "glm4_moe": {"head_dim": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "qwen2_moe": {**_MOE, "shared_expert_intermediate_size": 64},
    "starcoder2": {},
    "exaone4": {"head_dim": 32, **_ALTERNATING},
    "seed_oss": {"head_dim": 32},
    "ernie4_5": {"head_dim": 32},
    "phi": {},
}


@dataclass(frozen=True)
class Outcome:
    """What became of one family."""

    family: str
    status: str
    """`exact`, `refused` before anything starts, or `differs`."""
    largest_difference: float | None = None
    mean_difference: float | None = None
    """Over the tokens after one update; the largest of all updates."""
    reason: str = ""
    misfits: str = ""
    """What the engine said before of updates with wrong or missing tensors."""


def family_config(family: str) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(family, **{**_DENSE, **FAMILIES[family]})


def build_model(family: str, directory: str | Path, *, seed: int = 0) -> None:
    """Write a random model of the family, with the tiny model's tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(family_config(family), dtype=torch.float32)
    change(model, seed=seed)
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(TESTS.parent / "assets" / "tiny_model").save_pretrained(directory)


def change(module: Any, *, seed: int, size: float = 0.02) -> None:
    """As if it had been trained: every weight moves, and every buffer of numbers that a checkpoint holds."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in module.state_dict(keep_vars=True).items():
            if tensor.is_floating_point():
                noise = size * torch.randn(tensor.shape, generator=generator)
                tensor += noise.abs() if "correction_bias" in name else noise


class LearnerSide:
    """The learner's part, in a process of its own: in an engine's process vLLM changes some classes of Transformers."""

    def __init__(self, directory: str, dtype: str) -> None:
        fork = multiprocessing.get_context("fork")
        self._pipe, end = fork.Pipe()
        self._process = fork.Process(target=_serve_learner, args=(end, self._pipe, directory, dtype), daemon=True)
        self._process.start()

    def ask(self, method: str, *arguments: Any) -> Any:
        self._pipe.send((method, arguments))
        if not self._pipe.poll(LIMIT_S):
            raise TimeoutError(f"the learner did not answer {method} within {LIMIT_S:g} s")
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer


def _serve_learner(pipe: Any, other_end: Any, directory: str, dtype: str) -> None:
    other_end.close()  # else the end of the other process would go unnoticed
    import torch
    from transformers import AutoModelForCausalLM

    from open_instruct.learners.logprobs import LogProbModel
    from open_instruct.learners.weight_sync import DeepSpeedWeightSource, pack_buckets

    module = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
    model = LogProbModel(module)
    source = DeepSpeedWeightSource(module, zero_stage=0)

    def pack(weights: Any) -> list[dict[str, Any]]:
        return list(pack_buckets(iter(weights), max_bytes=2**18))

    def logprobs(ids_T: np.ndarray) -> np.ndarray:
        ids = torch.from_numpy(ids_T).long()[None]
        with torch.no_grad():
            return model(ids, torch.arange(ids.shape[1])[None], 1.0)[0][0].numpy()

    methods: dict[str, Callable] = {
        "change": lambda seed: change(module, seed=seed),
        "buckets": lambda: pack(source),
        "buckets_under_names_of_the_module": lambda: pack(module.named_parameters()),
        "buckets_without_one": lambda: pack(list(source)[:3] + list(source)[4:]),
        "logprobs": logprobs,
    }
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(methods[method](*arguments))
        except Exception as error:
            pipe.send(RuntimeError(f"{method}: {error!r}"))


@dataclass
class Pair:
    """An engine in this process, and the same model on the learner's side."""

    engine: Any
    learner: LearnerSide

    def send(self, version: int, what: str = "buckets") -> None:
        self.engine.start_weight_update(version)
        for bucket in self.learner.ask(what):
            self.engine.update_weights(bucket, version)
        self.engine.finish_weight_update(version, version)

    def differences(self, *, seed: int, num_tokens: int = 24) -> np.ndarray:
        """(R,) between the log-probs of engine and learner, over tokens that the engine samples."""
        from open_instruct.data_types import SamplingConfig

        random = np.random.default_rng(seed)
        prompts = [random.integers(3, VOCABULARY, size=5 + 7 * n).astype(np.int32) for n in range(4)]
        config = SamplingConfig(max_tokens=num_tokens, n=2, seed=seed, ignore_eos=True)
        found = []
        for prompt, result in zip(prompts, self.engine.generate_with_single_engine(prompts, config), strict=True):
            for response, logprobs in zip(result.responses, result.logprobs, strict=True):
                ours = self.learner.ask("logprobs", np.concatenate([prompt, response]))
                found.append(np.abs(ours[len(prompt) - 1 :] - logprobs))
        return np.concatenate(found)


def make_pair(directory: str, dtype: str) -> Pair:
    sys.path.insert(0, str(TESTS))
    learner = LearnerSide(directory, dtype)  # before vLLM is imported: the process is forked
    from conftest import MAX_MODEL_LEN, make_args

    from open_instruct.run.rollout_manager import engine_options
    from open_instruct.vllm_utils3 import LLMRayActor

    args = make_args(model_name_or_path=directory, model_dtype=dtype)
    options = engine_options(args, args.device, seed=1, max_model_len=MAX_MODEL_LEN)
    return Pair(LLMRayActor(0, options, None, None), learner)  # type: ignore[arg-type]


def mistakes(directory: str) -> list[str]:
    """What a run would say of this model before anything starts."""
    sys.path.insert(0, str(TESTS))
    from conftest import make_args

    from open_instruct.config.checks import collect_mistakes

    return [mistake for mistake in collect_mistakes(make_args(model_name_or_path=directory)) if "model" in mistake]


def differences(pair: Pair, seeds: list[int]) -> Iterator[np.ndarray]:
    for seed in seeds:
        for number in range(NUM_UPDATES):
            pair.learner.ask("change", 100 * seed + number)
            pair.send(100 * seed + number)
            yield pair.differences(seed=seed)


def misfits(pair: Pair) -> str:
    """What the engine says of an update without one tensor, and of weights under other names."""
    said = []
    for version, what in enumerate(["buckets_without_one", "buckets_under_names_of_the_module"]):
        try:
            pair.send(version, what)
        except Exception as error:
            said.append(f"{what}: {error}")
    return "\n".join(said)


def check(family: str, seeds: list[int], dtype: str = "float32") -> Outcome:
    """One family, in this process."""
    with tempfile.TemporaryDirectory() as directory:
        build_model(family, directory)
        if found := mistakes(directory):
            return Outcome(family, "refused", reason=found[0].replace(directory, "MODEL"))
        pair = make_pair(directory, dtype)
        said = misfits(pair)
        found = list(differences(pair, seeds))
    largest = float(max(one.max() for one in found))
    mean = float(max(one.mean() for one in found))
    return Outcome(family, "exact" if largest < EXACT else "differs", largest, mean, misfits=said)


def check_in_process_of_its_own(family: str, seeds: list[int]) -> Outcome:
    """vLLM gives its memory back only when its process ends."""
    return next(_run_here([family], seeds))


def _run_here(families: list[str], seeds: list[int]) -> Iterator[Outcome]:
    command = [sys.executable, __file__, "--families", *families, "--seeds", *map(str, seeds)]
    env = {**os.environ, "PYTHONPATH": str(TESTS.parent), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S * len(families))
    assert done.returncode == 0, done.stderr[-2000:]
    yield from (Outcome(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith('{"family"'))


def _check_in_fork(family: str, seeds: list[int], dtype: str) -> Outcome:
    fork = multiprocessing.get_context("fork")
    pipe, end = fork.Pipe()
    process = fork.Process(target=_check_and_send, args=(end, family, seeds, dtype))
    process.start()
    outcome = Outcome(family, "failed", reason=f"not done in {LIMIT_S:g} s")
    if pipe.poll(LIMIT_S):
        outcome = pipe.recv()
    process.kill()
    process.join(10.0)
    return outcome


def _check_and_send(pipe: Any, family: str, seeds: list[int], dtype: str) -> None:
    try:
        outcome = check(family, seeds, dtype)
    except BaseException as error:
        traceback.print_exc()
        outcome = Outcome(family, "failed", reason=f"{type(error).__name__}: {error}"[:600])
    pipe.send(outcome)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--dtype", default="float32", help="bfloat16 differs by rounding")
    options = parser.parse_args()
    import transformers  # noqa: F401
    import vllm  # noqa: F401  # once, before the forks: it takes as long as a family

    for family in options.families:
        print(json.dumps(vars(_check_in_fork(family, options.seeds, options.dtype))), flush=True)


if __name__ == "__main__":
    main()
