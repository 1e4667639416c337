"""Recurrent layers: state-space models, RWKV, delta rules, triangular systems."""

import numpy as np

from ..compare import nmse
from ..table import Maker, op

BOUND = 1e-9


@op("SSM_CONV")
def ssm_conv(m: Maker) -> None:
    for width in (2, 3, 4, 9):
        for _ in range(5):
            inner, tokens, sequences = m.pick(1, 5, 16, 64, 100), m.int(1, 9), m.int(1, 3)
            m.add(
                f"{width} {inner} {tokens} {sequences}",
                lambda g, w=width, i=inner, t=tokens, s=sequences: g.ssm_conv(g.t((w - 1 + t, i, s)), g.t((w, i))),
                nmse(BOUND),
            )


@op("SSM_SCAN")
def ssm_scan(m: Maker) -> None:
    for mamba2 in (False, True):
        for _ in range(12):
            state, head, heads = m.pick(1, 4, 16, 33, 64), m.pick(1, 4, 16) if mamba2 else 1, m.pick(1, 2, 4, 8)
            tokens, sequences = m.int(1, 7), m.int(1, 3)
            groups = m.pick(1, heads)
            snapshots = m.pick(1, 3) if mamba2 else 1
            slots = sequences + m.int(0, 2)

            def build(g, n=state, hd=head, h=heads, t=tokens, q=sequences, gr=groups, k=snapshots, slots=slots, two=mamba2):
                return g.ssm_scan(
                    g.t((n, hd, h, slots)),
                    g.t((hd, h, t, q)),
                    g.t((h, t, q), lo=-3, hi=3),
                    g.t((1 if two else n, h), lo=-2, hi=0),
                    g.t((n, gr, t, q)),
                    g.t((n, gr, t, q)),
                    g.ids((q,), slots, distinct=True),
                    k,
                )

            m.add(f"{state} {head} {heads} {tokens} {sequences} {groups} {snapshots} {mamba2=}", build, nmse(BOUND))
    m.add("softplus of large steps", lambda g: g.ssm_scan(
        g.t((4, 4, 2, 1)), g.t((4, 2, 3, 1)), g.t((2, 3, 1), lo=10, hi=30), g.t((1, 2), lo=-0.1, hi=0),
        g.t((4, 1, 3, 1)), g.t((4, 1, 3, 1)), g.ids((1,), 1), 1), nmse(BOUND))  # fmt: skip


def wkv(name: str) -> None:
    @op(name)
    def cases(m: Maker) -> None:
        for _ in range(14):
            size, heads, sequences = m.pick(1, 4, 16, 32, 33, 64), m.int(1, 4), m.int(1, 3)
            if name == "RWKV_WKV7":
                size = m.pick(64, 128)  # ggml's loop takes 32 channels at once, 64 with AVX-512, and writes behind the end of others
            tokens = sequences * m.int(1, 5)

            def build(g, s=size, h=heads, t=tokens, n=sequences):
                ne = (s, h, t)
                state = g.t((s * s * h, n))
                if name == "RWKV_WKV6":
                    return g.rwkv_wkv6(g.t(ne), g.t(ne), g.t(ne), g.t((s, h)), g.t(ne, lo=0, hi=1), state)
                if name == "RWKV_WKV7":
                    r, w, k, v = g.t(ne), g.t(ne, lo=0, hi=1), g.t(ne), g.t(ne)
                    return g.rwkv_wkv7(r, w, k, v, g.t(ne, lo=-0.2, hi=0.2), g.t(ne), state)
                return g.gated_linear_attn(g.t(ne), g.t(ne), g.t(ne), g.t(ne, lo=0, hi=1), state, 0.3)

            m.add(f"{size} {heads} {tokens} {sequences}", build, nmse(BOUND))


for name in ("RWKV_WKV6", "RWKV_WKV7", "GATED_LINEAR_ATTN"):
    wkv(name)


@op("GATED_DELTA_NET")
def gated_delta_net(m: Maker) -> None:
    for vector in (False, True):
        for layout in ("plain", "padded", "swapped"):
            for _ in range(6):
                size, heads, tokens, batch = m.pick(1, 4, 16, 32, 64), m.pick(1, 2, 4), m.int(1, 7), m.int(1, 2)
                q_heads = m.pick(1, heads)
                q_batch = m.pick(1, batch)
                snapshots = m.pick(1, 1, 3)

                def build(g, s=size, h=heads, t=tokens, b=batch, qh=q_heads, qb=q_batch, k=snapshots, vector=vector, la=layout):
                    q, key = g.t((s, qh, t, qb), layout=la), g.t((s, qh, t, qb), layout=la)
                    return g.gated_delta_net(
                        q,
                        key,
                        g.t((s, h, t, b), layout=la),
                        g.t((s if vector else 1, h, t, b), lo=-1, hi=0),
                        g.t((1, h, t, b), lo=0, hi=0.5),
                        g.t((s, s, h, b)),
                        k,
                    )

                m.add(f"{size} {heads} of {q_heads} {tokens} {batch} of {q_batch} {snapshots} {vector=} {layout}", build, nmse(BOUND))


@op("SOLVE_TRI")
def solve_tri(m: Maker) -> None:
    for n in (1, 2, 7, 16, 33, 64):
        for _ in range(3):
            k, b2, b3 = m.int(1, 40), m.int(1, 3), m.int(1, 2)

            def build(g, n=n, k=k, b2=b2, b3=b3):
                a = g.rng.uniform(-1, 1, (b3, b2, n, n)) / n + 2 * np.eye(n)
                return g.solve_tri(g.t((n, n, b2, b3), values=a), g.t((k, n, b2, b3)), True, True, False)

            m.add(f"{n} {k} {b2} {b3}", build, nmse(BOUND))
