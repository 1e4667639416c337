#!/usr/bin/env bash
# Benchmarks; each prints ratios against a peer measured in the same run.
#   scripts/bench.sh model [options]   1b models: our rpc-server and llama.cpp's own in turn, with the same client
# `scripts/bench.sh model --help` lists the options.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
mode=${1:-}
case $mode in
model)
    shift
    python=$(scripts/venv.sh)
    cargo build --release --bin rpc-server
    target=${CARGO_TARGET_DIR:-target}
    exec "$python" scripts/bench/model.py --binary "$target/release/rpc-server" "$@"
    ;;
*)
    sed -n '2,4s/^# \{0,1\}//p' scripts/bench.sh >&2
    exit 2
    ;;
esac
