#!/usr/bin/env bash
# Runs a test many times beside busy loops, to find failures that depend on the order of threads.
set -euo pipefail

usage() {
    cat <<'TEXT'
Usage: scripts/stress.sh TEST [N] [-- ARGUMENTS...]

Builds the integration test TEST (rpc, sched, ...; `lib`: the unit tests) and runs its program N times (default: 20), each time on
processors chosen at random, beside as many busy loops as there are processors, which move at random too. Prints the output of each
run that fails, and fails if one did: a test that fails once in 200 runs has a fault, or shows one of the code.

  ARGUMENTS   for the test program: names of tests, --test-threads=8
  SEED        environment: of the random choices (default: the time); it is printed

  -h, --help  this text
TEXT
}

case ${1-} in
    -h | --help) usage; exit 0 ;;
    '' | -*) usage >&2; exit 2 ;;
esac
name=$1
shift
runs=20
if [[ ${1-} =~ ^[0-9]+$ ]]; then
    runs=$1
    shift
fi
[[ ${1-} != -- ]] || shift
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ $name == lib ]]; then target=(--lib); else target=("--test=$name"); fi
program=$(cargo test --locked -p fanout "${target[@]}" --no-run --message-format=json 2>/dev/null |
    sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -n 1)
[[ $program ]] || { echo "stress.sh: cannot build the test $name: cargo test -p fanout ${target[*]} --no-run" >&2; exit 1; }

RANDOM=${SEED:=$(date +%s)}
processors=$(nproc)
echo "stress.sh: $name, $runs runs on $processors processors, SEED=$SEED"
output=$(mktemp)
loops=()
finish() {
    kill "${loops[@]}" 2>/dev/null || true
    rm -f "$output"
}
trap finish EXIT
for ((i = 0; i < processors; i++)); do
    while :; do :; done &
    loops+=($!)
done

# Sets `chosen` to a list of processors: each with a probability of a half, at least one. Not printed: a subshell would not advance
# the random numbers.
choose_processors() {
    local p
    chosen=$((RANDOM % processors))
    for ((p = 0; p < processors; p++)); do
        if ((RANDOM % 2)); then chosen+=,$p; fi
    done
}

failed=0
for ((run = 1; run <= runs; run++)); do
    for loop in "${loops[@]}"; do
        choose_processors
        taskset -pc "$chosen" "$loop" >/dev/null
    done
    choose_processors
    if ! taskset -c "$chosen" "$program" "$@" >"$output" 2>&1; then
        failed=$((failed + 1))
        printf '\n== run %d failed\n' "$run"
        cat "$output"
    fi
done
echo "stress.sh: $failed of $runs runs failed"
((failed == 0))
