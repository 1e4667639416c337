#!/usr/bin/env bash
# Release: archives of the programs for other machines, with checksums, each checked.
set -euo pipefail

usage() {
    cat <<'TEXT'
Usage: scripts/release.sh [--image] [TARGET...]

Builds rpc-server and generate, stripped, and for glibc the plug-in libggml-fanout.so, and packs them with the manual, the
completions of shells and the licences into target/release-dist/dist/fanout-VERSION-TARGET.tar.gz; SHA256SUMS beside the archives has their checksums. Each program is checked
and run, on an emulated processor if need be.

  TARGET: default all
    x86_64-unknown-linux-gnu     for glibc 2.28 and later (Debian 10, RHEL 8, Ubuntu 20.04); loads the CUDA driver at run time
    aarch64-unknown-linux-gnu    the same for AArch64
    x86_64-unknown-linux-musl    static: runs on any Linux, also in an empty container, but cannot load a CUDA driver
    aarch64-unknown-linux-musl   the same for AArch64

  --image     also builds the image of docs/deploy/Containerfile from the static x86-64 program with buildah, as an archive for
              `podman load`, and runs it (root)
  -h, --help  this text

Installs pinned versions of cargo-zigbuild and zig into target/release-dist/tools, and standard libraries with rustup. A target
whose standard library cannot be had is skipped. Needs Python 3 with venv, binutils and file; qemu-user, and for the GNU target
libc6-arm64-cross, to run the AArch64 programs: without them, these are not run.
TEXT
}

glibc=2.28        # the oldest version on which the GNU targets run
static_limit=8000000 # aim for the bytes of a static rpc-server; not reached yet
zigbuild=0.24.1
zig=0.15.1
all=({x86_64,aarch64}-unknown-linux-{gnu,musl})

image=false targets=()
while (($#)); do
    case $1 in
        --image) image=true ;;
        -h | --help) usage; exit 0 ;;
        *)
            if [[ " ${all[*]} " != *" $1 "* ]]; then
                echo "release.sh: unknown argument $1" >&2
                usage >&2
                exit 2
            fi
            targets+=("$1")
            ;;
    esac
    shift
done
((${#targets[@]})) || targets=("${all[@]}")

cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=$PWD/target/release-dist
dist=$folder/dist
tools=$folder/tools
mkdir -p "$dist" "$tools"

die() { echo "release.sh: $*" >&2; exit 1; }
skip() { echo "release.sh: skipped: $*" >&2; }

for program in python3 objdump readelf file; do
    command -v "$program" >/dev/null || die "no program $program: install it (Debian: python3-venv, binutils, file)"
done

# ---- tools

stamp=$tools/stamp
if [[ ! -f $stamp || $(<"$stamp") != "$zigbuild $zig" ]]; then
    rm -rf "$tools"
    mkdir -p "$tools"
    python3 -m venv "$tools/venv"
    "$tools/venv/bin/pip" install --quiet --disable-pip-version-check "ziglang==$zig"
    cargo install --quiet --locked --no-default-features --root "$tools/cargo" --target-dir "$tools/build" "cargo-zigbuild@$zigbuild"
    rm -rf "$tools/build"
    echo "$zigbuild $zig" >"$stamp"
fi
CARGO_ZIGBUILD_ZIG_PATH=$("$tools/venv/bin/python" -c 'import os, ziglang; print(os.path.join(os.path.dirname(ziglang.__file__), "zig"))')
export CARGO_ZIGBUILD_ZIG_PATH
export CARGO_ZIGBUILD_CACHE_DIR=$tools/cache
export PATH=$tools/cargo/bin:$PATH

# ---- programs

version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
# Times in archives: those of the commit, so that the same sources give the same archive.
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || stat -c %Y Cargo.toml)}

has_library() { # TARGET: whether there is a standard library for it
    [[ -d $(rustc --print target-libdir --target "$1") ]] || rustup target add "$1" 2>/dev/null
}

build() { # TARGET
    local select=(-p fanout -p generate --bin rpc-server --bin generate) triple=$1
    case $1 in
        # A static program cannot load a driver, so it has no kernels either. Optimised as a whole, because it has to be small.
        *-musl)
            select+=(--no-default-features --features "fanout/server,fanout/client,fanout/cli")
            # Of the crates that others have written, size counts more than speed, except for the digests.
            select+=(--config 'profile.release.lto="fat"' --config profile.release.codegen-units=1)
            select+=(--config 'profile.release.package."*".opt-level="s"' --config profile.release.package.blake3.opt-level=3)
            ;;
        *-gnu)
            triple=$1.$glibc
            select+=(-p ggml-fanout --lib)
            ;;
    esac
    CARGO_TARGET_DIR=$folder/build cargo zigbuild --release --locked --config profile.release.strip=true --target "$triple" "${select[@]}"
}

# The command that runs programs of TARGET here, in `runner`; fails if there is none.
runner=()
find_runner() { # TARGET
    runner=()
    [[ ${1%%-*} != "$(uname -m)" ]] || return 0
    command -v "qemu-${1%%-*}" >/dev/null || return 1
    runner=("qemu-${1%%-*}")
    if [[ $1 == *-gnu ]]; then
        [[ -d /usr/${1%%-*}-linux-gnu/lib ]] || return 1
        runner+=(-L "/usr/${1%%-*}-linux-gnu")
    fi
}

check_glibc() { # PROGRAM
    local newest needed
    newest=$(objdump -T "$1" | sed -n 's/.*GLIBC_\([0-9.]*\).*/\1/p' | sort -V | tail -n 1)
    [[ -n $newest ]] || die "$1: no symbol of glibc"
    [[ $(printf '%s\n' "$newest" "$glibc" | sort -V | tail -n 1) == "$glibc" ]] || die "$1 needs glibc $newest, newer than $glibc"
    # The driver, or a library that is not part of glibc, would have to be on every machine.
    needed=$(readelf -d "$1" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' | grep -Ev '^(libc|libm|libdl|libpthread|librt|ld-linux-[a-z0-9-]*)\.so\.' || true)
    [[ -z $needed ]] || die "$1 needs the libraries $needed"
    echo "  ${1##*/}: $(stat -c %s "$1") bytes, glibc $newest"
}

check_static() { # PROGRAM
    local size
    size=$(stat -c %s "$1")
    file -b "$1" | grep -Eq 'statically linked|static-pie linked' || die "$1 is not static: $(file -b "$1")"
    ! readelf -lW "$1" | grep -q INTERP || die "$1 has an interpreter, so it is not static"
    [[ $1 != */rpc-server ]] || ((size <= static_limit)) || echo "release.sh: warning: $1 has $size bytes, more than the aim of $static_limit" >&2
    echo "  ${1##*/}: $size bytes, static"
}

check() { # TARGET FOLDER
    local program devices exported
    for program in rpc-server generate; do
        case $1 in
            *-gnu) check_glibc "$2/$program" ;;
            *-musl) check_static "$2/$program" ;;
        esac
    done
    if [[ $1 == *-gnu ]]; then
        check_glibc "$2/libggml-fanout.so"
        exported=$(objdump -T "$2/libggml-fanout.so" | awk '$NF ~ /^ggml_/ { print $NF }' | sort | tr '\n' ' ')
        [[ $exported == 'ggml_backend_init ggml_backend_score ' ]] || die "libggml-fanout.so exports $exported"
    fi
    if ! find_runner "$1"; then
        skip "running the programs of $1: no emulator for it here (Debian: qemu-user, libc6-arm64-cross)"
        return
    fi
    for program in rpc-server generate; do
        "${runner[@]}" "$2/$program" --version | grep -q " $version" || die "$2/$program --version does not say $version"
    done
    devices=$("${runner[@]}" "$2/rpc-server" --list-devices)
    grep -q '^CPU: ' <<<"$devices" || die "$2/rpc-server --list-devices lists no CPU: $devices"
    case $1 in
        *-musl) grep -q 'built without CUDA' <<<"$devices" || die "$2/rpc-server does not say that it is built without CUDA: $devices" ;;
        *-gnu) grep -Eq '^CUDA0: |no CUDA driver was found' <<<"$devices" || die "$2/rpc-server does not look for a GPU: $devices" ;;
    esac
    echo "  ${devices//$'\n'/$'\n'  }"
}

pack() { # TARGET
    local name=fanout-$version-$1 from=$folder/build/$1/release
    rm -rf "${folder:?}/$name"
    mkdir -p "$folder/$name/manual" "$folder/$name/docs"
    cp "$from/rpc-server" "$from/generate" README.md SECURITY.md LICENSE-APACHE LICENSE-MIT "$folder/$name"
    [[ $1 != *-gnu ]] || cp "$from/libggml_fanout.so" "$folder/$name/libggml-fanout.so"
    # README refers to them.
    cp -r docs/*.md docs/*.svg docs/deploy "$folder/$name/docs"
    check "$1" "$folder/$name"
    # The same for all targets: written by the program that runs here.
    if [[ ! -d $folder/manual ]]; then
        find_runner "$1" || die "the manual needs a program that runs here"
        mkdir -p "$folder/manual"
        "${runner[@]}" "$folder/$name/rpc-server" manual "$folder/manual" >/dev/null
        "${runner[@]}" "$folder/$name/generate" --manual "$folder/manual"
    fi
    cp "$folder"/manual/* "$folder/$name/manual"
    tar -C "$folder" --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$SOURCE_DATE_EPOCH" -czf "$dist/$name.tar.gz" "$name"
}

rm -rf "$folder/manual"
rm -f "$dist"/*.tar.gz "$dist/SHA256SUMS"
for target in "${targets[@]}"; do
    printf '\n== %s\n' "$target"
    if ! has_library "$target"; then
        skip "$target: rustup cannot install its standard library"
        continue
    fi
    build "$target"
    pack "$target"
done
archives=("$dist"/*.tar.gz)
[[ -f ${archives[0]} ]] || die "no target could be built"

# ---- image

if $image; then
    printf '\n== image\n'
    command -v buildah >/dev/null || die "no program buildah: install it (Debian: buildah)"
    static=$folder/fanout-$version-x86_64-unknown-linux-musl context=$folder/image
    [[ -x $static/rpc-server ]] || die "--image needs the target x86_64-unknown-linux-musl"
    rm -rf "$context"
    mkdir -p "$context/cache"
    cp "$static"/rpc-server "$static"/LICENSE-* "$context"
    storage=(--storage-driver vfs --root "$folder/containers" --runroot "$folder/containers-run")
    buildah "${storage[@]}" bud --isolation chroot --build-arg "VERSION=$version" -t "fanout:$version" -f docs/deploy/Containerfile "$context"
    # Runs it by its own entry point, in a chroot of the image, where nothing else is.
    container=$(buildah "${storage[@]}" from "fanout:$version")
    buildah "${storage[@]}" run --isolation chroot "$container" -- /rpc-server --list-devices | grep '^CPU: '
    buildah "${storage[@]}" rm "$container" >/dev/null
    rm -f "$dist/fanout-$version-image.tar"
    buildah "${storage[@]}" push "fanout:$version" "docker-archive:$dist/fanout-$version-image.tar:fanout:$version"
fi

printf '\n== checksums\n'
(cd "$dist" && sha256sum fanout-* | tee SHA256SUMS)
