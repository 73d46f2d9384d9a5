"""What it costs to move a prompt through the system, apart from generating and training: queues, ledger, controller, driver.

    python benchmarks/control_plane_scaling.py rules                      ledger and PromptFlow alone, 10^3 to 10^6 prompts
    python benchmarks/control_plane_scaling.py idle                       what 1 to 256 engines cost that wait for prompts
    python benchmarks/control_plane_scaling.py engines                    the whole chain, 1 to 256 fake engines
    python benchmarks/control_plane_scaling.py step_size                  the whole chain, 32 to 2048 prompts in a step
    python benchmarks/control_plane_scaling.py engines --json out/e.json --num_rounds 3
    python benchmarks/control_plane_scaling.py plot out/*.json --out docs/images/control_plane_scaling.png

The chain is a run of the real loop: real queues, controller, verifiers, message queue, files and driver; engines and learner
answer at once (`fake_parts.py`). CPU time is that of each process over steps in the middle of the run, per prompt;
`prompts_per_s` is over wall time. Each run of the chain is a process of its own; rounds go through all sizes in turns; figures
are medians over rounds, with the smallest and the largest.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.report import print_table, write_json
from open_instruct.rollouts.prompt_ledger import CONSUMED, PromptLedger
from open_instruct.rollouts.staleness import FlowOptions, PromptFlow

ROOT = Path(__file__).resolve().parents[1]
NUM_WARM_UP = 2
"""Steps."""
STALENESS = 1
RUN_S = 900.0
IDLE_WARM_UP_S, IDLE_S = 3.0, 8.0

# --- ledger and flow alone --------------------------------------------------------------------------------------------


def rules_cost(num_prompts: int, prompts_per_step: int, staleness: int = STALENESS) -> float:
    """Microseconds per prompt of all calls that the controller makes for it, from issue to fate."""
    num_steps = -(-num_prompts // prompts_per_step)
    options = FlowOptions(prompts_per_step, num_steps, staleness, staleness)
    flow = PromptFlow(options, PromptLedger())
    rng = random.Random(0)
    out: list[str] = []
    started = time.perf_counter()
    while flow.assembling <= num_steps:
        while (prompt := flow.next_prompt()) is not None:
            out.append(prompt.prompt_id)
        _arrive_in_any_order(flow, out, rng)
    spent = time.perf_counter() - started
    assert flow.ledger.fates[CONSUMED] == num_steps * prompts_per_step
    return 1e6 * spent / (num_steps * prompts_per_step)


def _arrive_in_any_order(flow: PromptFlow, out: list[str], rng: random.Random) -> None:
    """Until a step is complete and trained; then more may be issued."""
    rng.shuffle(out)
    step = flow.assembling
    while flow.assembling == step:
        prompt_id = out.pop()
        assert flow.waits_for(prompt_id)
        flow.arrive(prompt_id, oldest_version=flow.version, newest_version=flow.version)
        for assignment in flow.assign():
            flow.ledger.stage(assignment.prompt.prompt_id, CONSUMED, step)
        if flow.step_is_full:
            flow.close_step()
    flow.ledger.commit(step)
    flow.set_version(step)


def measure_rules(args: argparse.Namespace) -> list[dict[str, Any]]:
    sizes = [(num, 128) for num in (1_000, 10_000, 100_000, 1_000_000)] + [(100_000, n) for n in (1024, 8192, 65_536)]
    return [
        {
            "prompts": num_prompts,
            "prompts_per_step": per_step,
            **spread("us_per_prompt", [rules_cost(num_prompts, per_step) for _ in range(args.num_rounds)]),
        }
        for num_prompts, per_step in sizes
    ]


# --- engines that wait for prompts -----------------------------------------------------------------------------------


def idle_cost(num_engines: int) -> dict[str, float]:
    """CPU seconds per second of the prompt queue and of the engines, while there is nothing to generate."""
    import ray
    from ray.util.queue import Queue

    from benchmarks.cpu_account import cpu_seconds_of
    from benchmarks.fake_parts import start_fake_engines

    queue = Queue(actor_options={"num_cpus": 0})
    engines = start_fake_engines(num_engines, (queue, queue))
    serving = [engine.process_queue_continuously.remote() for engine in engines]
    actors = {"prompt_queue": [queue.actor], "engines": sorted(set(engines), key=str)}
    time.sleep(IDLE_WARM_UP_S)
    before, started = {name: cpu_seconds_of(own) for name, own in actors.items()}, time.perf_counter()
    time.sleep(IDLE_S)
    seconds = time.perf_counter() - started
    shares = {f"{name}_cpu_share": (cpu_seconds_of(own) - before[name]) / seconds for name, own in actors.items()}
    for engine in set(engines):
        engine.stop.remote()
    ray.wait(serving, num_returns=len(serving), timeout=30.0)
    for actor in [*set(engines), queue.actor]:
        ray.kill(actor)
    return shares


def measure_idle(args: argparse.Namespace) -> list[dict[str, Any]]:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    rounds = [[idle_cost(engines) for engines in args.engines] for _ in range(args.num_rounds)]
    ray.shutdown()
    rows: list[dict[str, Any]] = []
    for engines, *runs in zip(args.engines, *rounds, strict=True):
        rows.append({"engines": engines})
        for name in runs[0]:
            rows[-1] |= spread(name, [run[name] for run in runs])
    return rows


# --- the whole chain --------------------------------------------------------------------------------------------------


def num_measured(args: argparse.Namespace, per_step: int) -> int:
    return max(args.min_steps, -(-args.num_prompts // per_step))


def options(args: argparse.Namespace, per_step: int, directory: Path) -> list[str]:
    num_steps = NUM_WARM_UP + num_measured(args, per_step) + args.async_steps + 1
    values = {
        "model_name_or_path": ROOT / "assets" / "tiny_model",
        "num_unique_prompts_rollout": per_step,
        "num_samples_per_prompt_rollout": args.num_samples,
        "response_length": args.response_length,
        "max_prompt_token_length": 64,
        "pack_length": max(2048, 2 * args.response_length),
        "total_episodes": per_step * args.num_samples * num_steps,
        "async_steps": args.async_steps,
        "filter_zero_std_samples": False,
        "beta": 0.0,
        "load_ref_policy": False,
        "checkpoint_state_freq": -1,
        "save_freq": -1,
        "output_dir": directory / "out",
    }
    data = directory / "data.jsonl"
    row = {"messages": [{"role": "user", "content": "1 + 1 ="}], "ground_truth": "2", "dataset": "string_matcher"}
    data.write_text("".join(json.dumps(row) + "\n" for _ in range(64)))
    return [
        *(word for name, value in values.items() for word in (f"--{name}", str(value))),
        "--dataset_mixer_list",
        str(data),
        "1.0",
    ]


def one_run(num_engines: int, num_steps: int, report: str, words: list[str]) -> int:
    """In a process of its own: the loop of both programs around fake engines; what each process used goes to `report`."""
    from benchmarks.cpu_account import accounting_trainer
    from benchmarks.fake_parts import faked_parts
    from open_instruct import grpo_fast

    args, inputs = grpo_fast.read_options_and_data(words)
    args = replace(args, vllm_num_engines=num_engines)  # real ones would not fit on this machine, which is checked
    with faked_parts():
        trainer = accounting_trainer(NUM_WARM_UP + 1, num_steps, Path(report))
        return grpo_fast.run(args, inputs, grpo_fast.Roles(trainer=trainer))


def run_chain(args: argparse.Namespace, num_engines: int, per_step: int) -> dict[str, float]:
    """Milliseconds of CPU per prompt by process, prompts per second, and the driver's time per step."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        report = directory / "cpu.json"
        words = [str(num_engines), str(num_measured(args, per_step)), str(report), *options(args, per_step, directory)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, __file__, "--one", *words]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=RUN_S, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"the run failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        used = json.loads(report.read_text())
        lines = (directory / "out" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines][NUM_WARM_UP : NUM_WARM_UP + used["steps"]]
    prompts = used["steps"] * per_step
    waits = ("time/trainer_waiting_for_data", "time/learners", "time/weight_sync")
    own_s = statistics.fmean(row["time/total"] - sum(row.get(name, 0.0) for name in waits) for row in rows)
    return {
        "prompts_per_s": prompts / used["wall_s"],
        **{f"{name}_ms": 1e3 * seconds / prompts for name, seconds in used["cpu_s"].items()},
        "driver_cpu_ms_per_step": 1e3 * used["cpu_s"]["driver"] / used["steps"],
        "driver_own_ms_per_step": 1e3 * own_s,
        "weight_sync_ms_per_step": 1e3 * statistics.fmean(row["time/weight_sync"] for row in rows),
    }


def measure_chain(args: argparse.Namespace, sizes: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """A round takes minutes: what is known so far is written after each."""
    found: dict[tuple[int, int], list[dict[str, float]]] = {size: [] for size in sizes}
    for number in range(args.num_rounds):
        for engines, per_step in sizes:
            found[engines, per_step].append(run_chain(args, engines, per_step))
            rate = found[engines, per_step][-1]["prompts_per_s"]
            print(f"round {number + 1}, {engines} engines, {per_step} a step: {rate:.0f} prompts/s", file=sys.stderr)
        write_json(args.json, chain_rows(found))
    return chain_rows(found)


def chain_rows(found: dict[tuple[int, int], list[dict[str, float]]]) -> list[dict[str, Any]]:
    rows = []
    for (engines, per_step), runs in found.items():
        row: dict[str, Any] = {"engines": engines, "prompts_per_step": per_step}
        for name in runs[0]:
            row |= spread(name, [run[name] for run in runs])
        rows.append(row)
    return rows


def measure_engines(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Four prompts per engine and step, and no fewer than 64 a step."""
    return measure_chain(args, [(engines, max(64, 4 * engines)) for engines in args.engines])


def measure_step_size(args: argparse.Namespace) -> list[dict[str, Any]]:
    return measure_chain(args, [(16, per_step) for per_step in args.step_sizes])


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    return {name: statistics.median(values), f"{name}_min": min(values), f"{name}_max": max(values)}


# --- plot -------------------------------------------------------------------------------------------------------------

PROCESSES = ("controller", "prompt_queue", "results_queue", "message_queue", "verifiers", "driver", "ray")


def plot(paths: Sequence[str], out: str) -> None:
    """CPU per prompt by process, against engines and against the size of a step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, path in zip(figure.subplots(1, len(paths), squeeze=False)[0], paths, strict=True):
        rows = json.loads(Path(path).read_text())["rows"]
        by_engines = len({row["engines"] for row in rows}) > 1
        x = [row["engines" if by_engines else "prompts_per_step"] for row in rows]
        for name in PROCESSES:
            middle, low, high = ([row[f"{name}_ms{end}"] for row in rows] for end in ("", "_min", "_max"))
            errors = [
                [m - a for m, a in zip(middle, low, strict=True)],
                [b - m for m, b in zip(middle, high, strict=True)],
            ]
            axes.errorbar(x, middle, errors, marker="o", capsize=3, label=name.replace("_", " "))
        axes.set(
            xscale="log",
            yscale="log",
            xlabel="engines" if by_engines else "prompts in a step (16 engines)",
            ylabel="CPU per prompt, ms",
        )
        axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        raise SystemExit(one_run(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5:]))
    measures: dict[str, Callable[[argparse.Namespace], list[dict[str, Any]]]] = {
        "rules": measure_rules,
        "idle": measure_idle,
        "engines": measure_engines,
        "step_size": measure_step_size,
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*measures, "plot"])
    parser.add_argument("files", nargs="*", help="plot: rows written by `engines` and `step_size`")
    parser.add_argument("--out", default="out/control_plane_scaling.png", help="plot: file for the picture")
    parser.add_argument("--json", help="file for the rows")
    parser.add_argument("--num_rounds", type=int, default=3)
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--step_sizes", type=int, nargs="+", default=[32, 128, 512, 2048])
    parser.add_argument("--num_prompts", type=int, default=1024, help="of a run, or as many as --min_steps hold")
    parser.add_argument("--min_steps", type=int, default=4)
    parser.add_argument("--num_samples", type=int, default=4)
    parser.add_argument("--response_length", type=int, default=32)
    parser.add_argument("--async_steps", type=int, default=STALENESS)
    args = parser.parse_args()
    if args.what == "plot":
        plot(args.files, args.out)
        return
    rows = measures[args.what](args)
    print_table([{name: value for name, value in row.items() if not name.endswith(("_min", "_max"))} for row in rows])
    write_json(args.json, rows)


if __name__ == "__main__":
    main()
