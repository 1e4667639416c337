#!/usr/bin/env bash
# Compiles the crate for AArch64, with warnings as errors, and runs the tests of its vector kernels on an emulated processor that
# has NEON, `dotprod` and `i8mm`.
#   scripts/aarch64.sh [filters]    tests whose names contain one of these [default: cpu::simd cpu::strip cpu::ops::math]
# Needs rustup's target aarch64-unknown-linux-gnu, and Debian's packages gcc-aarch64-linux-gnu and qemu-user.
set -euo pipefail
cd "$(dirname "$0")/.."

target=aarch64-unknown-linux-gnu
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -cpu max -L /usr/aarch64-linux-gnu"
if (($# == 0)); then set -- cpu::simd cpu::strip cpu::ops::math; fi

cargo clippy --locked -p fanout --lib --bins --target "$target" -- -D warnings
cargo test --locked -p fanout --lib --target "$target" -- "$@"
