"""Finds verifiers by name.

A row's `dataset` column names its verifier: `gsm8k`, `math`, `string_matcher`, or `reasoning_gym/<task>`, where the part before
the slash is the name. A verifier is a subclass of `VerifierFunction`. To add a verifier, write the class into a file of your own
and name the file: `--verifier_modules my_rewards.py`. Nothing has to be registered, because the file is imported in every process
that needs verifiers.
"""

import functools
import inspect
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields

from open_instruct.chat_codec import TAGS
from open_instruct.config.verifier_options import VerifierConfig
from open_instruct.user_modules import UserModuleError, import_user_module
from open_instruct.verifiers import (  # noqa: F401 - known then
    answer_verifiers,
    code_verifiers,
    judge,
    reasoning_gym_verifier,
    rubric_verifier,
    text_verifiers,
)
from open_instruct.verifiers.base import VerificationResult, VerifierFunction, is_a_result
from open_instruct.verifiers.instructions import ifeval, ifeval_old  # noqa: F401 - known then


class VerifierModuleError(UserModuleError):
    """A module of `--verifier_modules`, or a verifier in it, cannot be used."""


_config = VerifierConfig()
"""The options with which the verifiers of this process were made."""


def import_verifiers(modules: Sequence[str], config: VerifierConfig | None = None) -> None:
    """Import modules that define verifiers, each once in a process, and make all verifiers with `config`.

    Args:
        modules: paths of files (`my_rewards.py`), or dotted names of modules that Python finds (`my_package.rewards`).

    Raises:
        UserModuleError: a module cannot be imported, defines no verifier, or defines a verifier that cannot be used.
    """
    for name in modules:
        module = import_user_module(name)
        classes = {cls for cls in _verifier_classes() if not cls.__module__.startswith(f"{__package__}.")}
        if not any(isinstance(value, type) and value in classes for value in vars(module).values()):
            raise VerifierModuleError(f"{name} defines no verifier: it holds no subclass of VerifierFunction")
    global _config
    _config = VerifierConfig() if config is None else config
    _verifiers.cache_clear()
    _verifiers()


def unused_modules(modules: Sequence[str], datasets: Collection[str]) -> list[str]:
    """The modules whose verifiers score no row. `datasets` are the values of the rows' `dataset` columns."""
    classes = {type(find_verifier(dataset, _verifiers())) for dataset in datasets}
    classes = {cls for cls in classes if not cls.__module__.startswith(f"{__package__}.")}
    bases = {base for cls in classes for base in cls.__mro__ if base not in VerifierFunction.__mro__}

    def brings_one(name: str) -> bool:
        module = import_user_module(name)
        inside = any(f"{base.__module__}.".startswith(f"{module.__name__}.") for base in bases)
        return inside or any(isinstance(value, type) and value in classes for value in vars(module).values())

    return [name for name in modules if not brings_one(name)]


def _verifier_classes(base: type[VerifierFunction] = VerifierFunction) -> list[type[VerifierFunction]]:
    """All direct and indirect subclasses that score."""
    classes = [base] if base.is_complete() else []
    return classes + [cls for child in base.__subclasses__() for cls in _verifier_classes(child)]


def build_all_verifiers(config: VerifierConfig | None = None) -> dict[str, VerifierFunction]:
    """One verifier of each class, by its name in lower case. A constructor with a parameter `verifier_config` gets `config`.

    Raises:
        VerifierModuleError: a verifier cannot be made, has no name or no finite weight, or has the name of another verifier.
    """
    verifiers: dict[str, VerifierFunction] = {}
    for cls in _verifier_classes():
        where = f"the verifier {cls.__name__} of {inspect.getsourcefile(cls) or cls.__module__}"
        try:
            takes_config = "verifier_config" in inspect.signature(cls).parameters
            verifier = cls(verifier_config=_config_for(cls, config or VerifierConfig())) if takes_config else cls()
        except Exception as error:  # a user's class may raise anything
            raise VerifierModuleError(f"{where} cannot be made without further arguments: {error}") from error
        name = verifier.name
        if not isinstance(name, str) or not name or "/" in name:
            raise VerifierModuleError(f'{where} has no name: set `name = "my_verifier"`, without a slash')
        if not isinstance(verifier.weight, int | float) or not math.isfinite(verifier.weight):
            raise VerifierModuleError(f"{where} has weight {verifier.weight!r}: set a finite number")
        if name.lower() in verifiers:
            other = type(verifiers[name.lower()])
            raise VerifierModuleError(f"{where} has the name {name!r} of {other.__name__}: set another name")
        verifiers[name.lower()] = verifier
    return verifiers


def _config_for(cls: type[VerifierFunction], config: VerifierConfig) -> VerifierConfig:
    """The options as an instance of the class that the verifier asks for. Fields that only this class has need defaults."""
    config_class = cls.get_config_class()
    if config_class is VerifierConfig:
        return config
    return config_class(
        **{field.name: getattr(config, field.name) for field in fields(config_class) if hasattr(config, field.name)}
    )


def verifier_names() -> list[str]:
    """Every verifier's name, in lower case."""
    return sorted(_verifiers())


def verifier_weight(dataset: str) -> float:
    """Weight of the verifier of this `dataset` column. A reward is the score times this weight times `--verification_reward`."""
    return float(find_verifier(dataset, _verifiers()).weight)


def verifier_tags() -> frozenset[str]:
    """Every tag that a verifier looks for in a response."""
    return frozenset(TAGS).union(*(verifier.tags for verifier in _verifiers().values()))


def verifier_name(dataset_name: str, names: Collection[str]) -> str | None:
    """The name in `names` that scores rows with this `dataset` column: its whole value, or the part before the first slash. None
    if there is no such name."""
    dataset_name = dataset_name.lower()
    if dataset_name in names:
        return dataset_name
    family = dataset_name.partition("/")[0]
    return family if family in names else None


def find_verifier(dataset_name: str, verifiers: Mapping[str, VerifierFunction]) -> VerifierFunction:
    """The verifier for rows of this `dataset` column.

    Raises:
        ValueError: there is no such verifier.
    """
    name = verifier_name(dataset_name, verifiers)
    if name is None:
        raise ValueError(f"no verifier is called {dataset_name!r}; there are: {', '.join(sorted(verifiers))}")
    return verifiers[name]


def check_label(dataset: str, ground_truth: object) -> None:
    """Raises `ValueError` for a ground truth that the row's verifier cannot use, or that no response can match."""
    verifier = find_verifier(dataset, _verifiers())
    verifier.check_label(ground_truth)
    verifier.try_label(ground_truth)


def scoring_rule(dataset: str, ground_truth: object) -> str:
    """For a message: what a response must have to be scored above 0. Raises what a user's verifier raises."""
    return find_verifier(dataset, _verifiers()).scoring_rule(ground_truth)


def right_answers(dataset: str, ground_truth: object) -> tuple[str, ...]:
    """The answers of which any is right, for messages; empty if the row's verifier does not say."""
    try:
        return tuple(find_verifier(dataset, _verifiers()).answers_in(ground_truth))
    except Exception:  # a user's verifier may raise anything
        return ()


def prepare_verifier(dataset: str) -> None:
    """Loads what scoring rows of this `dataset` column needs."""
    find_verifier(dataset, _verifiers()).prepare(dataset)


def prepare_label(dataset: str, ground_truth: object) -> None:
    """Loads what scoring against this ground truth needs."""
    find_verifier(dataset, _verifiers()).prepare_label(ground_truth)


def score_response(
    dataset: str, ground_truth: object, token_ids: list[int], text: str, query: str | None = None
) -> VerificationResult:
    """Scores one response to the prompt `query` with the row's verifier. An error in the verifier is not caught."""
    return is_a_result(find_verifier(dataset, _verifiers())(token_ids, text, ground_truth, query))


def outside_verifier(dataset: str) -> VerifierFunction | None:
    """The verifier of rows with this `dataset` column, if there is one and it scores outside the jail."""
    name = verifier_name(dataset, _verifiers())
    verifier = None if name is None else _verifiers()[name]
    return verifier if verifier is not None and verifier.is_outside() else None


@functools.cache
def _verifiers() -> dict[str, VerifierFunction]:
    return build_all_verifiers(_config)
