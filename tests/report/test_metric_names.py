"""The list of metrics: what a run writes is in it, and the page is made from it."""

import ast
import itertools
import re
from pathlib import Path

import pytest

from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.report.metric_names import PAGE, alerts_are_on_metrics, find, page
from open_instruct.report.metric_table import ABSENT, SECTIONS, Metric

SOURCES = Path(__file__).parents[2] / "open_instruct"
NAMES = """
training_step episode global_step epoch lr optim/grad_norm val/num_total_tokens val/num_step_tokens
learner_tokens_per_second_overall learner_tokens_per_second_step time/total time/training time/saving time/health_check
time/weight_sync time/weight_sync_mean time/weight_sync_min time/weight_sync_max time/weight_sync_median
time/generation_waiting_for_trainer time/trainer_waiting_for_data time/group_generation_mean time/group_generation_min
time/group_generation_max scores real_batch_size_ratio unsolved_batch_size_ratio packed_ratio val/solve_rate_hist
val/total_reward_groups val/sequence_lengths val/sequence_lengths_min val/sequence_lengths_max val/sequence_lengths_unsolved
val/sequence_lengths_solved val/sequence_lengths_unsolved_hist val/sequence_lengths_solved_hist val/stop_rate
val/advantages_mean val/advantages_min val/advantages_max val/advantages_hist val/format_scores objective/verifiable_reward
objective/verifiable_correct_rate objective/gsm8k_reward objective/gsm8k_correct_rate model_step_min model_step_mean
model_step_max num_steps_off_policy stale_results_dropped batch/prompt_lengths batch/response_lengths batch/filtered_prompts
batch/filtered_prompts_zero batch/filtered_prompts_solved batch/filtered_prompts_nonzero batch/filtered_prompts_pct
batch/percent_solved_mean batch/percent_solved_hist batch/no_resampled_prompts batch/total_prompts
batch/per_group_generation_times val/actor_tokens_per_second actor_mfu actor_mbu learner_mfu loss/policy_avg loss/kl_avg
loss/total_avg objective/kl0_avg objective/kl1_avg objective/kl2_avg objective/kl3_avg policy/clipfrac_avg policy/entropy_avg
val/ratio val/ratio_var val/rho_weight val/rho_clipfrac val/rho_drop_frac val/rho_drop_low_frac val/rho_drop_high_frac
val/rho_hist debug/vllm_vs_local_logprob_diff_mean debug/vllm_vs_local_logprob_diff_max debug/vllm_vs_local_logprob_diff_std
debug/vllm_local_reverse_kl eval/scores eval/sequence_lengths eval/sequence_lengths_min eval/sequence_lengths_max
eval/stop_rate eval/pass_at_1 eval/pass_at_4 eval/pass_at_4_unbiased eval/objective/verifiable_reward
eval/objective/verifiable_correct_rate eval/objective/gsm8k_reward eval/model_step_min eval/model_step_mean
eval/model_step_max eval/num_steps_off_policy eval/stale_results_dropped eval/actor_tokens_per_second
"""
THEIRS = NAMES.split()
"""Metrics of open-instruct."""
HOLE = "\0"
"""Stands for what an f-string puts in."""
NOT_EMITTERS = ("report/metric_table.py", "report/metric_names.py", "health/rules/", "watch/")
COMPOSED = {
    *("objective/x_not_scored", "objective/x_failures", "rewards/x/not_scored", "rewards/x/failures"),
    "rc/x",
}
"""Metrics whose names are put together from several texts."""
PIECES = {"time/engine_pause", "agent_loop/num_preempted"}
"""Texts that such names begin with."""


def emitted() -> set[str]:
    """The texts in the code, with `HOLE` for what varies, apart from those that read metrics."""
    texts = set()
    for path in SOURCES.rglob("*.py"):
        if str(path.relative_to(SOURCES)).startswith(NOT_EMITTERS):
            continue
        nodes = list(ast.walk(ast.parse(path.read_text())))
        parts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in nodes:
            if isinstance(node, ast.JoinedStr):
                texts.add("".join(str(part.value) if isinstance(part, ast.Constant) else HOLE for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
                texts.add(node.value)
    return texts


def names_of(metric: Metric) -> list[str]:
    """The names that a metric stands for, with `x` for what may be anything."""
    parts = [
        part[1:-1].split("|") if "|" in part else ["x" if part.startswith("<") else part]
        for part in re.split(r"(<[^>]*>)", metric.name)
    ]
    return ["".join(choice).replace("…", "x") for choice in itertools.product(*parts)]


def pattern(text: str) -> re.Pattern[str]:
    return re.compile(r"\S+".join(map(re.escape, text.split(HOLE))))


def is_key(text: str) -> bool:
    """Whether a text looks like a metric: it begins as some do, and is not the beginning of one alone."""
    firsts = {name.split("/")[0] for name in TABLE if "/" in name} - {"x"}
    return (
        text.split("/")[0] in firsts
        and re.fullmatch(rf"\w+/[\w/{HOLE}]*[^\W_]|\w+/[\w/{HOLE}]*{HOLE}", text) is not None
    )


METRICS = [metric for metrics in SECTIONS.values() for metric in metrics]
TABLE = [name for metric in METRICS for name in names_of(metric)]


def test_the_page_is_made_from_the_list() -> None:
    assert PAGE.read_text() == page(), "run python -m open_instruct.report.metric_names"


@pytest.mark.parametrize("name", THEIRS)
def test_each_metric_of_open_instruct_is_there_or_said_to_be_absent(name: str) -> None:
    absent = {key for names in ABSENT for key in names.split(", ")}
    assert (find(name) is not None) != (name in absent)


def unknown(texts: set[str]) -> set[str]:
    """Texts that look like metrics and are none of the table."""
    beginnings = {text.rstrip("/_") for text in texts if text.endswith(("/", "_"))}
    keys = {text for text in texts if is_key(text) and text not in beginnings}
    return {key for key in keys if find(key.replace(HOLE, "x")) is None and not any(map(pattern(key).fullmatch, TABLE))}


def test_what_the_code_emits_is_in_the_table() -> None:
    texts = emitted()
    assert sum(map(is_key, texts)) > 200
    assert unknown(texts) == PIECES


def test_a_name_that_is_not_in_the_table_is_noticed() -> None:
    assert unknown(
        {"time/sleeping", f"val/mean_of_{HOLE}", "time/total", f"freshness/{HOLE}", "time/", "docs/time"}
    ) == {
        "time/sleeping",
        f"val/mean_of_{HOLE}",
    }


def test_what_is_in_the_table_is_emitted() -> None:
    """A metric that was renamed or removed in the code fails here."""
    texts = emitted()
    templates = [pattern(text) for text in texts if HOLE in text and re.match(r"\w+/", text)]
    absent = {
        name for name in TABLE if name not in texts and not any(template.fullmatch(name) for template in templates)
    }
    assert absent == COMPOSED


def test_names_are_on_the_list_once() -> None:
    names = [metric.name for metrics in SECTIONS.values() for metric in metrics]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    "name", ["time/nothing", "batch/filtered_prompts_some", "queue/cats", "x", "all_groups/time/x"]
)
def test_unknown_names_are_unknown(name: str) -> None:
    assert find(name) is None


def test_numbers_over_all_groups_are_those_of_the_same_name() -> None:
    assert find("all_groups/scores") is find("scores")
    assert find("all_groups/objective/gsm8k_reward") is find("objective/math_reward")


@pytest.mark.parametrize(
    ("alert", "mistake"),
    [
        ("max_sample_age=3", None),
        ("all_groups/scores=2", None),
        ("time/totl=2", "--alerts time/totl=2: there is no metric 'time/totl'. Did you mean time/total?"),
        ("xyzzy=1", "--alerts xyzzy=1: there is no metric 'xyzzy'. docs/reference/metrics.md has their names."),
        ("nothing", None),  # no limit: `config/checks.py` says so
    ],
)
def test_an_alert_on_a_metric_that_no_row_has_is_a_mistake(alert: str, mistake: str | None) -> None:
    args = GRPOConfig(model_name_or_path="a model", alerts=[alert])
    assert alerts_are_on_metrics(args) == ([] if mistake is None else [mistake])
