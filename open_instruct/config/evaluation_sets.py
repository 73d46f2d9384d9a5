"""The evaluation sets of a run: each has a name, data, sampling and an interval of its own.

    --eval_sets plus=data/plus.jsonl minus=data/minus.jsonl minus.temperature=0 minus.interval=50

A word `name=data` begins a set, and `name.setting=value` says how that set is evaluated. `--dataset_mixer_eval_list` names sets
too: each of its entries is one, with a short name and without settings.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

from open_instruct.config.data_names import Mixer, short_names
from open_instruct.data_types import SamplingConfig
from open_instruct.option_limits import LOWEST_TEMPERATURE, NEVER, limits_of

if TYPE_CHECKING:
    from open_instruct.config.grpo_config import GRPOConfig

NUMBERS: dict[str, tuple[type[int] | type[float], str]] = {
    "temperature": (float, "eval_temperature"),
    "top_p": (float, "eval_top_p"),
    "response_length": (int, "eval_response_length"),
    "samples": (int, "eval_pass_at_k"),
    "interval": (int, "local_eval_every"),
}
"""The settings of a set that are numbers: their type, and the option that holds where the set says nothing."""
TEXTS = {"amount": "1.0", "split": "test"}
"""The other settings, as in a mixer list, and their defaults."""
RESERVED = ("agents", "conversations", "env", "environment", "objective", "rc", "rewards", "tools")
"""Names of groups of metrics below `eval/`, which no set may have."""
_NAME = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True)
class EvaluationSet:
    """Some of the prompts that a run is evaluated on, measured by themselves."""

    name: str
    data: str
    """A file, data set or task, as in a mixer list."""
    sampling: SamplingConfig
    """Without the seed."""
    interval: int
    """Steps from one evaluation to the next, or `NEVER`."""
    amount: str = TEXTS["amount"]
    split: str = TEXTS["split"]

    def is_due(self, step: int, *, last_step: int) -> bool:
        """Whether the weights after this training step are evaluated. Those after the last step are, if any are."""
        return self.interval != NEVER and (step % self.interval == 0 or step == last_step)


def sets_of(args: "GRPOConfig") -> tuple[EvaluationSet, ...]:
    """The sets of a run, in the order of the data. Words that cannot be read are left out; `mistakes_in_sets` reports them."""
    if args.eval_sets:
        words = _Words.of(args.eval_sets)
        return tuple(_named_set(args, name, data, words.settings.get(name, {})) for name, data in words.data.items())
    words, splits = args.dataset_mixer_eval_list, args.dataset_mixer_eval_list_splits
    shorts, sampling, interval = short_names(words[::2], reserved=RESERVED), args.eval_sampling, args.local_eval_every
    if len(splits) == 1:
        splits = splits * len(shorts)
    # Loading the data reports lists that do not fit.
    entries = zip(shorts, words[::2], words[1::2], splits, strict=False)
    return tuple(EvaluationSet(name, data, sampling, interval, amount, split) for name, data, amount, split in entries)


def evaluation_mixer(args: "GRPOConfig") -> Mixer:
    """The data of all sets."""
    if not args.eval_sets:
        splits = args.dataset_mixer_eval_list_splits
        return Mixer("dataset_mixer_eval_list", args.dataset_mixer_eval_list, splits)
    sets = sets_of(args)
    words = [word for entry in sets for word in (entry.data, entry.amount)]
    return Mixer("eval_sets", words, [entry.split for entry in sets])


def mistakes_in_sets(args: "GRPOConfig") -> Iterator[str]:
    """What is wrong with the words of `--eval_sets`."""
    words = _Words.of(args.eval_sets)
    yield from words.mistakes
    for name, settings in words.settings.items():
        if name not in words.data:
            first = f"--eval_sets {name}.{next(iter(settings))}"
            yield f"{first}: there is no set {name}. Name its data, such as {name}=data/{name}.jsonl."
        for setting, text in settings.items():
            if setting in NUMBERS and (problem := _problem_with_number(args, setting, text)):
                yield f"--eval_sets {name}.{setting}={text}: {problem}"


def _named_set(args: "GRPOConfig", name: str, data: str, settings: dict[str, str]) -> EvaluationSet:
    numbers = {
        setting: kind(settings[setting])
        for setting, (kind, _) in NUMBERS.items()
        if setting in settings and not _problem_with_number(args, setting, settings[setting])
    }
    fields = {"temperature": "temperature", "top_p": "top_p", "response_length": "max_tokens", "samples": "n"}
    sampled = {fields[setting]: number for setting, number in numbers.items() if setting in fields}
    sampling = replace(args.eval_sampling, **sampled)  # type: ignore[arg-type]
    texts = {setting: settings.get(setting, default) for setting, default in TEXTS.items()}
    return EvaluationSet(name, data, sampling, int(numbers.get("interval", args.local_eval_every)), **texts)


def _problem_with_number(args: "GRPOConfig", setting: str, text: str) -> str:
    """What is wrong with the value of a setting, or ""."""
    kind, option = NUMBERS[setting]
    limits = limits_of(args)[option]
    try:
        number = kind(text)
    except ValueError:
        return f"not a {'whole ' if kind is int else ''}number. Give {limits}."
    if setting == "temperature" and 0 < number < LOWEST_TEMPERATURE:
        lowest = f"{LOWEST_TEMPERATURE} in its place"
        return f"the engine would take {lowest}. Give {LOWEST_TEMPERATURE} or more, or 0 for greedy responses."
    return "" if limits.hold(number) else f"out of range. Give {limits}."


@dataclass
class _Words:
    """The words of `--eval_sets`, sorted into data and settings."""

    data: dict[str, str] = field(default_factory=dict)
    settings: dict[str, dict[str, str]] = field(default_factory=dict)
    """By set, then by setting."""
    mistakes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, words: list[str]) -> "_Words":
        content = cls()
        for word in words:
            if problem := content._take(str(word)):
                content.mistakes.append(f"--eval_sets {word}: {problem}")
        return content

    def _take(self, word: str) -> str:
        """Take one word. Returns what is wrong with it, or ""."""
        key, _, value = word.partition("=")
        name, dot, setting = key.partition(".")
        if not value or not _NAME.fullmatch(name):
            (short,) = short_names([word], reserved=RESERVED)
            example = short if _NAME.fullmatch(short) else "test"
            return (
                f"not name=data or name.setting=value, with a name of letters, digits, _ and -. Write {example}={word} if these "
                "are data."
            )
        if dot:
            return self._take_setting(name, setting, value)
        if name in RESERVED:
            return f"eval/{name}/… are metrics of all sets. Choose another name."
        if name in self.data:
            return f"there is a set of this name already, {name}={self.data[name]}. Choose another name."
        self.data[name] = value
        return ""

    def _take_setting(self, name: str, setting: str, value: str) -> str:
        if setting not in NUMBERS and setting not in TEXTS:
            return f"a set has no setting {setting!r}. It has {', '.join([*NUMBERS, *TEXTS])}."
        settings = self.settings.setdefault(name, {})
        if setting in settings:
            return f"it is given twice, first {settings[setting]}. Leave out one of the two."
        settings[setting] = value
        return ""


class NamedData:
    """The part of `GRPOConfig` about the data that options name, and what follows from it."""

    @property
    def evaluation_sets(self) -> tuple[EvaluationSet, ...]:
        """The sets that the run is evaluated on, in the order of the data; empty if it is not evaluated."""
        return sets_of(cast("GRPOConfig", self))

    @property
    def measures_sets_apart(self) -> bool:
        """Whether there are metrics for each evaluation set. Without names and with one set they would be those of the whole."""
        return bool(cast("GRPOConfig", self).eval_sets) or len(self.evaluation_sets) > 1

    @property
    def train_mixer(self) -> Mixer:
        """The data to train on."""
        args = cast("GRPOConfig", self)
        return Mixer("dataset_mixer_list", args.dataset_mixer_list, args.dataset_mixer_list_splits)

    @property
    def eval_mixer(self) -> Mixer:
        """The data of all evaluation sets."""
        return evaluation_mixer(cast("GRPOConfig", self))

    @property
    def longest_response(self) -> int:
        """Tokens of the longest response, evaluation included."""
        args = cast("GRPOConfig", self)
        samplings = [args.eval_sampling, *(entry.sampling for entry in self.evaluation_sets)]
        return max(args.response_length, *(sampling.max_tokens for sampling in samplings))
