#!/usr/bin/env bash
# Real llama.cpp clients against the release rpc-server: scripts/interop.sh [--full] [--only TEXT] [--peer]
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$(scripts/venv.sh)
cargo build --release --bin rpc-server
scripts/emulate.sh true # builds the emulated GPU
target=${CARGO_TARGET_DIR:-target}
exec "$python" tests/interop/test_interop.py --binary "$target/release/rpc-server" "$@"
