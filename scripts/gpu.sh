#!/usr/bin/env bash
# All checks and measurements that need a real GPU, in one call.
set -euo pipefail

usage() {
    cat <<'TEXT'
Usage: scripts/gpu.sh pack [FOLDER]
       scripts/gpu.sh run [FOLDER] [OPTION...]

  pack  on a machine with Rust: builds the server, kernel-bench, gpu-probes, the op tests and the tests of the CUDA device,
        and copies them with the scripts to FOLDER (default: target/gpu-kit); at most 64 MiB
  run   on a machine with a GPU, without Rust or network: times the layers of models, runs the sweep over all kernels, the op
        tests, kernel-bench, gpu-probes, compute-sanitizer if installed, and models end to end if a llama.cpp client for
        Python is installed; writes DATE-DEVICE.json and .md into bench/results. All parts take less than 27 minutes;
        `--parts LIST` runs some of them, each in less than 9 minutes. `run --help` lists the options

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
[[ -f $root/bin/kernel-bench.xz ]] && folder=$root
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
    [[ -f $folder/bin/kernel-bench.xz ]] || { echo "gpu.sh: $folder is not a kit: create one with scripts/gpu.sh pack" >&2; exit 1; }
    exec "${PYTHON:-python3}" "$folder/scripts/gpu.py" --kit "$folder" "$@"
fi

cd "$root"
rm -rf "$folder/bin"
mkdir -p "$folder/bin" "$folder/scripts" "$folder/interop"
built() { # EXECUTABLE-NAME CARGO-ARGUMENTS...: builds, and packs what has that name without its symbols
    local name=$1 found
    shift
    found=$(cargo "$@" --locked --release --message-format=json-render-diagnostics |
        sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | grep -E "/$name(-[0-9a-f]+)?$" | tail -n 1)
    [[ -x $found ]] || { echo "gpu.sh: cargo $* did not create $name" >&2; exit 1; }
    strip -o "$folder/bin/$name" "$found" 2>/dev/null || cp -f "$found" "$folder/bin/$name"
    xz -f "$folder/bin/$name"
}
built rpc-server build --bin rpc-server
built kernel-bench build -p fanout-bench --bin kernel-bench
built gpu-probes build -p fanout-bench --bin gpu-probes
built ops test --test ops --no-run
built cuda test --test cuda --no-run
cp -f scripts/gpu.sh scripts/gpu.py scripts/nvidia_smi.py "$folder/scripts/"
cp -f tests/interop/{llama_client,make_model,archs}.py scripts/type_table.py src/tensor/table.rs "$folder/interop/"
du -sh "$folder"
kib=$(du -sk "$folder" | cut -f 1)
((kib <= 64 << 10)) || { echo "gpu.sh: the kit has $kib KiB, more than 64 MiB" >&2; exit 1; }
