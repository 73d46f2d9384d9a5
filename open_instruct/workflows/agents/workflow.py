"""The workflow `agent_program`: for every prompt a user program is started G times. The programs call the model, and what the
model answers becomes the samples."""

import asyncio
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from open_instruct.data_types import PromptRequest
from open_instruct.registry import options_of
from open_instruct.workflows.agents.metrics import agent_metrics
from open_instruct.workflows.agents.options import AGENT_PROGRAM, AgentOptions, mistakes
from open_instruct.workflows.agents.rollout import AGENT, AgentRollout, Setting
from open_instruct.workflows.base import WORKFLOWS, Context, Lengths, Tool, Trajectory, Workflow
from open_instruct.workflows.conversations.bridge import Bridge

if TYPE_CHECKING:
    from open_instruct.config.grpo_config import GRPOConfig
    from open_instruct.data.prompt_dataset import PromptRow
    from open_instruct.workflows.agents.server import AgentHost


@WORKFLOWS.register(AGENT_PROGRAM, options=AgentOptions)
class AgentPrograms(Workflow):
    """Runs G programs for each prompt in parallel."""

    prompts_are_of_the_data = False
    reward_options = ("agent_prints_reward",)
    result_metrics = (agent_metrics,)
    identity_options = (
        "agent_command",
        "agent_max_samples",
        "agent_prints_reward",
        "agent_gets_ground_truth",
        "agent_tool_parser_type",
    )

    def __init__(self, options: AgentOptions) -> None:
        super().__init__(options)
        self._host: AgentHost | None = None
        self._bridge: Bridge | None = None

    # --- in the driver ------------------------------------------------------------------------------------------------

    @classmethod
    def mistakes(cls, args: "GRPOConfig") -> Iterator[str]:
        yield from mistakes(args)

    @classmethod
    def may_reward(cls, args: "GRPOConfig") -> bool:
        return options_of(args, AgentOptions).agent_prints_reward

    @classmethod
    def prepared(cls, options: AgentOptions) -> AgentOptions:
        return replace(options, agent_directory=options.agent_directory or os.getcwd())

    @classmethod
    def lengths(cls, args: "GRPOConfig") -> Lengths:
        """A program writes its prompts itself. Each sample may be as long as the engine's context."""
        lengths = super().lengths(args)
        num_samples = args.num_samples_per_prompt_rollout * args.agent_max_samples
        return replace(lengths, prompt=lengths.sequence, trained=lengths.sequence, samples=num_samples)

    # --- in the controller --------------------------------------------------------------------------------------------

    def row_facts(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """The columns `env_config` and `tools`, whose meaning is up to the program."""
        facts = {name: columns[name] for name in ("env_config", "tools") if columns.get(name) not in (None, "", [], {})}
        try:
            json.dumps(facts, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"'env_config' and 'tools' must be JSON, because a program reads them: {error}") from error
        return facts

    def task(
        self, row: "PromptRow", row_number: int, *, prompt_id: str, version: int, seed: int, is_eval: bool
    ) -> dict[str, Any]:
        truth = {"ground_truth": row.ground_truth} if self.options.agent_gets_ground_truth else {}
        return {**(row.facts or {}), **truth, "place": row.place}

    # --- in an engine -------------------------------------------------------------------------------------------------

    async def run(self, request: PromptRequest, ctx: Context) -> Trajectory:
        setting = self._setting(request, ctx)
        async with asyncio.TaskGroup() as group:
            rollouts = [
                group.create_task(AgentRollout(setting, ctx, number).run())
                for number in range(request.generation_config.n)
            ]
        results = [rollout.result() for rollout in rollouts]
        return Trajectory(
            [sample for result in results for sample in result.samples], [asdict(result.account) for result in results]
        )

    def _setting(self, request: PromptRequest, ctx: Context) -> Setting:
        if self._bridge is None:
            self._bridge = Bridge(ctx.codec)
        tokenizer = ctx.codec.tokenizer
        row = {
            "prompt_id": request.prompt_id,
            "prompt_token_ids": np.asarray(request.prompt).tolist(),
            "seed": ctx.seed,
            "is_eval": request.is_eval,
            **request.task,
        }
        return Setting(
            prompt_id=request.prompt_id,
            row=row,
            sampling=request.generation_config,
            options=self.options,
            bridge=self._bridge,
            model=str(tokenizer.name_or_path),
            vocab_size=len(tokenizer),
        )

    def engine_tools(self) -> Mapping[str, Tool]:
        from open_instruct.workflows.agents.server import AgentHost  # imports aiohttp, which the driver does not need

        self._host = self._host or AgentHost(self.options)
        return {AGENT: self._host.serve}

    def close(self) -> None:
        if self._host is not None:
            self._host.close()
