#!/usr/bin/env bash
# Interoperability tests with llama.cpp.
set -euo pipefail

usage() {
    cat <<'TEXT'
Usage: scripts/interop.sh [generate] [OPTION...]
       scripts/interop.sh starts|conformance|backend-ops|archs|chat-templates|vocabularies [OPTION...]

Runs llama.cpp's clients on our rpc-server and compares their results with llama.cpp's local CPU. The client is compiled first
if necessary (scripts/venv.sh --help).

  generate     runs examples/generate instead, and compares its tokens with llama.cpp's
  starts       clients start one after the other on servers with default options, which must learn the clients' version
  conformance  thousands of small graphs, each on our server and on ggml's CPU backend
  backend-ops  ggml's own tests of the ops, about 14,000 cases, on our server; not part of CI
  archs        llama.cpp's own test of all architectures on our server; not part of CI
  chat-templates  the chat templates in llama.cpp's sources, rendered by examples/generate and by jinja2; not part of CI
  vocabularies  the vocabulary files in llama.cpp's sources: token ids of examples/generate and of llama.cpp; not part of CI

  --versions   also real clients of protocols 5.0, 4.0.2 and 4.0.1 on a selection of the rows, each in an environment of its
               own (not with generate)
  --full       also models of 1b parameters (created once in models/)
  --only TEXT  only rows whose name contains the text
  --peer       use llama.cpp's server instead of ours, to distinguish our errors from errors of the test (not with generate)
  -h, --help   this text

The last six modes have options of their own: scripts/interop.sh MODE --help. The tests of backend-ops and archs are compiled
from the source archive of llama-cpp-python, which pip fetches (77 MB, once), against the client's libraries: a minute each. The
templates and vocabularies are in the same archive.

FANOUT_BUILT: folder with programs that are already built; see scripts/emulate.sh --help.
FANOUT_SERVER: an rpc-server that is already built, for all modes but `generate`.
TEXT
}

mode=interop
case ${1-} in
    generate | starts | conformance | backend-ops | archs | chat-templates | vocabularies)
        mode=$1
        shift
        ;;
esac
options=()
versions=
if [[ $mode == starts || $mode == conformance || $mode == backend-ops || $mode == archs || $mode == chat-templates || $mode == vocabularies ]]; then
    cd "$(dirname "${BASH_SOURCE[0]}")/.."
    python=$(scripts/venv.sh)
    [[ $mode != chat-templates && $mode != vocabularies ]] || exec "$python" "tests/interop/test_${mode//-/_}.py" "$@"
    target=${CARGO_TARGET_DIR:-target}
    [[ ${FANOUT_SERVER-} || ${1-} == -h || ${1-} == --help ]] || cargo build --release --locked --bin rpc-server
    exec "$python" "tests/interop/test_${mode//-/_}.py" --binary "${FANOUT_SERVER:-$target/release/rpc-server}" "$@"
fi
while (($#)); do
    case $1 in
        --full) options+=("$1") ;;
        --versions)
            [[ $mode == interop ]] || { echo "interop.sh: generate does not support --versions" >&2; usage >&2; exit 2; }
            versions=1
            ;;
        --peer)
            [[ $mode == interop ]] || { echo "interop.sh: generate does not support --peer" >&2; usage >&2; exit 2; }
            options+=("$1")
            ;;
        --only)
            (($# > 1)) || { echo "interop.sh: --only needs a text" >&2; usage >&2; exit 2; }
            options+=("$1" "$2")
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
    [[ ${FANOUT_SERVER-} ]] || cargo build --release --locked --bin rpc-server
    test=(tests/interop/test_interop.py --binary "${FANOUT_SERVER:-$target/release/rpc-server}" "${options[@]}")
    [[ $versions ]] || exec "$python" "${test[@]}"
    "$python" "${test[@]}"
    # The version of the protocol, and of llama-cpp-python.
    for pair in 5.0=0.3.35 4.0.2=0.3.34 4.0.1=0.3.33; do
        echo "protocol ${pair%=*}"
        "$(scripts/venv.sh "${pair#*=}")" "${test[@]}" --protocol "${pair%=*}"
    done
    exit
fi
built=${FANOUT_BUILT:-$target/release}
[[ ${FANOUT_BUILT-} ]] || cargo build --release --locked -p generate -p fanout --bin generate --bin rpc-server
exec "$python" tests/interop/test_generate.py --binary "$built/generate" --server "$built/rpc-server" "${options[@]}"
