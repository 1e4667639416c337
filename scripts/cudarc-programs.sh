#!/usr/bin/env bash
# Runs cudarc's own examples and driver tests, unmodified, against two emulated devices.
set -euo pipefail

usage() {
    cat <<'TEXT'
Usage: scripts/cudarc-programs.sh [--nvrtc] [--debug] [NAME...]

Builds the examples and unit tests of the cudarc release that Cargo.lock pins, from cargo's copy of its sources. Runs them with
scripts/emulate.sh on two devices, and prints a row for each: passed, failed, or not applicable with the reason. The exit status
is 1 if any failed. With NAMEs, runs only rows whose name contains one of them.

  --nvrtc     also run programs that compile their kernels at run time, with the compiler that scripts/build-ptx.sh fetched
  --debug     use the development build of the emulator
  -h, --help  this text

CUDAEMU_… settings are passed on (crates/cudaemu/SETTINGS.md).
TEXT
}

# Programs that cannot run: a pattern of names, the missing requirement, and the reason. A pattern without a match is an error.
# The requirement `nvrtc` is met with --nvrtc; the others never are.
not_applicable=(
    'example 05-device-repr            | nvrtc   | compiles its kernel at run time'
    'example 06-threading              | printf  | its kernel prints, which the emulator does not support'
    'example 09-constant-memory        | nvrtc   | compiles its kernel at run time'
    'example matmul-kernel             | nvrtc   | compiles its kernel at run time'
    'example nvrtc-compile             | nvrtc   | compiles its kernel at run time'
    'example 08-cupti                  | cupti   | drives the profiler library CUPTI'
    'example cufile-copy               | cufile  | drives the storage library cuFile'
    'test driver::safe::launch::*      | nvrtc   | compiles its kernel at run time'
    'test driver::safe::unified_memory::tests::test_unified_memory_* | nvrtc | compiles its kernel at run time'
    'test nvrtc::*::test_compile_*program* | nvrtc | tests the compiler'
    'test nvrtc::*::test_get_ptx       | nvrtc   | tests the compiler'
    'test nvrtc::*::test_compile_no_opts | nvrtc | tests the compiler'
    'test *::test_event_try_is_complete_preserves_capture_error | capture | captures a stream, which the emulator does not support'
    'test driver::safe::graph::tests::test_end_capture_* | capture | captures a stream, which the emulator does not support'
    'test *::test_pinned_copy_is_faster | time   | compares measured times of copies, which are meaningless on an emulator'
    'test *::test_default_pinned_host_reads_are_faster_than_write_combined | time | compares measured times of host reads, which are meaningless on an emulator'
)
# Tests that compare event times to check that kernels of two streams overlap: each runs separately, with simulated time.
overlap=(
    driver::safe::launch::tests::test_multi_stream_concurrent_reads
    driver::safe::launch::tests::test_par_launch
)
simulated_time=(CUDAEMU_KERNEL_US=1000 CUDAEMU_KERNELS_AT_ONCE=2)

have_nvrtc=false
emulate=()
wanted=()
while (($#)); do
    case $1 in
        --nvrtc) have_nvrtc=true ;;
        --debug) emulate+=(--debug) ;;
        -h|--help) usage; exit 0 ;;
        -*) echo "cudarc-programs.sh: unknown option $1" >&2; usage >&2; exit 2 ;;
        *) wanted+=("$1") ;;
    esac
    shift
done

cd "$(dirname "${BASH_SOURCE[0]}")/.."
target=$(cargo metadata --locked --no-deps --format-version 1 | sed -n 's/.*"target_directory":"\([^"]*\)".*/\1/p')
host=$(rustc -vV | sed -n "s/^host: //p")
manifest=$(cargo metadata --locked --filter-platform "$host" --format-version 1 | grep -o '"manifest_path":"[^"]*/cudarc-[0-9][^"/]*/Cargo.toml"' | cut -d'"' -f4)
[[ -f $manifest ]] || { echo "cudarc-programs.sh: cargo metadata reports no sources of cudarc" >&2; exit 1; }
release=$(basename "$(dirname "$manifest")")

if $have_nvrtc; then
    toolchain=${FANOUT_CUDA_TOOLCHAIN:-$target/cuda-toolchain}
    nvrtc=$(find "$toolchain" -path '*/cuda_nvrtc/lib/libnvrtc.so.12' -printf '%h\n' -quit 2>/dev/null || true)
    [[ -d $nvrtc ]] || { echo "cudarc-programs.sh: no NVRTC in $toolchain: run scripts/build-ptx.sh first" >&2; exit 1; }
    export LD_LIBRARY_PATH=$nvrtc${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
fi

# Work on a copy outside of cargo's registry, so that the registry is never written. The copy is a separate workspace.
work=$target/cudarc-programs
copy=$work/$release
mkdir -p "$work"
rm -rf "$copy"
cp -r "$(dirname "$manifest")" "$copy"
printf '\n[workspace]\n' >>"$copy/Cargo.toml"

# Prints the first matching row of not_applicable as "LACKS|REASON"; prints nothing if the program can run.
excluded() {
    local row pattern lacks reason
    for row in "${not_applicable[@]}"; do
        IFS='|' read -r pattern lacks reason <<<"$row"
        pattern=${pattern%"${pattern##*[! ]}"} lacks=${lacks// /}
        # shellcheck disable=SC2053 # the right side is a pattern
        [[ $1 == $pattern ]] || continue
        $have_nvrtc && [[ $lacks == nvrtc ]] && return
        echo "$lacks|${reason# }"
        return
    done
}

# Whether the NAMEs of the command line select this program.
asked() {
    local name
    ((${#wanted[@]})) || return 0
    for name in "${wanted[@]}"; do [[ $1 == *"$name"* ]] && return 0; done
    return 1
}

passed=0 failed=0 skipped=0
row() { printf '%-15s %s\n' "$1" "$2"; }
verdict() { # NAME STATUS LOG
    if [[ $2 == 0 ]]; then
        row passed "$1"
        passed=$((passed + 1))
    else
        row FAILED "$1"
        sed 's/^/    /' "$3"
        failed=$((failed + 1))
    fi
}
skip() { # NAME LACKS|REASON
    row "not applicable" "$1: ${2#*|}"
    skipped=$((skipped + 1))
}
emulated() { scripts/emulate.sh -n 2 "${emulate[@]}" -- "$@"; }

features=(--no-default-features --features 'std driver dynamic-loading cuda-12000 nvrtc')
build() { (cd "$copy" && CARGO_TARGET_DIR=$work/build cargo "$@" --quiet --locked "${features[@]}"); }

mapfile -t examples < <(find "$copy/examples" -name '*.rs' -printf '%f\n' | sed 's/\.rs$//' | sort)
run=() options=()
for example in "${examples[@]}"; do
    [[ -z $(excluded "example $example") ]] && options+=(--example "$example")
done
build build "${options[@]}"
tests=$(
    build test --lib --no-run --message-format=json-render-diagnostics |
        sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -n 1
)
mapfile -t alone < <("$tests" --list --ignored --format terse | sed -n 's/: test$//p' | sort)
mapfile -t all < <("$tests" --list --format terse | sed -n 's/: test$//p' | sort)

for entry in "${not_applicable[@]}"; do
    pattern=${entry%%|*}
    pattern=${pattern%"${pattern##*[! ]}"}
    found=false
    # shellcheck disable=SC2053
    for name in "${examples[@]/#/example }" "${all[@]/#/test }"; do [[ $name == $pattern ]] && found=true; done
    $found || { echo "cudarc-programs.sh: $release has no program that matches $pattern: correct not_applicable" >&2; exit 1; }
done

echo "$release on two emulated devices"
log=$work/log
for example in "${examples[@]}"; do
    asked "example $example" || continue
    why=$(excluded "example $example")
    [[ -n $why ]] && { skip "example $example" "$why"; continue; }
    status=0
    # The examples open files in their own folder.
    emulated env --chdir="$copy" "$work/build/debug/examples/$example" >"$log" 2>&1 || status=$?
    verdict "example $example" "$status" "$log"
done

# First as `cargo test` runs them: in one process, several at a time. Then separately: the tests that are marked to need this,
# or several devices.
for test in "${all[@]}"; do
    asked "test $test" || continue
    why=$(excluded "test $test")
    [[ -n $why ]] && { skip "test $test" "$why"; continue; }
    [[ " ${alone[*]} ${overlap[*]} " == *" $test "* ]] || run+=("$test")
done
if ((${#run[@]})); then
    emulated "$tests" --exact "${run[@]}" >"$log" 2>&1 || true
    for test in "${run[@]}"; do
        status=1
        grep -qE "^test $test( - should panic)? \.\.\. ok$" "$log" && status=0
        verdict "test $test" "$status" <(sed -n "/^---- $test stdout/,/^$/p" "$log"; grep '^cudaemu:' "$log" || true)
    done
fi
for test in "${all[@]}"; do
    [[ " ${alone[*]} ${overlap[*]} " == *" $test "* ]] || continue
    asked "test $test" || continue
    [[ -n $(excluded "test $test") ]] && continue
    settings=()
    [[ " ${overlap[*]} " == *" $test "* ]] && settings=("${simulated_time[@]}")
    status=0
    emulated env "${settings[@]}" "$tests" --exact "$test" --include-ignored >"$log" 2>&1 || status=$?
    verdict "test $test" "$status" "$log"
done

echo "$passed passed, $failed failed, $skipped not applicable"
((failed == 0 && passed > 0))
