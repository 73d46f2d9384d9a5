"""Fully asynchronous training from a YAML file: the other entry point to the loop of `grpo_fast.py`.

    python open_instruct/fully_async_main.py model.model_name_or_path=Qwen/Qwen3-0.6B
    python open_instruct/fully_async_main.py --config-path /path/to/config --config-name my_config trainer.seed=2

The file (`conf/fully_async.yaml` shows all sections) is composed by hydra. Every key is an option of `grpo_fast.py --help`,
in whichever section it stands. Keys of the file alone are the few of `SPECIAL_KEYS`. Log, monitor and subclasses:
docs/reference/source_systems.md.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

if sys.path and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    del sys.path[0]  # run as a script, this folder would shadow top-level modules of the same names
if not ((package := find_spec("open_instruct")) and find_spec("ray")):
    print(
        f"{sys.executable} lacks the packages of this project. Do `source .venv/bin/activate`, which", file=sys.stderr
    )
    print("`bash scripts/setup_cpu.sh` or `bash scripts/setup_gpu.sh` has made.", file=sys.stderr)
    raise SystemExit(2)
if not Path(package.origin or "").samefile(Path(__file__).with_name("__init__.py")):
    print(f"{__file__} would run the code of {Path(package.origin or '').parent}, which", file=sys.stderr)
    print(f"{sys.executable} has installed. Take the environment of this checkout, or", file=sys.stderr)
    print(f"set PYTHONPATH={Path(__file__).resolve().parents[1]}.", file=sys.stderr)
    raise SystemExit(2)

import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from open_instruct import grpo_fast
from open_instruct.config import yaml_files as yaml_door
from open_instruct.config.cli import UsageError, fail_with, make_config
from open_instruct.config.extensions import MODULE_OPTIONS, config_class_with
from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.config.option_values import convert
from open_instruct.config.yaml_files import NO_SECTION, YamlProgram, in_terms_of_the_file, unknown_key
from open_instruct.data.run_inputs import RunInputs
from open_instruct.registry import option_fields
from open_instruct.report.component_log import LOG_FILE
from open_instruct.rollouts.controller import Rollouter
from open_instruct.run.checked_inputs import loaded_inputs, settled, validators
from open_instruct.run.fully_async_trainer import FullyAsyncTrainer
from open_instruct.run.wiring import Roles
from open_instruct.system.interruption import ends_by_signals
from open_instruct.system.secret_masking import mask_tracebacks, masked

PROGRAM = "fully_async_main.py"
LISTED = "`python open_instruct/grpo_fast.py --help` lists all options."
MOST_NODES = 100_000
SPECIAL_KEYS = {
    "async_training": ("sync_timeout", "alerts", "monitor"),
    "trainer": ("cls", "n_gpus_per_node", "nnodes", "device"),
    "rollout": ("cls", "n_gpus_per_node", "nnodes"),
}
"""Keys that are not options of `grpo_fast.py` under the same name."""


@dataclass(frozen=True)
class FullyAsyncMain:
    """The coordinator: it starts, watches and ends every component of a run, by the loop that both entry points share."""

    args: GRPOConfig
    inputs: RunInputs
    roles: Roles

    def run(self) -> int:
        """Train. Returns the exit code."""
        return grpo_fast.run(self.args, self.inputs, self.roles)


def main(argv: Sequence[str] | None = None) -> int:
    """Compose, check, train. Returns the exit code of `grpo_fast.run`, or 2 for mistakes."""
    mask_tracebacks()
    yaml_door.let_user_modules_be_found()
    with ends_by_signals():
        try:
            words = sys.argv[1:] if argv is None else argv
            program = read(compose(words))
            program.args.command_line = masked([sys.argv[0], *words])
            return program.run()
        except UsageError as error:
            fail_with(error.mistakes, program=PROGRAM)


def compose(argv: Sequence[str]) -> dict[str, Any]:
    """The sections of the YAML file with the overrides applied.

    Raises:
        UsageError: the file cannot be read or an override does not fit it.
    """
    return yaml_door.compose(
        YamlProgram(PROGRAM, __doc__, "fully_async", "section.key=value", _option_names, LISTED, _may_be_new), argv
    )


def _may_be_new(key: str) -> bool:
    """Whether a key may be given without `+` though the file lacks it: any `section.key` may, because the user's own modules
    bring options of their own. `_flatten`, which knows those too, reports unknown ones."""
    section, dot, name = key.partition(".")
    return bool(section and dot and name) and "." not in name


def _option_names() -> list[str]:
    special = [key for keys in SPECIAL_KEYS.values() for key in keys]
    return [*(field.name for field in option_fields(GRPOConfig)), *special]


def read(config: Mapping[str, Any]) -> FullyAsyncMain:
    """A run from the composed sections, checked in full.

    Raises:
        UsageError: there are mistakes. It has all of them, and names options by section and key.
    """
    config_cls, mistakes_of_modules = config_class_with(_modules(config))
    options, where, mistakes = _flatten(config, config_cls)
    roles, mistakes_of_roles = _roles(config)
    mistakes = [*mistakes, *mistakes_of_modules, *mistakes_of_roles, *_device_mistakes(_section(config, "trainer"))]
    inputs: list[RunInputs] = []

    def place(option: str) -> str:
        return where.get(option, NO_SECTION + option)

    try:
        args = make_config(config_cls, options, validators=validators(inputs), mistakes=mistakes)
    except UsageError as error:
        raise UsageError([in_terms_of_the_file(mistake, place) for mistake in error.mistakes]) from None
    args = settled(args)
    return FullyAsyncMain(args, loaded_inputs(args, inputs), roles)


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    return section if isinstance(section, Mapping) else {}


def _modules(config: Mapping[str, Any]) -> dict[str, list[str]]:
    """What the file gives for `MODULE_OPTIONS`, in whichever section. A value that is no list of texts is reported later."""
    modules: dict[str, list[str]] = {}
    for section in config.values():
        for option in MODULE_OPTIONS if isinstance(section, Mapping) else ():
            try:
                modules.setdefault(option, []).extend(convert(section.get(option) or [], list[str]))
            except ValueError:
                continue
    return modules


def _flatten(
    config: Mapping[str, Any], config_cls: type[GRPOConfig]
) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """Options as they were written, the place of each option in the file, and mistakes. A null leaves the default."""
    names = [field.name for field in option_fields(config_cls)]
    options: dict[str, Any] = {}
    where: dict[str, str] = {}
    mistakes = []
    for section, values in config.items():
        if not isinstance(values, Mapping):
            mistakes.append(f"{section}: expected a section of `key: value` lines.")
            continue
        for key, value in values.items():
            place = f"{section}.{key}"
            if key in SPECIAL_KEYS.get(section, ()):
                continue
            if key not in names:
                keys = [*names, *SPECIAL_KEYS.get(section, ())]
                mistakes.append(f"{place}: {unknown_key(str(key), keys, LISTED)}")
            elif key in where:
                mistakes.append(f"{place}: {where[key]} says the same. Keep one of them.")
            else:
                where[key] = place
                options |= {} if value is None else {key: value}
    for option, (value, place, *further) in _special_options(config, options, where, mistakes).items():
        if option in options:
            nulls = " and ".join([place, *further])
            cure = f"Set {nulls} to null, or leave out {where[option]}"
            mistakes.append(f"{where[option]}: {place} says the same. {cure}.")
        else:
            options[option] = value
            where[option] = place
    return options, where, mistakes


def _special_options(
    config: Mapping[str, Any], options: Mapping[str, Any], where: Mapping[str, str], mistakes: list[str]
) -> dict[str, tuple[Any, *tuple[str, ...]]]:
    """What `SPECIAL_KEYS` mean as options of `GRPOConfig`: by option its value and the keys that say it."""
    training, rollout, pacing = (_section(config, name) for name in ("trainer", "rollout", "async_training"))
    meanings: dict[str, tuple[Any, *tuple[str, ...]]] = {}
    if pacing.get("sync_timeout") is not None:
        meanings["weight_sync_timeout_s"] = pacing["sync_timeout"], "async_training.sync_timeout"
    if training.get("device") in ("cpu", "cuda"):
        meanings["device_type"] = training["device"], "trainer.device"
    alerts = pacing.get("alerts")
    if alerts and not isinstance(alerts, Mapping):
        mistakes.append(f"async_training.alerts {alerts}: expected a section of `name: limit` lines.")
    elif alerts:
        meanings["alerts"] = [f"{name}={limit}" for name, limit in alerts.items()], "async_training.alerts"
    if learners := _places(training, "trainer", mistakes):
        meanings["num_learners_per_node"] = learners, *_keys_of_places("trainer", learners)
    if engines := _places(rollout, "rollout", mistakes):
        size = _tensor_parallel_size(options)
        if sum(engines) % size:
            place = where["vllm_tensor_parallel_size"]
            mistakes.append(
                f"rollout.n_gpus_per_node {engines[0]} rollout.nnodes {len(engines)} {place} {size}: {sum(engines)} places "
                f"cannot be divided among engines of {size}. Change one of them."
            )
        else:
            meanings["vllm_num_engines"] = sum(engines) // size, *_keys_of_places("rollout", engines)
    return meanings


def _keys_of_places(section: str, places: Sequence[int]) -> list[str]:
    return [f"{section}.n_gpus_per_node", *([f"{section}.nnodes"] if len(places) > 1 else [])]


def _tensor_parallel_size(options: Mapping[str, Any]) -> int:
    """Tensor parallel size; 1 also where the file has an invalid size, which `make_config` reports."""
    try:
        return max(convert(options.get("vllm_tensor_parallel_size"), int), 1)
    except ValueError:
        return 1


def _places(section: Mapping[str, Any], name: str, mistakes: list[str]) -> list[int]:
    """Places on each node; empty where the section does not say."""
    per_node, nodes = section.get("n_gpus_per_node"), section.get("nnodes")
    if nodes is None:
        nodes = 1
    if per_node is None:
        if nodes != 1:
            cure = f"Give {name}.n_gpus_per_node too, or set {name}.nnodes to null"
            mistakes.append(f"{name}.nnodes {nodes}: it has no effect without {name}.n_gpus_per_node. {cure}.")
        return []
    if not all(isinstance(value, int) and value > 0 for value in (per_node, nodes)):
        mistakes.append(
            f"{name}.n_gpus_per_node {per_node} {name}.nnodes {nodes}: expected whole numbers of 1 or more."
        )
        return []
    if nodes > MOST_NODES:
        mistakes.append(f"{name}.nnodes {nodes}: expected {MOST_NODES} or fewer.")
        return []
    return [per_node] * nodes


def _device_mistakes(trainer: Mapping[str, Any]) -> list[str]:
    device = trainer.get("device") or "auto"
    if device not in ("auto", "cuda", "cpu"):
        return [f"trainer.device {device}: unknown. Choose one of auto, cuda, cpu."]
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    if device == "cuda" and not torch.cuda.is_available() and not os.environ.get("RAY_ADDRESS"):
        return [
            "trainer.device cuda: this machine has no GPU. Set it to auto or cpu, or set RAY_ADDRESS to a cluster that has GPUs."
        ]
    return []


def _roles(config: Mapping[str, Any]) -> tuple[Roles, list[str]]:
    """The classes and the function that the file names by dotted path."""
    mistakes: list[str] = []
    trainer = _load_class(_section(config, "trainer").get("cls"), FullyAsyncTrainer, "trainer.cls", mistakes)
    rollouter = _load_class(_section(config, "rollout").get("cls"), Rollouter, "rollout.cls", mistakes)
    path = _section(config, "async_training").get("monitor")
    monitor = _load(path, "async_training.monitor", mistakes) if path else None
    if monitor is not None and not callable(monitor):
        mistakes.append(f"async_training.monitor {path}: not a function. Give monitor(trainer_stats, rollouter_stats).")
    return Roles(trainer=trainer, rollouter=rollouter, monitor=monitor, component_log_file=LOG_FILE), mistakes


def _load_class(path: Any, base: type, key: str, mistakes: list[str]) -> Any:
    """The class at a dotted path, or `base` itself where none is named or something is wrong."""
    cls = _load(path, key, mistakes) if path else base
    if cls is None:
        return base
    if not (isinstance(cls, type) and issubclass(cls, base)):
        mistakes.append(
            f"{key} {path}: no subclass of {base.__name__}. Derive it from {base.__module__}.{base.__name__}."
        )
        return base
    return cls


def _load(path: Any, key: str, mistakes: list[str]) -> Any:
    module, _, name = str(path).rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # whatever a user's module does when it is imported
        mistakes.append(f"{key} {path}: it cannot be loaded ({type(error).__name__}: {error}). Check the dotted path.")
        return None


if __name__ == "__main__":
    raise SystemExit(main())
