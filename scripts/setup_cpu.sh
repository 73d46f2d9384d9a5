#!/usr/bin/env bash
# Makes `.venv` with the pinned CPU stack and this package in it. Needs Python 3.11 and pip; starts at once when done before.
#
#   bash scripts/setup_cpu.sh
#
# PYTHON names the interpreter to build from (default: python3.11, else python3 if that is 3.11).
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"
DONE="$VENV/.setup-done"       # what was set up; written last
RUNNING="$VENV/.setup-running" # there while a set-up runs, and after one that was interrupted
TORCH_CPU_INDEX="https://download.pytorch.org/whl/cpu"

say() { echo "setup: $*" >&2; }
die() { say "$*"; exit 1; }

# The marker: where, with which Python (an environment does not survive a change of either), from what.
fingerprint() {
    echo "$ROOT"
    "$VENV/bin/python" -V
    cat "$ROOT/requirements-cpu.txt" "$ROOT/pyproject.toml" "$ROOT/scripts/setup_cpu.sh" | sha256sum
}
is_done() { [[ -f "$DONE" && ! -e "$RUNNING" ]] && [[ "$(fingerprint 2>/dev/null)" == "$(cat "$DONE")" ]]; }

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3 python; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    die "needs Python 3.11; found neither python3.11 nor a python3 of that version. Install it, or name it:" \
        "PYTHON=/path/to/python3.11 bash scripts/setup_cpu.sh"
}

# An environment is kept and brought up to date, unless it is broken, half made or made for another place.
is_usable() {
    [[ ! -e "$RUNNING" ]] || return 1
    "$VENV/bin/python" -c 'import pip, sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null || return 1
    [[ ! -f "$DONE" ]] || [[ "$(fingerprint | head -2)" == "$(head -2 "$DONE")" ]]
}

make_venv() {
    is_usable && return
    [[ ! -L "$VENV" ]] || die "$VENV is a link to an environment that was made for another place; it would be lost. Remove the link."
    local python
    python="$(find_python)"
    say "making $VENV with $("$python" -V)"
    "$python" -m venv --clear --without-pip "$VENV" && touch "$RUNNING" && "$VENV/bin/python" -m ensurepip >/dev/null ||
        die "$python cannot make virtual environments. On Debian and Ubuntu: apt install python3.11-venv"
}

# uv installs in half of pip's time. It comes from the pins like everything else; without it pip does the same.
bootstrap_uv() {
    local pin
    pin="$(grep -E '^uv==' "$ROOT/requirements-cpu.txt")"
    "$VENV/bin/python" -m pip install --quiet --no-deps --disable-pip-version-check "$pin" || {
        say "no uv to be had; going on with pip, which takes longer"
        return 1
    }
}

uv_install() {
    local flags
    mapfile -t flags < <("$VENV/bin/python" "$ROOT/scripts/uv_flags.py")
    # pip's rule: whichever index has the pinned version will do.
    UV_HTTP_TIMEOUT="${UV_HTTP_TIMEOUT:-180}" "$VENV/bin/uv" pip install --python "$VENV/bin/python" --no-config \
        --index-strategy unsafe-best-match --compile-bytecode --no-deps ${flags[@]+"${flags[@]}"} "$@"
}
pip_install() { "$VENV/bin/python" -m pip install --disable-pip-version-check --no-deps "$@"; }

install_all() {
    local install=uv_install pins="$ROOT/requirements-cpu.txt"
    if ! bootstrap_uv; then
        install=pip_install
        grep -vE '^uv==' "$pins" >"$VENV/requirements-without-uv.txt"
        pins="$VENV/requirements-without-uv.txt"
    fi
    say "installing the pinned stack (a minute or two)"
    # PyTorch's CPU builds are not on PyPI: first as this machine is configured, then from PyTorch's own index.
    "$install" -r "$pins" || {
        say "trying PyTorch's CPU wheel index"
        "$install" --extra-index-url "$TORCH_CPU_INDEX" -r "$pins"
    } || die "could not install requirements-cpu.txt; see above. Are the package registries in reach?"
    "$install" --no-build-isolation --editable "$ROOT"
}

main() {
    is_done && return
    exec 9<"$ROOT"
    flock --nonblock 9 || { say "waiting for another set-up of this tree"; flock 9; }
    is_done && return
    local start=$SECONDS
    make_venv
    rm -f "$DONE"
    touch "$RUNNING"
    install_all
    fingerprint >"$DONE.new"
    mv "$DONE.new" "$DONE"
    rm "$RUNNING"
    say "done in $((SECONDS - start)) s"
}

main
