#!/usr/bin/env python3
"""Lost servers under the plug-in: a host decodes on two servers, of which one is killed or stopped at seeded moments and comes back.

scripts/plugin.sh losses builds the programs and runs this file. The host takes commands (host.cpp, --serve). Each reply must be the
tokens that the same commands give without losses, as far as it goes, and may end with an error; a continuation of a cache that was
lost must be an error. Then the host repeats the prompt until the server is back, and must give the same tokens as before.
"""

import argparse
import contextlib
import os
import queue
import random
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from devices import Devices, Programs
from clients import Model, tail  # of tests/interop: `devices` adds the folder to the path
from servers import Server, free_port, ours

PROMPT, TOKENS, MORE = 32, 16, 40
REPLY_S = 60.0  # a reply that takes longer is a host that hangs
BACK_S = 30.0  # from the start of the server to the first right reply
TIMEOUT_S = 3  # FANOUT_TIMEOUT: a stopped server counts as lost
MODELS = (
    (Model("f32"), ("--flash", "on")),
    (Model("f32"), ("--flash", "off")),
    (Model("q8_0"), ()),
    (Model("f32", "qwen3"), ("--cache", "q8_0", "--flash", "on")),
    (Model("f32", "mamba2"), ()),
    (Model("f32", "rwkv7"), ()),
)


class Wrong(Exception):
    """A reply that must not be, or the end of the host."""


@dataclass
class Reply:
    """Tokens, and whether the command has failed after them."""

    tokens: list[int]
    failed: bool


class Host:
    """A host that takes commands. Leaving the `with` block ends it."""

    def __init__(self, argv: list[str], env: dict[str, str]):
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", env=env
        )
        self._words: queue.Queue[str | None] = queue.Queue()
        self._log: list[str] = []
        self._threads = [threading.Thread(target=read, daemon=True) for read in (self._read_words, self._read_log)]
        for thread in self._threads:
            thread.start()

    def _read_words(self) -> None:
        """Words as they come, and an empty one at the end of each line."""
        assert self._process.stdout
        word = ""
        while letter := self._process.stdout.read(1):
            if letter.isspace():
                if word:
                    self._words.put(word)
                if letter == "\n":
                    self._words.put("")
                word = ""
            else:
                word += letter
        self._words.put(None)

    def _read_log(self) -> None:
        assert self._process.stderr
        self._log += self._process.stderr

    def __enter__(self) -> "Host":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def send(self, command: str) -> None:
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(command + "\n")
            self._process.stdin.flush()

    def words(self):
        """The words of a reply."""
        while True:
            try:
                word = self._words.get(timeout=REPLY_S)
            except queue.Empty:
                raise Wrong(f"no reply after {REPLY_S:.0f} s\n{self.log}") from None
            if word is None:
                raise Wrong(f"the host ended with {self._process.wait()}\n{self.log}")
            if not word:
                return
            yield word

    def reply(self, after_word=lambda count: None) -> Reply:
        """The reply to a command. `after_word` is called after each of its words."""
        words = []
        for word in self.words():
            words.append(word)
            after_word(len(words))
        end = words.index("error") if "error" in words else len(words)
        return Reply([int(word) for word in words[:end] if word != "ok"], end < len(words))

    def command(self, command: str) -> Reply:
        self.send(command)
        return self.reply()

    def close(self) -> int:
        """Ends the host by the end of its input."""
        assert self._process.stdin
        self._process.stdin.close()
        return self._process.wait(REPLY_S)

    @property
    def log(self) -> str:
        return tail("".join(self._log))


class Pair:
    """Two servers on fixed ports, each of which can be lost and come back."""

    def __init__(self, programs: Programs):
        self._programs = programs
        self._ports = [free_port(), free_port()]
        self._servers: list[Server] = [self._start(0), self._start(1)]

    def _start(self, which: int) -> Server:
        options = ("--peer", "127.0.0.1:*")
        return ours(1, binary=self._programs.server, port=self._ports[which], options=options).__enter__()

    def devices(self) -> Devices:
        endpoints = ",".join(f"127.0.0.1:{port}" for port in self._ports)
        env = {"FANOUT_DEVICES": "none", "FANOUT_SERVERS": endpoints, "FANOUT_TIMEOUT": str(TIMEOUT_S)}
        return Devices(env, ("Fanout0", "Fanout1"), ("--split", "layer", "--tensor-split", "1,2"))

    def kill(self, which: int) -> None:
        self._servers[which].kill()

    def start(self, which: int) -> None:
        self._servers[which] = self._start(which)

    def pause(self, which: int) -> None:
        self._servers[which].pause()

    def resume(self, which: int) -> None:
        self._servers[which].resume()

    def __enter__(self) -> "Pair":
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            server.resume()
            server.kill()


@dataclass
class Counts:
    """What has happened in a row."""

    losses: int = 0
    errors: int = 0
    right: int = 0
    slowest_s: float = 0.0
    history: list[str] = field(default_factory=list)


class Row:
    """A host with a model, and what it must reply."""

    def __init__(self, pair: Pair, host: Host, chance: random.Random):
        self.pair, self.host, self.chance = pair, host, chance
        self.counts = Counts()
        run = self.expect_success("run")
        more = self.expect_success(f"continue {MORE}")
        self.chain = run + more
        self.at = 0  # how many tokens of the chain the host has printed since `run`
        self.saved: tuple[int, bool] = (0, False)
        self.lost = False  # the caches of a server, since the last right `run` or `restore`

    def expect_success(self, command: str) -> list[int]:
        reply = self.host.command(command)
        if reply.failed:
            raise Wrong(f"{command} failed before any loss")
        return reply.tokens

    def judge(self, command: str, reply: Reply) -> bool:
        """Compares a reply with the chain. True if the command has succeeded."""
        self.counts.history.append(f"{command}: {len(reply.tokens)} tokens{', error' if reply.failed else ''}")
        start = 0 if command == "run" else self.at
        if reply.tokens != self.chain[start : start + len(reply.tokens)]:
            raise Wrong(f"other tokens: {reply.tokens}, not {self.chain[start : start + len(reply.tokens)]}")
        self.at = start + len(reply.tokens)
        self.counts.errors += reply.failed
        self.counts.right += not reply.failed
        return not reply.failed

    def act(self, command: str) -> bool:
        """Runs a command. A command that needs what was lost must fail."""
        if command.startswith("continue") and self.at + int(command.split()[1]) > len(self.chain):
            return False
        reply = self.host.command(command)
        if command == "save":
            self.counts.history.append("save")
            self.saved = (self.at, not self.lost)
            return True
        if command == "restore":
            self.counts.history.append(f"restore{', error' if reply.failed else ''}")
            if not reply.failed:
                self.at, self.lost = self.saved[0], not self.saved[1]
            return not reply.failed
        before = self.lost
        done = self.judge(command, reply)
        if command == "run" and done:
            self.lost = False
        elif before and reply.tokens:
            raise Wrong(f"{command} has used a cache that was lost: {reply.tokens}")
        return done

    def lose(self, which: int, how: str) -> None:
        self.counts.losses += 1
        self.lost = True
        self.counts.history.append(f"{how} server {which}")
        if how == "stop":
            self.pair.pause(which)
        else:
            self.pair.kill(which)

    def loss(self, stop: bool) -> None:
        """A loss at a seeded moment, what the host does meanwhile, and the recovery."""
        chance, which = self.chance, self.chance.randrange(2)
        how = "stop" if stop else "kill"
        restored_before = chance.random() < 0.5
        if restored_before:
            self.act("run")
            self.act("save")
        moment = chance.choice(("prompt", "tokens", "between"))
        if moment == "between":
            self.act("run")
            self.lose(which, how)
        else:
            # Before the first token the prompt is evaluated; later the loss comes with a token.
            at = 0 if moment == "prompt" else chance.randrange(1, TOKENS)
            self.host.send("run")
            if at == 0:
                threading.Event().wait(chance.random() * 0.02)
                self.lose(which, how)
            done = self.judge("run", self.host.reply(lambda count: self.lose(which, how) if count == at else None))
            # The last tokens may have been on their way.
            if done and moment == "prompt":
                self.counts.history.append("the loss came too late")
        # While the server is away, and while it comes back.
        delay = chance.random()
        back = threading.Timer(delay, lambda: self.pair.resume(which) if stop else self.pair.start(which))
        if stop:
            self.act(chance.choice(("continue 2", "run")))
        back.start()
        for _ in range(chance.randrange(4)):
            command = chance.choice(("continue 2", "run", "save", "restore"))
            if command in ("save", "restore") and not (restored_before or self.saved[0]):
                continue
            self.act(command)
        back.join()
        begin = time.monotonic()
        if restored_before and self.saved[1] and chance.random() < 0.7 and self.act("restore"):
            self.act("continue 4")
        while not self.act("run"):
            if time.monotonic() - begin > BACK_S:
                raise Wrong(f"the host fails {BACK_S:.0f} s after the server is back\n{self.host.log}")
            threading.Event().wait(0.05)
        self.counts.slowest_s = max(self.counts.slowest_s, time.monotonic() - begin)
        self.act(f"continue {chance.randrange(1, 8)}")


def row(programs: Programs, version: str, model: Model, options: tuple[str, ...], a: argparse.Namespace) -> bool:
    name = f"{version} {' '.join((str(model), *options))}"
    if a.only not in name:
        return True
    begin = time.monotonic()
    chance = random.Random(f"{a.seed} {name}")
    counts, problem = Counts(), ""
    with Pair(programs) as pair:
        devices = pair.devices()
        argv = [str(programs.hosts[version]), "run", str(model.ensure(programs.models)), "--serve", *options, *devices.options]
        argv += ["--device", ",".join(devices.names), "--prompt", str(PROMPT), "--tokens", str(TOKENS)]
        with Host(argv, {**os.environ, **devices.env, "GGML_BACKEND_PATH": str(programs.plugin)}) as host:
            try:
                test = Row(pair, host, chance)
                counts = test.counts
                for loss in range(a.kills):
                    test.counts.history.clear()
                    test.loss(stop=loss % 4 == 3)
                if (status := host.close()) != 0:
                    raise Wrong(f"the host ended with {status}\n{host.log}")
            except Wrong as e:
                problem = f"loss {counts.losses}: {e}\n    {'; '.join(counts.history)}"
    verdict = "FAIL" if problem else "ok"
    print(
        f"{verdict:4}  {name:46} {counts.losses:4} losses {counts.right:5} right {counts.errors:5} errors"
        f"  back after {counts.slowest_s:4.1f} s {time.monotonic() - begin:6.1f} s  {problem}",
        flush=True,
    )
    return not problem


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--plugin", type=Path, required=True, help="libggml_fanout.so")
    p.add_argument("--server", type=Path, required=True, help="rpc-server")
    p.add_argument("--built", type=Path, required=True, help="folder with host7 and host8")
    p.add_argument("--models", type=Path, required=True, help="folder of the models")
    p.add_argument("--only", default="", metavar="TEXT", help="only rows whose name contains TEXT")
    p.add_argument("--host", choices=("7", "8"), help="only hosts of this version")
    p.add_argument("--kills", type=int, default=4, metavar="N", help="losses of each row; each fourth is a stopped server")
    p.add_argument("--seed", type=int, default=1)
    a = p.parse_args()
    versions = [a.host] if a.host else ["7", "8"]
    with tempfile.TemporaryDirectory(prefix="fanout-losses-") as scratch:
        hosts = {version: a.built / f"host{version}" for version in versions}
        programs = Programs(a.plugin, a.server, hosts, "", a.built / "libstub.so", a.models, Path(scratch))
        results = [row(programs, version, model, options, a) for version in versions for model, options in MODELS]
    if not all(results):
        sys.exit(1)


if __name__ == "__main__":
    main()
