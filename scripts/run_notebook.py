"""Runs a notebook from its first cell to its last and writes a copy with what the cells gave: `run_notebook.sh` sets up for it.

    bash scripts/run_notebook.sh NOTEBOOK OUT

Git holds the notebook without outputs: they would be of one machine and of an earlier state of the code, and every run would
change them. An error in any cell, or a cell that takes longer than `CELL_TIMEOUT_S`, ends this program with that error.
"""

import argparse
from pathlib import Path
from typing import Any

CELL_TIMEOUT_S = 480


def main() -> None:
    import nbclient  # in .venv-notebook alone
    import nbformat

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebook", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    notebook: Any = nbformat.read(args.notebook, as_version=4)
    directory = args.notebook.resolve().parent
    nbclient.NotebookClient(notebook, timeout=CELL_TIMEOUT_S, resources={"metadata": {"path": directory}}).execute()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, args.out)


if __name__ == "__main__":
    main()
