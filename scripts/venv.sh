#!/usr/bin/env bash
# Creates or reuses the Python environment with a real llama.cpp client, and prints the path of its interpreter.
set -euo pipefail

usage() {
    cat <<'TEXT'
Usage: scripts/venv.sh [VERSION]

Creates or reuses the Python environment with a real llama.cpp client, and prints the path of its interpreter.

  VERSION      version of llama-cpp-python (default: that of tests/interop/requirements.txt, of protocol 7.0)

  FANOUT_VENV  folder of the environment (default: .venv in the repository); kept between runs. With VERSION, its name ends in
               -VERSION
  PYTHON       interpreter with which the environment is created (default: python3)

The client is compiled for this CPU, which takes about 5 CPU minutes. An environment from another type of CPU, another Python
or other requirements is recreated. An environment that you created yourself and named by FANOUT_VENV is used unchanged.

  -h, --help   this text
TEXT
}

case ${1-} in
    '') ;;
    -h | --help) usage; exit 0 ;;
    *)
        if [[ $# -gt 1 || ! $1 =~ ^[0-9]+(\.[0-9]+)+$ ]]; then
            echo "venv.sh: unknown argument ${!#}" >&2
            usage >&2
            exit 2
        fi
        ;;
esac

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
requirements=$root/tests/interop/requirements.txt
default=$(sed -n 's/^llama-cpp-python==//p' "$requirements")
version=${1:-$default}
venv=${FANOUT_VENV:-$root/.venv}${1:+-$1}
python=${PYTHON:-python3}
stamp=$venv/fanout-stamp

cpu_flags() {
    if [[ -r /proc/cpuinfo ]]; then
        grep -m1 -E '^(flags|Features)' /proc/cpuinfo || uname -m
    else
        sysctl -n machdep.cpu.brand_string 2>/dev/null || uname -m
    fi
}

# The requirements, with the wanted version of the client.
packages() {
    sed "s/^llama-cpp-python==.*/llama-cpp-python==$version/" "$requirements"
}

key() {
    {
        cpu_flags
        "$python" -c 'import sys; print(sys.version_info[:3])'
        packages
        cat "$root"/tests/interop/*.cmake
    } | cksum
}

works() {
    [[ -x $venv/bin/python ]] && "$venv/bin/python" - "$version" <<'PY' >/dev/null 2>&1
import gguf, llama_cpp, numpy, pathlib, sys
assert llama_cpp.__version__ == sys.argv[1]
assert list((pathlib.Path(llama_cpp.__file__).parent / "lib").glob("libggml-rpc.*"))
PY
}

wanted=$(key)
mkdir -p "$(dirname "$venv")"
# Two runs at the same time must not build into the same folder.
if command -v flock >/dev/null; then
    exec 9<"$(dirname "$venv")"
    flock 9
fi

if [[ -f $stamp && $(<"$stamp") == "$wanted" ]] && works; then
    :
elif [[ -n ${FANOUT_VENV:-} && ! -f $stamp ]] && works; then
    :
else
    if [[ -e $venv && ! -f $venv/pyvenv.cfg ]]; then
        echo "venv.sh: $venv exists and is not a virtual environment" >&2
        exit 1
    fi
    echo "venv.sh: building the llama.cpp client into $venv (about 5 CPU minutes)" >&2
    rm -rf "$venv"
    "$python" -m venv "$venv" >&2
    jobs=$(getconf _NPROCESSORS_ONLN)
    # No cache: it could return a wheel that was built for another CPU.
    cmake_args="-DGGML_RPC=ON -DGGML_NATIVE=ON -DCMAKE_PROJECT_llama.cpp_INCLUDE='$root/tests/interop/without_common.cmake'"
    CMAKE_ARGS=$cmake_args CMAKE_BUILD_PARALLEL_LEVEL=$jobs \
        "$venv/bin/python" -m pip install --disable-pip-version-check --no-cache-dir -r <(packages) >&2
    if ! works; then
        echo "venv.sh: the client does not work after its build" >&2
        exit 1
    fi
    echo "$wanted" >"$stamp"
fi
echo "$venv/bin/python"
