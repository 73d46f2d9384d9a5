#!/usr/bin/env bash
# Makes `.venv-peers`: TRL, verl and Liger, with which tests/peers compares this project's algorithms. They see the packages of
# `.venv`, which is made first, and `.venv` does not see them. Starts at once when done before.
#
#   bash scripts/setup_peers.sh
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PEERS="$ROOT/.venv-peers"
PEER_PINS="$ROOT/scripts/requirements-peers.txt"
bash "$ROOT/scripts/setup_cpu.sh"
# shellcheck source=scripts/setup.sh
source "$ROOT/scripts/setup.sh"

peers_fingerprint() { cat "$PEER_PINS" "$VENV/.setup-done" | sha256sum; }
is_made() { [[ -f "$PEERS/.setup-done" && "$(peers_fingerprint)" == "$(cat "$PEERS/.setup-done")" ]]; }

is_made && exit
exec 8<"$PEER_PINS"
flock 8
is_made && exit
rm -rf "$PEERS"
"$VENV/bin/python" -m venv --without-pip "$PEERS"
"$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$("$PEERS/bin/python" -c \
    'import sysconfig; print(sysconfig.get_path("purelib"))')/stack.pth"
"$VENV/bin/python" -m pip --python "$PEERS/bin/python" install --quiet --disable-pip-version-check --no-deps -r "$PEER_PINS" ||
    die "could not install $(basename "$PEER_PINS"); see above. Are the package registries in reach?"
peers_fingerprint >"$PEERS/.setup-done"
