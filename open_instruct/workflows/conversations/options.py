"""The options of conversations, under open-instruct's names where open-instruct has them, and what is wrong with them."""

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from open_instruct.environments.adapters import UnknownEnvironment, environment_class
from open_instruct.environments.base import ENVIRONMENTS, EnvironmentSpec, Schema, mistake_in_config, schema_name
from open_instruct.option_limits import COUNT, POSITIVE, limited
from open_instruct.option_text import shown
from open_instruct.registry import NO_FLAG, options_of
from open_instruct.user_modules import UserModuleError, import_user_module
from open_instruct.workflows.conversations.tool_parsers import OWN_TURN, VLLM

if TYPE_CHECKING:
    from open_instruct.config.grpo_config import GRPOConfig

CONVERSATION = "conversation"
MOST_PROCESSES = 1024
"""Of environments on an engine, where --pool_size does not say."""
SERVICES = {
    "generic_sandbox": "it needs Docker, which this project does not drive. An environment of your own can: "
    "docs/guides/environments.md",
    "dr_agent_mcp": "it is Ai2's package. Give its servers to generic_mcp",
    "crawl4ai_browse": "it is Ai2's service. jina_browse reads pages, and generic_mcp takes any MCP server",
}
"""Names of open-instruct that are not here, and what to do."""


@dataclass(kw_only=True)
class ConversationOptions:
    """Conversations"""

    tools: list[str] = field(default_factory=list)
    """Tools and environments: calculator, python, search, a function or class in a file (my_tools.py:lookup), and others
    (docs/guides/environments.md). With any option of this group, rollout_workflow is conversation unless it says otherwise."""
    tool_call_names: list[str] = field(default_factory=list)
    """The names under which the model calls the tools, in their order. By default their own."""
    tool_configs: list[str] = field(default_factory=list)
    """Arguments of the tools' constructors, as JSON objects in their order."""
    tool_parser_type: str = "legacy"
    """How calls are written. legacy: <tool>argument</tool> in the model's own turn. dr_tulu: <call_tool name="tool">. vllm_NAME:
    any parser of vLLM, such as vllm_hermes, vllm_llama3_json or vllm_qwen3_xml."""
    environment_modules: list[str] = field(default_factory=list)
    """Python files or modules that register environments of your own, for rows that name them."""
    max_steps: int = limited(5, COUNT)
    """Most calls of tools, or steps of an environment, in a conversation. A row's env_config may say less or more."""
    per_turn_max_tokens: int | None = limited(None, COUNT)
    """Longest turn of the model, in tokens. By default what is left of response_length, which counts all turns and answers."""
    tool_output_max_tokens: int | None = limited(None, COUNT)
    """Longest answer of tools to one turn, in tokens; the middle of a longer one is left out. By default half of what is left."""
    pool_size: int | None = limited(None, COUNT)
    """Most processes of environments at once on an engine; further conversations and calls wait. By default 1024."""
    pass_tools_to_chat_template: bool = True
    """Have the chat template describe the tools in the prompt."""
    only_reward_good_outputs: bool = False
    """A reward only for conversations with calls, all of which were answered without an error."""
    reward_aggregator: Literal["last", "sum"] = "last"
    """What the rewards of an environment's steps come to. Those of several environments, and the verifier's, are added."""
    environment_attempts: int = limited(2, COUNT)
    """How often a conversation is begun whose environment fails. After that its prompt is sampled again with another seed,
    max_generation_attempts times in all."""
    environment_reset_timeout_s: float = limited(60.0, POSITIVE)
    """Longest time that an environment may take to begin."""
    environment_step_timeout_s: float = limited(60.0, POSITIVE)
    """Longest time that a call or a step may take."""
    conversation_timeout_s: float = limited(3600.0, POSITIVE)
    """Longest time for a whole conversation, without the time that the engine computes its last turn."""
    tool_schemas: list[list[dict[str, Any]]] = field(default_factory=list, metadata=NO_FLAG)
    """The functions of each tool, under their own names; filled in by the driver, because a server may have to be asked."""

    @property
    def num_places(self) -> int:
        """Most processes of environments at once on an engine."""
        return self.pool_size or MOST_PROCESSES

    @property
    def specs(self) -> list[EnvironmentSpec]:
        """The tools with the names under which rows and metrics know them. Raises ValueError for wrong `tool_configs`."""
        names = self.tool_call_names or [default_name(tool) for tool in self.tools]
        configs = [json.loads(config) for config in self.tool_configs] or [{} for _ in self.tools]
        if not all(isinstance(config, dict) for config in configs):
            raise ValueError("the config of a tool must be a JSON object")
        pools = ("pool_size",)  # a pool of its own has no meaning here
        return [
            EnvironmentSpec(tool, name, {key: value for key, value in config.items() if key not in pools})
            for tool, name, config in zip(self.tools, names, configs, strict=True)
        ]


def with_implied_workflow(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a user wrote. With an option of conversations, and no other workflow chosen, there are conversations."""
    implied = {"rollout_workflow": CONVERSATION} if options_that_imply_conversations(options) else {}
    return {**implied, **options}


def options_that_imply_conversations(options: Mapping[str, Any]) -> list[str]:
    """The options of conversations among those that a user wrote."""
    names = {option.name for option in fields(ConversationOptions)}
    return [name for name in options if name in names]


def default_name(tool: str) -> str:
    """`lookup` for `my_tools.py:lookup`."""
    return tool.rpartition(":")[2]


@dataclass(frozen=True)
class OfferedTool:
    """A tool of the run."""

    spec: EnvironmentSpec
    schemas: list[Schema]
    """Its functions, under the names by which the model calls them: their own, but for a function that is alone and whose tool
    was given a name (`--tool_call_names`), which is the function's then."""
    own_names: dict[str, str]
    """By those names: the functions' own."""

    @classmethod
    def of(cls, spec: EnvironmentSpec, schemas: list[Schema]) -> "OfferedTool":
        was_named = len(schemas) == 1 and spec.name != default_name(spec.target)
        names = [spec.name] if was_named else [schema_name(schema) for schema in schemas]
        renamed = [
            {**schema, "function": {**schema["function"], "name": name}}
            for schema, name in zip(schemas, names, strict=True)
        ]
        return cls(spec, renamed, {name: schema_name(schema) for name, schema in zip(names, schemas, strict=True)})


def own_schemas(options: ConversationOptions) -> list[list[Schema]]:
    """The functions of each tool.

    Raises:
        ValueError: a tool cannot describe itself; the text says which.
    """
    schemas = []
    for spec in options.specs:
        try:
            schemas.append(environment_class(spec.target).schemas(spec.config))
        except Exception as error:
            raise ValueError(f"{spec.target}: {error}") from error
    return schemas


def offered(options: ConversationOptions) -> list[OfferedTool]:
    """The tools of the run, in order."""
    schemas = options.tool_schemas or own_schemas(options)
    return [OfferedTool.of(*pair) for pair in zip(options.specs, schemas, strict=True)]


def mistakes(args: "GRPOConfig") -> Iterator[str]:
    """Wrong options of conversations."""
    for name in ("tool_call_names", "tool_configs"):
        values = getattr(args, name)
        if values and len(values) != len(args.tools):
            yield f"{shown(args, name)}: there are {len(args.tools)} tools. Give one for each, in their order."
            return
    for module in args.environment_modules:
        try:
            import_user_module(module)
        except UserModuleError as error:
            yield f"--environment_modules {module}: {error}."
            return
    tools_are_right = True
    for tool, config in zip(args.tools, args.tool_configs or ["{}"] * len(args.tools), strict=True):
        for mistake in _mistakes_of_tool(tool, config):
            tools_are_right = False
            yield mistake
    if tools_are_right:
        yield from _mistakes_of_names(args)
    kind = args.tool_parser_type
    if kind not in OWN_TURN and not kind.startswith(VLLM):
        yield f"{shown(args, 'tool_parser_type')}: it must be legacy, dr_tulu or vllm_ and the name of a parser of vLLM."


def _mistakes_of_tool(tool: str, config: str) -> Iterator[str]:
    if tool in SERVICES:
        yield f"--tools {tool}: {SERVICES[tool]}."
        return
    try:
        cls = environment_class(tool)
    except UnknownEnvironment as error:
        near = difflib.get_close_matches(tool, ENVIRONMENTS.names, n=1)
        yield f"--tools {tool}: {error}." + (f" Did you mean {near[0]}?" if near else "")
        return
    try:
        values = json.loads(config)
    except ValueError as error:
        yield f"--tool_configs {config}: it is no JSON ({error})."
        return
    if not isinstance(values, dict):
        yield f"--tool_configs {config}: it must be a JSON object, such as {{}}."
        return
    values = {key: value for key, value in values.items() if key != "pool_size"}
    if problem := mistake_in_config(cls, values):
        yield f"--tool_configs {config}: {tool}: {problem}."
    elif problem := cls.problem(values):
        yield f"--tools {tool}: {problem}."


def _mistakes_of_names(args: "GRPOConfig") -> Iterator[str]:
    options = options_of(args, ConversationOptions)
    try:
        tools = offered(options)
    except ValueError as error:
        yield f"--tools {' '.join(args.tools)}: {str(error).rstrip('.!')}."
        return
    names = [name for tool in tools for name in tool.own_names]
    double = sorted({name for name in names if names.count(name) > 1})
    if double:
        yield f"--tools {' '.join(args.tools)}: two tools are called {double[0]}. --tool_call_names gives them other names."
    elif len({tool.spec.name for tool in tools}) < len(tools):
        yield f"--tools {' '.join(args.tools)}: a tool is there twice. --tool_call_names gives it another name."


def tools_of_row(tools: Sequence[OfferedTool], active: Sequence[str] | None) -> list[OfferedTool]:
    """The tools that a row may use: all, or those that its column `tools` names, by their names or those of their functions."""
    if active is None:
        return list(tools)
    selection = []
    for tool in tools:
        schemas = [schema for schema in tool.schemas if tool.spec.name in active or schema_name(schema) in active]
        if schemas:
            names = {name: tool.own_names[name] for name in map(schema_name, schemas)}
            selection.append(OfferedTool(tool.spec, schemas, names))
    return selection
