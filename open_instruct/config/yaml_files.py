"""Programs that read a YAML file. Hydra composes the file, the command line overrides keys with `key=value`, and each mistake is
reported in one line."""

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from open_instruct.config.cli import UsageError, no_such_option
from open_instruct.config.yaml_text import BadYaml, check_yaml, unreadable_value

CONFIG_DIRECTORY = Path(__file__).resolve().parents[2] / "conf"


@dataclass(frozen=True)
class YamlProgram:
    """A program that reads a YAML file, and the properties of its file."""

    name: str
    description: str | None
    config_name: str
    """Name of the file that is read by default, without `.yaml`."""
    override: str
    """How an override is written, for messages: `section.key=value`."""
    keys: Callable[[], list[str]]
    """All known keys; the message about an unknown key names the nearest of them."""
    listed: str
    """Where to find all keys, for the message about a key that resembles no known key."""
    may_be_new: Callable[[str], bool] = lambda key: False
    """Whether an override may set this key although the file does not contain it."""


def let_user_modules_be_found() -> None:
    """Add the current directory to the end of Python's path. A file may then name classes in this directory, and none of its
    modules hides a package."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)


def compose(program: YamlProgram, argv: Sequence[str]) -> dict[str, Any]:
    """The YAML file that `argv` names, with the overrides applied.

    Raises:
        UsageError: the file cannot be read, or an override does not fit the file.
    """
    directory, name, overrides = _read_command_line(program, argv)

    import hydra
    import yaml
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    wrong = [(override, _misspelled(override) or _deletes_an_option(program, override)) for override in overrides]
    if mistakes := [f"{override:.200}: {mistake}" for override, mistake in wrong if mistake]:
        raise UsageError(mistakes)
    bare = [override.removeprefix("++").removeprefix("+") for override in overrides]
    hydra_overrides = [
        f"++{b}" if not b.startswith("~") and program.may_be_new(b.partition("=")[0]) else override
        for override, b in zip(overrides, bare, strict=True)
    ]
    path = directory / f"{name}.yaml"
    try:
        check_yaml(path.read_text(encoding="utf-8"))
        with hydra.initialize_config_dir(str(directory), version_base=None):
            return OmegaConf.to_container(hydra.compose(name, hydra_overrides), resolve=True)  # type: ignore[return-value]
    except (HydraException, OmegaConfBaseException) as error:
        raise UsageError([_as_mistake(program, error, overrides, path)]) from None
    except yaml.YAMLError as error:
        line = error.problem_mark.line + 1 if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark else "?"
        raise UsageError([f"{path}: line {line} is not valid YAML."]) from None
    except BadYaml as error:
        raise UsageError([f"{path}: {error}."]) from None
    except UnicodeDecodeError as error:
        raise UsageError([f"{path}: it cannot be read ({error}). Save it as UTF-8 text."]) from None
    except (ValueError, RecursionError, OSError) as error:
        raise UsageError([f"{path}: {unreadable_value(error)}"]) from None


def _misspelled(override: str) -> str:
    """What is wrong with the spelling of an override, or ""."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    if not override.partition("=")[0].strip("+~"):
        return "it names no key."
    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException as error:
        return (
            f"it cannot be read ({str(error).splitlines()[0]}). Put values with quotes, commas, brackets or = in quotes, also "
            "within a list: key=['a=1','b=2']."
        )
    except (ValueError, RecursionError) as error:
        return unreadable_value(error)
    if parsed.is_sweep_override():
        return "it has several values. Give one; a list is written [1,2]."
    if (override.lstrip("+~").partition("=")[0] + ".").startswith("hydra."):
        return "hydra's own settings have no effect, because hydra only reads the file. Leave it out."
    return ""


def _deletes_an_option(program: YamlProgram, override: str) -> str:
    """What to write instead of an override that deletes an option (`~section.key`), or ""."""
    key = override.removeprefix("~").partition("=")[0]
    keys = program.keys()
    if not override.startswith("~") or not program.may_be_new(key) or key.rpartition(".")[2] not in keys:
        return ""
    return f"an option cannot be deleted. Write {key}=null, which leaves its default."


def _read_command_line(program: YamlProgram, argv: Sequence[str]) -> tuple[Path, str, list[str]]:
    """Directory and name of the file, and the overrides."""
    parser = argparse.ArgumentParser(
        program.name, description=program.description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config-path", "-cp", default=str(CONFIG_DIRECTORY), help="directory of the YAML file")
    parser.add_argument("--config-name", "-cn", default=program.config_name, help="name of the YAML file")
    parser.add_argument("overrides", nargs="*", metavar=program.override, help="values that win over those in the file")
    namespace, unknown = parser.parse_known_intermixed_args(argv)  # overrides may also follow flags
    if unknown:
        raise UsageError(
            [f"{word}: no such option. Options of a run are written {program.override}." for word in unknown]
        )
    directory = Path(namespace.config_path).resolve()
    name = namespace.config_name.removesuffix(".yaml")
    if not (directory / f"{name}.yaml").is_file():
        raise UsageError(
            [f"--config-path {namespace.config_path} --config-name {name}: no such file. Check directory and name."]
        )
    return directory, name, namespace.overrides


def _as_mistake(program: YamlProgram, error: Exception, overrides: Sequence[str], path: Path) -> str:
    """Hydra's error in one line; for an unknown key, with the nearest known key."""
    for override in overrides:
        key = override.partition("=")[0].lstrip("+~")
        name = key.rpartition(".")[2]
        keys = program.keys()
        if f"'{key}'" in str(error) or name in str(error):
            if name in keys:
                return f"{override}: {_first_line(error)}."
            return f"{override}: {unknown_key(name, sorted(keys), program.listed)}"
    return (
        f"{_first_line(error)}. Overrides are written {program.override}."
        if overrides
        else f"{path}: {_first_line(error)}."
    )


def _first_line(error: BaseException) -> str:
    """First line of an error's text. For a grammar error (`${` without an end) the first line of its cause is added."""
    from omegaconf.errors import GrammarParseError

    line = str(error).strip().partition("\n")[0].rstrip(".")
    cause = _first_line(error.__cause__) if isinstance(error.__cause__, GrammarParseError) else ""
    return ": ".join(filter(None, (line, cause)))


def unknown_key(key: str, keys: Sequence[str], listed: str) -> str:
    """The mistake about an unknown key, without the key itself. `listed` says where to find all keys."""
    return no_such_option(key, keys, prefix="", listed=listed).partition(": ")[2]


NO_SECTION = "(section)."
"""The place of an option that is in no section of the file."""


def in_terms_of_the_file(mistake: str, place: Callable[[str], str]) -> str:
    """A mistake with every `--option` replaced by the key of the file that sets this option.

    An option in no section (`place` returns `NO_SECTION`) is called by its bare name, and a sentence says where to put it.
    """
    absent: dict[str, None] = {}

    def key(match: re.Match[str]) -> str:
        name = match[1]
        if place(name) != NO_SECTION + name:
            return place(name)
        absent[name] = None
        return name

    text = re.sub(r"--(?!help)(\w+)", key, mistake)
    if not absent:
        return text
    stand = "stands" if len(absent) == 1 else "stand"
    return (
        f"{text} {' and '.join(absent)} {stand} in no section of the file. Any section may have it, as in "
        f"trainer.{next(iter(absent))}=VALUE."
    )
