#!/usr/bin/env bash
# What to run first on a machine with one GPU and half an hour: from "does it import" to training a real model, each step with
# its own limit. Prints a table with figures and packs logs and metrics into gpu_check.tar.gz. Without a GPU it runs the same
# list on CPU, in the GPU's layout.
#
#   bash scripts/gpu_check.sh                       everything; set-up (about 6 minutes, once) comes before
#   bash scripts/gpu_check.sh --list                the steps
#   bash scripts/gpu_check.sh --only first_run      some of them
#   bash scripts/gpu_check.sh --output_dir out/x --limit_min 60
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
if [[ -z "${PYTHON:-}" ]]; then
    if command -v nvidia-smi >/dev/null; then bash "$ROOT/scripts/setup_gpu.sh"; else bash "$ROOT/scripts/setup_cpu.sh"; fi
    PYTHON="$ROOT/.venv/bin/python"
fi
exec "$PYTHON" "$ROOT/scripts/gpu_check.py" "$@"
