"""The options of `rc_actor.py`: one dataclass per section of its YAML file, read and checked in full before anything starts.

A key of the source document keeps its name and meaning. `shared_memory_entry_size` belongs to a design with shared memory; here
it bounds what it bounded there, one entry on its way to the stream.
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
    """Where everything of the run lies."""
    model_path: str
    """Names the tokenizer, and the model among those that a server has."""
    dataset_loader: str
    """Dotted path of `load_datasets(names, seed=…) -> list[Problem]`."""
    seed: int = 42
    attempts: int = 1
    """Times that each problem is worked on; `rollout_index` counts them."""
    eval_every_n_versions: int = 0
    """0: no evaluation. Else the test data sets are worked on before the training ones: this door knows version 0 alone."""


@dataclass(frozen=True)
class ActorOptions:
    """`actor`: how a trajectory is made, and how many at once."""

    reasoning_prompt_template: str
    """With {problem} and {curr_summary}; `file:PATH` reads it from a file."""
    summarization_prompt_template: str
    """With {problem}, {existing_summary} and {reasoning}."""
    solution_rollout_policy: str
    """Dotted path of a `workflows.RolloutPolicy`, for reasoning turns."""
    summarization_rollout_policy: str
    num_reasoning_steps: int = 3
    num_samples_per_problem: int = 1
    use_think_tags: bool = False
    """Begin the model's reasoning turn with <think>; summaries never."""
    reasoning_for_summary: Literal["thoughts", "answer", "both"] = "thoughts"
    """The part of a reasoning turn that its summary is made from, where it has think tags."""
    summarization_style: Literal["replace", "append"] = "replace"
    """A summary takes the place of the one before, or is added to it, up to `max_summary_tokens` in all."""
    truncated_summary: Literal["keep", "keep_previous"] = "keep"
    """What to do with a summary that was cut at its limit."""
    max_summary_tokens: int = 2048
    stop_when_solved: bool = False
    """End a trajectory with its first right answer, instead of after all cycles."""
    one_long_turn: bool = False
    """In an evaluation, also ask each problem in one turn without a summary that may spend the tokens of a whole trajectory (as
    often as there are trajectories): what the cycles have to beat. `me.request_timeout_s` has to be long enough for it. May be
    added to an evaluation that is done: its trajectories are not made again."""
    rollout_workers: int = 1
    """Processes; they share out the slots of each server."""
    llm_max_rollouts: int = 16
    """Turns at once on each server, over all workers."""
    problem_queue_size: int = 10
    result_queue_size: int = 10
    shared_memory_entry_size: int = 5242880
    """Most bytes of one turn in the stream; a trajectory with a longer one is dropped."""
    throughput_window_size: int = 10
    """Trajectories that the throughput is measured over."""
    max_retries: int = 3
    """Tries of one turn."""
    retry_base_delay: float = 1.0
    """Seconds before the second try; doubles with each."""
    max_requeues: int = 10
    """Times that a trajectory is put back when a turn used up its retries."""
    max_consecutive_failures: int = 10
    """Trajectories in a row that servers refuse or policies fail on, after which the run ends."""


@dataclass(frozen=True)
class SamplingOptions:
    """`llm.parameters` and `test_llm.parameters`."""

    temperature: float = 1.0
    max_tokens: int = 16384
    """Of a reasoning turn; less where the context has no more room."""
    top_p: float = 1.0


@dataclass(frozen=True)
class ServerOptions:
    """`me`: the servers, and how long they are waited for."""

    llm_urls: list[str] = field(default_factory=lambda: ["http://localhost:8000/v1"])
    """A list, or joined by +; with or without /v1."""
    summarization_llm_urls: list[str] = field(default_factory=list)
    """Servers that write the summaries, and nothing else; by default the same."""
    api_key_urls: list[str] = field(default_factory=list)
    """Those of the servers above that get the key in OPENAI_API_KEY. All others get VLLM_API_KEY, where it is set."""
    max_model_len: int | None = None
    """Tokens of prompt and answer; by default what the servers say."""
    wait_for_server_s: float = 10.0
    """For each server to answer before the run begins."""
    request_timeout_s: float = 1800.0
    """For one try of a turn."""
    max_server_downtime_s: float = 600.0
    """How long all servers may be gone before the run ends."""


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
    """Without a trainer, which is the only way of this door."""


@dataclass(frozen=True)
class RCOptions:
    """A whole file."""

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
        """How the turns of a trajectory are made, with the one or the other sampling."""
        shared = {one.name for one in dataclasses.fields(RCSettings)} & {
            one.name for one in dataclasses.fields(ActorOptions)
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
    """Every key there is, without its section."""
    classes = [RunOptions, SamplingOptions, *SECTIONS.values()]
    names = [one.name for cls in classes for one in dataclasses.fields(cls)]
    return [*names, *NAMES, *SECTIONS, *LLM_SECTIONS, "parameters"]


def read_options(config: Mapping[str, Any]) -> RCOptions:
    """The options of a composed file.

    Raises:
        UsageError: with all mistakes; options are named by section and key.
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
    """Templates that are named by file, read from there."""
    actor = config.get("actor")
    if not isinstance(actor, Mapping):
        return config
    read = dict(actor)
    for name in TEMPLATES:
        template = actor.get(name)
        if isinstance(template, str) and template.startswith(FILE_PREFIX):
            try:
                read[name] = read_template(template)
            except (OSError, UnicodeDecodeError) as error:
                reason = getattr(error, "strerror", error)
                mistakes.append(f"actor.{name} {template}: it cannot be read ({reason}). Check the path.")
    return {**config, "actor": read}


def _read_section(cls: type[Section], values: Any, name: str, mistakes: list[str]) -> Section | None:
    """The section as its dataclass, or None where something is wrong with it. A null leaves the default."""
    prefix = f"{name}." if name else ""
    if not isinstance(values, Mapping | None):
        mistakes.append(f"{name}: expected a section of `key: value` lines.")
        return None
    fields_of = [one.name for one in dataclasses.fields(cls)]  # type: ignore[arg-type]
    unknown = [
        f"{prefix}{key}: {unknown_key(str(key), fields_of)}" for key in values or {} if str(key) not in fields_of
    ]
    written = {key: value for key, value in (values or {}).items() if key in fields_of and value is not None}
    validators = [lambda options: VALIDATORS.get(cls, _no_mistakes)(options)]
    try:
        return make_config(cls, written, validators=validators, mistakes=unknown)  # type: ignore[type-var]
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
        if not minimum <= value < math.inf:  # a NaN is no number to wait for either
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
            f"--rollout_workers {options.rollout_workers}: more than --llm_max_rollouts {options.llm_max_rollouts}, "
            "whose slots they share out. Lower the one or raise the other."
        )


def _sampling_mistakes(options: SamplingOptions) -> Iterator[str]:
    yield from _at_least(options, temperature=0, max_tokens=1)
    if not 0 < options.top_p <= 1:
        yield f"--top_p {options.top_p}: expected a share above 0, up to 1."


def _server_mistakes(options: ServerOptions) -> Iterator[str]:
    yield from _at_least(options, wait_for_server_s=0, request_timeout_s=1, max_server_downtime_s=0)
    if options.max_model_len is not None and options.max_model_len < 2:
        yield f"--max_model_len {options.max_model_len}: expected 2 or more."
    if not split_urls(options.llm_urls):
        yield "--llm_urls: missing. Name a server, such as http://localhost:8000/v1."
    urls = [*split_urls(options.llm_urls), *split_urls(options.summarization_llm_urls)]
    with_key = split_urls(options.api_key_urls)
    if any("@" in url for url in [*urls, *with_key]) and not all(map(is_address, [*urls, *with_key])):
        # Which one is not said: it may be a part of a password.
        yield "--llm_urls: one of them is no address of a server. In a password write %2B for +, %2C for a comma, %40 for @."
        return
    for url in urls:
        if not is_address(url):
            yield f"--llm_urls {url}: that is no address of a server. Write http://host:port/v1."
    for url in with_key:
        if url not in urls:
            yield f"--api_key_urls {url}: that server is not among the ones that are asked. Name it in --llm_urls, too."
    if options.api_key_urls and not os.environ.get(KEY_VARIABLE):
        yield f"--api_key_urls: {KEY_VARIABLE} is not set. Set it to the key of these servers."


def _debug_mistakes(options: DebugOptions) -> Iterator[str]:
    if not options.mode:
        yield "--mode False: this door has no trainer. Leave it True; to train, start grpo_fast.py."


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
    if options.run.eval_every_n_versions and not options.test_dataset_names:
        yield "eval_every_n_versions: there is nothing to evaluate on. Name test_dataset_names, or set it to 0."
    if options.actor.one_long_turn and not options.run.eval_every_n_versions:
        yield "actor.one_long_turn: there is no evaluation that it belongs to. Set eval_every_n_versions to 1, or it to false."
    required = {
        "reasoning_prompt_template": (REASONING_FIELDS, REASONING_FIELDS),
        "summarization_prompt_template": (
            SUMMARIZATION_FIELDS,
            required_of_summaries(options.actor.summarization_style),
        ),
    }
    for name, (known, needed) in required.items():
        template = getattr(options.actor, name)
        if template.startswith(FILE_PREFIX):  # it could not be read, which has been told
            continue
        for mistake in template_mistakes(template, known=known, required=needed):
            yield f"actor.{name}: {mistake}"


def is_address(url: str) -> bool:
    """Whether a server can be asked there: http or https, a host, and a port that there is or none."""
    try:
        parts = urlsplit(url)
        (parts.hostname or "").encode("idna")  # as whoever looks it up does
        has_place = bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and has_place and "?" not in url and "#" not in url


def split_urls(urls: Iterable[str]) -> list[str]:
    """Each address once, in its normal form."""
    parts = [part for one in urls for part in one.replace("+", " ").replace(",", " ").split()]
    return list(dict.fromkeys(normalize_url(part) for part in parts))


def normalize_url(url: str) -> str:
    """`http://host:8000`, with or without `/v1` and a slash at the end, as `http://host:8000/v1`."""
    url = url.strip().rstrip("/")
    return url if url.endswith("/v1") else f"{url}/v1"
