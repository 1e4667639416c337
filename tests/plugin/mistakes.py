"""Configurations that are wrong: the host must go on without devices, and its log must tell the reason in one entry."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from devices import Programs, keygen

HOST_S = 60.0
Test = Callable[[], tuple[str, list[str]]]
# Loads the libraries in the order of the arguments, as a host of its own, and prints the plug-in's score.
SCORE = "import ctypes, sys; print([ctypes.CDLL(path) for path in sys.argv[1:]][-1].ggml_backend_score())"


def closed_port() -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{s.getsockname()[1]}"


def settings(programs: Programs) -> Iterator[tuple[str, dict[str, str], str]]:
    """Name, variables, and a text that the reason contains."""
    scratch = programs.scratch
    (scratch / "some").unlink(missing_ok=True)
    public = keygen(programs.server, scratch / "some")
    closed = closed_port()
    (scratch / "unknown").write_text("server = a:1\n")
    (scratch / "no-key").write_text("not a key\n")
    (scratch / "form").write_text("servers\n")
    yield "a server that is away", {"FANOUT_SERVERS": closed}, closed
    yield "a server of an unknown name", {"FANOUT_SERVERS": "no-such-host.invalid:1"}, "no-such-host.invalid"
    yield "a server without a port", {"FANOUT_SERVERS": "127.0.0.1"}, "127.0.0.1"
    key = {"FANOUT_SERVERS": closed, "FANOUT_SERVER_KEYS": public}
    yield "a key file that is missing", {**key, "FANOUT_KEY": "/no/such/key"}, "/no/such/key"
    yield "a key file with other text", {**key, "FANOUT_KEY": str(scratch / "no-key")}, "no-key"
    yield "a server's key that is none", {"FANOUT_SERVERS": closed, "FANOUT_SERVER_KEYS": "x"}, "server_keys: x"
    yield "a time that is no number", {"FANOUT_SERVERS": closed, "FANOUT_RETRY": "soon"}, "retry: soon"
    yield "a file that is missing", {"FANOUT_CONFIG": "/no/such/file"}, "/no/such/file"
    yield "an unknown setting in the file", {"FANOUT_CONFIG": str(scratch / "unknown")}, "there is no setting server"
    yield "a line of another form", {"FANOUT_CONFIG": str(scratch / "form")}, "name = value"
    yield "a device that does not exist", {"FANOUT_DEVICES": "CPU7"}, "CPU7"
    yield "an untested version by name", {"FANOUT_GGML_AS": "99.0.0"}, "99.0.0"


def judged(done: subprocess.CompletedProcess, reason: str, expected: str) -> tuple[str, list[str]]:
    """What is wrong with a run that must name the reason once, and print the expected text."""
    wrong = []
    entries = [line for line in done.stderr.splitlines() if line.startswith("fanout: ")]
    if done.returncode != 0:
        wrong.append(f"ended with {done.returncode}: {done.stderr[-300:]}")
    if len(entries) != 1 or reason not in entries[0]:
        wrong.append(f"not one entry with {reason}: {entries}")
    if expected not in done.stdout:
        wrong.append(f"it printed {done.stdout!r}")
    return "", wrong


def mistakes(programs: Programs, version: str) -> Iterator[tuple[str, Test]]:
    """The rows of a host."""
    base = {**os.environ, "GGML_BACKEND_PATH": str(programs.plugin), "FANOUT_DEVICES": "none"}

    def host(env: dict[str, str], reason: str) -> tuple[str, list[str]]:
        argv = [programs.hosts[version], "devices"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=HOST_S, env={**base, **env})
        shown, wrong = judged(done, reason, "device CPU")
        if "device Fanout" in done.stdout:
            wrong.append("it has devices")
        return shown, wrong

    for name, env, reason in settings(programs):
        yield f"{version} mistake: {name}", lambda env=env, reason=reason: host(env, reason)


def doctor(programs: Programs, library: str, status: int, text: str) -> tuple[str, list[str]]:
    """`rpc-server doctor --ggml`, which must end with the status and say the text."""
    env = {**os.environ, "GGML_BACKEND_PATH": str(programs.plugin)}
    argv = [programs.server, "doctor", "--ggml", library]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=HOST_S)
    wrong = [] if done.returncode == status else [f"status {done.returncode}"]
    return done.stdout.strip()[:300], wrong + ([] if text in done.stdout else [f"does not say {text!r}: {done.stderr}"])


def other_hosts(programs: Programs) -> Iterator[tuple[str, Test]]:
    """Processes with another ggml than a tested one, or with none; and the doctor's opinion of them and of the tested ones."""

    def score(libraries: list[Path], reason: str) -> tuple[str, list[str]]:
        argv = [sys.executable, "-c", SCORE, *map(str, libraries), str(programs.plugin)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=HOST_S)
        return judged(done, reason, "0\n")

    untested = "99.0.0 is not among the tested versions"
    yield "mistake: a host of an untested version", lambda: score([programs.stub], untested)
    yield "mistake: a host without a shared ggml", lambda: score([], "linked statically")
    yield "doctor: an untested version", lambda: doctor(programs, str(programs.stub), 1, untested)
    yield "doctor: no library", lambda: doctor(programs, "/no/such/library", 1, "cannot be loaded")
    for version, host in programs.hosts.items():
        linked = subprocess.run(["ldd", host], check=True, capture_output=True, text=True).stdout
        library = re.search(r"libggml-base\S* => (\S+)", linked)[1]
        yield f"doctor: the ggml of {version}", lambda library=library: doctor(programs, library, 0, "with this ggml load")
