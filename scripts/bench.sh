#!/usr/bin/env bash
# Benchmarks against a peer, or against a roof of this machine.
set -euo pipefail

usage() {
    cat <<'TEXT'
Usage: scripts/bench.sh BENCHMARK [OPTION...]

Each prints ratios against a peer, or against a roof of this machine, measured in the same run.

  model     1b models: our rpc-server, llama.cpp's own and llama.cpp alone in turn, with the same client: decode, prompt, load
  wire      messages: round trip, upload, download, what a server adds to a tiny model's token, several clients at once,
            an idle server
  pair      two builds of our rpc-server in turn, on what `model` and `wire` measure: --before BINARY
  ops       each op and type on shapes of a real model, beside what memory and vector units can do
  peer-ops  the same products on llama.cpp's CPU device
  floors    bytes and operations of each 1b model over the roofs that `ops --json` wrote

Each lists its options with --help; only `ops`, `peer-ops` and `floors` are built for it. All but `floors` write what they measured with --json FILE;
`model`, `wire` and `ops` only show that they work with --smoke.

  -h, --help  this text
TEXT
}

# Files are named from where the caller is.
words=("$@")
for ((i = 1; i < ${#words[@]}; i++)); do
    case ${words[i - 1]} in
    --json | --before | --binary | --ops | --models) [[ ${words[i]} == /* ]] || words[i]=$PWD/${words[i]} ;;
    esac
    case ${words[i]} in
    --*=/*) ;;
    --json=* | --before=* | --binary=* | --ops=* | --models=*) words[i]=${words[i]%%=*}=$PWD/${words[i]#*=} ;;
    esac
done
set -- ${words[@]+"${words[@]}"}
cd "$(dirname "${BASH_SOURCE[0]}")/.."
target=${CARGO_TARGET_DIR:-target}
mode=${1:-}
case $mode in
-h | --help)
    usage
    exit 0
    ;;
model | wire | pair)
    shift
    if [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; then
        exec "${PYTHON:-python3}" "scripts/bench/$mode.py" --help
    fi
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
    echo "bench.sh: ${mode:-no benchmark}" >&2
    usage >&2
    exit 2
    ;;
esac
