#!/usr/bin/env python3
"""What watching costs a server: processor time of rpc-server under 20 scrapes of /metrics a second and 20 open status pages.

Usage: scripts/http_load.py [--seconds N] [--sessions N] PROGRAM

Starts PROGRAM (an optimised rpc-server) with an idle CPU device and N sessions, measures its processor time without readers, then with
them, and prints both as shares of one core. Fails if the difference is more than 2 %.
"""

import argparse
import http.client
import os
import re
import socket
import subprocess
import sys
import threading
import time

LIMIT = 0.02
PAGES = 20
SCRAPES = 20  # per second
# HELLO of protocol 8.0: command 14, a body of 24 bytes.
HELLO = bytes([14]) + (24).to_bytes(8, "little") + bytes(24)


def cpu_seconds(pid):
    """Processor time of a process so far, of all its threads."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def reader(address, path, period, offset, end, failures, done):
    """Requests `path` every `period` seconds, each time on a new connection."""
    connection = http.client.HTTPConnection(*address, timeout=10)
    due = time.monotonic() + offset
    try:
        while due < end:
            time.sleep(max(0, due - time.monotonic()))
            connection.request("GET", path)
            response = connection.getresponse()
            body = response.read()
            if response.status != 200 or not body:
                raise OSError(f"{path}: status {response.status}, {len(body)} bytes")
            due += period
            done[0] += 1
    except (OSError, http.client.HTTPException) as error:
        failures.append(error)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--sessions", type=int, default=20)
    parser.add_argument("program")
    options = parser.parse_args()
    command = [options.program, "--no-supervise", "-p", "0", "-d", "CPU", "-t", "1", "--mem", "64M"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        address = None
        while address is None:
            line = server.stdout.readline()
            if not line:
                sys.exit("http_load.py: the server ended")
            if found := re.match(r"listening on (\S+):(\d+)", line):
                address = (found[1], int(found[2]))
        sessions = [socket.create_connection(address) for _ in range(options.sessions)]
        for session in sessions:
            session.sendall(HELLO)
            session.recv(64)

        check = http.client.HTTPConnection(*address, timeout=10)
        check.request("GET", "/metrics")
        if f"\nfanout_sessions {options.sessions}.0\n" not in check.getresponse().read().decode():
            sys.exit("http_load.py: not all sessions have begun")
        check.close()

        def share_during(readers):
            before, start = cpu_seconds(server.pid), time.monotonic()
            end, failures, done = start + options.seconds, [], [[0] for _ in readers]
            threads = [
                threading.Thread(target=reader, args=(address, *args, end, failures, count))
                for args, count in zip(readers, done)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            time.sleep(max(0, end - time.monotonic()))
            if failures:
                sys.exit(f"http_load.py: {failures[0]}")
            for (path, period, _), (count,) in zip(readers, done):
                if count < 0.9 * options.seconds / period - 1:
                    sys.exit(f"http_load.py: only {count} of {options.seconds / period:.0f} requests of {path} were answered in time")
            return (cpu_seconds(server.pid) - before) / (time.monotonic() - start)

        idle = share_during([])
        pages = [("/api/status", 1.0, i / PAGES) for i in range(PAGES)]
        busy = share_during([("/metrics", 1 / SCRAPES, 0.0), *pages])
    finally:
        server.kill()
        server.wait()
    print(f"idle {idle:.2%} of a core; {SCRAPES} scrapes per second and {PAGES} pages with {options.sessions} sessions {busy:.2%}")
    if busy - idle > LIMIT:
        sys.exit(f"http_load.py: the readers cost {busy - idle:.2%} of a core, more than {LIMIT:.0%}")


if __name__ == "__main__":
    main()
