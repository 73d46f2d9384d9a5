"""Rollouts inside the engine actor: the actor is real, vLLM's engine is played, token by token."""

import itertools
import queue
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.util.queue import Empty
from rc_fakes import SUMMARY_MARK, THINK_MARK, codec
from test_rollout import FakeQueue

from open_instruct import vllm_utils3
from open_instruct.data_types import GenerationResult, PromptRequest, SamplingConfig
from open_instruct.engines import generation_loop, queue_threads
from open_instruct.engines.vllm_engine import EngineOptions
from open_instruct.engines.worker_memory import standing_by
from open_instruct.vllm_utils3 import LLMRayActor
from open_instruct.workflows.base import WorkflowSpec
from open_instruct.workflows.rc.options import ReasoningCacheOptions
from open_instruct.workflows.rc.types import REASONING, RCPlan
from open_instruct.workflows.runner import MOST_ERRORS_IN_A_ROW

TIMEOUT_S = 20.0
NUM_TOKENS = 6
"""Of each response."""
MAX_MODEL_LEN = 512
RC_OPTIONS = ReasoningCacheOptions(
    rc_reasoning_prompt_template=THINK_MARK + " {problem} KNOWING {curr_summary} GO",
    rc_summarization_prompt_template=SUMMARY_MARK + " {problem} OLD {existing_summary} NEW {reasoning} GO",
    rc_max_summary_tokens=64,
)


class PlayedVLLM:
    """Has so many slots, and gives a token to each request in them at every step; labels it with the version it has."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.waiting: deque[str] = deque()
        self.running: dict[str, list[int]] = {}
        """Version of each token so far."""
        self.came: list[str] = []
        """Request ids, in order."""
        self.most_running = 0
        self.version = 0
        self.is_paused = False
        self.finish_reason = "stop"
        self.waits_for = 1
        """Steps give no token until so many requests have come."""
        self.before_step: Callable[[], None] = lambda: None
        cache = SimpleNamespace(num_gpu_blocks=None, block_size=16, enable_prefix_caching=False)
        self.vllm_config = SimpleNamespace(cache_config=cache)

    def add_request(self, request_id: str, prompt: Any, params: SamplingConfig) -> None:
        assert len(prompt["prompt_token_ids"]) + params.max_tokens <= MAX_MODEL_LEN
        self.came.append(request_id)
        self.waiting.append(request_id)

    def abort_request(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.running.pop(request_id, None)

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting or self.running)

    def sleep(self, *, level: int, mode: str) -> None:
        assert (level, mode) == (0, "keep")
        self.is_paused = True

    def wake_up(self, tags: list[str]) -> None:
        assert tags == ["scheduling"]
        self.is_paused = False

    def step(self) -> list[Any]:
        assert not self.is_paused
        self.before_step()
        if len(self.came) < self.waits_for:
            return []
        while self.waiting and len(self.running) < self.slots:
            self.running[self.waiting.popleft()] = []
        self.most_running = max(self.most_running, len(self.running))
        for versions in self.running.values():
            versions.append(self.version)
        done = [request_id for request_id, versions in self.running.items() if len(versions) == NUM_TOKENS]
        return [self._output(request_id, self.running.pop(request_id)) for request_id in done]

    def _output(self, request_id: str, versions: list[int]) -> Any:
        token_ids = (codec().encode("12 + 34 = 46. So 46.") * NUM_TOKENS)[:NUM_TOKENS]
        edges = [0, *(i for i in range(1, NUM_TOKENS) if versions[i] != versions[i - 1]), NUM_TOKENS]
        spans = [
            SimpleNamespace(version=str(versions[start]), start=start, end=end)
            for start, end in itertools.pairwise(edges)
        ]
        logprobs = SimpleNamespace(start_indices=list(range(NUM_TOKENS)), logprobs=[-0.5] * NUM_TOKENS)
        completion = SimpleNamespace(
            index=0, token_ids=token_ids, logprobs=logprobs, finish_reason=self.finish_reason, weight_versions=spans
        )
        return SimpleNamespace(request_id=request_id, finished=True, outputs=[completion])

    def set_weight_version(self, version: str) -> None:
        self.version = int(version)

    def collective_rpc(self, *_: Any, **__: Any) -> None:
        pass


class Stage:
    """An engine actor in a thread, around a played engine."""

    def __init__(self, slots: int, **options: Any) -> None:
        self.vllm = PlayedVLLM(slots)
        self.prompts, self.results = FakeQueue(), FakeQueue()
        engine: dict[str, Any] = {
            "model": "tiny",
            "dtype": "float32",
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": slots,
            "weight_transport": "ray_object",
            "workflow": WorkflowSpec.of("rc", RC_OPTIONS),
        }
        queues: Any = (self.prompts, self.results)
        self.actor = LLMRayActor(0, EngineOptions(**(engine | options)), *queues, timeout_s=TIMEOUT_S)
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            self.actor.process_queue_continuously()
        except BaseException as error:
            self.error = error

    def put(self, *tasks: Any, n: int = 1, prompt: np.ndarray | None = None) -> None:
        config = SamplingConfig(max_tokens=64, n=n, seed=1)
        prompt = np.arange(8, dtype=np.int32) if prompt is None else prompt
        self.prompts.put(
            [PromptRequest(prompt, config, i, f"train-{i}", 0, task=task) for i, task in enumerate(tasks)],
            timeout=1.0,
        )

    def get(self, number: int = 1) -> list[GenerationResult]:
        """The next results, by prompt id."""
        results: list[GenerationResult] = []
        deadline = time.monotonic() + TIMEOUT_S
        while len(results) < number:
            assert time.monotonic() < deadline, (self.error, results)
            try:
                results += self.results.get(timeout=0.1)
            except Empty:
                continue
        return sorted(results, key=lambda result: result.prompt_id)

    def ended(self) -> BaseException | None:
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()
        return self.error

    def close(self) -> None:
        self.actor.stop()
        self._thread.join(TIMEOUT_S)


MakeStage = Callable[..., Stage]


@pytest.fixture
def make_stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeStage]:
    stages: list[Stage] = []
    made: queue.SimpleQueue[PlayedVLLM] = queue.SimpleQueue()

    def make(slots: int = 8, **options: Any) -> Stage:
        monkeypatch.setattr(vllm_utils3, "make_engine", lambda *_: stage_vllm(slots))
        stage = Stage(slots, **options)
        stage.vllm = made.get(timeout=1.0)
        stages.append(stage)
        return stage

    def stage_vllm(slots: int) -> PlayedVLLM:
        made.put(PlayedVLLM(slots))
        engine = made.get()
        made.put(engine)
        return engine

    monkeypatch.setattr(vllm_utils3, "POLL_S", 0.02)
    monkeypatch.setattr(queue_threads, "POLL_S", 0.02)
    monkeypatch.setattr(generation_loop, "IDLE_S", 0.005)
    monkeypatch.setattr(generation_loop, "sampling_params", lambda config: config)
    monkeypatch.setattr(vllm_utils3, "read_tokenizer", lambda *_: codec()._tokenizer)
    yield make
    for stage in stages:
        stage.close()


def rollouts_in_order(stage: Stage) -> list[str]:
    return [request_id.partition("/")[0] for request_id in stage.vllm.came]


def test_two_rollouts_take_turns_in_one_slot(make_stage: MakeStage) -> None:
    stage = make_stage(slots=1)
    stage.vllm.waits_for = 2  # so that neither is at its second turn before the other has begun
    stage.put(RCPlan("1 + 1", num_cycles=3), RCPlan("2 + 2", num_cycles=3))
    results = stage.get(2)
    assert [len(result.responses) for result in results] == [3, 3]
    assert rollouts_in_order(stage) == ["train-0", "train-1"] * 5
    assert stage.vllm.most_running == 1


def test_a_result_is_whole(make_stage: MakeStage) -> None:
    stage = make_stage()
    stage.put(RCPlan("1 + 1", states=(0, 1), num_cycles=2), n=3)
    [result] = stage.get()
    assert [(sample.kind, sample.number, sample.group) for sample in result.samples] == [
        *[(REASONING, 1, 0)] * 3,
        *[(REASONING, 2, 1)] * 3,
    ]
    assert [len(one) for one in result.responses] == [len(one) for one in result.logprobs] == [NUM_TOKENS] * 6
    assert [state["number"] for state in result.notes] == [1]
    assert result.token_statistics.num_response_tokens == 8 * NUM_TOKENS
    assert (result.index, result.prompt_id, result.issue_version, result.error) == (0, "train-0", 0, "")


def test_each_turn_has_the_versions_that_sampled_it(make_stage: MakeStage) -> None:
    """New weights come in the middle of the first turn, and again before the last."""
    stage = make_stage(slots=1)
    steps = 0

    def new_weights() -> None:
        nonlocal steps
        steps += 1
        stage.vllm.version = 3 if steps > 2 * NUM_TOKENS else int(steps > 2)

    stage.vllm.before_step = new_weights
    stage.put(RCPlan("1 + 1", num_cycles=2, num_summaries=1))
    [result] = stage.get()
    assert result.version_spans == [[(0, 2), (1, 4)], [(1, 6)], [(3, 6)]]
    assert (result.oldest_version, result.newest_version) == (0, 3)


def test_turns_on_the_way_do_not_age_a_sample(make_stage: MakeStage) -> None:
    """They are its prompt: what is trained on was sampled by the weights of the last turn alone."""
    stage = make_stage(slots=8)
    steps = 0

    def new_weights() -> None:
        nonlocal steps
        steps += 1
        stage.vllm.version = int(steps > 2 * NUM_TOKENS)

    stage.vllm.before_step = new_weights
    stage.put(RCPlan("1 + 1", states=(1,), num_cycles=2), n=2)
    [result] = stage.get()
    assert (result.oldest_version, result.newest_version) == (1, 1)
    assert [state["version"] for state in result.notes] == [0]


def test_weights_can_come_between_two_turns(make_stage: MakeStage) -> None:
    """Without in-flight updates what is being generated is finished first: a turn, not a whole rollout."""
    stage = make_stage(slots=1, inflight_updates=False)
    stage.vllm.before_step = lambda: time.sleep(0.01)
    stage.put(RCPlan("1 + 1", num_cycles=6))
    while not stage.vllm.came:
        time.sleep(0.005)
    stage.actor.start_weight_update()
    assert not stage.vllm.has_unfinished_requests()
    assert len(stage.vllm.came) < 11
    stage.actor.finish_weight_update(1)
    [result] = stage.get()
    assert {len(spans) for spans in result.version_spans} == {1}
    assert result.version_spans[-1] == [(1, 6)]


def test_a_rollout_is_inside_until_its_result_is_out(make_stage: MakeStage) -> None:
    stage = make_stage(slots=1)
    stage.vllm.before_step = lambda: time.sleep(0.01)
    stage.put(RCPlan("1 + 1", num_cycles=3))
    while not stage.actor.take_inventory()["held"]:
        time.sleep(0.005)
    while stage.results.empty():
        assert "train-0" in stage.actor.take_inventory()["held"] or not stage.results.empty()
    stage.get()


def test_a_turn_over_its_time_gives_the_prompt_up(make_stage: MakeStage) -> None:
    stage = make_stage(generation_timeout=0.3)
    stage.vllm.before_step = lambda: time.sleep(0.2)
    stage.put(RCPlan("1 + 1", num_cycles=2))
    [result] = stage.get()
    assert "generation_timeout" in result.error
    assert result.responses == []
    stage.vllm.before_step = lambda: None
    stage.put(RCPlan("1 + 1", num_cycles=2))
    assert stage.get()[0].error == ""


def test_a_problem_that_fills_the_context_is_given_up(make_stage: MakeStage) -> None:
    stage = make_stage()
    stage.put(RCPlan("1 + 1 " * 400, num_cycles=2), RCPlan("1 + 1", num_cycles=2))
    too_long, fine = stage.get(2)
    assert "PromptTooLong" in too_long.error
    assert len(fine.responses) == 2


def test_an_error_of_a_workflow_gives_the_prompt_up_and_many_in_a_row_end_the_engine(make_stage: MakeStage) -> None:
    stage = make_stage()
    broken: Any = "a task that is no plan"
    stage.put(*[broken] * (MOST_ERRORS_IN_A_ROW - 1))
    given_up = stage.get(MOST_ERRORS_IN_A_ROW - 1)
    assert {result.error for result in given_up} == {"AttributeError: 'str' object has no attribute 'problem'"}
    stage.put(RCPlan("1 + 1", num_cycles=1))
    assert stage.get()[0].error == ""
    stage.put(*[broken] * MOST_ERRORS_IN_A_ROW)
    error = stage.ended()
    assert isinstance(error, RuntimeError)
    assert isinstance(error.__cause__, AttributeError)


def test_engine_without_processes_of_its_own_leaves_nobody_to_kill_others(make_stage: MakeStage) -> None:
    """The process that stands by kills what belongs to the engine alone, and not what was there before."""
    bystander = subprocess.Popen(["sleep", "600"])
    try:
        before = list(standing_by)
        make_stage()
        assert standing_by == before
    finally:
        bystander.kill()
        bystander.wait(timeout=TIMEOUT_S)
