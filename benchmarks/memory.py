"""What `--dry_run` says that learners and engines need, and what they take in a real run on CPU, for three sizes of a model.

    python benchmarks/memory.py                       # about 6 minutes on two cores
    python benchmarks/memory.py --options --use_peft  # further options of every run

Each run makes two training steps from a random model of Qwen3's family. Taken is the most memory of its own (RssAnon) that the
learner's process and the engine's had. Of an engine's key-value cache only what was written to is resident, so the cache is left
out of what is said.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.report import print_table, write_json  # noqa: E402

SIZES = {"23 M": (512, 6), "70 M": (768, 9), "185 M": (1024, 14)}
"""Hidden units and layers."""
SUMS = "reasoning_gym/chain_sum?min_terms=2&max_terms=2&min_digits=2&max_digits=2&size=200&seed=7"
POLL_S = 0.1
LIMIT_S = 600.0


def build_model(directory: Path, hidden: int, layers: int) -> None:
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "assets/tiny_model")
    config = Qwen3Config(
        vocab_size=8192,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        head_dim=64,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def options_of_run(model: Path, output: Path, further: list[str]) -> list[str]:
    words = ["--model_name_or_path", str(model), "--dataset_mixer_list", SUMS, "1.0", "--output_dir", str(output)]
    words += ["--num_unique_prompts_rollout", "4", "--num_samples_per_prompt_rollout", "4", "--total_episodes", "32"]
    words += ["--max_prompt_token_length", "64", "--response_length", "192", "--pack_length", "1024"]
    words += ["--filter_zero_std_samples", "False", "--vllm_enforce_eager", "--save_freq", "-1"]
    return [*words, "--checkpoint_state_freq", "-1", "--async_steps", "0", "--beta", "0.01", *further]


def taken(words: list[str]) -> dict[str, int]:
    """The most bytes resident in a learner and in an engine."""
    most = {"PolicyTrainerRayProcess": 0, "LLMRayActor": 0}
    with subprocess.Popen(
        [sys.executable, str(ROOT / "open_instruct/grpo_fast.py"), *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as run:
        started = time.monotonic()
        while run.poll() is None:
            if time.monotonic() - started > LIMIT_S:
                run.kill()
                sys.exit(f"a run took more than {LIMIT_S:.0f} s")
            for process in psutil.process_iter(["cmdline"]):
                title = " ".join(process.info["cmdline"] or [])
                for name in most:
                    if name in title:
                        most[name] = max(most[name], own_bytes(process.pid))
            time.sleep(POLL_S)
    if run.returncode:
        sys.exit(f"a run ended with exit code {run.returncode}: {' '.join(words)}")
    return most


def own_bytes(pid: int) -> int:
    """Resident memory that is not shared with other processes, as files and Ray's object store are."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return 0
    [line] = [line for line in status.splitlines() if line.startswith("RssAnon")] or ["RssAnon: 0 kB"]
    return int(line.split()[1]) * 1024


def row(size: str, further: list[str]) -> dict[str, Any]:
    from open_instruct import grpo_fast
    from open_instruct.engines.engine_memory import engine_memory
    from open_instruct.learners.memory_estimate import learner_memory

    with tempfile.TemporaryDirectory() as directory:
        model, output = Path(directory, "model"), Path(directory, "run")
        build_model(model, *SIZES[size])
        words = options_of_run(model, output, further)
        args, _ = grpo_fast.read_options_and_data(words)
        learner, engine = learner_memory(args, args.device), engine_memory(args, args.device)
        most = taken(words)
    said = {"learner": learner.total, "engine": engine.total - engine.cache}
    really = {"learner": most["PolicyTrainerRayProcess"], "engine": most["LLMRayActor"]}
    found: dict[str, Any] = {"model": size}
    for part in said:
        found |= {
            f"{part}_said_mib": said[part] / 2**20,
            f"{part}_taken_mib": really[part] / 2**20,
            f"{part}_said/taken": said[part] / really[part],
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--json", help="file for the table")
    parser.add_argument("--options", nargs=argparse.REMAINDER, default=[], help="further options of every run")
    args = parser.parse_args()
    table = [row(size, args.options) for size in args.sizes]
    print_table(table)
    write_json(args.json, table)


if __name__ == "__main__":
    main()
