#!/usr/bin/env bash
# Benchmarks; each prints ratios against a peer, or against a roof of this machine, measured in the same run.
#   scripts/bench.sh model [options]     1b models: our rpc-server, llama.cpp's own and llama.cpp alone in turn, with the same
#                                        client: decode, prompt, load
#   scripts/bench.sh wire [options]      messages: round trip, upload, download, what a server adds to a tiny model's token,
#                                        several clients at once, an idle server
#   scripts/bench.sh ops [options]       each op and type on shapes of a real model, beside what memory and vector units
#                                        can do
#   scripts/bench.sh peer-ops [options]  the same products on llama.cpp's CPU device
#   scripts/bench.sh floors [options]    bytes and operations of each 1b model over the roofs that `ops --json` wrote
# Each lists its options with --help. All but `floors` write what they measured with --json FILE; `model`, `wire` and `ops`
# only show that they work with --smoke.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
target=${CARGO_TARGET_DIR:-target}
mode=${1:-}
case $mode in
model | wire)
    shift
    python=$(scripts/venv.sh)
    cargo build --release --bin rpc-server
    exec "$python" "scripts/bench/$mode.py" --binary "$target/release/rpc-server" "$@"
    ;;
ops)
    shift
    exec cargo bench -p fanout-bench --bench ops -- "$@"
    ;;
peer-ops | floors)
    shift
    python=$(scripts/venv.sh)
    exec "$python" "scripts/bench/${mode/-/_}.py" "$@"
    ;;
*)
    sed -n '2,13s/^# \{0,1\}//p' scripts/bench.sh >&2
    exit 2
    ;;
esac
