"""Builds the graph of a case and computes it on a backend."""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod

import numpy as np

from .data import FLOATS, blocks, encode
from .ggml import InitParams, Tensor, load

TENSORS = 128  # tensors of a case at most
GUARD = 64  # elements of the tensors before and behind those of the case, which no op may change


class ComputeError(Exception):
    """A backend has failed without ending the process."""


@dataclass
class Graph:
    """A graph under construction. Builders of ggml are methods: `g.mul_mat(a, b)`. Tensors are addresses."""

    rng: np.random.Generator
    context: int = 0
    contents: list[tuple[int, np.ndarray]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Callable[..., int]:
        function = getattr(load(), f"ggml_{name}")
        return lambda *args: function(self.context, *args)

    def at(self, tensor: int) -> Tensor:
        return Tensor.from_address(tensor)

    def ne(self, tensor: int) -> tuple[int, ...]:
        return tuple(self.at(tensor).ne)

    def nb(self, tensor: int) -> tuple[int, ...]:
        return tuple(self.at(tensor).nb)

    def root(self, ne, kind: str, values=None, lo: float = -1.0, hi: float = 1.0) -> int:
        """A tensor with memory of its own. `values` is an array, or a function of the element count."""
        ne = tuple(ne) + (1,) * (4 - len(ne))
        lib = load()
        number = lib.types()[kind]
        tensor = lib.ggml_new_tensor_4d(self.context, number, *ne)
        count = prod(ne)
        if callable(values):
            values = values(count)
        if values is not None:
            raw = encode(kind, np.asarray(values).reshape(-1))
        elif kind in FLOATS or kind == "f64":
            raw = encode(kind, self.rng.uniform(lo, hi, count))
        elif kind in ("i8", "i16", "i32", "i64"):
            raw = encode(kind, self.rng.integers(-100 if lo == -1.0 else int(lo), 100 if hi == 1.0 else int(hi), count))
        else:
            raw = blocks(self.rng, kind, count // lib.ggml_blck_size(number))
        self.contents.append((tensor, raw))
        return tensor

    def t(self, ne, kind: str = "f32", layout: str = "plain", values=None, lo: float = -1.0, hi: float = 1.0) -> int:
        """A source of shape `ne`. The layouts: `plain`; `padded`, gaps between rows and planes, and an offset; `outer`, dims 1
        to 3 permuted; `turned`, dims 0 and 1 exchanged; `overlap`, rows that share memory.
        """
        lib = load()
        ne = tuple(ne) + (1,) * (4 - len(ne))
        block = lib.ggml_blck_size(lib.types()[kind])
        if layout == "plain":
            return self.root(ne, kind, values, lo, hi)
        if layout == "padded":
            root = self.root((ne[0] + block, ne[1] + 1, ne[2] + 1, ne[3] + 1), kind, values, lo, hi)
            nb = self.nb(root)
            return self.view_4d(root, *ne, nb[1], nb[2], nb[3], nb[1] + nb[2] + (nb[0] if block == 1 else 0))
        if layout == "outer":
            root = self.root((ne[0], ne[2], ne[3], ne[1]), kind, values, lo, hi)
            return self.permute(root, 0, 2, 3, 1)
        if layout == "swapped":
            root = self.root((ne[0], ne[2], ne[1], ne[3]), kind, values, lo, hi)
            return self.permute(root, 0, 2, 1, 3)
        if layout == "turned":
            root = self.root((ne[1], ne[0], ne[2], ne[3]), kind, values, lo, hi)
            return self.transpose(root)
        if layout == "overlap":
            size = lib.ggml_type_size(lib.types()[kind])
            step = max(1, ne[0] // 2 // block) if ne[0] > block else 1
            nb1 = step * size
            rows = prod(ne[1:])
            # ggml demands as much memory as the same shape without shared rows has.
            root = self.root((ne[0] * (rows + 1),), kind, values, lo, hi)
            return self.view_4d(root, *ne, nb1, nb1 * ne[1], nb1 * ne[1] * ne[2], 0)
        raise ValueError(layout)

    def ids(self, ne, limit: int, kind: str = "i32", layout: str = "plain", distinct: bool = False) -> int:
        """Indices below `limit`. With `distinct` no index occurs twice in a row (dim 0) of the tensor's memory."""
        if not distinct:
            return self.t(ne, kind, layout, lambda n: self.rng.integers(0, max(limit, 1), n))
        full = ne[0] + (1 if layout == "padded" else 0)
        return self.t(
            ne,
            kind,
            layout,
            lambda n: np.concatenate([resize(self.rng.permutation(limit), full) for _ in range(n // full)] or [[]]),
        )


def resize(values: np.ndarray, count: int) -> np.ndarray:
    return np.resize(values, count)


@dataclass
class Memory:
    """A tensor with memory of its own, after the graph."""

    name: str
    kind: str
    raw: np.ndarray
    written: bool  # a node wrote it: its result, or a source that an op changes in place


def run(build: Callable[[Graph], int | list[int]], seed: int, backend: int, allocator: bool = False) -> list[Memory]:
    """Computes a case. Every tensor that is no view is read back: the sources too, because ops must not change them. With
    `allocator`, ggml's graph allocator places the nodes, so that results take the memory of sources; then only the result is
    read.
    """
    lib = load()
    size = lib.ggml_tensor_overhead() * TENSORS + lib.ggml_graph_overhead()
    context = lib.ggml_init(InitParams(size, None, True))
    buffer = gallocr = None
    names = {number: name for name, number in lib.types().items()}
    try:
        g = Graph(np.random.default_rng(seed), context)
        guards = [g.root((GUARD,), "f32")]
        results = build(g)
        results = results if isinstance(results, list) else [results]
        guards.append(g.root((GUARD,), "f32"))
        graph = lib.ggml_new_graph(context)
        for result in results:
            lib.ggml_set_output(result)
            lib.ggml_build_forward_expand(graph, result)
        if allocator:
            for tensor, _ in g.contents:
                lib.ggml_set_input(tensor)
                if tensor in guards:
                    lib.ggml_build_forward_expand(graph, tensor)
            gallocr = lib.ggml_gallocr_new(lib.ggml_backend_get_default_buffer_type(backend))
            if not lib.ggml_gallocr_alloc_graph(gallocr, graph):
                raise ComputeError("the graph allocator has failed")
        else:
            buffer = lib.ggml_backend_alloc_ctx_tensors(context, backend)
            if not buffer:
                raise ComputeError("no memory")
            # Some ops leave parts of their result unwritten.
            lib.ggml_backend_buffer_clear(buffer, 0)
        for tensor, raw in g.contents:
            if raw.size and g.at(tensor).buffer:
                lib.ggml_backend_tensor_set(tensor, raw.ctypes.data, 0, raw.size)
        status = lib.ggml_backend_graph_compute(backend, graph)
        if status != 0:
            raise ComputeError(f"graph_compute returned {status}")
        written = {t.view_src or address for address, t in tensors(context) if t.op and not is_view(t.op)}
        for _, t in tensors(context):
            if op_name(t.op) == "OPT_STEP_ADAMW":  # also updates the moments
                written |= set(t.src[2:4])
        kept = {g.at(r).view_src or r for r in results} | set(guards)
        found = []
        for address, t in tensors(context):
            if t.view_src or (allocator and address not in kept):
                continue
            raw = np.empty(lib.ggml_nbytes(address), np.uint8)
            if raw.size:
                lib.ggml_backend_tensor_get(address, raw.ctypes.data, 0, raw.size)
            name = "guard" if address in guards else f"{op_name(t.op)} {list(t.ne)}"
            found.append(Memory(name, names[t.type], raw, address in written))
        return found
    finally:
        if gallocr:
            lib.ggml_gallocr_free(gallocr)
        if buffer:
            lib.ggml_backend_buffer_free(buffer)
        lib.ggml_free(context)


def op_name(op: int) -> str:
    return load().ggml_op_name(op).decode()


def is_view(op: int) -> bool:
    return op_name(op) in ("RESHAPE", "VIEW", "PERMUTE", "TRANSPOSE")


def tensors(context: int):
    """The tensors of a context in the order of their creation."""
    lib = load()
    address = lib.ggml_get_first_tensor(context)
    while address:
        yield address, Tensor.from_address(address)
        address = lib.ggml_get_next_tensor(context, address)


def unsupported(build: Callable[[Graph], int | list[int]], seed: int, cpu: int) -> str:
    """The first op of a case that ggml's CPU backend announces as unsupported, or an empty string."""
    lib = load()
    context = lib.ggml_init(InitParams(lib.ggml_tensor_overhead() * TENSORS, None, True))
    try:
        build(Graph(np.random.default_rng(seed), context))
        for address, t in tensors(context):
            if not lib.ggml_backend_supports_op(cpu, address):
                return op_name(t.op)
        return ""
    finally:
        lib.ggml_free(context)
