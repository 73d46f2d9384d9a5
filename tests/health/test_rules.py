"""Each rule finds the failure that it is for, and says nothing of a run that just misses its limit."""

import ast
import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.health import Rule, all_rules, rules
from open_instruct.health.rule import PAGE, Row, numbers_of
from open_instruct.health.series import column, ratio, rises
from open_instruct.registry import option_fields
from open_instruct.report.metric_names import find

ROOT = Path(__file__).parents[2]
FOLDER = Path(rules.__file__).parent
FILES = sorted(path for path in FOLDER.glob("*.py") if path.name != "__init__.py")
MOST_LINES = 30
RULES = {rule.name: rule for rule in all_rules() if rule.function.__module__.startswith(rules.__name__)}
DIFFERENCE = "debug/vllm_vs_local_logprob_diff_mean"
Value = float | Callable[[int], float]
"""A metric of all rows, or a function of the training step."""

HEALTHY: dict[str, Value] = {
    "all_groups/scores": lambda step: 0.4 + 0.001 * step,
    "all_groups/scores_standard_error": 0.03,
    "all_groups/percent_solved_mean": lambda step: 0.4 + 0.001 * step,
    "all_groups/total_prompts": 32,
    "all_groups/val/sequence_lengths": 100.0,
    "all_groups/val/stop_rate": 0.95,
    "batch/total_prompts": 30,
    "batch/filtered_prompts_zero": 1,
    "batch/filtered_prompts_nonzero": 0,
    "real_batch_size_ratio": 30 / 32,
    "episode": lambda step: 256 * step,
    "objective/not_scored": 0.0,
    "objective/kl2_avg": 0.01,
    "policy/entropy_avg": 0.5,
    "val/rho_clipfrac": 0.001,
    "debug/vllm_vs_local_logprob_diff_mean": 0.02,
    "optim/grad_norm": 1.0,
    "optim/nonfinite_steps": 0,
    "stale_results_dropped": 0,
    "num_steps_off_policy_max": 1,
    "engines/busy_share": 0.9,
    "time/total": 100.0,
    "time/trainer_waiting_for_data": 10.0,
    "time/learners": 80.0,
    "time/weight_sync": 10.0,
    "engines/slowest_share": 0.9,
    "storage/free_bytes": 2**40,
    "storage/checkpoint_bytes": 2**33,
}
"""A run of 32 prompts a step, 8 answers each, that learns slowly."""


def rows_of(num_steps: int, changes: dict[str, Value] | None = None) -> list[Row]:
    """Rows of the healthy run with some metrics changed."""
    metrics = {**HEALTHY, **(changes or {})}
    values = [
        {name: value(step) if callable(value) else value for name, value in metrics.items()}
        for step in range(1, num_steps + 1)
    ]
    return [numbers_of({"training_step": step, **row}) for step, row in enumerate(values, 1)]


def after(step: int, value: float, before: float) -> Callable[[int], float]:
    """A metric that changes behind a step."""
    return lambda number: value if number > step else before


def flat(value: float) -> dict[str, Value]:
    """A reward that does not rise."""
    return {"all_groups/scores": value}


def evaluated(evaluations: dict[int, float], *, reward_gain: float) -> list[Row]:
    """30 steps whose reward rises by `reward_gain` in all, with `eval/scores` at some steps."""
    rows = rows_of(30, {"all_groups/scores": lambda step: 0.4 + reward_gain * step / 30})
    return [
        {**row, **({"eval/scores": evaluations[row["training_step"]]} if row["training_step"] in evaluations else {})}
        for row in rows
    ]


# A step of the healthy run has 32 groups × 8 answers = 256 answers.
CASES: dict[str, tuple[list[Row], str, list[Row]]] = {
    "hopeless_groups": (  # 17 of 32 groups are 53 %, 16 are 50 %
        rows_of(20, {"batch/filtered_prompts_zero": 17, **flat(0.01)}),
        "53% of the groups of 20 steps have only wrong answers",
        rows_of(20, {"batch/filtered_prompts_zero": 16, **flat(0.01)}),
    ),
    "equal_groups": (
        rows_of(10, {"batch/filtered_prompts_nonzero": 17}),
        "in 53% of the groups of 10 steps",
        rows_of(10, {"batch/filtered_prompts_nonzero": 16}),
    ),
    "solved_data": (
        rows_of(20, {"all_groups/percent_solved_mean": 0.992}),
        "99.2% of the answers of 20 steps",
        rows_of(20, {"all_groups/percent_solved_mean": 0.98}),
    ),
    "equal_rewards": (
        rows_of(5, {**flat(0.5), "all_groups/scores_standard_error": 0.0}),
        "have the mean reward 0.5",
        rows_of(5, {**flat(0.5), "all_groups/scores_standard_error": 0.01}),
    ),
    "reward_collapse": (  # half of 0.8 is 0.4
        rows_of(20, {"all_groups/scores": after(10, 0.39, 0.8)}),
        "fell from 0.8 to 0.39",
        rows_of(20, {"all_groups/scores": after(10, 0.41, 0.8)}),
    ),
    "evaluation_fall": (  # a tenth below 0.5 is 0.45; the reward rises by 0.2 · 20 / 30 = 0.13, two standard errors are 0.085
        evaluated({10: 0.5, 20: 0.44, 30: 0.4}, reward_gain=0.2),
        "eval/scores fell from 0.5 to 0.4 while the reward of training rose from 0.467 to 0.6",
        evaluated({10: 0.5, 20: 0.44, 30: 0.46}, reward_gain=0.2),
    ),
    "unscored_answers": (  # 6 of 256 answers are 2.3 %, 5 are 1.95 %
        rows_of(10, {"objective/not_scored": 6.0}),
        "2.3% of the answers of 10 steps",
        rows_of(10, {"objective/not_scored": 5.0}),
    ),
    "cut_off_answers": (
        rows_of(10, {"all_groups/val/stop_rate": 0.7}),
        "30% of the answers of 10 steps are cut off",
        rows_of(10, {"all_groups/val/stop_rate": lambda step: 0.76 if step == 5 else 0.7}),
    ),
    "length_growth": (
        rows_of(25, {"all_groups/val/sequence_lengths": after(20, 160.0, 100.0), **flat(0.4)}),
        "grew from 100 to 160 tokens within 20 steps",
        rows_of(25, {"all_groups/val/sequence_lengths": after(20, 140.0, 100.0), **flat(0.4)}),
    ),
    "entropy_collapse": (
        rows_of(25, {"policy/entropy_avg": after(20, 0.2, 0.5), **flat(0.4)}),
        "fell from 0.5 to 0.2 within 20 steps",
        rows_of(25, {"policy/entropy_avg": after(20, 0.3, 0.5), **flat(0.4)}),
    ),
    "capped_weights": (
        rows_of(10, {"val/rho_clipfrac": 0.011}),
        "1.1% of the tokens of 10 steps",
        rows_of(10, {"val/rho_clipfrac": 0.009}),
    ),
    "logprob_drift": (  # three times 0.02 is 0.06
        rows_of(20, {"debug/vllm_vs_local_logprob_diff_mean": after(10, 0.07, 0.02)}),
        "differ by 0.07 on average, 0.02 at first",
        rows_of(20, {"debug/vllm_vs_local_logprob_diff_mean": after(10, 0.055, 0.02)}),
    ),
    "kl_explosion": (  # five times 0.2 is 1
        rows_of(25, {"objective/kl2_avg": after(20, 1.2, 0.2)}),
        "grew from 0.2 to 1.2 per token",
        rows_of(25, {"objective/kl2_avg": after(20, 0.9, 0.2)}),
    ),
    "nonfinite_steps": (
        rows_of(3, {"optim/nonfinite_steps": after(2, 1, 0)}),
        "1 optimizer steps were left out",
        rows_of(3, {"optim/nonfinite_steps": lambda step: float(step == 2)}),  # of the step before
    ),
    "gradient_jump": (
        rows_of(23, {"optim/grad_norm": after(20, 11.0, 1.0)}),
        "grew from 1 to 11",
        rows_of(23, {"optim/grad_norm": after(22, 11.0, 1.0)}),  # one step alone
    ),
    "stale_groups": (  # 4 of 36 groups are 11 %, 3 of 35 are 8.6 %
        rows_of(10, {"stale_results_dropped": 4}),
        "11% of the groups of 10 steps",
        rows_of(10, {"stale_results_dropped": 3}),
    ),
    "learner_waits": (  # 20 steps of 200 s, of which 120 s: 40 minutes
        rows_of(20, {"time/total": 200.0, "time/trainer_waiting_for_data": 120.0}),
        "60% of 20 steps, 40 minutes",
        rows_of(20, {"time/total": 20.0, "time/trainer_waiting_for_data": 12.0}),
    ),
    "idle_engines": (
        rows_of(20, {"time/total": 200.0, "engines/busy_share": 0.4}),
        "60% of 20 steps, 40 minutes",
        rows_of(20, {"time/total": 200.0, "engines/busy_share": 0.4, "num_steps_off_policy_max": 0}),
    ),
    "slow_engine": (
        rows_of(3, {"engines/slowest_share": 0.45}),
        "makes 45% of the tokens per second of the median engine",
        rows_of(3, {"engines/slowest_share": 0.55}),
    ),
    "disk_space": (
        rows_of(3, {"storage/free_bytes": 29 * 2**29, "storage/checkpoint_bytes": 10 * 2**29}),
        "room for 2.9 more checkpoints of 5 GiB",
        rows_of(3, {"storage/free_bytes": 30 * 2**29, "storage/checkpoint_bytes": 10 * 2**29}),
    ),
    "slow_step": (  # six times 100 s is 10 minutes
        rows_of(10, {"time/total": after(9, 720.0, 100.0), "time/weight_sync": after(9, 700.0, 10.0)}),
        "took 12 minutes, most of them time/weight_sync; the steps before took 1.7",
        rows_of(10, {"time/total": after(9, 590.0, 90.0)}),
    ),
}
"""For each rule: a planted failure, a part of the alarm's text, and a neighbour that is no failure."""


@pytest.mark.parametrize("name", RULES)
def test_a_planted_failure_is_found(name: str) -> None:
    rows, text, _ = CASES[name]
    alarm = RULES[name].check(rows)
    assert alarm is not None
    assert text in alarm.text
    assert (alarm.rule, alarm.step) == (name, rows[-1]["training_step"])
    assert alarm.metrics == {metric: rows[-1][metric] for metric in RULES[name].metrics}


@pytest.mark.parametrize("name", RULES)
def test_a_healthy_neighbour_is_no_alarm(name: str) -> None:
    assert RULES[name].check(CASES[name][2]) is None


@pytest.mark.parametrize("name", RULES)
def test_a_failure_is_found_in_a_longer_run_too(name: str) -> None:
    """The healthy run goes before it, so that the rule has to look at the newest rows."""
    rows = CASES[name][0]
    before = [{**row, "training_step": row["training_step"] - 100} for row in rows_of(100)]
    assert RULES[name].check([*before, *rows]) is not None


@pytest.mark.parametrize("name", RULES)
def test_a_healthy_run_raises_no_alarm_at_any_step(name: str) -> None:
    rows = rows_of(60)
    assert [RULES[name].check(rows[:end]) for end in range(1, 61)] == [None] * 60


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), "text"])
def test_what_is_not_known_is_no_alarm(name: str, value: object) -> None:
    rows = CASES[name][0]
    for metric in RULES[name].metrics:
        assert RULES[name].check([*rows[:-1], numbers_of({**rows[-1], metric: value})]) is None
        absent = {key: number for key, number in rows[-1].items() if key != metric}
        assert RULES[name].check([*rows[:-1], absent]) is None


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("kl_explosion", rows_of(25, {"objective/kl2_avg": after(20, 0.45, 0.05)})),  # nine times, but below half a nat
        ("kl_explosion", rows_of(5, {"objective/kl2_avg": 170.0})),  # nothing before it
        ("logprob_drift", rows_of(20, {DIFFERENCE: after(10, 0.045, 0.005)})),  # nine times, but as of one step ago
        ("logprob_drift", rows_of(5, {DIFFERENCE: lambda step: 9.0 if step == 5 else 0.02})),  # in a single step
        ("logprob_drift", rows_of(5, {DIFFERENCE: 0.45})),
        ("gradient_jump", rows_of(23, {"optim/grad_norm": after(20, 9.0, 1.0)})),
        ("reward_collapse", rows_of(20, {"all_groups/scores": after(10, 0.02, 0.15)})),  # 0.13 is 4.3 standard errors
        ("evaluation_fall", evaluated({10: 0.5, 20: 0.44, 30: 0.4}, reward_gain=0.12)),  # 0.08 of 30 steps: 1.9 errors
        ("idle_engines", rows_of(20, {"time/total": 300.0, "engines/busy_share": 0.55})),  # 45 minutes, but 45 %
        ("idle_engines", rows_of(20, {"time/total": 140.0, "engines/busy_share": 0.4})),  # 60 %, but 28 minutes
        ("learner_waits", rows_of(20, {"time/total": 300.0, "time/trainer_waiting_for_data": 135.0})),
        ("learner_waits", rows_of(20, {"time/total": 140.0, "time/trainer_waiting_for_data": 84.0})),
        ("slow_step", rows_of(10, {"time/total": after(9, 660.0, 120.0)})),  # 11 minutes, but 5.5 times
        ("slow_step", rows_of(5, {"time/total": after(4, 3600.0, 120.0)})),  # of four steps before
        ("unscored_answers", rows_of(2, {"objective/not_scored": 64.0})),  # a quarter, but of two steps
    ],
)
def test_a_run_that_misses_another_limit_is_no_alarm(name: str, rows: list[Row]) -> None:
    assert RULES[name].check(rows) is None


def test_a_kl_that_explodes_in_the_first_steps_is_an_alarm_after_six() -> None:
    rows = rows_of(6, {"objective/kl2_avg": lambda step: [0.0, 0.1, 2.0, 9.0, 60.0, 170.0][step - 1]})
    assert RULES["kl_explosion"].check(rows[:5]) is None
    alarm = RULES["kl_explosion"].check(rows)
    assert alarm is not None
    assert "grew from 0 to 9 per token" in alarm.text


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        # From 3 to 40 % in 20 steps, as SmolLM2 learns its sums.
        ("hopeless_groups", {"batch/filtered_prompts_zero": 24, "all_groups/scores": lambda step: 0.02 * step}),
        ("length_growth", {"all_groups/val/sequence_lengths": lambda step: 10.0 * step}),
        ("entropy_collapse", {"policy/entropy_avg": lambda step: 1 / step}),
        ("cut_off_answers", {"all_groups/val/stop_rate": lambda step: 0.03 * step}),
    ],
)
def test_what_comes_with_learning_is_no_alarm(name: str, changes: dict[str, Value]) -> None:
    rows = rows_of(25, changes)
    assert [RULES[name].check(rows[:end]) for end in range(1, 26)] == [None] * 25


def test_log_probs_that_differ_at_once_are_told_after_two_steps() -> None:
    """The demo at a hundred times its learning rate: 8.9 in step 2, whose answers are one step old, and 6 in step 3."""
    rows = rows_of(3, {DIFFERENCE: lambda step: {1: 1e-7, 2: 8.88, 3: 6.05}[step]})
    alarm = RULES["logprob_drift"].check(rows)
    assert alarm is not None
    assert alarm.text == "log-probs of engine and learner differ by 6 on average in two steps"
    assert RULES["logprob_drift"].check(rows[:2]) is None


def test_a_run_that_takes_turns_waits_by_design() -> None:
    """A run on policy samples and trains by turns, so its learners wait while its engines work."""
    rows, _, _ = CASES["learner_waits"]
    assert RULES["learner_waits"].check([{**row, "num_steps_off_policy_max": 0} for row in rows]) is None


def test_a_model_that_is_right_may_be_certain() -> None:
    """The demo's entropy halves within 20 steps at its end, where 97 % of its answers are right and few groups are trained on."""
    rows, _, _ = CASES["entropy_collapse"]
    assert RULES["entropy_collapse"].check([{**row, "all_groups/percent_solved_mean": 0.97} for row in rows]) is None


def test_a_model_that_learns_with_much_scatter_may_become_certain() -> None:
    """The calculator's reward rises from 0.5 to 0.6 in 25 steps and scatters by 0.1, while its entropy halves."""
    rows, _, _ = CASES["entropy_collapse"]
    scatter = [0.1 if number % 2 else -0.1 for number in range(25)]
    rising = [{**row, "all_groups/scores": 0.5 + 0.004 * at + scatter[at]} for at, row in enumerate(rows)]
    flat_rows = [{**row, "all_groups/scores": 0.5 + scatter[at]} for at, row in enumerate(rows)]
    assert RULES["entropy_collapse"].check(rising) is None
    assert RULES["entropy_collapse"].check(flat_rows) is not None


def test_groups_that_are_solved_are_not_hopeless() -> None:
    """60 % of the groups of a run that has solved its data are left out, and none is wrong."""
    solved = {"batch/filtered_prompts_zero": 0, "all_groups/scores": 0.95, "all_groups/percent_solved_mean": 0.95}
    assert [
        rule.name for rule in RULES.values() if rule.check(rows_of(60, {**solved, "batch/total_prompts": 13}))
    ] == []


def test_each_rule_has_a_file_of_its_own_of_at_most_30_lines() -> None:
    assert [path.name for path in FILES if len(path.read_text().splitlines()) > MOST_LINES] == []
    assert {rule.name for rule in RULES.values()} == {path.stem for path in FILES} == CASES.keys()


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_metrics_and_flags_that_a_rule_names_exist(rule: Rule) -> None:
    assert [name for name in rule.metrics if find(name) is None] == []
    options = {field.name for field in option_fields(GRPOConfig)}
    flags = set(re.findall(r"--(\w+)", rule.cure + (inspect.getdoc(rule.function) or "")))
    assert flags <= options


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_rule_says_when_it_fires_with_its_limit(rule: Rule) -> None:
    assert re.search(r"\d|same", rule.fires_when)
    assert 20 < len(rule.fires_when) < 200
    assert not rule.fires_when.endswith(".")


def cells_by_rule() -> dict[str, str]:
    """For each rule that `what_to_watch.md` names in a table: the row."""
    rows = [line for line in (ROOT / PAGE).read_text().splitlines() if line.startswith("| `")]
    return {name: row for row in rows for name in re.findall(r"`(\w+)`", row.split(" | ")[-1])}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_the_page_names_the_rule_with_its_metric_and_its_cure(rule: Rule) -> None:
    row = cells_by_rule()[rule.name]
    assert any(f"`{metric}`" in row for metric in rule.metrics)
    assert [flag for flag in re.findall(r"--\w+", rule.cure) if flag not in row] == []


def test_the_page_names_no_rule_that_is_not_there() -> None:
    assert cells_by_rule().keys() == RULES.keys()


def test_links_of_rules_are_headings_of_the_page() -> None:
    headings = re.findall(r"^## (.*)$", (ROOT / PAGE).read_text(), flags=re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    for rule in RULES.values():
        page, _, anchor = rule.link.partition("#")
        assert page == PAGE
        assert anchor in anchors, rule.name


def test_a_rising_metric_is_told_from_its_scatter() -> None:
    def series(*values: float) -> list[Row]:
        return [{"all_groups/scores": value} for value in values]

    assert rises(series(0.1, 0.3, 0.2, 0.6, 0.8, 0.7))
    assert not rises(series(0.1, 0.3, 0.2, 0.2, 0.3, 0.2))  # by half a standard error
    assert rises(series(0.1, 0.3, 0.2, 0.2, 0.4, 0.3))  # by 1.2
    assert not rises(series(0.6, 0.8, 0.7, 0.1, 0.3, 0.2))
    assert not rises(series(0.5, 0.5, 0.5, 0.5))
    assert not rises(series(0.0, 1.0, 1.0))  # too few to tell


def test_a_share_of_nothing_is_0() -> None:
    rows = [{"part": 1, "whole": 4}, {"part": 2, "whole": 2}]
    assert ratio(rows, "part", "whole") == 0.5
    assert ratio([{"part": 0, "whole": 0}], "part", "whole") == 0.0
    assert column(rows, "part") == [1.0, 2.0]


def test_rules_import_nothing_but_health() -> None:
    """They are read by programs that only look at a run."""
    for path in FILES:
        modules = [node.module for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        assert all(str(module).startswith(("open_instruct.health", "collections")) for module in modules), path.name
