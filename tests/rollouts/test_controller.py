# ruff: noqa: F811 - fixtures are imported
"""The controller issues prompts and puts batches together."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from controller_stage import (  # noqa: F401 - fixtures
    HOPELESS,
    NUM_PROMPTS,
    NUM_STEPS,
    QUIET_S,
    TIMEOUT_S,
    MakePlay,
    _rows,
    all_samples_of,
    content_of,
    datasets,
    ids,
    load_rows,
    make_play,
    step_of,
    tokenizer,
)

from open_instruct.data.sample_record import DataProtoItem
from open_instruct.rollouts import prompt_feeder

# --- admission --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("async_steps", [0, 1, 2])
def test_exactly_what_the_bound_allows_is_issued(make_play: MakePlay, async_steps: int) -> None:
    play = make_play(async_steps=async_steps).start()
    issued_at: list[tuple[int, int]] = []
    for training_step in range(1, NUM_STEPS + 1):
        requests = play.receive_admitted()
        assert play.no_more_comes()
        assert {request.issue_version for request in requests} <= {play.version}
        issued_at += [(play.version, step_of(request)) for request in requests]
        assert max(step for _, step in issued_at) == min(play.version + 1 + async_steps, NUM_STEPS)
        play.deliver(*(play.answer(request) for request in requests))
        assert play.batch(training_step).metrics["num_steps_off_policy"] <= async_steps
        play.finish_step(training_step)
    assert play.no_more_comes()
    assert all(0 <= step - 1 - version <= async_steps for version, step in issued_at)
    assert [step for _, step in issued_at] == [step for step in range(1, NUM_STEPS + 1) for _ in range(NUM_PROMPTS)]
    assert ids(play.received) == [f"train-{number}" for number in range(NUM_STEPS * NUM_PROMPTS)]


def test_a_full_queue_loses_and_doubles_nothing(make_play: MakePlay) -> None:
    play = make_play(room=1, async_steps=2).start()
    time.sleep(QUIET_S)  # the controller stands before the full queue
    assert play.controller.status()["queues"]["prompts"] == 1
    assert ids(play.receive_admitted()) == [f"train-{number}" for number in range(3 * NUM_PROMPTS)]
    assert play.no_more_comes()


def test_requests_carry_the_prompts_of_the_shuffled_dataset(make_play: MakePlay, datasets: Any) -> None:
    play = make_play(async_steps=2).start()
    requests = play.receive_admitted()
    # An epoch is ten rows, each once.
    assert sorted(request.index for request in requests[:10]) == list(range(10))
    assert [request.index for request in requests[:10]] != list(range(10))
    for request in requests:
        np.testing.assert_array_equal(request.prompt, datasets[0][request.index].prompt)
        assert request.generation_config.n == 4
    assert len({request.generation_config.seed for request in requests}) == len(requests)


# --- batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_a_batch_is_the_prompts_of_its_step_whatever_comes_first(make_play: MakePlay, seed: int) -> None:
    play, in_order = make_play(async_steps=1).start(), make_play(async_steps=1).start()
    requests = play.receive(2 * NUM_PROMPTS)
    results = [play.answer(request) for request in requests]
    in_order.deliver(*results)
    # Step 2 is complete before step 1 is; every result comes in an item of its own.
    order = [*np.random.default_rng(seed).permutation(np.r_[1:8]).tolist(), 0]
    for i in order:
        play.deliver(results[i])
    for training_step in (1, 2):
        batch = play.batch(training_step)
        assert batch.training_step == training_step
        own = [request for request in requests if step_of(request) == training_step]
        assert play.prompts_in(batch) == all_samples_of(*own)
        assert content_of(batch) == content_of(in_order.batch(training_step))


def test_advantages_lie_on_the_responses_they_belong_to(make_play: MakePlay) -> None:
    play = make_play().start()
    patterns = [(1, 0, 0, 0), (1, 1, 0, 0), (0, 0, 0, 1), (0, 1, 1, 1)]
    requests = play.receive(NUM_PROMPTS)
    play.deliver(*(play.answer(request, scores) for request, scores in zip(requests, patterns, strict=True)))
    rank: Any = play.batch(1).rank_data[0]
    found = {}
    for micro_batch in rank[0].micro_batches:
        for tokens, mask, advantages in zip(
            micro_batch.query_responses, micro_batch.response_masks, micro_batch.advantages, strict=True
        ):
            found[play.tokenizer.decode(tokens[mask]).partition(" ")[0]] = set(advantages[mask].tolist())
    assert found == {
        f"{request.prompt_id}/{i}": {10.0 * score - 2.5 * sum(scores)}
        for request, scores in zip(requests, patterns, strict=True)
        for i, score in enumerate(scores)
    }


def test_a_batch_waits_for_prompts_that_are_not_issued_yet(
    make_play: MakePlay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_feeder, "bundles_per_step", lambda _: NUM_PROMPTS)  # one prompt a bundle
    play = make_play()
    put, may_go_on = play.prompt_queue.put, threading.Event()

    def put_and_dawdle(item: Any, timeout: float) -> None:
        put(item, timeout)
        may_go_on.wait(TIMEOUT_S)

    monkeypatch.setattr(play.prompt_queue, "put", put_and_dawdle)
    play.start()
    play.deliver(*(play.answer(request) for request in play.receive(1)))
    assert "0 prompts are not back from the engines (none), 0 groups are being scored" in play.nothing_is_ready()
    may_go_on.set()
    play.deliver(*(play.answer(request) for request in play.receive_admitted()))
    assert play.prompts_in(play.batch(1)) == all_samples_of(*play.received)


def test_a_result_that_comes_twice_counts_once(make_play: MakePlay) -> None:
    play = make_play().start()
    requests = play.receive(NUM_PROMPTS)
    results = [play.answer(request) for request in requests]
    play.deliver(results[0], play.answer(requests[0], HOPELESS), *results[:3])
    assert "1 prompt is not back" in play.nothing_is_ready()
    play.deliver(results[3])
    # The first of two is the one that counts.
    assert play.prompts_in(play.batch(1)) == all_samples_of(*requests)
    play.finish_step(1)
    play.deliver(*results)  # after their fate, too
    play.run(2, 2)
    status = play.controller.status()
    assert (status["prompts"]["consumed"], status["prompts"]["dropped"]) == (2 * NUM_PROMPTS, {})
    assert status["queues"]["waiting_results"] == 0
    assert status["num_generated_tokens"] == sum(
        play.answer(request).token_statistics.num_response_tokens for request in play.received[: 2 * NUM_PROMPTS]
    )


def test_a_step_comes_in_pieces_while_others_are_still_out(make_play: MakePlay) -> None:
    play = make_play(streaming=True, pack_length=256).start()
    requests = play.receive(NUM_PROMPTS)
    results = [play.answer(request) for request in requests]
    play.deliver(*results[:3])
    first = play.message_queue.partial_batches.get(timeout=TIMEOUT_S)
    assert (first.number, first.is_last, first.metrics) == (0, False, {})
    play.deliver(results[3])
    rest = [play.message_queue.partial_batches.get(timeout=TIMEOUT_S)]
    while not rest[-1].is_last:
        rest.append(play.message_queue.partial_batches.get(timeout=TIMEOUT_S))
    partial_batches = [first, *rest]
    assert sorted(one for partial_batch in partial_batches for one in play.prompts_in(partial_batch)) == all_samples_of(
        *requests
    )
    trained = sum(int(mask.sum()) for partial_batch in partial_batches for _, mask in _rows(partial_batch))
    assert partial_batches[-1].num_global_tokens == trained
    assert sum(partial_batch.num_samples for partial_batch in partial_batches) == 4 * NUM_PROMPTS
    assert partial_batches[-1].metrics["batch/num_partial_batches"] == len(partial_batches)


def test_partial_batch_that_the_message_queue_took_without_an_answer_comes_once(
    make_play: MakePlay, caplog: pytest.LogCaptureFixture
) -> None:
    play = make_play()
    play.message_queue.num_unanswered = 2
    play.start()
    play.run(1, 2)  # each batch is the next: see `partial_batches`
    assert play.nothing_is_ready()
    assert "partial batch 0 of step 1: the message queue did not answer; it is put again" in caplog.text


def test_what_a_step_trained_on_can_be_read_as_data_again(make_play: MakePlay, tmp_path: Path, tokenizer: Any) -> None:
    play = make_play(record=True, save_traces=True, output_dir=str(tmp_path), response_length=64).start()
    requests = play.receive(NUM_PROMPTS)
    play.deliver(*(play.answer(request) for request in requests))
    play.batch(1)
    play.finish_step(1)
    play.controller._record.flush()
    path = tmp_path / "samples" / "step_000001.jsonl"
    items = [DataProtoItem.from_json(line) for line in path.read_text().splitlines()]
    assert len(items) == 4 * NUM_PROMPTS
    assert_rollouts(list((tmp_path / "rollouts").glob("*_rollouts_000001.jsonl")), items)
    assert [item.non_tensor_batch["uid"] for item in items[::4]] == ids(requests)
    dataset = load_rows(str(path), tokenizer)
    for row, request in zip(range(0, len(dataset), 4), requests, strict=True):
        np.testing.assert_array_equal(dataset[row].prompt, request.prompt)
        assert dataset[row].ground_truth == play.datasets[False][request.index].ground_truth


def assert_rollouts(paths: list[Path], items: list[DataProtoItem]) -> None:
    """The rollouts of open-instruct's format, of the same samples."""
    (path,) = paths
    (metadata,) = path.parent.glob("*_metadata.jsonl")
    assert path.name.startswith(json.loads(metadata.read_text())["run_name"])
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["sample_idx"] for record in records] == list(range(len(items)))
    for record, item in zip(records, items, strict=True):
        assert set(record) == {
            *("step", "sample_idx", "prompt_idx", "prompt_tokens", "response_tokens", "reward", "advantage"),
            *("finish_reason", "dataset", "ground_truth", "request_info", "logprobs"),
            *("row", "outcome", "prompt_id"),  # beside open-instruct's fields
        }
        assert (record["step"], record["prompt_idx"]) == (1, record["sample_idx"] // 4)
        assert record["prompt_id"] == item.non_tensor_batch["uid"]
        assert record["ground_truth"] == item.non_tensor_batch["reward_model"]["ground_truth"]
        assert len(record["logprobs"]) == len(record["response_tokens"]) > 0
    assert {np.sign(record["advantage"]) for record in records} == {-1, 1}
    assert {record["reward"] for record in records if record["advantage"] < 0} == {0.0}
