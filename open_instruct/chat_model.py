"""A saved model to talk to: finds its directory and the options of the run that made it, and generates as the run sampled.

Light: neither Ray nor vLLM. The prompt is made by the run's own codec, template and tools, so that it has the tokens of training.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from open_instruct.chat_codec import ChatCodec
from open_instruct.chat_templates import UnknownTemplate
from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.registry import options_of
from open_instruct.user_modules import UserModuleError
from open_instruct.workflows.conversations.options import ConversationOptions, offered

OPTIONS_FILE, CONFIG_FILE, ADAPTER_FILE = "options.json", "config.json", "adapter_config.json"
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
ZERO_FILES = "**/*model_states.pt"
"""What DeepSpeed writes into a checkpoint."""
WHEN_MODELS_ARE_WRITTEN = "It writes one at its end, and with --save_freq N every N steps"
LEVELS_UP = 3
"""How many directories above a model its run's options are looked for."""


class NoModel(ValueError):
    """There is no model that can be loaded; the message says why and what to do."""


@dataclass(frozen=True)
class Sampling:
    """How an answer is sampled."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    seed: int | None = None


@dataclass(frozen=True)
class Answer:
    """What the model said to a prompt."""

    prompt_tokens: list[int]
    tokens: list[int]
    text: str
    ended: str
    """`stop` if the model ended its turn or wrote a stop string, `length` if it was cut off."""


@dataclass(frozen=True)
class RunFacts:
    """What a model's run says about how it was trained; the defaults where no run is known."""

    options_file: Path | None = None
    sampling: Sampling = Sampling()
    system_prompt: str | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)
    """Descriptions of the tools, if the run gave them to the chat template."""
    base_model: str | None = None
    started_in: Path | None = None
    """The directory that relative names of the run's options begin at."""
    template: Callable[[Any], Any] = lambda tokenizer: tokenizer
    """Sets up a tokenizer as the run did."""
    doubts: tuple[str, ...] = ()
    """What of the run could not be read."""


def is_model(directory: Path) -> bool:
    return (directory / CONFIG_FILE).is_file() or (directory / ADAPTER_FILE).is_file()


def model_directory(name: str) -> str:
    """The directory of a model, given the directory or that of its run; or a name on the hub as it is.

    Raises:
        NoModel: it holds no model that can be loaded.
    """
    path = Path(name)
    if not path.exists() and HUB_NAME.fullmatch(name):
        return name
    if not path.is_dir():
        raise NoModel(
            f"{name}: no such directory. Give a run's --output_dir, one of its step_* directories, or a model."
        )
    if is_model(path):
        return str(path)
    if models := models_of_run(path):
        return str(models[-1])
    raise NoModel(f"{name}: {_why_no_model(path)}")


def models_of_run(output_dir: Path) -> list[Path]:
    """The models in a run's directory, the newest last."""
    candidates = [output_dir / "model", *output_dir.glob("step_*")]
    return sorted(filter(is_model, candidates), key=lambda model: max(file.stat().st_mtime for file in model.iterdir()))


def _why_no_model(path: Path) -> str:
    if (path / OPTIONS_FILE).exists():
        return f"this run has not written a model yet. {WHEN_MODELS_ARE_WRITTEN}."
    if next(path.glob("**/run_state.json"), None) or next(path.glob(ZERO_FILES), None):
        run = next((parent for parent in path.absolute().parents if models_of_run(parent)), None)
        if run is None:
            cure = f"Start the run's command again, and it goes on from here. {WHEN_MODELS_ARE_WRITTEN}"
        else:
            cure = f"Chat with {models_of_run(run)[-1]}, the run's newest model"
        return f"this is a checkpoint for resuming a run, in DeepSpeed's parts, and no model. {cure}."
    return f"there is neither {CONFIG_FILE} nor {ADAPTER_FILE} in it, nor the models of a run. Give a directory that has one."


def facts_of_run(model: str) -> RunFacts:
    """What `options.json` of the model's run says."""
    path = Path(model).absolute()
    places = [path, *path.parents][: LEVELS_UP + 1] if path.is_dir() else []
    file = next((place / OPTIONS_FILE for place in places if (place / OPTIONS_FILE).is_file()), None)
    if file is None:
        return RunFacts()
    try:
        content = json.loads(file.read_text())
        values, directory = content["in_force"], Path(content["directory"])
        args = GRPOConfig(**{name: values[name] for name in GRPOConfig.__dataclass_fields__ if name in values})
        return _facts(args, file, directory)
    except KeyError as error:
        return RunFacts(doubts=(f"{file} has no entry {error}: the run's sampling and template are not used",))
    except (OSError, ValueError, TypeError, UnknownTemplate) as error:
        return RunFacts(doubts=(f"{file} cannot be read ({error}): the run's sampling and template are not used",))


def _facts(args: GRPOConfig, file: Path, directory: Path) -> RunFacts:
    doubts: list[str] = []
    sampling = args.train_sampling
    return RunFacts(
        options_file=file,
        sampling=Sampling(sampling.temperature, sampling.top_p, sampling.max_tokens, tuple(sampling.stop)),
        system_prompt=_system_prompt(args, directory, doubts),
        tools=list(_tools(args, doubts)) if args.pass_tools_to_chat_template else [],
        base_model=args.model_name_or_path,
        started_in=directory,
        template=args.tokenizer_setup.apply,
        doubts=tuple(doubts),
    )


def _system_prompt(args: GRPOConfig, directory: Path, doubts: list[str]) -> str | None:
    if args.system_prompt_override_file is None:
        return None
    file = directory / args.system_prompt_override_file
    try:
        return file.read_text()
    except (OSError, ValueError) as error:
        doubts.append(f"the run's system prompt {file} cannot be read ({error}); give it with --system")
        return None


def _tools(args: GRPOConfig, doubts: list[str]) -> Iterator[dict[str, Any]]:
    options = options_of(args, ConversationOptions)
    try:
        yield from (dict(schema) for tool in offered(options) for schema in tool.schemas)
    except (UserModuleError, ValueError, OSError) as error:
        doubts.append(f"the run's tools cannot be loaded here ({error}): the template is not told of them")


class ChatModel:
    """A model with its tokenizer, on a GPU if there is one.

    Raises:
        NoModel: it cannot be loaded.
    """

    def __init__(self, directory: str, facts: RunFacts, *, device: str = "auto") -> None:
        import torch
        from safetensors import SafetensorError

        self.directory, self.facts = directory, facts
        self.device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        try:
            self.tokenizer, self._model = _load(Path(directory), facts, dtype)
        except NoModel:
            raise
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError, UnknownTemplate) as error:
            name = (
                directory
                if Path(directory).is_dir()
                else f"{directory} is no directory here, and as a name on the hub it"
            )
            raise NoModel(f"{name} cannot be loaded: {_first_line(error)}") from error
        if not self.tokenizer.chat_template:
            raise NoModel(f"{directory}: its tokenizer has no chat template. Give a model that was trained for chats.")
        self._model.to(self.device).eval()
        self.codec = ChatCodec(self.tokenizer)

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The messages as the chat template renders them, up to the model's turn."""
        hidden = [self.codec.hidden(message) for message in messages]
        return self.codec.render(hidden, begins_turn=True, tools=self.facts.tools)

    def answer(
        self, messages: Sequence[Mapping[str, Any]], sampling: Sampling, tell: Callable[[str], None] = lambda _: None
    ) -> Answer:
        """Sample the next turn. `tell` gets the text piece by piece while it is made."""
        import torch

        if sampling.seed is not None:
            torch.manual_seed(sampling.seed)
        prompt_tokens = self.codec.encode_hidden(self.prompt(messages))
        streamer = _Streamer(self.codec, tell)
        with torch.inference_mode():
            whole = self._model.generate(
                torch.tensor([prompt_tokens], device=self.device), streamer=streamer, **self._arguments(sampling)
            )
        tokens = whole[0, len(prompt_tokens) :].tolist()
        is_cut = len(tokens) >= sampling.max_tokens and not self.codec.control_token(tokens[-1])
        text = self.codec.decode(tokens)
        is_cut = is_cut and not any(stop in text for stop in sampling.stop)
        return Answer(prompt_tokens, tokens, text, "length" if is_cut else "stop")

    def _arguments(self, sampling: Sampling) -> dict[str, Any]:
        """What `generate` gets. All of it is said, so that the model's own generation_config.json changes nothing."""
        stop = {"stop_strings": list(sampling.stop), "tokenizer": self.tokenizer} if sampling.stop else {}
        samples = (
            {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0} if sampling.temperature else {}
        )
        pad = self.tokenizer.pad_token_id
        return {
            "do_sample": bool(sampling.temperature),
            "max_new_tokens": sampling.max_tokens,
            "repetition_penalty": 1.0,
            "pad_token_id": self.tokenizer.eos_token_id if pad is None else pad,
            **samples,
            **stop,
        }


def _load(directory: Path, facts: RunFacts, dtype: Any) -> tuple[Any, Any]:
    """Tokenizer and model, with the adapter in it if the directory holds one."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    if not (directory / ADAPTER_FILE).is_file():
        name = str(directory)
        return facts.template(AutoTokenizer.from_pretrained(name)), AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype
        )
    from peft import PeftModel

    base = _base_of(directory, facts)
    has_tokenizer = (directory / "tokenizer_config.json").is_file()
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory) if has_tokenizer else base)
        model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    except OSError as error:
        raise NoModel(_moved(directory, base, f"cannot be loaded: {_first_line(error)}")) from error
    return facts.template(tokenizer), PeftModel.from_pretrained(model, str(directory)).merge_and_unload()


def _base_of(directory: Path, facts: RunFacts) -> str:
    """The model below an adapter. Its name may be relative to the directory that the run was started in.

    Raises:
        NoModel: it is not known, or not there any more.
    """
    file = directory / ADAPTER_FILE
    base = json.loads(file.read_text()).get("base_model_name_or_path") or facts.base_model
    if not base:
        raise NoModel(
            f"{directory}: {ADAPTER_FILE} does not name the model below the adapter (base_model_name_or_path)."
        )
    places = [Path(base), *([facts.started_in / base] if facts.started_in is not None else [])]
    if place := next(filter(is_model, places), None):
        return str(place)
    if HUB_NAME.fullmatch(base):
        return base
    raise NoModel(_moved(directory, base, "is not there any more"))


def _moved(directory: Path, base: str, problem: str) -> str:
    place = f"base_model_name_or_path of {directory / ADAPTER_FILE}"
    return f"{directory}: the model below the adapter, {base}, {problem}. Where it has moved, write its place into {place}."


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


class _Streamer:
    """Passes on the text of tokens as they are made. Half a character waits for its other half."""

    def __init__(self, codec: ChatCodec, tell: Callable[[str], None]) -> None:
        self._codec, self._tell = codec, tell
        self._tokens: list[int] = []
        self._num_told, self._is_prompt = 0, True

    def put(self, tokens: Any) -> None:
        if self._is_prompt:
            self._is_prompt = False
            return
        self._tokens += tokens.flatten().tolist()
        text = self._codec.decode(self._tokens)
        if not text.endswith("�"):
            self._tell(text[self._num_told :])
            self._num_told = len(text)

    def end(self) -> None:
        self._tell(self._codec.decode(self._tokens)[self._num_told :])
