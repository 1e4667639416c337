"""Graphs of several nodes: results in the memory of sources, writes that later nodes read through views, and blocks of models."""

from ..compare import nmse
from ..table import Maker, op

CLOSE = 1e-7


@op("IN_PLACE")
def in_place(m: Maker) -> None:
    """The ops for which ggml's allocator gives the result the memory of a source: here that of the SCALE before it."""
    positions = lambda g, n: g.t((n,), "i32", values=range(n))  # noqa: E731
    ops = {
        "fill": lambda g, x, ne: g.fill(x, 2.0),
        "scale": lambda g, x, ne: g.scale(x, 3.0),
        "diag_mask_zero": lambda g, x, ne: g.diag_mask_zero(x, 1),
        "diag_mask_inf": lambda g, x, ne: g.diag_mask_inf(x, 1),
        "add_id": lambda g, x, ne: g.add_id(g.reshape_3d(x, ne[0], ne[1], ne[2] * ne[3]), g.t((ne[0], 5)), g.ids((ne[1], ne[2] * ne[3]), 5)),
        "add1": lambda g, x, ne: g.add1(x, g.t((1,))),
        "sub from": lambda g, x, ne: g.sub(g.t(ne), x),
        "div by": lambda g, x, ne: g.div(g.t(ne), x),
        "sqr": lambda g, x, ne: g.sqr(x),
        "sqrt": lambda g, x, ne: g.sqrt(x),
        "log": lambda g, x, ne: g.log(x),
        "silu": lambda g, x, ne: g.silu(x),
        "gelu": lambda g, x, ne: g.gelu(x),
        "rope": lambda g, x, ne: g.rope_ext(x, positions(g, ne[2]), None, ne[0], 2, 0, 1e4, 1.0, 0.0, 1.0, 32.0, 1.0),
        "rope_back": lambda g, x, ne: g.rope_ext_back(x, positions(g, ne[2]), None, ne[0], 0, 0, 1e4, 1.0, 0.0, 1.0, 32.0, 1.0),
        "silu_back": lambda g, x, ne: g.silu_back(x, g.t(ne)),
        "silu_back of": lambda g, x, ne: g.silu_back(g.t(ne), x),
        "rms_norm": lambda g, x, ne: g.rms_norm(x, 1e-5),
        "rms_norm_back": lambda g, x, ne: g.rms_norm_back(x, g.t(ne), 1e-5),
        "rms_norm_back of": lambda g, x, ne: g.rms_norm_back(g.t(ne), x, 1e-5),
        "clamp": lambda g, x, ne: g.clamp(x, 0.5, 1.0),
        "soft_max": lambda g, x, ne: g.soft_max(x),
        "soft_max over its mask": lambda g, x, ne: g.soft_max_ext(g.t(ne), x, 1.0, 0.0),
        "soft_max_back": lambda g, x, ne: g.soft_max_ext_back(x, g.t(ne), 1.0, 0.0),
        "soft_max_back of": lambda g, x, ne: g.soft_max_ext_back(g.t(ne), x, 1.0, 0.0),
        "mul of itself": lambda g, x, ne: g.mul(x, x),
    }
    for name, build in ops.items():
        for ne in ((64, 4, 3, 2), (34, 3, 7, 1)):
            m.add(
                f"{name} {ne}",
                lambda g, b=build, ne=ne: b(g, g.scale(g.t(ne, lo=0.2, hi=2), 1.5), ne),
                nmse(1e-6 if name == "gelu" else CLOSE),
                allocator=True,
            )


@op("WRITES")
def writes(m: Maker) -> None:
    """Writes into a part of a tensor, and reads of the whole one in the same graph."""

    def cache(g, kind: str, n: int, rows: int, tokens: int):
        """A KV cache: rows are written by index, then read through a permuted view."""
        memory = g.t((n * 4, rows), kind)
        new = g.scale(g.t((n * 4, tokens)), 1.5)
        written = g.set_rows(memory, new, g.ids((tokens,), rows, "i64", distinct=True))
        view = g.view_3d(memory, n, rows, 4, g.nb(memory)[1], g.nb(memory)[0] * n, 0)
        query = g.t((n, 2, 4))
        return [written, g.mul_mat(view, query)]

    def copied(g, kind: str):
        """CPY into a view; the view's root is read behind it."""
        memory = g.t((40, 8), kind)
        target = g.view_2d(memory, 40, 3, g.nb(memory)[1], 2 * g.nb(memory)[1])
        written = g.cpy(g.t((40, 3)), target)
        return [written, g.add(written, g.t((40, 3))), g.mul_mat(memory, g.t((40, 2)))]

    def overwritten(g):
        """Read, write in place, read: the first reader must see the old values."""
        x = g.t((33, 5))
        before = g.sqr(x)
        after = g.scale_inplace(x, 2.0)
        return [before, after, g.add(after, before)]

    def shifted(g):
        """A copy from one part of a tensor to another one, as a context shift makes it."""
        x = g.t((16, 12))
        nb = g.nb(x)[1]
        moved = g.cpy(g.view_2d(x, 16, 4, nb, 8 * nb), g.view_2d(x, 16, 4, nb, 0))
        return [moved, g.sum_rows(x)]

    for kind in ("f32", "f16", "bf16"):
        for tokens in (1, 3):
            m.add(f"cache {kind} {tokens}", lambda g, k=kind, t=tokens: cache(g, k, 16, 20, t), nmse(1e-6))
        m.add(f"copied {kind}", lambda g, k=kind: copied(g, k), nmse(1e-6))
    m.add("overwritten", overwritten, nmse(CLOSE))
    m.add("shifted", shifted, nmse(CLOSE))


@op("BLOCKS")
def blocks(m: Maker) -> None:
    """Parts of models, placed by ggml's allocator: memory is reused as soon as its last reader has run."""

    def attention(g, kind: str, tokens: int, heads: int = 4, head: int = 32):
        width = heads * head
        x = g.t((width, tokens))
        normed = g.mul(g.rms_norm(x, 1e-5), g.t((width,)))
        positions = g.t((tokens,), "i32", values=range(tokens))

        def part(rotated: bool):
            y = g.reshape_3d(g.mul_mat(g.t((width, width), kind), normed), head, heads, tokens)
            return g.rope_ext(y, positions, None, head, 0, 0, 1e4, 1.0, 0.0, 1.0, 32.0, 1.0) if rotated else y

        q, k, v = part(True), part(True), part(False)
        q, k = g.permute(q, 0, 2, 1, 3), g.permute(k, 0, 2, 1, 3)
        v = g.cont(g.permute(v, 1, 2, 0, 3))
        scores = g.soft_max_ext(g.mul_mat(k, q), g.t((tokens, tokens), "f16", values=[0.0] * tokens**2), head**-0.5, 0.0)
        mixed = g.cont_2d(g.permute(g.mul_mat(v, scores), 0, 2, 1, 3), width, tokens)
        return g.add(g.mul_mat(g.t((width, width), kind), mixed), x)

    def experts(g, kind: str, tokens: int, width: int = 64, count: int = 8, used: int = 2):
        x = g.t((width, tokens))
        probabilities = g.soft_max(g.mul_mat(g.t((width, count)), x))
        chosen = g.argsort_top_k(probabilities, used)
        weights = g.get_rows(g.reshape_3d(probabilities, 1, count, tokens), chosen)
        inner = g.reshape_3d(x, width, 1, tokens)
        gate = g.mul_mat_id(g.t((width, width, count), kind), inner, chosen)
        up = g.mul_mat_id(g.t((width, width, count), kind), inner, chosen)
        down = g.mul(g.mul_mat_id(g.t((width, width, count), kind), g.swiglu_split(gate, up), chosen), weights)
        nb = g.nb(down)
        first = g.view_2d(down, width, tokens, nb[2], 0)
        return g.add(first, g.view_2d(down, width, tokens, nb[2], nb[1]))

    for kind in ("f32", "f16", "bf16", "q8_0", "q4_0"):
        for tokens in (1, 5, 33):
            bound = nmse(1e-6 if kind in ("f32", "f16", "bf16") else 1e-4)
            m.add(f"attention {kind} {tokens}", lambda g, k=kind, t=tokens: attention(g, k, t), bound, allocator=True)
            m.add(f"experts {kind} {tokens}", lambda g, k=kind, t=tokens: experts(g, k, t), bound, allocator=True)


@op("LARGE")
def large(m: Maker) -> None:
    """Shapes that are split among threads and into tiles."""
    for kind in ("f32", "f16", "bf16", "q4_0", "q8_0", "q4_k", "q6_k", "iq4_nl", "mxfp4"):
        bound = nmse(1e-6 if kind in ("f32", "f16", "bf16") else 5e-4)
        m.add(f"mul_mat {kind} [1024, 300] 65 columns", lambda g, k=kind: g.mul_mat(g.t((1024, 300), k), g.t((1024, 65))), bound)
        m.add(
            f"mul_mat_id {kind} [512, 200, 8] 4 of 64 tokens",
            lambda g, k=kind: g.mul_mat_id(g.t((512, 200, 8), k), g.t((512, 1, 64)), g.ids((4, 64), 8, distinct=True)),
            bound,
        )
    ne = (1000, 37, 9)
    m.add("add", lambda g: g.add(g.t(ne), g.t((1000, 1, 9))))
    m.add("cpy to f16", lambda g: g.cpy(g.t(ne, layout="turned"), g.t(ne, "f16")))
    m.add("cpy to q8_0", lambda g: g.cpy(g.t((1024, 37, 9)), g.t((1024, 37, 9), "q8_0")), nmse(1e-5))
    m.add("cont", lambda g: g.cont(g.t(ne, "f16", "swapped")))
    m.add("soft_max", lambda g: g.soft_max_ext(g.t((2000, 33, 8)), g.t((2000, 33), "f16"), 0.3, 8.0), nmse(1e-9))
    m.add("rms_norm", lambda g: g.rms_norm(g.t((4096, 70)), 1e-5), nmse(1e-10))
    m.add("sum", lambda g: g.sum(g.t(ne, lo=0, hi=1)), nmse(1e-12))
    m.add("argsort", lambda g: g.argsort(g.t((5000, 5), values=lambda n: g.rng.permutation(n)), 1))
    m.add("get_rows", lambda g: g.get_rows(g.t((1024, 100), "q4_0"), g.ids((300,), 100)))
    m.add("set_rows", lambda g: g.set_rows(g.t((1024, 600), "f16"), g.t((1024, 500)), g.ids((500,), 600, "i64", distinct=True)))
    m.add("silu", lambda g: g.silu(g.t(ne, lo=-9, hi=9)), nmse(CLOSE))
    m.add("concat", lambda g: g.concat(g.t(ne), g.t((1000, 37, 5)), 2))
    for kind in ("f16", "f32", "q8_0"):
        m.add(
            f"flash_attn {kind}",
            lambda g, k=kind: g.flash_attn_ext(
                g.t((128, 70, 8)), g.t((128, 513, 2), k), g.t((128, 513, 2), k), g.t((513, 70), "f16"), 0.1, 0.0, 0.0
            ),
            nmse(5e-4 if kind == "q8_0" else 1e-4),
        )
    m.add("conv_2d", lambda g: g.conv_2d_direct(g.t((3, 3, 16, 24), "f16"), g.t((40, 40, 16)), 1, 1, 1, 1, 1, 1), nmse(1e-6))
    m.add("conv_transpose_1d", lambda g: g.conv_transpose_1d(g.t((16, 32, 48), "f16"), g.t((100, 48)), 8, 0, 1), nmse(1e-6))
    m.add("pool_2d", lambda g: g.pool_2d(g.t((128, 128, 20)), 1, 3, 3, 2, 2, 1, 1), nmse(1e-10))
    m.add("upscale", lambda g: g.interpolate(g.t((64, 64, 8)), 200, 200, 8, 1, 1), nmse(1e-9))
    m.add("rwkv_wkv7", lambda g: g.rwkv_wkv7(*(g.t((64, 8, 24), lo=-0.3, hi=0.3) for _ in range(6)), g.t((64 * 64 * 8, 1))), nmse(1e-9))
    m.add(
        "ssm_scan",
        lambda g: g.ssm_scan(
            g.t((64, 64, 8, 2)),
            g.t((64, 8, 20, 2)),
            g.t((8, 20, 2), lo=-3, hi=1),
            g.t((1, 8), lo=-2, hi=0),
            g.t((64, 1, 20, 2)),
            g.t((64, 1, 20, 2)),
            g.ids((2,), 2, distinct=True),
            1,
        ),
        nmse(1e-9),
    )
