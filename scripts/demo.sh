#!/usr/bin/env bash
# Demo: creates a small language model and runs it on two servers; the worker of one of them is killed during the run.
set -euo pipefail

usage() {
    cat <<'TEXT'
Usage: scripts/demo.sh [-d DEVICES] [-s SIZE] [-a ARCH]

Creates a model with random weights, starts two servers, and runs examples/generate three times: on one CPU device, on the two
servers, and on the two servers while the worker process of one of them is killed, which its supervisor replaces. Fails unless
all three runs give the same tokens.

  -d DEVICES  devices of each server, as for --device of rpc-server (default CPU; with two GPUs try 0,1)
  -s SIZE     tiny (4 MB, the default) or 1b (4.4 GB)
  -a ARCH     llama (the default), qwen2, qwen3 or qwen3moe
  -h, --help  this text

FANOUT_BUILT: folder with programs that are already built; see scripts/emulate.sh --help.
Needs Rust and Python 3 with venv. The Python packages gguf and numpy are installed from PyPI into target/demo if they are
missing.
TEXT
}

devices=CPU size=tiny arch=llama
while (($#)); do
    case $1 in
        -d|-s|-a)
            (($# > 1)) || { echo "demo.sh: $1 needs a value" >&2; usage >&2; exit 2; }
            case $1 in
                -d) devices=$2 ;;
                -s) size=$2 ;;
                -a) arch=$2 ;;
            esac
            shift 2
            ;;
        -h|--help) usage; exit 0 ;;
        *) echo "demo.sh: unknown argument $1" >&2; usage >&2; exit 2 ;;
    esac
done

cd "$(dirname "${BASH_SOURCE[0]}")/.."
target=${CARGO_TARGET_DIR:-target}
folder=$target/demo
mkdir -p "$folder"

python=${PYTHON:-python3}
# Use the Python environment of the interop tests if it exists; it has the packages.
venv=${FANOUT_VENV:-.venv}
if [[ -x $venv/bin/python ]]; then
    python=$venv/bin/python
fi
if ! "$python" -c 'import gguf, numpy' 2>/dev/null; then
    [[ -x $folder/venv/bin/python ]] || "$python" -m venv "$folder/venv"
    python=$folder/venv/bin/python
    "$python" -c 'import gguf, numpy' 2>/dev/null || "$python" -m pip install --quiet gguf numpy
fi

model=$folder/$arch-$size-f32.gguf
[[ -f $model ]] || "$python" tests/interop/make_model.py --size "$size" --arch "$arch" --type f32 "$model"
built=${FANOUT_BUILT:-$target/release}
[[ ${FANOUT_BUILT-} ]] || cargo build --quiet --release --locked -p generate -p fanout --bin generate --bin rpc-server

scratch=$(mktemp -d)
servers=() run=
stop() {
    local pid
    for pid in "${servers[@]}" $run; do
        kill "$pid" 2>/dev/null || true
    done
    wait
    rm -rf "$scratch"
}
trap stop EXIT

# Waits up to 30 s until a file contains a line.
until_line() {
    local deadline=$((SECONDS + 30))
    until grep -q "$2" "$1" 2>/dev/null; do
        if ((SECONDS > deadline)); then
            echo "demo.sh: the server did not print '$2' within 30 s:" >&2
            cat "$1" >&2
            exit 1
        fi
        sleep 0.02
    done
}

# Starts server NUMBER on a free port and sets $address.
serve() {
    local log=$scratch/server-$1.log
    : >"$log"
    RUST_LOG=info "$built/rpc-server" -H 127.0.0.1 -p 0 -d "$devices" &>"$log" &
    servers[$1]=$!
    until_line "$log" 'listening on '
    address=$(sed -n 's/.*listening on \([^ ]*:[0-9]*\).*/\1/p' "$log" | head -n 1)
}

# The prompt is long enough for several micro-batches in flight.
prompt=$("$python" -c 'print(",".join(str(259 + 7919 * i % 200) for i in range(64)))')
count=400
[[ $size == tiny ]] || count=32
generate() {
    "$built/generate" "$model" --tokens "$prompt" -n "$count" --temp 0 --ignore-eos --json --ubatch 16 "$@"
}
field() {
    "$python" -c 'import json, sys; print(json.loads(sys.stdin.read().splitlines()[-1])[sys.argv[1]])' "$1"
}
# Prints the speed of a run; fails unless its tokens equal those of the first run.
check() {
    local tokens
    tokens=$(field tokens <<<"$1")
    : "${want:=$tokens}"
    echo "  $(cut -c 1-60 <<<"$tokens")..., $(field gen_tok_s <<<"$1") tokens/s"
    if [[ $tokens != "$want" ]]; then
        echo "demo.sh: the tokens differ: $tokens instead of $want" >&2
        exit 1
    fi
}

echo "one CPU device:"
check "$(generate --device CPU)"

serve 0; first=$address
serve 1; second=$address
echo "two servers, $first and $second:"
check "$(generate --rpc "$first,$second")"

echo "the same, with the worker of the second server killed during the run:"
generate --rpc "$first,$second" --retry --log-level debug >"$scratch/report" 2>"$scratch/log" &
run=$!
until_line "$scratch/log" "token $((count / 8)):"
kill -9 "$(pgrep -P "${servers[1]}")"
until_line "$scratch/server-1.log" 'supervisor: worker .* was killed by SIGKILL'
if ! wait "$run"; then
    cat "$scratch/log" >&2
    exit 1
fi
run=
grep '^generate: ' "$scratch/log" | sed 's/^/  /'
report=$(<"$scratch/report")
check "$report"
echo "the tokens are the same; recovery from the loss took $(field recovery_s <<<"$report") s"
