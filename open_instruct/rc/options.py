"""The options of `rc_actor.py`: one dataclass per section of its YAML file, read and checked in full before anything starts.

A key of the source document keeps its name and meaning. `shared_memory_entry_size` comes from a design with shared memory, which
this program does not use; it bounds the same thing as in that design, one entry on its way to the stream.
"""

import dataclasses
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from open_instruct.config.cli import UsageError, make_config
from open_instruct.config.yaml_files import in_terms_of_the_file, unknown_key
from open_instruct.engines.server_keys import KEY_VARIABLE
from open_instruct.workflows.rc.prompts import (
    FILE_PREFIX,
    REASONING_FIELDS,
    SUMMARIZATION_FIELDS,
    read_template,
    required_of_summaries,
    template_mistakes,
)
from open_instruct.workflows.rc.state import RCSettings
from open_instruct.workflows.rc.types import RetryOptions

Section = TypeVar("Section")


@dataclass(frozen=True)
class RunOptions:
    """The top level of the file."""

    output_dir: str
    """Directory of all files that the run writes."""
    model_path: str
    """Name of the tokenizer, and of the model if a server has several."""
    dataset_loader: str
    """Dotted path of a function `load_datasets(names, seed=…) -> list[Problem]`."""
    seed: int = 42
    attempts: int = 1
    """Number of times that each problem is worked on; `rollout_index` counts them."""
    eval_every_n_versions: int = 0
    """0: no evaluation. Otherwise the test data sets are worked on once, before the training data sets, because this program has
    only version 0 of the weights."""


@dataclass(frozen=True)
class ActorOptions:
    """`actor`: how trajectories are made, and how many of them at once."""

    reasoning_prompt_template: str
    """Template with {problem} and {curr_summary}; `file:PATH` reads it from a file."""
    summarization_prompt_template: str
    """Template with {problem}, {existing_summary} and {reasoning}; `file:PATH` reads it from a file."""
    solution_rollout_policy: str
    """Dotted path of a `workflows.RolloutPolicy` for reasoning turns."""
    summarization_rollout_policy: str
    """Dotted path of a `workflows.RolloutPolicy` for summaries."""
    num_reasoning_steps: int = 3
    """Cycles of a trajectory."""
    num_samples_per_problem: int = 1
    """Trajectories per problem and attempt."""
    use_think_tags: bool = False
    """Begin the model's reasoning turns with <think>. Summaries never begin with it."""
    reasoning_for_summary: Literal["thoughts", "answer", "both"] = "thoughts"
    """The part of a reasoning turn from which its summary is made, if the turn has think tags."""
    summarization_style: Literal["replace", "append"] = "replace"
    """replace: a summary replaces the previous summary; append: it is added to the previous summary, up to `max_summary_tokens`
    together."""
    truncated_summary: Literal["keep", "keep_previous"] = "keep"
    """What happens to a summary that was cut at its limit. keep: it is used; keep_previous: the previous summary is used."""
    max_summary_tokens: int = 2048
    stop_when_solved: bool = False
    """End a trajectory with its first right answer instead of after all cycles."""
    one_long_turn: bool = False
    """In an evaluation, also make a control for each trajectory: one turn without summaries that may spend the tokens of the
    whole trajectory. The cycles have to beat the controls. `me.request_timeout_s` has to be long enough for such a turn. The
    option may be added to an evaluation that is done; its trajectories are not made again."""
    rollout_workers: int = 1
    """Worker processes. They share the slots of each server."""
    llm_max_rollouts: int = 16
    """Turns at once on each server, over all workers."""
    problem_queue_size: int = 10
    result_queue_size: int = 10
    shared_memory_entry_size: int = 5242880
    """Most bytes of one turn in the stream. A trajectory with a longer turn is dropped."""
    throughput_window_size: int = 10
    """Number of trajectories over which the throughput is measured."""
    max_retries: int = 3
    """Tries of one turn, the first one included."""
    retry_base_delay: float = 1.0
    """Seconds before the second try. The delay doubles with each further try: 1, 2, 4, …"""
    max_requeues: int = 10
    """Times that a trajectory is put back after a turn has used up its retries."""
    max_consecutive_failures: int = 10
    """The run ends after this many trajectories in a row that servers refuse, policies fail on, or verifiers do not score."""


@dataclass(frozen=True)
class SamplingOptions:
    """`llm.parameters` and `test_llm.parameters`."""

    temperature: float = 1.0
    max_tokens: int = 16384
    """Longest reasoning turn, in tokens. The limit is lower if the context has less room."""
    top_p: float = 1.0


@dataclass(frozen=True)
class ServerOptions:
    """`me`: the servers, and how long the run waits for them."""

    llm_urls: list[str] = field(default_factory=lambda: ["http://localhost:8000/v1"])
    """Addresses of the servers, as a list or joined by +; with or without /v1."""
    summarization_llm_urls: list[str] = field(default_factory=list)
    """Addresses of servers that write the summaries and nothing else. By default the servers of llm_urls write them."""
    api_key_urls: list[str] = field(default_factory=list)
    """Addresses of those servers that get the key in OPENAI_API_KEY. All other servers get VLLM_API_KEY, if it is set."""
    max_model_len: int | None = None
    """Most tokens of prompt and response together; by default the limit that the servers report."""
    wait_for_server_s: float = 10.0
    """Seconds that each server has to answer before the run begins."""
    request_timeout_s: float = 1800.0
    """Seconds that one try of a turn may take."""
    max_server_downtime_s: float = 600.0
    """Seconds that all servers together may be unreachable before the run ends."""


@dataclass(frozen=True)
class TrackingOptions:
    """`wandb`."""

    use_wandb: bool = False
    project: str = "open_instruct_rc"


@dataclass(frozen=True)
class StreamOptions:
    """`streams`."""

    backend: Literal["files"] = "files"


@dataclass(frozen=True)
class DebugOptions:
    """`debug`."""

    mode: bool = True
    """Run without a trainer. Only True is possible, because this program has no trainer."""


@dataclass(frozen=True)
class RCOptions:
    """All options of a file."""

    run: RunOptions
    train_dataset_names: list[Any]
    test_dataset_names: list[Any]
    actor: ActorOptions
    llm: SamplingOptions
    test_llm: SamplingOptions
    me: ServerOptions
    streams: StreamOptions
    wandb: TrackingOptions
    debug: DebugOptions

    def settings(self, sampling: SamplingOptions) -> RCSettings:
        """How the turns of a trajectory are made, with `sampling` (`llm` or `test_llm`)."""
        shared = {option.name for option in dataclasses.fields(RCSettings)} & {
            option.name for option in dataclasses.fields(ActorOptions)
        }
        return RCSettings(
            **{name: getattr(self.actor, name) for name in shared},
            max_reasoning_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=self.run.seed,
        )

    @property
    def retry(self) -> RetryOptions:
        return RetryOptions(
            max_retries=self.actor.max_retries,
            retry_base_delay=self.actor.retry_base_delay,
            request_timeout_s=self.me.request_timeout_s,
            max_server_downtime_s=self.me.max_server_downtime_s,
        )


LISTED = "conf/rc_base.yaml holds every key."
NAMES = ("train_dataset_names", "test_dataset_names")
SECTIONS: dict[str, type] = {
    "actor": ActorOptions,
    "me": ServerOptions,
    "streams": StreamOptions,
    "wandb": TrackingOptions,
    "debug": DebugOptions,
}
LLM_SECTIONS = ("llm", "test_llm")
TEMPLATES = ("reasoning_prompt_template", "summarization_prompt_template")


def option_keys() -> list[str]:
    """All known keys, without their sections."""
    classes = [RunOptions, SamplingOptions, *SECTIONS.values()]
    names = [option.name for cls in classes for option in dataclasses.fields(cls)]
    return [*names, *NAMES, *SECTIONS, *LLM_SECTIONS, "parameters"]


def read_options(config: Mapping[str, Any]) -> RCOptions:
    """The options of a composed file.

    Raises:
        UsageError: with all mistakes, each of which names its option by section and key.
    """
    mistakes: list[str] = []
    config = _with_templates(config, mistakes)
    sections: dict[str, Any] = {
        name: _read_section(cls, config.get(name), name, mistakes) for name, cls in SECTIONS.items()
    }
    for name in LLM_SECTIONS:
        sections[name] = _read_sampling(config.get(name), name, mistakes)
    rest = {key: value for key, value in config.items() if key not in (*SECTIONS, *LLM_SECTIONS, *NAMES)}
    sections["run"] = _read_section(RunOptions, rest, "", mistakes)
    for name in NAMES:
        sections[name] = _dataset_names(config.get(name), name, mistakes)
    if None in sections.values():
        raise UsageError(mistakes)
    options = RCOptions(**sections)
    mistakes += _mistakes_between_sections(options)
    if mistakes:
        raise UsageError(mistakes)
    return options


def _with_templates(config: Mapping[str, Any], mistakes: list[str]) -> Mapping[str, Any]:
    """The config with templates of the form `file:PATH` replaced by the content of the file."""
    actor = config.get("actor")
    if not isinstance(actor, Mapping):
        return config
    section = dict(actor)
    for name in TEMPLATES:
        template = actor.get(name)
        if isinstance(template, str) and template.startswith(FILE_PREFIX):
            try:
                section[name] = read_template(template)
            except (OSError, UnicodeDecodeError) as error:
                reason = getattr(error, "strerror", error)
                mistakes.append(f"actor.{name} {template}: it cannot be read ({reason}). Check the path.")
    return {**config, "actor": section}


def _read_section(cls: type[Section], values: Any, name: str, mistakes: list[str]) -> Section | None:
    """The section as its dataclass, or None if something is wrong with it. A null means the default."""
    prefix = f"{name}." if name else ""
    if not isinstance(values, Mapping | None):
        mistakes.append(f"{name}: expected a section of `key: value` lines.")
        return None
    fields_of = [option.name for option in dataclasses.fields(cls)]  # type: ignore[arg-type]
    unknown = [
        f"{prefix}{key}: {unknown_key(str(key), fields_of, LISTED)}"
        for key in values or {}
        if str(key) not in fields_of
    ]
    settings = {key: value for key, value in (values or {}).items() if key in fields_of and value is not None}
    validators = [lambda options: VALIDATORS.get(cls, _no_mistakes)(options)]
    try:
        return make_config(cls, settings, validators=validators, mistakes=unknown)  # type: ignore[type-var]
    except UsageError as error:
        mistakes += [in_terms_of_the_file(mistake, lambda option: prefix + option) for mistake in error.mistakes]
        return None


def _read_sampling(section: Any, name: str, mistakes: list[str]) -> SamplingOptions | None:
    section = section or {}
    if not isinstance(section, Mapping) or section.keys() - {"parameters"}:
        mistakes.append(f"{name}: expected `parameters` and nothing else.")
        return None
    return _read_section(SamplingOptions, section.get("parameters"), f"{name}.parameters", mistakes)


def _dataset_names(value: Any, key: str, mistakes: list[str]) -> list[Any]:
    names = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(name, str | Mapping) for name in names):
        mistakes.append(f"{key}: expected a list of names, or of entries with hub_id and split.")
        return []
    return names


# --- what values must be ----------------------------------------------------------------------------------------------


def _at_least(options: Any, **least: float) -> Iterator[str]:
    for name, minimum in least.items():
        value = getattr(options, name)
        if not minimum <= value < math.inf:  # this refuses NaN too
            yield f"--{name} {value}: expected {minimum} or more."


def _run_mistakes(options: RunOptions) -> Iterator[str]:
    yield from _at_least(options, attempts=1, eval_every_n_versions=0)
    for name in ("output_dir", "model_path", "dataset_loader"):
        if not getattr(options, name):
            yield f"--{name}: missing. It must be given."


def _actor_mistakes(options: ActorOptions) -> Iterator[str]:
    yield from _at_least(
        options,
        num_reasoning_steps=1,
        num_samples_per_problem=1,
        max_summary_tokens=1,
        rollout_workers=1,
        llm_max_rollouts=1,
        problem_queue_size=1,
        result_queue_size=1,
        shared_memory_entry_size=1024,
        throughput_window_size=1,
        max_retries=1,
        retry_base_delay=0,
        max_requeues=0,
        max_consecutive_failures=1,
    )
    if options.rollout_workers > options.llm_max_rollouts:
        yield (
            f"--rollout_workers {options.rollout_workers}: more workers than the slots of --llm_max_rollouts "
            f"{options.llm_max_rollouts}, which they share. Lower --rollout_workers or raise --llm_max_rollouts."
        )


def _sampling_mistakes(options: SamplingOptions) -> Iterator[str]:
    yield from _at_least(options, temperature=0, max_tokens=1)
    if not 0 < options.top_p <= 1:
        yield f"--top_p {options.top_p}: expected a number above 0 and at most 1."


def _server_mistakes(options: ServerOptions) -> Iterator[str]:
    yield from _at_least(options, wait_for_server_s=0, request_timeout_s=1, max_server_downtime_s=0)
    if options.max_model_len is not None and options.max_model_len < 2:
        yield f"--max_model_len {options.max_model_len}: expected 2 or more."
    if not split_urls(options.llm_urls):
        yield "--llm_urls: missing. Name a server, such as http://localhost:8000/v1."
    urls = [*split_urls(options.llm_urls), *split_urls(options.summarization_llm_urls)]
    with_key = split_urls(options.api_key_urls)
    if any("@" in url for url in [*urls, *with_key]) and not all(map(is_address, [*urls, *with_key])):
        # The message does not quote the address, because it may be a part of a password.
        yield (
            "--llm_urls: one of the URLs is not the address of a server. In a password write %2B for +, %2C for a comma, "
            "%40 for @."
        )
        return
    for url in urls:
        if not is_address(url):
            yield f"--llm_urls {url}: this is not the address of a server. Write http://host:port/v1."
    for url in with_key:
        if url not in urls:
            yield f"--api_key_urls {url}: the run does not use this server. Name it in --llm_urls too."
    if options.api_key_urls and not os.environ.get(KEY_VARIABLE):
        yield f"--api_key_urls: the variable {KEY_VARIABLE} is not set. Set it to the key of these servers."


def _debug_mistakes(options: DebugOptions) -> Iterator[str]:
    if not options.mode:
        yield "--mode False: this program has no trainer. Set --mode to True; to train, start grpo_fast.py."


def _no_mistakes(_: Any) -> Iterable[str]:
    return ()


VALIDATORS: dict[type, Any] = {
    RunOptions: _run_mistakes,
    ActorOptions: _actor_mistakes,
    SamplingOptions: _sampling_mistakes,
    ServerOptions: _server_mistakes,
    DebugOptions: _debug_mistakes,
}


def _mistakes_between_sections(options: RCOptions) -> Iterator[str]:
    if not options.train_dataset_names and not options.test_dataset_names:
        yield "train_dataset_names: missing. Name a data set."
    elif not options.train_dataset_names and not options.run.eval_every_n_versions:
        yield (
            "test_dataset_names: they are worked on in an evaluation alone, and there is none. Set eval_every_n_versions to 1, "
            "or name train_dataset_names."
        )
    if options.run.eval_every_n_versions and not options.test_dataset_names:
        yield (
            "eval_every_n_versions: there is nothing to evaluate on. Name test_dataset_names, or set "
            "eval_every_n_versions to 0."
        )
    if options.actor.one_long_turn and not options.run.eval_every_n_versions:
        yield (
            "actor.one_long_turn: it belongs to an evaluation, and there is none. Set eval_every_n_versions to 1, or "
            "actor.one_long_turn to false."
        )
    required = {
        "reasoning_prompt_template": (REASONING_FIELDS, REASONING_FIELDS),
        "summarization_prompt_template": (
            SUMMARIZATION_FIELDS,
            required_of_summaries(options.actor.summarization_style),
        ),
    }
    for name, (fields, needed) in required.items():
        template = getattr(options.actor, name)
        if template.startswith(FILE_PREFIX):  # the file could not be read, which has been reported
            continue
        for mistake in template_mistakes(template, fields=fields, required=needed):
            yield f"actor.{name}: {mistake}"


def is_address(url: str) -> bool:
    """Whether `url` can be the address of a server: http or https, a host, and a valid port or none."""
    try:
        parts = urlsplit(url)
        (parts.hostname or "").encode("idna")  # looking up the host name does the same
        has_place = bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and has_place and "?" not in url and "#" not in url


def split_urls(urls: Iterable[str]) -> list[str]:
    """The addresses in `urls`, which may be joined by `+` or commas: each once, in its normal form."""
    parts = [part for joined in urls for part in joined.replace("+", " ").replace(",", " ").split()]
    return list(dict.fromkeys(normalize_url(part) for part in parts))


def normalize_url(url: str) -> str:
    """`http://host:8000`, with or without `/v1` and a slash at the end, as `http://host:8000/v1`."""
    url = url.strip().rstrip("/")
    return url if url.endswith("/v1") else f"{url}/v1"
