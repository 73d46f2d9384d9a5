#!/usr/bin/env bash
# Makes `.venv` with the pinned stack for NVIDIA GPUs and this package in it. First checks what an install cannot bring
# along (driver, compiler, headers, room) and says, all at once, what is missing and where it comes from.
#
#   bash scripts/setup_gpu.sh
#   bash scripts/setup_gpu.sh --check      check only
#   PYTHON=/path/to/python3.12 bash scripts/setup_gpu.sh
#   GPU_CHECKS=off bash scripts/setup_gpu.sh    on a login node, for machines that have what this one lacks
set -euo pipefail

SCRIPTS="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
case "${1:-}" in
    "") exec bash "$SCRIPTS/setup.sh" gpu ;;
    --check) ;;
    *) echo "setup: no such option: $1; there is --check" >&2; exit 2 ;;
esac
source "$SCRIPTS/setup.sh"
choose_stack gpu
python="$(find_python)"
check_gpu_machine "$python"
say "this machine has what the stack for GPUs needs"
