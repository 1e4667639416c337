#!/usr/bin/env bash
# Benchmarks against llama.cpp, or against the roofline of this machine.
set -euo pipefail

usage() {
    cat <<'TEXT'
Usage: scripts/bench.sh BENCHMARK [OPTION...]

Each benchmark prints ratios to llama.cpp, or to the roofline of this machine (peak bandwidth and arithmetic). Both sides are
measured in the same run.

  model     1b models: decode, prompt, load. On our rpc-server, llama.cpp's server and local llama.cpp, with the same client;
            and in process, `generate` beside llama.cpp's library, with the memory's bandwidth. --only servers|in-process
  wire      messages: round trip, upload, download, time that a server adds to a tiny model's token, several clients at once,
            an idle server
  pair      two builds of our rpc-server alternately, with the measurements of `model` and `wire`: --before BINARY
  tls       decode of a 1b model over TLS and without it, at two addresses of one server, with `generate`
  plan      the placement that `generate --auto` chooses beside fixed ones, on two servers behind slow links
  replay    recorded sessions of llama.cpp's clients of 7.0 and 8.0 on our rpc-server: round trips, bytes and the server's CPU
            time per token; --rounds N (default 5)
  ops       each op and type on shapes of a real model, compared with the peaks of memory and vector units
  peer-ops  the same matrix products and ops on images on llama.cpp's CPU device
  floors    minimum time per token of each 1b model: its bytes and operations divided by the peaks that `ops --json` wrote

Each lists its options with --help (`ops`, `peer-ops` and `floors` are built first). All but `floors` write their measurements
with --json FILE. With --smoke, `model`, `wire` and `ops` only check that they work.

FANOUT_BUILT: folder of a `generate` that is already built, not necessarily optimised, for `model --smoke`.
FANOUT_SERVER: an rpc-server that is already built, for `model --smoke`, `wire` and `pair`.

  -h, --help  this text
TEXT
}

# File names are relative to the caller's folder.
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
# Builds the benchmark `ops` by a cargo command, and prints its path, which only cargo's messages contain.
ops_program() { # CARGO-OPTIONS...
    cargo "$@" --bench ops --message-format=json-render-diagnostics | sed -n 's/.*"name":"ops".*"executable":"\([^"]*\)".*/\1/p'
}

cd "$(dirname "${BASH_SOURCE[0]}")/.."
target=${CARGO_TARGET_DIR:-target}
mode=${1:-}
case $mode in
-h | --help)
    usage
    exit 0
    ;;
model | wire | pair | tls | plan)
    shift
    if [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; then
        exec "${PYTHON:-python3}" "scripts/bench/$mode.py" --help
    fi
    python=$(scripts/venv.sh)
    if [[ $mode == tls || $mode == plan ]]; then
        cargo build --release -p fanout -p generate --bin rpc-server --bin generate
        exec "$python" "scripts/bench/$mode.py" --built "$target/release" "$@"
    fi
    if [[ $mode == model ]]; then
        if [[ ${FANOUT_BUILT-} && " $* " == *" --smoke "* ]]; then
            # The programs of the tests. The selection of packages is theirs too, else cargo would compile the crate again.
            [[ ${FANOUT_SERVER-} ]] || cargo build --release --bin rpc-server
            generate=$FANOUT_BUILT/generate
            ops=$(ops_program test --locked --workspace --no-run)
        else
            unset FANOUT_SERVER # the programs of one build
            generate=$target/release/generate
            ops=$(ops_program build --release -p fanout -p generate -p fanout-bench --bin rpc-server --bin generate)
        fi
        exec "$python" scripts/bench/model.py --binary "${FANOUT_SERVER:-$target/release/rpc-server}" --generate-program "$generate" \
            --ops-program "$ops" "$@"
    fi
    [[ ${FANOUT_SERVER-} ]] || cargo build --release --bin rpc-server
    exec "$python" "scripts/bench/$mode.py" --binary "${FANOUT_SERVER:-$target/release/rpc-server}" "$@"
    ;;
replay)
    shift
    case "$#:${1:-}" in
    0:) ;;
    2:--rounds)
        [[ $2 =~ ^[1-9][0-9]*$ ]] || { echo "bench.sh: --rounds needs a number above 0, got '$2'" >&2; exit 2; }
        ;;
    1:-h | 1:--help)
        usage
        exit 0
        ;;
    *)
        echo "bench.sh: replay has no options but --rounds N" >&2
        usage >&2
        exit 2
        ;;
    esac
    exec cargo bench -p fanout --bench replay -- "$@"
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
    echo "bench.sh: unknown benchmark: ${mode:-none given}" >&2
    usage >&2
    exit 2
    ;;
esac
