#!/usr/bin/env bash
# Runs a slow check, unless it has already passed with exactly these inputs.
set -euo pipefail

usage() {
    cat <<'TEXT'
Usage: scripts/verified.sh [--renew|--hash] CHECK

Runs CHECK unless the hash of all its inputs is the one in .ci/verified/CHECK, which was recorded when it passed.

  aarch64  the tests of the vector kernels on an emulated AArch64 processor (scripts/aarch64.sh test)
  roofline whether the emulator's counts of the kernels are those in bench/roofline/counts.json (scripts/roofline.sh --check-counts)
  ptx      whether the committed PTX matches its sources, and whether four releases of ptxas accept it without spills

  --renew     always run the check and, if it passes, record the hash in .ci/verified/CHECK (commit that file)
  --hash      print the hash of the current inputs
  -h, --help  this text
TEXT
}

renew=false only_hash=false check=
while (($#)); do
    case $1 in
        --renew) renew=true ;;
        --hash) only_hash=true ;;
        aarch64|ptx|roofline) check=$1 ;;
        -h|--help) usage; exit 0 ;;
        *) echo "verified.sh: unknown argument $1" >&2; usage >&2; exit 2 ;;
    esac
    shift
done
[[ $check ]] || { echo "verified.sh: no check named" >&2; usage >&2; exit 2; }
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The inputs: files, and folders with all files that git tracks or would add. tests/layout compares the lists with the code and with the
# scripts. The AArch64 tests are those of the vector kernels, which use no other module of the crate.
aarch64=(src/cpu/simd src/cpu/panel.rs src/cpu/ops/math.rs src/tensor Cargo.lock Cargo.toml scripts/aarch64.sh scripts/verified.sh)
ptx=(kernels crates/cudaemu/kernels src/tensor/table.rs src/tensor/quant/grids.rs scripts/build-ptx.sh scripts/build_ptx.py scripts/type_table.py scripts/verified.sh)
# Of the device, only the code that chooses kernels, grids and fusions. The other scripts compute figures from the counts.
roofline=(kernels/ptx src/cuda/columns.rs src/cuda/ops src/cuda/private_results.rs src/cuda/program_builder.rs src/graph/fuse src/graph/fuse.rs src/tensor/table.rs bench/cases bench/roofline-counts.rs bench/roofline/counts.json crates/cudaemu/src scripts/roofline.sh scripts/roofline.py scripts/emulate.sh scripts/verified.sh)

# Versions of the tools that the repository does not pin. build_ptx.py pins those of NVRTC and ptxas.
tools() {
    case $check in
        aarch64)
            rustc -vV
            aarch64-linux-gnu-gcc -dumpfullversion 2>/dev/null || echo "no gcc"
            { qemu-aarch64 --version 2>/dev/null || echo "no qemu"; } | head -n 1
            ;;
        ptx | roofline) ;;
    esac
}

hash() {
    local -n inputs=$check
    local input
    for input in "${inputs[@]}"; do
        [[ -e $input ]] || { echo "verified.sh: $input, an input of $check, does not exist" >&2; return 1; }
    done
    {
        tools
        git ls-files -z --cached --others --exclude-standard -- "${inputs[@]}" | sort -zu | while IFS= read -r -d '' file; do
            if [[ -f $file ]]; then sha256sum "$file"; fi
        done
    } | sha256sum | cut -d' ' -f1
}

run() {
    case $check in
        aarch64) scripts/aarch64.sh test ;;
        roofline) scripts/roofline.sh --check-counts ;;
        ptx)
            scripts/build-ptx.sh --check
            scripts/build-ptx.sh --check --all-ptxas --no-spills kernels
            ;;
    esac
}

now=$(hash)
if $only_hash; then
    echo "$now"
    exit 0
fi
record=.ci/verified/$check
if ! $renew && [[ -f $record && $(<"$record") == "$now" ]]; then
    echo "$check: passed before with these inputs ($record)"
    exit 0
fi
run
# If the inputs changed while the check ran, its result does not apply to them.
[[ $(hash) == "$now" ]] || { echo "verified.sh: the inputs of $check changed while it ran" >&2; exit 1; }
if $renew; then
    mkdir -p .ci/verified
    echo "$now" >"$record"
    echo "$check: passed; commit $record"
elif [[ ! -f $record ]]; then
    echo "$check: passed; no hash is recorded yet: run scripts/verified.sh --renew $check"
else
    echo "$check: passed, but the inputs or tools differ from those in $record: run scripts/verified.sh --renew $check"
fi
