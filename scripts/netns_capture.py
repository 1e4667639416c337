"""Runs a command while the TCP packets of a network namespace are recorded, and searches them for the bytes of a file."""

import argparse
import socket
import struct
import subprocess
import sys
import threading

ETH_P_ALL = 3
WINDOW = 16  # bytes in a row that count as seen


def tcp_payload(frame):
    """The flow (source, destination, ports), the sequence number and the payload of a frame; None if it is no TCP over IPv4."""
    if len(frame) < 54 or frame[12:14] != b"\x08\x00" or frame[23] != 6:
        return None
    start = 14 + (frame[14] & 15) * 4
    end = 14 + struct.unpack_from("!H", frame, 16)[0]
    source, destination = socket.inet_ntoa(frame[26:30]), socket.inet_ntoa(frame[30:34])
    ports = struct.unpack_from("!HH", frame, start)
    sequence = struct.unpack_from("!I", frame, start + 4)[0]
    data = start + (frame[start + 12] >> 4) * 4
    return (source, destination, *ports), sequence, frame[data:end]


def record(capture, frames, stop):
    capture.settimeout(0.1)
    while True:
        try:
            frames.append(capture.recv(1 << 17))
        except TimeoutError:
            # Only once no packet is left in the socket.
            if stop.is_set():
                return


def streams(frames):
    """The bytes of each flow, in their order."""
    flows = {}
    for frame in frames:
        parsed = tcp_payload(frame)
        if parsed and parsed[2]:
            flow, sequence, payload = parsed
            segments = flows.setdefault(flow, {})
            if len(payload) > len(segments.get(sequence, b"")):
                segments[sequence] = payload
    joined = {}
    for flow, segments in flows.items():
        first = next(iter(segments))
        ordered = sorted(segments.items(), key=lambda item: (item[0] - first + (1 << 31)) % (1 << 32))
        joined[flow] = b"".join(payload for _, payload in ordered)
    return joined


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--expect", choices=["seen", "unseen"], required=True)
    parser.add_argument("--file", required=True)
    parser.add_argument("--flow", action="append", required=True, help="SOURCE,DESTINATION that carry the whole file")
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    data = open(args.file, "rb").read()
    windows = {data[at : at + WINDOW] for at in range(len(data) - WINDOW + 1)}
    capture = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    capture.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)  # SO_RCVBUFFORCE
    # Not bound to the bridge: only its ports see the packets between servers. Packets that are seen twice count once.
    frames, stop = [], threading.Event()
    recorder = threading.Thread(target=record, args=(capture, frames, stop))
    recorder.start()
    status = subprocess.run(args.command, check=False).returncode
    stop.set()
    recorder.join()
    packets, dropped = struct.unpack("II", capture.getsockopt(263, 6, 8))  # SOL_PACKET, PACKET_STATISTICS
    if status:
        sys.exit(f"the command has failed with status {status}")
    if dropped:
        sys.exit(f"{dropped} of {packets} packets were not recorded")
    found = streams(frames)
    failures = []
    for flow in args.flow:
        ends = tuple(flow.split(","))
        stream = [stream for ((source, destination, *_), stream) in found.items() if (source, destination) == ends]
        if sum(map(len, stream)) < len(data):
            failures.append(f"{flow}: fewer bytes than the file has; they have taken another way")
        seen = sum(s[at : at + WINDOW] in windows for s in stream for at in range(len(s) - WINDOW + 1))
        print(f"{flow}: {sum(map(len, stream))} bytes, {seen} places with {WINDOW} bytes of the file")
        if args.expect == "seen" and not seen:
            failures.append(f"{flow}: the recording does not have the file")
    if args.expect == "unseen":
        for flow, stream in found.items():
            if any(stream[at : at + WINDOW] in windows for at in range(len(stream) - WINDOW + 1)):
                failures.append(f"{flow}: the recording has bytes of the file")
    if failures:
        sys.exit("\n".join(failures))


main()
