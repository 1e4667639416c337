#!/usr/bin/env bash
# A language model made on the spot, run over two servers of which one is killed on the way: scripts/demo.sh [-d DEVICES] [-s SIZE]
set -euo pipefail

usage() {
    cat <<'TEXT'
Usage: scripts/demo.sh [-d DEVICES] [-s SIZE] [-a ARCH]

Makes a model with random weights, starts two servers, and lets examples/generate go on from a prompt: on one CPU device,
over the two servers, and once more while one of the two is killed and started again. Fails unless all give the same tokens.

  -d DEVICES  of each server, as for --device of rpc-server (default CPU; with two GPUs try 0,1)
  -s SIZE     tiny (4 MB, the default) or 1b (4.4 GB)
  -a ARCH     llama (the default), qwen2, qwen3 or qwen3moe
  -h, --help  this text

FANOUT_BUILT names a folder with programs that are built already: scripts/emulate.sh --help.
Needs Rust and Python 3; the Python packages gguf and numpy are installed into target/demo where they are missing.
TEXT
}

devices=CPU size=tiny arch=llama
while (($#)); do
    case $1 in
        -d|-s|-a)
            (($# > 1)) || { echo "demo.sh: $1 wants a value" >&2; usage >&2; exit 2; }
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
# The environment of the interop tests has the packages.
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

# Waits, for up to 30 s, until a file has a line.
until_line() {
    local deadline=$((SECONDS + 30))
    until grep -q "$2" "$1" 2>/dev/null; do
        if ((SECONDS > deadline)); then
            echo "demo.sh: no '$2' in 30 s:" >&2
            cat "$1" >&2
            exit 1
        fi
        sleep 0.02
    done
}

# Starts server NUMBER on PORT, 0 for any; its address is in $address.
serve() {
    local log=$scratch/server-$1.log
    : >"$log"
    RUST_LOG=info "$built/rpc-server" -H 127.0.0.1 -p "$2" -d "$devices" &>"$log" &
    servers[$1]=$!
    until_line "$log" 'listening on '
    address=$(sed -n 's/.*listening on \([^ ]*:[0-9]*\).*/\1/p' "$log" | head -n 1)
}

# The prompt is long enough for several micro-batches under way at once.
prompt=$("$python" -c 'print(",".join(str(259 + 7919 * i % 200) for i in range(64)))')
count=400
[[ $size == tiny ]] || count=32
generate() {
    "$built/generate" "$model" --tokens "$prompt" -n "$count" --temp 0 --ignore-eos --json --ubatch 16 "$@"
}
field() {
    "$python" -c 'import json, sys; print(json.loads(sys.stdin.read().splitlines()[-1])[sys.argv[1]])' "$1"
}
# Shows a run's speed; fails unless its tokens are those of the first.
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

serve 0 0; first=$address
serve 1 0; second=$address
echo "two servers, $first and $second:"
check "$(generate --rpc "$first,$second")"

echo "the same, and the second is killed on the way:"
generate --rpc "$first,$second" --retry --log-level debug >"$scratch/report" 2>"$scratch/log" &
run=$!
until_line "$scratch/log" "token $((count / 8)):"
kill -9 "${servers[1]}"
wait "${servers[1]}" 2>/dev/null || true
until_line "$scratch/log" 'connection lost'
serve 1 "${second##*:}"
if ! wait "$run"; then
    cat "$scratch/log" >&2
    exit 1
fi
run=
grep '^generate: ' "$scratch/log" | sed 's/^/  /'
report=$(<"$scratch/report")
check "$report"
echo "the same tokens; the loss took $(field recovery_s <<<"$report") s"
