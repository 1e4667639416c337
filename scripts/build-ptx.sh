#!/usr/bin/env bash
# Compiles CUDA C++ kernels to PTX with NVRTC from PyPI: no CUDA installation, no host compiler and no GPU are needed.
# `scripts/build-ptx.sh --help` lists the options. The PTX is committed, so this is needed only after changing a kernel.
#   PYTHON                    the interpreter (3.9 or later, with pip) that fetches and calls the compiler (default: python3)
#   FANOUT_CUDA_TOOLCHAIN     folder of the compiler (default: cuda-toolchain in cargo's target folder)
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3}
if ! command -v "$python" >/dev/null; then
    echo "build-ptx.sh: no interpreter '$python': install Python 3.9 or later, or set PYTHON to an interpreter" >&2
    exit 1
fi
exec "$python" "$here/build_ptx.py" "$@"
