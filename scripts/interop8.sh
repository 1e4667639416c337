#!/usr/bin/env bash
# Interoperability tests with llama.cpp 8.0.1.
set -euo pipefail

usage() {
    cat <<'TEXT'
Usage: scripts/interop8.sh [speed|starts] [OPTION...]
       scripts/interop8.sh build

Runs clients of llama.cpp 8.0.1 on our rpc-server and compares their logits with llama.cpp's local CPU. Compiles llama.cpp first
if necessary (tests/interop8/README.md); `build` does nothing else. Only `starts` is part of CI.

With `speed`: decoding speed of a tensor split (1b, q4_0) over two of our servers and over two of llama.cpp's, in paired rounds.
Options: --model FILE, --rounds N, --tokens N, --threads N, --no-collectives (the client adds the servers' results itself).

With `starts`: clients start one after the other on servers with default options, as users start llama-server; none may abort.
Options: --only TEXT, --starts N.

  --only TEXT  only rows whose name contains the text
  --peer       use llama.cpp's server instead of ours, to distinguish our errors from errors of the test
  --threads N  threads of each client and server (default 1: more spin, which costs much on a busy machine)
  -h, --help   this text

FANOUT_LLAMA8_TARGET  cargo's target folder for llama.cpp (default: interop8 or interop8-dev in cargo's target folder); keep it:
                      compiling takes about 10 CPU minutes, CMake, a C++ compiler and libclang
FANOUT_LLAMA8_PROFILE release (default), or dev: compiles llama.cpp without optimisation, in about 5 CPU minutes, for `starts`
FANOUT_SERVER         our server (default: rpc-server is built, optimised)
FANOUT_PYTHON         interpreter with numpy and gguf, and for the row with a client of 7.0 also llama_cpp (default: the one of
                      scripts/venv.sh, which has all of them)
TEXT
}

mode=table
case ${1-} in
    speed | starts | build)
        mode=$1
        shift
        ;;
esac
profile=${FANOUT_LLAMA8_PROFILE:-release}
[[ $profile == release || $profile == dev ]] || { echo "interop8.sh: there is no profile $profile" >&2; usage >&2; exit 2; }
options=()
peer=false
while (($#)); do
    case $1 in
        -h|--help) usage; exit 0 ;;
        --*)
            case $mode$1 in
                table--peer|speed--no-collectives) [[ $1 != --peer ]] || peer=true; options+=("$1") ;;
                table--only|starts--only|starts--starts|table--threads|speed--model|speed--rounds|speed--tokens|speed--threads)
                    (($# > 1)) || { echo "interop8.sh: $1 needs a value" >&2; usage >&2; exit 2; }
                    value=$2
                    [[ $1 != --model ]] || value=$(realpath -m "$value")
                    options+=("$1" "$value")
                    shift
                    ;;
                *) echo "interop8.sh: $1 is no option of $mode" >&2; usage >&2; exit 2 ;;
            esac
            ;;
        *) echo "interop8.sh: unknown argument $1" >&2; usage >&2; exit 2 ;;
    esac
    shift
done

# Paths in variables are relative to the folder from which the script is called.
llama8=${FANOUT_LLAMA8_TARGET:+$(realpath -m "$FANOUT_LLAMA8_TARGET")}
server=${FANOUT_SERVER:+$(realpath "$FANOUT_SERVER")}
python=${FANOUT_PYTHON:-}
[[ $python != */* ]] || python=$(realpath -s "$python") # not resolved: the environment is found by the link's folder
cd "$(dirname "${BASH_SOURCE[0]}")/.."
target=${CARGO_TARGET_DIR:-target}
# The crate's build reuses CMake's configuration whatever the profile is, so each profile has a folder of its own.
[[ $profile == release ]] && default=$target/interop8 || default=$target/interop8-dev
llama8=${llama8:-$default}
settings=(env "CMAKE_TOOLCHAIN_FILE=$PWD/tests/interop8/toolchain.cmake")
# CMake adds no options of its own for a build type that it does not know: no optimisation and no debug information.
[[ $profile == release ]] || settings+=(LLAMA_LIB_PROFILE=None CFLAGS=-DNDEBUG CXXFLAGS=-DNDEBUG)
"${settings[@]}" cargo build --profile "$profile" --locked --manifest-path tests/interop8/Cargo.toml --target-dir "$llama8"
[[ $mode != build ]] || exit 0
[[ $python ]] || python=$(scripts/venv.sh)
if [[ ! $server ]] && ! $peer; then
    cargo build --release --locked --bin rpc-server
fi
server=${server:-$target/release/rpc-server}
exec env PYTHONDONTWRITEBYTECODE=1 "$python" "tests/interop8/$mode.py" --llama8 "$llama8/${profile/dev/debug}" --server "$server" "${options[@]}"
