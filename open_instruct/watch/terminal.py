"""The terminal view (`--follow`): the runs, their curves, the newest step, why a prompt was left out, and warnings.

Everything is made from the views, so it shows what the page shows. What models and tools wrote is text here: characters that
would move the cursor or change colours are replaced.
"""

import signal
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
MOST_WARNINGS = 2
MOST_ALARMS = 2
LEAST_CURVES = 3
"""Curves without which no answers are shown."""
MOST_RUNS, MOST_TORN = 4, 2
"""Runs and torn files of a screen."""
WIDTH_OF_NAMES = 42
"""Characters of an answer's line before its text."""
LONGEST_WARNING = 200
LONGEST_ANSWER = 160
"""Characters of an answer."""
ESCAPES = {code: "�" for code in (*range(32), 127, *range(128, 160)) if code not in (9, 10)}


def follow(runs: Runs, console: "Console | None" = None) -> int:
    """Show the runs until Ctrl-C. Where the output is no terminal, they are shown once, whole. Returns the exit code, 0."""
    from rich.console import Console
    from rich.live import Live

    console = console or Console()
    if not console.is_terminal:
        console.print(frame(runs, console.width))
        return 0
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        first = frame(runs, console.width, console.height)
        with Live(first, console=console, auto_refresh=False, vertical_overflow="crop") as live:
            live.refresh()
            while True:
                time.sleep(INTERVAL_S)
                live.update(frame(runs, console.width, console.height), refresh=True)
    except KeyboardInterrupt:
        return 0
    finally:
        console.show_cursor(True)  # also if the signal came before the first screen was whole
        signal.signal(signal.SIGTERM, before)


def _exit(number: int, _: object) -> None:
    """Ends by an exception, so that the terminal has its cursor again."""
    raise SystemExit(128 + number)


def frame(runs: Runs, width: int = 100, height: int | None = None) -> "Group":
    """Everything that is shown now. The parts below the list are of the last run that is running, or of the last run.

    `height`: lines that there are. What does not fit is shortened or left out; None: nothing is.
    """
    from rich.console import Group

    is_short = height is not None
    entries = answer(runs, "runs", {})
    chosen = next((entry for entry in reversed(entries) if entry["state"] == "running"), entries[-1])
    own = {"run": str(chosen["run"])}
    curves = answer(runs, "curves", own)
    listed = [chosen, *(entry for entry in entries if entry is not chosen)][:MOST_RUNS] if is_short else entries
    lines = [sentence for entry in listed for sentence in entry["torn"]][: MOST_TORN if is_short else None]
    heads, answers, reasons = _step(runs, own, width - WIDTH_OF_NAMES if is_short else LONGEST_ANSWER, is_short)
    below = [*reasons, *_health(runs, own, curves)]
    rest = (height or 0) - 1 - (1 + len(listed)) - len([*lines, *heads, *below])
    if is_short and rest < len(answers) + 1 + LEAST_CURVES:
        answers = []
    most = max(0, rest - (1 + len(answers) if answers else 0) - 1) if is_short else None
    parts: list[Any] = [_runs(listed, is_short), *(plain(text, is_short) for text in lines)]
    parts += [_curves(curves, width, most, is_short)] if most != 0 else []
    parts += [plain(text, is_short) for text in heads] + ([_answers(answers, is_short)] if answers else [])
    return Group(*parts, *(plain(text, is_short) for text in below))


def _runs(entries: Sequence[dict[str, Any]], is_short: bool) -> "Table":
    table = _table("run", "state", "step", "reward", "evaluations", is_short=is_short)
    for entry in entries:
        of = "" if entry["num_steps"] is None else f"/{entry['num_steps']}"
        results = [f"{name} {_result(own)} (step {own['version']})" for name, own in entry["evaluations"].items()]
        step = "-" if entry["step"] is None else f"{entry['step']}{of}"
        cells = (entry["name"], entry["state"], step, _number(entry["reward"]), ", ".join(results))
        table.add_row(*(plain(cell) for cell in cells))
    return table


def _result(evaluation: dict[str, Any]) -> str:
    """The share of right answers, or the mean reward where only reward functions score."""
    if evaluation["share"] is not None:
        return format(evaluation["share"], ".0%")
    return "not known" if evaluation["reward"] is None else f"reward {evaluation['reward']:.3g}"


def _curves(curves: dict[str, Any], width: int, most: int | None, is_short: bool) -> "Table":
    names = [entry["name"] for entry in curves["groups"]["evaluation"] if entry["name"].endswith("pass_at_1")]
    names = [*(name for name in CURVES if name in curves["values"]), *names][:most]
    labels = {entry["name"]: entry["label"] for group in curves["groups"].values() for entry in group}
    table = _table("metric", "over the steps", "last", is_short=is_short)
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


def _step(
    runs: Runs, own: dict[str, str], length: int, is_short: bool
) -> tuple[list[str], list[tuple[str, ...]], list[str]]:
    """Of the newest trained step lines with its groups and rewards, its worst and best answers, and why it left out a prompt."""
    run = runs[int(own["run"])]
    steps = run.record.steps() if run.has_record else []
    if not steps:
        return ["no step has been trained yet"], [], []
    try:
        worst, best = (
            answer(runs, "step", {**own, "step": str(steps[-1]), "sort": sort, "limit": limit})
            for sort, limit in (("worst", "2"), ("best", "1"))
        )
    except Mistake as mistake:  # its file is torn
        return [str(mistake)], [], []
    answers: list[tuple[str, ...]] = [
        (
            f"{kind}: {sample['prompt_id']} {sample['sample']}",
            _number(sample["reward"]),
            sample["finish_reason"],
            _shortened(sample["text"], max(10, length)),
        )
        for kind, view in (("worst", worst), ("best", best))
        for sample in view["samples"]
    ]
    left_out = [group["prompt_id"] for group in worst["groups"] if group["outcome"] != "consumed"]
    return _heads(worst), answers, [_why(runs, own, prompt_id, is_short) for prompt_id in left_out[-1:]]


def _heads(view: dict[str, Any]) -> list[str]:
    counts = ", ".join(f"{outcome} {count}" for outcome, count in view["counts"].items())
    summary, edges = view["summary"], view["histogram"]["edges"]
    head = f"step {view['step']}: groups {counts}; all right {summary['all_right']}, all wrong {summary['all_wrong']}"
    error = summary["standard_error"]
    reward = f"reward {_number(summary['reward'])}" + ("" if error is None else f" (standard error {error:.2g})")
    if not edges:
        return [head, reward]
    half = (edges[1] - edges[0]) / 2  # the extremes are in the middle of the outer bars
    low, high = (_number(round(edge, 9) + 0.0) for edge in (edges[0] + half, edges[-1] - half))
    return [head, f"{reward}; rewards {low} to {high}: {sparkline(view['histogram']['counts'], 20)}"]


def _answers(answers: Sequence[tuple[str, ...]], is_short: bool) -> "Table":
    table = _table("answer", "reward", "ended", "text", is_short=is_short)
    for cells in answers:
        table.add_row(*(plain(cell) for cell in cells))
    return table


def _why(runs: Runs, own: dict[str, str], prompt_id: str, is_short: bool) -> str:
    """The life of a prompt; `is_short`: what its step did with it."""
    try:
        sentences = answer(runs, "why", {**own, "prompt_id": prompt_id})["sentences"]
        if is_short:
            return f"{prompt_id}: " + next(
                (text for text in reversed(sentences) if text.startswith("Step")), sentences[-1]
            )
        return "why: " + " ".join(sentences)
    except Mistake as mistake:  # its step was removed a moment ago
        return str(mistake)


def _health(runs: Runs, own: dict[str, str], curves: dict[str, Any]) -> list[str]:
    """The newest alarms, and the newest warnings with the step that was under way."""
    alarms = answer(runs, "health", own)["alarms"]
    lines = [f"alarm at step {alarm['step']}: {alarm['text']} {alarm['cure']}" for alarm in alarms[-MOST_ALARMS:]]
    levels = {"warning": "warning", "fault": "error"}
    marks = [mark for mark in curves["marks"] if mark["kind"] in levels]
    texts = [f"{levels[mark['kind']]} in step {mark['step']}: {mark['text']}" for mark in marks[-MOST_WARNINGS:]]
    return lines + [_shortened(text, LONGEST_WARNING) for text in texts]


def _shortened(text: str, length: int) -> str:
    """The beginning of a text in one line."""
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 1] + "…"


def _table(*names: str, is_short: bool) -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False, expand=False)
    for name in names:
        table.add_column(
            name, style="", header_style="dim", no_wrap=is_short, overflow="ellipsis" if is_short else "fold"
        )
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def plain(text: str, is_short: bool = False) -> "Text":
    """A text whose characters mean nothing to a terminal; `is_short`: in one line, cut off at its end."""
    from rich.text import Text

    options: dict[str, Any] = {"no_wrap": True, "overflow": "ellipsis"} if is_short else {}
    return Text(text.translate(ESCAPES), **options)
