"""The command line of this project for a launch script of open-instruct, and what differs.

    python -m open_instruct.config.translate < scripts/train/my_run.sh

Variables and arithmetic of the shell stay as they are written, with or without quotation marks. What has no effect here is left
out, what has another name gets it, and what asks for something that is not here is named, and so is what the launcher was told
of the environment. Exit code 0, or 2 if the text holds no call of grpo_fast.py.
"""

import re
import shlex
import sys
from collections.abc import Iterator, Sequence

from open_instruct.config.foreign_options import OTHER_VALUES, REFUSED, RENAMED, WITHOUT_EFFECT, asks_for_nothing
from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.registry import option_kinds
from open_instruct.workflows.conversations.options import SERVICES

PROGRAM = "grpo_fast.py"
DIFFERENT: dict[str, str] = {
    "async_steps": "by default 1, there 8; 0 is strictly on-policy; no token is ever older, and nothing is dropped for it",
    "checkpoint_state_dir": "by default checkpoint_states in output_dir, there none; the same command resumes its run",
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
    "use_rho_correction": "by default only where samples may be stale; there always",
    "vllm_enable_prefix_caching": "the cache is emptied with each new version of the weights",
    "wandb_project": "by default open_instruct, there open_instruct_internal",
    "weight_decay": "holds for all weights; there biases and norms are spared",
}
"""Options of both projects that do not mean the same in both, and how they differ."""
DEFAULTS = ("async_steps", "gradient_checkpointing", "use_rho_correction")
"""Those whose default differs: they are told even where a script does not name them."""
_END = ("&&", "||", ";", "|", "&", ">", "2>&1")
_PIECE = re.compile(
    r"(?P<space>\s+)|'(?P<single>[^']*)'|\"(?P<double>(?:\\.|[^\"\\])*)\""
    r"|(?P<shell>\$\(\(.*?\)\)|\$\((?:[^()]|\([^()]*\))*\)|\$\{[^}]*\})"
    r"|\\(?P<escaped>.)|(?P<plain>[^\s'\"\\$]+|\$)|(?P<unpaired>['\"\\])",
    re.DOTALL,
)
"""A part of a shell's command."""
_VARIABLE = re.compile(r"\$\{?([A-Za-z_][A-Za-z0-9_]*)")


class Word(str):
    """A word of a script: its value, and in `written` how it stands there."""

    written: str

    def __new__(cls, value: str, written: str | None = None) -> "Word":
        word = super().__new__(cls, value)
        word.written = shlex.quote(value) if written is None else written
        return word


def shell_words(text: str) -> list[Word]:
    """The words of a command, up to a comment. A quotation mark without a partner, whose other half stands before the text, is
    left out."""
    words: list[Word] = []
    value = written = ""
    for piece in _PIECE.finditer(text):
        if piece["space"]:
            words += [Word(value, written)] if written else []
            value = written = ""
        elif piece["plain"] and piece["plain"].startswith("#") and not written:
            break
        elif not piece["unpaired"]:
            written += piece[0]
            quoted = piece["double"] and re.sub(r'\\([\\"$`])', r"\1", piece["double"])
            value += quoted or piece["single"] or piece["shell"] or piece["escaped"] or piece["plain"] or ""
    return [*words, Word(value, written)] if written else words


def call_of(script: str) -> tuple[str, str] | None:
    """What stands before `grpo_fast.py` and behind it in the line of a script that calls it; None if there is no call."""
    text = re.sub(
        r"\\[ \t]*\n", " ", "\n".join(line for line in script.splitlines() if not line.lstrip().startswith("#"))
    )
    calls = [line.partition(PROGRAM) for line in text.splitlines() if PROGRAM in line]
    if not calls:
        return None
    before, _, behind = max(calls, key=lambda call: len(call[2]))
    return before, behind.rstrip().rstrip("\\")


def arguments_of(script: str) -> list[Word] | None:
    """The words after `grpo_fast.py` in a shell script; None if it calls no such program."""
    call = call_of(script)
    if call is None:
        return None
    kept: list[Word] = []
    for word in shell_words(call[1]):
        if word in _END:
            break
        kept.append(Word(word.removesuffix(";"), word.written.removesuffix(";")))
    return [word for word in kept if word not in ("$@", "${@}")]


def surroundings(script: str) -> list[str]:
    """What the launcher was told beside the command: environment and nodes; and the script's variables that the command needs."""
    call = call_of(script)
    if call is None:
        return []
    notes = []
    for name, values in options_in(shell_words(call[0])):
        value = values[0] if values else ""
        if name == "env":
            notes.append(f"in the environment: {value}")
        elif name == "secret":
            notes.append(f"in the environment: {value.partition('=')[0]}")
        elif name == "num_nodes" and value not in ("", "1"):
            notes.append(f"on {value} nodes: docs/multi_node.md says how")
    variables = dict.fromkeys(name for word in arguments_of(script) or () for name in _VARIABLE.findall(word.written))
    return [*notes, *([f"variables of the script: {', '.join(variables)}"] if variables else [])]


def options_in(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each option with its values. Dashes in names become underscores."""
    name = ""
    values: list[str] = []
    for word in words:
        if word.startswith("--"):
            if name:
                yield name, values
            name, equals, value = word[2:].partition("=")
            written = word.written.partition("=")[2] if isinstance(word, Word) else None
            name, values = name.replace("-", "_"), []
            if equals:
                values.append(Word(value, written))
        elif name:
            values.append(word)
    if name:
        yield name, values


def translated(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The words for this project, and by option as it was written what became of it or how it differs."""
    ours = {
        *option_kinds(GRPOConfig),
        *(f"no_{name}" for name, kind in option_kinds(GRPOConfig).items() if kind is bool),
    }
    result: list[str] = []
    notes: dict[str, str] = {}
    for written, given in options_in(words):
        longer = [one for one in ours if one.startswith(written)]
        name = longer[0] if written not in ours and len(longer) == 1 else written
        values = [OTHER_VALUES.get(name, {}).get(value, value) for value in given]
        if name in RENAMED:
            notes[written] = f"is {RENAMED[name]} here"
            name = RENAMED[name]
        if name in WITHOUT_EFFECT:
            notes[written] = f"left out: {WITHOUT_EFFECT[name]}"
        elif name in REFUSED:
            nothing = asks_for_nothing(name, " ".join(values))
            notes[written] = "left out: it asks for nothing" if nothing else f"NOT HERE: {REFUSED[name]}"
        elif name not in ours:
            notes[written] = "NOT KNOWN: neither here nor in open-instruct"
        elif values == ["None"] and given != ["None"]:
            notes[written] = f"left out: {given[0]} is not there in open-instruct either"
        else:
            result += [f"--{name}", *values]
            if name in DIFFERENT:
                notes[written] = DIFFERENT[name]
            if name == "tools" and (absent := [value for value in values if value in SERVICES]):
                notes[written] = "; ".join(f"NOT HERE: {value}: {SERVICES[value]}" for value in absent)
    return result, notes


def _quoted(word: str) -> str:
    """For a shell, with variables left alive: `${DATA}` may be several words."""
    return word.written if isinstance(word, Word) and "$" in word.written else shlex.quote(word)


def as_text(words: Sequence[str], notes: dict[str, str], around: Sequence[str] = ()) -> str:
    """The command, an option on each line, and the notes as comments of the shell."""
    lines = ["python open_instruct/grpo_fast.py"]
    for word in words:
        if word.startswith("--"):
            lines.append(f"    {word}")
        else:
            lines[-1] += f" {_quoted(word)}"
    told = [f"# --{name}: {note}" for name, note in notes.items()]
    named = {line.split()[0][2:] for line in lines[1:]}
    told += [f"# --{name}, which is not named: {DIFFERENT[name]}" for name in DEFAULTS if name not in named]
    told = [f"# {note}" for note in around] + told
    return " \\\n".join(lines) + "\n\n" + "\n".join(told) + "\n"


def main() -> int:
    script = sys.stdin.read()
    words = arguments_of(script)
    if words is None:
        print(f"no call of {PROGRAM} in this text. Give a launch script: translate < script.sh", file=sys.stderr)
        return 2
    print(as_text(*translated(words), surroundings(script)), end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
