"""Rows by index, sums of rows, sorting."""

import numpy as np

from ..compare import EXACT, Rule, nmse
from ..data import FLOATS, decode
from ..graph import Memory
from ..table import QUANTISABLE, QUANTISED, Maker, block, op
from .copies import quantised_rule


@op("GET_ROWS")
def get_rows(m: Maker) -> None:
    for kind in ("f32", "i32", "f16", "bf16", *QUANTISED):
        for layout in ("plain", "padded", "swapped", "outer"):
            n, rows, a2, a3, k = m.length(kind), m.int(2, 40), m.int(1, 4), m.int(1, 3), m.int(1, 9)
            if layout == "plain":
                a2 = a3 = 1
            li = m.pick("plain", "padded", "outer")
            m.add(
                f"{kind} [{n}, {rows}, {a2}, {a3}] {k} rows {layout} {li}",
                lambda g, kind=kind, ne=(n, rows, a2, a3), k=k, la=layout, li=li: g.get_rows(
                    g.t(ne, kind, la), g.ids((k, ne[2], ne[3]), ne[1], layout=li)
                ),
            )
    m.add("f32 no rows", lambda g: g.get_rows(g.t((8, 4)), g.ids((0,), 4)))
    m.add("turned ids", lambda g: g.get_rows(g.t((8, 4, 5)), g.ids((3, 5), 4, layout="turned")))


@op("GET_ROWS_BACK")
def get_rows_back(m: Maker) -> None:
    for kind in ("f32", "f16"):
        for _ in range(8):
            n, k, rows = m.length(), m.int(1, 20), m.int(1, 12)
            m.add(
                f"{kind} [{n}, {k}] to {rows}",
                lambda g, kind=kind, n=n, k=k, r=rows: g.get_rows_back(g.t((n, k), kind), g.ids((k,), r), g.t((n, r))),
                EXACT if kind == "f32" else nmse(1e-7),
            )


@op("SET_ROWS")
def set_rows(m: Maker) -> None:
    for source in ("f32", "f16"):
        for kind in (*FLOATS, *(("i32",) if source == "f32" else ()), *QUANTISABLE):
            for ids in ("i64", "i32"):
                for layout in ("plain", "padded", "outer"):
                    n, rows, b2, b3 = m.length(kind), m.int(4, 30), m.int(1, 4), m.int(1, 3)
                    r = m.int(1, rows)
                    c1, c2 = m.pick(1, b2), m.pick(1, b3)
                    to, li = m.pick("plain", "padded"), m.pick("plain", "padded")

                    def build(g, source=source, kind=kind, ids=ids, la=layout, ne=(n, rows, b2, b3), r=r, c=(c1, c2), to=to, li=li):
                        lo, hi = (-90, 90) if kind == "i32" else (-1, 1)
                        b = g.t((ne[0], r, ne[2], ne[3]), source, la, lo=lo, hi=hi)
                        return g.set_rows(g.t(ne, kind, to), b, g.ids((r, *c), ne[1], ids, li, distinct=True))

                    name = f"{source} to {kind} [{n}, {rows}, {b2}, {b3}] {r} rows {ids} [{c1}, {c2}] {layout} {to} {li}"
                    m.add(name, build, quantised_rule(kind))
    m.add("f32 no rows", lambda g: g.set_rows(g.t((8, 4)), g.t((8, 0)), g.ids((0,), 4, "i64")))


def reduction(name: str, builder: str, bound: float, layouts: tuple[str, ...]) -> None:
    @op(name)
    def cases(m: Maker) -> None:
        for layout in layouts:
            for _ in range(6):
                ne = m.shape()
                m.add(f"f32 {ne} {layout}", lambda g, ne=ne, la=layout: getattr(g, builder)(g.t(ne, layout=la)), nmse(bound))
        m.add("f32 no rows", lambda g: getattr(g, builder)(g.t((5, 0, 2))))
        m.add("f32 large", lambda g: getattr(g, builder)(g.t((4099, 2), lo=0, hi=1)), nmse(bound))


reduction("SUM_ROWS", "sum_rows", 1e-12, ("plain", "padded", "outer", "overlap"))
reduction("MEAN", "mean", 1e-12, ("plain", "padded", "outer"))
reduction("CUMSUM", "cumsum", 1e-12, ("plain", "padded", "outer"))


def total(memories: list[Memory]) -> np.ndarray:
    """The sum of all elements of the source, which fills its memory."""
    source = next(x for x in memories if x.name != "guard")
    return np.array([decode(source.kind, source.raw).astype(np.float64).sum()])


@op("SUM")
def sum_(m: Maker) -> None:
    for kind in FLOATS:
        # ggml sums f16 and bf16 in f32 within a row.
        bound = {"f32": 1e-12, "f16": 1e-5, "bf16": 1e-3}[kind]
        for layout in ("plain", "padded", "outer"):
            for _ in range(4):
                ne = m.shape(kind)
                m.add(f"{kind} {ne} {layout}", lambda g, ne=ne, k=kind, la=layout: g.sum(g.t(ne, k, la, lo=0, hi=1)), nmse(bound))
    reason = "ggml reads the rows of a transposed tensor as if they were dense"
    for _ in range(6):
        ne = m.shape()
        m.add(f"f32 {ne} turned", lambda g, ne=ne: g.sum(g.t(ne, layout="turned", lo=0, hi=1)), Rule(1e-12, total, reason))


@op("ARGMAX")
def argmax(m: Maker) -> None:
    for _ in range(16):
        ne = (m.length(), m.int(1, 9))
        layout = m.pick("plain", "rows")
        m.add(
            f"{ne} {layout}",
            lambda g, ne=ne, la=layout: g.argmax(
                g.t(ne) if la == "plain" else (lambda r: g.view_2d(r, *ne, g.nb(r)[1], 4))(g.root((ne[0] + 3, ne[1]), "f32"))
            ),
        )
    for values in ([1.0, 3.0, 3.0, 2.0], [0.0, -0.0, 0.0], [-5.0, -5.0], [float("-inf")] * 3, [2.0, float("inf"), 1.0]):
        m.add(f"{values}", lambda g, v=values: g.argmax(g.t((len(v), 1), values=v)))


def equal_count(memories: list[Memory]) -> np.ndarray:
    a, b = (decode(x.kind, x.raw) for x in [x for x in memories if x.name != "guard"][:2])
    return np.array([(a == b).sum()], np.int64)


@op("COUNT_EQUAL")
def count_equal(m: Maker) -> None:
    for _ in range(8):
        ne = (m.length(), m.int(1, 9))
        layout = m.pick("plain", "padded")
        m.add(
            f"{ne} {layout}",
            lambda g, ne=ne, la=layout: g.count_equal(g.t(ne, "i32", la, lo=0, hi=3), g.t(ne, "i32", lo=0, hi=3)),
        )
    reason = "ggml divides row numbers by the wrong dims, and reads other rows of tensors with more than two dims"
    for _ in range(6):
        ne = (m.length(), m.int(1, 9), m.int(2, 4), m.int(1, 3))
        m.add(
            f"{ne}",
            lambda g, ne=ne: g.count_equal(g.t(ne, "i32", lo=0, hi=3), g.t(ne, "i32", lo=0, hi=3)),
            Rule(0.0, equal_count, reason),
        )


def distinct(g):
    """Values without ties, so that the order is determined."""
    return lambda n: g.rng.permutation(n).astype(np.float32) - n / 2


@op("ARGSORT")
def argsort(m: Maker) -> None:
    for order in (0, 1):
        for _ in range(12):
            ne = (m.pick(1, 2, 7, 60, 64, 65, 200, 257, 1023), m.int(1, 5), m.int(1, 3), m.int(1, 2))
            m.add(f"{ne} {order=}", lambda g, ne=ne, o=order: g.argsort(g.t(ne, values=distinct(g)), o))


def same_sets(got: Memory, want: Memory) -> str:
    """The indices of each row in any order. The name ends in the shape of the result."""
    width = int(want.name.split("[")[1].split(",")[0])
    g, w = (np.sort(decode(x.kind, x.raw).reshape(-1, width), axis=1) for x in (got, want))
    return "" if np.array_equal(g, w) else f"other indices in {int((g != w).any(axis=1).sum())} rows"


@op("TOP_K")
def top_k(m: Maker) -> None:
    for _ in range(20):
        ne = (m.pick(1, 2, 7, 60, 64, 65, 200, 257, 1023), m.int(1, 5), m.int(1, 3), m.int(1, 2))
        k = m.int(1, ne[0])
        m.add(f"{ne} {k=}", lambda g, ne=ne, k=k: g.top_k(g.t(ne, values=distinct(g)), k), Rule(check=same_sets))
