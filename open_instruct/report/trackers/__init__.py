"""The trackers that `--report_to` can name, and how to make them. A library is imported when a run names it."""

import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.option_text import shown
from open_instruct.report.isolation import Isolation
from open_instruct.report.tracker import Tracker, TrackerOptions, Trackers
from open_instruct.system.secret_masking import masked


@dataclass(frozen=True)
class Library:
    """The library of a tracker."""

    class_name: str
    """Of the tracker, in the module `<name>_tracker` of this folder."""
    modules: tuple[str, ...]
    """What has to be there to be imported."""
    requirements: tuple[str, ...]
    """What to install: the versions that the tests run with, as in the extra of this name in pyproject.toml."""


LIBRARIES: Mapping[str, Library] = {
    "wandb": Library("WandbTracker", ("wandb",), ("wandb",)),
    "tensorboard": Library("TensorboardTracker", ("tensorboard",), ("tensorboard==2.21.0",)),
    "trackio": Library("TrackioTracker", ("trackio",), ("trackio==0.43.0",)),
    "mlflow": Library(
        "MlflowTracker",
        ("mlflow", "sqlalchemy", "alembic"),
        ("mlflow-skinny==3.17.2", "sqlalchemy==2.1.9", "alembic==1.20.1"),
    ),
    "swanlab": Library("SwanlabTracker", ("swanlab",), ("swanlab==0.10.3",)),
}


def tracker_names(args: GRPOConfig) -> list[str]:
    """The trackers that the metrics of a run are sent to, each once."""
    return list(dict.fromkeys([*(["wandb"] if args.with_tracking else []), *args.report_to]))


def how_to_install(name: str) -> str:
    """The command that installs what a tracker lacks; "" if it lacks nothing."""
    library = LIBRARIES[name]
    if all(importlib.util.find_spec(module) is not None for module in library.modules):
        return ""
    return " ".join([sys.executable, "-m", "pip", "install", *library.requirements])


def trackers_are_installed(args: GRPOConfig) -> list[str]:
    """What `--report_to` names and cannot be imported, with the command that installs it."""
    return [
        f"{shown(args, 'report_to')}: {name} is not installed here. Install it: {command}. Or leave out {name}."
        for name in args.report_to
        if (command := how_to_install(name))
    ]


def make_tracker(names: Sequence[str], options: TrackerOptions, config: Mapping[str, Any]) -> Trackers:
    """The trackers of these names as one. A tracker that cannot be made is left out with a warning."""
    trackers: list[Tracker] = []
    for name in names:
        with Isolation(name):
            module = importlib.import_module(f"{__name__}.{name}_tracker")
            trackers.append(getattr(module, LIBRARIES[name].class_name)(options, masked(config)))
    return Trackers(trackers)
