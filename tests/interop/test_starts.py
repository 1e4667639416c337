#!/usr/bin/env python3
"""Starts of clients of protocol 7.0 on servers with default options: see client_starts.py.

    test_starts.py [--only TEXT] [--starts N]
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
from clients import Model
from servers import HERE
from client_starts import Clients, Computed, parser, run_client, run_rows


def main() -> None:
    args = parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory(prefix="fanout-starts-") as scratch:
        model = Model("f32", size="deep").ensure(Path(scratch))
        out = Path(scratch) / "computed.npz"

        def start(endpoints: list[str]) -> Computed:
            argv = [sys.executable, str(HERE / "llama_client.py"), str(model), "--threads", "1", "--save", str(out)]
            run_client([*argv, "--fit", "--rpc", ",".join(endpoints)] if endpoints else argv)
            with np.load(out) as computed:
                return Computed(computed["logits"], computed["tokens"].tolist())

        run_rows(Clients("7.0", start, aborts=True), args)


if __name__ == "__main__":
    main()
