#!/usr/bin/env bash
# llama.cpp against ours.
set -euo pipefail

usage() {
    cat <<'TEXT'
Usage: scripts/interop.sh [generate] [OPTION...]

llama.cpp's clients on our rpc-server; with `generate`, examples/generate beside llama.cpp.

  --full       also models of 1b parameters (made into models/ once)
  --only TEXT  only rows whose name contains the text
  --peer       llama.cpp's own server instead of ours: is it us or the test? (not with generate)
  -h, --help   this text

FANOUT_BUILT names a folder with programs that are built already: scripts/emulate.sh --help.
TEXT
}

mode=interop
if [[ ${1-} == generate ]]; then
    mode=generate
    shift
fi
options=("$@")
while (($#)); do
    case $1 in
        --full) ;;
        --peer) [[ $mode == interop ]] || { echo "interop.sh: generate has no --peer" >&2; usage >&2; exit 2; } ;;
        --only)
            (($# > 1)) || { echo "interop.sh: --only wants a text" >&2; usage >&2; exit 2; }
            shift
            ;;
        -h|--help) usage; exit 0 ;;
        *) echo "interop.sh: unknown argument $1" >&2; usage >&2; exit 2 ;;
    esac
    shift
done

cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$(scripts/venv.sh)
scripts/emulate.sh true # builds the emulated GPU
target=${CARGO_TARGET_DIR:-target}
if [[ $mode == interop ]]; then
    cargo build --release --locked --bin rpc-server
    exec "$python" tests/interop/test_interop.py --binary "$target/release/rpc-server" "${options[@]}"
fi
built=${FANOUT_BUILT:-$target/release}
[[ ${FANOUT_BUILT-} ]] || cargo build --release --locked -p generate -p fanout --bin generate --bin rpc-server
exec "$python" tests/interop/test_generate.py --binary "$built/generate" --server "$built/rpc-server" "${options[@]}"
