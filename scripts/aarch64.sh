#!/usr/bin/env bash
# Compiles the crate for AArch64 and runs the tests of its vector kernels on an emulated processor.
set -euo pipefail

usage() {
    cat <<'TEXT'
Usage: scripts/aarch64.sh [lint|test [FILTER...]]

  lint    clippy for AArch64, with warnings as errors
  test    the unit tests whose names contain a FILTER [default: cpu::simd cpu::panel cpu::ops::math], on an emulated
          processor that has NEON, `dotprod` and `i8mm`

Without an argument, runs both. Needs rustup's target aarch64-unknown-linux-gnu, and Debian's packages gcc-aarch64-linux-gnu and
qemu-user.

  -h, --help  this text
TEXT
}

mode=${1-}
case $mode in
    '') ;;
    test)
        shift
        case ${1-} in
            -h|--help) usage; exit 0 ;;
            -*) echo "aarch64.sh: test takes filters, not the option $1" >&2; usage >&2; exit 2 ;;
        esac
        ;;
    lint)
        shift
        (($# == 0)) || { echo "aarch64.sh: lint takes no arguments" >&2; usage >&2; exit 2; }
        ;;
    -h|--help) usage; exit 0 ;;
    *) echo "aarch64.sh: unknown argument $1" >&2; usage >&2; exit 2 ;;
esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."

target=aarch64-unknown-linux-gnu
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -cpu max -L /usr/aarch64-linux-gnu"

if [[ $mode != test ]]; then
    cargo clippy --locked -p fanout --lib --bins --target "$target" -- -D warnings
fi
if [[ $mode != lint ]]; then
    if (($# == 0)); then set -- cpu::simd cpu::panel cpu::ops::math; fi
    # cargo succeeds if no test matches the filters, so check that at least one test ran.
    output=$(mktemp)
    trap 'rm -f "$output"' EXIT
    # The vector kernels need no feature. The unit tests do not link the emulated GPU, but cargo compiles it: unoptimised, which
    # takes a tenth of the time.
    cargo test --locked -p fanout --lib --no-default-features --target "$target" --config 'profile.dev.package.cudaemu.opt-level=0' -- "$@" | tee "$output"
    grep -Eq '^test result: ok\. [1-9]' "$output" || { echo "aarch64.sh: no test name contains: $*" >&2; exit 1; }
fi
