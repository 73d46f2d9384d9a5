"""Looks names up in `metric_table.py`, and makes `docs/reference/metrics.md` from it.

python -m open_instruct.report.metric_names      writes the page
"""

import difflib
import functools
from pathlib import Path

from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.report.metric_table import ABSENT, ALL_GROUPS, ATTRIBUTES, ENDPOINT, PREFIX, SECTIONS, SPANS, Metric

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"
INTRODUCTION = """# Metrics

`python -m open_instruct.report.metric_names` writes this page anew.

`metrics.jsonl` has a row per training step, and trackers are sent the same rows (`--with_tracking`, `--report_to`). The row
of a step is there when the step is over. When the evaluation of a step has ended, its `eval/*` are added to the row of the step.
Names that open-instruct has mean the same here; **where they do not, the text says how**. A metric that is not known is left
out of its row: there is no mean over nothing. Histograms are `{"edges": […], "counts": […]}` with 20 bins; wandb shows them
as histograms. `<…>` stands for a part that varies. Times are in seconds, memory is in bytes, lengths are in tokens.

As in open-instruct, `scores`, `objective/*`, `val/*` and `batch/*` are taken over the groups that are trained on, after
groups of equal scores were left out (`--filter_zero_std_samples`). A run that has solved half of its prompts looks worse
there than it is, so the same numbers over all generated groups stand beside them under `all_groups/`; the live line and
`reward_curve.png` show those.

A conversation of several samples is one response: rewards, scores and rates count it once, by its last sample. Lengths and
numbers of tokens are over all samples.

**Sets and sources.** With `--eval_sets`, or several datasets in `--dataset_mixer_eval_list`, each evaluation set has numbers of
its own, `eval/<set>/…` (`eval/plus/scores`; TRL calls it `eval_plus_reward`, verl names it by `data_source`). `eval/…` without a
set is over the responses of all sets, and is there only if all of them were evaluated at the step: over some it would be another
quantity. `eval/pass_at_1` weighs prompts the same, and other means weigh responses. Likewise `eval/pass_at_<k>` is there only if
all sets have the same number of responses to a prompt. `source/<name>/…` measures a training step by the entries of
`--dataset_mixer_list`, and is there only if there are several: over one it would repeat `all_groups/…`. A source has a short
name, `train` for `data/train.jsonl` and `gsm8k` for `openai/gsm8k`; where two would be the same, their folder or a number tells
them apart. `environment/<name>/…` is there for each environment that a row of the step names (`env_config`).
"""


@functools.cache
def find(key: str) -> Metric | None:
    """The metric that a key of a row is; an exact name before one with `<…>`."""
    key = key.removeprefix("all_groups/") if key not in ALL_GROUPS else key
    matches = [metric for metrics in [*SECTIONS.values(), ENDPOINT] for metric in metrics if metric.matches(key)]
    return min(matches, key=lambda metric: "<" in metric.name, default=None)


def alerts_are_on_metrics(args: GRPOConfig) -> list[str]:
    """What is wrong with the names in `--alerts metric=limit`: a limit on what no row has would never be passed."""
    names = [metric.name for metrics in SECTIONS.values() for metric in metrics if "<" not in metric.name]
    mistakes = []
    for alert in args.alerts:
        name = alert.partition("=")[0]
        if "=" in alert and find(name) is None:
            alike = difflib.get_close_matches(name, names, n=1)
            hint = f"Did you mean {alike[0]}?" if alike else "docs/reference/metrics.md has their names."
            mistakes.append(f"--alerts {alert}: there is no metric {name!r}. {hint}")
    return mistakes


def page() -> str:
    """`docs/reference/metrics.md`."""
    lines = [INTRODUCTION]
    for title, metrics in SECTIONS.items():
        lines += [f"## {title}", "", "| metric | meaning |", "|---|---|"]
        for metric in metrics:
            differs = f". **open-instruct: {metric.differs}**" if metric.differs else ""
            lines.append(f"| `{metric.name.replace('|', chr(92) + '|')}` | {metric.meaning}{differs} |")
        lines.append("")
    lines += _endpoint_and_spans()
    lines += ["## open-instruct's metrics that are not here", "", "| metric | why |", "|---|---|"]
    lines += [f"| {', '.join(f'`{name}`' for name in names.split(', '))} | {why} |" for names, why in ABSENT.items()]
    return "\n".join(lines) + "\n"


def _endpoint_and_spans() -> list[str]:
    lines = ["## In `/metrics` alone", "", "| metric | meaning |", "|---|---|"]
    lines += [f"| `{PREFIX}{metric.name}` | {metric.meaning} |" for metric in ENDPOINT]
    lines += ["", "## Spans of a prompt", "", "| span | from when to when |", "|---|---|"]
    lines += [f"| `{span.name}` | {span.meaning} |" for span in SPANS]
    lines += ["", "| attribute | meaning |", "|---|---|"]
    return [*lines, *(f"| `{attribute.name}` | {attribute.meaning} |" for attribute in ATTRIBUTES), ""]


if __name__ == "__main__":
    PAGE.write_text(page())
