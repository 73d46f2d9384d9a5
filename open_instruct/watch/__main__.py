"""Look at a run, while it goes on or when it has ended, from its record.

    python -m open_instruct.watch out/mine                              # a page in the browser
    python -m open_instruct.watch out/mine --follow                     # the same in the terminal
    python -m open_instruct.watch out/mine --json why train-17          # a view as JSON, for programs; --json help lists them
    python -m open_instruct.watch out/mine --json step 40 --worst 3
    python -m open_instruct.watch out/mine --export run.html            # the page as one file that needs no server

It reads the files of the run, writes none of them, and needs neither Ray nor vLLM.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from open_instruct.system.command_output import exit_code_of
from open_instruct.watch.json_text import to_text
from open_instruct.watch.mistakes import Mistake
from open_instruct.watch.runs import Runs
from open_instruct.watch.views import VIEWS, View, answer, view_of

SHORTCUTS = ("best", "worst", "longest", "shortest", "random")
"""`--worst 3` stands for `--sort worst --limit 3`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Show runs. Returns the exit code: 0, or 2 for what the user can correct."""
    options = _parser().parse_args(argv)
    try:
        if options.json is not None and options.json[:1] in (["help"], ["--help"], ["-h"]):
            print(help_of_views(options.json[1:]))
            return 0
        return _show(options, Runs(options.directories))
    except Mistake as mistake:
        print(f"watch: {mistake}", file=sys.stderr)
        return 2


def _show(options: argparse.Namespace, runs: Runs) -> int:
    if options.json is not None:
        name, values = read_words(options.json)
        print(to_text(answer(runs, name, values)))
        return 0
    if options.follow:
        from open_instruct.watch.terminal import follow

        return follow(runs)
    if options.export is not None:
        from open_instruct.watch.export import export

        if (number := len(runs.refresh())) > 1:
            raise Mistake(f"--export writes the page of one run, and {number} are given. Give the directory of one.")
        return export(runs, options.export)
    from open_instruct.watch.server import serve

    return serve(runs, host=options.host, port=options.port)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "open_instruct.watch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "directories", nargs="+", type=Path, help="a run's output_dir, or a folder that holds such directories"
    )
    parser.add_argument("--follow", action="store_true", help="show the run in the terminal until Ctrl-C")
    parser.add_argument("--export", type=Path, metavar="FILE", help="write the page of the run as one HTML file")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address that the page is served at; by default only this machine"
    )
    parser.add_argument("--port", type=int, default=0, help="port of the page; by default one that is free")
    parser.add_argument(
        "--json",
        nargs=argparse.REMAINDER,
        metavar="VIEW",
        help="a view and its arguments, behind all other options: `--json why train-17`; `--json help` lists them",
    )
    return parser


def read_words(words: Sequence[str]) -> tuple[str, dict[str, str]]:
    """The name of a view, and its arguments as text. Raises `Mistake` if they do not fit."""
    name, *rest = words or ["runs"]
    view = view_of(name)
    free = [argument.name for argument in view.arguments if argument.is_positional]
    lists = {argument.name for argument in view.arguments if argument.kind is list}
    texts = {argument.name for argument in view.arguments if argument.kind is str}
    values: dict[str, str] = {}
    current = ""
    for word in rest:
        if word.startswith("--"):
            flag, _, value = word[2:].partition("=")
            current = flag.replace("-", "_")
            values[current] = value
        elif current and (not values[current] or current in lists | texts):
            # Words behind a text or a list belong to it: `row train.jsonl line 7`, `--names reward entropy`.
            values[current] += f"{',' if current in lists else ' '}{word}" if values[current] else word
        elif free:
            argument = free.pop(0)
            values[argument] = word
            current = argument if not free and argument in texts else ""
        else:
            raise Mistake(f"{word!r} is one word too many: {view.usage}")
    return name, _without_shortcuts(view, values)


def _without_shortcuts(view: View, values: dict[str, str]) -> dict[str, str]:
    if all(argument.name != "sort" for argument in view.arguments):
        return values
    orders = [name for name in values if name in (*SHORTCUTS, "sort")]
    if len(orders) > 1:
        raise Mistake(f"--{orders[0]} and --{orders[1]} are two orders. Give one of: {', '.join(SHORTCUTS)}, sort.")
    for sort in [name for name in orders if name in SHORTCUTS]:
        values |= {"sort": sort, "limit": values.pop(sort) or "1"}
    return values


def help_of_views(names: Sequence[str] = ()) -> str:
    """The views, each with its arguments and what it shows; by default all. Raises `Mistake` if there is no such view."""
    views = [view_of(name) for name in names] or VIEWS.values()
    return "\n\n".join(f"{view.usage}\n    {view.help}" for view in views)


if __name__ == "__main__":
    raise SystemExit(exit_code_of(main))
