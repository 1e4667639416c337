"""Load tests of fanout's server: latency during a large upload, and memory after a killed upload."""

import contextlib
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable

from raw import RawClient, vector
from servers import Server

UPLOAD = 1 << 30
CHUNK = 1 << 20
IDLE = 200
SAMPLES = 300  # minimum number of round trips for a meaningful 99th percentile
P99_S = 0.050
LEFT_BYTES = 64 << 20
DEADLINE_S = 60.0


class LoadError(Exception):
    """A bound of a load test was exceeded."""


def pattern() -> bytes:
    return bytes(range(256)) * (CHUNK // 256)


def upload(client: RawClient, size: int) -> None:
    """Upload `size` bytes and read the last of them back."""
    buffer, base = client.alloc(size)
    tensor = vector(buffer, base, size // 4)
    chunk = pattern()
    client.upload_header(tensor, size)
    for _ in range(size // CHUNK):
        client.socket.sendall(chunk)
    if client.download(tensor, size - CHUNK, CHUNK) != chunk:
        raise LoadError("the downloaded bytes differ from the upload")


def latency(server: Server) -> str:
    """Measure DEVICE_COUNT round trips during uploads, with idle connections open. Returns the measurement as text."""
    failed: list[Exception] = []

    def uploader() -> None:
        try:
            with RawClient(server.endpoint) as client:
                upload(client, UPLOAD)
        except (OSError, LoadError) as e:
            failed.append(e)

    times: list[float] = []
    with contextlib.ExitStack() as stack:
        for _ in range(IDLE):
            stack.enter_context(RawClient(server.endpoint))
        probe = stack.enter_context(RawClient(server.endpoint))
        while len(times) < SAMPLES and not failed:
            thread = threading.Thread(target=uploader)
            thread.start()
            while thread.is_alive():
                start = time.perf_counter()
                probe.device_count()
                times.append(time.perf_counter() - start)
            thread.join()
    if failed:
        raise LoadError(str(failed[0]))
    p99 = statistics.quantiles(times, n=100)[98]
    measured = f"p99 {p99 * 1e3:.2f} ms of {len(times)} round trips"
    if p99 > P99_S:
        raise LoadError(measured)
    return measured


def killed_upload(server: Server) -> str:
    """Check that the server frees the memory of an upload that is killed half-way. Returns the measurement as text."""
    with RawClient(server.endpoint) as client:
        upload(client, CHUNK)  # warm-up: allocations that the first session makes once are not counted
    before = server.resident()
    client = RawClient(server.endpoint)
    buffer, base = client.alloc(UPLOAD)
    client.upload_header(vector(buffer, base, UPLOAD // 4), UPLOAD)
    chunk = pattern()
    for _ in range(UPLOAD // CHUNK // 2):
        client.socket.sendall(chunk)
    held = wait(server, lambda now: now > before + UPLOAD // 4)
    # With a zero linger the kernel resets the connection, as it does for a killed process with unsent data.
    client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.socket.close()
    if not held:
        raise LoadError("the upload never became resident, so nothing was tested")
    freed = wait(server, lambda now: now < before + LEFT_BYTES)
    measured = f"{(server.resident() - before) / 2**20:+.1f} MiB after the killed upload"
    if not freed:
        raise LoadError(measured)
    return measured


def wait(server: Server, reached: Callable[[int], bool]) -> bool:
    """Poll the server's resident bytes until `reached` holds; False at the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not reached(server.resident()):
        if time.monotonic() > deadline or not server.alive():
            return False
        time.sleep(0.02)
    return True
