#!/usr/bin/env bash
# Everything that needs no network beyond crates.io and no Python: formatting, lints, tests, docs.
set -euo pipefail
cd "$(dirname "$0")/.."

step() { printf '\n== %s\n' "$*"; "$@"; }

step cargo fmt --check
step cargo clippy --locked --all-targets -- -D warnings
step cargo test --locked
step cargo test --locked --bench ops
RUSTDOCFLAGS="-D warnings" step cargo doc --locked --no-deps
