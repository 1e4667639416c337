#!/usr/bin/env python3
"""Lost servers under the plug-in: a host decodes on two servers, of which one is killed, stopped or cut off at seeded moments.

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
from dataclasses import dataclass
from pathlib import Path

from devices import Programs
from lost_servers import Counts, Pair, Wrong
from clients import Model, tail  # of tests/interop: `devices` adds the folder to the path

PROMPT, TOKENS, MORE = 32, 16, 40
# Prompts of other lengths, which no host has evaluated before the loss: other shapes, of which the plug-in knows nothing yet.
OTHER_PROMPTS = range(5, 30)
KINDS = ("cut", "cut", "kill", "cut", "cut", "kill", "cut", "stop")
REPLY_S = 60.0  # a reply that takes longer is a host that hangs
BACK_S = 30.0  # from the start of the server to the first right reply
MODELS = (
    (Model("f32"), ("--flash", "on")),
    (Model("f32"), ("--flash", "off")),
    (Model("q8_0"), ()),
    (Model("f32", "qwen3"), ("--cache", "q8_0", "--flash", "on")),
    (Model("f32", "mamba2"), ()),
    (Model("f32", "rwkv7"), ()),
)


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
        """The end of the log, and before it the plug-in's last lines: it logs a reason once."""
        own = [line for line in self._log if line.startswith("fanout: ")]
        return tail("".join(own), 6) + "\n" + tail("".join(self._log))


class Row:
    """A host with a model, and what it must reply."""

    def __init__(self, pair: Pair, host: Host, reference: Host, chance: random.Random):
        self.pair, self.host, self.chance = pair, host, chance
        self.counts = Counts()
        self.others = {length: expect_success(reference, f"run {length}") for length in OTHER_PROMPTS}
        self.chain = expect_success(host, "run")
        self.chain += expect_success(host, f"continue {MORE}")
        self.at = 0  # how many tokens of the chain the host has printed since `run`
        self.saved: tuple[int, bool] | None = None  # as `at`, and whether what was saved was not lost
        self.lost = False  # the caches of a server, since the last right `run` or `restore`

    def judge(self, command: str, reply: Reply, want: list[int]) -> bool:
        """Compares a reply with the tokens. True if the command has succeeded."""
        self.counts.history.append(f"{command}: {len(reply.tokens)} tokens{', error' if reply.failed else ''}")
        if reply.tokens != want[: len(reply.tokens)]:
            raise Wrong(f"other tokens: {reply.tokens}, not {want[: len(reply.tokens)]}")
        self.counts.errors += reply.failed
        self.counts.right += not reply.failed
        return not reply.failed

    def run(self, after_word=lambda count: None) -> bool:
        self.host.send("run")
        lost = self.lost
        reply = self.host.reply(after_word)
        done = self.judge("run", reply, self.chain)
        self.at = len(reply.tokens)
        # A loss while it ran has set the flag.
        self.lost &= not (done and lost)
        return done

    def run_other(self) -> None:
        """A prompt of another length, which moves the host off the chain."""
        length = self.chance.choice(OTHER_PROMPTS)
        self.judge(f"run {length}", self.host.command(f"run {length}"), self.others[length])
        self.at, self.lost = len(self.chain), True

    def go_on(self, count: int) -> None:
        """Tokens more, unless the host is off the chain or at its end. Without its caches that must fail."""
        if self.at + count > len(self.chain):
            return
        # A prompt that has failed is all that is evaluated, so it needs no cache.
        lost, command = self.lost and self.at > 0, f"continue {count}"
        reply = self.host.command(command)
        self.judge(command, reply, self.chain[self.at :])
        self.at += len(reply.tokens)
        if lost and reply.tokens:
            raise Wrong(f"{command} has used a cache that was lost: {reply.tokens}")

    def save(self) -> None:
        """Keeps the state, unless the host is off the chain."""
        if self.at < len(self.chain) and not self.host.command("save").failed:
            self.saved = (self.at, not self.lost)
            self.counts.history.append(f"save{', of what was lost' if self.lost else ''}")

    def restore(self) -> None:
        if self.saved:
            failed = self.host.command("restore").failed
            self.counts.history.append(f"restore{', error' if failed else ''}")
            # A restore that has failed, or that a server was too far away for, leaves what is there unknown: go_on may fail.
            self.at, self.lost = self.saved[0], self.lost or failed or not self.saved[1]

    def lose(self, which: int, how: str) -> None:
        self.counts.losses += 1
        self.lost = True
        self.counts.history.append(f"{how} {which}")
        self.pair.lose(which, how)

    def loss(self, how: str) -> None:
        """A loss at a seeded moment, what the host does meanwhile, and the recovery."""
        chance, which = self.chance, self.chance.randrange(2)
        if chance.random() < 0.5:
            self.run()
            self.save()
        moment = chance.choice(("prompt", "tokens", "between"))
        if moment == "between":
            self.run()
            self.lose(which, how)
        else:
            # The prompt takes some milliseconds. A later loss comes some moments after a token.
            at = 0 if moment == "prompt" else chance.randrange(1, TOKENS)
            pause = chance.random() * (0.03 if at == 0 else 0.004)
            loss = threading.Timer(pause, lambda: self.lose(which, how))
            if at == 0:
                loss.start()
            self.run(lambda count: loss.start() if count == at else None)
            if loss.ident is None:  # it has failed before that token
                loss.start()
            loss.join()
        back = threading.Timer(chance.random(), lambda: self.pair.bring_back(which, how))
        if how == "stop":
            self.run()
        back.start()
        for _ in range(chance.randrange(5)):
            chance.choice((lambda: self.go_on(2), self.run, self.run_other, self.save, self.restore))()
        back.join()
        begin = time.monotonic()
        while not self.run():
            if time.monotonic() - begin > BACK_S:
                raise Wrong(f"the host fails {BACK_S:.0f} s after the server is back\n{self.host.log}")
            threading.Event().wait(0.02)
        self.counts.slowest_s = max(self.counts.slowest_s, time.monotonic() - begin)
        self.go_on(chance.randrange(1, 8))
        if self.saved and self.saved[1]:
            # A state that was saved before the loss is good on the new memory.
            self.restore()
            self.go_on(4)


def expect_success(host: Host, command: str) -> list[int]:
    reply = host.command(command)
    if reply.failed:
        raise Wrong(f"{command} failed before any loss\n{host.log}")
    return reply.tokens


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
        # Without the variable, a host that aborts prints a backtrace between its tokens.
        env = {**os.environ, **devices.env, "GGML_BACKEND_PATH": str(programs.plugin), "GGML_NO_BACKTRACE": "1"}
        with Host(argv, env) as reference, Host(argv, env) as host:
            try:
                test = Row(pair, host, reference, chance)
                counts = test.counts
                reference.close()
                for loss in range(a.losses):
                    test.counts.history.clear()
                    test.loss(KINDS[loss % len(KINDS)])
                if (status := host.close()) != 0:
                    raise Wrong(f"the host ended with {status}\n{host.log}")
            except Wrong as e:
                problem = f"loss {counts.losses}: {e}\n    {'; '.join(counts.history)}"
    counts.print_row(name, begin, problem)
    return not problem


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--plugin", type=Path, required=True, help="libggml_fanout.so")
    p.add_argument("--server", type=Path, required=True, help="rpc-server")
    p.add_argument("--built", type=Path, required=True, help="folder with host7 and host8")
    p.add_argument("--models", type=Path, required=True, help="folder of the models")
    p.add_argument("--only", default="", metavar="TEXT", help="only rows whose name contains TEXT")
    p.add_argument("--host", choices=("7", "8"), help="only hosts of this version")
    p.add_argument("--losses", type=int, default=8, metavar="N", help="losses of each row")
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
