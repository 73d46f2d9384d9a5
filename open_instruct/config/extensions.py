"""Losses, advantages, workflows, environments and rules of health that a user's file adds to a run, with their own options.

--algorithm_modules my_loss.py ──► imported before the command line is read, so that the options of its entries are flags too
                               └─► imported again by the controller and by every learner or engine, which look the entry up
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from open_instruct.algorithms.advantages import ADVANTAGES
from open_instruct.algorithms.distillation import DISTILLATION_LOSSES
from open_instruct.algorithms.losses import LOSSES
from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.config.open_instruct_options import ForeignOptions
from open_instruct.environments.base import ENVIRONMENTS
from open_instruct.health import RULES
from open_instruct.registry import Registry, option_groups
from open_instruct.user_modules import UserModuleError, import_user_module
from open_instruct.workflows.base import WORKFLOWS

REGISTRIES: Mapping[str, tuple[Registry[Any], ...]] = {
    "algorithm_modules": (LOSSES, ADVANTAGES, DISTILLATION_LOSSES),
    "workflow_modules": (WORKFLOWS,),
    "environment_modules": (ENVIRONMENTS,),
    "health_modules": (RULES,),
}
"""The registries that files named by each option may add to. `verifier_modules` is missing: verifiers need no registration."""
MODULE_OPTIONS = tuple(REGISTRIES)
"""The options that name such files."""
CHECKED_LATER = ("environment_modules",)
"""Options whose modules are checked for import errors later, together with the other options of conversations."""
USED_WITHOUT_A_CHOICE = ("environment_modules", "health_modules")
"""Options whose entries no other option has to name."""
_registered: dict[str, set[str]] = {}
"""For each module: the kinds (`Registry.what`) of the entries that it has registered in this process."""


def import_extensions(names: Iterable[str]) -> None:
    """Import the user's modules.

    Raises:
        UserModuleError: a module cannot be imported, for example because it registers a name that is already taken.
    """
    for name in names:
        import_user_module(name)


def config_class_with(modules: Mapping[str, Iterable[str]]) -> tuple[type[GRPOConfig], list[str]]:
    """`GRPOConfig` with the options of the user's losses, advantages and workflows, and the mistakes found in their modules.

    Args:
        modules: names of the user's modules, by the option that names them.
    """
    mistakes = []
    for option, names in modules.items():
        for name in names:
            try:
                mistakes += _mistakes_of_module(option, name)
            except UserModuleError as error:
                mistakes += [] if option in CHECKED_LATER else [f"--{option} {name}: {error}."]
    options = {field.name for field in dataclasses.fields(GRPOConfig)} | {*ForeignOptions().names, "config", "help"}
    groups = []
    for group in option_groups():
        names = {field.name for field in dataclasses.fields(group)}
        if not issubclass(GRPOConfig, group) and names & options:
            name = sorted(names & options)[0]
            owner = f"{group.__module__}.{group.__qualname__}"
            mistakes.append(f"--{name}: an option of {owner} has this name too. Rename it.")
        elif not issubclass(GRPOConfig, group):
            groups.append(group)
    if not groups:
        return GRPOConfig, mistakes
    namespace = {"__module__": GRPOConfig.__module__}
    bases = (GRPOConfig, *groups)
    return dataclasses.make_dataclass(GRPOConfig.__name__, [], bases=bases, namespace=namespace, kw_only=True), mistakes


def _mistakes_of_module(option: str, name: str) -> list[str]:
    """Import a module. Returns a mistake if it registers nothing. Raises `UserModuleError` if the import fails."""
    kinds = [registry.what for registry in REGISTRIES[option]]
    if not _registered_by(name).isdisjoint(kinds):
        return []
    nouns = " or ".join(filter(None, [", ".join(kinds[:-1]), kinds[-1]]))
    cure = "Register one there, or leave the file out"
    if option == "environment_modules":
        cure += f"; a function or class needs no registration: --tools {name}:its_name"
    return [f"--{option} {name}: it registers no {nouns}. {cure}."]


def _registered_by(name: str) -> set[str]:
    """The kinds of the entries that a module has registered: entries that appear when it is imported here, and, if it had been
    imported before, entries that are defined in it."""
    registries = [registry for several in REGISTRIES.values() for registry in several]
    before = {id(entry): entry for registry in registries for entry in registry}
    module = import_user_module(name).__name__
    kinds = _registered.setdefault(module, set())
    for registry in registries:
        for entry in registry:
            if id(entry) not in before or f"{entry.value.__module__}.".startswith(f"{module}."):
                kinds.add(registry.what)
    return kinds


def unused_modules(args: GRPOConfig) -> Iterator[str]:
    """Notes on files whose losses, advantages or workflows the run does not use, because an option was probably forgotten."""
    for option, registries in REGISTRIES.items():
        for name in getattr(args, option) if option not in USED_WITHOUT_A_CHOICE else []:
            module = import_user_module(name).__name__
            entries = [
                (registry.flag, entry.name)
                for registry in registries
                for entry in registry
                if f"{entry.value.__module__}.".startswith(f"{module}.")
            ]
            if entries and not any(getattr(args, flag) == chosen for flag, chosen in entries):
                cures = " or ".join(f"--{flag} {chosen}" for flag, chosen in entries)
                yield f"--{option} {name}: nothing of it is used; {cures} would use it."


def plain_config(args: GRPOConfig) -> GRPOConfig:
    """The options as a plain `GRPOConfig`, which every process can read. `own_options` holds the values of the user's options."""
    if type(args) is GRPOConfig:
        return args
    names = {field.name for field in dataclasses.fields(GRPOConfig)}
    values = {field.name: getattr(args, field.name) for field in dataclasses.fields(args)}
    own_options = {name: value for name, value in values.items() if name not in names}
    return GRPOConfig(**{name: value for name, value in values.items() if name in names} | {"own_options": own_options})
