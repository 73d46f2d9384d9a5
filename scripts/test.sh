#!/usr/bin/env bash
# Sets up and runs the tests; arguments go to pytest.
#
#   bash scripts/test.sh                      the core suite, two files at a time (TEST_LANES=1: one)
#   bash scripts/test.sh -m slow              kill tests and learning checks, minutes each
#   bash scripts/test.sh tests/test_x.py -x   one file
#
# Without a -m of the caller's, tests marked slow or gpu are left out.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
bash "$ROOT/scripts/setup_cpu.sh"

marks=(-m "not slow and not gpu")
# Two lanes, each a file at a time with a /dev/shm of its own, where the machine has two cores and lets us give them one.
lanes=()
if [ -z "${TEST_LANES:-}" ]; then
    TEST_LANES=1
    [ "$(nproc)" -lt 2 ] || ! unshare --mount mount -t tmpfs tmpfs /dev/shm 2>/dev/null || TEST_LANES=2
fi
[ "$TEST_LANES" = 1 ] || lanes=(-n "$TEST_LANES" --dist loadfile --no-loadscope-reorder)
for argument in "$@"; do
    case "$argument" in
        -m | -m?* | --markexpr | --markexpr=*) marks=() lanes=() ;;
        *.py | *.py::*) lanes=() ;;
    esac
done

# One thread per process: several that share two cores with two threads each are slower than with one.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"
cd "$ROOT"
exec "$ROOT/.venv/bin/python" -m pytest ${marks[@]+"${marks[@]}"} ${lanes[@]+"${lanes[@]}"} "$@"
