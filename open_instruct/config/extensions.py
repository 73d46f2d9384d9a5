"""Losses, advantages and workflows that a user's own file adds to a run, and the options that they bring along.

--algorithm_modules my_loss.py ──► imported before the command line is read, so that the options of its entries are flags too
                               └─► imported again by the controller and by every learner or engine, which look the entry up
"""

import dataclasses
from collections.abc import Iterable, Mapping

from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.registry import option_groups
from open_instruct.user_modules import UserModuleError, import_user_module

MODULE_OPTIONS = ("algorithm_modules", "workflow_modules")
"""The options that name such files. `verifier_modules` is not among them, because verifiers bring no options."""


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
                import_user_module(name)
            except UserModuleError as error:
                mistakes.append(f"--{option} {name}: {error}.")
    known = {field.name for field in dataclasses.fields(GRPOConfig)}
    groups = []
    for group in option_groups():
        names = {field.name for field in dataclasses.fields(group)}
        if not issubclass(GRPOConfig, group) and names & known:
            taken = sorted(names & known)[0]
            mistakes.append(
                f"--{taken}: an option of {group.__module__}.{group.__qualname__} has this name too. Rename it."
            )
        elif not issubclass(GRPOConfig, group):
            groups.append(group)
    if not groups:
        return GRPOConfig, mistakes
    namespace = {"__module__": GRPOConfig.__module__}
    bases = (GRPOConfig, *groups)
    return dataclasses.make_dataclass(GRPOConfig.__name__, [], bases=bases, namespace=namespace, kw_only=True), mistakes


def plain_config(args: GRPOConfig) -> GRPOConfig:
    """The options as a `GRPOConfig`, which every process can read; the values of the user's options are in `own_options`."""
    if type(args) is GRPOConfig:
        return args
    ours = {field.name for field in dataclasses.fields(GRPOConfig)}
    values = {field.name: getattr(args, field.name) for field in dataclasses.fields(args)}
    own = {name: value for name, value in values.items() if name not in ours}
    return GRPOConfig(**{name: value for name, value in values.items() if name in ours} | {"own_options": own})
