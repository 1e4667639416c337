#!/usr/bin/env bash
# Checks the crate with each feature alone, and without features.
set -euo pipefail

usage() {
    cat <<'TEXT'
Usage: scripts/features.sh [--counts]

Builds the crate `fanout` without features and with each feature of Cargo.toml alone (cuda, server, client, safetensors, cli). Checks that
  - `cargo tree` lists no crate of a disabled feature,
  - clippy accepts every target, with warnings as errors, for each feature that code depends on,
  - without features, the unit tests of code that depends on features (cuda, registry) pass. `cargo test` in scripts/test.sh runs
    all tests with all features.
The default enables all features; scripts/test.sh checks it.

  --counts    only print the number of crates that each combination links
  -h, --help  this text

Builds share cargo's target folder; `fanout` is built unoptimised.
TEXT
}

counts=false
while (($#)); do
    case $1 in
        --counts) counts=true ;;
        -h|--help) usage; exit 0 ;;
        *) echo "features.sh: unknown option $1" >&2; usage >&2; exit 2 ;;
    esac
    shift
done

cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The features, and for each optional dependency the features that enable it: `,server,client`.
combinations=("")
declare -A owners=()
while IFS='=' read -r name list; do
    name=${name// /}
    [[ $name == default ]] && continue
    combinations+=("$name")
    for dependency in $(grep -o 'dep:[a-z0-9_-]*' <<<"$list"); do
        owners[${dependency#dep:}]+=,$name
    done
done < <(sed -n '/^\[features\]/,/^\[/{/^[a-z0-9_-]* = \[/p}' Cargo.toml)
((${#combinations[@]} > 4 && ${#owners[@]} > 4)) || { echo "features.sh: cannot read the features of Cargo.toml" >&2; exit 1; }

crates() { # FEATURES: the crates that a build for this machine links, besides fanout
    cargo tree --locked -p fanout -e normal --no-default-features --features "$1" --prefix none |
        sed -n 's/^\([^ ]* v[^ ]*\).*/\1/p' | grep -v '^fanout ' | sort -u
}

if $counts; then
    for features in "${combinations[@]}" server,client cuda,server,client cuda,server,client,cli; do
        printf '%-24s %s\n' "${features:-none}" "$(crates "$features" | wc -l)"
    done
    exit
fi

# Build fanout, and the emulator that its tests link, unoptimised, because the tests here are short. Other dependencies are
# shared with all other builds.
plain=(--config 'profile.dev.package.fanout.opt-level=0' --config 'profile.dev.package.cudaemu.opt-level=0')

for features in "${combinations[@]}"; do
    printf '\n== features: %s\n' "${features:-none}"
    linked=$(crates "$features")
    for crate in "${!owners[@]}"; do
        [[ -n $features && ${owners[$crate]}, == *,$features,* ]] && continue
        # Not checked: clap also depends on this crate, to query the width of the terminal.
        [[ $features == cli && $crate == rustix ]] && continue
        # Not checked: most crates for Unix depend on this crate.
        [[ $crate == libc ]] && continue
        if grep -q "^$crate v" <<<"$linked"; then
            echo "features.sh: '$features' links $crate, which only the features ${owners[$crate]#,} may link" >&2
            exit 1
        fi
    done
    # A feature that no code names adds only dependencies: clippy would check again what it checks without features.
    [[ -z $features ]] || grep -rqF "feature = \"$features\"" src tests || continue
    select=(--locked -p fanout --no-default-features --features "$features")
    cargo clippy "${plain[@]}" "${select[@]}" --all-targets -- -D warnings
    # Building the tests takes longer than clippy, and with one feature they are a part of those of all features.
    [[ -z $features ]] || continue
    output=$(cargo test "${plain[@]}" "${select[@]}" --lib -- cuda:: registry:: rpc:: 2>&1) || { echo "$output"; exit 1; }
    grep '^test result' <<<"$output"
    # A development dependency on a crate that depends on fanout could enable features unnoticed.
    if ! grep -q 'a_build_without_cuda_reports_that ... ok' <<<"$output"; then
        echo "features.sh: without features, the tests were built with cuda" >&2
        exit 1
    fi
done
