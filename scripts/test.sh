#!/usr/bin/env bash
# All checks that need no Python, and no network except crates.io: formatting, lints, tests, docs.
set -euo pipefail

usage() {
    cat <<'TEXT'
Usage: scripts/test.sh [STEP...]

Runs all of these steps, or only the named ones:

  lint    formatting and clippy, with warnings as errors; the fuzz targets too; format and lock file of interop8
  build   compiles the tests
  run     runs the tests; runs each benchmark once, to check that it works
  doc     builds the documentation, with warnings as errors

  -h, --help  this text
TEXT
}

steps=()
while (($#)); do
    case $1 in
        lint|build|run|doc) steps+=("$1") ;;
        -h|--help) usage; exit 0 ;;
        *) echo "test.sh: unknown argument $1" >&2; usage >&2; exit 2 ;;
    esac
    shift
done
((${#steps[@]})) || steps=(lint build run doc)
cd "$(dirname "${BASH_SOURCE[0]}")/.."

step() { printf '\n== %s\n' "$*"; "$@"; }

# The emulated GPU is optimised in the development profile too (Cargo.toml), which takes minutes, so it must be built only once.
# Each command selects the whole workspace, because another selection gives dependencies other features and rebuilds the
# emulator. Its unit tests are a separate build with little optimisation and many units; otherwise it would take longer than the
# emulator itself.
unit=(-p cudaemu --lib --config 'profile.dev.package.cudaemu.opt-level=1' --config 'profile.dev.package.cudaemu.codegen-units=16')
tests() { # CARGO-TEST-OPTIONS...
    step cargo test --locked --workspace "$@"
    step cargo test --locked "${unit[@]}" "$@"
}

for name in "${steps[@]}"; do
    case $name in
        lint)
            step cargo fmt --all --check
            step cargo clippy --locked --workspace --all-targets -- -D warnings
            # The fuzz targets; only running them requires a nightly compiler.
            fuzz=(--manifest-path fuzz/Cargo.toml)
            step cargo fmt "${fuzz[@]}" --check
            step cargo clippy --locked "${fuzz[@]}" --target-dir "${CARGO_TARGET_DIR:-target}" -- -D warnings
            # interop8: no clippy, because the build script of its dependency compiles llama.cpp. The second command fails if
            # the lock file does not match the manifest.
            interop8=(--manifest-path tests/interop8/Cargo.toml)
            step cargo fmt "${interop8[@]}" --check
            step cargo update --workspace --locked "${interop8[@]}"
            ;;
        build) tests --no-run ;;
        run)
            tests
            step cargo test --locked --workspace --bench ops --bench small_graphs
            step cargo test --locked --workspace --bench matvec -- --test
            ;;
        doc) RUSTDOCFLAGS="-D warnings" step cargo doc --locked --workspace --no-deps ;;
    esac
done
