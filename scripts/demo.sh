#!/usr/bin/env bash
# A language model made on the spot, run over two devices and checked against one: scripts/demo.sh [-d DEVICES] [-s SIZE]
set -euo pipefail

usage() {
    cat <<'TEXT'
Usage: scripts/demo.sh [-d DEVICES] [-s SIZE] [-a ARCH]

Makes a model with random weights, lets examples/generate go on from a prompt on one CPU device and on DEVICES, and fails
unless both give the same tokens.

  -d DEVICES  as for --device of generate (default CPU,CPU; with two GPUs try 0,1)
  -s SIZE     tiny (4 MB, the default) or 1b (4.4 GB)
  -a ARCH     llama (the default), qwen2, qwen3 or qwen3moe
  -h          this text

Needs Rust and Python 3; the Python packages gguf and numpy are installed into target/demo where they are missing.
TEXT
}

devices=CPU,CPU size=tiny arch=llama
while (($#)); do
    case $1 in
        -d) devices=${2-}; shift 2 ;;
        -s) size=${2-}; shift 2 ;;
        -a) arch=${2-}; shift 2 ;;
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
cargo build --quiet --release --locked -p generate

# The prompt is long enough for several micro-batches under way at once.
prompt=$("$python" -c 'print(",".join(str(259 + 7919 * i % 200) for i in range(64)))')
run() {
    "$target/release/generate" "$model" --tokens "$prompt" -n 16 --temp 0 --ignore-eos --json --device "$1" "${@:2}"
}
field() {
    "$python" -c 'import json, sys; print(json.loads(sys.stdin.read().splitlines()[-1])[sys.argv[1]])' "$1"
}

echo "one device (CPU):"
one=$(run CPU)
echo "  tokens $(field tokens <<<"$one")"
echo "$devices, four micro-batches at a time:"
two=$(run "$devices" --ubatch 16 --depth 4)
echo "  tokens $(field tokens <<<"$two")"
if [[ $(field tokens <<<"$one") != "$(field tokens <<<"$two")" ]]; then
    echo "demo.sh: the tokens differ" >&2
    exit 1
fi
echo "the same tokens"
