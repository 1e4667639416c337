#!/usr/bin/env bash
# llama.cpp against ours: scripts/interop.sh [--full] [--only TEXT] [--peer]     its clients on our rpc-server
#                         scripts/interop.sh generate [--full] [--only TEXT]     examples/generate beside it
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$(scripts/venv.sh)
scripts/emulate.sh true # builds the emulated GPU
target=${CARGO_TARGET_DIR:-target}
if [[ ${1-} == generate ]]; then
    cargo build --release --locked -p generate -p fanout --bin generate --bin rpc-server
    exec "$python" tests/interop/test_generate.py --binary "$target/release/generate" "${@:2}"
fi
cargo build --release --locked --bin rpc-server
exec "$python" tests/interop/test_interop.py --binary "$target/release/rpc-server" "$@"
