"""A controller with the real tokenizer, dataset and verifiers, around which a test plays the engines, learners and queues."""

import itertools
import json
import queue
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import pytest
from conftest import TINY_MODEL, make_args
from fake_queue import FakeQueue
from group_fakes import make_result
from played_teachers import PlayedRay, PlayedTeacher
from ray.util.queue import Empty

from open_instruct.config.verifier_options import VerifierConfig
from open_instruct.data.dataset_transformation import load_prompts
from open_instruct.data.prompt_dataset import PromptDataset
from open_instruct.data_types import GenerationResult, PromptRequest, RolloutBatch, TokenStatistics
from open_instruct.rollouts import (
    batch_producer,
    data_preparation,
    prompt_feeder,
    teacher_scoring,
)
from open_instruct.rollouts import controller as rollout
from open_instruct.rollouts.controller import ControllerOptions, RolloutController
from open_instruct.rollouts.message_queue import QueueFull
from open_instruct.verifiers.registry import score_response, verifier_names
from open_instruct.verifiers.scorers import reading_of
from open_instruct.verifiers.scoring_processes import Scored

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

    def put(
        self,
        batch: RolloutBatch,
        *,
        version: int,
        num_samples: int,
        timeout: float,
        message_id: str,
        num_bytes: int,
    ) -> None:
        assert version == batch.min_version
        micro_batches = [
            micro for rank in cast("Any", batch.rank_data) for mini in rank for micro in mini.micro_batches
        ]
        arrays = [array for micro in micro_batches for array in vars(micro).values() if array is not None]
        assert num_bytes == sum(array.nbytes for array in arrays) > 0
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
        self, dataset: str, truth: object, token_ids: list[list[int]], texts: list[str], queries: list[str]
    ) -> Future[list[Scored]]:
        scored: Future[list[Scored]] = Future()
        results = [score_response(dataset, truth, ids, text) for ids, text in zip(token_ids, texts, strict=True)]
        scored.set_result([Scored(result.score, reading=reading_of(result)) for result in results])
        return scored

    def close(self) -> None:
        pass


class JudgesInThisProcess(VerifiersInThisProcess):
    """They take money, and know the prompt."""

    queries: ClassVar[set[str]] = set()

    def submit(
        self, dataset: str, truth: object, token_ids: list[list[int]], texts: list[str], queries: list[str]
    ) -> Future[list[Scored]]:
        free = super().submit(dataset, truth, token_ids, texts, queries).result()
        scored: Future[list[Scored]] = Future()
        scored.set_result([replace(one, cost=0.25) for one in free])
        self.queries.update(queries)
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
        self.args = make_args(**{"async_steps": 0, "dataset_mixer_eval_list": ["held_out.jsonl", "1.0"], **options})
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
        right = truth[0] if isinstance(truth, list) else json.loads(truth)["answer"]
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


def broken_off(result: GenerationResult, error: str = "generation_timeout: over 1 s") -> GenerationResult:
    return replace(result, error=error, samples=[])


def load_rows(source: str, tokenizer: Any, **options: Any) -> PromptDataset:
    settings: dict[str, Any] = {
        "max_prompt_token_length": 64,
        "overlong_prompts": "error",
        "messages_key": "messages",
        "ground_truths_key": "ground_truth",
        "known_verifiers": verifier_names(),
        **options,
    }
    return load_prompts([source, "1.0"], ["train"], tokenizer=tokenizer, **settings)[0]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TINY_MODEL)


@pytest.fixture(scope="module")
def datasets(tokenizer: Any) -> tuple[PromptDataset, PromptDataset]:
    """Ten rows to train on and three to evaluate."""

    def load(size: int, seed: int) -> PromptDataset:
        sums = "reasoning_gym/chain_sum?min_terms=2&max_terms=2&min_digits=2&max_digits=2"
        return load_rows(f"{sums}&size={size}&seed={seed}", tokenizer)

    return load(10, 1), load(3, 1000)


@pytest.fixture
def rows_of_two_verifiers(tokenizer: Any, tmp_path: Path) -> PromptDataset:
    """Ten rows whose responses are to have a right answer and to be short."""
    rows = [
        {
            "messages": [{"role": "user", "content": f"{100 + number} ="}],
            "ground_truth": [str(100 + number), "1000"],
            "dataset": ["gsm8k", "max_length"],
        }
        for number in range(10)
    ]
    path = tmp_path / "rows_of_two_verifiers.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return load_rows(str(path), tokenizer)


MakePlay = Callable[..., Play]


@contextmanager
def plays(
    datasets: tuple[PromptDataset, PromptDataset], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MakePlay]:
    """Makes plays, and ends them."""
    for module in (rollout, data_preparation, prompt_feeder, batch_producer):
        monkeypatch.setattr(module, "POLL_S", 0.02)
    monkeypatch.setattr(batch_producer.ray, "put", lambda value: value)
    monkeypatch.setattr(rollout, "VerifierPool", VerifiersInThisProcess)
    monkeypatch.setattr(teacher_scoring, "ray", PlayedRay())
    made: list[Play] = []

    def make(
        *,
        room: int = 0,
        ready_steps: int = 0,
        train: PromptDataset = datasets[0],
        held_out: PromptDataset = datasets[1],
        **options: Any,
    ) -> Play:
        """`room` bundles fit into the prompt queue, `ready_steps` batches into the message queue; 0 is no limit."""
        made.append(Play(train, held_out, tokenizer, room=room, ready_steps=ready_steps, **options))
        return made[-1]

    yield make
    for play in made:
        play.controller.stop()


@pytest.fixture
def make_play(
    datasets: tuple[PromptDataset, PromptDataset], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MakePlay]:
    with plays(datasets, tokenizer, monkeypatch) as make:
        yield make
