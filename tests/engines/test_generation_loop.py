"""Requests of rollouts in the engine thread: runner, account and loop are real, vLLM's engine is played."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from open_instruct.data_types import EVAL, TRAIN, Completion, GenerationResult, PromptRequest, SamplingConfig
from open_instruct.engines import generation_loop, request_tracker
from open_instruct.engines.generation_loop import GenerationLoop
from open_instruct.engines.kv_ages import CacheUse, KvAges
from open_instruct.engines.request_tracker import RequestTracker
from open_instruct.workflows.base import CallFailed, Context, Trajectory, Workflow
from open_instruct.workflows.runner import EngineFacts, RolloutRunner

TIMEOUT_S = 20.0
LONG = 10**9
Run = Callable[[PromptRequest, Context], Awaitable[Trajectory]]


class PlayedVLLM:
    """Like vLLM it takes several requests of one id, and its outputs have the id that it was given. A response is finished after
    `max_tokens` steps; it repeats the last token of its prompt, so that one sees which request it answers."""

    def __init__(self) -> None:
        self.live: list[list[Any]] = []
        """Request id, last token of the prompt, tokens that are left."""
        self.came: list[str] = []
        self.salts: list[str | None] = []
        self.before_add: Callable[[], object] = lambda: None

    def has_unfinished_requests(self) -> bool:
        return bool(self.live)

    def add_request(self, request_id: str, prompt: dict[str, Any], sampling: SamplingConfig) -> None:
        self.before_add()
        self.came.append(request_id)
        self.salts.append(prompt.get("cache_salt"))
        self.live.append([request_id, prompt["prompt_token_ids"][-1], sampling.max_tokens])

    def abort_request(self, request_ids: list[str]) -> None:
        self.live = [one for one in self.live if one[0] not in request_ids]

    def step(self) -> list[Any]:
        for one in self.live:
            one[2] -= 1
        done = [one for one in self.live if one[2] <= 0]
        self.live = [one for one in self.live if one[2] > 0]
        return [self._output(request_id, token_id) for request_id, token_id, _ in done]

    def _output(self, request_id: str, token_id: int) -> Any:
        said = Completion(np.array([token_id] * 2, np.int32), np.zeros(2, np.float32), "stop", [(0, 2)])
        return SimpleNamespace(finished=True, request_id=request_id, num_cached_tokens=0, completions=[said])


class Played(Workflow):
    """Runs a function."""

    def __init__(self, run: Run) -> None:
        super().__init__(None)
        self._function = run

    async def run(self, request: PromptRequest, ctx: Context) -> Trajectory:
        return await self._function(request, ctx)


class Stage:
    """One engine's rollouts. The engine steps when the test says so."""

    def __init__(self, run: Run, cache_use: CacheUse) -> None:
        lock = threading.Condition()
        self.vllm = PlayedVLLM()
        self.work = RequestTracker(lock, max_num_seqs=8, max_tokens=1e9)
        self.state = SimpleNamespace(may_step=True, may_admit=True, may_fall_asleep=False, shall_generate=True)
        nothing: Any = SimpleNamespace(**dict.fromkeys(("compute", "rest"), lambda: None))
        self.slept: list[str] = []
        sleep = SimpleNamespace(
            resume=lambda: None,
            note_activity=lambda: self.slept.append("has work"),
            sleep_if_due=lambda: self.slept.append("may sleep"),
        )
        parts: Any = (self.vllm, sleep, self.state, self.work, NoCalls(), lock, nothing)
        kv_ages = KvAges(cache_use, block_size=1, num_blocks=100)
        self.loop = GenerationLoop(*parts, kv_ages=kv_ages, generation_timeout=None)
        self.results: list[GenerationResult] = []
        self.errors: list[BaseException] = []
        facts = EngineFacts(0, 2 * LONG, read_codec=lambda: None)  # type: ignore[arg-type, return-value]
        self.runner = RolloutRunner(Played(run), facts, self.work.submit, self._finish, self.errors.append)

    def _finish(self, result: GenerationResult) -> None:
        self.work.finish_rollout(result)
        self.results.append(result)

    def issue(self, *, marker: str = TRAIN) -> None:
        """The same prompt every time."""
        prompt = PromptRequest(np.array([1], np.int32), SamplingConfig(seed=1), 0, "train-0", 0, marker)
        self.runner.start(*self.work.take_in([prompt]))

    def step_until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline, (self.results, self.errors, self.vllm.live)
            self.loop.tick()
            time.sleep(0.001)


class NoCalls:
    """No control call comes."""

    def serve(self) -> None:
        pass

    def __bool__(self) -> bool:
        return False


MakeStage = Callable[..., Stage]


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeStage]:
    stages: list[Stage] = []

    def make(run: Run, cache_use: CacheUse = "by_version") -> Stage:
        stages.append(Stage(run, cache_use))
        return stages[-1]

    monkeypatch.setattr(generation_loop, "sampling_params", lambda config: config)
    monkeypatch.setattr(generation_loop, "IDLE_S", 0.002)
    monkeypatch.setattr(request_tracker, "completions_of", lambda output: output.completions)
    yield make
    for one in stages:
        one.runner.close()


def sampling(num_steps: int) -> SamplingConfig:
    return SamplingConfig(max_tokens=num_steps, seed=1)


async def never(_: PromptRequest, ctx: Context) -> Trajectory:
    await ctx.generate([1], sampling(LONG))
    return Trajectory([])


def test_a_prompt_that_is_issued_again_gets_the_answers_to_its_own_requests(stage: MakeStage) -> None:
    """One branch fails while another one's second request is in the engine. The next attempt makes a request of the same name."""
    answers: list[list[int]] = []
    attempts = 0

    async def two(_: PromptRequest, ctx: Context) -> Trajectory:
        nonlocal attempts
        attempts += 1
        attempt = attempts

        async def talk(number: int) -> None:
            await ctx.generate([number, 10 * attempt], sampling(3), name=f"{number}-generate")
            if number == 1 and attempt == 1:
                raise CallFailed("the environment failed")
            [said] = await ctx.generate([number, 10 * attempt + number], sampling(200), name=f"{number}-generate")
            answers.append(said.token_ids.tolist())

        async with asyncio.TaskGroup() as group:
            for number in (0, 1):
                group.create_task(talk(number))
        return Trajectory([])

    one = stage(two)
    one.issue()
    one.step_until(lambda: len(one.results) == 1)
    one.issue()
    one.step_until(lambda: len(one.results) == 2)
    assert [result.error for result in one.results] == ["the environment failed", ""]
    assert sorted(answers) == [[20, 20], [21, 21]]
    assert len(set(one.vllm.came)) == len(one.vllm.came)
    assert not one.errors


@pytest.mark.parametrize(
    ("cache_use", "salts"),
    [
        ("by_version", ["version 3", "version 3"]),
        ("kept", [None, "version 3"]),
        ("recomputed", [None, None]),
    ],
)
def test_requests_share_the_cache_of_their_version_unless_nothing_old_is_in_it_or_old_is_asked_for(
    stage: MakeStage, cache_use: CacheUse, salts: list[str | None]
) -> None:
    """Whatever sampling options a workflow makes."""

    async def ask(_: PromptRequest, ctx: Context) -> Trajectory:
        await ctx.generate([1], SamplingConfig(max_tokens=1))
        return Trajectory([])

    one = stage(ask, cache_use)
    one.work.set_version(3)
    for marker in (TRAIN, EVAL):
        one.issue(marker=marker)
        one.step_until(lambda: one.results)
        one.results.clear()
    assert one.vllm.salts == salts


def test_what_a_failed_rollout_leaves_in_the_engine_is_aborted(stage: MakeStage) -> None:
    async def fail(_: PromptRequest, ctx: Context) -> Trajectory:
        async with asyncio.TaskGroup() as group:
            group.create_task(ctx.generate([1], sampling(LONG), name="long"))
            await ctx.generate([2], sampling(3), name="short")
            raise CallFailed("a tool failed")

    one = stage(fail)
    one.issue()
    one.step_until(lambda: one.results)
    assert not one.work.has_requests
    assert one.work.num_outstanding_tokens == 0
    one.step_until(lambda: not one.vllm.has_unfinished_requests())


def test_tasks_that_outlive_their_rollout_get_nothing_from_the_engine(stage: MakeStage) -> None:
    left: list[asyncio.Task[Any]] = []

    async def forgetful(_: PromptRequest, ctx: Context) -> Trajectory:
        async def late() -> None:
            try:
                await ctx.generate([1], sampling(LONG), name="late")
            finally:
                await ctx.generate([1], sampling(LONG), name="later")

        left.append(asyncio.create_task(late()))
        await ctx.generate([2], sampling(3), name="short")
        return Trajectory([])

    one = stage(forgetful)
    one.issue()
    one.step_until(lambda: one.results and left[0].done())
    one.step_until(lambda: not one.vllm.has_unfinished_requests())
    assert "the rollout has ended" in str(left[0].exception())
    assert (one.results[0].error, one.work.has_requests) == ("", False)
    assert not any("later" in request_id for request_id in one.vllm.came)


def test_a_request_that_is_given_up_while_it_waits_never_reaches_the_engine(stage: MakeStage) -> None:
    async def impatient(_: PromptRequest, ctx: Context) -> Trajectory:
        request = asyncio.create_task(ctx.generate([1], sampling(LONG)))
        while not one.work.waits_for_admission:
            await asyncio.sleep(0)
        request.cancel()
        await asyncio.wait([request])
        return Trajectory([])

    one = stage(impatient)
    one.state.may_admit = False
    one.issue()
    one.step_until(lambda: one.results)
    assert not one.work.has_requests
    assert not one.work.waits_for_admission
    one.state.may_admit = True
    one.loop.tick()
    assert one.vllm.came == []


def test_a_request_that_is_given_up_on_its_way_into_the_engine_is_aborted(stage: MakeStage) -> None:
    one = stage(never)
    reply = one.work.submit("direct-0", np.array([1], np.int32), sampling(LONG))
    one.vllm.before_add = reply.cancel
    one.loop.tick()
    assert one.vllm.came == ["direct-0"]
    assert not one.vllm.has_unfinished_requests()


def test_a_request_that_vllm_refuses_costs_its_rollout_and_not_the_engine(stage: MakeStage) -> None:
    from vllm.exceptions import VLLMValidationError

    def refuse() -> None:
        raise VLLMValidationError("Token id 1000000 is out of vocabulary")

    one = stage(never)
    one.vllm.before_add = refuse
    one.issue()
    one.step_until(lambda: one.results)
    assert one.results[0].error == "refused by vLLM: Token id 1000000 is out of vocabulary"
    assert not one.work.has_requests
    assert not one.errors


def test_an_engine_that_cannot_take_requests_ends(stage: MakeStage) -> None:
    def die() -> None:
        raise RuntimeError("EngineCore encountered an issue")

    one = stage(never)
    one.vllm.before_add = die
    one.work.submit("train-0/0", np.array([1], np.int32), sampling(LONG))
    with pytest.raises(RuntimeError, match="EngineCore"):
        one.loop.tick()


def test_an_engine_that_ends_gives_no_answers_to_rollouts_that_are_under_way(stage: MakeStage) -> None:
    one = stage(never)
    one.issue()
    one.step_until(lambda: one.vllm.live)
    one.runner.close()
    one.loop.tick()
    assert not one.work.has_requests
    assert not one.vllm.has_unfinished_requests()
    assert not one.results


def test_an_engine_does_not_sleep_while_a_rollout_waits_for_a_tool(stage: MakeStage) -> None:
    """With level 2 it would drop its weights between two turns of an evaluation's conversation."""

    async def ask_a_tool(request: PromptRequest, ctx: Context) -> Trajectory:
        await asyncio.sleep(TIMEOUT_S)
        raise AssertionError("the engine ends before the tool answers")

    one = stage(ask_a_tool)
    one.state.may_fall_asleep = True
    one.loop.tick()
    assert one.slept == ["may sleep"]
    one.issue()
    one.slept.clear()
    one.loop.tick()
    assert one.slept == ["has work"]


def test_the_sleep_of_an_engine_does_not_count_as_standing_still(
    stage: MakeStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that comes in the sleep waits through a training step. The supervisor would replace the engine when it wakes."""
    now = time.monotonic()
    clock = SimpleNamespace(monotonic=lambda: now, perf_counter=time.perf_counter)
    for module in (generation_loop, request_tracker):
        monkeypatch.setattr(module, "time", clock)
    one = stage(never)
    one.state.may_step = one.state.shall_generate = False
    one.work.submit("train-0/0", np.array([7], np.int32), sampling(LONG))
    for _ in range(3):
        now += 400.0
        one.loop.tick()
    assert one.loop.idle_s == 0.0
    one.state.shall_generate = True  # awake, and before its first step
    assert one.loop.idle_s == 0.0
    now += 7.0
    assert one.loop.idle_s == 7.0


def test_direct_calls_have_a_deadline_of_their_own(stage: MakeStage) -> None:
    """As the comparison of log-probs at the start, where the first step of an engine may take long."""
    one = stage(never)
    for request_id in ("direct-0", "train-0/0"):
        one.work.submit(request_id, np.array([7], np.int32), sampling(5))
    one.loop.tick()
    assert [held.request_id for held in one.work.later_than(-1.0)] == ["train-0/0"]


def test_direct_calls_are_answered_beside_rollouts(stage: MakeStage) -> None:
    one = stage(never)
    one.issue()
    reply = one.work.submit("direct-0", np.array([7], np.int32), sampling(5))
    one.step_until(reply.done)
    [said] = reply.result().completions
    assert said.token_ids.tolist() == [7, 7]
