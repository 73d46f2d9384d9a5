"""A step's metrics by the sources of its prompts, and by the environments that rows name."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from conftest import make_args
from group_fakes import make_group

from open_instruct.data.prompt_dataset import PromptDataset, PromptDatasetBuilder
from open_instruct.data.row_places import PlaceInSource
from open_instruct.rollouts.source_metrics import SourceMetrics
from open_instruct.scored_groups import ScoredGroup
from open_instruct.workflows.conversations.options import ConversationOptions
from open_instruct.workflows.conversations.workflow import Conversations
from open_instruct.workflows.single_turn import SingleTurn

ENTRIES = ["data/easy.jsonl", "1.0", "data/hard.jsonl", "2.0", "data/rest.jsonl", "1.0"]


def dataset(numbers: Sequence[int], facts: Mapping[int, Any] | None = None) -> PromptDataset:
    """Rows of each entry, and the facts of some."""
    builder = PromptDatasetBuilder()
    for number in numbers:
        for _ in range(number):
            row = len(builder)
            place, of_row = PlaceInSource("line", row), (facts or {}).get(row)
            builder.add(
                token_ids=[row], ground_truth="", dataset="sums", raw_query="", source="s", place=place, facts=of_row
            )
        builder.end_entry()
    return builder.build()


def group(row: int, scores: list[float], lengths: list[int] | None = None) -> ScoredGroup:
    made = make_group(scores, lengths=lengths or [4] * len(scores))
    return replace(made, result=replace(made.result, index=row))


def test_each_source_has_its_scores_lengths_and_share_of_the_batch() -> None:
    args = make_args(dataset_mixer_list=ENTRIES, verification_reward=10.0)
    metrics = SourceMetrics(args, SingleTurn(None), dataset([2, 3, 1]))
    mixed = group(1, [1, 0], [2, 6])
    groups = [group(0, [1, 1]), mixed, group(4, [0, 0], [8, 8])]
    assert metrics.of_step(groups, [mixed]) == {
        "source/easy/groups": 2,
        "source/easy/share": 1.0,
        "source/easy/scores": 7.5,
        "source/easy/solved": 0.5,
        "source/easy/zero": 0.0,
        "source/easy/length": 4.0,
        "source/hard/groups": 1,
        "source/hard/share": 0.0,
        "source/hard/scores": 0.0,
        "source/hard/solved": 0.0,
        "source/hard/zero": 1.0,
        "source/hard/length": 8.0,
        "source/rest/groups": 0,  # the mean of no groups is not known
        "source/rest/share": 0.0,
    }


def test_a_single_source_has_no_metrics_of_its_own() -> None:
    metrics = SourceMetrics(make_args(dataset_mixer_list=ENTRIES[:2]), SingleTurn(None), dataset([2]))
    assert metrics.of_step([group(0, [1, 0])], []) == {}


def test_environments_that_rows_name_have_metrics() -> None:
    names = {0: [{"env_name": "counter"}], 1: [{"env_name": "counter"}, {"env_name": "guess_number"}]}
    facts = {row: {"environments": of_row} for row, of_row in names.items()} | {2: {}}
    workflow = Conversations(ConversationOptions())
    metrics = SourceMetrics(make_args(dataset_mixer_list=ENTRIES[:2]), workflow, dataset([3], facts))
    groups = [group(0, [1, 1]), group(1, [0, 0]), group(2, [0, 0])]
    found = metrics.of_step(groups, groups[:2])
    assert {name: value for name, value in found.items() if name.endswith(("groups", "solved", "share"))} == {
        "environment/counter/groups": 2,
        "environment/counter/solved": 0.5,
        "environment/counter/share": 1.0,
        "environment/guess_number/groups": 1,
        "environment/guess_number/solved": 0.0,
        "environment/guess_number/share": 0.5,
    }


def test_rows_know_their_entry_after_they_were_written_and_read() -> None:
    written = dataset([2, 0, 3])
    read = PromptDataset.from_arrays(written.arrays())
    assert [read.entry_of(row) for row in range(5)] == [0, 0, 2, 2, 2]
    assert [list(read.rows_of_entry(entry)) for entry in range(3)] == [[0, 1], [], [2, 3, 4]]


@pytest.mark.parametrize("rows", [1, 4])
def test_rows_without_an_end_are_one_entry(rows: int) -> None:
    builder = PromptDatasetBuilder()
    for row in range(rows):
        place = PlaceInSource("line", row)
        builder.add(token_ids=[row], ground_truth="", dataset="sums", raw_query="", source="s", place=place)
    assert list(builder.build().rows_of_entry(0)) == list(range(rows))
