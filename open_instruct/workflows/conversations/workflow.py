"""The workflow `conversation`: every prompt leads to G conversations, with the tools and environments that the row or the run
names."""

import asyncio
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from open_instruct.chat_codec import ChatCodec
from open_instruct.data_types import PromptRequest
from open_instruct.environments.adapters import environment_class
from open_instruct.environments.base import Environment, EnvironmentSpec, tool_message
from open_instruct.user_modules import import_user_module
from open_instruct.workflows.base import WORKFLOWS, Context, Lengths, Tool, Trajectory, Workflow
from open_instruct.workflows.conversations.bridge import Bridge, CannotBridge
from open_instruct.workflows.conversations.conversation import Conversation, Ended, Setting
from open_instruct.workflows.conversations.environment_client import ENVIRONMENT, Participant
from open_instruct.workflows.conversations.environment_server import EnvironmentServer
from open_instruct.workflows.conversations.metrics import conversation_metrics
from open_instruct.workflows.conversations.options import (
    CONVERSATION,
    ConversationOptions,
    OfferedTool,
    mistakes,
    offered,
    own_schemas,
    tools_of_row,
)
from open_instruct.workflows.conversations.tool_parsers import OWN_TURN, tool_parser

if TYPE_CHECKING:
    from open_instruct.config.grpo_config import GRPOConfig
    from open_instruct.data.prompt_dataset import PromptRow


@WORKFLOWS.register(CONVERSATION, options=ConversationOptions)
class Conversations(Workflow):
    """Holds G conversations about each prompt in parallel."""

    prompts_are_of_the_data = False
    length_options = ("per_turn_max_tokens",)
    result_metrics = (conversation_metrics,)
    environments_fact = "environments"

    def __init__(self, options: ConversationOptions) -> None:
        super().__init__(options)
        for module in options.environment_modules:
            import_user_module(module)
        self._tools = offered(options)
        self._environments: EnvironmentServer | None = None
        self._bridge: Bridge | None = None
        self._no_place_for_answers = ""
        """Why the chat template cannot take the answers of tools, and what to do; empty if it can."""

    # --- in the driver ------------------------------------------------------------------------------------------------

    @classmethod
    def mistakes(cls, args: "GRPOConfig") -> Iterator[str]:
        yield from mistakes(args)

    @classmethod
    def prepared(cls, options: ConversationOptions) -> ConversationOptions:
        return replace(options, tool_schemas=own_schemas(options))

    @classmethod
    def lengths(cls, args: "GRPOConfig") -> Lengths:
        """If the template changes earlier turns, the prompt of a later sample holds most of the conversation."""
        lengths = super().lengths(args)
        num_samples = args.num_samples_per_prompt_rollout * (args.max_steps + 1)
        return replace(lengths, prompt=lengths.trained, samples=num_samples)

    # --- in the controller --------------------------------------------------------------------------------------------

    def row_facts(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        facts = facts_of_row(columns, self._tools)
        participants = self._participants(facts, None)
        check_places(participants, self.options)
        answering = next((participant.spec.name for participant in participants if participant.schemas), "")
        if answering and self._no_place_for_answers:
            raise ValueError(f"{answering} answers calls of tools, and {self._no_place_for_answers}")
        return facts

    def row_schemas(self, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
        if not self.options.pass_tools_to_chat_template:
            return []
        return [schema for participant in self._participants(facts, None) for schema in participant.schemas]

    def template_mistakes(self, codec: ChatCodec) -> Iterator[str]:
        if self.options.tool_parser_type in OWN_TURN:
            return
        try:
            Bridge(codec).suffix([tool_message("tool", "ANSWER")], "")
        except CannotBridge as error:
            mistake = (
                f"--tool_parser_type {self.options.tool_parser_type}: {error}. Choose a template that can with "
                "--chat_template_name, or --tool_parser_type legacy, whose answers stand in the model's own turn."
            )
            if self._tools:
                yield mistake
            else:  # only the rows know whether there are tools
                self._no_place_for_answers = mistake.removesuffix(".")

    def task(
        self, row: "PromptRow", row_number: int, *, prompt_id: str, version: int, seed: int, is_eval: bool
    ) -> dict[str, Any]:
        return {**(row.facts or {}), "ground_truth": row.ground_truth}

    # --- in an engine -------------------------------------------------------------------------------------------------

    async def run(self, request: PromptRequest, ctx: Context) -> Trajectory:
        setting = self._setting(request, ctx)
        async with asyncio.TaskGroup() as group:
            talks = [
                group.create_task(Conversation(setting, ctx, number).run())
                for number in range(request.generation_config.n)
            ]
        results: list[Ended] = [talk.result() for talk in talks]
        return Trajectory(
            [sample for result in results for sample in result.samples], [asdict(result.account) for result in results]
        )

    def _setting(self, request: PromptRequest, ctx: Context) -> Setting:
        task = request.task
        participants = self._participants(task, task["ground_truth"])
        if self._bridge is None:
            self._bridge = Bridge(ctx.codec)
        schemas = [schema for participant in participants for schema in participant.schemas]
        return Setting(
            prompt_id=request.prompt_id,
            prompt_ids=request.prompt,
            messages=task["messages"],
            participants=participants,
            sampling=request.generation_config,
            options=self.options,
            parser=tool_parser(self.options.tool_parser_type, schemas, ctx.vllm_parser),
            bridge=self._bridge,
            max_steps=task.get("max_steps") or self.options.max_steps,
        )

    def _participants(self, facts: Mapping[str, Any], ground_truth: Any) -> list[Participant]:
        """The tools that the row may use, and the environments that it names."""
        row_settings = {entry["env_name"]: _own_settings(entry) for entry in facts.get("environments") or ()}
        tools = tools_of_row(self._tools, facts.get("tools"))
        names = {name for tool in self._tools for name in (tool.spec.name, tool.spec.target)}
        tool_names = {tool.spec.name for tool in tools}  # a tool may be offered with only some of its functions
        tools += [
            tool for tool in self._tools if _row_names(row_settings, tool.spec) and tool.spec.name not in tool_names
        ]
        for name in row_settings:
            if name not in names:
                spec = EnvironmentSpec(name, name)
                tools.append(OfferedTool.of(spec, environment_class(name).schemas({})))
        participants = []
        for tool in tools:
            cls = environment_class(tool.spec.target)
            settings = row_settings.get(tool.spec.name, row_settings.get(tool.spec.target))
            task = None if cls.is_stateless else {"ground_truth": ground_truth, **(settings or {})}
            participants.append(Participant(tool.spec, tool.schemas, tool.own_names, cls.takes_text, task))
        return participants

    def engine_tools(self) -> Mapping[str, Tool]:
        return {ENVIRONMENT: self._serve}

    async def _serve(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._environments is None:
            self._environments = EnvironmentServer(self.options, self._tools)
        return await self._environments.serve(request)

    def close(self) -> None:
        if self._environments is not None:
            self._environments.close()


def _own_settings(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A row's settings for an environment, without the settings that are meant for the conversation."""
    return {key: value for key, value in entry.items() if key not in ("env_name", "is_text_env")}


def _row_names(row_settings: Mapping[str, Any], spec: EnvironmentSpec) -> bool:
    return spec.name in row_settings or spec.target in row_settings


def facts_of_row(columns: Mapping[str, Any], tools: Sequence[OfferedTool]) -> dict[str, Any]:
    """The checked content of the columns `tools` and `env_config` of a row.

    `env_config` is an object with `env_name` and arguments of its reset; a list of such objects; or `{"env_configs": […],
    "max_steps"}`. `tools` lists names of tools; a row without this column may use all tools.

    Raises:
        ValueError: something is wrong; the message names the first mistake.
    """
    facts: dict[str, Any] = {}
    active = columns.get("tools")
    if isinstance(active, list) and all(isinstance(name, str) for name in active):
        names = {name for tool in tools for name in (tool.spec.name, *tool.own_names)}
        unknown = [name for name in active if name not in names]
        if unknown:
            raise ValueError(
                f"'tools' names {unknown[0]!r:.80}, and --tools gives: {', '.join(sorted(names)) or 'none'}"
            )
        facts["tools"] = active
    elif active not in (None, "", []):
        raise ValueError(f"'tools' must be a list of names, got {active!r:.80}")
    entries, max_steps = _entries(columns.get("env_config"))
    if entries:
        facts["environments"] = [_checked_entry(entry, tools) for entry in entries]
    if max_steps is not None:
        if type(max_steps) is not int or max_steps < 1:
            raise ValueError(f"'max_steps' in 'env_config' must be a whole number from 1, got {max_steps!r:.80}")
        facts["max_steps"] = max_steps
    return facts


def check_places(participants: Sequence[Participant], options: ConversationOptions) -> None:
    """Raises `ValueError` if a conversation could never begin because it needs more processes than there may be: one for each
    environment that it keeps, and one for all its tools. `--tools calculator` with an `env_config` of two games needs three."""
    names = [participant.spec.name for participant in participants if participant.is_kept]
    has_tools = len(participants) > len(names)
    num_needed = len(names) + has_tools
    if num_needed > options.num_places:
        addition = ", and its tools one more" if has_tools else ""
        raise ValueError(
            f"needs {num_needed} processes at once (one each for {', '.join(names)}{addition}), and --pool_size allows "
            f"{options.num_places}: raise --pool_size to {num_needed} or more"
        )


def _entries(config: Any) -> tuple[list[Any], Any]:
    """The environments of a row's `env_config`, and its `max_steps`."""
    if config in (None, "", [], {}):
        return [], None
    if isinstance(config, list):
        return config, None
    if not isinstance(config, dict):
        raise ValueError(f"'env_config' must be an object or a list of objects, got {config!r:.80}")
    if "env_configs" in config:
        return list(config["env_configs"] or []), config.get("max_steps")
    return [{key: value for key, value in config.items() if key != "max_steps"}], config.get("max_steps")


def _needed_settings(cls: type[Environment]) -> list[str]:
    """Constructor arguments that an environment needs. A row cannot supply them, because its arguments come with the reset."""
    parameters = inspect.signature(cls).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [
        parameter.name for parameter in parameters if parameter.default is parameter.empty and parameter.kind in kinds
    ]


def _checked_entry(entry: Any, tools: Sequence[OfferedTool]) -> dict[str, Any]:
    if not isinstance(entry, dict) or not isinstance(entry.get("env_name"), str):
        raise ValueError(f"an environment in 'env_config' needs an 'env_name', got {entry!r:.80}")
    name = entry["env_name"]
    if not any(name in (tool.spec.name, tool.spec.target) for tool in tools):
        settings = _needed_settings(environment_class(name))  # raises for a name that is not registered
        if settings:
            raise ValueError(
                f"the environment {name!r} needs {', '.join(settings)}: name it in --tools, and give it in --tool_configs"
            )
    return {key: value for key, value in entry.items() if value is not None}
