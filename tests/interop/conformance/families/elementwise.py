"""Element-wise ops: exact in f32 where ggml rounds once, else within an NMSE."""

from ..compare import EXACT, nmse
from ..data import FLOATS
from ..table import QUANTISABLE, Maker, op
from .copies import quantised_rule

UNARY = "abs sgn neg step tanh elu relu sigmoid gelu gelu_quick silu hardswish hardsigmoid exp expm1 softplus gelu_erf".split()
UNARY += "xielu floor ceil round trunc".split()
EXACT_UNARY = {"abs", "sgn", "neg", "step", "relu", "floor", "ceil", "round", "trunc"}
GLU = "reglu geglu swiglu swiglu_oai geglu_erf geglu_quick".split()
LAYOUTS = ("plain", "padded", "outer", "overlap")
# Results of transcendental functions differ in the last bits; in f16 and bf16 a difference can round to the next number.
CLOSE = {"f32": 1e-7, "f16": 1e-6, "bf16": 2e-5}
# ggml computes these in f32 by a table of f16 numbers.
TABLE = {"gelu", "gelu_quick", "geglu", "geglu_quick"}
TABLE_BOUND = 1e-5
# Repetitions of the second source in each dim.
BROADCASTS = ((1, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2), (2, 1, 1, 1), (2, 2, 1, 1), (1, 2, 2, 2), (3, 1, 2, 1))


@op("UNARY")
def unary(m: Maker) -> None:
    for number, name in enumerate(UNARY):
        for kind in FLOATS:
            rule = EXACT if name in EXACT_UNARY else nmse(max(CLOSE[kind], TABLE_BOUND) if name in TABLE else CLOSE[kind])
            lo, hi = (-90.0, 20.0) if name in ("exp", "expm1", "sigmoid", "silu") else (-12.0, 12.0)
            if name in ("exp", "expm1"):
                hi = 5.0
            if name == "xielu":
                for layout in ("plain", "plain", "padded"):
                    ne = m.shape(kind, 2)
                    p = [float(x) for x in m.rng.uniform(0.1, 1.0, 3)]
                    m.add(
                        f"xielu {kind} {ne} {layout}",
                        lambda g, ne=ne, kind=kind, layout=layout, p=p: g.xielu(
                            g.t((ne[0], ne[1] if layout == "plain" else 1), kind, layout, lo=-3, hi=3), *p, -1e-6
                        ),
                        rule,
                    )
                continue
            for layout in LAYOUTS:
                ne = m.shape(kind)
                m.add(
                    f"{name} {kind} {ne} {layout}",
                    lambda g, n=number, ne=ne, kind=kind, layout=layout, lo=lo, hi=hi: g.unary(g.t(ne, kind, layout, lo=lo, hi=hi), n),
                    rule,
                )
            ne = m.shape(kind)
            m.add(
                f"{name} {kind} {ne} in place",
                lambda g, n=number, ne=ne, kind=kind, lo=lo, hi=hi: g.unary_inplace(g.t(ne, kind, lo=lo, hi=hi), n),
                rule,
            )
    m.add("neg f32 empty", lambda g: g.neg(g.t((7, 0, 3))))
    m.add("silu f32 empty", lambda g: g.silu(g.t((0, 5, 3))))
    special = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-40, -1e-40, 3e38, -3e38, 1.5, -1.5, 0.5, -0.5, 2.5, 88.0, -88.0]
    for number, name in enumerate(UNARY):
        if name == "xielu":
            continue
        rule = EXACT if name in EXACT_UNARY else nmse(TABLE_BOUND if name in TABLE else 1e-6)
        # Huge values are cases of their own: beside them no error of another value would count.
        for text, values in (("special", [x for x in special if abs(x) != 3e38]), ("huge", [3e38, -3e38])):
            if text == "huge" and name == "gelu_quick":
                continue  # ggml computes it by a table of f16 numbers, where 3e38 is infinite
            m.add(
                f"{name} f32 {text} values",
                lambda g, n=number, v=values: g.unary(g.t((len(v), 2), values=v * 2), n),
                rule,
            )


def simple(name: str, builder: str, lo: float, hi: float, exact: bool) -> None:
    @op(name)
    def cases(m: Maker) -> None:
        for kind in FLOATS:
            rule = EXACT if exact else nmse(CLOSE[kind])
            for layout in LAYOUTS * 2:
                ne = m.shape(kind)
                m.add(
                    f"{kind} {ne} {layout}",
                    lambda g, ne=ne, kind=kind, layout=layout: getattr(g, builder)(g.t(ne, kind, layout, lo=lo, hi=hi)),
                    rule,
                )
            ne = m.shape(kind)
            m.add(
                f"{kind} {ne} in place",
                lambda g, ne=ne, kind=kind: getattr(g, f"{builder}_inplace")(g.t(ne, kind, lo=lo, hi=hi)),
                rule,
            )
        m.add("f32 empty", lambda g: getattr(g, builder)(g.t((5, 0, 2))))


simple("SQR", "sqr", -3.0, 3.0, True)
simple("SQRT", "sqrt", 0.0, 50.0, True)
simple("LOG", "log", 0.1, 90.0, False)
simple("SIN", "sin", -6.5, 6.5, False)
simple("COS", "cos", -6.5, 6.5, False)


def binary(name: str, builder: str, lo: float, hi: float) -> None:
    @op(name)
    def cases(m: Maker) -> None:
        pairs = [("f32", "f32"), ("f16", "f16"), ("bf16", "bf16"), ("f16", "f32"), ("bf16", "f32")]
        for ka, kb in pairs:
            for repeat in BROADCASTS:
                small = m.shape(kb)
                ne = tuple(n * r for n, r in zip(small, repeat))
                la, lb = m.pick(*LAYOUTS), m.pick(*LAYOUTS, "turned")
                m.add(
                    f"{ka}+{kb} {ne} by {small} {la} {lb}",
                    lambda g, ka=ka, kb=kb, ne=ne, small=small, la=la, lb=lb: getattr(g, builder)(
                        g.t(ne, ka, la), g.t(small, kb, lb, lo=lo, hi=hi)
                    ),
                )
            ne = m.shape(ka)
            m.add(
                f"{ka}+{kb} {ne} in place",
                lambda g, ka=ka, kb=kb, ne=ne: getattr(g, f"{builder}_inplace")(g.t(ne, ka), g.t((ne[0], 1, ne[2]), kb, lo=lo, hi=hi)),
            )
        # The graph allocator gives the result the memory of the first or second source.
        for swap in (False, True):
            ne = m.shape()

            def build(g, ne=ne, swap=swap):
                x = g.scale(g.t(ne, lo=lo, hi=hi), 1.5)
                y = g.t(ne, lo=lo, hi=hi)
                return getattr(g, builder)(y, x) if swap else getattr(g, builder)(x, y)

            m.add(f"allocator {ne} {swap=}", build, allocator=True)
        m.add("same tensor twice", lambda g: (lambda a: getattr(g, builder)(a, a))(g.t((33, 3), lo=0.5, hi=2)))
        m.add("empty", lambda g: getattr(g, builder)(g.t((5, 0, 2)), g.t((5, 1, 1))))
        m.add("scalar", lambda g: getattr(g, builder)(g.t((67, 3, 2)), g.t((1,), lo=lo, hi=hi)))
        if name == "ADD":
            for ka in ("f16", "bf16"):
                m.add(f"cast {ka} to f32", lambda g, ka=ka: g.add_cast(g.t((65, 3, 2), ka), g.t((65, 1, 2)), 0))
            for kind in QUANTISABLE:
                for to_f32 in (False, True):
                    ne = m.shape(kind, 3)
                    m.add(
                        f"{kind} {ne} to {'f32' if to_f32 else kind}",
                        lambda g, kind=kind, ne=ne, to_f32=to_f32: (
                            g.add_cast(g.t(ne, kind), g.t(ne), 0) if to_f32 else g.add(g.t(ne, kind), g.t(ne))
                        ),
                        EXACT if to_f32 else quantised_rule(kind),
                    )


binary("ADD", "add", -1.0, 1.0)
binary("SUB", "sub", -1.0, 1.0)
binary("MUL", "mul", -1.0, 1.0)
binary("DIV", "div", 0.5, 2.0)


@op("ADD_ID")
def add_id(m: Maker) -> None:
    for _ in range(16):
        n, used, tokens, experts = m.length(), m.int(1, 4), m.int(1, 9), m.int(4, 9)
        la, li = m.pick("plain", "padded", "swapped"), m.pick("plain", "padded")
        m.add(
            f"[{n}, {used}, {tokens}] of {experts} {la} {li}",
            lambda g, n=n, u=used, k=tokens, e=experts, la=la, li=li: g.add_id(
                g.t((n, u, k), layout=la), g.t((n, e)), g.ids((u, k), e, layout=li)
            ),
        )


@op("ADD1")
def add1(m: Maker) -> None:
    for ka, kb in (("f32", "f32"), ("f16", "f16"), ("f16", "f32"), ("bf16", "bf16"), ("bf16", "f32")):
        for inplace in (False, True):
            ne = m.shape(ka)
            m.add(
                f"{ka}+{kb} {ne} {inplace=}",
                lambda g, ka=ka, kb=kb, ne=ne, i=inplace: (g.add1_inplace if i else g.add1)(g.t(ne, ka), g.t((1,), kb)),
            )
    for kind in QUANTISABLE:
        ne = m.shape(kind, 3)
        m.add(f"{kind} {ne}", lambda g, kind=kind, ne=ne: g.add1(g.t(ne, kind), g.t((1,))), quantised_rule(kind))


def region(m: Maker, name: str, kinds: tuple[str, ...]) -> None:
    """ACC and SET: a smaller tensor at an offset in a larger one."""
    for kind in kinds:
        for inplace in (False, True):
            for _ in range(6):
                ne = (m.int(8, 40), m.int(3, 7), m.int(2, 4), m.int(1, 3))
                part = tuple(m.int(1, n) for n in ne)
                start = [m.int(0, n - p) for n, p in zip(ne, part)]
                layout = m.pick("plain", "padded", "outer")

                def build(g, kind=kind, inplace=inplace, ne=ne, part=part, start=start, layout=layout):
                    a = g.t(ne, kind)
                    nb = g.nb(a)
                    offset = sum(s * n for s, n in zip(start, nb))
                    function = getattr(g, f"{name}_inplace" if inplace else name)
                    return function(a, g.t(part, kind, layout), nb[1], nb[2], nb[3], offset)

                m.add(f"{kind} {ne} {part} at {start} {layout} {inplace=}", build)


@op("ACC")
def acc(m: Maker) -> None:
    region(m, "acc", ("f32", "f32"))


@op("SET")
def set_(m: Maker) -> None:
    region(m, "set", ("f32", "i32"))


@op("SCALE")
def scale(m: Maker) -> None:
    for kind in ("f32", "bf16"):
        for bias in (0.0, 0.75):
            for inplace in (False, True):
                for _ in range(2):
                    ne = m.shape(kind)
                    m.add(
                        f"{kind} {ne} {bias=} {inplace=}",
                        lambda g, kind=kind, ne=ne, b=bias, i=inplace: (
                            (g.scale_bias_inplace if i else g.scale_bias)(g.t(ne, kind), 1.7, b)
                            if b
                            else (g.scale_inplace if i else g.scale)(g.t(ne, kind), 1.7)
                        ),
                        nmse(CLOSE[kind]) if bias else EXACT,
                    )
    m.add("f32 empty", lambda g: g.scale(g.t((0, 3)), 2.0))
    m.add("f32 by zero with infinities", lambda g: g.scale(g.t((4,), values=[float("inf"), 1.0, -2.0, float("nan")]), 0.0))


@op("CLAMP")
def clamp(m: Maker) -> None:
    for kind in ("f32", "f16"):
        for inplace in (False, True):
            for _ in range(5):
                ne = m.shape(kind)
                m.add(
                    f"{kind} {ne} {inplace=}",
                    lambda g, kind=kind, ne=ne, i=inplace: (g.clamp_inplace if i else g.clamp)(g.t(ne, kind), -0.5, 0.3),
                )
    for values in ([float("nan"), 5.0, -5.0, 0.1], [float("inf"), float("-inf"), 0.0, -0.0]):
        m.add(f"f32 {values}", lambda g, v=values: g.clamp(g.t((4,), values=v), -0.5, 0.3))
    m.add("f32 no upper bound", lambda g: g.clamp(g.t((65, 3), lo=-9, hi=9), 0.0, float("inf")))


@op("FILL")
def fill(m: Maker) -> None:
    for kind in ("f32", "f16"):
        for inplace in (False, True):
            for value in (0.0, -3.7):
                ne = m.shape(kind)
                m.add(
                    f"{kind} {ne} {value} {inplace=}",
                    lambda g, kind=kind, ne=ne, v=value, i=inplace: (g.fill_inplace if i else g.fill)(g.t(ne, kind), v),
                )


@op("LEAKY_RELU")
def leaky_relu(m: Maker) -> None:
    for kind in ("f32", "f16"):
        for inplace in (False, True):
            for slope in (0.1, -0.5, 2.0):
                ne = m.shape(kind)
                m.add(
                    f"{kind} {ne} {slope} {inplace=}",
                    lambda g, kind=kind, ne=ne, s=slope, i=inplace: g.leaky_relu(g.t(ne, kind, lo=-3, hi=3), s, i),
                    nmse(CLOSE[kind]) if kind == "f16" else EXACT,
                )


@op("GLU")
def glu(m: Maker) -> None:
    for number, name in enumerate(GLU):
        for kind in FLOATS if name != "swiglu_oai" else ("f32",):
            rule = EXACT if name == "reglu" else nmse(max(CLOSE[kind], TABLE_BOUND) if name in TABLE else CLOSE[kind])
            for swapped in (False, True):
                if name == "swiglu_oai":
                    continue
                ne = m.shape(kind)
                ne = (2 * ne[0], *ne[1:])
                m.add(
                    f"{name} {kind} {ne} {swapped=}",
                    lambda g, n=number, kind=kind, ne=ne, s=swapped: g.glu(g.t(ne, kind, lo=-6, hi=6), n, s),
                    rule,
                )
                m.add(
                    f"{name} {kind} {ne} {swapped=} rows of a view",
                    lambda g, n=number, kind=kind, ne=ne, s=swapped: g.glu(padded_rows(g, ne, kind), n, s),
                    rule,
                )
            for layout in ("plain", "rows"):
                ne = m.shape(kind)

                def build(g, n=number, kind=kind, ne=ne, layout=layout):
                    make = padded_rows if layout == "rows" else (lambda g, ne, kind: g.t(ne, kind, lo=-6, hi=6))
                    a, b = make(g, ne, kind), make(g, ne, kind)
                    return g.swiglu_oai(a, b, 1.702, 3.0) if n == 3 else g.glu_split(a, b, n)

                m.add(f"{name} {kind} {ne} split {layout}", build, rule)
    for kind in ("f32", "f16"):
        for _ in range(3):
            ne = m.shape(kind)
            m.add(
                f"swiglu_clamp {kind} {ne}",
                lambda g, kind=kind, ne=ne: g.swiglu_clamp(g.t(ne, kind, lo=-9, hi=9), g.t(ne, kind, lo=-9, hi=9), 4.0),
                nmse(CLOSE[kind]),
            )


def padded_rows(g, ne, kind):
    """Rows with gaps: a view of the first elements of longer rows."""
    root = g.root((ne[0] + 5, *ne[1:]), kind, lo=-6, hi=6)
    nb = g.nb(root)
    return g.view_4d(root, *ne, nb[1], nb[2], nb[3], nb[0] * 2)


@op("ARANGE")
def arange(m: Maker) -> None:
    for start, stop, step in ((0, 10, 1), (0, 1, 0.1), (-5, 5, 0.7), (0, 1000, 1), (1e6, 1e6 + 100, 0.5), (2, 3, 5)):
        m.add(f"{start} {stop} {step}", lambda g, a=start, b=stop, s=step: g.arange(a, b, s), nmse(1e-12))


@op("TIMESTEP_EMBEDDING")
def timestep(m: Maker) -> None:
    for n, dim, period in ((2, 320, 10000), (1, 10, 100), (7, 33, 10000), (5, 1, 10), (3, 64, 2), (1, 2, 10000)):
        m.add(
            f"[{n}] {dim} {period}",
            lambda g, n=n, d=dim, p=period: g.timestep_embedding(g.t((n,), lo=0, hi=500), d, p),
            nmse(1e-7),
        )
