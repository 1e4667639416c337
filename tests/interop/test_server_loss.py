"""examples/generate over servers that are killed, stopped and restarted: rows of the table of test_generate.py.

A killed server is its supervisor and its worker, unless a row says that the worker alone is killed.

Without --retry a run must end soon with an error that names the lost server. With --retry it must continue on the restarted
server and produce the tokens of an undisturbed run.
"""

import fcntl
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

ERROR_S = 5.0  # upper bound from the loss of a server to the end of a run without --retry
RUN_S = 120.0
BIG_S = 900.0
TOKENS = 600
SERVERS = 12
# Option of servers that may copy to each other directly.
PEERS = ("--peer", "127.0.0.1:*")  # the servers choose free ports
# Bytes of messages of the extension (docs/protocol.md). Requests and notifications have a header of 9 bytes.
HEADER, SPAN, SHAPE, TRANSFER_TOKEN = 9, 24, 20, 16
WRITE = HEADER + 4 + SPAN + SHAPE  # before its data
RUN_GRAPH = HEADER + 4 + 8
READ = HEADER + 4 + 8 + SPAN
READ_DATA = HEADER + 8  # before its data
SEND_TO_PEER = HEADER + 4 + SPAN + TRANSFER_TOKEN + 4 + len("127.0.0.1:65535")
RECEIVE_FROM_PEER = HEADER + 4 + SPAN + TRANSFER_TOKEN
# Slack for what orders the queues: eight of MARK, WAIT and NOTIFY_REACHED with up to 25 bytes to a server, and eight MARK_REACHED with
# 21 bytes from it. It is less than a mask (1 KiB for 256 cells) or the logits (2 KiB for 512 tokens) would be.
ORDER_SENT, ORDER_RECEIVED = 8 * (HEADER + 4 + 4 + 8), 8 * (HEADER + 4 + 8)
# Upper bounds in bytes per decoded token of one sequence, sampled greedily, between the client and two servers that copy to each other.
# The first server gets the token (4 bytes), its position for ROPE (4), its tag (4), position (4) and cell (8) for the mask, and
# sends the hidden state to the last server. The last one needs no token. It returns the sampled token and its probability, 4 bytes each.
# Its reply with new transfer tokens counts 16 bytes for each token, and one for the share of its header.
FIRST_SENT = 5 * WRITE + 24 + RUN_GRAPH + SEND_TO_PEER + ORDER_SENT
LAST_SENT = 4 * WRITE + 20 + RUN_GRAPH + RECEIVE_FROM_PEER + 2 * READ + ORDER_SENT
FIRST_RECEIVED = ORDER_RECEIVED
LAST_RECEIVED = 2 * (READ_DATA + 4) + TRANSFER_TOKEN + 1 + ORDER_RECEIVED
PROMPT = ",".join(str(259 + 7919 * i % 200) for i in range(24))


class GenerateRun:
    """A generate process. Tests follow its progress in its log; leaving the `with` block kills it.

    It writes its log to a small pipe that is read as the test goes on, so that it is at most about 200 lines (a line per token) ahead of
    the test, however busy the machine is.
    """

    def __init__(self, argv: list[str]):
        self.argv = argv

    def __enter__(self) -> "GenerateRun":
        # At level debug, generate logs each token.
        argv = [*self.argv, "--log-level", "debug"]
        self._process = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
        )
        self.out = ""
        self._lines: list[str] = []
        self._new_lines: queue.Queue[str | None] = queue.Queue(maxsize=1)
        fcntl.fcntl(self._process.stderr, fcntl.F_SETPIPE_SZ, 4096)
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
            self._new_lines.put(line)
        self._new_lines.put(None)

    @property
    def err(self) -> str:
        return "".join(self._lines)

    def wait_for(self, pattern: str) -> None:
        """Wait for a log line that matches `pattern`, among the lines after the last match."""
        deadline = time.monotonic() + RUN_S
        while True:
            try:
                line = self._new_lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise ClientError(f"generate has not logged {pattern!r} within {RUN_S:.0f} s:\n{tail(self.err)}") from None
            if line is None:
                raise ClientError(f"generate ended before it logged {pattern!r}:\n{tail(self.err)}")
            if re.search(pattern, line):
                return

    def wait_for_token(self, number: int) -> None:
        self.wait_for(rf"\btoken {number}: ")

    def end(self, seconds: float) -> int:
        """Wait for the process to end. Returns the exit code."""
        deadline = time.monotonic() + seconds
        try:
            while self._new_lines.get(timeout=max(0.0, deadline - time.monotonic())) is not None:
                pass
            self._new_lines.put(None)  # for another call
            code = self._process.wait(max(0.0, deadline - time.monotonic()))
        except (queue.Empty, subprocess.TimeoutExpired):
            raise ClientError(f"generate is still running after {seconds:.0f} s:\n{tail(self.err)}") from None
        for thread in self._threads:
            thread.join()
        return code

    def report(self, seconds: float = RUN_S) -> dict:
        if code := self.end(seconds):
            raise ClientError(f"generate ended with {code}:\n{tail(self.err)}")
        return json.loads(self.out.splitlines()[-1])

    def error(self) -> str:
        """The last line of standard error."""
        return self._lines[-1].strip() if self._lines else ""


def sent(report: dict, phase: str) -> list[int]:
    """Bytes sent in a phase of the run, by server."""
    return [link[phase]["sent"] for link in report["links"]]


def sent_without_graphs(report: dict, phase: str) -> list[int]:
    """As `sent`, without the messages that carry a graph: there is a new one every 256 positions."""
    return [link[phase]["sent"] - link[phase]["sent_graphs"] for link in report["links"]]


def received(report: dict, phase: str) -> list[int]:
    """Bytes received in a phase of the run, by server."""
    return [link[phase]["received"] for link in report["links"]]


def start_server(stack: ExitStack, binary: Path, options: tuple[str, ...] = (), port: int = 0) -> Server:
    """Start a server. A given port may still be in use by a killed server, so binding to it is retried."""
    deadline = time.monotonic() + START_S
    while True:
        with suppress(ServerError):
            return stack.enter_context(ours(1, binary=binary, port=port, options=options))
        if time.monotonic() > deadline or not port:
            raise ServerError(f"no server on port {port} within {START_S:.0f} s")


class ServerLossRows:
    """The rows: each method is a test and returns its failure, or an empty text."""

    def __init__(self, binary: Path, server: Path, model: Callable[[Model], Path]):
        self.binary, self.server, self.model = binary, server, model
        self._reference_outputs: dict[tuple[str, ...], str] = {}

    def rows(self, full: bool) -> list[tuple[str, Callable[[], str]]]:
        greedy, sampled = (), ("--temp", "0.8", "--top-p", "0.9", "--seed", "7")
        rows = [
            ("links: bytes per token over two servers", self.link_traffic),
            ("server loss: not restarted before the retry timeout", self.not_restarted),
            ("server loss: killed, with a local CPU device", lambda: self.killed("1", (), cpu=True)),
            ("server loss: restarted, with a local CPU device", self.with_local_cpu),
            ("server loss: restarted, random sampling", lambda: self.killed_and_restarted("4", (), sampled)),
            ("server loss: workers killed", self.workers_killed),
            ("server loss: restarted, many prompts", self.many_prompts),
            ("server loss: restarted, printed text", self.printed_text),
            ("server loss: restarted, weights on the server's disk", self.weights_on_disk),
            ("server loss: peer connection reset", self.peer_connection_reset),
            ("server loss: connection frozen, memory still held", self.frozen_connection),
        ]
        for peers, what in (((), ""), (PEERS, ", peers")):
            rows += [
                (f"server loss: stopped{what}", lambda o=peers: self.stopped(o)),
                (f"server loss: stopped and resumed{what}", lambda o=peers: self.resumed(o)),
                (f"server loss: killed, depth 1{what}", lambda o=peers: self.killed("1", o)),
                (f"server loss: killed, depth 4{what}", lambda o=peers: self.killed("4", o)),
                (f"server loss: restarted, depth 1{what}", lambda o=peers: self.killed_and_restarted("1", o, greedy)),
                (f"server loss: restarted, depth 4{what}", lambda o=peers: self.killed_and_restarted("4", o, greedy)),
                (f"server loss: killed again while loading{what}", lambda o=peers: self.killed_again(o)),
                (f"server loss: three of {SERVERS} killed at random{what}", lambda o=peers: self.random_losses(o)),
            ]
        if full:
            rows.append(("server loss: 1b, killed while loading", self.killed_while_loading))
        return rows

    def start_server(self, stack: ExitStack, options: tuple[str, ...] = (), port: int = 0) -> Server:
        return start_server(stack, self.server, options, port)

    def restart(self, stack: ExitStack, server: Server, options: tuple[str, ...] = ()) -> Server:
        return self.start_server(stack, options, int(server.endpoint.rsplit(":", 1)[1]))

    def await_index(self, server: Server) -> None:
        """Wait until the server has hashed its models: until then, clients upload."""
        deadline = time.monotonic() + RUN_S
        argv = [str(self.server), "--status", server.endpoint]
        while time.monotonic() < deadline:
            status = subprocess.run(argv, capture_output=True, text=True, check=False).stdout
            counts = re.search(r"\(--models\): (\d+) of (\d+)", status)
            if counts and counts[1] == counts[2]:
                return
            time.sleep(0.1)
        raise ServerError(f"{server.endpoint} has not hashed its models within {RUN_S:.0f} s")

    def argv(self, placement: list[str], *options: str, size: str = "tiny", tokens: int = TOKENS) -> list[str]:
        model = self.model(Model("f32", size=size))
        argv = [str(self.binary), str(model), "--tokens", PROMPT, "-n", str(tokens), "--ignore-eos", "-t", "1"]
        return [*argv, *placement, *options]

    def reference_output(self, *options: str, size: str = "tiny", tokens: int = TOKENS) -> str:
        """The output of a run on a local CPU device."""
        key = (size, str(tokens), *options)
        if key not in self._reference_outputs:
            with GenerateRun(self.argv(["--device", "CPU"], *options, size=size, tokens=tokens)) as run:
                if code := run.end(BIG_S):
                    raise ClientError(f"the undisturbed run ended with {code}:\n{tail(run.err)}")
                self._reference_outputs[key] = run.out
        return self._reference_outputs[key]

    def check_tokens(self, run: GenerateRun, losses: int, *options: str, size: str = "tiny", tokens: int = TOKENS) -> str:
        """Check that a run produces the tokens of an undisturbed run, after at least `losses` lost servers."""
        report = run.report(RUN_S if size != "1b" else BIG_S)
        want = json.loads(self.reference_output(*options, "--json", size=size, tokens=tokens))["tokens"]
        if report["tokens"] != want:
            at = next(i for i, (a, b) in enumerate(zip(report["tokens"] + [-1], want)) if a != b)
            return f"the tokens differ from token {at} on:\n{tail(run.err)}"
        if report["losses"] < losses or not report["recoveries"]:
            return f"{report['losses']} losses and {report['recoveries']} recoveries, expected {losses} losses"
        return ""

    def check_error(self, run: GenerateRun, server: Server, since: float, seconds: float, *words: str) -> str:
        """Check that a run ends in time with an error that names the server and contains `words`."""
        code = run.end(seconds)
        took = time.monotonic() - since
        if code == 0:
            return "the run succeeded although a server was lost"
        error = run.error()
        if not error.startswith("generate: ") or not all(word in error for word in (server.endpoint, *words)):
            return f"the error does not name the server:\n{tail(run.err)}"
        return "" if took <= seconds else f"the run ended only after {took:.1f} s"

    def killed(self, depth: str, peers: tuple[str, ...], cpu: bool = False) -> str:
        with ExitStack() as stack:
            first, last = self.start_server(stack, peers), self.start_server(stack, peers)
            placement = ["--device", f"CPU,{last.endpoint}"] if cpu else ["--rpc", f"{first.endpoint},{last.endpoint}"]
            for victim in (last,) if cpu else (first, last):
                run = stack.enter_context(GenerateRun(self.argv(placement, "--json", "--depth", depth, tokens=4000)))
                run.wait_for_token(50)
                since = time.monotonic()
                victim.kill()
                if wrong := self.check_error(run, victim, since, ERROR_S, "connection lost"):
                    return wrong
                if victim is first:
                    first = self.restart(stack, first, peers)
        return ""

    def stopped(self, peers: tuple[str, ...]) -> str:
        for at in (0, 1):
            with ExitStack() as stack:
                servers = [self.start_server(stack, peers), self.start_server(stack, peers)]
                placement = ["--rpc", ",".join(server.endpoint for server in servers)]
                run = stack.enter_context(GenerateRun(self.argv(placement, "--json", "--rpc-timeout", "2", tokens=4000)))
                run.wait_for_token(50)
                since = time.monotonic()
                servers[at].pause()
                # The timeout counts from the last bytes of the server.
                if wrong := self.check_error(run, servers[at], since, 2 + ERROR_S, "sent nothing for 2s", "due"):
                    return f"server {at}: {wrong}"
        return ""

    def not_restarted(self) -> str:
        with ExitStack() as stack:
            first, last = self.start_server(stack), self.start_server(stack)
            placement = ["--rpc", f"{first.endpoint},{last.endpoint}"]
            run = stack.enter_context(GenerateRun(self.argv(placement, "--json", "--retry", "2", tokens=4000)))
            run.wait_for_token(50)
            since = time.monotonic()
            last.kill()
            return self.check_error(run, last, since, 2 + ERROR_S, "not back within 2s")

    def killed_and_restarted(self, depth: str, peers: tuple[str, ...], options: tuple[str, ...]) -> str:
        """Kill and restart the first server, and later the last one."""
        with ExitStack() as stack:
            first, last = self.start_server(stack, peers), self.start_server(stack, peers)
            placement = ["--rpc", f"{first.endpoint},{last.endpoint}", "--retry", "--depth", depth]
            run = stack.enter_context(GenerateRun(self.argv(placement, *options, "--json")))
            run.wait_for_token(20)
            first.kill()
            run.wait_for("connection lost")
            self.restart(stack, first, peers)
            run.wait_for_token(300)
            last.kill()
            self.restart(stack, last, peers)
            return self.check_tokens(run, 2, *options)

    def many_prompts(self) -> str:
        """Kill and restart the first server, and later the last one, while four prompts are continued and two wait."""
        model = self.model(Model("f32"))
        file = model.parent / "prompts.txt"
        ids = [[259 + 7919 * (i + 31 * length) % 200 for i in range(length)] for length in (3, 17, 8, 1, 12, 5)]
        file.write_text("".join(f"tokens: {','.join(map(str, prompt))}\n" for prompt in ids))
        # With an f16 KV cache, rounding differences are enough to change tokens: sequences join again with prompts of other lengths.
        argv = [str(self.binary), str(model), "--prompts", str(file), "--parallel", "4", "-n", "250", "--ignore-eos"]
        argv += ["-t", "1", "--kv-type", "f32", "--json"]
        with GenerateRun([*argv, "--device", "CPU,CPU", "--split", "1,1"]) as undisturbed:
            want = undisturbed.report()["replies"]
        with ExitStack() as stack:
            first, last = self.start_server(stack), self.start_server(stack)
            placement = ["--rpc", f"{first.endpoint},{last.endpoint}", "--split", "1,1", "--retry"]
            run = stack.enter_context(GenerateRun([*argv, *placement]))
            run.wait_for_token(20)
            first.kill()
            run.wait_for("connection lost")
            self.restart(stack, first)
            run.wait_for_token(150)
            last.kill()
            self.restart(stack, last)
            report = run.report()
            if wrong := [number + 1 for number, (a, b) in enumerate(zip(report["replies"], want)) if a != b]:
                return f"the replies to the prompts {wrong} differ:\n{tail(run.err)}"
            counts = (len(report["replies"]), report["losses"], report["recoveries"], report["errors"])
            if counts[0] != len(ids) or counts[1] < 2 or not counts[2] or any(counts[3]):
                return f"replies, losses, recoveries and errors: {counts}"
        return ""

    def workers_killed(self) -> str:
        """Kill the worker of the first server, and later that of the last one: their supervisors replace them."""
        with ExitStack() as stack:
            servers = [self.start_server(stack, PEERS), self.start_server(stack, PEERS)]
            placement = ["--rpc", ",".join(server.endpoint for server in servers), "--retry", "--depth", "4"]
            run = stack.enter_context(GenerateRun(self.argv(placement, "--json")))
            for server, token in zip(servers, (20, 300)):
                run.wait_for_token(token)
                server.kill_worker()
                run.wait_for("connection lost")
            if wrong := self.check_tokens(run, 2):
                return wrong
            deaths = [len(re.findall("supervisor: worker .* was killed by SIGKILL", server.log)) for server in servers]
            return "" if deaths == [1, 1] else f"the supervisors report {deaths} deaths"

    def weights_on_disk(self) -> str:
        """Weights of the lost server are loaded from its own disk again. Weights of the other server are not sent again."""
        folder = self.model(Model("f32")).parent
        with ExitStack() as stack:
            first, last = self.start_server(stack), self.start_server(stack, ("--models", str(folder)))
            self.await_index(last)
            placement = ["--rpc", f"{first.endpoint},{last.endpoint}", "--retry"]
            run = stack.enter_context(GenerateRun(self.argv(placement, "--json")))
            run.wait_for_token(100)
            last.kill()
            self.restart(stack, last, ("--models", str(folder)))
            if wrong := self.check_tokens(run, 1):
                return wrong
            report = run.report()
            weights = min(device["weight_bytes"] for device in report["devices"])
            one, other = sent(report, "load")
            if one < weights or other > weights / 10:
                return f"{one} and {other} bytes were sent while loading; the weights have at least {weights}"
            recovered = sent(report, "recovery")
            # Repeating the lost steps sends less than half the bytes of the weights.
            if not 0 < max(recovered) < weights / 2:
                return f"{recovered} bytes were sent for the recovery; the weights have {weights}"
        return ""

    def link_traffic(self) -> str:
        """If servers copy to each other directly, only the inputs of a decoded token and the next token pass through the client."""
        for depth in ("1", "4"):
            with ExitStack() as stack:
                first, last = self.start_server(stack, PEERS), self.start_server(stack, PEERS)
                placement = ["--rpc", f"{first.endpoint},{last.endpoint}", "--depth", depth]
                run = stack.enter_context(GenerateRun(self.argv(placement, "--json")))
                report = run.report()
                both = (*sent_without_graphs(report, "decode"), *received(report, "decode"))
                each = [bytes_ / (TOKENS - 1) for bytes_ in both]
                limits = (FIRST_SENT, LAST_SENT, FIRST_RECEIVED, LAST_RECEIVED)
                if len(each) != 4 or any(not 0 < got <= limit for got, limit in zip(each, limits)):
                    return f"depth {depth}: {each} bytes per token, expected at most {limits}"
        return ""

    def printed_text(self) -> str:
        with ExitStack() as stack:
            first, last = self.start_server(stack), self.start_server(stack)
            placement = ["--rpc", f"{first.endpoint},{last.endpoint}", "--retry"]
            run = stack.enter_context(GenerateRun(self.argv(placement)))
            run.wait_for_token(200)
            last.kill()
            self.restart(stack, last)
            if code := run.end(RUN_S):
                return f"ended with {code}:\n{tail(run.err)}"
            if "servers were lost 1 times" not in run.err:
                return f"no server was lost:\n{tail(run.err)}"
            return "" if run.out == self.reference_output() else f"printed {run.out!r}"

    def resumed(self, peers: tuple[str, ...]) -> str:
        for at in (0, 1):
            with ExitStack() as stack:
                servers = [self.start_server(stack, peers), self.start_server(stack, peers)]
                placement = ["--rpc", ",".join(server.endpoint for server in servers), "--retry", "--rpc-timeout", "1"]
                run = stack.enter_context(GenerateRun(self.argv(placement, "--json")))
                run.wait_for_token(50)
                servers[at].pause()
                run.wait_for("connection lost")
                servers[at].resume()
                if wrong := self.check_tokens(run, 1):
                    return f"server {at}: {wrong}"
        return ""

    def with_local_cpu(self) -> str:
        """The reported time of a local device excludes the time of recoveries, even if recoveries take most of the run."""
        with ExitStack() as stack:
            server = self.start_server(stack)
            placement = ["--device", f"CPU,{server.endpoint}", "--split", "3,1", "--depth", "1", "--retry"]
            run = stack.enter_context(GenerateRun(self.argv(placement, "--json", tokens=3 * TOKENS)))
            for token in (TOKENS // 2, TOKENS, TOKENS * 3 // 2):
                run.wait_for_token(token)
                server.kill()
                server = self.restart(stack, server)
                run.wait_for("is back")
            if wrong := self.check_tokens(run, 3, tokens=3 * TOKENS):
                return wrong
            report = run.report()
            busy, whole = report["devices"][0]["gen_s"], report["gen_s"]
        return "" if busy <= whole else f"the CPU device decoded for {busy} s, but the run only for {whole} s"

    def peer_connection_reset(self) -> str:
        """Reset only the peer connection between two servers. Both servers stay alive, so the run must recover without a loss."""
        with ExitStack() as stack:
            first, last = self.start_server(stack, PEERS), self.start_server(stack)
            relay = stack.enter_context(Relay(last.endpoint))
            placement = ["--rpc", f"{first.endpoint},{relay.endpoint}", "--retry"]
            run = stack.enter_context(GenerateRun(self.argv(placement, "--json")))
            # Connection 0 is the client's; each later one is a peer connection.
            for number, token in ((1, 50), (2, 200)):
                run.wait_for_token(token)
                relay.connection(number).reset_at_next()
                run.wait_for("cannot copy to")
            if wrong := self.check_tokens(run, 0):
                return wrong
            report, connections = run.report(), len(relay.connections())
            if report["losses"] or connections != 4:
                return f"{report['losses']} losses and {connections} connections, expected 0 and 4:\n{tail(run.err)}"
        return ""

    def frozen_connection(self) -> str:
        """The server does not notice that its connection is lost, and still holds the memory of that session.

        The client must retry until the old connection ends.
        """
        with ExitStack() as stack:
            unlimited = self.start_server(stack)
            with GenerateRun(self.argv(["--rpc", unlimited.endpoint], "--json")) as run:
                device = run.report()["devices"][0]
            needs = device["weight_bytes"] + device["cache_bytes"] + device["compute_bytes"]
            server = self.start_server(stack, ("--mem", str(needs * 3 // 2)))
            relay = stack.enter_context(Relay(server.endpoint))
            placement = ["--rpc", relay.endpoint, "--retry", "--rpc-timeout", "1"]
            run = stack.enter_context(GenerateRun(self.argv(placement, "--json")))
            run.wait_for_token(50)
            relay.connection(0).freeze()
            run.wait_for("may still hold the memory of the lost connection")
            relay.connection(0).end()
            return self.check_tokens(run, 1)

    def killed_again(self, peers: tuple[str, ...]) -> str:
        """Kill the server several times as soon as the client has reconnected: while loading the weights, or soon after."""
        with ExitStack() as stack:
            first, last = self.start_server(stack, peers), self.start_server(stack, peers)
            placement = ["--rpc", f"{first.endpoint},{last.endpoint}", "--retry"]
            run = stack.enter_context(GenerateRun(self.argv(placement, "--json")))
            run.wait_for_token(100)
            for _ in range(3):
                last.kill()
                last = self.restart(stack, last, peers)
                run.wait_for("is back")
            last.kill()
            self.restart(stack, last, peers)
            return self.check_tokens(run, 4)

    def random_losses(self, peers: tuple[str, ...], seed: int = 7) -> str:
        """Kill three servers at random tokens and restart them after random times, which may overlap."""
        tokens, chance = 300, random.Random(seed)
        with ExitStack() as stack:
            servers = [self.start_server(stack, peers) for _ in range(SERVERS)]
            placement = ["--rpc", ",".join(server.endpoint for server in servers), "--split", ",".join("1" * SERVERS)]
            run = stack.enter_context(GenerateRun(self.argv([*placement, "--retry"], "--json", size="deep", tokens=tokens)))
            victims = chance.sample(range(SERVERS), 3)
            moments = sorted(chance.sample(range(5, 200), 3))
            failed: list[str] = []

            def restart_later(victim: int, after: float) -> None:
                time.sleep(after)  # random time until the restart
                try:
                    self.restart(stack, servers[victim], peers)
                except ServerError as e:
                    failed.append(str(e))

            threads = []
            for victim, moment in zip(victims, moments):
                run.wait_for_token(moment)
                servers[victim].kill()
                threads.append(threading.Thread(target=restart_later, args=(victim, chance.uniform(0.0, 1.0))))
                threads[-1].start()
            wrong = self.check_tokens(run, 3, size="deep", tokens=tokens)
            for thread in threads:
                thread.join()
            idle = [device["name"] for device in run.report()["devices"] if not device["layers"]]
            return wrong or "".join(failed) or (f"no layers on {idle}" if idle else "")

    def killed_while_loading(self) -> str:
        with ExitStack() as stack:
            first, last = self.start_server(stack), self.start_server(stack)
            placement = ["--rpc", f"{first.endpoint},{last.endpoint}", "--retry"]
            run = stack.enter_context(GenerateRun(self.argv(placement, "--json", size="1b", tokens=8)))
            deadline = time.monotonic() + BIG_S
            while last.resident() < 500 << 20:
                if time.monotonic() > deadline:
                    return "the server has not loaded 500 MiB of weights"
                time.sleep(0.01)  # polls until the deadline
            last.kill()
            self.restart(stack, last)
            return self.check_tokens(run, 1, size="1b", tokens=8)
