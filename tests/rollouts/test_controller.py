"""The controller with the real tokenizer, dataset and verifiers; the engines and their queues are played by the test."""

import itertools
import json
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import pytest
from conftest import TINY_MODEL, make_args
from fake_queue import FakeQueue
from group_fakes import ended_by, make_result
from judges import JudgeServer
from played_teachers import TOP_K, PlayedRay, PlayedTeacher, said_of
from ray.util.queue import Empty

from open_instruct.config.verifier_options import VerifierConfig
from open_instruct.data.dataset_transformation import load_prompts
from open_instruct.data.prompt_dataset import PromptDataset
from open_instruct.data.sample_record import DataProtoItem
from open_instruct.data_types import GenerationResult, PromptRequest, RolloutBatch, TokenStatistics
from open_instruct.rollouts import controller as rollout
from open_instruct.rollouts import (
    data_preparation,
    prompt_feeder,
    result_scoring,
    step_filling,
    teacher_scoring,
)
from open_instruct.rollouts.controller import ControllerOptions, RolloutController
from open_instruct.rollouts.message_queue import QueueFull
from open_instruct.rollouts.prompt_requests import request_seed
from open_instruct.rollouts.rollout_state import read_state, write_state
from open_instruct.rollouts.staleness import CONSUMED, MASKED, ZERO_STD
from open_instruct.verifiers.pool import VerifierPool
from open_instruct.verifiers.scoring_processes import Scored
from open_instruct.verifiers.verifiers import score_response, verifier_names
from open_instruct.workflows.rc.workflow import ReasoningCache

TIMEOUT_S = 60.0
"""A busy machine takes ten seconds to start the verifiers' processes."""
QUIET_S = 0.15
"""When nothing has come for so long, nothing will; many times `POLL_S` below."""
NUM_PROMPTS = 4
NUM_STEPS = 4

Scores = Sequence[int]
"""Of the responses to one prompt: 1 is a right answer, 0 a wrong one."""
MIXED: Scores = (1, 0, 0, 1)
SOLVED: Scores = (1, 1, 1, 1)
HOPELESS: Scores = (0, 0, 0, 0)


class FakeMessageQueue:
    """What the controller hands to the learners, in this process."""

    def __init__(self, room: int = 0) -> None:
        self.partial_batches: queue.Queue[RolloutBatch] = queue.Queue(room)
        self.num_unanswered = 0
        """Puts that are to be taken without an answer."""
        self._taken: set[str] = set()

    def put(self, batch: RolloutBatch, *, version: int, num_samples: int, timeout: float, message_id: str) -> None:
        assert version == batch.min_version
        assert num_samples == max(batch.num_samples, 1)
        if message_id not in self._taken:
            try:
                self.partial_batches.put(batch, timeout=timeout)
            except queue.Full:
                raise QueueFull("the message queue is full") from None
            self._taken.add(message_id)
        if self.num_unanswered:
            self.num_unanswered -= 1
            raise TimeoutError("the message queue did not answer")


class VerifiersInThisProcess:
    """The real verifiers without a process that would have to start for each test."""

    def __init__(
        self,
        num_workers: int,
        timeout_s: float,
        *,
        ready: Sequence[str],
        modules: Sequence[str],
        config: VerifierConfig,
    ) -> None:
        pass

    def submit(
        self, dataset: str, truth: object, token_ids: list[list[int]], texts: list[str], query: str
    ) -> Future[list[Scored]]:
        scored: Future[list[Scored]] = Future()
        scores = [score_response(dataset, truth, ids, text).score for ids, text in zip(token_ids, texts, strict=True)]
        scored.set_result([Scored(score) for score in scores])
        return scored

    def close(self) -> None:
        pass


class JudgesInThisProcess(VerifiersInThisProcess):
    """They take money, and know the prompt."""

    queries: ClassVar[set[str]] = set()

    def submit(
        self, dataset: str, truth: object, token_ids: list[list[int]], texts: list[str], query: str
    ) -> Future[list[Scored]]:
        free = super().submit(dataset, truth, token_ids, texts, query).result()
        scored: Future[list[Scored]] = Future()
        scored.set_result([replace(one, cost=0.25) for one in free])
        self.queries.add(query)
        return scored


class Play:
    """A controller and everything around it. `version` is the version of the weights that the engines serve."""

    def __init__(
        self,
        train: PromptDataset,
        held_out: PromptDataset,
        tokenizer: Any,
        *,
        room: int,
        ready_steps: int,
        teacher: PlayedTeacher | None = None,
        **options: Any,
    ):
        self.args = make_args(**{"async_steps": 0, **options})
        self.datasets = {False: train, True: held_out}
        self.tokenizer = tokenizer
        self.prompt_queue, self.result_queue = FakeQueue(room), FakeQueue()
        facts = ControllerOptions(num_ranks=1, layout="padded", pad_token_id=0, tokenizer_name_or_path=str(TINY_MODEL))
        queues: Any = (self.prompt_queue, self.result_queue)
        self.message_queue = FakeMessageQueue(ready_steps)
        self.controller = RolloutController(
            self.args,
            facts,
            train,
            held_out,
            *queues,
            message_queue=cast("Any", self.message_queue),
            teachers=cast("Any", [] if teacher is None else [teacher]),
        )
        self.version = self.first_version = 0
        self.received: list[PromptRequest] = []

    def start(self, version: int = 0) -> "Play":
        self.version = self.first_version = version
        self.controller.start(version)
        return self

    def receive(self, number: int) -> list[PromptRequest]:
        """The next prompts from the queue; they come in bundles, which these have to end with."""
        requests: list[PromptRequest] = []
        while len(requests) < number:
            requests += self.prompt_queue.get(timeout=TIMEOUT_S)
        assert len(requests) == number, [request.prompt_id for request in requests]
        self.received += requests
        return requests

    def receive_admitted(self) -> list[PromptRequest]:
        """All training prompts that may be issued at this version and have not come yet."""
        last_step = min(self.version + 1 + self.args.async_steps, NUM_STEPS)
        num_training = sum(not request.is_eval for request in self.received)
        return self.receive(NUM_PROMPTS * (last_step - self.first_version) - num_training)

    def no_more_comes(self) -> bool:
        try:
            self.prompt_queue.get(timeout=QUIET_S)
        except Empty:
            return True
        return False

    def answer(self, request: PromptRequest, scores: Scores = MIXED, version: int | None = None) -> GenerationResult:
        """Responses that score so, and tell which prompt they are for."""
        truth: Any = self.datasets[request.is_eval][request.index].ground_truth
        right = json.loads(truth)["answer"]
        texts = [
            f"{request.prompt_id}/{i} <answer>{right if score else 'no'}</answer>"
            for i, score in zip(range(request.generation_config.n), scores, strict=False)
        ]
        responses = [np.array(self.tokenizer.encode(text), dtype=np.int32) for text in texts]
        num_tokens = [len(response) for response in responses]
        version = self.version if version is None else version
        return make_result(
            responses=responses,
            logprobs=[np.full(n, -1.0, dtype=np.float32) for n in num_tokens],
            finish_reasons=["stop"] * len(texts),
            version_spans=[[(version, n)] for n in num_tokens],
            prompt=np.asarray(request.prompt),
            index=request.index,
            prompt_id=request.prompt_id,
            issue_version=request.issue_version,
            engine_id=0,
            token_statistics=TokenStatistics(len(request.prompt), sum(num_tokens), 0.5, time.time()),
            marker=request.marker,
        )

    def deliver(self, *results: GenerationResult) -> None:
        self.result_queue.put(list(results), timeout=TIMEOUT_S)

    def batch(self, training_step: int) -> RolloutBatch:
        """The batch of a step that comes at once."""
        [batch] = self.partial_batches(training_step)
        return batch

    def partial_batches(self, training_step: int) -> list[RolloutBatch]:
        """All batches of a step; raises what ended a thread of the controller."""
        partial_batches: list[RolloutBatch] = []
        deadline = time.monotonic() + TIMEOUT_S
        while not partial_batches or not partial_batches[-1].is_last:
            assert time.monotonic() < deadline, self.controller.describe_progress()
            try:
                partial_batches.append(self.message_queue.partial_batches.get(timeout=0.01))
            except queue.Empty:
                self.controller.status()
        assert [(partial_batch.training_step, partial_batch.number) for partial_batch in partial_batches] == [
            (training_step, number) for number in range(len(partial_batches))
        ]
        return partial_batches

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline, self.controller.describe_progress()
            time.sleep(0.01)

    def nothing_is_ready(self) -> str:
        """Asserts that no batch comes, and tells why."""
        with pytest.raises(queue.Empty):
            self.message_queue.partial_batches.get(timeout=QUIET_S)
        return self.controller.describe_progress()

    def finish_step(self, training_step: int) -> list[dict[str, Any]]:
        """What the driver does when a step is trained; returns the fates."""
        fates = self.controller.commit(training_step)
        self.version = training_step
        self.controller.set_version(training_step)
        return fates

    def run(self, first_step: int, last_step: int) -> list[RolloutBatch]:
        """Training steps with every prompt answered at once."""
        batches = []
        for training_step in range(first_step, last_step + 1):
            self.deliver(*(self.answer(request) for request in self.receive_admitted()))
            batches.append(self.batch(training_step))
            self.finish_step(training_step)
        return batches

    def prompts_in(self, batch: RolloutBatch) -> list[tuple[str, int]]:
        """(prompt id, number of the sample) of every trained response, sorted; the texts tell."""
        found = []
        for tokens, mask in _rows(batch):
            match = re.match(r"((?:train|eval)-[\d-]+)/(\d+) ", self.tokenizer.decode(tokens[mask]))
            assert match is not None
            found.append((match[1], int(match[2])))
        return sorted(found)


def _rows(batch: RolloutBatch) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for rank in batch.rank_data:
        mini_batches: Any = rank
        for micro_batch in itertools.chain.from_iterable(m.micro_batches for m in mini_batches):
            yield from zip(micro_batch.query_responses, micro_batch.response_masks, strict=True)


def content_of(batch: RolloutBatch) -> list[tuple[bytes, ...]]:
    """Every array of a batch, to compare."""
    ranks: list[Any] = batch.rank_data
    micro_batches = [m for rank in ranks for mini_batch in rank for m in mini_batch.micro_batches]
    return [
        tuple(array.tobytes() for array in vars(micro_batch).values() if array is not None)
        for micro_batch in micro_batches
    ]


def all_samples_of(*requests: PromptRequest) -> list[tuple[str, int]]:
    return sorted((request.prompt_id, i) for request in requests for i in range(4))


def ids(requests: Sequence[PromptRequest]) -> list[str]:
    return [request.prompt_id for request in requests]


def identities(requests: Sequence[PromptRequest]) -> list[tuple[Any, ...]]:
    """All that a request says but the version at which it was issued."""
    return [(r.prompt_id, r.index, r.generation_config.seed, r.prompt.tobytes()) for r in requests]


def step_of(request: PromptRequest) -> int:
    """The step that takes the group when none is left out or left behind."""
    return int(request.prompt_id.removeprefix("train-")) // NUM_PROMPTS + 1


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TINY_MODEL)


@pytest.fixture(scope="module")
def datasets(tokenizer: Any) -> tuple[PromptDataset, PromptDataset]:
    """Ten rows to train on and three to evaluate."""

    def load(size: int, seed: int) -> PromptDataset:
        entry = f"reasoning_gym/chain_sum?min_terms=2&max_terms=2&min_digits=2&max_digits=2&size={size}&seed={seed}"
        dataset, _ = load_prompts(
            [entry, "1.0"],
            ["train"],
            tokenizer=tokenizer,
            max_prompt_token_length=64,
            overlong_prompts="error",
            messages_key="messages",
            ground_truths_key="ground_truth",
            known_verifiers=verifier_names(),
        )
        return dataset

    return load(10, 1), load(3, 1000)


MakePlay = Callable[..., Play]


@pytest.fixture
def make_play(
    datasets: tuple[PromptDataset, PromptDataset], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MakePlay]:
    for module in (rollout, data_preparation, prompt_feeder, step_filling):
        monkeypatch.setattr(module, "POLL_S", 0.02)
    monkeypatch.setattr(step_filling.ray, "put", lambda value: value)
    monkeypatch.setattr(rollout, "VerifierPool", VerifiersInThisProcess)
    monkeypatch.setattr(teacher_scoring, "ray", PlayedRay())
    plays: list[Play] = []

    def make(*, room: int = 0, ready_steps: int = 0, **options: Any) -> Play:
        """`room` bundles fit into the prompt queue, `ready_steps` batches into the message queue; 0 is no limit."""
        plays.append(Play(datasets[0], datasets[1], tokenizer, room=room, ready_steps=ready_steps, **options))
        return plays[-1]

    yield make
    for play in plays:
        play.controller.stop()


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
    assert "0 prompts are not back from the engines (none), 0 are being scored" in play.nothing_is_ready()
    may_go_on.set()
    play.deliver(*(play.answer(request) for request in play.receive_admitted()))
    assert play.prompts_in(play.batch(1)) == all_samples_of(*play.received)


def test_a_result_that_comes_twice_counts_once(make_play: MakePlay) -> None:
    play = make_play().start()
    requests = play.receive(NUM_PROMPTS)
    results = [play.answer(request) for request in requests]
    play.deliver(results[0], play.answer(requests[0], HOPELESS), *results[:3])
    assert "1 prompts are not back" in play.nothing_is_ready()
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
    play = make_play(save_traces=True, output_dir=str(tmp_path), response_length=64).start()
    requests = play.receive(NUM_PROMPTS)
    play.deliver(*(play.answer(request) for request in requests))
    play.batch(1)
    path = tmp_path / "samples" / "step_000001.jsonl"
    items = [DataProtoItem.from_json(line) for line in path.read_text().splitlines()]
    assert len(items) == 4 * NUM_PROMPTS
    assert_rollouts(list((tmp_path / "rollouts").glob("*_rollouts_000001.jsonl")), items)
    assert [item.non_tensor_batch["uid"] for item in items[::4]] == ids(requests)
    dataset, _ = load_prompts(
        [str(path), "1.0"],
        ["train"],
        tokenizer=tokenizer,
        max_prompt_token_length=64,
        overlong_prompts="error",
        messages_key="messages",
        ground_truths_key="ground_truth",
        known_verifiers=verifier_names(),
    )
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
        }
        assert (record["step"], record["prompt_idx"]) == (1, record["sample_idx"] // 4)
        assert record["ground_truth"] == item.non_tensor_batch["reward_model"]["ground_truth"]
        assert len(record["logprobs"]) == len(record["response_tokens"]) > 0
    assert {np.sign(record["advantage"]) for record in records} == {-1, 1}
    assert {record["reward"] for record in records if record["advantage"] < 0} == {0.0}


# --- pausing and loss -------------------------------------------------------------------------------------------------


def test_a_paused_controller_issues_nothing_until_it_is_resumed(make_play: MakePlay) -> None:
    play = make_play()
    play.controller.pause()
    play.start()
    assert play.no_more_comes()
    assert play.controller.get_statistics()["is_paused"]
    play.controller.resume()
    play.receive(NUM_PROMPTS)
    statistics = play.controller.get_statistics()
    assert (statistics["is_paused"], statistics["pause_count"], statistics["resume_count"]) == (False, 1, 1)


def test_prompts_that_an_engine_took_with_it_are_issued_again(make_play: MakePlay) -> None:
    play = make_play(async_steps=1, room=2).start()
    at_engines = play.receive(2)  # one bundle
    time.sleep(QUIET_S)
    taken_back = play.controller.take_back_prompts()
    assert taken_back >= 2
    assert play.no_more_comes()  # nothing is issued while inventory is taken
    play.deliver(play.answer(at_engines[0]))
    assert play.controller.recover_lost(held=[]) == 1
    again = play.receive(2 * NUM_PROMPTS - 1)
    assert at_engines[1].prompt_id in ids(again)
    assert at_engines[0].prompt_id not in ids(again)
    assert play.controller.status()["prompts"]["reissued"] == 1


def broken_off(result: GenerationResult, error: str = "generation_timeout: over 1 s") -> GenerationResult:
    return replace(result, error=error, samples=[])


def test_a_prompt_that_the_engine_gave_up_is_issued_again_and_then_dropped(make_play: MakePlay) -> None:
    play = make_play(max_generation_attempts=2).start()
    requests = play.receive(NUM_PROMPTS)
    failed = broken_off(play.answer(requests[0]))
    play.deliver(failed)
    assert ids(play.receive(1)) == ["train-0"]
    play.deliver(failed)
    [instead] = play.receive(1)
    assert instead.prompt_id == f"train-{NUM_PROMPTS}"
    play.deliver(*(play.answer(request) for request in (*requests[1:], instead)))
    assert play.prompts_in(play.batch(1)) == all_samples_of(*requests[1:], instead)
    play.finish_step(1)
    assert play.controller.status()["prompts"]["dropped"] == {"failed": 1}
    statistics = play.controller.get_statistics()
    assert (statistics["generation_errors"], statistics["generation_timeouts"]) == (2, 2)
    assert statistics["dropped_timeouts"] == 1


def test_group_that_was_broken_off_is_sampled_again_with_another_seed(make_play: MakePlay) -> None:
    """With the same seed the samples that took too long would take too long again."""
    play = make_play(max_generation_attempts=3).start()
    requests = play.receive(NUM_PROMPTS)
    tried = [requests[0]]
    for _ in range(2):
        play.deliver(broken_off(play.answer(tried[-1])))
        tried += play.receive(1)
    assert len({request.generation_config.seed for request in (*tried, *requests[1:])}) == 2 + NUM_PROMPTS
    assert [request.generation_config.seed for request in requests] == [request_seed(1, i) for i in range(NUM_PROMPTS)]
    assert {request.prompt.tobytes() for request in tried} == {requests[0].prompt.tobytes()}


def test_retry_of_a_reasoning_cache_prompt_has_the_plan_of_before_and_one_that_is_dropped_leaves_none(
    make_play: MakePlay,
) -> None:
    options = {"rollout_workflow": "rc", "rc_states_per_problem": 1, "rc_buffer_size": 10, "max_generation_attempts": 2}
    play = make_play(**options).start()
    requests = play.receive(NUM_PROMPTS)
    play.deliver(broken_off(play.answer(requests[0])))
    [retry] = play.receive(1)
    assert retry.task == requests[0].task
    assert retry.generation_config.seed != requests[0].generation_config.seed
    workflow = play.controller._workflow
    assert isinstance(workflow, ReasoningCache)
    planner = workflow._planner
    assert set(planner._out) == set(ids(requests))
    play.deliver(broken_off(play.answer(retry)))
    [instead] = play.receive(1)
    assert set(planner._out) == {*ids(requests[1:]), instead.prompt_id}


def test_seed_of_a_retry_survives_a_dead_engine_and_a_resume(make_play: MakePlay, tmp_path: Path) -> None:
    killed = make_play(max_generation_attempts=2).start()
    requests = killed.receive(NUM_PROMPTS)
    killed.deliver(broken_off(killed.answer(requests[0])))
    [retry] = killed.receive(1)
    killed.controller.take_back_prompts()
    assert killed.controller.recover_lost(held=ids(requests[1:])) == 1
    assert identities(killed.receive(1)) == identities([retry])
    resumed = make_play(max_generation_attempts=2)
    killed.controller.save(0, str(tmp_path / "state.npz"))
    resumed.controller.load(0, str(tmp_path / "state.npz"))
    resumed.start()
    assert identities(resumed.receive(NUM_PROMPTS)) == identities([retry, *requests[1:]])


def test_failure_of_a_copy_whose_other_is_being_scored_changes_nothing(
    make_play: MakePlay, monkeypatch: pytest.MonkeyPatch
) -> None:
    play = make_play(max_generation_attempts=1).start()
    requests = play.receive(NUM_PROMPTS)
    scoring: Future[list[Scored]] = Future()
    submit = play.controller._scoring.verifiers.submit
    monkeypatch.setattr(play.controller._scoring.verifiers, "submit", lambda *_args: scoring)
    play.deliver(play.answer(requests[0]), broken_off(play.answer(requests[0])))
    play.wait_for(lambda: play.controller.get_statistics()["generation_errors"] == 1)
    monkeypatch.setattr(play.controller._scoring.verifiers, "submit", submit)
    scoring.set_result([Scored(float(score)) for score in MIXED])
    play.deliver(*(play.answer(request) for request in requests[1:]))
    assert play.prompts_in(play.batch(1)) == all_samples_of(*requests)
    assert {fate["fate"] for fate in play.finish_step(1)} == {CONSUMED}


def test_causes_of_failures_are_told_now_and_then(make_play: MakePlay, caplog: pytest.LogCaptureFixture) -> None:
    play = make_play(max_generation_attempts=9).start()
    request = play.receive(NUM_PROMPTS)[0]
    for _ in range(5):
        play.deliver(broken_off(play.answer(request)))
        [request] = play.receive(1)
    told = [record.getMessage() for record in caplog.records if "generation_timeout" in record.getMessage()]
    assert told == [
        "1 group was given up (generation_timeout: 1). The last is train-0 on engine 0: generation_timeout: over 1 s. It is "
        "sampled again with another seed."
    ]


def test_warnings_reach_the_driver_with_the_status_or_while_it_waits_for_data(make_play: MakePlay) -> None:
    play = make_play(max_generation_attempts=9).start()
    play.deliver(broken_off(play.answer(play.receive(NUM_PROMPTS)[0])))
    play.receive(1)
    [notice] = play.controller.status()["notices"]
    assert notice.startswith("1 group was given up (generation_timeout: 1).")
    assert play.controller.status()["notices"] == []
    play.deliver(*(play.answer(request, SOLVED) for request in play.received[:NUM_PROMPTS]))
    play.receive(NUM_PROMPTS)
    assert "; warnings: step 1: in each of 4 groups all responses scored alike" in play.controller.describe_progress()


def say(play: Play, monkeypatch: pytest.MonkeyPatch, *scored: Scored) -> None:
    """The verifiers say this of the next group, and of those after it."""
    said: Future[list[Scored]] = Future()
    said.set_result(list(scored))
    monkeypatch.setattr(play.controller._scoring.verifiers, "submit", lambda *_args: said)


def test_group_that_was_not_scored_is_sampled_again_and_not_trained_on(
    make_play: MakePlay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verifier that hangs says nothing of a response; the one response that is left has nobody to be compared with."""
    play = make_play(max_generation_attempts=2).start()
    requests = play.receive(NUM_PROMPTS)
    with monkeypatch.context() as patch:
        say(play, patch, Scored(1.0), *[Scored(None, "timeout")] * 3)
        play.deliver(play.answer(requests[0]))
        [again] = play.receive(1)
    assert again.index == requests[0].index
    assert again.generation_config.seed != requests[0].generation_config.seed
    play.deliver(*(play.answer(request) for request in (*requests[1:], again)))
    assert play.prompts_in(play.batch(1)) == all_samples_of(*requests[1:], again)
    statistics = play.controller.get_statistics()
    assert (statistics["unscored_groups"], statistics["generation_errors"]) == (1, 0)


def test_response_that_was_not_scored_is_left_out_of_baseline_and_loss(
    make_play: MakePlay, monkeypatch: pytest.MonkeyPatch
) -> None:
    play = make_play(advantage_normalization_type="centered").start()
    requests = play.receive(NUM_PROMPTS)
    with monkeypatch.context() as patch:
        say(play, patch, Scored(None, "timeout"), *[Scored(score) for score in (1.0, 0.0, 0.5)])
        play.deliver(play.answer(requests[0]))
        play.wait_for(lambda: play.controller._flow.ledger[requests[0].prompt_id].arrived)
    play.deliver(*(play.answer(request) for request in requests[1:]))
    batch = play.batch(1)
    assert play.prompts_in(batch) == all_samples_of(*requests)[1:]
    assert batch.metrics["objective/not_scored"] == 1
    assert play.controller.get_statistics()["unscored_groups"] == 0


def test_evaluation_leaves_out_what_was_not_scored(make_play: MakePlay, monkeypatch: pytest.MonkeyPatch) -> None:
    play = make_play()
    play.controller.start_evaluation(0)
    play.start()
    requests = play.receive(3 + NUM_PROMPTS)[:3]
    play.deliver(*(play.answer(request, [1]) for request in requests[:2]))
    hanging: Future[list[Scored]] = Future()
    hanging.set_result([Scored(None, "crash")])
    play.wait_for(lambda: play.controller._evaluations.current.num_done == 2)  # type: ignore[union-attr]
    monkeypatch.setattr(play.controller._scoring.verifiers, "submit", lambda *_args: hanging)
    play.deliver(play.answer(requests[2], [0]))
    metrics = play.controller.get_evaluation(TIMEOUT_S)
    assert (metrics["eval/pass_at_1"], metrics["eval/num_not_scored"]) == (1.0, 1)


def test_verification_that_cannot_be_done_ends_the_run(make_play: MakePlay, monkeypatch: pytest.MonkeyPatch) -> None:
    play = make_play().start()
    failed: Future[list[Scored]] = Future()
    failed.set_exception(ConnectionError("no verifier process could be started"))
    monkeypatch.setattr(play.controller._scoring.verifiers, "submit", lambda *_args: failed)
    play.deliver(play.answer(play.receive(NUM_PROMPTS)[0]))
    with pytest.raises(RuntimeError, match=r"verification of train-0 failed: .*no verifier process could be started"):
        play.controller.watch()


# --- groups that teach nothing ----------------------------------------------------------------------------------------


def test_groups_that_scored_alike_are_left_out(make_play: MakePlay) -> None:
    play = make_play().start()
    requests = play.receive(NUM_PROMPTS)
    scores = [MIXED, SOLVED, MIXED, HOPELESS]
    play.deliver(*(play.answer(request, own) for request, own in zip(requests, scores, strict=True)))
    batch = play.batch(1)
    assert play.prompts_in(batch) == all_samples_of(requests[0], requests[2])
    assert batch.metrics["batch/filtered_prompts"] == 2
    assert batch.metrics["scores"] == 5.0  # of all that was generated
    fates = play.finish_step(1)
    assert [fate["fate"] for fate in fates] == [CONSUMED, ZERO_STD, CONSUMED, ZERO_STD]
    assert [(fate["prompt_id"], fate["row"]) for fate in fates] == [(r.prompt_id, r.index) for r in requests]


def test_groups_that_scored_alike_may_stay(make_play: MakePlay) -> None:
    play = make_play(filter_zero_std_samples=False).start()
    requests = play.receive(NUM_PROMPTS)
    play.deliver(*(play.answer(request, SOLVED) for request in requests))
    assert play.prompts_in(play.batch(1)) == all_samples_of(*requests)
    assert play.controller.status()["prompts"]["issued"] == NUM_PROMPTS


@pytest.mark.parametrize("num_prompts", [1, 4])
def test_a_step_without_a_useful_group_gets_new_prompts(
    make_play: MakePlay, num_prompts: int, caplog: pytest.LogCaptureFixture
) -> None:
    play = make_play(num_unique_prompts_rollout=num_prompts, total_episodes=4 * num_prompts).start()
    for _ in range(2):
        play.deliver(*(play.answer(request, SOLVED) for request in play.receive(num_prompts)))
    last = play.receive(num_prompts)
    assert {request.issue_version for request in last} == {0}
    play.deliver(*(play.answer(request) for request in last))
    assert play.prompts_in(play.batch(1)) == all_samples_of(*last)
    assert f"in each of {2 * num_prompts} groups all responses scored alike (mean score 1)" in caplog.text
    play.finish_step(1)
    assert play.no_more_comes()
    assert play.controller.status()["prompts"] == {
        "issued": 3 * num_prompts,
        "consumed": num_prompts,
        "dropped": {ZERO_STD: 2 * num_prompts},
        "reissued": 0,
        "open": 0,
    }


def test_active_sampling_replaces_what_is_left_out(make_play: MakePlay) -> None:
    play = make_play(active_sampling=True).start()
    first = play.receive(NUM_PROMPTS)
    scores = [MIXED, SOLVED, MIXED, HOPELESS]
    play.deliver(*(play.answer(request, own) for request, own in zip(first, scores, strict=True)))
    second = play.receive(2)
    assert "step 1" in play.nothing_is_ready()
    play.deliver(play.answer(second[0], SOLVED), play.answer(second[1]))
    [last] = play.receive(1)
    play.deliver(play.answer(last))
    batch = play.batch(1)
    assert play.prompts_in(batch) == all_samples_of(first[0], first[2], second[1], last)
    assert batch.metrics["real_batch_size_ratio"] == 1
    assert len(play.finish_step(1)) == NUM_PROMPTS + 3


def test_prompts_that_were_solved_are_not_sampled_again(
    make_play: MakePlay, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also after a resume, and the passes over the data go on as if the solved rows had never been there."""
    options = {
        "no_resampling_pass_rate": 1.0,
        "filter_zero_std_samples": False,
        "total_episodes": 4 * NUM_PROMPTS * 100,
    }
    play = make_play(**options).start()
    num_rows = len(play.datasets[False])
    solved: set[int] = set()
    for step in range(1, num_rows // NUM_PROMPTS + 1):
        requests = play.receive(NUM_PROMPTS)
        solved |= {request.index for request in requests[:2]}
        play.deliver(*(play.answer(request, SOLVED) for request in requests[:2]), *map(play.answer, requests[2:]))
        play.batch(step)
        play.finish_step(step)
    play.controller.save(0, str(tmp_path / "state.npz"))
    again = make_play(**options)
    again.controller.load(0, str(tmp_path / "state.npz"))
    last = num_rows // NUM_PROMPTS
    for one in (play, again.start(last)):
        requests = one.receive(NUM_PROMPTS)
        assert not solved & {request.index for request in requests}
        one.deliver(*(one.answer(request, SOLVED) for request in requests))
        one.batch(last + 1)
    assert identities(play.received[-NUM_PROMPTS:]) == identities(again.received)


# --- a teacher --------------------------------------------------------------------------------------------------------

WITH_TEACHER: dict[str, Any] = {"teacher_model_name_or_path": str(TINY_MODEL), "distillation_top_k": TOP_K}


def test_what_the_teacher_says_lies_on_the_tokens_it_is_about(make_play: MakePlay) -> None:
    play = make_play(teacher=PlayedTeacher(), **WITH_TEACHER).start()
    [batch] = play.run(1, 1)
    micro_batches = [micro for mini in cast("Any", batch.rank_data)[0] for micro in mini.micro_batches]
    assert sum(micro.response_masks.sum() for micro in micro_batches) == batch.num_global_tokens > 0
    for micro in micro_batches:
        mask = micro.response_masks
        expected = said_of(micro.query_responses[mask])
        np.testing.assert_array_equal(micro.teacher_top_ids[mask], expected.top_ids)
        np.testing.assert_array_equal(micro.teacher_top_logprobs[mask], expected.top_logprobs)
        np.testing.assert_array_equal(micro.teacher_logprobs[mask], expected.logprobs)
        assert np.isneginf(micro.teacher_top_logprobs[~mask]).all()


@pytest.mark.parametrize("use_task_rewards", [False, True])
def test_with_a_teacher_every_group_is_trained_on(make_play: MakePlay, *, use_task_rewards: bool) -> None:
    """Groups whose answers are all right or all wrong learn from the teacher; without task rewards, all do so alone."""
    play = make_play(teacher=PlayedTeacher(), use_task_rewards=use_task_rewards, **WITH_TEACHER).start()
    requests = play.receive_admitted()
    scores = [MIXED, SOLVED, HOPELESS, MIXED]
    play.deliver(*(play.answer(request, one) for request, one in zip(requests, scores, strict=True)))
    batch = play.batch(1)
    assert play.prompts_in(batch) == all_samples_of(*requests)
    assert batch.metrics["objective/verifiable_correct_rate"] == 0.5
    assert (batch.metrics["val/advantages_max"] > 0) is use_task_rewards
    assert {fate["fate"] for fate in play.finish_step(1)} == {CONSUMED}


def test_groups_at_the_teacher_and_groups_that_wait_are_saved_and_it_is_asked_again(
    make_play: MakePlay, tmp_path: Path
) -> None:
    expected = content_of(make_play(teacher=PlayedTeacher(), **WITH_TEACHER).start().run(1, 1)[0])

    teacher = PlayedTeacher()
    killed = make_play(teacher=teacher, **WITH_TEACHER).start()
    requests = killed.receive_admitted()
    killed.deliver(killed.answer(requests[0]))
    killed.wait_for(lambda: bool(killed.controller._filling.taken.get(1)))
    teacher.answers = False
    killed.deliver(killed.answer(requests[1]))
    killed.wait_for(lambda: "(1 of them by the teacher)" in killed.controller.describe_progress())
    killed.controller.save(0, str(tmp_path / "state.npz"))
    killed.controller.stop()

    resumed = make_play(teacher=PlayedTeacher(), **WITH_TEACHER)
    resumed.controller.load(0, str(tmp_path / "state.npz"))
    resumed.start()
    issued_again = resumed.receive(NUM_PROMPTS - 2)
    assert identities(issued_again) == identities(requests[2:])
    resumed.deliver(*(resumed.answer(request) for request in issued_again))
    assert content_of(resumed.batch(1)) == expected


def cut_off(result: GenerationResult) -> GenerationResult:
    """The result with every response at its length limit."""
    return ended_by(result, *["length"] * len(result.samples))


@pytest.mark.parametrize("streaming", [False, True])
def test_step_whose_groups_are_all_masked_gets_new_prompts(
    make_play: MakePlay, streaming: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """With momentum an optimizer step over no token at all would still move the weights."""
    play = make_play(mask_truncated_completions=True, streaming=streaming).start()
    first = play.receive(NUM_PROMPTS)
    scores = [MIXED, SOLVED, MIXED, MIXED]
    play.deliver(*(cut_off(play.answer(request, own)) for request, own in zip(first, scores, strict=True)))
    more = play.receive(NUM_PROMPTS)  # no batch has come: see the numbers that `partial_batches` checks
    assert "step 1: no token of its 4 groups may be trained on" in caplog.text
    assert "in 1 of them all responses scored alike" in caplog.text
    assert "in 3 every response was cut off" in caplog.text
    play.deliver(cut_off(play.answer(more[0])), *(play.answer(request) for request in more[1:]))
    partial_batches = play.partial_batches(1)
    assert partial_batches[-1].num_global_tokens > 0
    assert partial_batches[-1].metrics["batch/filtered_prompts"] == NUM_PROMPTS + 1
    assert partial_batches[-1].metrics["real_batch_size_ratio"] == 0.75
    assert sorted(one for partial_batch in partial_batches for one in play.prompts_in(partial_batch)) == all_samples_of(
        *more[1:]
    )
    fates = [fate["fate"] for fate in play.finish_step(1)]
    assert fates == [MASKED, ZERO_STD, MASKED, MASKED, MASKED, CONSUMED, CONSUMED, CONSUMED]


# --- evaluation -------------------------------------------------------------------------------------------------------


def test_an_evaluation_comes_before_training_prompts_and_needs_none_of_them(make_play: MakePlay) -> None:
    play = make_play().start()
    play.deliver(*(play.answer(request) for request in play.receive(NUM_PROMPTS)))
    play.batch(1)
    play.controller.commit(1)
    play.version = 1
    play.controller.start_evaluation(1)
    play.controller.set_version(1)
    requests = play.receive(3 + NUM_PROMPTS)
    assert [request.is_eval for request in requests] == [True] * 3 + [False] * NUM_PROMPTS
    assert ids(requests[:3]) == ["eval-1-0", "eval-1-1", "eval-1-2"]
    play.deliver(*(play.answer(request, [score]) for request, score in zip(requests[:3], (1, 0, 1), strict=True)))
    metrics = play.controller.get_evaluation(TIMEOUT_S)  # not one training result has come
    assert metrics["eval/pass_at_1"] == pytest.approx(2 / 3)


def test_evaluation_results_never_enter_a_batch(make_play: MakePlay) -> None:
    play = make_play()
    play.controller.start_evaluation(0)
    play.start()
    held_out, training = play.receive(3 + NUM_PROMPTS)[:3], play.received[3:]
    assert [request.is_eval for request in play.received] == [True] * 3 + [False] * NUM_PROMPTS
    results = [play.answer(request) for request in (*training[:2], *held_out, *training[2:])]
    play.deliver(*results[:3])
    play.deliver(*results[3:])
    assert play.prompts_in(play.batch(1)) == all_samples_of(*training)
    metrics = play.controller.get_evaluation(TIMEOUT_S)
    assert metrics["eval/pass_at_1"] == 1.0
    assert (metrics["eval/model_step_min"], metrics["eval/model_step_max"]) == (0, 0)
    assert play.controller.status()["prompts"]["issued"] == NUM_PROMPTS


@pytest.mark.parametrize(("limit", "number"), [(2, 2), (-1, 3), (0, 0)])
def test_answers_of_an_evaluation_are_handed_over(make_play: MakePlay, limit: int, number: int) -> None:
    play = make_play(eval_completions=limit)
    play.controller.start_evaluation(0)
    play.start()
    requests = play.receive(3 + NUM_PROMPTS)[:3]
    play.deliver(*(play.answer(request) for request in requests))
    play.controller.get_evaluation(TIMEOUT_S)
    rows = play.controller.take_evaluation().get("sample_completions", [])
    assert len(rows) == number * len(play.answer(requests[0]).samples)
    for row in rows:
        assert set(row) == {
            *("prompt", "response", "scores", "ground_truth", "dataset", "finish_reason", "num_tokens"),
        }
        assert row["prompt"]


def test_two_evaluations_ask_the_same_with_the_same_seeds(make_play: MakePlay) -> None:
    play = make_play()
    asked = []
    for number in (3 + NUM_PROMPTS, 3):
        play.controller.start_evaluation(0)
        if not asked:
            play.start()
        asked.append([request for request in play.receive(number) if request.is_eval])
        play.deliver(*(play.answer(request) for request in asked[-1]))
        play.controller.get_evaluation(TIMEOUT_S)
    assert identities(asked[0]) == identities(asked[1])


def test_results_of_another_evaluation_are_ignored(make_play: MakePlay) -> None:
    play = make_play()
    play.controller.start_evaluation(0)
    play.start()
    requests = play.receive(3 + NUM_PROMPTS)[:3]
    late = [play.answer(request, [0]) for request in requests]
    play.deliver(*(play.answer(request) for request in requests))
    play.controller.get_evaluation(TIMEOUT_S)
    play.deliver(*late)
    play.controller.start_evaluation(1)
    play.version = 1
    requests = play.receive(3)
    play.deliver(*late)
    with pytest.raises(
        TimeoutError, match=r"0 of 3 results after 0.15 s; 3 prompts are not back from the engines \(eval-1-0,"
    ):
        play.controller.get_evaluation(QUIET_S)
    play.deliver(*(play.answer(request) for request in requests))
    assert play.controller.get_evaluation(TIMEOUT_S)["eval/pass_at_1"] == 1.0


def test_evaluation_results_are_taken_in_while_the_message_queue_is_full(make_play: MakePlay) -> None:
    """The driver waits for the evaluation then, and takes nothing from the message queue."""
    play = make_play(async_steps=2, ready_steps=1)
    play.controller.start_evaluation(0)
    play.start()
    requests = play.receive(3 + 3 * NUM_PROMPTS)
    held_out, training = requests[:3], requests[3:]
    play.deliver(*(play.answer(request) for request in (*training, *held_out)))
    assert play.controller.get_evaluation(TIMEOUT_S)["eval/pass_at_1"] == 1.0
    for training_step in (1, 2, 3):
        assert play.batch(training_step).num_samples == 4 * NUM_PROMPTS


def test_evaluation_prompt_that_is_broken_off_each_time_counts_as_wrong_and_is_counted(
    make_play: MakePlay, caplog: pytest.LogCaptureFixture
) -> None:
    play = make_play(max_generation_attempts=2)
    play.controller.start_evaluation(0)
    play.start()
    [slow, *others] = play.receive(3 + NUM_PROMPTS)[:3]
    play.deliver(*(play.answer(request) for request in others), broken_off(play.answer(slow)))
    [again] = play.receive(1)
    # Another seed would prefer the answers that are short enough.
    assert identities([again]) == identities([slow])
    play.deliver(broken_off(play.answer(again)))
    metrics = play.controller.get_evaluation(TIMEOUT_S)
    assert metrics["eval/pass_at_1"] == pytest.approx(2 / 3)
    assert metrics["eval/num_given_up"] == 1
    assert metrics["eval/stop_rate"] == 1.0  # of the two that have an end
    assert "evaluation of version 0: 1 of 3 prompts given up after 2 attempts, counted as wrong" in caplog.text
    assert "(generation_timeout: over 1 s: 1)" in caplog.text
    statistics = play.controller.get_statistics()
    assert (statistics["generation_errors"], statistics["generation_timeouts"]) == (2, 0)
    assert play.no_more_comes()


def test_evaluation_prompt_that_an_engine_took_with_it_uses_up_no_attempt(make_play: MakePlay) -> None:
    play = make_play(max_generation_attempts=1)
    play.controller.start_evaluation(0)
    play.start()
    requests = play.receive(3 + NUM_PROMPTS)
    for _ in range(3):
        play.controller.take_back_prompts()
        assert play.controller.recover_lost(held=ids(requests[1:])) == 1
        assert identities(play.receive(1)) == identities(requests[:1])
    play.deliver(*(play.answer(request) for request in requests[:3]))
    metrics = play.controller.get_evaluation(TIMEOUT_S)
    assert (metrics["eval/pass_at_1"], metrics["eval/num_given_up"]) == (1.0, 0)


def test_evaluation_result_that_is_being_scored_is_not_lost_with_an_engine(
    make_play: MakePlay, monkeypatch: pytest.MonkeyPatch
) -> None:
    play = make_play()
    play.controller.start_evaluation(0)
    play.start()
    requests = play.receive(3 + NUM_PROMPTS)
    scoring: Future[list[Scored]] = Future()
    monkeypatch.setattr(play.controller._scoring.verifiers, "submit", lambda *_args: scoring)
    play.deliver(play.answer(requests[0], [1]))
    evaluation = play.controller._evaluations.current
    assert evaluation is not None
    play.wait_for(lambda: "1 are being scored" in evaluation.describe_missing())
    play.controller.take_back_prompts()
    assert play.controller.recover_lost(held=ids(requests[1:])) == 0


# --- resuming ---------------------------------------------------------------------------------------------------------


def save_without_groups(play: Play, path: Path) -> None:
    """A state as it is when no group is finished: all that is open has to be generated again."""
    play.controller.save(0, str(path))
    state, _ = read_state(path)
    write_state(path, state, [])


@pytest.mark.parametrize("async_steps", [0, 1, 2])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(make_play: MakePlay, async_steps: int, tmp_path: Path) -> None:
    unbroken = make_play(async_steps=async_steps).start()
    batches = unbroken.run(1, NUM_STEPS)

    killed = make_play(async_steps=async_steps).start()
    killed.run(1, 2)
    killed.receive_admitted()
    save_without_groups(killed, tmp_path / "state.npz")
    killed.controller.stop()
    open_prompts = [request for request in killed.received if step_of(request) > 2]

    resumed = make_play(async_steps=async_steps)
    resumed.controller.load(0, str(tmp_path / "state.npz"))
    resumed.start(2)
    issued_again = resumed.receive_admitted()
    assert identities(issued_again) == identities(open_prompts)
    resumed.deliver(*(resumed.answer(request) for request in issued_again))
    for training_step, expected in zip((3, 4), batches[2:], strict=True):
        assert content_of(resumed.batch(training_step)) == content_of(expected)
        resumed.finish_step(training_step)
        resumed.deliver(*(resumed.answer(request) for request in resumed.receive_admitted()))
    assert resumed.no_more_comes()

    before = [request for request in killed.received if step_of(request) <= 2]
    assert identities(before + resumed.received) == identities(unbroken.received)
    counts = resumed.controller.status()["prompts"]
    assert counts.pop("reissued") == len(open_prompts)
    assert counts == {"issued": 16, "consumed": 16, "dropped": {}, "open": 0}


def test_a_checkpoint_amid_the_issue_of_a_step_resumes_too(
    make_play: MakePlay, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(prompt_feeder, "bundles_per_step", lambda _: NUM_PROMPTS)  # one prompt a bundle
    unbroken = make_play(async_steps=1).start()
    unbroken.run(1, NUM_STEPS)
    killed = make_play(async_steps=1, room=1).start()
    time.sleep(QUIET_S)
    killed.controller.save(0, str(tmp_path / "state.npz"))
    assert 0 < read_state(tmp_path / "state.npz")[0]["next_issue_number"] < NUM_PROMPTS
    resumed = make_play(async_steps=1)
    resumed.controller.load(0, str(tmp_path / "state.npz"))
    resumed.start()
    resumed.run(1, NUM_STEPS)
    assert identities(resumed.received) == identities(unbroken.received)


def test_a_prepared_batch_that_was_not_trained_is_made_anew(make_play: MakePlay, tmp_path: Path) -> None:
    killed = make_play(async_steps=1).start()
    requests = killed.receive(2 * NUM_PROMPTS)
    killed.deliver(*(killed.answer(request) for request in requests))
    killed.batch(1)
    killed.batch(2)
    killed.finish_step(1)
    save_without_groups(killed, tmp_path / "state.npz")
    resumed = make_play(async_steps=1)
    resumed.controller.load(0, str(tmp_path / "state.npz"))
    resumed.start(1)
    again = resumed.receive_admitted()
    assert identities(again[:NUM_PROMPTS]) == identities(requests[NUM_PROMPTS:])
    assert {step_of(request) for request in again[NUM_PROMPTS:]} <= {3}


def test_finished_groups_are_saved_and_not_generated_again(make_play: MakePlay, tmp_path: Path) -> None:
    unbroken = make_play(async_steps=1).start()
    expected = unbroken.run(1, NUM_STEPS)

    killed = make_play(async_steps=1).start()
    killed.run(1, 1)
    killed.batch(2)  # its groups have come too, and are not trained on
    requests = killed.receive_admitted()  # of step 3
    killed.deliver(killed.answer(requests[0]))  # waits for the rest of its step
    killed.wait_for(lambda: bool(killed.controller._filling.taken.get(3)))
    killed.controller.save(1, str(tmp_path / "state.npz"))
    killed.controller.stop()

    resumed = make_play(async_steps=1)
    resumed.controller.load(1, str(tmp_path / "state.npz"))
    resumed.start(1)
    issued_again = resumed.receive(NUM_PROMPTS - 1)
    assert identities(issued_again) == identities(requests[1:])
    assert content_of(resumed.batch(2)) == content_of(expected[1])
    resumed.deliver(*(resumed.answer(request) for request in issued_again))
    assert content_of(resumed.batch(3)) == content_of(expected[2])
    assert resumed.no_more_comes()


def test_a_group_that_is_being_scored_is_saved_too(
    make_play: MakePlay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = make_play(output_dir=str(tmp_path)).start()
    requests = killed.receive_admitted()
    monkeypatch.setattr(killed.controller._scoring.verifiers, "submit", lambda *_args: Future())  # never done
    killed.deliver(killed.answer(requests[0]))
    killed.wait_for(lambda: requests[0].prompt_id in killed.controller._preparation.being_scored)
    killed.controller.save(0)
    killed.controller.stop()

    resumed = make_play(output_dir=str(tmp_path))
    resumed.controller.load(0)
    resumed.start()
    issued_again = resumed.receive(NUM_PROMPTS - 1)
    assert identities(issued_again) == identities(requests[1:])
    resumed.deliver(*(resumed.answer(request) for request in issued_again))
    assert resumed.prompts_in(resumed.batch(1)) == all_samples_of(*requests)


def test_a_state_that_was_never_saved_is_told(make_play: MakePlay, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such rollout state"):
        make_play(output_dir=str(tmp_path)).controller.load(7)


def test_an_evaluation_does_not_wait_for_prompts_of_before(make_play: MakePlay, tmp_path: Path) -> None:
    killed = make_play().start()
    killed.run(1, 1)
    killed.receive_admitted()
    resumed = make_play()
    killed.controller.save(1, str(tmp_path / "state.npz"))
    resumed.controller.load(1, str(tmp_path / "state.npz"))
    resumed.controller.start_evaluation(1)
    resumed.start(1)
    assert [request.is_eval for request in resumed.receive(3 + NUM_PROMPTS)] == [True] * 3 + [False] * NUM_PROMPTS


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("thread", ["feed_prompts", "data_preparation_thread", "packing_thread"])
def test_an_error_in_a_thread_is_raised_by_the_next_call(
    make_play: MakePlay, monkeypatch: pytest.MonkeyPatch, thread: str
) -> None:
    play = make_play().start()
    play.receive(NUM_PROMPTS)

    def fail(*_: object, **__: object) -> None:
        raise ConnectionError(f"{thread} lost its queue")

    controller = play.controller
    if thread == "feed_prompts":
        monkeypatch.setattr(play.prompt_queue, "put", fail)
        controller.start_evaluation(0)
    else:
        owner, method = (
            (controller._filling, "_assemble") if thread == "packing_thread" else (controller._preparation, "take")
        )
        monkeypatch.setattr(owner, method, fail)
        play.deliver(play.answer(play.received[0]))
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=f"{thread} lost its queue"):
        controller.watch()
    assert time.monotonic() - started < TIMEOUT_S / 2
    calls: list[Callable[[], object]] = [
        controller.watch,
        lambda: controller.set_version(1),
        lambda: controller.start_evaluation(1),
        controller.status,
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match=f"{thread} lost its queue"):
            call()


def test_a_group_older_than_the_bound_is_never_trained_on(make_play: MakePlay) -> None:
    """Pacing does not let it come to this; what comes all the same is thrown away, counted, and its prompt issued again."""
    play = make_play(async_steps=1).start(version=2)
    play.deliver(*(play.answer(request, version=0) for request in play.receive_admitted()))
    again = play.receive(NUM_PROMPTS)
    assert ids(again) == [f"train-{number}" for number in range(NUM_PROMPTS)]
    play.deliver(*(play.answer(request) for request in again))
    batch = play.batch(3)
    assert batch.metrics["max_sample_age"] == 0
    assert batch.metrics["stale_results_dropped"] == NUM_PROMPTS
    assert play.controller.get_statistics()["dropped_stale_samples"] >= 4 * NUM_PROMPTS


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_evaluation_of_mixed_versions_ends_the_run(make_play: MakePlay) -> None:
    play = make_play()
    play.controller.start_evaluation(0)
    play.start()
    held_out = play.receive(3 + NUM_PROMPTS)[0]
    play.deliver(play.answer(held_out, version=1))
    with pytest.raises(RuntimeError, match=r"eval-0-0 was to measure version 0 but was sampled by \[1\]"):
        play.controller.get_evaluation(TIMEOUT_S)


def test_who_is_waited_for_is_told(make_play: MakePlay) -> None:
    play = make_play().start()
    requests = play.receive(NUM_PROMPTS)
    play.deliver(*(play.answer(requests[i]) for i in (0, 2)))
    assert play.nothing_is_ready() == (
        "step 1 is being put together, engines serve version 0, 2 prompts are not back from the engines "
        "(train-1 (version 0), train-3 (version 0)), 0 are being scored, 0 groups wait"
    )


def test_the_end_of_a_run_leaves_no_prompt_open(make_play: MakePlay) -> None:
    play = make_play(async_steps=1).start()
    play.run(1, 1)
    play.receive_admitted()
    assert play.controller.close_ledger() == {
        "issued": 3 * NUM_PROMPTS,
        "consumed": NUM_PROMPTS,
        "dropped": {"run_ended": 2 * NUM_PROMPTS},
        "reissued": 0,
        "open": 0,
    }


def test_weight_cost_and_prompt_of_a_verifier_are_used(
    make_play: Callable[..., Play], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout, "VerifierPool", JudgesInThisProcess)
    monkeypatch.setattr(result_scoring, "verifier_weight", lambda dataset: 0.5)
    play = make_play().start()
    [batch] = play.run(1, 1)
    assert batch.metrics["scores"] == 2.5
    assert batch.metrics["objective/verifier_cost"] == 0.25 * 4 * NUM_PROMPTS
    assert {
        row.raw_query for row in map(play.datasets[False].__getitem__, range(len(play.datasets[False])))
    } >= JudgesInThisProcess.queries
    assert len(JudgesInThisProcess.queries) >= NUM_PROMPTS


def test_a_whole_run_with_verifiers_in_their_processes(make_play: MakePlay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout, "VerifierPool", VerifierPool)
    play = make_play(async_steps=1).start()
    batches = play.run(1, NUM_STEPS)
    assert [batch.metrics["scores"] for batch in batches] == [5.0] * NUM_STEPS
    assert sum(batch.metrics["objective/verifier_failures"] for batch in batches) == 0
    assert play.controller.status()["prompts"]["consumed"] == NUM_STEPS * NUM_PROMPTS


# --- rubrics that change ----------------------------------------------------------------------------------------------


class RubricsInThisProcess(VerifiersInThisProcess):
    """Say that `<answer>yes</answer>` is right, and remember by which rubric."""

    labels: ClassVar[list[Any]] = []

    def submit(
        self, dataset: str, truth: object, token_ids: list[list[int]], texts: list[str], query: str
    ) -> Future[list[Scored]]:
        assert dataset == "rubric"
        self.labels.append(truth)
        scored: Future[list[Scored]] = Future()
        scored.set_result([Scored(float("yes" in text)) for text in texts])
        return scored


def test_criteria_that_a_step_finds_count_later_and_after_a_resume(
    make_play: MakePlay,
    datasets: tuple[PromptDataset, PromptDataset],
    tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    del make_play  # its patches are needed
    label = {"query": "why", "rubrics": [{"description": "is kind"}], "answer": "yes"}
    row = {"ground_truth": json.dumps(label), "dataset": "rubric"}
    rows = [{"messages": [{"role": "user", "content": f"why {number}"}], **row} for number in range(10)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data, _ = load_prompts(
        [str(tmp_path / "rows.jsonl"), "1.0"],
        ["train"],
        tokenizer=tokenizer,
        max_prompt_token_length=64,
        overlong_prompts="error",
        messages_key="messages",
        ground_truths_key="ground_truth",
        known_verifiers=["rubric"],
        check_label=None,
    )
    monkeypatch.setattr(rollout, "VerifierPool", RubricsInThisProcess)
    monkeypatch.setattr(RubricsInThisProcess, "labels", [])
    server = JudgeServer()
    server.answer = lambda body, number: '{"positive_rubrics": [{"description": "gives an example"}]}'
    options = {"apply_evolving_rubric_reward": True, "llm_judge_model": "a-judge", "llm_judge_api_base": server.url}
    play, resumed = (Play(data, datasets[1], tokenizer, room=0, ready_steps=0, **options) for _ in range(2))
    try:
        play.start().run(1, 1)
        rubrics = play.controller._scoring.rubrics
        assert rubrics is not None
        deadline = time.monotonic() + TIMEOUT_S
        while not rubrics.state_dict():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert "is kind" in server.bodies[0]["messages"][0]["content"]
        assert "<answer>yes</answer>" in server.bodies[0]["messages"][0]["content"]
        [batch] = play.run(2, 2)
        first, second = RubricsInThisProcess.labels[:NUM_PROMPTS], RubricsInThisProcess.labels[NUM_PROMPTS:]
        assert first == [row["ground_truth"]] * NUM_PROMPTS
        found = [[one["description"] for one in read["rubrics"]] for read in second]
        assert found == [["is kind", "gives an example"]] * NUM_PROMPTS
        assert batch.metrics["evolving_rubrics/total_active"] == 1
        play.controller.save(2, str(tmp_path / "state.npz"))
        resumed.controller.load(2, str(tmp_path / "state.npz"))
        again = resumed.controller._scoring.rubrics
        assert again is not None
        assert again.state_dict() == rubrics.state_dict()
    finally:
        for one in (play, resumed):
            one.controller.stop()
        server.close()
