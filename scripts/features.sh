#!/usr/bin/env bash
# Each feature of the crate alone, and none.
set -euo pipefail

usage() {
    cat <<'TEXT'
Usage: scripts/features.sh [--counts]

Builds the crate `fanout` without features and with each one alone (cuda, server, client, cli):
  - `cargo tree` lists no crate of a feature that is off,
  - clippy accepts every target that exists, with warnings as errors,
  - the unit tests pass whose code depends on features (cuda, registry, rpc). What else there is does not depend on them:
    `cargo test` with the default features, in scripts/test.sh, covers it.
All features together are the default, which scripts/test.sh checks.

  --counts    only print how many crates each combination depends on, as the README has it
  -h, --help  this text

Builds share cargo's target folder; of `fanout` they are unoptimised.
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

combinations=("" cuda server client cli)
# The crates that a feature brings, and nothing else does.
declare -A brought=(
    [cuda]="cudarc flate2"
    [server]="blake3 getrandom"
    [client]=""
    [cli]="clap env_logger signal-hook"
    [server,client]="socket2" # and rustix, which clap has too, to learn how wide the terminal is
)

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

# Unoptimised builds of fanout, and of the emulator that its tests link: what runs here is short. Other dependencies are those of
# every other build.
plain=(--config 'profile.dev.package.fanout.opt-level=0' --config 'profile.dev.package.cudaemu.opt-level=0')

for features in "${combinations[@]}"; do
    printf '\n== features: %s\n' "${features:-none}"
    linked=$(crates "$features")
    for owners in "${!brought[@]}"; do
        [[ -n $features && ,$owners, == *,$features,* ]] && continue
        for crate in ${brought[$owners]}; do
            if grep -q "^$crate v" <<<"$linked"; then
                echo "features.sh: '$features' links $crate, which belongs to $owners" >&2
                exit 1
            fi
        done
    done
    select=(--locked -p fanout --no-default-features --features "$features")
    cargo clippy "${plain[@]}" "${select[@]}" --all-targets -- -D warnings
    output=$(cargo test "${plain[@]}" "${select[@]}" --lib -- cuda:: registry:: rpc:: 2>&1) || { echo "$output"; exit 1; }
    grep '^test result' <<<"$output"
    # A development dependency on a crate that depends on fanout could turn features on behind this script's back.
    if [[ $features != cuda ]] && ! grep -q 'a_build_without_cuda_says_so ... ok' <<<"$output"; then
        echo "features.sh: with '$features' the tests were built with cuda" >&2
        exit 1
    fi
done
