"""The steps of `scripts/gpu_check.sh`: what each runs, how long it may take, and how its outcome is read."""

import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
TINY_MODEL = ROOT / "assets" / "tiny_model"
EASY_SUMS = "reasoning_gym/chain_sum?min_terms=2&max_terms=2&min_digits=2&max_digits=2"
"""What the tiny model can answer now and then. Of tasks that it never gets right it takes prompt after prompt without a step."""
TINY_MIXTURE = "tiny_mixture"
"""A mixture of experts with random weights, which `build_random_model.py` makes."""
SMALL_MODEL = "Qwen/Qwen3-0.6B"
LARGE_MODEL = "Qwen/Qwen3-4B"
LARGEST_DIFFERENCE = {"cuda": 0.05, "cpu": 1e-3}
"""Mean between log-probs of engine and learner: the rounding of bfloat16, and of float32."""
DIFFERENCE = "debug/vllm_vs_local_logprob_diff_mean"
"""A step without a token to train on has none."""
MARK = "OPEN_INSTRUCT_GPU_CHECK"
MIB = 2**20


@dataclass(frozen=True)
class Outcome:
    passed: bool
    figures: str


@dataclass(frozen=True)
class Surroundings:
    """The machine and where results go."""

    output_dir: Path
    kind: str
    device: str
    environment: dict[str, str]
    random_models: bool = False
    """Take random weights for models of the hub."""

    @classmethod
    def find(cls, output_dir: Path, random_models: bool = False) -> "Surroundings":
        import torch

        has_gpu = torch.cuda.is_available()
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": paths, "NCCL_DEBUG": "WARN"}
        environment |= {"VLLM_LOGGING_LEVEL": "INFO", MARK: str(output_dir)}
        if not has_gpu:  # the layout that a GPU would have
            environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "HF_HUB_OFFLINE": "1"}
        output_dir.mkdir(parents=True, exist_ok=True)
        device = torch.cuda.get_device_name() if has_gpu else "a machine without a GPU, in the GPU's layout"
        return cls(output_dir, "cuda" if has_gpu else "cpu", device, environment, random_models)

    @property
    def patience(self) -> int:
        """Times the limits of the steps, which are those of a GPU."""
        return 1 if self.kind == "cuda" else 4

    def ray_logs(self) -> Path:
        """Of the newest session of Ray on this machine."""
        return Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "session_latest" / "logs"

    def processes(self) -> list[psutil.Process]:
        """Everything that the steps have started and that is still there, known by a mark in its environment."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == str(self.output_dir) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Of the training steps; an evaluation before the first has a row too."""
        path = self.output_dir / name / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [row for row in rows if row["training_step"] > 0]


def everywhere(here: Surroundings) -> str:
    return ""


def needs_gpu(here: Surroundings) -> str:
    return "" if here.kind == "cuda" else "needs a GPU, and the hub or --random_models"


def needs_streams(here: Surroundings) -> str:
    return "" if here.kind == "cuda" else "needs a GPU, because CPU has no streams"


@dataclass(frozen=True)
class Step:
    name: str
    what: str
    limit_s: int
    command: Callable[[Surroundings], list[str]]
    judge: Callable[[Surroundings], Outcome]
    meanwhile: Callable[[Surroundings, "subprocess.Popen[bytes]", float], str] | None = None
    """Acts on the run while it goes on; gives a note for the table."""
    left_out: Callable[[Surroundings], str] = field(default=everywhere)
    """Why the step cannot be run here; empty where it can."""
    exit_codes: tuple[int, ...] = (0,)


def training(
    name: str, *options: object, on_gpu: Sequence[object] = (), model: str | Path = TINY_MODEL
) -> Callable[[Surroundings], list[str]]:
    """A run of `single_gpu.sh`, short, with its results under the step's name."""

    def command(here: Surroundings) -> list[str]:
        short: list[object] = ["--model_name_or_path", model, "--output_dir", here.output_dir / name]
        if model in (TINY_MODEL, TINY_MIXTURE):
            short += ["--response_length", 64, "--pack_length", 1024, "--total_episodes", 640]
            short += ["--dataset_mixer_list", f"{EASY_SUMS}&size=8000&seed=7", 1.0]
            short += ["--dataset_mixer_eval_list", f"{EASY_SUMS}&size=64&seed=20240", 1.0]
        short += ["--weight_transport", "shm"] if here.kind == "cpu" else on_gpu
        script = ROOT / "scripts" / "train" / "debug" / "single_gpu.sh"
        words = [str(word) for word in ("bash", script, *short, *options)]
        is_random = model == TINY_MIXTURE or (here.random_models and model != TINY_MODEL)
        return with_random_weights(here, str(model), words) if is_random else words

    return command


def with_random_weights(here: Surroundings, model: str, run: list[str]) -> list[str]:
    """The run with a model of that shape, which is written first. Its answers are all wrong, and trained on nevertheless."""
    directory = str(here.output_dir / "models" / model)
    build = [
        sys.executable,
        str(ROOT / "scripts/data/build_random_model.py"),
        "--like",
        model,
        "--output_dir",
        directory,
    ]
    run = [directory if word == model else word for word in run] + ["--filter_zero_std_samples", "False"]
    return ["bash", "-c", f"{shlex.join(build)} && exec {shlex.join(run)}"]


def trained(name: str, at_least: int) -> Callable[[Surroundings], Outcome]:
    """Whether the run made its steps, and engine and learner agreed in each."""

    def judge(here: Surroundings) -> Outcome:
        rows = here.rows(name)
        if len(rows) < at_least:
            return Outcome(False, f"{len(rows)} steps instead of {at_least}")
        measured = [row[DIFFERENCE] for row in rows if row.get(DIFFERENCE) is not None]
        if not measured:
            return Outcome(False, f"{len(rows)} steps, and in none were log-probs compared")
        difference = max(measured, key=lambda value: (math.isnan(value), value))
        figures = [f"{len(rows)} steps", f"log-prob difference {difference:.1e}", *run_figures(rows)]
        return Outcome(difference < LARGEST_DIFFERENCE[here.kind], ", ".join(figures))

    return judge


def run_figures(rows: list[dict[str, Any]]) -> list[str]:
    """Seconds a step, tokens a second and memory, as far as they were measured."""
    found = []
    for key, text, scale in [
        ("time/total", "{:.1f} s a step", 1),
        ("engines/tokens_per_second", "{:.0f} tokens/s", 1),
        ("memory/learners_offloaded_bytes", "learners gave back {:.0f} MiB", MIB),
        ("memory/engines_offloaded_bytes", "engines gave back {:.0f} MiB", MIB),
        ("memory/learner_bytes_max", "learner held {:.0f} MiB", MIB),
    ]:
        values = [row[key] for row in rows[1:] or rows if row.get(key) is not None]
        if values:
            found.append(text.format(sum(values) / len(values) / scale))
    return found


def machine_command(here: Surroundings) -> list[str]:
    lines = ["uname -a", "gcc --version | head -1", "df -h . /dev/shm", f"{sys.executable} -V"]
    if here.kind == "cuda":
        lines = ["nvidia-smi", *lines, f"PYTHON={sys.executable} bash {ROOT / 'scripts' / 'setup_gpu.sh'} --check"]
    return ["bash", "-c", "set -e; " + "; ".join(lines)]


def judge_machine(here: Surroundings) -> Outcome:
    log = (here.output_dir / "machine.log").read_text()
    found = [f"driver {match[1]}" for match in [re.search(r"Driver Version: (\S+)", log)] if match]
    return Outcome(True, ", ".join([*found, f"{os.cpu_count()} cores", f"{psutil.virtual_memory().total >> 30} GiB"]))


IMPORTS = """
import time; start = time.monotonic()
import torch, ray, deepspeed, transformers, vllm
if torch.cuda.is_available():
    import cuda.core, cutlass
    from cuda.bindings import nvml
print(f"torch {torch.__version__}, vllm {vllm.__version__}, deepspeed {deepspeed.__version__}, {time.monotonic() - start:.0f} s")
"""


def last_line(name: str) -> Callable[[Surroundings], Outcome]:
    def judge(here: Surroundings) -> Outcome:
        return Outcome(True, (here.output_dir / f"{name}.log").read_text().strip().splitlines()[-1].strip("= "))

    return judge


STREAM = """
import torch
from vllm.utils.torch_utils import current_stream
from open_instruct.device import current_device
current_device(kind="cuda").keep_current_stream()
assert current_stream() == torch.cuda.default_stream(), "vLLM has made a stream of its own"
assert torch.cuda.current_stream() == torch.cuda.default_stream(), "vLLM has made another stream current"
print("a learner stays on the default stream")
"""
FUSION = """
import shutil, subprocess, time; start = time.monotonic()
from vllm.utils.flashinfer import has_flashinfer
is_there = has_flashinfer()
if is_there:
    import flashinfer.comm
compiler = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout if shutil.which(compiler) else ""
nvcc = "nvcc " + version.rpartition("release ")[2].partition(",")[0] if version else "no nvcc"
fused = "on: FlashInfer compiles it at the first start" if is_there else "off"
print(f"all-reduce fusion of tensor parallelism {fused}; {nvcc}; imported in {time.monotonic() - start:.0f} s")
"""


def python(code: str) -> Callable[[Surroundings], list[str]]:
    return lambda here: [sys.executable, "-c", code]


def tests_command(here: Surroundings) -> list[str]:
    names = ["test_device.py", "learners/test_on_gpu.py", "learners/test_logprobs.py", "algorithms"]
    return [sys.executable, "-m", "pytest", "-q", "-m", "gpu or not slow", *(f"tests/{name}" for name in names)]


def wait_for_rows(here: Surroundings, name: str, num: int, process: "subprocess.Popen[bytes]", deadline: float) -> None:
    while len(here.rows(name)) < num:
        if process.poll() is not None:
            raise RuntimeError(f"the run ended with exit code {process.returncode} before step {num}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"step {num} was not reached")
        time.sleep(0.5)


def gpu_memory_used() -> str:
    if not shutil.which("nvidia-smi"):
        return ""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, timeout=30, check=False).stdout.strip().splitlines()[0]


def engine_processes(here: Surroundings) -> list[psutil.Process]:
    """The engine's core and the actor that started it, of this run and no other."""
    cores = [process for process in here.processes() if "EngineCore" in title(process)]
    return [actor for core in cores if (actor := core.parent()) is not None] + cores


def title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def kill_engine(here: Surroundings, process: "subprocess.Popen[bytes]", deadline: float) -> str:
    """Kill the engine's actor while the run goes on; its core has to go as well, and a new engine has to come."""
    wait_for_rows(here, "engine_killed", 2, process, deadline)
    before = gpu_memory_used()
    victims = engine_processes(here)
    if len(victims) < 2:
        raise RuntimeError("found no engine of this run")
    start, steps = time.monotonic(), len(here.rows("engine_killed"))
    victims[0].send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(victims, timeout=30)
    if alive:
        raise RuntimeError(f"an engine core outlived its actor: {[left.pid for left in alive]}")
    gone_s = time.monotonic() - start
    memory = f", GPU memory {before} before, {gpu_memory_used()} after" if before else ""
    wait_for_rows(here, "engine_killed", steps + 2, process, deadline)
    back_s = time.monotonic() - start
    process.send_signal(signal.SIGTERM)
    return f"core gone after {gone_s:.1f} s, two more steps after {back_s:.0f} s{memory}"


def twice(command: Callable[[Surroundings], list[str]]) -> Callable[[Surroundings], list[str]]:
    """The same run up to step 3, and again up to step 6."""

    def both(here: Surroundings) -> list[str]:
        words = " ".join(map(shlex.quote, command(here)))
        return ["bash", "-c", f"{words} --total_episodes 384 && {words} --total_episodes 768"]

    return both


def judge_resumed(here: Surroundings) -> Outcome:
    steps = [row["training_step"] for row in here.rows("resume")]
    outcome = trained("resume", 6)(here)
    return Outcome(outcome.passed and steps == [1, 2, 3, 4, 5, 6], outcome.figures)


AHEAD = ["--colocate", "False", "--async_steps", 1]
BOTH_IN_MEMORY = ["--single_gpu_mode", "--vllm_gpu_memory_utilization", 0.3]
LONG = ["--response_length", 2048, "--pack_length", 8192, "--max_prompt_token_length", 512, "--total_episodes", 384]
NO_EVALUATION = ["--dataset_mixer_eval_list", "--eval_on_step_0", "False", "--local_eval_every", -1]
LEVEL_2 = ["--engine_sleep_level", 2]

STEPS = [
    Step("machine", "driver, compiler, room", 30, machine_command, judge_machine),
    Step("imports", "the stack imports", 180, python(IMPORTS), last_line("imports")),
    Step(
        *("stream", "vLLM leaves a learner on its stream when it joins a group over NCCL", 60),
        *(python(STREAM), last_line("stream")),
        left_out=needs_streams,
    ),
    Step(
        *("fusion", "whether vLLM would compile FlashInfer's all-reduce for tensor parallelism, and with what", 120),
        *(python(FUSION), last_line("fusion")),
    ),
    Step(
        "tests",
        "tests of device, log-probs and loss, and of learners on the GPU",
        300,
        tests_command,
        last_line("tests"),
    ),
    Step(
        *("first_run", "tiny model: start, sleep and wake, weights, steps, saving", 300),
        *(training("first_run"), trained("first_run", 5)),
    ),
    Step(
        *("small_model", f"{SMALL_MODEL} in bfloat16 with CUDA graphs", 420),
        training(
            "small_model", "--total_episodes", 1280, *NO_EVALUATION, "--vllm_enforce_eager", "False", model=SMALL_MODEL
        ),
        trained("small_model", 10),
        left_out=needs_gpu,
    ),
    Step(
        *("in_flight", "tiny model: weights arrive while requests are under way", 300),
        *(training("in_flight", *AHEAD, on_gpu=BOTH_IN_MEMORY), trained("in_flight", 5)),
    ),
    Step(
        *("zero_2", "tiny model: ZeRO 2, engine sleeps at level 2", 200),
        *(training("zero_2", "--deepspeed_stage", 2, *LEVEL_2, *NO_EVALUATION), trained("zero_2", 5)),
    ),
    Step(
        *("zero_3", "tiny model: ZeRO 3, engine sleeps at level 2", 200),
        *(training("zero_3", "--deepspeed_stage", 3, *LEVEL_2, *NO_EVALUATION), trained("zero_3", 5)),
    ),
    Step(
        *("mixture", "tiny mixture of experts: ZeRO 2, engine sleeps at level 2", 200),
        training("mixture", "--deepspeed_stage", 2, *LEVEL_2, *NO_EVALUATION, model=TINY_MIXTURE),
        trained("mixture", 5),
    ),
    Step(
        *("lora", "tiny model: an adapter is trained, the engine gets merged weights", 200),
        *(training("lora", "--use_peft", "--learning_rate", 1e-4, *NO_EVALUATION), trained("lora", 5)),
    ),
    Step(
        *("compiled", "tiny model: the learner's layers are compiled", 200),
        *(training("compiled", "--compile_model", *NO_EVALUATION), trained("compiled", 5)),
    ),
    Step(
        *("engine_killed", "tiny model: kill -9 of the engine; a new one comes, memory is freed", 300),
        training("engine_killed", "--total_episodes", 12800, *NO_EVALUATION),
        trained("engine_killed", 4),
        meanwhile=kill_engine,
        exit_codes=(0, 85),
    ),
    Step(
        *("resume", "tiny model: a run of 3 steps goes on to 6 from its checkpoint", 300),
        *(twice(training("resume", "--checkpoint_state_freq", 3, *NO_EVALUATION)), judge_resumed),
    ),
    Step(
        *("large_model", f"{LARGE_MODEL}: memory and speed of long responses", 400),
        training("large_model", "--deepspeed_stage", 2, *LONG, *NO_EVALUATION, model=LARGE_MODEL),
        trained("large_model", 3),
        left_out=needs_gpu,
    ),
]
