#!/usr/bin/env bash
# Sets up and runs the tests; arguments go to pytest.
#
#   bash scripts/test.sh                      the core suite, in two lanes side by side (TEST_LANES=1: in one)
#   bash scripts/test.sh -m "extended and not slow"   faults, placement and entry points on real parts: what CI runs after the core
#   bash scripts/test.sh -m slow              kill tests and learning checks, minutes each
#   bash scripts/test.sh tests/test_x.py -x   one file
#
# Without a -m of the caller's, tests marked extended, slow or gpu are left out. An expression with "not alone" runs in two lanes.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
bash "$ROOT/scripts/setup_cpu.sh"

# Two lanes, each with a /dev/shm of its own, for which root is needed. One lane has the engines that tests share.
[ "$(id -u)" = 0 ] && [ "$(env -u OMP_NUM_THREADS nproc)" -gt 1 ] && most=2 || most=1
TEST_LANES="${TEST_LANES:-$most}"
marks=(-m "not extended and not slow and not gpu")
lanes=()
[ "$TEST_LANES" = 1 ] || lanes=(-n "$TEST_LANES" --dist loadscope --no-loadscope-reorder)
for argument in "$@"; do
    case "$argument" in
        -m | -m?* | --markexpr | --markexpr=*) marks=() ;;
        *"not alone"*) ;;
        *slow* | *gpu* | *.py | *.py::* | -k | -k?*) lanes=() ;;
    esac
done

# One thread per process: several that share two cores with two threads each are slower than with one.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"
cd "$ROOT"
# Every process of a run imports the package; where PYTHONDONTWRITEBYTECODE is set each of them would compile it.
"$ROOT/.venv/bin/python" -m compileall -q open_instruct tests
exec "$ROOT/.venv/bin/python" -m pytest ${marks[@]+"${marks[@]}"} ${lanes[@]+"${lanes[@]}"} "$@"
