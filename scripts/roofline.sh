#!/usr/bin/env bash
# The static roofline of the CUDA kernels: counts from their machine code and from the emulator. No GPU is needed.
# `scripts/roofline.sh --help` lists the options.
#   PYTHON                    the interpreter (3.9 or later, with pip) that fetches and calls the tools (default: python3)
#   FANOUT_CUDA_TOOLCHAIN     folder of the tools (default: cuda-toolchain in cargo's target folder)
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3}
if ! command -v "$python" >/dev/null; then
    echo "roofline.sh: no interpreter '$python': install Python 3.9 or later, or set PYTHON to an interpreter" >&2
    exit 1
fi
exec "$python" "$here/roofline.py" "$@"
