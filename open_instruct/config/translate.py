"""The command line of this project for a launch script of open-instruct, and what differs.

    python -m open_instruct.config.translate < scripts/train/my_run.sh

Variables and arithmetic of the shell stay as they are written, with or without quotation marks. An array that the script defines
once, as in `ARGS=(--seed 3)`, is replaced by its words. Redirections are left out, and the command ends where the shell ends it.
What has no effect here is left out, what has another name gets it, and what asks for something that is not here is named. So is
what the launcher was told of the environment. Only the first call of a script is translated, and further calls are counted.
Exit code 0, or 2 if the text holds no call of grpo_fast.py.
"""

import argparse
import itertools
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.config.open_instruct_options import (
    BY_VALUE,
    OTHER_VALUES,
    REFUSED,
    RENAMED,
    WITHOUT_EFFECT,
    asks_for_nothing,
)
from open_instruct.registry import is_switch, option_kinds
from open_instruct.workflows.conversations.options import SERVICES

PROGRAM = "grpo_fast.py"
DIFFERENT: dict[str, str] = {
    "async_steps": "by default 1, there 8; 0 is strictly on-policy; no token is ever older, and nothing is dropped for it",
    "checkpoint_state_dir": "by default checkpoint_states in output_dir, there none; the same command resumes its run",
    "compile_model": "compiles the layers of the learners; there it has no effect in grpo_fast.py",
    "dataset_mixer_eval_list": "its prompts are left out of training; --hold_out_eval_prompts False keeps them in, as there",
    "dataset_mixer_list": "a count below the number of rows takes the first rows, there random ones; shares are drawn as there",
    "deepspeed_zpg": "by default 1, there 8",
    "gradient_checkpointing": "off unless asked for; there it is always on",
    "kl_estimator": "3 is the linear estimator times the ratio, as there; 4 is unbiased",
    "llm_judge_model": "its server is named by --llm_judge_api_base or OPENAI_BASE_URL",
    "local_eval_every": "also after the last step",
    "loss_fn": "eight losses; dapo by default, as there",
    "lr_scheduler_type": "constant has the warm-up of --warmup_ratio too, there none",
    "mask_truncated_completions": "such responses count in the baseline of their group; there they are removed first",
    "max_steps": "after the last call the model has one more turn, in which it can answer; there the response ends behind what "
    "the tool answers",
    "num_mini_batches": "divides samples, each is trained on once; there packed rows are divided and the rest is dropped",
    "output_dir": "files lie in it as it is, models in step_<number>/ and the last one in model/; there <exp>__<seed>__<time> is "
    "appended, steps lie in <output_dir>_checkpoints/ and the last model in output_dir itself",
    "pool_size": "processes of environments on an engine, begun when needed; there actors of each tool, ready from the start; "
    "a tool's own, in tool_configs, has no effect",
    "rho_mask_sequence_level": "per response; --rho_as_in_open_instruct takes a packed row, as there",
    "rho_mask_tv_divergence": "half the mean of |rho - 1| over a response; --rho_as_in_open_instruct is as there",
    "run_name": "kept; there it is overwritten",
    "save_traces": "writes open-instruct's rollouts (a file per step) to rollouts_save_path, by default rollouts/ in output_dir; "
    "also samples/, in a format that dataset_mixer_list reads",
    "system_prompt_override_file": "the file's text as it is; there white space around it is removed",
    "tools": "the verifier reads the last turn of the model, there the whole response with what tools have answered",
    "use_rho_correction": "by default only where samples may be stale, vllm_top_p is below 1 or vllm_keep_prefix_cache is on; "
    "there always",
    "vllm_enable_prefix_caching": "by default on, there off; a request reuses only what the same version of the weights began",
    "wandb_project": "by default open_instruct, there open_instruct_internal",
    "warmup_ratio": "the first of n steps has 1/n of the peak rate; there it has 0, and changes nothing",
    "weight_decay": "holds for all weights; there biases and norms are spared",
}
"""Options that both projects have, with a different meaning or default, and how they differ."""
DEFAULTS = ("async_steps", "gradient_checkpointing", "use_rho_correction", "vllm_enable_prefix_caching")
"""The options in `DIFFERENT` whose default is reported even if a script does not name the option."""
OURS = option_kinds(GRPOConfig)
OUR_WORDS = {*OURS, *(f"no_{name}" for name, kind in OURS.items() if is_switch(kind))}
"""All spellings of this project's options."""
EARLIER = {*RENAMED, *BY_VALUE}
_PIECE = re.compile(
    r"(?P<space>\s+)|(?P<comment>(?<!\S)#[^\n]*)|'(?P<single>[^']*)'|\"(?P<double>(?:\\.|[^\"\\])*)\""
    r"|(?P<shell>\$\(\(.*?\)\)|[$<>]\((?:[^()]|\([^()]*\))*\)|\$\{[^}]*\}|`[^`]*`)"
    r"|(?P<redirection>(?:(?<!\S)\d+)?(?:&>>?|>[>&|]?|<<<|<<-?|<[>&]?))|(?P<end>[;&|()]+)"
    r"|\\(?P<escaped>.)|(?P<plain>[^\s'\"\\$`;&|()<>]+|[$`])|(?P<unpaired>['\"\\])",
    re.DOTALL,
)
"""A part of a shell command."""
_ESCAPED_END = re.compile(r"(?:\d?\\[;&|<>])+[\\&\d]*")
"""An end of the command that is hidden from the launcher's shell: `\\&\\&`."""
_ARRAY = re.compile(r"^[ \t]*(?:(?:declare|local|export|readonly)[ \t]+(?:-\w+[ \t]+)*)?(\w+)(\+?=)\(", re.MULTILINE)
"""The beginning of an array definition."""
_ALL_OF_ARRAY = re.compile(r"\"?\$\{(\w+)\[[@*]\]\}\"?")
_VARIABLE = re.compile(r"\$\{?([A-Za-z_][A-Za-z0-9_]*)")


class Word(str):
    """A word of a script: its value, and in `spelling` its text in the script."""

    spelling: str

    def __new__(cls, value: str, spelling: str | None = None) -> "Word":
        word = super().__new__(cls, value)
        word.spelling = shlex.quote(value) if spelling is None else spelling
        return word


@dataclass(frozen=True)
class Call:
    """A call of `grpo_fast.py` in a script."""

    before: str
    """The text before the call in its line."""
    words: list[Word]
    is_cut_off: bool = False
    """Whether a quotation in the call has no end, so that words may be missing."""

    @property
    def has_options(self) -> bool:
        return bool(self.words) and self.words[0].startswith(("--", "$"))


def shell_words(text: str, *, whole_line: bool = False) -> list[Word]:
    """The words of a command, up to where the shell ends the command, without comments and redirections.

    A quotation mark whose partner stands before the text is left out. With `whole_line`, the words of all commands in a line.
    """
    words: list[Word] = []
    value = spelling = ""
    is_target = False  # whether the word is the target of a redirection
    for piece in _PIECE.finditer(text + " "):
        if piece["space"] or piece["redirection"] or piece["end"]:
            words += [Word(value, spelling)] if spelling and not is_target else []
            is_target = bool(piece["redirection"]) or (is_target and not spelling)
            value = spelling = ""
            if piece["end"] and not whole_line:
                break
        elif not piece["unpaired"] and not piece["comment"]:
            spelling += piece[0]
            quoted = piece["double"] and re.sub(r'\\([\\"$`])', r"\1", piece["double"])
            value += quoted or piece["single"] or piece["shell"] or piece["escaped"] or piece["plain"] or ""
    return words


def calls_of(script: str) -> list[Call]:
    """The calls of `grpo_fast.py` that have options. If no call has options, the first call; empty if there is no call."""
    lines = _joined(script).splitlines()
    calls = []
    for line_number, line in enumerate(lines):
        before, *behind = line.split(PROGRAM)
        for number, rest in enumerate(behind):
            command = PROGRAM.join(behind[number:])
            if not _is_open(before):
                command = _with_its_quotations(command, lines[line_number + 1 :])
            calls.append(Call(before, _words_of_call(command.rstrip().rstrip("\\")), _is_open(command)))
            before += PROGRAM + rest
    return [call for call in calls if call.has_options] or calls[:1]


def _is_open(text: str) -> bool:
    """Whether a quotation begins in a text and does not end there."""
    return any(piece["unpaired"] in ("'", '"') for piece in _PIECE.finditer(text) if piece["unpaired"])


def _with_its_quotations(command: str, further: Sequence[str]) -> str:
    """A line, joined with the lines after it that its quotations span; only the line if a quotation never ends."""
    whole = command
    for line in further:
        if not _is_open(whole):
            return whole
        whole += f"\n{line}"
    return command if _is_open(whole) else whole


def _joined(script: str) -> str:
    """A script without comment lines, and with the continued lines of a command joined."""
    lines = [line for line in script.splitlines() if not line.lstrip().startswith("#")]
    return re.sub(r"\\[ \t]*\n", " ", "\n".join(lines))


def _words_of_call(behind: str) -> list[Word]:
    """The words of one command, without `$@`, the script's own arguments."""
    words: list[Word] = []
    for word in shell_words(behind):
        if word in ("&&", "||") or _ESCAPED_END.fullmatch(word.spelling):
            break
        last = word.spelling.endswith("\\;")
        words.append(Word(word.removesuffix(";"), word.spelling.removesuffix("\\;")) if last else word)
        if last:
            break
    return [word for word in words if word not in ("$@", "${@}")]


def _arrays(script: str) -> dict[str, list[Word]]:
    """The words of each array that the script defines once and never adds to."""
    text = _joined(script)
    matches = list(_ARRAY.finditer(text))
    names = [match[1] for match in matches]
    return {
        match[1]: shell_words(text[match.end() :])
        for match in matches
        if names.count(match[1]) == 1 and match[2] == "="
    }


def _with_arrays(words: Sequence[Word], arrays: Mapping[str, list[Word]]) -> Iterator[Word]:
    """The words, with each array replaced by its words."""
    for word in words:
        array = _ALL_OF_ARRAY.fullmatch(word.spelling)
        if array and array[1] in arrays:
            rest = {name: items for name, items in arrays.items() if name != array[1]}
            yield from _with_arrays(arrays[array[1]], rest)
        else:
            yield word


def arguments_of(script: str) -> list[Word] | None:
    """The words after `grpo_fast.py` in a shell script; None if the script does not call it."""
    calls = calls_of(script)
    return list(_with_arrays(calls[0].words, _arrays(script))) if calls else None


def _not_looked_at(script: str, words: Sequence[Word]) -> list[str]:
    """Variables that seem to hold options: arrays, variables before the first option, and those whose text begins with `--`."""
    with_options = re.findall(r"^[ \t]*(?:\w+[ \t]+)?(\w+)\+?=[\"']?--", _joined(script), re.MULTILINE)
    first = next((number for number, word in enumerate(words) if word.startswith("--")), len(words))
    names: list[str] = []
    for number, word in enumerate(words):
        variables = _VARIABLE.findall(word.spelling)
        names += [
            name for name in variables if number < first or name in with_options or f"${{{name}[" in word.spelling
        ]
    return list(dict.fromkeys(names))


def surroundings(script: str) -> list[str]:
    """Notes on the launcher's own settings (environment, nodes), and on the script's variables that the command needs."""
    calls, words = calls_of(script), arguments_of(script) or []
    if not calls:
        return []
    notes = []
    if len(calls) > 1:
        notes.append(f"the script calls {PROGRAM} {len(calls)} times: only the first call is translated")
    notes += [
        f"the options in {name} are not looked at, and stay as they are" for name in _not_looked_at(script, words)
    ]
    if calls[0].is_cut_off and not _is_open(calls[0].before):
        notes.append("a quotation has no end: what stands behind it may be missing here")
    for name, values in options_in(shell_words(calls[0].before, whole_line=True)):
        value = values[0] if values else ""
        if name == "env":
            notes.append(f"in the environment: {value}")
        elif name == "secret":
            notes.append(f"in the environment: {value.partition('=')[0]}")
        elif name == "num_nodes" and value not in ("", "1"):
            notes.append(f"on {value} nodes: docs/guides/multi_node.md says how")
    variables = dict.fromkeys(name for word in words for name in _VARIABLE.findall(word.spelling))
    return [*notes, *([f"variables of the script: {', '.join(variables)}"] if variables else [])]


def options_in(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each option with its values. Dashes in option names become underscores."""
    name = ""
    values: list[str] = []
    for word in words:
        if word.startswith("--"):
            if name:
                yield name, values
            name, equals, value = word[2:].partition("=")
            spelling = _behind_equals(word.spelling) if isinstance(word, Word) else None
            name, values = name.replace("-", "_"), []
            if equals:
                values.append(Word(value, spelling))
        elif name:
            values.append(word)
    if name:
        yield name, values


def _behind_equals(spelling: str) -> str:
    """`"$OUT"` for `"--output_dir=$OUT"`: the value, with the quotation mark that was opened before the option."""
    before, _, value = spelling.partition("=")
    return next((mark for mark in "\"'" if before.count(mark) % 2), "") + value


def translated(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The words for this project, and a note for each option, by its name as written: what became of it, or how it differs.

    Words before the first option stay as they are.
    """
    result = list(itertools.takewhile(lambda word: not word.startswith("--"), words))
    notes: dict[str, str] = {}
    options = [(spelling, _in_full(spelling), arguments) for spelling, arguments in options_in(words)]
    last = {name: number for number, (_, name, _) in enumerate(options)}
    options = [option for number, option in enumerate(options) if option[1] not in EARLIER or last[option[1]] == number]
    names = {name.removeprefix("no_") if name not in OURS else name for _, name, _ in options if name in OUR_WORDS}
    for spelling, name, arguments in options:
        values = [OTHER_VALUES.get(name, {}).get(value, value) for value in arguments]
        if name in WITHOUT_EFFECT:
            notes[spelling] = f"left out: {WITHOUT_EFFECT[name]}"
        elif name in REFUSED:
            nothing = asks_for_nothing(name, " ".join(values))
            notes[spelling] = "left out: it asks for nothing" if nothing else f"NOT HERE: {REFUSED[name]}"
        elif name in EARLIER:
            replacements, notes[spelling] = _earlier(name, values, names)
            result += replacements
        elif name not in OUR_WORDS:
            notes[spelling] = "NOT KNOWN here"
        elif values == ["None"] and arguments != ["None"]:
            notes[spelling] = f"left out: {arguments[0]} is not there in open-instruct either"
        else:
            result += [f"--{name}", *values]
            if name in DIFFERENT:
                notes[spelling] = DIFFERENT[name]
            if name == "tools" and (absent := [value for value in values if value in SERVICES]):
                notes[spelling] = "; ".join(f"NOT HERE: {value}: {SERVICES[value]}" for value in absent)
    return result, notes


def _in_full(name: str) -> str:
    """The full name of an option. A name that is itself an option of open-instruct is not an abbreviation."""
    if name in {*EARLIER, *WITHOUT_EFFECT, *REFUSED, *OUR_WORDS}:
        return name
    longer = [option for option in OUR_WORDS if option.startswith(name)]
    return longer[0] if len(longer) == 1 else name


def _earlier(name: str, values: list[str], names: set[str]) -> tuple[list[str], str]:
    """The words that replace an option in this project, and the note on it. As in `grpo_fast.py`, options that are in `names`
    already keep their values; new options are added to `names`."""
    try:
        replacements = (
            {RENAMED[name]: values} if name in RENAMED else BY_VALUE[name](values[0] if len(values) == 1 else values)
        )
    except ValueError as error:
        return [], f"NOT HERE: {error}"
    new = {option: value for option, value in replacements.items() if option not in names}
    if not new:
        return [], f"left out: {' and '.join(replacements)} is given too"
    names.update(new)
    words = []
    for option, value in new.items():
        words += [f"--{option}", *(value if isinstance(value, list) else [value])]
    text = RENAMED.get(name, " ".join(words))
    return words, "; ".join([f"is {text} here", *(DIFFERENT[option] for option in new if option in DIFFERENT)])


def _quoted(word: str) -> str:
    """The word quoted for a shell. A word with a variable stays as it is written, because `${DATA}` may be several words."""
    return word.spelling if isinstance(word, Word) and "$" in word.spelling else shlex.quote(word)


def as_text(words: Sequence[str], notes: dict[str, str], around: Sequence[str] = ()) -> str:
    """The command, one option per line, and the notes as shell comments."""
    lines = ["python open_instruct/grpo_fast.py"]
    for word in words:
        if word.startswith("--"):
            lines.append(f"    {word}")
        else:
            lines[-1] += f" {_quoted(word)}"
    comments = [f"# --{name}: {note}" for name, note in notes.items()]
    named = {line.split()[0][2:] for line in lines[1:]}
    comments += [f"# --{name}, which is not named: {DIFFERENT[name]}" for name in DEFAULTS if name not in named]
    comments = [f"# {note}" for note in around] + comments
    return " \\\n".join(lines) + "\n\n" + "\n".join(comments) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m open_instruct.config.translate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("script", nargs="?", default="-", help="the launch script; by default standard input")
    path = parser.parse_args().script
    try:
        script = sys.stdin.read() if path == "-" else Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        print(f"{path}: it cannot be read ({getattr(error, 'strerror', error)}). Check the path.", file=sys.stderr)
        return 2
    words = arguments_of(script)
    if words is None:
        print(f"no call of {PROGRAM} in this text. Give a launch script: translate < script.sh", file=sys.stderr)
        return 2
    print(as_text(*translated(words), surroundings(script)), end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
