"""Matrix products."""

from ..compare import nmse
from ..ggml import load
from ..table import QUANTISED, WEIGHTS, Maker, block, op

# ggml converts the second source to the partner type of the weights, as fanout does on a CPU: the sums differ by their order.
BOUND = {"f32": 1e-9, "f16": 1e-6, "bf16": 1e-6}
QUANTISED_BOUND = 5e-4


def bound(kind: str) -> float:
    return BOUND.get(kind, QUANTISED_BOUND)


def row(m: Maker, kind: str) -> int:
    n = block(kind)
    return n * m.int(1, 3) if n > 32 else n * m.int(1, 8) if n == 32 else m.pick(1, 2, 15, 32, 64, 65, 100, 256, 300)


def partner(g, kind: str, ne, layout: str = "plain") -> int:
    """A second source in the partner type of `kind`."""
    lib = load()
    number = lib.cpu_traits(lib.types()[kind]).vec_dot_type
    name = lib.ggml_type_name(number).decode().lower()
    return g.t(ne, name, layout, values=lambda n: g.rng.uniform(-1, 1, n))


@op("MUL_MAT")
def mul_mat(m: Maker) -> None:
    for kind in WEIGHTS:
        for columns in (1, 2, 5, 17):
            for layout in ("plain", "padded"):
                k, rows = row(m, kind), m.int(1, 37)
                a2, a3, r2, r3 = m.pick(1, 2, 3), m.pick(1, 2), m.pick(1, 2, 4), m.pick(1, 2)
                lb = m.pick("plain", "padded", "swapped", "overlap")
                m.add(
                    f"{kind} [{k}, {rows}, {a2}, {a3}] {columns} columns, {r2} × {r3} {layout} {lb}",
                    lambda g, kind=kind, a=(k, rows, a2, a3), b=(k, columns, a2 * r2, a3 * r3), la=layout, lb=lb: g.mul_mat(
                        g.t(a, kind, la), g.t(b, layout=lb)
                    ),
                    nmse(bound(kind)),
                )
        k = row(m, kind)
        m.add(
            f"{kind} [{k}, 9, 4] permuted cache",
            lambda g, kind=kind, k=k: g.mul_mat(g.t((k, 9, 4), kind, "swapped"), g.t((k, 3, 8))),
            nmse(bound(kind)),
        )
        k = row(m, kind)
        m.add(
            f"{kind} [{k}, 33] partner type",
            lambda g, kind=kind, k=k: g.mul_mat(g.t((k, 33, 2), kind), partner(g, kind, (k, 4, 2))),
            nmse(bound(kind)),
        )
        k = row(m, kind)
        m.add(f"{kind} [{k}, 128] 64 columns", lambda g, kind=kind, k=k: g.mul_mat(g.t((k, 128), kind), g.t((k, 64))), nmse(bound(kind)))
        k = row(m, kind)
        m.add(f"{kind} no columns", lambda g, kind=kind, k=k: g.mul_mat(g.t((k, 5), kind), g.t((k, 0))))
    for kind in ("f32", "f16", "q4_0", "q8_0"):
        for precision in (10, 15, 20, 30):

            def build(g, kind=kind, p=precision):
                y = g.mul_mat(g.t((64, 20), kind), g.t((64, 6)))
                if p < 30:
                    load().ggml_prec_set_acc(y, p)
                else:
                    load().ggml_prec_set_src(y, p, 1)
                return y

            m.add(f"{kind} precision {precision}", build, nmse(max(1e-6, bound(kind))))
    for kind in ("f32", "bf16"):
        m.add(f"f32 by {kind}", lambda g, kind=kind: g.mul_mat(g.t((65, 7, 2)), g.t((65, 5, 4), kind)), nmse(1e-7))
    for n in (1, 2, 64, 256):
        for second in ("f32", "f16"):

            def hadamard(g, n=n, second=second):
                y = g.mul_mat(g.t((n, n), values=matrix(n)), g.t((n, 5, 3), second))
                load().ggml_mul_mat_set_hint(y, 1)
                return y

            m.add(f"Hadamard {n} by {second}", hadamard, nmse(1e-7))
    for a, b in (((1, 1), (1, 1)), ((3, 1), (3, 700)), ((1, 700), (1, 3)), ((2000, 3), (2000, 2))):
        m.add(f"f32 {a} {b}", lambda g, a=a, b=b: g.mul_mat(g.t(a), g.t(b)), nmse(1e-9))


def matrix(n: int):
    """The normalised Hadamard matrix of a power of two."""
    import numpy as np

    h = np.ones((1, 1))
    while h.shape[0] < n:
        h = np.block([[h, h], [h, -h]])
    return h / np.sqrt(n)


@op("MUL_MAT_ID")
def mul_mat_id(m: Maker) -> None:
    for kind in WEIGHTS:
        for tokens in (1, 2, 7, 33):
            for shared in (False, True):
                k, rows, experts = row(m, kind), m.int(1, 37), m.pick(2, 4, 8)
                used = m.int(1, experts)
                # The ids are usually a view of the first columns of a sorted matrix.
                view = m.pick(False, True)

                def build(g, kind=kind, k=k, rows=rows, n=experts, used=used, tokens=tokens, shared=shared, view=view):
                    ids = g.ids((n if view else used, tokens), n, distinct=True)
                    if view:
                        ids = g.view_2d(ids, used, tokens, g.nb(ids)[1], 0)
                    return g.mul_mat_id(g.t((k, rows, n), kind), g.t((k, 1 if shared else used, tokens)), ids)

                m.add(f"{kind} [{k}, {rows}, {experts}] {used} of {tokens} tokens {shared=} {view=}", build, nmse(bound(kind)))
    m.add(
        "f32 one expert twice",
        lambda g: g.mul_mat_id(g.t((33, 5, 4)), g.t((33, 3, 6)), g.t((3, 6), "i32", values=[1, 1, 2] * 6)),
        nmse(1e-9),
    )
    m.add("f32 padded experts", lambda g: g.mul_mat_id(g.t((33, 5, 4), layout="padded"), g.t((33, 2, 6)), g.ids((2, 6), 4)), nmse(1e-9))
    m.add("f32 no tokens", lambda g: g.mul_mat_id(g.t((33, 5, 4)), g.t((33, 2, 0)), g.ids((2, 0), 4)))


@op("OUT_PROD")
def out_prod(m: Maker) -> None:
    for kind in ("f32", "f16", *QUANTISED):
        for lb in ("plain", "turned"):
            n, k, cols = row(m, kind), m.pick(1, 2, 7, 32, 33), m.int(1, 17)
            a2, a3 = m.int(1, 3), m.int(1, 2)
            r2, r3 = (m.int(1, 3), m.int(1, 2)) if kind == "f32" else (1, 1)
            m.add(
                f"{kind} [{n}, {k}, {a2}, {a3}] {cols}, {r2} × {r3} {lb}",
                lambda g, kind=kind, a=(n, k, a2, a3), b=(cols, k, a2 * r2, a3 * r3), lb=lb: g.out_prod(g.t(a, kind), g.t(b, layout=lb)),
                nmse(1e-9 if kind == "f32" else 1e-6),
            )
