#!/usr/bin/env python3
"""MUL_MAT on llama.cpp's CPU device, as its server runs it, with the shapes of `scripts/bench.sh ops`.

Each case is a graph of products with different weights, 512 MiB in total for few columns, so that weights are not cached. Prints the
median time of one product with the 10th and 90th percentile. With --ops FILE, which `scripts/bench.sh ops --json` must have
written within the last minutes, also prints our time and the ratio; a value above 1 means that we are faster.
"""

import argparse
import ctypes
import importlib.util
import json
import os
import statistics
import time
from pathlib import Path

import common  # noqa: F401  (first: it extends the import path)
import gguf
import numpy as np

import type_table

TYPES = [row.name for row in type_table.that_can("convert")]
COLD = 512 << 20
F32 = 0
PATTERN = 64  # rows that are quantised; all other rows repeat them
SAMPLES = 5


class InitParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class Ggml:
    """The llama.cpp functions that a graph of products needs."""

    def __init__(self, threads: int):
        spec = importlib.util.find_spec("llama_cpp")
        if spec is None or not spec.submodule_search_locations:
            raise SystemExit("llama_cpp is not installed: run scripts/venv.sh")
        lib = Path(spec.submodule_search_locations[0]) / "lib"
        self._libs = [
            ctypes.CDLL(str(lib / f"lib{name}.so.0"), mode=ctypes.RTLD_GLOBAL)
            for name in ("ggml-base", "ggml-cpu", "ggml")
        ]
        pointer, size, i64, i32 = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64, ctypes.c_int
        self.init = self._function("ggml_init", pointer, InitParams)
        self.free = self._function("ggml_free", None, pointer)
        self.new_tensor = self._function("ggml_new_tensor_2d", pointer, pointer, i32, i64, i64)
        self.mul_mat = self._function("ggml_mul_mat", pointer, pointer, pointer, pointer)
        self.new_graph = self._function("ggml_new_graph_custom", pointer, pointer, size, ctypes.c_bool)
        self.expand = self._function("ggml_build_forward_expand", None, pointer, pointer)
        self.nbytes = self._function("ggml_nbytes", size, pointer)
        self.alloc = self._function("ggml_backend_alloc_ctx_tensors", pointer, pointer, pointer)
        self.free_buffer = self._function("ggml_backend_buffer_free", None, pointer)
        self.set = self._function("ggml_backend_tensor_set", None, pointer, ctypes.c_char_p, size, size)
        self.compute = self._function("ggml_backend_graph_compute", i32, pointer, pointer)
        self.quantise = self._function("ggml_quantize_chunk", size, i32, pointer, pointer, i64, i64, i64, pointer)
        device = self._function("ggml_backend_dev_by_type", pointer, i32)(0)
        self.backend = self._function("ggml_backend_dev_init", pointer, pointer, ctypes.c_char_p)(device, None)
        self._function("ggml_backend_cpu_set_n_threads", None, pointer, i32)(self.backend, threads)

    def _function(self, name: str, result: type | None, *arguments: type) -> "ctypes._NamedFuncPointer":
        function = next(f for lib in self._libs if (f := getattr(lib, name, None)))
        function.restype, function.argtypes = result, list(arguments)
        return function

    def rows(self, dtype: int, width: int) -> bytes:
        """Return rows of random values in a type."""
        values = np.random.default_rng(1).standard_normal((PATTERN, width), dtype=np.float32)
        out = ctypes.create_string_buffer(values.nbytes)
        used = self.quantise(dtype, values.ctypes.data, out, 0, PATTERN, width, None)
        return out.raw[:used]

    def time(self, dtype: int, width: int, columns: int, sets: int, seconds: float) -> list[float]:
        """Return the seconds per product, for each run of a graph of `sets` products."""
        context = self.init(InitParams(sets * 4096 + (1 << 20), None, True))
        graph = self.new_graph(context, 4 * sets + 16, False)
        weights = [self.new_tensor(context, dtype, width, width) for _ in range(sets)]
        inputs = [self.new_tensor(context, F32, width, columns) for _ in range(sets)]
        for a, b in zip(weights, inputs, strict=True):
            self.expand(graph, self.mul_mat(context, a, b))
        buffer = self.alloc(context, self.backend)
        for tensors, kind, count in ((weights, dtype, width), (inputs, F32, columns)):
            data = (self.rows(kind, width) * (count // PATTERN + 1))[: self.nbytes(tensors[0])]
            for tensor in tensors:
                self.set(tensor, data, 0, len(data))
        times: list[float] = []
        begin = time.monotonic()
        while len(times) < SAMPLES + 2 or time.monotonic() - begin < seconds:
            start = time.perf_counter()
            if self.compute(self.backend, graph) != 0:
                raise SystemExit("llama.cpp's device failed")
            times.append((time.perf_counter() - start) / sets)
        self.free_buffer(buffer)
        self.free(context)
        return times[2:]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--types", default=",".join(TYPES), help="comma-separated types of the weights")
    p.add_argument("--columns", default="1,8,512", help="comma-separated numbers of columns")
    p.add_argument("--width", type=int, default=4096)
    p.add_argument("--threads", type=int, default=os.cpu_count())
    p.add_argument("--seconds", type=float, default=0.5, help="per case")
    p.add_argument("--ops", type=Path, help="output file of `scripts/bench.sh ops --json`")
    p.add_argument("--json", type=Path, help="write all measurements to this file")
    a = p.parse_args()
    cases = json.loads(a.ops.read_text())["cases"] if a.ops else []
    ours = {(c["type"], c["shape"]): c["median_us"] for c in cases if c["op"] == "MUL_MAT" and not c.get("rows")}
    ggml = Ggml(a.threads)
    rows = []
    for columns in (int(n) for n in a.columns.split(",")):
        for name in a.types.split(","):
            dtype = gguf.GGMLQuantizationType[name]
            block, size = gguf.GGML_QUANT_SIZES[dtype]
            bytes_of = a.width * a.width // block * size
            sets = 1 if columns > 64 else -(-COLD // bytes_of)
            times = sorted(t * 1e6 for t in ggml.time(int(dtype), a.width, columns, sets, a.seconds))
            tenths = statistics.quantiles(times, n=10)
            shape, median = f"{a.width}x{a.width} by {columns}", statistics.median(times)
            gops = 2 * a.width * a.width * columns / median / 1e3
            line = f"MUL_MAT {name:8} {shape:20} {median:10.1f} us [{tenths[0]:.1f}-{tenths[8]:.1f}] {gops:8.1f} Gop/s"
            if mine := ours.get((name, shape)):
                line += f"  ours {mine:10.1f} us, ratio {median / mine:.2f}"
            print(line, flush=True)
            rows.append({"type": name, "shape": shape, "p10_us": tenths[0], "median_us": median, "p90_us": tenths[8]})
    if a.json:
        a.json.write_text(json.dumps({"cases": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
