"""The table of cases, filled by the modules of `families`."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .compare import EXACT, Rule
from .data import FLOATS
from .ggml import OP_COUNT, load
from .graph import Graph

Build = Callable[[Graph], int | list[int]]



def _is(name: str, quantisable: bool) -> bool:
    """Whether a type is a quantised one with a dequantiser and a dot product; also, if asked, an on-line quantiser."""
    lib = load()
    number = lib.types()[name]
    traits, cpu = lib.traits(number), lib.cpu_traits(number)
    return traits.is_quantized and bool(traits.to_float) and bool(cpu.vec_dot) and (not quantisable or bool(cpu.from_float))


# Types by what ggml's CPU backend does with them.
QUANTISED = tuple(name for name in load().types() if _is(name, quantisable=False))
QUANTISABLE = tuple(name for name in QUANTISED if _is(name, quantisable=True))
# Fits whose codes need not be ggml's: an error of 1.02 times ggml's is allowed.
FITTED = tuple(name for name in QUANTISABLE if name.endswith("_k") or name.startswith("iq4"))
WEIGHTS = (*FLOATS, *QUANTISED)
ALL = tuple(load().types())


def block(kind: str) -> int:
    """Elements of a block."""
    return load().ggml_blck_size(load().types()[kind])


@dataclass(frozen=True)
class Case:
    """A graph, and the rule for its results. `allocator`: ggml's graph allocator places the nodes (in place where it can)."""

    op: str
    name: str
    build: Build
    rule: Rule
    allocator: bool

    @property
    def data_seed(self) -> int:
        return zlib.crc32(f"{self.op} {self.name}".encode())

    def __str__(self) -> str:
        return f"{self.op} {self.name}"


class Maker:
    """Collects the cases of one op. `rng` chooses shapes and parameters."""

    def __init__(self, op: str, seed: int):
        self.op = op
        self.rng = np.random.default_rng([seed, zlib.crc32(op.encode())])
        self.cases: list[Case] = []

    def add(self, name: str, build: Build, rule: Rule = EXACT, allocator: bool = False) -> None:
        name = f"#{len(self.cases)} {name}"
        self.cases.append(Case(self.op, name, build, rule, allocator))

    def pick(self, *values):
        return values[int(self.rng.integers(len(values)))]

    def int(self, lo: int, hi: int) -> int:
        """A number from lo to hi, both included."""
        return int(self.rng.integers(lo, hi + 1))

    def length(self, kind: str = "f32") -> int:
        """A length of a row: whole blocks, else one on and beside the widths of vectors."""
        n = block(kind)
        return n * self.int(1, 3 if n > 64 else 5) if n > 1 else self.pick(1, 3, 7, 16, 31, 32, 33, 64, 67, 127, 256, 300)

    def shape(self, kind: str = "f32", dims: int = 4) -> tuple[int, ...]:
        outer = [self.int(1, 7), self.int(1, 4), self.int(1, 3)][: dims - 1]
        return (self.length(kind), *outer, *(1,) * (3 - len(outer)))


OPS: dict[str, Callable[[Maker], None]] = {}


def op(name: str):
    """Registers the function that adds the cases of an op."""

    def register(function: Callable[[Maker], None]) -> Callable[[Maker], None]:
        assert name not in OPS, name
        OPS[name] = function
        return function

    return register


def table(seed: int, only: str = "") -> list[Case]:
    """All cases, or those of the ops in the comma-separated list `only`."""
    from . import families  # noqa: F401  # fills OPS

    wanted = set(only.split(",")) if only else set(OPS)
    if unknown := wanted - set(OPS):
        raise SystemExit(f"no cases of {' '.join(unknown)}; there are: {' '.join(OPS)}")
    cases = []
    for name, function in OPS.items():
        if name in wanted:
            maker = Maker(name, seed)
            function(maker)
            cases += maker.cases
    return cases


# Ops of ggml without cases of their own.
UNTESTED = {
    "NONE RESHAPE VIEW PERMUTE TRANSPOSE": "compute nothing; the layouts and VIEWS contain them",
    "MAP_CUSTOM1 MAP_CUSTOM2 MAP_CUSTOM3 CUSTOM": "functions in the client's memory",
    "FLASH_ATTN_BACK": "its builder aborts",
}


def uncovered() -> list[str]:
    """Ops of the installed ggml that have no cases, and are not in UNTESTED."""
    from . import families  # noqa: F401

    known = {*OPS, *" ".join(UNTESTED).split()}
    # ggml has no function for the number of ops; its `ggml_op_name` does not check the number.
    names = (load().ggml_op_name(number).decode() for number in range(OP_COUNT))
    return [name for name in names if name not in known]


def share(cases: list[Case], count: int) -> list[Case]:
    """About `count` cases, with the same share of each op and at least one of each."""
    if count >= len(cases):
        return cases
    step, taken, chosen = count / len(cases), {}, []
    for case in cases:
        position = taken.get(case.op, 1.0 - step) + step
        if position >= 1.0:
            chosen.append(case)
            position -= 1.0
        taken[case.op] = position
    return chosen
