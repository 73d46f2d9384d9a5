"""The command line, made from the option dataclasses: parsing, `--help`, and all mistakes reported in one message.

    try:
        args = parse_args(sys.argv[1:], GRPOConfig, validators=[collect_mistakes])
    except UsageError as error:
        fail_with(error.mistakes)

An option is written `--name value` or `--name=value`, a list `--name a b c` or as JSON (`--name '["a", "b"]'`), a switch
`--name`, `--name False` or `--no_name`. A name may be shortened as long as it is clear. A YAML file given with `--config` holds
the same names, in full; the command line wins.
"""

import argparse
import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import re
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, get_args, get_origin

import yaml

from open_instruct.config.foreign_words import (
    LENGTH_OF_CONVERSATION,
    hydra_word,
    is_foreign,
    meaning_here,
    unclear_length,
)
from open_instruct.config.open_instruct_options import ForeignOptions
from open_instruct.config.option_values import as_text, convert_all
from open_instruct.config.yaml_text import BadYaml, check_yaml, texts_as_written, unreadable_value
from open_instruct.registry import is_switch, option_fields, option_kinds
from open_instruct.system.secret_masking import masked, without_secrets
from open_instruct.workflows.conversations.options import ConversationOptions, with_implied_workflow

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Config = TypeVar("Config", bound="DataclassInstance")

GIVEN = "given"
"""The field of an option class, if it has one, that holds the options that the user wrote."""
NUMBER = re.compile(r"^-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$")
"""A negative number, which begins with a dash but is not an option."""


class UsageError(Exception):
    """The user's options cannot be used. `mistakes` says why, in one or two sentences per mistake."""

    def __init__(self, mistakes: Sequence[str]) -> None:
        super().__init__("\n".join(mistakes))
        self.mistakes = list(mistakes)


class Refused(SystemExit):
    """A program ends with exit code 2, because of mistakes of the user that it has printed."""

    def __init__(self, mistakes: Sequence[str]) -> None:
        super().__init__(2)
        self.mistakes = list(mistakes)


def fail_with(mistakes: Sequence[str], *, program: str = "grpo_fast.py") -> NoReturn:
    """Print all mistakes to stderr and exit with code 2. Everything that looks like a secret is masked."""
    count = "1 mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
    lines = [f"  {number}. {without_secrets(mistake)}" for number, mistake in enumerate(mistakes, start=1)]
    print("\n".join([f"{program}: {count}:", *lines]), file=sys.stderr)
    raise Refused(mistakes)


def parse_args(
    argv: Sequence[str],
    config_cls: type[Config],
    *,
    validators: Sequence[Callable[[Config], Iterable[str]]] = (),
    program: str = "grpo_fast.py",
    foreign: ForeignOptions | None = None,
) -> Config:
    """Options from the command line and from the YAML file that it names.

    Args:
        argv: the arguments after the program's name.
        config_cls: a dataclass whose fields are bool, int, float, str, Literal, lists of these, or unions of these.
        validators: functions that take the options and return the mistakes in them, as `checks.collect_mistakes` does. If the
            value of an option cannot be read, validators see its default, and their mistakes about that option are left out.
        program: name of the program, for `--help`.
        foreign: options of other programs that are also understood. After the call it says what became of them.

    Raises:
        UsageError: some values cannot be read, or the validators refuse them. The error holds all mistakes.
        SystemExit: with code 0, after `--help`.
    """
    kinds = option_kinds(config_cls)
    foreign = foreign or ForeignOptions(knows_any=False)
    parser = _make_parser(config_cls, kinds, program)
    for name in foreign.names:
        parser.add_argument(f"--{name}", nargs="*", help=argparse.SUPPRESS)
    on_command_line, mistakes = _read_command_line(argv, kinds, parser, foreign_names=foreign.names)
    in_file, mistakes_of_file = _read_yaml(on_command_line.pop("config", None), kinds, foreign.names)
    options = foreign.of_file_and_command_line(in_file, on_command_line)
    mistakes = [*mistakes, *mistakes_of_file, *foreign.mistakes]
    renamed = options.keys() - in_file.keys() - on_command_line.keys()
    return make_config(config_cls, options, validators=validators, mistakes=mistakes, renamed=renamed)


def read_lists(argv: Sequence[str], names: Sequence[str], kinds: Mapping[str, Any]) -> dict[str, list[str]]:
    """The values of the options `names`, which hold lists of strings, read before all options are known. Ignores mistakes.

    Args:
        kinds: the kinds of the options that are already known. A name may be shortened if it is unambiguous among them.
    """
    parser = _Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for name in (*names, "config"):
        parser.add_argument(f"--{name}", nargs="*")
    lists = dict.fromkeys(names, list[str])
    on_command_line, _ = _read_command_line(argv, {**kinds, **lists}, parser)
    in_file, _ = _read_yaml(on_command_line.pop("config", None), lists)
    return convert_all(in_file | on_command_line, lists)[0]


def make_config(
    config_cls: type[Config],
    options: Mapping[str, Any],
    *,
    validators: Sequence[Callable[[Config], Iterable[str]]] = (),
    mistakes: Sequence[str] = (),
    renamed: Collection[str] = (),
) -> Config:
    """Options from values as the user wrote them (strings, or what YAML made of them), checked by `validators`.

    Args:
        renamed: the options that the user gave only under a name of open-instruct that is another one here.

    Raises:
        UsageError: there are mistakes. The error holds `mistakes`, which were found before, and all that are found here.
    """
    kinds = option_kinds(config_cls)
    values, unreadable = convert_all(with_implied_workflow(options), kinds)
    mistakes = [*mistakes, *unreadable.values()]
    if LENGTH_OF_CONVERSATION not in renamed:
        mistakes += unclear_length(options, [option.name for option in option_fields(ConversationOptions)])
    for name in _required(config_cls):
        if name not in values:
            values[name] = ""  # a placeholder, so that the validators can check the other options
            mistakes += [] if name in unreadable else [f"--{name}: missing. It must be given."]
            unreadable.setdefault(name, "")
    if GIVEN in config_cls.__dataclass_fields__:
        values[GIVEN] = masked(dict(options))
    config = config_cls(**values)
    for validator in validators:
        mistakes += [mistake for mistake in validator(config) if not unreadable.keys() & _options_before_colon(mistake)]
    if mistakes:
        raise UsageError(mistakes)
    return config


def field_help(config_cls: type) -> dict[str, tuple[str, str]]:
    """The title of the group (its class's docstring) and the help text (the string under the field) of every field."""
    help_by_field = {}
    names = {field.name for field in option_fields(config_cls)}
    for cls in config_cls.__mro__[:-1]:
        if not dataclasses.is_dataclass(cls):
            continue
        for node, below in itertools.pairwise([*_class_bodies(cls.__module__)[cls.__name__], None]):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id in names:
                text = ast.literal_eval(below.value) if isinstance(below, ast.Expr) else ""
                help_by_field[node.target.id] = (inspect.getdoc(cls) or "", text)
    return help_by_field


@functools.cache
def _class_bodies(module_name: str) -> dict[str, list[ast.stmt]]:
    """Statements of each class at the top level of a module. Cached, because `inspect.getsource` of a class parses the module."""
    tree = ast.parse(inspect.getsource(sys.modules[module_name]))
    return {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}


def _required(config_cls: "type[DataclassInstance]") -> list[str]:
    missing = dataclasses.MISSING
    fields = dataclasses.fields(config_cls)
    return [field.name for field in fields if field.default is missing and field.default_factory is missing]


def _options_before_colon(mistake: str) -> set[str]:
    return set(re.findall(r"--(\w+)", mistake.split(": ")[0]))


# ---- Command line and file, to values as they were written ----


class _Parser(argparse.ArgumentParser):
    """Splits the command line at the option names. How many values an option takes, and which ones, is checked later."""

    def error(self, message: str) -> NoReturn:
        raise UsageError([message])


class _HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=100)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)  # do not break names of datasets

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        return str(action.metavar or default_metavar)


def _make_parser(config_cls: "type[DataclassInstance]", kinds: Mapping[str, Any], program: str) -> _Parser:
    required = [f"--{name} {_metavar(kinds[name])}" for name in _required(config_cls)]
    parser = _Parser(
        program,
        usage=" ".join(["%(prog)s", *required, "[--config FILE]", "[option ...]"]),
        description="Write a list as --name a b c or as JSON, and a switch as --name, --name False or --no_name. A name may be "
        "shortened as long as it is clear. If an option is given twice, the last value wins.",
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--config", nargs="*", metavar="FILE", help="YAML file with options; the command line wins.")
    fields = {field.name: field for field in option_fields(config_cls)}
    help_by_field = field_help(config_cls)
    groups = {title: parser.add_argument_group(title) for title, _ in help_by_field.values()}
    for name, (title, text) in help_by_field.items():
        choices = (
            f"One of {', '.join(map(str, get_args(kinds[name])))}." if _metavar(kinds[name]) == LONG_CHOICE else ""
        )
        text = " ".join(f"{choices} {text} {_default_text(fields[name])}".split()).replace("%", "%%")
        groups[title].add_argument(f"--{name}", nargs="*", metavar=_metavar(kinds[name]), help=text)
    return parser


MAX_CHOICES_LENGTH = 60
"""Longest list of choices, in characters, that the help shows next to an option. A longer list begins the option's text."""
LONG_CHOICE = "NAME"


def _metavar(kind: Any) -> str:
    names = {bool: "[True|False]", int: "INT", float: "NUMBER", str: "TEXT", dict[str, Any]: "JSON"}
    if kind in names:
        return names[kind]
    parts = [part for part in get_args(kind) if part is not NoneType]
    if get_origin(kind) is Literal:
        text = "{" + ",".join(map(str, parts)) + "}"
        return text if len(text) <= MAX_CHOICES_LENGTH else LONG_CHOICE
    if get_origin(kind) is list:
        return f"[{_metavar(parts[0])} ...]"
    return "|".join(map(_metavar, parts))


def _default_text(field: "dataclasses.Field[Any]") -> str:
    if field.default_factory is not dataclasses.MISSING:
        return f"(default: {' '.join(map(str, field.default_factory())) or 'none'})"
    if field.default is dataclasses.MISSING:
        return "(required)"
    return "" if field.default is None else f"(default: {field.default})"


def _read_command_line(
    argv: Sequence[str],
    kinds: Mapping[str, Any],
    parser: _Parser,
    *,
    foreign_names: Sequence[str] = (),
) -> tuple[dict[str, Any], list[str]]:
    """Values by option, as the user wrote them (a string, a list of strings, or True for a bare switch), and the mistakes.

    The parser also knows `foreign_names`, but only by their full names.
    """
    negations = {f"--no_{name}": f"--{name}=False" for name, kind in kinds.items() if is_switch(kind)}
    names = [*kinds, "config", "help", *(word[2:] for word in negations)]
    argv = [_in_full(word, names, foreign_names) for word in argv]
    overrides = [word for word in argv if hydra_word(word)]
    argv = [word for word in argv if not hydra_word(word)]
    namespace, rest = parser.parse_known_args([_shielded(negations.get(word, word)) for word in argv])
    mistakes = [
        f"{word.partition('=')[0]}: options begin with --. {meaning_here(hydra_word(word), prefix='--')}"
        for word in overrides
    ]
    mistakes += _unknown_words(_unshielded(rest), [*kinds, "config"])
    values: dict[str, Any] = {}
    for name, words in vars(namespace).items():
        kind = kinds.get(name, str)
        words = _unshielded(words)
        if not words and is_switch(kind):
            values[name] = True
        else:
            values[name] = words[0] if len(words) == 1 and get_origin(kind) is not list else words
    return values, mistakes


A_SECRET = "token"
"""`--token` would be short for tokenizer_name_or_path, but its value is probably a hub token, which no message may show."""


def _in_full(word: str, names: Sequence[str], foreign_names: Sequence[str]) -> str:
    """The full name of an option that was written with dashes, or shortened without ambiguity."""
    option, equals, value = word.removeprefix("--").partition("=")
    name = option.replace("-", "_")
    if name in foreign_names:
        return f"--{name}{equals}{value}" if word.startswith("--") else word
    is_short = name != A_SECRET and not is_foreign(name)  # --lr is no abbreviation of lr_scheduler_type
    longer = [candidate for candidate in names if candidate.startswith(name)] if is_short else []
    if not word.startswith("--") or not name or (name not in names and len(longer) != 1):
        return word
    return f"--{name if name in names else longer[0]}{equals}{value}"


def _shielded(word: str) -> str:
    """A negative number with a space before it, because argparse takes -1e-5 for an option (but not -1)."""
    return f" {word}" if NUMBER.match(word) else word


def _unshielded(words: Sequence[str]) -> list[str]:
    return [word[1:] if word.startswith(" ") and NUMBER.match(word[1:]) else word for word in words]


def _unknown_words(words: Sequence[str], names: Sequence[str]) -> Iterator[str]:
    """A mistake for each word that the parser could not place. Values of an unknown option are not shown: they may be keys."""
    after_option = False
    for word in words:
        if word.startswith("-") and not NUMBER.match(word):
            after_option = True
            yield no_such_option(word.split("=")[0], names, prefix="--")
        elif not after_option:
            yield f"{word!r}: belongs to no option. Options begin with --."


MOST_MEANT = 8
"""Most options that the message about an ambiguous abbreviation lists."""


def no_such_option(option: str, names: Sequence[str], *, prefix: str, listed: str = "--help lists them all.") -> str:
    """The mistake about an unknown name: with what it means here if it is an option of another project, else with the known name
    that it probably is if there is one, else with `listed`."""
    name = option.strip("-").replace("-", "_").lower()
    if meaning := meaning_here(name, prefix=prefix):
        return f"{option}: no such option. {meaning}"
    if 2 <= len(longer := [candidate for candidate in names if name and candidate.startswith(name)]) <= MOST_MEANT:
        return f"{option}: it could be {' or '.join(f'{prefix}{candidate}' for candidate in longer)}. Write it in full."
    near = next(
        (candidate for candidate in difflib.get_close_matches(name, names, n=3) if is_a_slip(name, candidate)), None
    )
    cure = f"Did you mean {prefix}{near}?" if near else listed
    return f"{option}: no such option. {cure}"


WORDS_ALIKE, NAMES_ALIKE = 0.7, 0.9
"""Least likeness (`difflib`) of each word of two names, or of the names as a whole, for one to be a slip of the other."""


def is_a_slip(name: str, candidate: str) -> bool:
    """Whether a name is probably a known name with a typing error. `judge_weights` is like `rc_turn_weights`, but means another
    thing, and a hint would mislead."""

    def likeness(text: str, other: str) -> float:
        return difflib.SequenceMatcher(None, text, other).ratio()

    words, candidate_words = name.removeprefix("no_").split("_"), candidate.split("_")
    if len(words) == len(candidate_words):
        return all(likeness(*pair) >= WORDS_ALIKE for pair in zip(words, candidate_words, strict=True))
    return likeness(name, candidate) >= NAMES_ALIKE


def _read_yaml(
    path: Any, kinds: Mapping[str, Any], foreign_names: Sequence[str] = ()
) -> tuple[dict[str, Any], list[str]]:
    """Values by option, and the mistakes, from the file that `--config` names; both are empty if `path` is None. The known
    options are those of `kinds`, and `foreign_names`."""
    if path is None:
        return {}, []
    if not isinstance(path, str):
        return {}, [f"--config {as_text(path)}: expected the path of one file."]
    try:
        text = Path(path).read_text()
        check_yaml(text)
        content = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        return {}, [f"--config {path}: it cannot be read ({getattr(error, 'strerror', error)}). Check the path."]
    except (BadYaml, RecursionError) as error:
        return {}, [f"--config {path}: {error if isinstance(error, BadYaml) else 'brackets nested too deep'}."]
    except yaml.YAMLError as error:
        # The lines that the error quotes are left out, because they may contain secrets.
        line = error.problem_mark.line + 1 if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark else "?"
        return {}, [f"--config {path}: line {line} is not valid YAML. Write one `name: value` per line."]
    except ValueError as error:
        return {}, [f"--config {path}: {unreadable_value(error)}"]
    if not isinstance(content, dict | None):
        return {}, [f"--config {path}: it holds no options. Write one `name: value` per line."]
    content = (content or {}) | texts_as_written(text, kinds)
    names = [*kinds, *foreign_names]
    mistakes = [f"{path}: {no_such_option(str(key), names, prefix='')}" for key in content if key not in names]
    return {key: value for key, value in content.items() if key in names}, mistakes
