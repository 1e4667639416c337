#!/usr/bin/env bash
# Runs a program on emulated GPUs.
set -euo pipefail

usage() {
    cat <<'TEXT'
Usage: scripts/emulate.sh [-n DEVICES] [-c CAPABILITY] [--debug] COMMAND [ARGUMENT...]

Runs COMMAND with the emulated CUDA driver in place of libcuda.so, whether or not this machine has a GPU. This is for programs
that use what the list of crates/cudaemu/README.md (Limits) names: functions of the driver, and instructions of PTX.

  -n DEVICES     number of emulated devices (default 1; also CUDAEMU_DEVICES)
  -c CAPABILITY  compute capability: 7.5, 8.0, 8.6, 8.9 or 9.0, or a list with one per device (default 8.0; also
                 CUDAEMU_CAPABILITY)
  --debug        use the development build of the emulator (built faster, runs slower)
  -h, --help     this text

FANOUT_BUILT: folder in which cargo has already built the emulator (target/debug after scripts/test.sh); nothing is built then.
More settings are environment variables; crates/cudaemu/SETTINGS.md lists them.
Example: CUDAEMU_COUNTS=table scripts/emulate.sh -n 2 ./my-program --device 0,1
TEXT
}

profile=release
while (($#)); do
    case $1 in
        -n) [[ ${2-} =~ ^[0-9]+$ ]] || { echo "emulate.sh: -n needs a number of devices, got '${2-}'" >&2; exit 2; }
            export CUDAEMU_DEVICES=$2; shift 2 ;;
        -c) [[ ${2-} =~ ^[0-9]+\.[0-9](,[0-9]+\.[0-9])*$ ]] || { echo "emulate.sh: -c needs a capability such as 8.0, got '${2-}'" >&2; exit 2; }
            export CUDAEMU_CAPABILITY=$2; shift 2 ;;
        --debug) profile=dev; shift ;;
        -h|--help) usage; exit 0 ;;
        --) shift; break ;;
        -*) echo "emulate.sh: unknown option $1" >&2; usage >&2; exit 2 ;;
        *) break ;;
    esac
done
(($#)) || { echo "emulate.sh: no command given" >&2; usage >&2; exit 2; }

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [[ ${FANOUT_BUILT-} ]]; then
    library=$(realpath "$FANOUT_BUILT/deps/libcudaemu.so")
else
    library=$(
        cargo build --quiet --locked --manifest-path "$root/Cargo.toml" -p cudaemu --profile "$profile" \
            --message-format=json-render-diagnostics |
            sed -n 's/.*"filenames":\[[^]]*"\([^"]*libcudaemu\.so\)".*/\1/p' | tail -n 1
    )
fi
[[ -f $library ]] || { echo "emulate.sh: the build did not create libcudaemu.so" >&2; exit 1; }

# Programs load the driver by one of these names.
folder=$(dirname "$library")/cudaemu-driver
mkdir -p "$folder"
for name in libcuda.so libcuda.so.1; do
    # Do not replace a correct link: another program may be loading it at this moment.
    [[ $folder/$name -ef $library ]] || ln -sf "$library" "$folder/$name"
done
export LD_LIBRARY_PATH=$folder${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
exec "$@"
