#!/usr/bin/env bash
# Everything that needs no network beyond crates.io and no Python: formatting, lints, tests, docs.
set -euo pipefail
cd "$(dirname "$0")/.."

step() { printf '\n== %s\n' "$*"; "$@"; }

step cargo fmt --all --check
step cargo clippy --locked --workspace --all-targets -- -D warnings
step cargo test --locked
step cargo test --locked --bench ops
# The emulator executes too slowly without optimisation.
step cargo test --locked --release -p cudaemu
step cargo test --locked --release -p cudaemu --bench matvec -- --test
RUSTDOCFLAGS="-D warnings" step cargo doc --locked --workspace --no-deps
