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

# Types by what ggml's CPU backend does with them.
LEGACY = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q1_0", "q2_0", "mxfp4", "nvfp4")
K_TYPES = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k")
TERNARY = ("tq1_0", "tq2_0")
IQ4 = ("iq4_nl", "iq4_xs")
IQ = ("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s")  # without an on-line quantiser
QUANTISED = (*LEGACY, *K_TYPES, *TERNARY, *IQ4, *IQ)  # with a dequantiser and a dot product
QUANTISABLE = (*LEGACY, *K_TYPES, *TERNARY, *IQ4)
WEIGHTS = (*FLOATS, *QUANTISED)
BYTES_ONLY = ("q8_1", "q8_k", "i8", "i16", "i64", "f64")  # only copied
ALL = (*WEIGHTS, "i32", *BYTES_ONLY)
BLOCK = {name: 256 for name in (*K_TYPES, *TERNARY, *IQ, "iq4_xs", "q8_k")}
BLOCK |= {"q1_0": 128, "q2_0": 64, "nvfp4": 64}
BLOCK |= {name: 32 for name in ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q8_1", "mxfp4", "iq4_nl")}


def block(kind: str) -> int:
    """Elements of a block."""
    return BLOCK.get(kind, 1)


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
