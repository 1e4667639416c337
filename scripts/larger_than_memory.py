#!/usr/bin/env python3
"""Decode with a model that is twice as large as the memory.

Writes a model of random weights, makes a memory cgroup with half of its size, and runs examples/generate in it: with
`--weights mapped`, and without the option, which must choose the same. Fails unless both runs decode all tokens and no
process of the group was killed for memory. With `--weights packed` the program must refuse the model before it loads it.

FANOUT_BUILT: folder with generate, which is already built; without it, it is built with optimisation.
Needs Linux and root.
Exits with status 77 where no memory cgroup can be made.
"""

import argparse
import json
import os
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

NOT_RUN = 77
WIDTH, HEADS, KV_HEADS, FF, VOCAB = 2048, 16, 4, 5632, 2048
Q8_0, F32 = 8, 0
ALIGNMENT = 32


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def write_model(path: Path, megabytes: int) -> int:
    """A llama model of Q8_0 weights with as many layers as the size allows. Returns its bytes."""
    row = WIDTH * 34 // 32
    layer = [("attn_q", WIDTH, WIDTH), ("attn_k", WIDTH, WIDTH // HEADS * KV_HEADS)]
    layer += [("attn_v", WIDTH, WIDTH // HEADS * KV_HEADS), ("attn_output", WIDTH, WIDTH)]
    layer += [("ffn_gate", WIDTH, FF), ("ffn_up", WIDTH, FF), ("ffn_down", FF, WIDTH)]
    layer_bytes = sum(k * m for _, k, m in layer) * 34 // 32
    layers = max(1, round((megabytes * 10**6 - 2 * VOCAB * row) / layer_bytes))
    tensors = [("token_embd", (WIDTH, VOCAB)), ("output", (WIDTH, VOCAB)), ("output_norm", (WIDTH,))]
    for i in range(layers):
        tensors += [(f"blk.{i}.{name}", (k, m)) for name, k, m in layer]
        tensors += [(f"blk.{i}.{name}", (WIDTH,)) for name in ("attn_norm", "ffn_norm")]
    numbers = {
        "block_count": layers,
        "embedding_length": WIDTH,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "feed_forward_length": FF,
        "context_length": 2048,
        "vocab_size": VOCAB,
    }
    pairs = [string("general.architecture") + struct.pack("<I", 8) + string("llama")]
    pairs += [string(f"llama.{key}") + struct.pack("<II", 4, value) for key, value in numbers.items()]
    pairs += [string("llama.attention.layer_norm_rms_epsilon") + struct.pack("<If", 6, 1e-5)]
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs)) + b"".join(pairs)
    offset, infos, sizes = 0, [], []
    for name, shape in tensors:
        dtype = F32 if len(shape) == 1 else Q8_0
        elements = shape[0] * (shape[1] if len(shape) > 1 else 1)
        size = elements * 4 if dtype == F32 else elements * 34 // 32
        infos.append(string(f"{name}.weight") + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape))
        infos[-1] += struct.pack("<IQ", dtype, offset)
        sizes.append(size)
        offset += -(-size // ALIGNMENT) * ALIGNMENT
    header += b"".join(infos)
    # Blocks of Q8_0: the scale 0.0002 as f16, and 32 random codes.
    noise = bytes((i * 2654435761 >> 13) & 255 for i in range(32 * 4096))
    blocks = b"".join(struct.pack("<e", 0.0002) + noise[i : i + 32] for i in range(0, len(noise), 32))
    with open(path, "wb") as file:
        file.write(header + bytes(-len(header) % ALIGNMENT))
        for (_, shape), size in zip(tensors, sizes):
            content = struct.pack("<f", 1.0) * shape[0] if len(shape) == 1 else blocks * -(-size // len(blocks))
            file.write(content[:size] + bytes(-size % ALIGNMENT))
        file.flush()
        os.fsync(file.fileno())
        # Pages that are in the cache already would be charged to the group of this process.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return file.tell()


class Group:
    """A memory cgroup of version 1 or 2 with a limit in bytes."""

    def __init__(self, limit: int):
        errors = []
        root = Path("/sys/fs/cgroup")
        # Of version 2, whose line names no controllers, the group of this process may be delegated to its user.
        groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
        own = [root / group.lstrip("/") for _, controllers, group in groups if controllers == ""]
        for parent in [*own, root, root / "memory"]:
            self.folder = parent / f"fanout-{os.getpid()}"
            try:
                self.make(parent, limit)
                return
            except OSError as error:
                errors.append(str(error))
        raise OSError("; ".join(errors))

    def make(self, parent: Path, limit: int) -> None:
        if not (parent / "cgroup.procs").exists():
            raise OSError(f"{parent} is no cgroup")
        self.folder.mkdir()
        try:
            one, two = self.folder / "memory.limit_in_bytes", self.folder / "memory.max"
            if not one.exists() and not two.exists():
                (parent / "cgroup.subtree_control").write_text("+memory")
            (one if one.exists() else two).write_text(str(limit))
            if (self.folder / "memory.swap.max").exists():
                (self.folder / "memory.swap.max").write_text("0")
        except OSError:
            self.folder.rmdir()
            raise

    def run(self, command: list[str]) -> subprocess.CompletedProcess:
        def enter() -> None:
            (self.folder / "cgroup.procs").write_text(str(os.getpid()))

        return subprocess.run(command, preexec_fn=enter, capture_output=True, text=True, check=False)

    def kills(self) -> int:
        """Processes of the group that the system killed for memory."""
        for file in ("memory.events", "memory.oom_control"):
            if (self.folder / file).exists():
                counts = dict(line.split() for line in (self.folder / file).read_text().splitlines())
                return int(counts.get("oom_kill", 0))
        return 0

    def remove(self) -> None:
        self.folder.rmdir()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=600, help="size of the model in MB (default: 600)")
    parser.add_argument("--predict", type=int, default=4, help="tokens to generate (default: 4)")
    args = parser.parse_args()
    repository = Path(__file__).resolve().parent.parent
    built = os.environ.get("FANOUT_BUILT")
    target = Path(os.environ.get("CARGO_TARGET_DIR", repository / "target"))
    program = Path(built or target / "release").absolute() / "generate"
    target.mkdir(exist_ok=True)
    # Not in /tmp, which may be in memory: pages of a tmpfs are not dropped, and belong to the group that wrote them.
    with tempfile.TemporaryDirectory(prefix="fanout-larger-", dir=target) as folder:
        model = Path(folder) / "model.gguf"
        size = write_model(model, args.megabytes)
        try:
            group = Group(size // 2)
        except OSError as error:
            print(f"larger_than_memory.py: not run: cannot make a memory cgroup: {error}", file=sys.stderr)
            return NOT_RUN
        try:
            if not built:
                subprocess.run(["cargo", "build", "--release", "--locked", "-p", "generate"], cwd=repository, check=True)
            command = [str(program), str(model), "--tokens", "1,5,9", "-d", "CPU", "--ubatch", "16", "--json", "--ignore-eos"]
            command += ["-n", str(args.predict)]
            failed = False
            tokens = []
            for weights in (["--weights", "mapped"], []):
                done = group.run(command + weights)
                name = " ".join(weights) or "no --weights"
                report = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None
                mapped = report["devices"][0]["weight_bytes_mapped"] if report else 0
                good = report is not None and len(report["tokens"]) == args.predict and mapped > size * 9 // 10
                good = good and group.kills() == 0
                failed = failed or not good
                if report is None:
                    print(f"{name}: status {done.returncode}: {done.stderr.strip()}")
                    continue
                tokens.append(report["tokens"])
                print(f"{name}: {mapped / 1e6:.0f} MB mapped in a group of {size / 2e6:.0f} MB, loaded in {report['load_s']:.3f} s, "
                      f"{report['gen_tok_s']:.2f} tok/s, tokens {report['tokens']}, {group.kills()} kills")
            packed = group.run([*command, "--weights", "packed"])
            refused = packed.returncode == 1 and "nothing was loaded" in packed.stderr
            print(f"--weights packed: {'refused' if refused else packed.stderr.strip()}")
            failed = failed or not refused or group.kills() > 0 or len(set(map(tuple, tokens))) != 1
            return int(failed)
        finally:
            group.remove()


if __name__ == "__main__":
    sys.exit(main())
