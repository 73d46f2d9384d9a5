# ruff: noqa: F811 - `make_stage` is a fixture
"""A workflow that a user brings in one file: tools, masks, options, and effects that go through the context alone."""

import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_stage import NUM_TOKENS, MakeStage, make_stage  # noqa: F401
from rc_fakes import codec
from whole_runs import Process, assert_ledger_balances, command, rows

from open_instruct.config.checks import options_have_their_entry, workflow_can_use_the_options
from open_instruct.config.cli import UsageError, parse_args, read_lists
from open_instruct.config.extensions import MODULE_OPTIONS, config_class_with, plain_config
from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.registry import option_kinds
from open_instruct.workflows.base import WORKFLOWS, WorkflowSpec

CALCULATOR = '''
    """A calculator that answers inside the rollout where the model has not answered by itself."""

    import asyncio
    import re
    from dataclasses import dataclass, replace

    import numpy as np

    from open_instruct.data_types import Sample
    from open_instruct.workflows.base import WORKFLOWS, Trajectory, Workflow


    @dataclass(kw_only=True)
    class CalculatorOptions:
        """Calculator"""

        calculator_after: int = 8
        """Tokens after which the calculator helps."""


    def calculate(text):
        return sum(map(int, re.findall(r"[0-9]+", text)))


    @WORKFLOWS.register("toy_calculator", options=CalculatorOptions)
    class Calculator(Workflow):
        tools = {"calculator": calculate}

        @classmethod
        def mistakes(cls, args):
            if args.calculator_after >= args.response_length:
                yield f"--calculator_after {args.calculator_after}: no room is left for its answer. Give less."

        async def run(self, request, ctx):
            config = request.generation_config
            samples = [self.sample(request.prompt, replace(config, n=1, seed=ctx.seed + i), ctx, i) for i in range(config.n)]
            return Trajectory(list(await asyncio.gather(*samples)), notes={"seed": ctx.seed})

        async def sample(self, prompt, config, ctx, number):
            first = replace(config, max_tokens=self.options.calculator_after)
            (said,) = await ctx.generate(prompt, first, name=f"sample-{number}")
            inserted = np.zeros(0, np.int32)
            if "</answer>" not in ctx.codec.decode(said.token_ids.tolist()) and said.finish_reason == "length":
                question = ctx.codec.decode(prompt.tolist())
                value = await ctx.call("calculator", question, timeout_s=5.0, name=f"calculator-{number}")
                inserted = np.array(ctx.codec.encode(f"<answer>{value}</answer>"), np.int32)
            spans = [*said.version_spans, *([(said.version_spans[-1][0], len(inserted))] if len(inserted) else [])]
            return Sample(
                prompt_ids=prompt,
                response_ids=np.concatenate([said.token_ids, inserted]),
                logprobs=np.concatenate([said.logprobs, np.zeros(len(inserted), np.float32)]),
                finish_reason="stop" if len(inserted) else said.finish_reason,
                version_spans=spans,
                loss_mask=np.arange(len(said.token_ids) + len(inserted)) < len(said.token_ids),
            )
'''
MODEL = ["--model_name_or_path", "x"]


@pytest.fixture
def calculator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(WORKFLOWS, "_entries", dict(WORKFLOWS._entries))
    path = tmp_path / "my_calculator.py"
    path.write_text(textwrap.dedent(CALCULATOR))
    return str(path)


def read(argv: list[str]) -> GRPOConfig:
    config_cls, mistakes = config_class_with(read_lists(argv, MODULE_OPTIONS, option_kinds(GRPOConfig)))
    assert not mistakes
    rules = [options_have_their_entry, workflow_can_use_the_options]
    return plain_config(
        parse_args(argv, config_cls, validators=[lambda args: [told for rule in rules for told in rule(args)]])
    )


def test_a_tool_workflow_is_one_file_with_its_options(calculator: str) -> None:
    argv = [*MODEL, "--workflow_modules", calculator, "--rollout_workflow", "toy_calculator"]
    args = read([*argv, "--calculator_after", "4"])
    assert args.workflow == WorkflowSpec("toy_calculator", {"calculator_after": 4}, (calculator,))
    assert args.lengths.samples == args.num_samples_per_prompt_rollout
    assert args.workflow.make().options.calculator_after == 4
    with pytest.raises(UsageError, match="--calculator_after 300: no room is left for its answer"):
        read([*argv, "--calculator_after", "300"])
    with pytest.raises(
        UsageError, match="--rollout_workflow single_turn --calculator_after 4: the workflow single_turn has"
    ):
        read([*MODEL, "--workflow_modules", calculator, "--calculator_after", "4"])


def test_what_a_tool_says_is_in_the_response_and_not_trained_on(calculator: str, make_stage: MakeStage) -> None:
    stage = make_stage(workflow=WorkflowSpec("toy_calculator", {"calculator_after": NUM_TOKENS}, (calculator,)))
    stage.vllm.finish_reason = "length"
    stage.put(None, n=2, prompt=np.array(codec().encode("12 + 34 ="), np.int32))
    [result] = stage.get()
    for sample in result.samples:
        text = codec().decode(sample.response_ids[NUM_TOKENS:].tolist())
        assert text == "<answer>46</answer>"
        assert sample.loss_mask is not None
        assert sample.loss_mask.tolist() == [True] * NUM_TOKENS + [False] * (len(sample.response_ids) - NUM_TOKENS)
        assert sample.version_spans == [(0, NUM_TOKENS), (0, len(sample.response_ids) - NUM_TOKENS)]
    assert result.notes == {"seed": 1}
    assert result.token_statistics.num_response_tokens == 2 * NUM_TOKENS
    assert 0 < result.token_statistics.tool_time < result.token_statistics.generation_time
    assert sorted(stage.vllm.came) == ["train-0/sample-0-0/0", "train-0/sample-1-0/0"]


FAILING = """
    import time
    from open_instruct.workflows.base import WORKFLOWS, Trajectory, Workflow

    def hang(_):
        time.sleep(1.0)

    def fail(_):
        raise KeyError("no such thing")

    @WORKFLOWS.register("toy_failing")
    class Failing(Workflow):
        tools = {"hang": hang, "fail": fail}

        async def run(self, request, ctx):
            await ctx.call(request.task, None, timeout_s=0.1)
"""


@pytest.mark.parametrize(
    ("tool", "error"),
    [("hang", "hang-0: hang did not answer in 0.1 s"), ("fail", "fail-0: fail failed: KeyError: 'no such thing'")],
)
def test_tool_that_hangs_or_fails_gives_the_prompt_up(
    calculator: str,
    make_stage: MakeStage,
    tmp_path: Path,
    tool: str,
    error: str,
) -> None:
    (tmp_path / "failing.py").write_text(textwrap.dedent(FAILING))
    stage = make_stage(workflow=WorkflowSpec("toy_failing", {}, (str(tmp_path / "failing.py"),)))
    stage.put(*[tool] * 10)  # more than a workflow's own errors may be in a row
    assert {result.error for result in stage.get(10)} == {error}


WRONG = """
    from open_instruct.workflows.base import WORKFLOWS, Trajectory, Workflow

    @WORKFLOWS.register("toy_without_a_trajectory")
    class WithoutATrajectory(Workflow):
        async def run(self, request, ctx):
            return []

    @WORKFLOWS.register("toy_with_a_wrong_sample")
    class WithAWrongSample(Workflow):
        async def run(self, request, ctx):
            return Trajectory([request.prompt])

    @WORKFLOWS.register("toy_without_async")
    class WithoutAsync(Workflow):
        def run(self, request, ctx):
            return []
"""


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("toy_without_a_trajectory", "TypeError: run gave list: it must give a Trajectory"),
        ("toy_with_a_wrong_sample", "TypeError: sample 0 of the Trajectory is ndarray: it must be a Sample"),
        ("toy_without_async", "TypeError: run is no coroutine function: write `async def run(self, request, ctx)`"),
    ],
)
def test_a_workflow_that_is_written_wrong_is_told_what_to_write(
    make_stage: MakeStage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, error: str
) -> None:
    monkeypatch.setattr(WORKFLOWS, "_entries", dict(WORKFLOWS._entries))
    (tmp_path / "wrong.py").write_text(textwrap.dedent(WRONG))
    stage = make_stage(workflow=WorkflowSpec(name, {}, (str(tmp_path / "wrong.py"),)))
    stage.put("")
    assert stage.get()[0].error == error


ENDING = """
    import asyncio
    from open_instruct.workflows.base import WORKFLOWS, Trajectory, Workflow

    def leave(_):
        raise SystemExit(2)

    async def leave_by_itself(_):
        raise SystemExit(2)

    async def leaves():
        raise SystemExit(2)

    async def leave_in_a_task():
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(leaves())

    async def give_up_waiting():
        waited_for = asyncio.get_running_loop().create_future()
        waited_for.cancel()
        await waited_for

    @WORKFLOWS.register("toy_ending")
    class Ending(Workflow):
        tools = {"leave": leave, "leave_by_itself": leave_by_itself}

        async def run(self, request, ctx):
            if request.task in self.tools:
                await ctx.call(request.task, None, timeout_s=9.0)
            elif request.task:
                await globals()[request.task]()
            return Trajectory([])
"""


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("leave", "leave-0: leave failed: SystemExit: 2"),
        ("leave_by_itself", "leave_by_itself-0: leave_by_itself failed: SystemExit: 2"),
        ("leaves", "SystemExit: 2"),
        ("leave_in_a_task", "SystemExit: 2"),
        ("give_up_waiting", "CancelledError: "),
    ],
)
def test_a_workflow_that_exits_or_cancels_itself_costs_its_rollout_alone(
    make_stage: MakeStage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, error: str
) -> None:
    """A rollout without a result would be waited for without end."""
    monkeypatch.setattr(WORKFLOWS, "_entries", dict(WORKFLOWS._entries))
    (tmp_path / "ending.py").write_text(textwrap.dedent(ENDING))
    stage = make_stage(workflow=WorkflowSpec("toy_ending", {}, (str(tmp_path / "ending.py"),)))
    stage.put(what)
    assert stage.get()[0].error == error
    stage.put("")
    assert stage.get()[0].error == ""


IMPURE = """
    import asyncio, datetime, logging, random, socket, time, uuid
    import numpy as np
    from time import monotonic
    from open_instruct.workflows.base import WORKFLOWS, Trajectory, Workflow

    async def in_a_task(ctx):
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(later(ctx))

    async def later(ctx):
        await ctx.generate([1], request.generation_config)
        time.time()

    def swallowed():
        try:
            time.time()
        except Exception:
            pass

    @WORKFLOWS.register("toy_impure")
    class Impure(Workflow):
        tools = {{"clock": lambda _: time.time()}}

        async def run(self, request, ctx):
            globals()["request"] = request
            await ctx.generate([1, 2], request.generation_config)
            {code}
            await ctx.generate([1, 2, 3], request.generation_config)
            return Trajectory([])
"""


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("time.time()", "calls time"),
        ("monotonic()", "calls monotonic"),
        ("await asyncio.sleep(0.01)", "calls monotonic"),
        ("datetime.datetime.now()", "calls datetime.now"),
        ("random.random()", "calls Random.random"),
        ("random.choice([1, 2])", "calls Random.getrandbits"),
        ("uuid.uuid4()", "calls urandom"),
        ("np.random.rand()", "draws from numpy.random"),
        ("np.random.default_rng()", "calls "),
        ("socket.create_connection(('127.0.0.1', 9), 0.1)", "calls socket.connect"),
        ("await in_a_task(ctx)", "calls time"),
        ("swallowed()", "calls time"),
    ],
)
def test_effects_outside_the_context_are_caught(
    calculator: str,
    make_stage: MakeStage,
    tmp_path: Path,
    code: str,
    told: str,
) -> None:
    (tmp_path / "impure.py").write_text(textwrap.dedent(IMPURE).format(code=code))
    stage = make_stage(workflow=WorkflowSpec("toy_impure", {}, (str(tmp_path / "impure.py"),)))
    stage.put(None)
    error = stage.ended()
    assert isinstance(error, RuntimeError)
    cause: Any = error.__cause__
    while isinstance(cause, BaseExceptionGroup):
        cause = cause.exceptions[0]
    assert told in str(cause)
    assert "a rollout reads the clock through ctx.now(), random numbers through ctx.random()" in str(cause)


@pytest.mark.parametrize(
    "code",
    [
        "logging.warning('%s', request)",
        "await ctx.call('clock', None, timeout_s=5.0)",
        "assert ctx.now() > 1.7e9",
        "assert [ctx.random().random(), ctx.uuid()] == [random.Random('1 random-0').random(), ctx.__class__.uuid(ctx)] or 1",
        "np.random.default_rng(ctx.seed).random()",
        "await asyncio.gather(asyncio.sleep(0), asyncio.sleep(0))",
    ],
)
def test_effects_through_the_context_are_fine(
    calculator: str,
    make_stage: MakeStage,
    tmp_path: Path,
    code: str,
) -> None:
    (tmp_path / "impure.py").write_text(textwrap.dedent(IMPURE).format(code=code))
    stage = make_stage(workflow=WorkflowSpec("toy_impure", {}, (str(tmp_path / "impure.py"),)))
    stage.put(None)
    assert stage.get()[0].error == ""


@pytest.mark.slow
def test_a_run_with_a_tool_trains_on_what_the_policy_sampled_alone(calculator: str, tmp_path: Path) -> None:
    """Engine and learner agree on every trained token, so masks and positions are right in training too."""
    words = command(
        tmp_path / "out",
        workflow_modules=[calculator],
        rollout_workflow="toy_calculator",
        calculator_after=6,
        response_length=24,
        filter_zero_std_samples=False,
        save_traces=True,
        async_steps=0,
    )
    code, output = Process(words).wait()
    assert code == 0, output[-3000:]
    assert_ledger_balances(tmp_path / "out")
    metrics = rows(tmp_path / "out" / "metrics.jsonl")
    assert max(row["debug/vllm_vs_local_logprob_diff_max"] for row in metrics) < 1e-3
    assert metrics[0]["agent_loop/tool_calls/max"] > 0
    assert metrics[0]["scores"] > 0.5  # the calculator is right where the model says nothing
    traced = rows(tmp_path / "out" / "samples" / "step_000001.jsonl")
    masks = [(sum(one["batch"]["response_mask"]), sum(one["batch"]["attention_mask"])) for one in traced]
    assert all(trained <= 6 for trained, _ in masks)
