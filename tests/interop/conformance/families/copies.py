"""Ops that only move or convert elements."""

from ..compare import EXACT, Rule, nmse
from ..data import FLOATS, decode
from ..graph import Memory
from ..table import ALL, FITTED, QUANTISABLE, QUANTISED, Maker, block, op

import numpy as np

LAYOUTS = ("plain", "padded", "swapped", "outer")


def quantised_rule(kind: str) -> Rule:
    """Rule for values that an op has quantised. SIMD quantisers of Q8_0 may choose the neighbouring code at a tie."""
    if kind in FITTED:
        return nmse({"q2_k": 0.2, "q3_k": 5e-2}.get(kind, 2e-2))
    if kind == "q8_0":
        return nmse(1e-5)
    return EXACT


def no_worse(got: Memory, want: Memory, source: np.ndarray) -> str:
    g, w = (((decode(m.kind, m.raw) - source) ** 2).sum(dtype=np.float64) for m in (got, want))
    return "" if g <= 1.02 * w + 1e-9 else f"squared error {g:.4g} instead of {w:.4g}"


@op("DUP")
def dup(m: Maker) -> None:
    for kind in ALL:
        for layout in LAYOUTS[: 4 if block(kind) == 1 else 2]:
            ne = m.shape(kind)
            m.add(f"{kind} {ne} {layout}", lambda g, k=kind, ne=ne, la=layout: g.dup(g.t(ne, k, la)))
        ne = m.shape(kind)
        m.add(f"{kind} {ne} in place", lambda g, k=kind, ne=ne: g.dup_inplace(g.t(ne, k)))


@op("CONT")
def cont(m: Maker) -> None:
    for kind in ALL:
        layouts = (*LAYOUTS, "turned", "overlap") if block(kind) == 1 else LAYOUTS
        for layout in layouts:
            ne = m.shape(kind)
            m.add(f"{kind} {ne} {layout}", lambda g, k=kind, ne=ne, la=layout: g.cont(g.t(ne, k, la)))
    for kind in ("f32", "f16", "i32"):
        n = 64
        m.add(f"{kind} other shape", lambda g, k=kind, n=n: g.cont_2d(g.t((n, 3, 4), k, "swapped"), 2 * n, 6))
    m.add("f32 empty", lambda g: g.cont(g.t((3, 0, 2), layout="turned")))


@op("CPY")
def cpy(m: Maker) -> None:
    for kind in ALL:  # bytes; ggml's CPU backend does not announce copies to the types without a quantiser, which DUP covers
        if kind in QUANTISED and kind not in QUANTISABLE:
            continue
        for layout in ("plain", "padded", "swapped"):
            ne = m.shape(kind)
            to = m.pick("plain", "padded") if block(kind) > 1 else m.pick("plain", "padded", "outer")
            m.add(f"{kind} {ne} {layout} to {to}", lambda g, k=kind, ne=ne, a=layout, b=to: g.cpy(g.t(ne, k, a), g.t(ne, k, b)))
    pairs = [(a, b) for a in FLOATS for b in FLOATS if a != b] + [("f32", "i32"), ("i32", "f32")]
    for a, b in pairs:
        for layout in ("plain", "padded", "turned", "outer", "swapped"):
            for to in ("plain", "padded", "turned"):
                ne = m.shape()
                m.add(
                    f"{a} to {b} {ne} {layout} to {to}",
                    lambda g, a=a, b=b, ne=ne, la=layout, to=to: g.cpy(g.t(ne, a, la, lo=-90, hi=90), g.t(ne, b, to)),
                )
        ne = m.shape()
        m.add(f"cast {a} to {b} {ne}", lambda g, a=a, b=b, ne=ne: g.cast(g.t(ne, a, lo=-90, hi=90), g_type(b)))
    for a in ("f32", "f16", "bf16", "i32"):
        m.add(
            f"{a} other shape and order",
            lambda g, a=a: g.cpy(g.t((6, 10, 4), a, "turned"), g.t((20, 3, 2, 2), a, "swapped")),
        )
    for a in ("f16", "bf16"):  # ggml converts only dense memory to dense memory
        for _ in range(3):
            ne = m.shape()
            m.add(f"{a} to i32 {ne}", lambda g, a=a, ne=ne: g.cpy(g.t(ne, a, lo=-90, hi=90), g.t(ne, "i32")))
    special = [0.0, -0.0, float("inf"), float("-inf"), 1e-40, 1e-7, 6e-8, 2.9e-8, 65504.0, 65519.0, 65520.0, 1e30, 0.1, -0.3, 1 / 3, 2049.0]
    for b in ("f16", "bf16"):
        m.add(f"special values to {b}", lambda g, b=b: g.cpy(g.t((16,), values=special), g.t((16,), b)))
    for kind in QUANTISED:
        for layout in ("plain", "padded", "swapped"):
            ne = m.shape(kind)
            to = m.pick("plain", "padded")
            m.add(f"{kind} to f32 {ne} {layout} to {to}", lambda g, k=kind, ne=ne, a=layout, b=to: g.cpy(g.t(ne, k, a), g.t(ne, "f32", b)))
    for kind in QUANTISABLE:
        for source in FLOATS:
            for layout in ("plain", "padded", "swapped"):
                ne = m.shape(kind)
                values = m.rng.normal(size=ne).astype(np.float32)
                if kind in FITTED and layout == "plain" and source == "f32":
                    rule = Rule(check=lambda got, want, v=values.reshape(-1): no_worse(got, want, v))
                else:
                    rule, values = quantised_rule(kind), None
                m.add(
                    f"{source} to {kind} {ne} {layout}",
                    lambda g, s=source, k=kind, ne=ne, a=layout, v=values: g.cpy(
                        g.t(ne, s, a, values=v if v is not None else lambda n: g.rng.normal(size=n)), g.t(ne, k)
                    ),
                    rule,
                )
        m.add(
            f"zeros and constants to {kind}",
            lambda g, k=kind: g.cpy(g.t((2 * block(k),), values=[0.0] * block(k) + [1.5] * block(k)), g.t((2 * block(k),), k)),
            quantised_rule(kind),
        )
    m.add("f32 empty", lambda g: g.cpy(g.t((0, 4)), g.t((0, 4), "f16")))


def g_type(name: str) -> int:
    from ..ggml import load

    return load().types()[name]


@op("VIEWS")
def views(m: Maker) -> None:
    """Chains of views in front of an op: offsets accumulate from the root."""
    for kind in ("f32", "f16", "i32", "bf16"):
        for _ in range(5):
            a, b, c = m.int(4, 20), m.int(3, 9), m.int(2, 5)

            def build(g, kind=kind, a=a, b=b, c=c):
                x = g.reshape_3d(g.t((a * b, c), kind), a, b, c)
                x = g.permute(x, 1, 0, 2, 3)
                nb = g.nb(x)
                x = g.view_3d(x, b - 1, a - 2, c - 1, nb[1], nb[2], nb[2]) if nb[0] <= nb[1] else g.transpose(x)
                return g.cont(x)

            m.add(f"{kind} [{a * b}, {c}]", build)


@op("REPEAT")
def repeat(m: Maker) -> None:
    for kind in ("f32", "i32", "f16", "bf16", "i16"):
        for times in ((1, 1, 1, 1), (2, 1, 1, 1), (1, 3, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2), (2, 3, 2, 2)):
            ne = m.shape(kind)
            ne = (min(ne[0], 100), *ne[1:])
            layout = m.pick("plain", "padded", "outer")
            m.add(
                f"{kind} {ne} times {times} {layout}",
                lambda g, k=kind, ne=ne, t=times, la=layout: g.repeat_4d(g.t(ne, k, la), *(n * r for n, r in zip(ne, t))),
            )
    m.add("f32 empty", lambda g: g.repeat_4d(g.t((3, 0, 1)), 6, 0, 2, 1))


@op("REPEAT_BACK")
def repeat_back(m: Maker) -> None:
    for times in ((1, 1, 1, 1), (2, 1, 1, 1), (1, 3, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2), (2, 3, 2, 2), (4, 1, 3, 1)):
        for layout in ("plain", "padded", "outer"):
            ne = (m.int(1, 40), m.int(1, 5), m.int(1, 3), m.int(1, 3))
            big = tuple(n * r for n, r in zip(ne, times))
            m.add(f"{big} to {ne} {layout}", lambda g, ne=ne, big=big, la=layout: g.repeat_back(g.t(big, layout=la), g.t(ne)), nmse(1e-12))


@op("CONCAT")
def concat(m: Maker) -> None:
    for kind in ALL:
        for dim in range(4):
            a = list(m.shape(kind))
            b = list(a)
            b[dim] = m.length(kind) if dim == 0 else m.int(1, 5)
            layouts = ("plain", "padded", "swapped", "outer") if block(kind) == 1 or dim else ("plain", "padded")
            # Only these types are read with any strides.
            if kind in ("f32", "i32", "f16", "bf16", "i16", "i8"):
                layouts = (*layouts, "turned")
            la, lb = m.pick(*layouts), m.pick(*layouts)
            m.add(
                f"{kind} {a} {b} dim {dim} {la} {lb}",
                lambda g, k=kind, a=tuple(a), b=tuple(b), d=dim, la=la, lb=lb: g.concat(g.t(a, k, la), g.t(b, k, lb), d),
            )
    m.add("f32 with an empty one", lambda g: g.concat(g.t((5, 3)), g.t((5, 0)), 1))


@op("DIAG")
def diag(m: Maker) -> None:
    for _ in range(8):
        ne = (m.length(), 1, m.int(1, 4), m.int(1, 3))
        layout = m.pick("plain", "plain", "padded")
        m.add(f"{ne} {layout}", lambda g, ne=ne, la=layout: g.diag(g.t(ne, layout=la)))


def masks(name: str) -> None:
    @op(name.upper())
    def cases(m: Maker) -> None:
        for past in (0, 1, 5, 300):
            for inplace in (False, True):
                for _ in range(2):
                    ne = m.shape()
                    builder = f"{name}_inplace" if inplace else name
                    m.add(f"{ne} {past=} {inplace=}", lambda g, ne=ne, p=past, b=builder: getattr(g, b)(g.t(ne), p))


masks("diag_mask_inf")
masks("diag_mask_zero")


@op("TRI")
def tri(m: Maker) -> None:
    for kind in range(4):
        for _ in range(4):
            n = m.length()
            ne = (n, n, m.int(1, 3), m.int(1, 2))
            m.add(f"{ne} kind {kind}", lambda g, ne=ne, k=kind: g.tri(g.t(ne), k))


@op("PAD")
def pad(m: Maker) -> None:
    for circular in (False, True):
        for _ in range(24):
            ne = (m.int(3, 40), m.int(3, 9), m.int(3, 5), m.int(3, 4))
            pads = [m.pick(0, 0, 1, 2, 3) for _ in range(8)]
            layout = m.pick("plain", "padded", "outer", "turned")
            builder = "pad_ext_circular" if circular else "pad_ext"
            m.add(f"{ne} {pads} {circular=} {layout}", lambda g, ne=ne, p=pads, b=builder, la=layout: getattr(g, b)(g.t(ne, layout=la), *p))


@op("PAD_REFLECT_1D")
def pad_reflect(m: Maker) -> None:
    for _ in range(12):
        ne = m.shape()
        p = (m.int(0, ne[0] - 1), m.int(0, ne[0] - 1))
        m.add(f"{ne} {p}", lambda g, ne=ne, p=p: g.pad_reflect_1d(g.t(ne), *p))


@op("ROLL")
def roll(m: Maker) -> None:
    for _ in range(20):
        ne = m.shape()
        shifts = [m.int(-(n - 1), n - 1) for n in ne]
        layout = m.pick("plain", "padded", "outer")
        m.add(f"{ne} {shifts} {layout}", lambda g, ne=ne, s=shifts, la=layout: g.roll(g.t(ne, layout=la), *s))


@op("WIN_PART")
def win_part(m: Maker) -> None:
    for _ in range(8):
        ne, w = (m.int(1, 20), m.int(3, 20), m.int(3, 20)), m.int(2, 7)
        m.add(f"{ne} {w}", lambda g, ne=ne, w=w: g.win_part(g.t(ne), w))


@op("WIN_UNPART")
def win_unpart(m: Maker) -> None:
    for _ in range(8):
        c, width, height, w = m.int(1, 20), m.int(3, 20), m.int(3, 20), m.int(2, 7)
        count = -(-width // w) * -(-height // w)
        m.add(
            f"[{c}, {w}, {w}, {count}] to {width} × {height}",
            lambda g, c=c, x=width, y=height, w=w, n=count: g.win_unpart(g.t((c, w, w, n)), x, y, w),
        )


@op("GET_REL_POS")
def get_rel_pos(m: Maker) -> None:
    for c, k in ((1, 1), (5, 4), (64, 7), (33, 14), (16, 2)):
        m.add(f"f16 [{c}, {2 * k - 1}]", lambda g, c=c, k=k: g.get_rel_pos(g.t((c, 2 * k - 1), "f16"), k, k))


@op("ADD_REL_POS")
def add_rel_pos(m: Maker) -> None:
    for inplace in (False, True):
        for n, a, b, c in ((3, 2, 2, 1), (7, 4, 2, 3), (14, 2, 3, 2), (1, 1, 1, 1), (2, 5, 4, 3)):
            builder = "add_rel_pos_inplace" if inplace else "add_rel_pos"
            m.add(
                f"[{n}, {a}, {b}, {c}] {inplace=}",
                lambda g, n=n, a=a, b=b, c=c, f=builder: getattr(g, f)(g.t((n * n, a * b, c)), g.t((n, a, b, c)), g.t((n, a, b, c))),
                nmse(1e-12),
            )
