"""examples/generate over servers that are killed, stopped and started again: rows of test_generate.py's table."""

import json
import queue
import random
import re
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from clients import ClientError, Model, tail
from relay import Relay
from servers import START_S, Server, ServerError, ours

ERROR_S = 5.0  # from the death of a server to the end of a run that does not wait for it
RUN_S = 120.0
BIG_S = 900.0
TOKENS = 600
TWELVE = 12
# Servers that may send to each other.
PEERS = ("--peer", "127.0.0.1")
# Bytes of a decoded token between a client and one of two servers of the tiny model: its inputs (1 KB is the mask), messages,
# and from the last one the logits.
INPUTS, LOGITS = 3 << 10, 2 << 10
MESSAGES = 256
PROMPT = ",".join(str(259 + 7919 * i % 200) for i in range(24))


class Run:
    """A generate process whose progress can be followed; `with` makes sure that it does not outlive its test."""

    def __init__(self, argv: list[str]):
        self.argv = argv

    def __enter__(self) -> "Run":
        # It logs each token.
        argv = [*self.argv, "--log-level", "debug"]
        self._process = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
        )
        self.out = ""
        self._lines: list[str] = []
        self._news: queue.Queue[str | None] = queue.Queue()
        self._threads = [threading.Thread(target=read, daemon=True) for read in (self._read_out, self._read_err)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def _read_out(self) -> None:
        assert self._process.stdout
        self.out = self._process.stdout.read()

    def _read_err(self) -> None:
        assert self._process.stderr
        for line in self._process.stderr:
            self._lines.append(line)
            self._news.put(line)
        self._news.put(None)

    @property
    def err(self) -> str:
        return "".join(self._lines)

    def wait_for(self, pattern: str) -> None:
        """Until a line of the log, of those not seen yet, has it."""
        deadline = time.monotonic() + RUN_S
        while True:
            try:
                line = self._news.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise ClientError(f"no {pattern!r} within {RUN_S:.0f} s:\n{tail(self.err)}") from None
            if line is None:
                raise ClientError(f"ended before {pattern!r}:\n{tail(self.err)}")
            if re.search(pattern, line):
                return

    def wait_for_token(self, number: int) -> None:
        self.wait_for(rf"\btoken {number}: ")

    def end(self, seconds: float) -> int:
        """The exit code."""
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise ClientError(f"still running after {seconds:.0f} s:\n{tail(self.err)}") from None
        for thread in self._threads:
            thread.join()
        return code

    def report(self, seconds: float = RUN_S) -> dict:
        if code := self.end(seconds):
            raise ClientError(f"ended with {code}:\n{tail(self.err)}")
        return json.loads(self.out.splitlines()[-1])

    def error(self) -> str:
        """The last line that it said."""
        return self._lines[-1].strip() if self._lines else ""


def sent(report: dict, phase: str) -> list[int]:
    """By server."""
    return [link[phase]["sent"] for link in report["links"]]


def received(report: dict, phase: str) -> list[int]:
    return [link[phase]["received"] for link in report["links"]]


class Lost:
    """Rows about servers that are lost."""

    def __init__(self, binary: Path, server: Path, model: Callable[[Model], Path]):
        self.binary, self.server, self.model = binary, server, model
        self._undisturbed: dict[tuple[str, ...], str] = {}

    def rows(self, full: bool) -> list[tuple[str, Callable[[], str]]]:
        greedy, random_ = (), ("--temp", "0.8", "--top-p", "0.9", "--seed", "7")
        rows = [
            ("links: bytes of a token over two servers", self.links),
            ("lost: not back in time", self.not_back),
            ("lost: killed, beside a CPU", lambda: self.killed("1", (), cpu=True)),
            ("lost: killed and back, beside a CPU", self.beside),
            ("lost: killed and back, tokens drawn at random", lambda: self.back("4", (), random_)),
            ("lost: killed and back, the text", self.text),
            ("lost: killed and back, weights on its disk", self.disk),
            ("lost: a line between servers, reset", self.line),
            ("lost: a line, cut without a word", self.cut),
        ]
        for peers, what in (((), ""), (PEERS, ", peers")):
            rows += [
                (f"lost: stopped{what}", lambda o=peers: self.stopped(o)),
                (f"lost: stopped and back{what}", lambda o=peers: self.resumed(o)),
                (f"lost: killed, depth 1{what}", lambda o=peers: self.killed("1", o)),
                (f"lost: killed, depth 4{what}", lambda o=peers: self.killed("4", o)),
                (f"lost: killed and back, depth 1{what}", lambda o=peers: self.back("1", o, greedy)),
                (f"lost: killed and back, depth 4{what}", lambda o=peers: self.back("4", o, greedy)),
                (f"lost: killed again while it loads{what}", lambda o=peers: self.again(o)),
                (f"lost: three of {TWELVE} servers killed at random{what}", lambda o=peers: self.twelve(o)),
            ]
        if full:
            rows.append(("lost: 1b, killed while it loads", self.loading))
        return rows

    def start(self, stack: ExitStack, options: tuple[str, ...] = (), port: int = 0) -> Server:
        """A server; on a port that one was killed on, once the system gives it."""
        deadline = time.monotonic() + START_S
        while True:
            with suppress(ServerError):
                return stack.enter_context(ours(1, binary=self.server, port=port, options=options))
            if time.monotonic() > deadline or not port:
                raise ServerError(f"no server on port {port} within {START_S:.0f} s")

    def again_on(self, stack: ExitStack, server: Server, options: tuple[str, ...] = ()) -> Server:
        return self.start(stack, options, int(server.endpoint.rsplit(":", 1)[1]))

    def argv(self, where: list[str], *options: str, size: str = "tiny", tokens: int = TOKENS) -> list[str]:
        model = self.model(Model("f32", size=size))
        argv = [str(self.binary), str(model), "--tokens", PROMPT, "-n", str(tokens), "--ignore-eos", "-t", "1"]
        return [*argv, *where, *options]

    def undisturbed(self, *options: str, size: str = "tiny", tokens: int = TOKENS) -> str:
        """What a run on a CPU device of its own prints."""
        key = (size, str(tokens), *options)
        if key not in self._undisturbed:
            with Run(self.argv(["--device", "CPU"], *options, size=size, tokens=tokens)) as run:
                if code := run.end(BIG_S):
                    raise ClientError(f"undisturbed, it ended with {code}:\n{tail(run.err)}")
                self._undisturbed[key] = run.out
        return self._undisturbed[key]

    def same(self, run: Run, losses: int, *options: str, size: str = "tiny", tokens: int = TOKENS) -> str:
        """Whether a run ends with the tokens of an undisturbed one."""
        report = run.report(RUN_S if size != "1b" else BIG_S)
        want = json.loads(self.undisturbed(*options, "--json", size=size, tokens=tokens))["tokens"]
        if report["tokens"] != want:
            at = next(i for i, (a, b) in enumerate(zip(report["tokens"] + [-1], want)) if a != b)
            return f"other tokens from number {at} on:\n{tail(run.err)}"
        if report["losses"] < losses or not report["recoveries"]:
            return f"lost {report['losses']} servers, recovered {report['recoveries']} times, of {losses}"
        return ""

    def named(self, run: Run, server: Server, since: float, seconds: float, *words: str) -> str:
        """Whether a run ends in time, with an error that names the server."""
        code = run.end(seconds)
        took = time.monotonic() - since
        if code == 0:
            return "it ended as if nothing had happened"
        error = run.error()
        if not error.startswith("generate: ") or not all(word in error for word in (server.endpoint, *words)):
            return f"the last words were:\n{tail(run.err)}"
        return "" if took <= seconds else f"it took {took:.1f} s"

    def killed(self, depth: str, peers: tuple[str, ...], cpu: bool = False) -> str:
        with ExitStack() as stack:
            first, last = self.start(stack, peers), self.start(stack, peers)
            where = ["--device", f"CPU,{last.endpoint}"] if cpu else ["--rpc", f"{first.endpoint},{last.endpoint}"]
            for victim in (last,) if cpu else (first, last):
                run = stack.enter_context(Run(self.argv(where, "--json", "--depth", depth, tokens=4000)))
                run.wait_for_token(50)
                since = time.monotonic()
                victim.kill()
                if wrong := self.named(run, victim, since, ERROR_S, "connection lost"):
                    return wrong
                if victim is first:
                    first = self.again_on(stack, first, peers)
        return ""

    def stopped(self, peers: tuple[str, ...]) -> str:
        for at in (0, 1):
            with ExitStack() as stack:
                servers = [self.start(stack, peers), self.start(stack, peers)]
                where = ["--rpc", ",".join(server.endpoint for server in servers)]
                run = stack.enter_context(Run(self.argv(where, "--json", "--rpc-timeout", "2", tokens=4000)))
                run.wait_for_token(50)
                since = time.monotonic()
                servers[at].pause()
                # The whole deadline counts from when the server was heard last.
                if wrong := self.named(run, servers[at], since, 2 + ERROR_S, "sent nothing for 2s", "due"):
                    return f"number {at}: {wrong}"
        return ""

    def not_back(self) -> str:
        with ExitStack() as stack:
            first, last = self.start(stack), self.start(stack)
            where = ["--rpc", f"{first.endpoint},{last.endpoint}"]
            run = stack.enter_context(Run(self.argv(where, "--json", "--retry", "2", tokens=4000)))
            run.wait_for_token(50)
            since = time.monotonic()
            last.kill()
            return self.named(run, last, since, 2 + ERROR_S, "not back within 2s")

    def back(self, depth: str, peers: tuple[str, ...], options: tuple[str, ...]) -> str:
        """The one, and then the other."""
        with ExitStack() as stack:
            first, last = self.start(stack, peers), self.start(stack, peers)
            where = ["--rpc", f"{first.endpoint},{last.endpoint}", "--retry", "--depth", depth]
            run = stack.enter_context(Run(self.argv(where, *options, "--json")))
            run.wait_for_token(20)
            first.kill()
            run.wait_for("connection lost")
            self.again_on(stack, first, peers)
            run.wait_for_token(300)
            last.kill()
            self.again_on(stack, last, peers)
            return self.same(run, 2, *options)

    def disk(self) -> str:
        """What is lost comes from the server's disk, and stays where it is on a server that lives."""
        folder = self.model(Model("f32")).parent
        with ExitStack() as stack:
            first, last = self.start(stack), self.start(stack, ("--models", str(folder)))
            where = ["--rpc", f"{first.endpoint},{last.endpoint}", "--retry"]
            run = stack.enter_context(Run(self.argv(where, "--json")))
            run.wait_for_token(100)
            last.kill()
            self.again_on(stack, last, ("--models", str(folder)))
            if wrong := self.same(run, 1):
                return wrong
            report = run.report()
            weights = min(device["weight_bytes"] for device in report["devices"])
            one, other = sent(report, "load")
            if one < weights or other > weights / 10:
                return f"{one} and {other} bytes were sent to load, at least {weights} are weights"
            recovered = sent(report, "recovery")
            # What is computed again takes less than that.
            if not 0 < max(recovered) < weights / 2:
                return f"{recovered} bytes were sent to recover, {weights} are weights"
        return ""

    def links(self) -> str:
        """Of a decoded token only inputs and logits pass through here, where servers send to each other."""
        for depth in ("1", "4"):
            with ExitStack() as stack:
                first, last = self.start(stack, PEERS), self.start(stack, PEERS)
                where = ["--rpc", f"{first.endpoint},{last.endpoint}", "--depth", depth]
                run = stack.enter_context(Run(self.argv(where, "--json")))
                report = run.report()
                each = [bytes_ / (TOKENS - 1) for bytes_ in (*sent(report, "decode"), *received(report, "decode"))]
                limits = (INPUTS, INPUTS, MESSAGES, LOGITS + MESSAGES)
                if len(each) != 4 or any(not 0 < got <= limit for got, limit in zip(each, limits)):
                    return f"depth {depth}: {each} bytes for each token, at most {limits} are inputs and logits"
        return ""

    def text(self) -> str:
        with ExitStack() as stack:
            first, last = self.start(stack), self.start(stack)
            where = ["--rpc", f"{first.endpoint},{last.endpoint}", "--retry"]
            run = stack.enter_context(Run(self.argv(where)))
            run.wait_for_token(200)
            last.kill()
            self.again_on(stack, last)
            if code := run.end(RUN_S):
                return f"ended with {code}:\n{tail(run.err)}"
            if "servers were lost 1 times" not in run.err:
                return f"nothing was lost:\n{tail(run.err)}"
            return "" if run.out == self.undisturbed() else f"printed {run.out!r}"

    def resumed(self, peers: tuple[str, ...]) -> str:
        for at in (0, 1):
            with ExitStack() as stack:
                servers = [self.start(stack, peers), self.start(stack, peers)]
                where = ["--rpc", ",".join(server.endpoint for server in servers), "--retry", "--rpc-timeout", "1"]
                run = stack.enter_context(Run(self.argv(where, "--json")))
                run.wait_for_token(50)
                servers[at].pause()
                run.wait_for("connection lost")
                servers[at].resume()
                if wrong := self.same(run, 1):
                    return f"number {at}: {wrong}"
        return ""

    def beside(self) -> str:
        """The times of a device here have nothing of what a lost server costs, also where that is more than all the rest."""
        with ExitStack() as stack:
            server = self.start(stack)
            where = ["--device", f"CPU,{server.endpoint}", "--split", "3,1", "--depth", "1", "--retry"]
            run = stack.enter_context(Run(self.argv(where, "--json", tokens=3 * TOKENS)))
            for token in (TOKENS // 2, TOKENS, TOKENS * 3 // 2):
                run.wait_for_token(token)
                server.kill()
                server = self.again_on(stack, server)
                run.wait_for("is back")
            if wrong := self.same(run, 3, tokens=3 * TOKENS):
                return wrong
            report = run.report()
            busy, whole = report["devices"][0]["gen_s"], report["gen_s"]
        return "" if busy <= whole else f"the CPU decoded for {busy} s, and the run for {whole} s"

    def line(self) -> str:
        """Only what the one server has opened to the other ends: both are there all the time."""
        with ExitStack() as stack:
            first, last = self.start(stack, PEERS), self.start(stack)
            relay = stack.enter_context(Relay(last.endpoint))
            where = ["--rpc", f"{first.endpoint},{relay.endpoint}", "--retry"]
            run = stack.enter_context(Run(self.argv(where, "--json")))
            # The client's comes first.
            for number, token in ((1, 50), (2, 200)):
                run.wait_for_token(token)
                relay.line(number).reset_at_next()
                run.wait_for("cannot copy to")
            if wrong := self.same(run, 0):
                return wrong
            report, lines = run.report(), len(relay.lines())
            if report["losses"] or lines != 4:
                return f"{report['losses']} losses, {lines} connections:\n{tail(run.err)}"
        return ""

    def cut(self) -> str:
        """The server does not know that a connection is lost, and has no room for the next one until it does."""
        with ExitStack() as stack:
            roomy = self.start(stack)
            with Run(self.argv(["--rpc", roomy.endpoint], "--json")) as run:
                device = run.report()["devices"][0]
            needs = device["weight_bytes"] + device["cache_bytes"] + device["compute_bytes"]
            server = self.start(stack, ("--mem", str(needs * 3 // 2)))
            relay = stack.enter_context(Relay(server.endpoint))
            where = ["--rpc", relay.endpoint, "--retry", "--rpc-timeout", "1"]
            run = stack.enter_context(Run(self.argv(where, "--json")))
            run.wait_for_token(50)
            relay.line(0).freeze()
            run.wait_for("may still hold the memory of the lost connection")
            relay.line(0).end()
            return self.same(run, 1)

    def again(self, peers: tuple[str, ...]) -> str:
        """Killed as soon as it is reached again, several times: each time while it loads, or a little later."""
        with ExitStack() as stack:
            first, last = self.start(stack, peers), self.start(stack, peers)
            where = ["--rpc", f"{first.endpoint},{last.endpoint}", "--retry"]
            run = stack.enter_context(Run(self.argv(where, "--json")))
            run.wait_for_token(100)
            for _ in range(3):
                last.kill()
                last = self.again_on(stack, last, peers)
                run.wait_for("is back")
            last.kill()
            self.again_on(stack, last, peers)
            return self.same(run, 4)

    def twelve(self, peers: tuple[str, ...], seed: int = 7) -> str:
        """Three are killed at random tokens, and back after random times, which may overlap."""
        tokens, chance = 300, random.Random(seed)
        with ExitStack() as stack:
            servers = [self.start(stack, peers) for _ in range(TWELVE)]
            where = ["--rpc", ",".join(server.endpoint for server in servers), "--split", ",".join("1" * TWELVE)]
            run = stack.enter_context(Run(self.argv([*where, "--retry"], "--json", size="deep", tokens=tokens)))
            victims = chance.sample(range(TWELVE), 3)
            moments = sorted(chance.sample(range(5, 200), 3))
            failed: list[str] = []

            def restart(victim: int, after: float) -> None:
                time.sleep(after)  # how long it is away, which nothing waits for
                try:
                    self.again_on(stack, servers[victim], peers)
                except ServerError as e:
                    failed.append(str(e))

            threads = []
            for victim, moment in zip(victims, moments):
                run.wait_for_token(moment)
                servers[victim].kill()
                threads.append(threading.Thread(target=restart, args=(victim, chance.uniform(0.0, 1.0))))
                threads[-1].start()
            wrong = self.same(run, 3, size="deep", tokens=tokens)
            for thread in threads:
                thread.join()
            idle = [device["name"] for device in run.report()["devices"] if not device["layers"]]
            return wrong or "".join(failed) or (f"no layers on {idle}" if idle else "")

    def loading(self) -> str:
        with ExitStack() as stack:
            first, last = self.start(stack), self.start(stack)
            where = ["--rpc", f"{first.endpoint},{last.endpoint}", "--retry"]
            run = stack.enter_context(Run(self.argv(where, "--json", size="1b", tokens=8)))
            deadline = time.monotonic() + BIG_S
            while last.resident() < 500 << 20:
                if time.monotonic() > deadline:
                    return "nothing is loaded"
                time.sleep(0.01)  # a poll with a deadline
            last.kill()
            self.again_on(stack, last)
            return self.same(run, 1, size="1b", tokens=8)
