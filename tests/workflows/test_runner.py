"""The context of a rollout inside an engine: what it times."""

import asyncio
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from open_instruct.data_types import PromptRequest, Sample, SamplingConfig, TokenStatistics
from open_instruct.workflows import runner
from open_instruct.workflows.runner import Answer, EngineContext, EngineFacts, ToolBox, check_samples

SAMPLING = SamplingConfig(n=1, temperature=1.0, top_p=1.0, max_tokens=4, stop=(), seed=1)


def test_the_time_of_tools_is_that_in_which_nothing_is_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: clock.seconds))
    asked: Future[Answer] = Future()

    async def play() -> tuple[float, list[Any]]:
        may_answer = asyncio.Event()

        async def program(_: Any) -> None:
            await may_answer.wait()

        request = PromptRequest(np.zeros(1, np.int32), SAMPLING, index=0, prompt_id="p", issue_version=0)
        facts = EngineFacts(0, 64, read_codec=lambda: None)  # type: ignore[arg-type, return-value]
        ctx = EngineContext(request, facts, lambda *_: asked, ToolBox({"program": program}))
        calling = asyncio.create_task(ctx.call("program", None, timeout_s=60.0))
        await until(lambda: clock.seconds == 0 and ctx.tool_time._under_way["call"] == 1)
        clock.seconds = 1.0
        generating = asyncio.create_task(ctx.generate([1], SAMPLING))
        await until(lambda: ctx.tool_time._under_way["request"] == 1)
        clock.seconds = 5.0
        asked.set_result(Answer([], TokenStatistics(1, 4, 4.0, 0.0)))
        await generating
        clock.seconds = 7.0
        may_answer.set()
        await calling
        clock.seconds = 100.0
        return ctx.tool_time.seconds, ctx.tool_time.effects

    seconds, effects = asyncio.run(play())
    assert seconds == (1 - 0) + (7 - 5)
    assert effects == [("generate", "generate-0", 1.0, 4.0), ("program", "program-0", 0.0, 7.0)]


async def until(happened: Any) -> None:
    while not happened():
        await asyncio.sleep(0)


IDS, LOGPROBS = np.arange(3, dtype=np.int32), np.zeros(3, np.float32)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"response_ids": [0, 1, 2]}, "sample 1 of the Trajectory: response_ids is list: it must be an array"),
        ({"response_ids": np.zeros(3)}, "response_ids is array of float64: .* of integer"),
        ({"loss_mask": np.ones(3, np.int32)}, "loss_mask is array of int32: .* of bool"),
        ({"logprobs": LOGPROBS[:2]}, "logprobs covers 2 tokens, and response_ids has 3: each token needs one"),
        ({"loss_mask": np.ones(4, bool)}, "loss_mask covers 4 tokens"),
        ({"version_spans": [(0, 2)]}, "version_spans covers 2 tokens, and response_ids has 3"),
        (None, "sample 1 of the Trajectory is NoneType: it must be a Sample"),
    ],
)
def test_a_sample_that_no_step_can_take_is_told(fields: dict[str, Any] | None, told: str) -> None:
    good = Sample(IDS, IDS, LOGPROBS, "stop", version_spans=[(0, 1), (1, 2)], loss_mask=np.ones(3, bool))
    bad = None if fields is None else replace(good, **fields)
    check_samples([good, replace(good, loss_mask=None)])
    with pytest.raises((TypeError, ValueError), match=told):
        check_samples([good, bad])
