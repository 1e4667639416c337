#!/usr/bin/env python3
"""Cost of messages on our rpc-server and on llama.cpp's server, measured by a client.

1. Bare sockets: DEVICE_COUNT round trips; upload and download of 1 GiB in one message and in pieces of 1 MiB, to memory that the
   server has used before ("first": to never-used memory); SET_TENSORs of 64 bytes, each sent separately. Python's share of a round
   trip and of a small message is some microseconds, the same for both servers.
2. A tiny model with llama.cpp's client, whose tokens cost almost only messages: the time that a server *adds* is the median time
   of a token with the server minus the median time without a server.
3. Several clients that decode concurrently on our server: total tokens per second while all of them decode, relative to one client.
4. CPU time of our server while a client that has loaded a model is idle.
5. Bare sockets as in 1 to a plain address of our server, and through `rpc-server connect` over TLS to the same server: the ratio is
   that of the relay to the plain address, and includes the TLS of the server. Also round trips to both in turn, with the median of
   the differences of two that follow each other, and how often the relay's threads wake up for one.

Prints medians with the lowest and the highest round in brackets, and checks the bounds: our added time is at most 0.6 of that of
llama.cpp's server, the largest number of clients reaches at least 0.9 of one client's throughput, and an idle server uses less than
0.5 % of a core. With --check, exits with status 1 if a bound is violated.
"""

import argparse
import contextlib
import itertools
import os
import re
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from common import ROOT, Bound, Spread, finish, ratio, rotated, warn_if_busy

from clients import Client, ClientError, Model  # isort: skip
from raw import SET_TENSOR, RawClient, vector  # isort: skip
from servers import Server, ServerError, ours, peer  # isort: skip

CLIENT_S = 300.0
PIECE = 1 << 20
SMALL = 64
LOWER_IS_BETTER = ("round trip p50 (us)", "round trip p99 (us)")

Values = dict[str, float]


def start(side: str, a: argparse.Namespace) -> Server:
    return ours(a.threads, binary=a.binary) if side == "ours" else peer(a.threads)


def sockets(server: Server, a: argparse.Namespace) -> Values:
    """Round trips and transfers of one connection."""
    out: Values = {}
    with RawClient(server.endpoint) as client:
        times = []
        for _ in range(a.round_trips):
            begin = time.perf_counter()
            client.device_count()
            times.append(time.perf_counter() - begin)
        hundredths = statistics.quantiles(times, n=100)
        out["round trip p50 (us)"], out["round trip p99 (us)"] = (hundredths[i] * 1e6 for i in (49, 98))
        size = a.transfer << 20
        buffer, base = client.alloc(size)
        tensor = vector(buffer, base, size // 4)
        pieces = [vector(buffer, base + at, PIECE // 4) for at in range(0, size, PIECE)]
        chunk = os.urandom(PIECE)

        def up(tensors: list[bytes], each: int) -> float:
            """GB/s of SET_TENSORs of `each` bytes; the reply to the last message proves that all have arrived."""
            begin = time.perf_counter()
            for record in tensors:
                client.upload_header(record, each)
                for _ in range(each // PIECE):
                    client.socket.sendall(chunk)
            if client.download(tensor, size - SMALL, SMALL) != chunk[-SMALL:]:
                raise ClientError("the upload came back changed")
            return size / (time.perf_counter() - begin) / 1e9

        def down(tensors: list[bytes], each: int) -> float:
            begin = time.perf_counter()
            for record in tensors:
                client.download_into(record, 0, into[:each])
            return size / (time.perf_counter() - begin) / 1e9

        into = memoryview(bytearray(size))
        out["upload, first (GB/s)"] = up([tensor], size)
        out["upload (GB/s)"] = up([tensor], size)
        out["upload, 1 MiB each (GB/s)"] = up(pieces, PIECE)
        down([tensor], size)  # touch the client's memory, so that it is as warm as in later runs
        out["download (GB/s)"] = down([tensor], size)
        out["download, 1 MiB each (GB/s)"] = down(pieces, PIECE)
        record = vector(buffer, base, SMALL // 4)
        message = struct.pack("<BQ", SET_TENSOR, len(record) + 9 + SMALL) + record + bytes(9) + chunk[:SMALL]
        begin = time.perf_counter()
        for _ in range(a.small):
            client.socket.sendall(message)
        client.device_count()
        out["small uploads (1000/s)"] = a.small / (time.perf_counter() - begin) / 1e3
    return out


@contextlib.contextmanager
def relayed(a: argparse.Namespace) -> Iterator[dict[str, Server]]:
    """Our server with keys, by its plain address, and a relay to its address with TLS."""
    binary = a.binary or ROOT / "target" / "release" / "rpc-server"

    def keygen(name: str) -> str:
        return subprocess.run([binary, "keygen", f"{folder}/{name}"], check=True, capture_output=True, text=True).stdout.strip()

    with tempfile.TemporaryDirectory() as folder:
        own, client = keygen("own"), keygen("client")
        Path(folder, "clients").write_text(f"{client} client\n")
        keys = ("--key", f"{folder}/own", "--allow-keys", f"{folder}/clients")
        with ours(a.threads, binary=binary, options=(*keys, "--listen", "0=plain")) as server:
            connect = [str(binary), "connect", "--key", f"{folder}/client", f"0={server.endpoint}={own}"]
            if not server.wait_for_log("protocol 7.0)\nlistening on", CLIENT_S):
                raise ServerError(f"no plain address:\n{server.log}")
            with Server(connect) as relay:
                server.endpoint = re.findall(r"listening on (\S+:\d+)", server.log)[1]
                yield {"plain": server, "relay": relay}


def in_turn(sides: dict[str, Server], a: argparse.Namespace) -> Values:
    """Round trips that alternate between the plain address and the relay, so that a busy machine slows both."""
    with RawClient(sides["plain"].endpoint) as plain, RawClient(sides["relay"].endpoint) as relay:
        times: list[tuple[float, float]] = []
        for _ in range(a.round_trips):
            begin = time.perf_counter()
            plain.device_count()
            middle = time.perf_counter()
            relay.device_count()
            times.append((middle - begin, time.perf_counter() - middle))
        sleeps = sides["relay"].sleeps()
        for _ in range(a.round_trips):
            relay.device_count()
        sleeps = sides["relay"].sleeps() - sleeps
    median = {side: statistics.median(each) * 1e6 for side, each in zip(("plain", "relay"), zip(*times, strict=True), strict=True)}
    added = statistics.median(relayed - direct for direct, relayed in times) * 1e6
    return median | {"added": added, "wake-ups": sleeps / a.round_trips}


def token_ms(side: str, model: Path, a: argparse.Namespace) -> float:
    """Median time per token of one client, on a fresh server or locally."""
    options = ["--prompt", "16", "--generate", str(a.generate), "--threads", str(a.threads), "--times"]
    if side == "local":
        with Client(model, options) as client:
            at = client.report(CLIENT_S)["gen_at"]
    else:
        with start(side, a) as server, Client(model, [*options, "--rpc", server.endpoint]) as client:
            at = client.report(CLIENT_S)["gen_at"]
            if not client.rpc_buffers():
                raise ClientError("the model did not run on the server")
    return statistics.median(after - before for before, after in itertools.pairwise(at)) * 1e3


def together(model: Path, count: int, a: argparse.Namespace) -> float:
    """Tokens per second of `count` clients on one server while all of them decode."""
    options = ["--prompt", "16", "--generate", str(a.generate), "--threads", "1", "--times", "--barrier"]
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(start("ours", a))
        each = [[*options, "--seed", str(n), "--rpc", server.endpoint] for n in range(count)]
        clients = [stack.enter_context(Client(model, options)) for options in each]
        for client in clients:
            client.wait_for("ready", CLIENT_S)
        for client in clients:
            client.release()
        reports = [client.report(CLIENT_S)["gen_at"] for client in clients]
    begin, end = max(at[0] for at in reports), min(at[-1] for at in reports)
    if end <= begin:
        raise ClientError("the clients did not decode at the same time: more tokens are needed")
    return sum(begin < t <= end for at in reports for t in at) / (end - begin)


def idle(model: Path, a: argparse.Namespace) -> float:
    """CPU usage, in percent of a core, of a server with an open but idle session."""
    options = ["--prompt", "16", "--generate", "16", "--threads", "1"]
    with start("ours", a) as server:
        options += ["--rpc", server.endpoint]
        with Client(model, options) as client:
            client.report(CLIENT_S)
        with Client(model, [*options, "--barrier"]) as client:
            client.wait_for("ready", CLIENT_S)
            time.sleep(0.2)  # exclude the session's last work and the time for which threads spin afterwards
            begin, used = time.monotonic(), server.cpu_seconds()
            time.sleep(a.idle)
            return 100 * (server.cpu_seconds() - used) / (time.monotonic() - begin)


def short(value: float) -> str:
    """Format with three digits, or all digits before the point."""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def shown(s: Spread) -> str:
    return f"{short(s.median)} [{short(s.low)}-{short(s.high)}]"


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of the server, and of the tiny model's client")
    p.add_argument("--types", default="f32,q4_0", help="comma-separated types of the tiny model")
    p.add_argument("--generate", type=int, default=300, help="tokens per client")
    p.add_argument("--clients", default="1,2,4", help="numbers of concurrent clients")
    p.add_argument("--clients-size", default="tiny", help="size of their model, for make_model.py")
    p.add_argument("--clients-type", default="q4_0", help="type of the weights of their model")
    p.add_argument("--transfer", type=int, default=1024, metavar="MIB", help="size of uploads and downloads")
    p.add_argument("--round-trips", type=int, default=5000)
    p.add_argument("--small", type=int, default=50_000, help="small uploads")
    p.add_argument("--idle", type=float, default=4.0, metavar="S", help="seconds to watch an idle server")
    p.add_argument("--only", choices=("sockets", "tiny", "clients", "idle", "relay"), help="only this part")
    p.add_argument("--models", type=Path, default=ROOT / "models", help="folder of the models, which are created if absent")
    p.add_argument("--binary", type=Path, help="our server (default: target/release/rpc-server)")
    p.add_argument("--check", action="store_true", help="exit with status 1 if a bound is violated")
    p.add_argument("--json", type=Path, help="write every measurement and the summary here")
    p.add_argument("--smoke", action="store_true", help="minimal run, to check that the benchmark works")
    a = p.parse_args()
    if a.smoke:
        a.rounds, a.types, a.generate, a.clients, a.transfer = 1, "q4_0", 40, "1,2", 8
        a.round_trips, a.small, a.idle = 200, 500, 0.2
    warn_if_busy()
    parts = (a.only,) if a.only else ("sockets", "tiny", "clients", "idle", "relay")
    counts = [int(n) for n in a.clients.split(",")]
    runs: dict = {part: defaultdict(lambda: defaultdict(list)) for part in (*parts, "in turn")}
    for n in range(a.rounds):
        print(f"round {n + 1} of {a.rounds}", file=sys.stderr, flush=True)
        if "sockets" in parts:
            for side in rotated(("ours", "peer"), n):
                with start(side, a) as server:
                    for name, value in sockets(server, a).items():
                        runs["sockets"][name][side].append(value)
        if "tiny" in parts:
            for dtype in a.types.split(","):
                model = Model(dtype).ensure(a.models)
                for side in rotated(("ours", "peer", "local"), n):
                    runs["tiny"][dtype][side].append(token_ms(side, model, a))
        if "clients" in parts:
            model = Model(a.clients_type, size=a.clients_size).ensure(a.models)
            for count in rotated(tuple(counts), n):
                runs["clients"]["tok/s"][count].append(together(model, count, a))
        if "idle" in parts:
            runs["idle"]["percent"]["ours"].append(idle(Model("q4_0").ensure(a.models), a))
        if "relay" in parts:
            with relayed(a) as sides:
                for name, value in in_turn(sides, a).items():
                    runs["in turn"][name]["relay"].append(value)
                for side in rotated(("plain", "relay"), n):
                    for name, value in sockets(sides[side], a).items():
                        runs["relay"][name][side].append(value)
    report(runs, a)


def report(runs: dict, a: argparse.Namespace) -> None:
    """Print the tables and bounds, and write the JSON."""
    bounds, summary = [], {}
    for part, (first, other), title in (("sockets", ("ours", "peer"), "llama.cpp"), ("relay", ("relay", "plain"), "plain")):
        if part not in runs:
            continue
        print(f"{'':28} {first:24} {title:24} {'ratio':>6}")
        for name, sides in runs[part].items():
            both, to = {side: Spread.of(values) for side, values in sides.items()}, ratio(sides[first], sides[other])
            better = "  (lower is better)" if name in LOWER_IS_BETTER else ""
            print(f"{name:28} {shown(both[first]):24} {shown(both[other]):24} {to.median:6.2f}{better}")
            summary[name if part == "sockets" else f"{part}: {name}"] = both | {"ratio": to}
    if found := runs["in turn"]:
        each = {name: Spread.of(sides["relay"]) for name, sides in found.items()}
        summary["relay: round trips in turn (us)"] = each
        print(
            f"round trips in turn, us: plain {shown(each['plain'])}, relay {shown(each['relay'])}, added {shown(each['added'])}; "
            f"wake-ups of the relay per round trip: {shown(each['wake-ups'])}"
        )
    for dtype, sides in runs.get("tiny", {}).items():
        each = {side: Spread.of(values) for side, values in sides.items()}
        added = {side: each[side].median - each["local"].median for side in ("ours", "peer")}
        print(f"tiny {dtype}, ms per token: " + ", ".join(f"{side} {shown(s)}" for side, s in each.items()))
        print(f"tiny {dtype}, added by the server: ours {added['ours']:.3f} ms, llama.cpp's server {added['peer']:.3f} ms")
        share = added["ours"] / added["peer"] if added["peer"] > 0 else float("nan")
        bounds.append(Bound(f"tiny {dtype}: what we add to a token / what its server adds", share, most=0.6))
        summary[f"tiny {dtype} (ms per token)"] = each | {"added": added}
    if "clients" in runs:
        found = runs["clients"]["tok/s"]
        model = f"{a.clients_size} {a.clients_type}"
        for count in sorted(found):
            total = Spread.of(found[count])
            summary[f"{count} clients of {model} (tok/s)"] = total
            print(f"{count} clients of {model}, tok/s of all: {shown(total)}")
        one, most = min(found), max(found)
        what = f"{most} clients of {model} / {one}"
        bounds.append(Bound(what, ratio(found[most], found[one]).median, least=0.9))
    if "idle" in runs:
        percent = Spread.of(runs["idle"]["percent"]["ours"])
        summary["idle (% of a core)"] = percent
        bounds.append(Bound("idle server with an open session, % of a core", percent.median, most=0.5))
    finish(bounds, a.check, a.json, {"summary": summary, "runs": runs})


if __name__ == "__main__":
    try:
        main()
    except (ClientError, ServerError, OSError) as e:
        sys.exit(str(e))
