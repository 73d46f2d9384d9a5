#!/usr/bin/env bash
# One command, started on every node: the nodes join into a Ray cluster, the head runs the command on it, and when that ends
# nothing of the cluster is left anywhere. docs/guides/multi_node.md says how to start it under Slurm, on Beaker and in a shell.
#
#   bash scripts/train/ray_node_setup.sh python open_instruct/grpo_fast.py --num_learners_per_node 4 4 …
#
# PYTHON is the interpreter with Ray in it; the other variables are described in ray_node_setup.py.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
# exec: SIGTERM of the scheduler shall reach Python.
exec "${PYTHON:-python}" "$ROOT/scripts/train/ray_node_setup.py" "$@"
