#!/usr/bin/env python3
"""Floors: the minimum time per token of a model on this machine, from its bytes and operations and the measured peaks (roofline).

    floors.py --ops ops.json            # roofs from `scripts/bench.sh ops --json ops.json`
    floors.py --read 34 --f32 440 --int8 1700

Decoding a token reads every matrix once, except the embedding, of which it reads one row. A prompt of N tokens multiplies every
matrix with N columns (the benchmark requests the logits of all tokens) and, in attention, N (N + 1) / 2 pairs of positions.
Prints Markdown. With --ops, also prints the floors of the products that were timed there, and their measured times.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import gguf
from common import ROOT  # first: it extends the import path

import type_table

TYPES = ("q4_0", "q8_0", "q4_k_m", "f16")
FLOATS = [row.name for row in type_table.that_can("convert") if row.block_len == 1]


@dataclass(frozen=True)
class Roofs:
    """Peaks of the machine: read bandwidth in GB/s, and 10^9 operations per second of f32 and of 8-bit products."""

    read: float
    f32: float
    int8: float


@dataclass
class Work:
    """Work per token: bytes of weights read, and multiply-adds by kind; attention is counted per pair of positions."""

    read: int = 0
    f32: int = 0
    int8: int = 0
    pair: int = 0
    cache: int = 0


def work(path: Path) -> Work:
    """Computes the work from the tensors of a llama model file."""
    reader = gguf.GGUFReader(path)

    def number(key: str) -> int:
        return int(reader.fields[f"llama.{key}"].contents())

    tied = all(t.name != "output.weight" for t in reader.tensors)
    w = Work()
    for t in reader.tensors:
        if len(t.shape) < 2 or (t.name == "token_embd.weight" and not tied):
            continue
        w.read += int(t.n_bytes)
        if t.tensor_type.name in FLOATS:
            w.f32 += int(t.n_elements)
        else:
            w.int8 += int(t.n_elements)
    layers, heads, kv_heads = number("block_count"), number("attention.head_count"), number("attention.head_count_kv")
    head = number("embedding_length") // heads
    w.pair = 2 * layers * heads * head  # q k and p v
    w.cache = 2 * 2 * layers * kv_heads * head  # k and v of f16, per position
    return w


def model_floors(files: dict[str, Path], roofs: Roofs, prompt: int, generate: int) -> list[str]:
    head = ["model", "weights read per token", f"KV cache, {prompt + generate // 2} positions", "decode floor"]
    head += ["multiply-adds per token", f"of attention, {prompt} tokens", "prompt floor"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name, path in files.items():
        w = work(path)
        cache = w.cache * (prompt + generate // 2)
        decode = roofs.read * 1e9 / (w.read + cache)
        pairs = prompt * (prompt + 1) // 2 * w.pair
        products = 2 * prompt * (w.f32 / roofs.f32 + w.int8 / roofs.int8) / 1e9
        seconds = max(products + 2 * pairs / roofs.f32 / 1e9, w.read / roofs.read / 1e9)
        lines.append(
            f"| {name} | {w.read / 1e6:.1f} MB | {cache / 1e6:.1f} MB | {decode:.1f} tok/s "
            f"| {(w.f32 + w.int8) / 1e9:.3f} G | {pairs / 1e9:.2f} G | {prompt / seconds:.0f} tok/s |"
        )
    return lines


def op_floors(cases: list[dict]) -> list[str]:
    lines = ["| op | type | shape | roof | floor | where we are | share |", "|---|---|---|---|---|---|---|"]
    for c in cases:
        if c["op"].startswith("MUL_MAT") and "roof" in c and not c.get("rows"):
            roof = f"{c['roof']['name']} {c['roof']['rate']:.0f} {c['roof']['unit']}"
            floor, median = (f"{c[key] / 1e3:.3f} ms" for key in ("floor_us", "median_us"))
            share = f"{100 * c['floor_us'] / c['median_us']:.0f} %"
            lines.append(f"| {c['op']} | {c['type']} | {c['shape']} | {roof} | {floor} | {median} | {share} |")
    return lines


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--ops", type=Path, help="output file of `scripts/bench.sh ops --json`")
    p.add_argument("--read", type=float, help="GB/s, overrides --ops")
    p.add_argument("--f32", type=float, help="10^9 operations per second, overrides --ops")
    p.add_argument("--int8", type=float, help="10^9 operations per second, overrides --ops")
    p.add_argument("--types", default=",".join(TYPES), help="comma-separated types of the weights")
    p.add_argument("--size", default="1b", help="a size of make_model.py")
    p.add_argument("--prompt", type=int, default=128)
    p.add_argument("--generate", type=int, default=32)
    p.add_argument("--models", type=Path, default=ROOT / "models", help="folder of the models")
    a = p.parse_args()
    measured = json.loads(a.ops.read_text()) if a.ops else {"roofs": [], "cases": []}

    def best(given: float | None, option: str, start: str) -> float:
        rates = [r["rate"] for r in measured["roofs"] if r["name"].startswith(start)]
        if not given and not rates:
            sys.exit(f"no roof `{start}`: give --ops or {option}")
        return given or max(rates)

    roofs = Roofs(best(a.read, "--read", "memory read"), best(a.f32, "--f32", "f32"), best(a.int8, "--int8", "int8"))
    files = {f"{a.size} {dtype}": a.models / f"llama-{a.size}-{dtype}.gguf" for dtype in a.types.split(",")}
    print(f"Roofs: {roofs.read:.1f} GB/s read, {roofs.f32:.0f} Gop/s of f32, {roofs.int8:.0f} Gop/s of 8 bits.\n")
    print("\n".join(model_floors(files, roofs, a.prompt, a.generate)))
    if measured["cases"]:
        print("\n" + "\n".join(op_floors(measured["cases"])))


if __name__ == "__main__":
    main()
