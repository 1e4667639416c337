#!/usr/bin/env python3
"""llama-server of llama.cpp 7.0 under the plug-in: its replies on two servers, and what it does when one of them is lost.

scripts/plugin.sh server builds the programs and runs this file. A row starts llama-server with four slots on two servers, and a
second one on the CPU, whose replies are the reference. First: four clients at once, and a slot that is saved and restored. Then a
server is killed, stopped or cut off at a seeded token of the requests. Each request must end in time, with the reference's tokens
as far as it goes. llama-server must live. Once the server is back, every slot must give all its tokens again, idle slots after at
most one error.
"""

import argparse
import http.client
import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from devices import Programs
from lost_servers import TIMEOUT_S, Counts, Pair, Wrong
from clients import Model, tail  # of tests/interop: `devices` adds the folder to the path
from servers import START_S, Server, free_port

SLOTS, TOKENS, CONTEXT = 4, 24, 256
KINDS = ("kill", "kill", "stop", "cut")
FAIL_S = 5.0  # from the loss of a server, once it is noticed, to the end of the requests
REPLY_S = 60.0  # a request that takes longer is a llama-server that hangs
BACK_S = 30.0  # from the start of the server to the first complete reply
WORDS = range(300, 500)  # tokens of prompts
# Tokens whose text is no whole character. A stream joins them, and then leaves tokens out.
NO_BYTES = {"logit_bias": [[token, False] for token in range(259)]}
# The CPU's logarithms of the probabilities of two tokens that may take each other's place.
NEAR_TIE = 0.02


@dataclass(frozen=True)
class Setup:
    """A row: a model, options of llama-server, and whether the servers have keys."""

    model: Model
    options: tuple[str, ...] = ()
    with_keys: bool = False

    def __str__(self) -> str:
        return " ".join((str(self.model), *self.options, *(("with keys",) if self.with_keys else ())))


SETUPS = (
    Setup(Model("f32")),
    Setup(Model("f32"), with_keys=True),
    Setup(Model("f32"), ("-fa", "off", "--kv-unified")),  # slots that are idle move to the prompt cache
    Setup(Model("f32", "qwen3"), ("-ot", "ffn_up=CPU,ffn_down=CPU")),  # parts of each layer run on the CPU
    Setup(Model("f32", "gemma3")),  # a sliding window: states are saved at checkpoints of prompts
    Setup(Model("f32", "mamba2")),
)


class Request:
    """A completion that a thread reads from llama-server as it is streamed."""

    def __init__(self, port: int, prompt: list[int], slot: int, count: int):
        self._port, self._changed = port, threading.Condition()
        self._body = {"prompt": prompt, "id_slot": slot, "n_predict": count, "temperature": 0, "stream": True}
        self._body |= {"return_tokens": True, "cache_prompt": True, **NO_BYTES}
        self.prompt, self.count, self.slot = prompt, count, slot
        self.tokens: list[int] = []
        self.cached = 0  # tokens of the prompt that were not evaluated again
        self.error = ""
        self._ended_at: float | None = None
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        error = ""
        try:
            for kind, event in self._events():
                error = json.dumps(event) if kind == "error" or "error" in event else error
                with self._changed:
                    self.tokens += event.get("tokens", [])
                    self.cached = event.get("timings", {}).get("cache_n", 0)
                    self._changed.notify_all()
        except (OSError, http.client.HTTPException) as e:
            error = f"no HTTP error: {e!r}"
        with self._changed:
            self.error = error or ("" if len(self.tokens) == self.count else f"only {len(self.tokens)} tokens")
            self._ended_at = time.monotonic()
            self._changed.notify_all()

    def _events(self) -> Iterator[tuple[str, dict]]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=REPLY_S)
        connection.request("POST", "/completion", json.dumps(self._body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        if reply.status != 200:
            yield "error", json.loads(reply.read())
            return
        for line in reply:
            kind, _, text = line.decode().partition(": ")
            if kind in ("data", "error"):
                yield kind, json.loads(text)

    def wait(self, count: int) -> None:
        """Until this many tokens have come, or the request has ended."""
        with self._changed:
            self._changed.wait_for(lambda: len(self.tokens) >= count or self._ended_at is not None, REPLY_S)

    def end(self) -> float:
        """Waits for the end. Returns its time."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended_at is not None, REPLY_S)
            return self._ended_at or time.monotonic() + REPLY_S


class Llama(Server):
    """llama-server with a model."""

    def __init__(self, program: Path, model: Path, options: tuple[str, ...], env: dict[str, str]):
        self.port = free_port()
        argv = ["env", *(f"{name}={value}" for name, value in env.items()), str(program), "-m", str(model), *options]
        argv += ["--port", str(self.port), "-np", str(SLOTS), "-c", str(SLOTS * CONTEXT), "-t", "1", "--fit", "off", "-lv", "4"]
        super().__init__(argv, f"127.0.0.1:{self.port}")

    def __enter__(self) -> "Llama":
        super().__enter__()
        deadline = time.monotonic() + START_S
        while self.alive() and self.http("GET", "/health")[0] != 200:
            if time.monotonic() > deadline:
                break
            threading.Event().wait(0.02)  # polls until the model is loaded
        return self

    def http(self, method: str, path: str, body: dict | None = None) -> tuple[int, dict]:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=REPLY_S)
            connection.request(method, path, json.dumps(body or {}), {"Content-Type": "application/json"})
            reply = connection.getresponse()
            return reply.status, json.loads(reply.read())
        except (OSError, http.client.HTTPException) as e:
            raise Wrong(f"{path}: {e!r}; {self.end()}") from None

    def slot(self, action: str, slot: int, name: str) -> bool:
        return self.http("POST", f"/slots/{slot}?action={action}", {"filename": name})[0] == 200

    def end(self) -> str:
        """Whether the process lives, and its last lines; before them the plug-in's, which logs a reason once."""
        own = [line for line in self.log.splitlines() if "fanout: " in line]
        state = "llama-server lives" if self.alive() else f"llama-server ended with {self._process.returncode}"
        return f"{state}\n{tail(chr(10).join(own), 6)}\n{tail(self.log)}"

    def stop(self) -> None:
        """Ends the process by SIGTERM, as an orderly end."""
        self.__exit__(None, None, None)
        if self._process.returncode != 0:
            raise Wrong(f"after SIGTERM: {self.end()}")


@dataclass
class ServerCounts(Counts):
    """What has happened in a row of llama-server."""

    ties: int = 0
    aborts: int = 0
    wrong: int = 0


class Row:
    """llama-server on two servers, and what it must reply."""

    def __init__(self, pair: Pair, llama: Llama, cpu: Llama, chance: random.Random, counts: ServerCounts):
        self.pair, self.llama, self.cpu, self.chance, self.counts = pair, llama, cpu, chance, counts
        self.prompts = [chance.sample(WORDS, chance.randrange(8, 100)) for _ in range(3 * SLOTS)]
        self.chains = [self.reference(prompt) for prompt in self.prompts]
        self.at = list(range(SLOTS))  # the prompt of each slot

    def reference(self, prompt: list[int]) -> list[int]:
        request = Request(self.cpu.port, prompt, 0, 2 * TOKENS)
        request.end()
        if request.error:
            raise Wrong(f"on the CPU: {request.error}")
        return request.tokens

    def near_tie(self, prompt: list[int], one: int, other: int) -> bool:
        """Whether the CPU gives both tokens the same probability, nearly."""
        body = {"prompt": prompt, "n_predict": 1, "temperature": 0, "n_probs": 512, **NO_BYTES}
        _, reply = self.cpu.http("POST", "/completion", body)
        odds = {entry["id"]: entry["logprob"] for entry in reply["completion_probabilities"][0]["top_logprobs"]}
        return abs(odds[one] - odds[other]) <= NEAR_TIE

    def judge(self, name: str, request: Request, want: list[int], limit_s: float = REPLY_S, since: float | None = None) -> bool:
        """Waits for the end of a request and compares its tokens. True if it has succeeded."""
        since = time.monotonic() if since is None else since
        took = request.end() - since
        self.counts.history.append(f"{name} {request.slot}: {len(request.tokens)} tokens {request.error}")
        if not self.llama.alive() or request.error.startswith("no HTTP error"):
            raise Wrong(f"{request.error}; {self.llama.end()}")
        if request.error and took > limit_s:
            raise Wrong(f"{name}: an error only after {took:.1f} s\n{self.llama.end()}")
        for at, (got, wanted) in enumerate(zip(request.tokens, want, strict=False)):
            if got != wanted:
                if not self.near_tie(request.prompt + want[:at], got, wanted):
                    self.counts.wrong += 1
                    raise Wrong(f"{name}: other tokens: {request.tokens}, not {want}")
                self.counts.ties += 1
                break
        self.counts.errors += bool(request.error)
        self.counts.right += not request.error
        return not request.error

    def start(self, slot: int) -> Request:
        return Request(self.llama.port, self.prompts[self.at[slot]], slot, TOKENS)

    def want(self, slot: int) -> list[int]:
        return self.chains[self.at[slot]][:TOKENS]

    def expect(self, name: str, done: bool) -> None:
        if not done:
            raise Wrong(f"{name} failed\n{self.llama.end()}")

    def without_losses(self) -> None:
        requests = [self.start(slot) for slot in range(SLOTS)]
        for slot, request in enumerate(requests):
            self.expect("a request", self.judge("at once", request, self.want(slot)))
        got, want = self.restored(self.llama), self.restored(self.cpu)
        if got != want and not self.counts.ties:
            raise Wrong(f"{got} tokens of the restored slot were used, on the CPU {want}")

    def restored(self, llama: Llama) -> int:
        """Saves a slot, uses it otherwise, restores it, and goes on. Returns how many tokens were not evaluated again."""
        prompt, chain = self.prompts[self.at[0]], self.chains[self.at[0]]
        other = (self.prompts[SLOTS], self.chains[SLOTS], "restore")
        for text, want, action in ((prompt, chain, "save"), other, (prompt + chain[:TOKENS], chain[TOKENS:], "")):
            request = Request(llama.port, text, 0, TOKENS)
            self.expect("a request", self.judge(action or "restored", request, want))
            self.expect(action, not action or llama.slot(action, 0, "first"))
        return request.cached

    def loss(self, how: str) -> None:
        """A loss at a seeded token, requests while the server is away, and the recovery."""
        chance, which = self.chance, self.chance.randrange(2)
        kept = chance.randrange(SLOTS) if chance.random() < 0.5 else None
        before = list(self.at)
        if kept is not None:
            # The slot may have failed before, so that it is empty.
            self.until_right(kept)
            self.expect("save", self.llama.slot("save", kept, "kept"))
        running = chance.sample(range(SLOTS), chance.randrange(1, SLOTS))
        for slot in running:
            if chance.random() < 0.3:
                self.at[slot] = chance.randrange(len(self.prompts))
        requests = [self.start(slot) for slot in running]
        requests[0].wait(chance.randrange(TOKENS - 4))  # after no token: while it evaluates the prompt
        self.counts.losses += 1
        self.counts.history.append(f"{how} {which}")
        self.pair.lose(which, how)
        lost_at, limit = time.monotonic(), FAIL_S + (TIMEOUT_S if how == "stop" else 0)
        for request in requests:
            self.judge("running", request, self.want(request.slot), limit, lost_at)
        lost = None
        if how != "cut":
            for _ in range(chance.randrange(3)):
                slot = chance.randrange(SLOTS)
                begin = time.monotonic()
                if self.judge("away", self.start(slot), self.want(slot), limit, begin):
                    raise Wrong("a reply without a server")
            if chance.random() < 0.5 and self.llama.slot("save", slot := chance.randrange(SLOTS), "lost"):
                lost = slot
        self.pair.bring_back(which, how)
        order = chance.sample(range(SLOTS), SLOTS)
        self.until_right(order[0])
        if lost is not None:
            self.counts.history.append(f"restore of what was lost: {self.llama.slot('restore', lost, 'lost')}")
        for slot in [*order[1:], *([] if lost is None else [lost])]:
            if not self.judge("idle", self.start(slot), self.want(slot)):
                self.expect("a second request after the server was back", self.judge("idle", self.start(slot), self.want(slot)))
        if kept is not None:
            self.expect("restore", self.llama.slot("restore", kept, "kept"))
            self.at[kept] = before[kept]
            self.expect("a restored slot", self.judge("kept", self.start(kept), self.want(kept)))

    def until_right(self, slot: int) -> None:
        """Repeats the request of a slot until it succeeds."""
        begin = time.monotonic()
        while not self.judge("back", self.start(slot), self.want(slot)):
            if time.monotonic() - begin > BACK_S:
                raise Wrong(f"llama-server fails {BACK_S:.0f} s after the server is back\n{self.llama.end()}")
            threading.Event().wait(0.02)
        self.counts.slowest_s = max(self.counts.slowest_s, time.monotonic() - begin)


def row(programs: Programs, setup: Setup, losses: int, seed: int) -> tuple[ServerCounts, bool]:
    """Runs a row. Returns its counts, and whether it has passed."""
    begin, chance = time.monotonic(), random.Random(f"{seed} {setup}")
    program, model = programs.hosts["7"], setup.model.ensure(programs.models)
    counts, problem = ServerCounts(), ""
    with Pair(programs, setup.with_keys) as pair:
        devices, saved = pair.devices(), ("--slot-save-path", str(programs.scratch))
        env = {**devices.env, "GGML_BACKEND_PATH": str(programs.plugin), "GGML_NO_BACKTRACE": "1"}
        options = ("-ngl", "99", "--device", ",".join(devices.names), "-sm", "layer", "-ts", "1,2", *setup.options, *saved)
        reference = Llama(program, model, ("--device", "none", *saved), {})
        with Llama(program, model, options, env) as llama, reference as cpu:
            try:
                if missing := [name for name in devices.names if f"{name} model buffer size" not in llama.log]:
                    raise Wrong(f"no weights on {', '.join(missing)}")
                test = Row(pair, llama, cpu, chance, counts)
                test.without_losses()
                for loss in range(losses):
                    counts.history.clear()
                    test.loss(KINDS[loss % len(KINDS)])
                llama.stop()
            except Wrong as e:
                counts.aborts += not llama.alive()
                problem = f"loss {counts.losses}: {e}\n    {'; '.join(counts.history)}"
    counts.print_row(str(setup), begin, problem, f" {counts.ties:3} ties")
    return counts, not problem


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--plugin", type=Path, required=True, help="libggml_fanout.so")
    p.add_argument("--server", type=Path, required=True, help="rpc-server")
    p.add_argument("--llama-server", type=Path, required=True, help="llama-server of llama.cpp 7.0")
    p.add_argument("--models", type=Path, required=True, help="folder of the models")
    p.add_argument("--only", default="", metavar="TEXT", help="only rows whose name contains TEXT")
    p.add_argument("--losses", type=int, default=24, metavar="N", help="losses in all")
    p.add_argument("--seed", type=int, default=1)
    a = p.parse_args()
    setups = [setup for setup in SETUPS if a.only in str(setup)]
    with tempfile.TemporaryDirectory(prefix="fanout-server-") as scratch:
        programs = Programs(a.plugin, a.server, {"7": a.llama_server}, "", Path(), a.models, Path(scratch))
        results = [row(programs, setup, (a.losses + at) // len(setups), a.seed) for at, setup in enumerate(setups)]
    losses, aborts, wrong = (sum(getattr(counts, name) for counts, _ in results) for name in ("losses", "aborts", "wrong"))
    passed = sum(ok for _, ok in results)
    print(f"{losses} losses, {aborts} aborts, {wrong} wrong texts; {passed} passed, {len(results) - passed} failed")
    if passed < len(results) or not results:
        sys.exit(1)


if __name__ == "__main__":
    main()
