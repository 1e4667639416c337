#!/usr/bin/env python3
"""Starts of clients of protocol 8.0.1 on servers with default options: see tests/interop/client_starts.py.

scripts/interop8.sh builds the client and runs this file.
"""

import json
import tempfile
from pathlib import Path

import numpy as np
from programs import listed, prompt
from make_model import make_model  # of tests/interop: `programs` adds the folder to the path
from client_starts import Clients, Computed, parser, run_client, run_rows


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--llama8", type=Path, required=True, help="folder of the programs of this crate")
    args = p.parse_args()
    with tempfile.TemporaryDirectory(prefix="fanout-starts8-") as scratch:
        model, out = Path(scratch) / "model.gguf", Path(scratch) / "logits.f32"
        make_model(str(model), "deep", "llama", "f32")

        def start(endpoints: list[str]) -> Computed:
            argv = [str(args.llama8 / "llama8-client"), "--model", str(model), "--tokens", listed(prompt())]
            argv += ["--context", "0", "--logits-out", str(out)]
            output = run_client([*argv, "--fit", "--rpc", ",".join(endpoints)] if endpoints else argv)
            report = json.loads(output.splitlines()[-1])
            logits = np.fromfile(out, np.float32).astype(np.float64).reshape(-1, report["vocab"])
            return Computed(logits, report["tokens"])

        run_rows(Clients("8.0.1", start, aborts=False), args)


if __name__ == "__main__":
    main()
