"""Evaluation sets have names, data, sampling and an interval of their own; sources of data have short names."""

from typing import Any

import pytest
from conftest import make_args

from open_instruct.config.checks import collect_mistakes
from open_instruct.config.data_names import short_names
from open_instruct.config.evaluation_sets import EvaluationSet
from open_instruct.data_types import SamplingConfig


def sets_of(*words: str, **options: Any) -> dict[str, EvaluationSet]:
    return {one.name: one for one in make_args(eval_sets=list(words), **options).evaluation_sets}


def test_a_set_has_the_settings_of_its_words_and_for_the_rest_those_of_the_options() -> None:
    words = ["plus=data/plus.jsonl", "hard=reasoning_gym/chain_sum?size=9", "hard.temperature=0", "hard.interval=50"]
    words += ["plus.samples=4", "plus.top_p=0.5", "plus.response_length=7", "hard.amount=0.5", "hard.split=dev"]
    sets = sets_of(*words, eval_temperature=0.6, local_eval_every=10, response_length=32)
    assert sets == {
        "plus": EvaluationSet("plus", "data/plus.jsonl", SamplingConfig(0.6, 0.5, 7, 4), interval=10),
        "hard": EvaluationSet(
            "hard", "reasoning_gym/chain_sum?size=9", SamplingConfig(0.0, 1.0, 32, 1), 50, amount="0.5", split="dev"
        ),
    }


def test_the_longest_response_of_any_set_sizes_the_context_of_the_engines() -> None:
    args = make_args(eval_sets=["a=a.jsonl", "b=b.jsonl", "b.response_length=100"], response_length=32)
    assert args.longest_response == 100
    assert args.max_sequence_length == args.max_prompt_token_length + 100


def test_entries_of_the_mixer_list_are_sets_with_short_names() -> None:
    words = ["data/plus.jsonl", "1.0", "org/rc?config=main", "20"]
    args = make_args(dataset_mixer_eval_list=words, dataset_mixer_eval_list_splits=["dev"], local_eval_every=10)
    found = [(one.name, one.data, one.amount, one.split, one.interval) for one in args.evaluation_sets]
    assert found == [  # eval/rc/… are metrics of the reasoning cache
        ("plus", "data/plus.jsonl", "1.0", "dev", 10),
        ("rc_2", "org/rc?config=main", "20", "dev", 10),
    ]


@pytest.mark.parametrize(
    ("options", "apart"),
    [
        ({}, False),
        ({"dataset_mixer_eval_list": ["a.jsonl", "1.0"]}, False),
        ({"dataset_mixer_eval_list": ["a.jsonl", "1.0", "b.jsonl", "1.0"]}, True),
        ({"eval_sets": ["a=a.jsonl"]}, True),
    ],
)
def test_one_set_is_measured_apart_only_if_the_user_has_named_it(options: dict[str, Any], apart: bool) -> None:
    assert make_args(**options).measures_sets_apart == apart


@pytest.mark.parametrize(
    ("step", "due"), [(5, ["often"]), (10, ["often", "seldom"]), (12, ["often", "seldom"]), (11, []), (0, ["often"])]
)
def test_a_set_is_due_at_its_interval_and_after_the_last_step(step: int, due: list[str]) -> None:
    sets = sets_of("often=a.jsonl", "seldom=b.jsonl", "never=c.jsonl", "seldom.interval=10", "never.interval=-1")
    sets["often"] = EvaluationSet("often", "a.jsonl", SamplingConfig(), 5)
    found = [name for name, one in sets.items() if one.is_due(step, last_step=12)]
    assert [name for name in found if step or name == "often"] == due


@pytest.mark.parametrize(
    ("words", "options", "mistake"),
    [
        (
            ["data/plus.jsonl"],
            {},
            "data/plus.jsonl: not name=data or name.setting=value, with a name of letters, digits, _",
        ),
        (["data/plus.jsonl"], {}, "Write plus=data/plus.jsonl if these are data."),
        (["a b=x.jsonl"], {}, "a b=x.jsonl: not name=data"),
        (["a/b=x.jsonl"], {}, "a/b=x.jsonl: not name=data"),
        (["a="], {}, "a=: not name=data"),
        (
            ["a=x.jsonl", "a=y.jsonl"],
            {},
            "a=y.jsonl: there is a set of this name already, a=x.jsonl. Choose another name.",
        ),
        (
            ["objective=x.jsonl"],
            {},
            "objective=x.jsonl: eval/objective/… are metrics of all sets. Choose another name.",
        ),
        (["rewards=x.jsonl"], {}, "eval/rewards/… are metrics of all sets. Choose another name."),
        (
            ["a=x.jsonl"],
            {"dataset_mixer_eval_list_splits": ["train"]},
            "the splits are those of dataset_mixer_eval_list. Give each set its own, NAME.split=train.",
        ),
        (["a=x.jsonl", "b.samples=2"], {}, "b.samples: there is no set b. Name its data, such as b=data/b.jsonl."),
        (
            ["a=x.jsonl", "a.temp=2"],
            {},
            "a.temp=2: a set has no setting 'temp'. It has temperature, top_p, response_length",
        ),
        (["a=x.jsonl", "a.samples=2", "a.samples=4"], {}, "a.samples=4: it is given twice, first 2."),
        (["a=x.jsonl", "a.samples=two"], {}, "a.samples=two: not a whole number. Give 1 or more."),
        (["a=x.jsonl", "a.interval=0"], {}, "a.interval=0: out of range. Give 1 or more, or -1 for never."),
        (["a=x.jsonl", "a.temperature=0.001"], {}, "a.temperature=0.001: the engine would take 0.01 in its place."),
        (
            ["a=x.jsonl", "a.temperature=0", "a.samples=2"],
            {},
            "--eval_temperature None: a has 2 greedy responses to a prompt, which are all the same. Set a.samples to 1",
        ),
        (
            ["a=x.jsonl", "a.interval=-1"],
            {},
            "the evaluation of a would never run. Set local_eval_every or an interval",
        ),
        (["a=x.jsonl"], {"dataset_mixer_eval_list": ["b", "1.0"]}, "both name the data to evaluate on."),
    ],
)
def test_mistakes_in_sets_are_told(words: list[str], options: dict[str, Any], mistake: str) -> None:
    mistakes = [one for one in collect_mistakes(make_args(eval_sets=words, **options)) if one.startswith("--")]
    assert any(mistake in one for one in mistakes), mistakes
    assert all("eval_sets" in one.partition(": ")[0] for one in mistakes), mistakes


def test_sets_that_can_be_read_are_no_mistake() -> None:
    words = ["a=x.jsonl", "b=y.jsonl", "b.samples=4", "b.temperature=1.0", "a.interval=-1"]
    assert not [one for one in collect_mistakes(make_args(eval_sets=words, eval_on_step_0=True)) if "eval" in one]


@pytest.mark.parametrize(
    ("entries", "names"),
    [
        (["data/train.jsonl"], ["train"]),
        (["openai/gsm8k?config=main", "reasoning_gym/chain_sum?size=5"], ["gsm8k", "chain_sum"]),
        (["gsm8k/test.parquet", "math/test.parquet", "x.json"], ["gsm8k_test", "math_test", "x"]),
        (["reasoning_gym/chain_sum?size=5", "reasoning_gym/chain_sum?size=9"], ["chain_sum", "chain_sum_2"]),
        (["a/b.jsonl", "a/b.jsonl", "c/b.jsonl"], ["a_b", "a_b_2", "c_b"]),
        (["data/my set.jsonl", "x_2", "x", "./x"], ["my_set", "x_2", "x", "x_3"]),
    ],
)
def test_short_names_tell_entries_apart(entries: list[str], names: list[str]) -> None:
    assert short_names(entries) == names
