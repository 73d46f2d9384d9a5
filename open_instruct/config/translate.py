"""The command line of this project for a launch script of open-instruct, and what differs.

    python -m open_instruct.config.translate < scripts/train/my_run.sh

Variables of the shell stay as they are written. What has no effect here is left out, what has another name gets it, and what asks
for something that is not here is named. Exit code 0, or 2 if the text holds no call of grpo_fast.py.
"""

import re
import shlex
import sys
from collections.abc import Iterator, Sequence

from open_instruct.config.foreign_options import OTHER_VALUES, REFUSED, RENAMED, WITHOUT_EFFECT, asks_for_nothing
from open_instruct.config.options import GRPOConfig
from open_instruct.registry import option_kinds

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
    "mask_truncated_completions": "such responses count in the baseline of their group; there they are removed first",
    "num_mini_batches": "divides samples, each is trained on once; there packed rows are divided and the rest is dropped",
    "output_dir": "files lie in it as it is; there <exp>__<seed>__<time> is appended",
    "rho_mask_sequence_level": "per response; --rho_as_in_open_instruct takes a packed row, as there",
    "rho_mask_tv_divergence": "half the mean of |rho - 1| over a response; --rho_as_in_open_instruct is as there",
    "run_name": "kept; there it is overwritten",
    "save_traces": "writes open-instruct's rollouts (a file per step) to rollouts_save_path, by default rollouts/ in output_dir; "
    "also samples/, in a format that dataset_mixer_list reads",
    "system_prompt_override_file": "the file's text as it is; there white space around it is removed",
    "use_rho_correction": "by default only where samples may be stale; there always",
    "vllm_enable_prefix_caching": "the cache is emptied with each new version of the weights",
    "weight_decay": "holds for all weights; there biases and norms are spared",
}
"""Options of both projects that do not mean the same in both, and how they differ."""
DEFAULTS = ("async_steps", "gradient_checkpointing", "use_rho_correction")
"""Those whose default differs: they are told even where a script does not name them."""
_END = ("&&", "||", ";", "|", "&", ">", "2>&1", "\\&\\&")


def arguments_of(script: str) -> list[str] | None:
    """The words after `grpo_fast.py` in a shell script; None if it calls no such program."""
    text = re.sub(
        r"\\[ \t]*\n", " ", "\n".join(line for line in script.splitlines() if not line.lstrip().startswith("#"))
    )
    calls = [line.partition(PROGRAM)[2] for line in text.splitlines() if PROGRAM in line]
    if not calls:
        return None
    call = max(calls, key=len).rstrip().rstrip("\\")
    try:
        words = shlex.split(call, comments=True)
    except ValueError:  # the end of a quotation that began before the program's name
        words = shlex.split(call.rstrip().rstrip("'\""), comments=True)
    return _up_to_end(words)


def _up_to_end(words: Sequence[str]) -> list[str]:
    kept = []
    for word in words:
        if word in _END:
            break
        kept.append(word.removesuffix(";"))
    return [word for word in kept if word not in ('"$@"', "$@", "${@}")]


def options_in(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each option with its values. Dashes in names become underscores."""
    name, values = "", []
    for word in words:
        if word.startswith("--"):
            if name:
                yield name, values
            name, equals, value = word[2:].partition("=")
            name, values = name.replace("-", "_"), [value] if equals else []
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
    return result, notes


def _quoted(word: str) -> str:
    """For a shell, with variables left alive."""
    if "$" in word:
        return '"' + word.replace('"', '\\"') + '"'
    return shlex.quote(word)


def as_text(words: Sequence[str], notes: dict[str, str]) -> str:
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
    return " \\\n".join(lines) + "\n\n" + "\n".join(told) + "\n"


def main() -> int:
    words = arguments_of(sys.stdin.read())
    if words is None:
        print(f"no call of {PROGRAM} in this text. Give a launch script: translate < script.sh", file=sys.stderr)
        return 2
    print(as_text(*translated(words)), end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
