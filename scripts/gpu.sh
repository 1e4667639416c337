#!/usr/bin/env bash
# All checks and measurements that need a real GPU, in one call.
set -euo pipefail

usage() {
    cat <<'TEXT'
Usage: scripts/gpu.sh pack [FOLDER]
       scripts/gpu.sh run [FOLDER] [OPTION...]

  pack  on a machine with Rust: builds the server, kernel-bench and the op tests, and copies them with the scripts to FOLDER
        (default: target/gpu-kit)
  run   on a machine with a GPU, without Rust or network: runs the op tests, compute-sanitizer if installed, kernel-bench, and
        models end to end if a llama.cpp client for Python is installed; writes DATE-DEVICE.json and .md into bench/results.
        `run FOLDER --help` lists the options

FOLDER contains a copy of this script; after copying FOLDER to another machine, call FOLDER/scripts/gpu.sh run there.

  -h, --help  this text
TEXT
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
mode=${1:-}
case $mode in
    pack | run) ;;
    -h | --help) usage; exit 0 ;;
    *) echo "gpu.sh: expected pack or run" >&2; usage >&2; exit 2 ;;
esac
shift
if [[ $mode == pack && (${1:-} == -h || ${1:-} == --help) ]]; then
    usage
    exit 0
fi
folder=${CARGO_TARGET_DIR:-$root/target}/gpu-kit
# If this script is part of a kit, the kit is the default folder.
[[ -x $root/bin/kernel-bench ]] && folder=$root
if [[ ${1:-} && ${1:-} != -* ]]; then
    folder=$1
    shift
fi

if [[ $mode == pack ]] && (($#)); then
    echo "gpu.sh: unknown argument $1" >&2
    usage >&2
    exit 2
fi
if [[ $mode == run && (${1:-} == -h || ${1:-} == --help) ]]; then
    exec "${PYTHON:-python3}" "$(dirname "${BASH_SOURCE[0]}")/gpu.py" --help
fi
if [[ $mode == run ]]; then
    [[ -x $folder/bin/kernel-bench ]] || { echo "gpu.sh: $folder is not a kit: create one with scripts/gpu.sh pack" >&2; exit 1; }
    exec "${PYTHON:-python3}" "$folder/scripts/gpu.py" --kit "$folder" "$@"
fi

cd "$root"
mkdir -p "$folder/bin" "$folder/scripts" "$folder/interop"
built() { # EXECUTABLE-NAME CARGO-ARGUMENTS...: builds, and copies what has that name
    local name=$1 found
    shift
    found=$(cargo "$@" --locked --release --message-format=json-render-diagnostics |
        sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | grep -E "/$name(-[0-9a-f]+)?$" | tail -n 1)
    [[ -x $found ]] || { echo "gpu.sh: cargo $* did not create $name" >&2; exit 1; }
    cp -f "$found" "$folder/bin/$name"
    strip -S "$folder/bin/$name" 2>/dev/null || true
}
built rpc-server build --bin rpc-server
built kernel-bench build -p fanout-bench --bin kernel-bench
built ops test --test ops --no-run
cp -f scripts/gpu.sh scripts/gpu.py "$folder/scripts/"
cp -f tests/interop/{llama_client,make_model,archs}.py scripts/type_table.py src/tensor/table.rs "$folder/interop/"
du -sh "$folder"
