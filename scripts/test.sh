#!/usr/bin/env bash
# The tests: those that a change must pass first, or all steps that CI runs.
set -euo pipefail

usage() {
    cat <<'TEXT'
Usage: scripts/test.sh [STEP...]

Without a step, builds and runs in at most 10 minutes on two cores: unit tests of the crate and of rpc-server, the tests ops, rpc,
sched and library, and a model on the emulated GPU, which loads the kernels of every family. Needs Rust and a C compiler, and no
network except crates.io.

  all     the following steps
  lint    formatting and clippy, with warnings as errors; the fuzz targets too; format and lock file of interop8
  build   compiles the tests
  run     runs the tests; runs each benchmark once, to check that it works; runs the concurrent core in some thousand orders of its threads
  doc     builds the documentation, with warnings as errors

  -h, --help  this text
TEXT
}

steps=()
while (($#)); do
    case $1 in
        all) steps=(lint build run doc) ;;
        lint|build|run|doc) steps+=("$1") ;;
        -h|--help) usage; exit 0 ;;
        *) echo "test.sh: unknown argument $1" >&2; usage >&2; exit 2 ;;
    esac
    shift
done
((${#steps[@]})) || steps=(first)
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

# What a change must pass first. A profile and a selection of its own, so that neither the optimised emulator nor the crates of the
# examples are compiled.
first() {
    local quick=(cargo test --locked --profile quick -p fanout)
    log=$(mktemp)
    trap 'rm -f "$log"' EXIT
    step "${quick[@]}" --lib --bins --test ops --test rpc --test sched --test library --test cuda --no-run
    {
        step "${quick[@]}" --lib --bins --test ops --test rpc --test sched --test library
        step "${quick[@]}" --test cuda -- a_model_has_the_same_logits
    } | tee "$log"
    grep -q 'a_model_has_the_same_logits.* ok$' "$log" || { echo "test.sh: no model ran on the emulated GPU" >&2; exit 1; }
    printf '\n%d tests passed in %d s: the crate, rpc-server, ops, rpc, sched, library, a model on the emulated GPU. The rest: scripts/test.sh all.\n' \
        "$(awk '/^test result: ok/ { passed += $4 } END { print passed }' "$log")" "$SECONDS"
}

for name in "${steps[@]}"; do
    case $name in
        first) first ;;
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
            step cargo build --locked --workspace --bin orders
            step "${CARGO_TARGET_DIR:-target}/debug/orders"
            ;;
        doc) RUSTDOCFLAGS="-D warnings" step cargo doc --locked --workspace --no-deps ;;
    esac
done
