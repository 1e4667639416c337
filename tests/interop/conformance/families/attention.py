"""Attention, and the indexer that selects its keys."""

from ..compare import nmse
from ..ggml import load
from ..table import QUANTISED, WEIGHTS, Maker, block, op


@op("FLASH_ATTN_EXT")
def flash_attn(m: Maker) -> None:
    kinds = [(k, k) for k in WEIGHTS] * 5
    kinds += [("f16", "f32"), ("f32", "f16"), ("bf16", "f16"), ("q8_0", "q4_0"), ("q4_0", "f16"), ("f16", "q8_0"), ("q4_k", "q6_k")] * 2
    for kk, kv_kind in kinds:
        wide = max(block(kk), block(kv_kind))
        dk = wide if wide > 64 else m.pick(64, 96, 128) if wide > 1 else m.pick(40, 64, 80, 128)
        dk = max(dk // wide, 1) * wide if wide > 1 else dk
        dv = dk if m.int(0, 3) else (dk // 2 if (dk // 2) % wide == 0 and dk // 2 else dk)
        heads_kv, group = m.pick(1, 2, 3), m.pick(1, 2, 4)
        tokens, kv, batch = m.pick(1, 1, 2, 7, 33), m.pick(1, 16, 63, 100, 130), m.pick(1, 1, 2)
        mask = m.pick(False, True, True)
        bias = m.pick(0.0, 0.0, 8.0) if mask else 0.0
        softcap, sinks = m.pick(0.0, 0.0, 10.0), m.pick(False, False, True)
        layout = m.pick("plain", "swapped", "padded")
        precision = m.pick(0, 10)
        mne = (kv, tokens + m.pick(0, 0, 3), m.pick(1, heads_kv * group), m.pick(1, batch))

        def build(
            g,
            kinds=(kk, kv_kind),
            d=(dk, dv),
            heads=(heads_kv, group),
            n=(tokens, kv, batch),
            mne=mne if mask else None,
            numbers=(bias, softcap),
            sinks=sinks,
            la=layout,
            precision=precision,
        ):
            tokens, kv, batch = n
            q = g.t((d[0], tokens, heads[0] * heads[1], batch), layout=la)
            k = g.t((d[0], kv, heads[0], batch), kinds[0], la)
            v = g.t((d[1], kv, heads[0], batch), kinds[1], la)
            hidden = None
            if mne:
                hidden = g.t(mne, "f16", values=lambda n: g.rng.choice([0.0, 0.0, -0.5, float("-inf")], n))
            y = g.flash_attn_ext(q, k, v, hidden, d[0] ** -0.5, *numbers)
            if sinks:
                load().ggml_flash_attn_ext_add_sinks(y, g.t((heads[0] * heads[1],), lo=-1, hi=1))
            if precision:
                load().ggml_prec_set_acc(y, precision)
            return y

        m.add(
            f"{kk}/{kv_kind} {dk}/{dv} {heads_kv} × {group} heads, {tokens} of {kv} × {batch}, mask {mne if mask else None} "
            f"{bias=} {softcap=} {sinks=} {layout} {precision=}",
            build,
            nmse(5e-4 if kk in QUANTISED or kv_kind in QUANTISED else 1e-4),
        )
    for kind in ("f16", "f32"):
        m.add(
            f"{kind} all masked",
            lambda g, kind=kind: g.flash_attn_ext(
                g.t((64, 3, 2)), g.t((64, 20, 2), kind), g.t((64, 20, 2), kind), g.t((20, 3), "f16", values=[float("-inf")] * 60), 0.1, 0.0, 0.0
            ),
            nmse(1e-4),
        )
        m.add(
            f"{kind} 70 tokens of 600",
            lambda g, kind=kind: g.flash_attn_ext(g.t((64, 70, 2)), g.t((64, 600, 1), kind), g.t((64, 600, 1), kind), None, 0.1, 0.0, 0.0),
            nmse(1e-4),
        )
        m.add(
            f"{kind} 1 token of 600",
            lambda g, kind=kind: g.flash_attn_ext(g.t((64, 1, 2)), g.t((64, 600, 1), kind), g.t((64, 600, 1), kind), None, 0.1, 0.0, 0.0),
            nmse(1e-4),
        )

        def shared(g, kind=kind):
            k = g.t((96, 50, 1), kind)
            v = g.view_4d(k, 64, 50, 1, 1, *g.nb(k)[1:], 0)
            return g.flash_attn_ext(g.t((96, 5, 4)), k, v, None, 0.1, 0.0, 0.0)

        m.add(f"{kind} values inside of the keys", shared, nmse(1e-4))


@op("LIGHTNING_INDEXER")
def lightning_indexer(m: Maker) -> None:
    for kind in WEIGHTS:
        for _ in range(2):
            e = block(kind) if block(kind) > 64 else m.pick(64, 128)
            heads, tokens, kv, batch = m.pick(1, 4, 8), m.int(1, 7), m.int(1, 60), m.int(1, 2)
            layout = m.pick("plain", "padded")
            m.add(
                f"{kind} [{e}, {heads}, {tokens}, {batch}] of {kv} {layout}",
                lambda g, kind=kind, e=e, h=heads, t=tokens, kv=kv, b=batch, la=layout: g.lightning_indexer(
                    g.t((e, h, t, b), layout=la),
                    g.t((e, 1, kv, b), kind, la),
                    g.t((h, t, 1, b)),
                    g.t((kv, t, 1, b), "f16", values=lambda n: g.rng.choice([0.0, -1.0, float("-inf")], n)),
                ),
                nmse(1e-6),
            )


def hc_shape(m: Maker) -> tuple[int, int, int]:
    return m.length(), 4, m.int(1, 9)


@op("DSV4_HC_COMB")
def hc_comb(m: Maker) -> None:
    for tokens in (1, 2, 7, 40):
        for iterations in (1, 2, 20):
            m.add(
                f"[24, {tokens}] {iterations}",
                lambda g, t=tokens, i=iterations: g.dsv4_hc_comb(g.t((24, t)), g.t((3,)), g.t((24,)), 1e-6, i),
                nmse(1e-9),
            )


@op("DSV4_HC_PRE")
def hc_pre(m: Maker) -> None:
    for layout in ("plain", "padded", "swapped"):
        for gated in (False, True):
            for _ in range(3):
                e, h, t = hc_shape(m)
                m.add(
                    f"[{e}, {h}, {t}] {gated=} {layout}",
                    lambda g, ne=(e, h, t), gated=gated, la=layout: (
                        g.dsv4_hc_pre_gated(g.t(ne, layout=la), g.t(ne, lo=-4, hi=4), 1.5)
                        if gated
                        else g.dsv4_hc_pre(g.t(ne, layout=la), g.t(ne[1:]))
                    ),
                    nmse(1e-9),
                )


@op("DSV4_HC_POST")
def hc_post(m: Maker) -> None:
    for layout in ("plain", "padded", "swapped"):
        for comb in (False, True):
            for _ in range(3):
                e, h, t = hc_shape(m)
                m.add(
                    f"[{e}, {h}, {t}] {comb=} {layout}",
                    lambda g, e=e, h=h, t=t, comb=comb, la=layout: g.dsv4_hc_post(
                        g.t((e, t)), g.t((e, h, t), layout=la), g.t((h, t)), g.t((h, h, t)) if comb else None
                    ),
                    nmse(1e-9),
                )
