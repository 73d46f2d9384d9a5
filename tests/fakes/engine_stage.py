"""An engine actor around a vLLM engine that is played, token by token."""

import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_queue import FakeQueue
from ray.util.queue import Empty
from rc_fakes import SUMMARY_MARK, THINK_MARK, codec

from open_instruct import vllm_utils3
from open_instruct.data_types import GenerationResult, PromptRequest, SamplingConfig
from open_instruct.engines import generation_loop, queue_threads
from open_instruct.engines.vllm_engine import EngineOptions
from open_instruct.vllm_utils3 import LLMRayActor
from open_instruct.workflows.base import WorkflowSpec
from open_instruct.workflows.rc.options import ReasoningCacheOptions

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
            if request_id in self.waiting:
                self.waiting.remove(request_id)

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
        return SimpleNamespace(request_id=request_id, finished=True, outputs=[completion], num_cached_tokens=0)

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

    def put(self, *tasks: Any, n: int = 1, prompt: np.ndarray | None = None, version: int = 0) -> None:
        config = SamplingConfig(max_tokens=64, n=n, seed=1)
        prompt = np.arange(8, dtype=np.int32) if prompt is None else prompt
        self.prompts.put(
            [PromptRequest(prompt, config, i, f"train-{i}", version, task=task) for i, task in enumerate(tasks)],
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
