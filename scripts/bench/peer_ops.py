#!/usr/bin/env python3
"""MUL_MAT and the ops on images on llama.cpp's CPU device, as its server runs them, with the shapes of `scripts/bench.sh ops`.

Each case of products is a graph of products with different weights, 512 MiB in total for few columns, so that weights are not
cached; so is each case of an op on images that computes no products. Prints the median time of one node with the 10th and 90th
percentile. With --ops FILE, which `scripts/bench.sh ops --json` must have written within the last minutes, also prints our time and
the ratio; a value above 1 means that we are faster.
"""

import argparse
import ctypes
import dataclasses
import importlib.util
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import common  # noqa: F401  (first: it extends the import path)
import gguf
import numpy as np

import type_table

TYPES = [row.name for row in type_table.that_can("convert")]
COLD = 512 << 20
F32, F16 = 0, 1
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
        self.new_image = self._function("ggml_new_tensor_4d", pointer, pointer, i32, i64, i64, i64, i64)
        two, flag = (pointer, pointer, pointer), ctypes.c_bool
        self.conv_2d = self._function("ggml_conv_2d_direct", pointer, *two, *[i32] * 6)
        self.conv_2d_dw = self._function("ggml_conv_2d_dw_direct", pointer, *two, *[i32] * 6)
        self.conv_transpose_1d = self._function("ggml_conv_transpose_1d", pointer, *two, i32, i32, i32)
        self.conv_transpose_2d = self._function("ggml_conv_transpose_2d_p0", pointer, *two, i32)
        self.im2col = self._function("ggml_im2col", pointer, *two, *[i32] * 6, flag, i32)
        real, word = ctypes.c_float, ctypes.c_uint32
        self.pool_2d = self._function("ggml_pool_2d", pointer, pointer, pointer, *[i32] * 5, real, real)
        self.upscale = self._function("ggml_interpolate", pointer, pointer, pointer, *[i64] * 4, word)
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
        return self.sample(context, graph, buffer, sets, seconds)

    def time_image(self, case: "ImageCase", seconds: float) -> list[float]:
        """Return the seconds per node of an op on images, for each run of a graph of nodes with different data."""
        context = self.init(InitParams(1 << 24, None, True))
        graph = self.new_graph(context, 1 << 12, False)
        leaves: list[tuple[int, int]] = []
        sets, moved = 0, 0
        # A node with products reuses its data. The others are as many as exceed the caches.
        while sets == 0 or (not case.ops and moved < COLD):
            sources = [self.new_image(context, dtype, *ne) for dtype, ne in case.sources]
            node = case.build(self, context, sources)
            self.expand(graph, node)
            leaves += [(source, dtype) for source, (dtype, _) in zip(sources, case.sources, strict=True)]
            moved += self.nbytes(sources[-1]) + self.nbytes(node)
            sets += 1
        buffer = self.alloc(context, self.backend)
        patterns = {dtype: self.rows(dtype, 1 << 10) for dtype, _ in case.sources}
        for leaf, dtype in leaves:
            size, pattern = self.nbytes(leaf), patterns[dtype]
            self.set(leaf, (pattern * (size // len(pattern) + 1))[:size], 0, size)
        return self.sample(context, graph, buffer, sets, seconds)

    def sample(self, context: int, graph: int, buffer: int, sets: int, seconds: float) -> list[float]:
        """Return the seconds per node of each run of a graph of `sets` nodes, and free its memory."""
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


@dataclasses.dataclass
class ImageCase:
    """A case of `bench/cases/vision.rs`: its name there, and the node in llama.cpp's terms."""

    op: str
    dtype: str
    shape: str
    build: Callable[[Ggml, int, list[int]], int]
    sources: list[tuple[int, tuple[int, int, int, int]]]
    ops: int = 0


def image_cases() -> list[ImageCase]:
    """Return the cases of `bench/cases/vision.rs`, in their order."""
    cases = []
    for name, t in (("F16", F16), ("F32", F32)):
        for k, c, out, side, stride, pad in (
            (14, 3, 1024, 224, 14, 0),
            (3, 320, 320, 64, 1, 1),
            (3, 128, 128, 256, 1, 1),
        ):
            cases.append(
                ImageCase(
                    "CONV_2D",
                    name,
                    f"{k}x{k}x{c} to {out}, {side}x{side}, stride {stride}",
                    lambda g, x, s, stride=stride, pad=pad: g.conv_2d(x, *s, stride, stride, pad, pad, 1, 1),
                    [(t, (k, k, c, out)), (F32, (side, side, c, 1))],
                    2 * k * k * c * out * ((side + 2 * pad - k) // stride + 1) ** 2,
                )
            )
        cases += [
            ImageCase(
                "CONV_2D_DW",
                name,
                "3x3 of 256, 112x112",
                lambda g, x, s: g.conv_2d_dw(x, *s, 1, 1, 1, 1, 1, 1),
                [(t, (3, 3, 1, 256)), (F32, (112, 112, 256, 1))],
                2 * 9 * 256 * 112 * 112,
            ),
            ImageCase(
                "CONV_TRANSPOSE_1D",
                name,
                "16x512 to 256, 256, stride 8",
                lambda g, x, s: g.conv_transpose_1d(x, *s, 8, 0, 1),
                [(t, (16, 256, 512, 1)), (F32, (256, 512, 1, 1))],
                2 * 16 * 512 * 256 * 256,
            ),
            ImageCase(
                "CONV_TRANSPOSE_2D",
                name,
                "2x2x256 to 64, 64x64, stride 2",
                lambda g, x, s: g.conv_transpose_2d(x, *s, 2),
                [(t, (2, 2, 64, 256)), (F32, (64, 64, 256, 1))],
                2 * 4 * 256 * 64 * 64 * 64,
            ),
        ]
    for c, stride in ((80, 1), (1280, 2)):
        cases.append(
            ImageCase(
                "IM2COL",
                "F16",
                f"3x{c}, 3000, stride {stride}",
                lambda g, x, s, stride=stride: g.im2col(x, *s, stride, 0, 1, 0, 1, 0, False, F16),
                [(F16, (3, c, 1, 1)), (F32, (3000, c, 1, 1))],
            )
        )
    for k, c, side, stride, pad in ((14, 3, 336, 14, 0), (3, 320, 64, 1, 1)):
        cases.append(
            ImageCase(
                "IM2COL",
                "F16",
                f"{k}x{k}x{c}, {side}x{side}, stride {stride}",
                lambda g, x, s, stride=stride, pad=pad: g.im2col(x, *s, stride, stride, pad, pad, 1, 1, True, F16),
                [(F16, (k, k, c, 1)), (F32, (side, side, c, 1))],
            )
        )
    for kind, name in enumerate(("maximum", "mean")):
        cases.append(
            ImageCase(
                "POOL_2D",
                "F32",
                f"{name} of 2x2, 56x56x1152",
                lambda g, x, s, kind=kind: g.pool_2d(x, *s, kind, 2, 2, 2, 2, 0.0, 0.0),
                [(F32, (56, 56, 1152, 1))],
            )
        )
    for mode, name in enumerate(("nearest", "bilinear", "bicubic")):
        cases.append(
            ImageCase(
                "UPSCALE",
                "F32",
                f"{name}, 64x64x512 by 2",
                lambda g, x, s, mode=mode: g.upscale(x, *s, 128, 128, 512, 1, mode),
                [(F32, (64, 64, 512, 1))],
            )
        )
    return cases


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--types", default=",".join(TYPES), help="comma-separated types of the weights")
    p.add_argument("--columns", default="1,8,512", help="comma-separated numbers of columns")
    p.add_argument("--width", type=int, default=4096)
    p.add_argument("--threads", type=int, default=os.cpu_count())
    p.add_argument("--seconds", type=float, default=0.5, help="per case")
    p.add_argument("--only", choices=("products", "images"), help="only MUL_MAT, or only the ops on images")
    p.add_argument("--ops", type=Path, help="output file of `scripts/bench.sh ops --json`")
    p.add_argument("--json", type=Path, help="write all measurements to this file")
    a = p.parse_args()
    cases = json.loads(a.ops.read_text())["cases"] if a.ops else []
    ours = {(c["op"], c["type"], c["shape"]): c["median_us"] for c in cases if not c.get("rows")}
    ggml = Ggml(a.threads)
    rows = []

    def report(op: str, name: str, shape: str, ops: int, seconds: list[float]) -> None:
        times = sorted(t * 1e6 for t in seconds)
        tenths, median = statistics.quantiles(times, n=10), statistics.median(times)
        rate = f"{ops / median / 1e3:8.1f} Gop/s" if ops else " " * 14
        line = f"{op:17} {name:8} {shape:38} {median:10.1f} us [{tenths[0]:.1f}-{tenths[8]:.1f}] {rate}"
        if mine := ours.get((op, name, shape)):
            line += f"  ours {mine:10.1f} us, ratio {median / mine:.2f}"
        print(line, flush=True)
        quantiles = {"p10_us": tenths[0], "median_us": median, "p90_us": tenths[8]}
        rows.append({"op": op, "type": name, "shape": shape, **quantiles})

    for columns in (int(n) for n in a.columns.split(",") if a.only != "images"):
        for name in a.types.split(","):
            dtype = gguf.GGMLQuantizationType[name]
            block, size = gguf.GGML_QUANT_SIZES[dtype]
            bytes_of = a.width * a.width // block * size
            sets = 1 if columns > 64 else -(-COLD // bytes_of)
            times = ggml.time(int(dtype), a.width, columns, sets, a.seconds)
            report("MUL_MAT", name, f"{a.width}x{a.width} by {columns}", 2 * a.width * a.width * columns, times)
    for case in image_cases() if a.only != "products" else []:
        report(case.op, case.dtype, case.shape, case.ops, ggml.time_image(case, a.seconds))
    if a.json:
        a.json.write_text(json.dumps({"cases": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
