#!/usr/bin/env python3
"""Decoding speed of a tensor split of llama.cpp's client 8.0.1: over two of fanout's servers, and over two of llama.cpp's.

scripts/interop8.sh speed builds the programs and runs this file. The two kinds of servers alternate, in paired rounds, because
other load on the machine changes with time: only the ratio of a round is comparable.
"""

import argparse
import contextlib
import statistics
import tempfile
from pathlib import Path

from cases import NO_COLLECTIVES, TENSOR
from programs import Programs, listed, make_model, prompt

CLIENT_S = 600.0
WARM_UP = 4  # tokens of a first run: servers read their programs and llama.cpp its model


def model(path: Path | None, scratch: Path) -> Path:
    """The model of the measurement: `path`, which is written first if it does not exist."""
    path = path or scratch / "1b-q4_0.gguf"
    if not path.exists():
        make_model(str(path), "1b", "llama", "q4_0")
    return path


def speed(programs: Programs, gguf: Path, ours: bool, tokens: int, collectives: bool) -> float:
    """Tokens per second of a run over two servers of one kind."""
    with contextlib.ExitStack() as stack:
        options = ("--peer", "127.0.0.1:*") if collectives else ()
        start = (lambda: programs.server(options=options)) if ours else programs.peer
        servers = [stack.enter_context(start()) for _ in range(2)]
        arguments = ["--model", str(gguf), "--tokens", listed(prompt()), *TENSOR]
        arguments += ["--rpc", ",".join(server.endpoint for server in servers), "--generate", str(tokens)]
        client = stack.enter_context(programs.client(arguments, () if collectives else NO_COLLECTIVES))
        return client.report(CLIENT_S)["gen_tok_s"]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--llama8", type=Path, required=True, help="folder with llama.cpp's programs")
    p.add_argument("--server", type=Path, required=True, help="fanout's rpc-server")
    p.add_argument("--model", type=Path, help="a GGUF file (default: a model of 1b parameters in q4_0, written first)")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--tokens", type=int, default=32, help="tokens per run")
    p.add_argument("--threads", type=int, default=1, help="threads of each client and server")
    p.add_argument("--no-collectives", action="store_true", help="the client adds the servers' tensors itself")
    args = p.parse_args()
    collectives = not args.no_collectives
    with tempfile.TemporaryDirectory() as folder:
        programs = Programs(args.server.resolve(), args.llama8.resolve(), Path(folder), args.threads)
        gguf = model(args.model, Path(folder))
        for ours in (True, False):
            speed(programs, gguf, ours, WARM_UP, collectives)
        ratios = []
        print(f"{'round':5} {'fanout':>8} {'llama.cpp':>9} {'ratio':>6}   tokens per second")
        for number in range(args.rounds):
            # The order alternates, so that neither kind always runs first.
            order = (True, False) if number % 2 == 0 else (False, True)
            measured = {ours: speed(programs, gguf, ours, args.tokens, collectives) for ours in order}
            ratios.append(measured[True] / measured[False])
            print(f"{number + 1:5} {measured[True]:8.2f} {measured[False]:9.2f} {ratios[-1]:6.3f}", flush=True)
        print(f"median ratio {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
