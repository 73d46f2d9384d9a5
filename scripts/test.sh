#!/usr/bin/env bash
# Sets up and runs the tests; arguments go to pytest.
#
#   bash scripts/test.sh                      the core suite (TEST_LANES=2: two files at a time)
#   bash scripts/test.sh -m slow              kill tests and learning checks, minutes each
#   bash scripts/test.sh tests/test_x.py -x   one file
#
# Without a -m of the caller's, tests marked slow or gpu are left out.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
bash "$ROOT/scripts/setup_cpu.sh"

marks=(-m "not slow and not gpu")
# Two lanes, each a file at a time with a /dev/shm of its own (root is needed for that). They save a sixth of the time on two
# cores, which are busy then: limits of tests that wait for others are easier to miss.
lanes=()
TEST_LANES="${TEST_LANES:-1}"
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
# Every process of a run imports the package; where PYTHONDONTWRITEBYTECODE is set each of them would compile it.
"$ROOT/.venv/bin/python" -m compileall -q open_instruct tests
exec "$ROOT/.venv/bin/python" -m pytest ${marks[@]+"${marks[@]}"} ${lanes[@]+"${lanes[@]}"} "$@"
