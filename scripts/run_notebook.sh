#!/usr/bin/env bash
# Runs a notebook from its first cell to its last and writes a copy with what the cells gave. Makes `.venv-notebook` first
# (seconds, once).
#
#   bash scripts/run_notebook.sh                                   examples/first_run.ipynb, into out/first_run.ipynb
#   bash scripts/run_notebook.sh examples/first_run.ipynb OUT.ipynb
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
NOTEBOOK_VENV="$ROOT/.venv-notebook"
NOTEBOOK_PINS="$ROOT/scripts/requirements-notebook.txt"
bash "$ROOT/scripts/setup_cpu.sh"

# Its Python sees the packages of .venv too, which a notebook imports.
make_notebook_venv() {
    local python="$ROOT/.venv/bin/python" packages
    rm -rf "$NOTEBOOK_VENV"
    "$python" -m venv --without-pip "$NOTEBOOK_VENV"
    "$python" -m pip --python "$NOTEBOOK_VENV/bin/python" install --quiet --disable-pip-version-check --no-deps -r "$NOTEBOOK_PINS"
    packages="$("$NOTEBOOK_VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    "$python" -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' >"$packages/venv.pth"
    cp "$NOTEBOOK_PINS" "$NOTEBOOK_VENV/.setup-done"
}

exec 9<"$NOTEBOOK_PINS"
flock 9
cmp --silent "$NOTEBOOK_PINS" "$NOTEBOOK_VENV/.setup-done" || make_notebook_venv
flock --unlock 9

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"
exec "$NOTEBOOK_VENV/bin/python" "$ROOT/scripts/run_notebook.py" "${1:-$ROOT/examples/first_run.ipynb}" "${2:-$ROOT/out/first_run.ipynb}"
