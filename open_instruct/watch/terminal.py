"""The terminal view (`--follow`): the runs, their curves, the newest step, why a prompt was left out, and warnings.

Everything is made from the views, so it shows what the page shows. What models and tools wrote is text here: characters that
would move the cursor or change colours are replaced.
"""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from open_instruct.watch.mistakes import Mistake
from open_instruct.watch.runs import Runs
from open_instruct.watch.views import answer

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.table import Table
    from rich.text import Text

INTERVAL_S = 2.0
BARS = "▁▂▃▄▅▆▇█"
CURVES = (
    "all_groups/scores",
    "all_groups/val/sequence_lengths",
    "policy/entropy_avg",
    "num_steps_off_policy",
    "time/total",
)
"""Metrics that are shown as curves, beside those of evaluations."""
MOST_WARNINGS = 3
LONGEST_ANSWER = 160
"""Characters of an answer."""
ESCAPES = {code: "�" for code in (*range(32), 127, *range(128, 160)) if code not in (9, 10)}


def follow(runs: Runs, console: "Console | None" = None) -> int:
    """Show the runs until Ctrl-C. Where the output is no terminal, they are shown once. Returns the exit code, 0."""
    from rich.console import Console
    from rich.live import Live

    console = console or Console()
    if not console.is_terminal:
        console.print(frame(runs, console.width))
        return 0
    try:
        with Live(frame(runs, console.width), console=console, auto_refresh=False, vertical_overflow="crop") as live:
            while True:
                time.sleep(INTERVAL_S)
                live.update(frame(runs, console.width), refresh=True)
    except KeyboardInterrupt:
        return 0


def frame(runs: Runs, width: int = 100) -> "Group":
    """Everything that is shown now. The parts below the list are of the last run that is running, or of the last run."""
    from rich.console import Group

    entries = answer(runs, "runs", {})
    chosen = next((entry for entry in reversed(entries) if entry["state"] == "running"), entries[-1])
    own = {"run": str(chosen["run"])}
    torn = [plain(sentence) for entry in entries for sentence in entry["torn"]]
    try:
        step = _step(runs, own)
    except Mistake as mistake:  # its file is torn
        step = [plain(str(mistake))]
    return Group(_runs(entries), *torn, _curves(answer(runs, "curves", own), width), *step, *_health(runs, own))


def _runs(entries: Sequence[dict[str, Any]]) -> "Table":
    table = _table("run", "state", "step", "reward", "evaluations")
    for entry in entries:
        of = "" if entry["num_steps"] is None else f"/{entry['num_steps']}"
        shares = [
            f"{name} {'not measured' if own['share'] is None else format(own['share'], '.0%')} (step {own['version']})"
            for name, own in entry["evaluations"].items()
        ]
        step = "-" if entry["step"] is None else f"{entry['step']}{of}"
        cells = (entry["name"], entry["state"], step, _number(entry["reward"]), ", ".join(shares))
        table.add_row(*(plain(cell) for cell in cells))
    return table


def _curves(curves: dict[str, Any], width: int) -> "Table":
    names = [name for name in CURVES if name in curves["values"]]
    names += [entry["name"] for entry in curves["groups"]["evaluation"] if entry["name"].endswith("pass_at_1")]
    labels = {entry["name"]: entry["label"] for group in curves["groups"].values() for entry in group}
    table = _table("metric", "over the steps", "last")
    for name in names:
        values = [value for value in curves["values"][name] if value is not None]
        table.add_row(plain(labels[name]), plain(sparkline(values, max(10, width - 60))), plain(_number(values[-1])))
    return table


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as bars of eight heights, at most `width` of them; where there are more values, a bar is their mean."""
    size = -(-len(values) // width) if values else 1
    means = [sum(part) / len(part) for at in range(0, len(values), size) for part in (values[at : at + size],)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)


def _step(runs: Runs, own: dict[str, str]) -> "list[Any]":
    """The newest trained step: its groups and rewards, its worst and best answers, and a prompt that it left out."""
    run = runs[int(own["run"])]
    steps = run.record.steps() if run.has_record else []
    if not steps:
        return [plain("no step has been trained yet")]
    view = answer(runs, "step", {**own, "step": str(steps[-1]), "sort": "worst", "limit": "2"})
    best = answer(runs, "step", {**own, "step": str(steps[-1]), "sort": "best", "limit": "1"})
    counts = ", ".join(f"{outcome} {count}" for outcome, count in view["counts"].items())
    summary = view["summary"]
    error = "" if summary["standard_error"] is None else f" ± {summary['standard_error']:.3g}"
    head = (
        f"step {view['step']}: groups {counts}; all right {summary['all_right']}, all wrong {summary['all_wrong']}; "
        f"reward {_number(summary['reward'])}{error} {sparkline(view['histogram']['counts'], 20)}"
    )
    table = _table("answer", "reward", "ended", "text")
    for kind, samples in (("worst", view["samples"]), ("best", best["samples"])):
        for sample in samples:
            name = f"{kind}: {sample['prompt_id']} {sample['sample']}"
            text = " ".join(sample["text"].split())[:LONGEST_ANSWER]
            table.add_row(plain(name), plain(_number(sample["reward"])), plain(sample["finish_reason"]), plain(text))
    left_out = [group["prompt_id"] for group in view["groups"] if group["outcome"] != "consumed"]
    return [plain(head), table, *(_why(runs, own, prompt_id) for prompt_id in left_out[-1:])]


def _why(runs: Runs, own: dict[str, str], prompt_id: str) -> "Text":
    try:
        return plain("why: " + " ".join(answer(runs, "why", {**own, "prompt_id": prompt_id})["sentences"]))
    except Mistake as mistake:  # its step was removed a moment ago
        return plain(str(mistake))


def _health(runs: Runs, own: dict[str, str]) -> "list[Text]":
    view = answer(runs, "health", own)
    alarms = [f"alarm at step {alarm['step']}: {alarm['text']} {alarm['cure']}" for alarm in view["alarms"]]
    warnings = [f"{event['level']}: {event['text']}" for event in view["warnings"][-MOST_WARNINGS:]]
    return [plain(line) for line in alarms + warnings]


def _table(*names: str) -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False, expand=False)
    for name in names:
        table.add_column(name, style="", header_style="dim")
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def plain(text: str) -> "Text":
    """A text whose characters mean nothing to a terminal."""
    from rich.text import Text

    return Text(text.translate(ESCAPES))
