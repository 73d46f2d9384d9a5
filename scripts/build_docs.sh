#!/usr/bin/env bash
# Builds the documents as a site and ends with an error where a link leads nowhere. Makes `.venv-docs` first (seconds, once).
#
#   bash scripts/build_docs.sh            into site/
#   bash scripts/build_docs.sh DIRECTORY
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
DOCS_VENV="$ROOT/.venv-docs"
DOCS_PINS="$ROOT/scripts/requirements-docs.txt"
bash "$ROOT/scripts/setup_cpu.sh"

make_docs_venv() {
    local python="$ROOT/.venv/bin/python"
    rm -rf "$DOCS_VENV"
    "$python" -m venv --without-pip "$DOCS_VENV"
    "$python" -m pip --python "$DOCS_VENV/bin/python" install --quiet --disable-pip-version-check --no-deps -r "$DOCS_PINS"
    cp "$DOCS_PINS" "$DOCS_VENV/.setup-done"
}

exec 9<"$DOCS_PINS"
flock 9
cmp --silent "$DOCS_PINS" "$DOCS_VENV/.setup-done" || make_docs_venv
"$DOCS_VENV/bin/sphinx-build" --quiet --fail-on-warning --keep-going --nitpicky "$ROOT/docs" "${1:-$ROOT/site}"
