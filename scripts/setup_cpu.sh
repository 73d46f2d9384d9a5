#!/usr/bin/env bash
# Makes `.venv` with the pinned CPU stack and this package in it. Needs pip and one of Python 3.11, 3.12 and 3.13 (fetched
# where there is none); starts at once when done before. A `.venv` that setup_gpu.sh made stays what it is.
#
#   bash scripts/setup_cpu.sh
#   PYTHON=/path/to/python3.12 bash scripts/setup_cpu.sh
set -euo pipefail

exec bash "$(dirname "${BASH_SOURCE[0]}")/setup.sh" cpu
