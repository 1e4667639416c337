"""Norms, softmax, rotary positions: ops on whole rows."""

from ..compare import EXACT, nmse
from ..table import Maker, op

LAYOUTS = ("plain", "padded", "outer")


def norm(name: str, builder: str, inplace: bool) -> None:
    @op(name)
    def cases(m: Maker) -> None:
        layouts = (*LAYOUTS, "turned") if name != "RMS_NORM" else LAYOUTS
        for layout in layouts:
            for eps in (0.0, 1e-6, 0.1):
                for _ in range(2):
                    ne = m.shape()
                    if ne[0] == 1 and eps == 0.0:
                        ne = (33, *ne[1:])  # one element less its mean, divided by its deviation: 0/0
                    m.add(f"{ne} {eps} {layout}", lambda g, ne=ne, e=eps, la=layout: getattr(g, builder)(g.t(ne, layout=la), e), nmse(1e-10))
        for _ in range(3):
            ne = m.shape()
            m.add(f"{ne} in place", lambda g, ne=ne: getattr(g, f"{builder}_inplace")(g.t(ne), 1e-5), nmse(1e-10))
        m.add("zeros", lambda g: getattr(g, builder)(g.t((17, 2), values=[0.0] * 34), 1e-6), nmse(1e-10))
        m.add("no rows", lambda g: getattr(g, builder)(g.t((17, 0)), 1e-6))


norm("NORM", "norm", True)
norm("RMS_NORM", "rms_norm", True)
norm("L2_NORM", "l2_norm", True)


@op("RMS_NORM_MUL")
def rms_norm_mul(m: Maker) -> None:
    """The pair that ggml fuses; the allocator may place the product in the norm's memory."""
    for _ in range(12):
        ne = m.shape()
        small = (ne[0], m.pick(1, ne[1]), 1, 1)
        m.add(
            f"{ne} by {small}",
            lambda g, ne=ne, s=small: g.mul(g.rms_norm(g.t(ne), 1e-5), g.t(s)),
            nmse(1e-10),
            allocator=True,
        )


@op("GROUP_NORM")
def group_norm(m: Maker) -> None:
    for layout in ("plain", "padded"):
        for inplace in (False, True):
            for _ in range(5):
                ne = (m.int(2, 20), m.int(1, 9), m.int(1, 13), m.int(1, 3))
                groups = m.int(1, ne[2])
                f = "group_norm_inplace" if inplace else "group_norm"
                m.add(
                    f"{ne} {groups} groups {layout} {inplace=}",
                    lambda g, ne=ne, n=groups, la=layout, f=f: getattr(g, f)(g.t(ne, layout=la), n, 1e-5),
                    nmse(1e-10),
                )


@op("RMS_NORM_BACK")
def rms_norm_back(m: Maker) -> None:
    for layout in LAYOUTS:
        for _ in range(5):
            ne = m.shape()
            m.add(f"{ne} {layout}", lambda g, ne=ne, la=layout: g.rms_norm_back(g.t(ne, layout=la), g.t(ne), 1e-5), nmse(1e-10))


@op("SOFT_MAX")
def soft_max(m: Maker) -> None:
    for mask in (None, "f16", "f32"):
        for bias in (0.0, 8.0):
            if bias and not mask:
                continue
            for sinks in (False, True):
                for inplace in (False, True):
                    for _ in range(5):
                        n, rows, heads, batch = m.length(), m.int(1, 6), m.pick(1, 2, 3, 4, 6, 12), m.int(1, 3)
                        ne = (n, rows, heads, batch)
                        extra = m.int(0, 2)  # masks may have more rows
                        mne = (n, rows + extra, m.pick(1, heads), m.pick(1, batch))

                        def build(g, ne=ne, mne=mne, mask=mask, bias=bias, sinks=sinks, inplace=inplace):
                            a = g.t(ne, lo=-4, hi=4)
                            b = g.t(mne, mask, lo=-2, hi=2) if mask else None
                            y = (g.soft_max_ext_inplace if inplace else g.soft_max_ext)(a, b, 0.7, bias)
                            if sinks:
                                add_sinks(y, g.t((ne[2],), lo=-3, hi=3))
                            return y

                        m.add(f"{ne} mask {mask} {mne if mask else ''} {bias=} {sinks=} {inplace=}", build, nmse(1e-9))
    inf = float("-inf")
    m.add("rows of -inf", lambda g: g.soft_max(g.t((3, 2), values=[inf] * 3 + [0.0, inf, 1.0])), nmse(1e-9))
    m.add("no rows", lambda g: g.soft_max(g.t((3, 0))))
    m.add("plain builder", lambda g: g.soft_max(g.t((1000, 3), lo=-30, hi=30)), nmse(1e-9))


def add_sinks(tensor: int, sinks: int) -> None:
    from ..ggml import load

    load().ggml_soft_max_add_sinks(tensor, sinks)


@op("SOFT_MAX_BACK")
def soft_max_back(m: Maker) -> None:
    for inplace in (False, True):
        for scale in (1.0, 0.3):
            for _ in range(4):
                ne = m.shape()
                f = "soft_max_ext_back_inplace" if inplace else "soft_max_ext_back"
                m.add(f"{ne} {scale} {inplace=}", lambda g, ne=ne, s=scale, f=f: getattr(g, f)(g.t(ne), g.t(ne, lo=0, hi=0.1), s, 0.0), nmse(1e-9))


MODES = {"normal": 0, "neox": 2, "mrope": 8, "vision": 24, "imrope": 40}


def rope(name: str, back: bool) -> None:
    @op(name)
    def cases(m: Maker) -> None:
        import ctypes

        for mode_name, mode in MODES.items():
            for kind in ("f32", "f16"):
                for _ in range(5 if back else 14):
                    half = m.pick(8, 16, 32, 40, 64)
                    head = 2 * half
                    dims = head if mode_name != "vision" else half
                    if mode_name in ("normal", "neox") and m.int(0, 2) == 0:
                        dims = half if half % 2 == 0 else head
                    factors, yarn = m.pick(False, True), m.pick(0.0, 0.7)
                    inplace = (not back) and m.pick(False, True)
                    layout = m.pick("plain", "padded", "swapped") if not inplace else "plain"
                    ne = (head, m.int(1, 6), m.int(1, 9), m.int(1, 2))
                    sections = [dims // 8, dims // 8, dims // 8, dims // 8] if mode & 8 else None
                    if mode_name == "vision":
                        sections = [half // 2, half // 2, 0, 0]
                    if mode_name == "imrope":
                        sections = [dims // 6 + 1, dims // 6, dims // 6, 0]
                    base, freq, attn = m.pick(10000.0, 500000.0), m.pick(1.0, 0.25), m.pick(1.0, 1.3)
                    offset = (head - dims) // 2 // 2 * 2 if dims < head and mode_name != "vision" and not back and m.pick(0, 1) else 0

                    def build(
                        g,
                        kind=kind,
                        mode=mode,
                        ne=ne,
                        dims=dims,
                        factors=factors,
                        yarn=yarn,
                        inplace=inplace,
                        la=layout,
                        sections=sections,
                        numbers=(base, freq, yarn, attn),
                        offset=offset,
                    ):
                        x = g.t(ne, kind, la)
                        count = ne[2] * (4 if sections else 1)
                        positions = g.t((count,), "i32", values=lambda n: g.rng.integers(0, 500, n))
                        ff = g.t((ne[0] // 2,), lo=0.5, hi=4.0) if factors else None
                        base, freq, ext, attn = numbers
                        tail = (4096, base, freq, ext, attn, 32.0, 1.0)
                        if sections:
                            array = (ctypes.c_int * 4)(*sections)
                            f = g.rope_multi_back if back else g.rope_multi_inplace if inplace else g.rope_multi
                            return f(x, positions, ff, dims, ctypes.addressof(array), mode, *tail)
                        f = g.rope_ext_back if back else g.rope_ext_inplace if inplace else g.rope_ext
                        y = f(x, positions, ff, dims, mode, *tail)
                        if offset:
                            set_offset(y, offset)
                        return y

                    text = f"{mode_name} {kind} {ne} {dims=} {factors=} {yarn=} {inplace=} {layout} {offset=} {freq} {attn}"
                    m.add(text, build, nmse(1e-7 if kind == "f32" else 1e-6))


def set_offset(tensor: int, offset: int) -> None:
    from ..ggml import load

    load().ggml_rope_set_offset(tensor, offset)


rope("ROPE", False)
rope("ROPE_BACK", True)
