#!/usr/bin/env bash
# Everything that needs no network beyond crates.io and no Python: formatting, lints, tests, docs.
set -euo pipefail
cd "$(dirname "$0")/.."

step() { printf '\n== %s\n' "$*"; "$@"; }

step cargo fmt --all --check
step cargo clippy --locked --workspace --all-targets -- -D warnings
# The emulator is optimised in this profile too (Cargo.toml): one build of it serves its own tests and those of CUDA.
step cargo test --locked --workspace
step cargo test --locked -p fanout-bench --bench ops
step cargo test --locked -p cudaemu --bench matvec -- --test
RUSTDOCFLAGS="-D warnings" step cargo doc --locked --workspace --no-deps
