"""Convolutions, pooling and scaling of images."""

import numpy as np

from ..compare import EXACT, Rule, nmse
from ..data import decode
from ..ggml import load
from ..graph import Memory
from ..table import Maker, op

KERNELS = {"f32": 1e-9, "f16": 1e-6}


def extent(m: Maker, kernel: int, dilation: int, pad: int) -> int:
    """A size of an image that has at least one result."""
    return m.int(max(1, dilation * (kernel - 1) + 1 - 2 * pad), 17) if dilation * (kernel - 1) + 1 - 2 * pad <= 17 else 17


def axes(m: Maker, n: int) -> tuple[list[int], ...]:
    """Kernel, stride, padding, dilation and image size of `n` axes."""
    kernel = [m.int(1, 4) for _ in range(n)]
    stride = [m.int(1, 3) for _ in range(n)]
    pad = [m.int(0, 2) for _ in range(n)]
    dilation = [m.int(1, 2) for _ in range(n)]
    size = [extent(m, *x) for x in zip(kernel, dilation, pad)]
    return kernel, stride, pad, dilation, size


@op("IM2COL")
def im2col(m: Maker) -> None:
    for image, out in (("f32", "f32"), ("f32", "f16"), ("f16", "f16")):
        for two in (True, False):
            for _ in range(8):
                k, s, p, d, size = axes(m, 2)
                ic, oc, n = m.int(1, 5), m.int(1, 3), m.int(1, 3)
                if two:
                    shapes = ((*k, ic, oc), (*size, ic, n))
                    numbers = (*s, *p, *d)
                else:
                    shapes = ((k[0], ic, oc), (size[0], ic, n))
                    numbers = (s[0], 0, p[0], 0, d[0], 0)
                m.add(
                    f"{image} to {out} {shapes} {numbers}",
                    lambda g, i=image, o=out, sh=shapes, n=numbers, two=two: g.im2col(
                        g.t(sh[0], "f16"), g.t(sh[1], i), *n, two, load().types()[o]
                    ),
                )


@op("IM2COL_BACK")
def im2col_back(m: Maker) -> None:
    import ctypes

    for kernel in ("f32", "f16"):
        for _ in range(8):
            k, s, p, d, size = axes(m, 2)
            ic, n = m.int(1, 4), m.int(1, 3)
            out = [(i + 2 * pp - dd * (kk - 1) - 1) // ss + 1 for i, pp, dd, kk, ss in zip(size, p, d, k, s)]

            def build(g, kernel=kernel, k=k, numbers=(*s, *p, *d), size=size, ic=ic, n=n, out=out):
                ne = (ctypes.c_int64 * 4)(*size, ic, n)
                a = g.t((ic * k[0] * k[1], *out, n))
                return g.im2col_back(a, g.t((*k, ic, 2), kernel), ctypes.addressof(ne), *numbers, True)

            m.add(f"{kernel} {k} {s} {p} {d} {size} {ic} {n}", build, nmse(1e-10))


@op("IM2COL_3D")
def im2col_3d(m: Maker) -> None:
    for out in ("f32", "f16"):
        for _ in range(10):
            k, s, p, d, size = axes(m, 3)
            size = [min(x, 9) for x in size]
            ic, n, oc = m.int(1, 3), m.int(1, 2), m.int(1, 2)
            layout = m.pick("plain", "padded")
            m.add(
                f"to {out} {k} {s} {p} {d} {size} {ic} × {n} {layout}",
                lambda g, o=out, k=k, x=(*s, *p, *d), z=size, ic=ic, n=n, oc=oc, la=layout: g.im2col_3d(
                    g.t((*k, ic * oc), "f16"), g.t((*z, ic * n), layout=la), ic, *x, load().types()[o]
                ),
            )


@op("COL2IM_1D")
def col2im(m: Maker) -> None:
    for kind, bound in (("f32", 1e-10), ("f16", 1e-6), ("bf16", 1e-4)):
        for _ in range(7):
            k, oc, t, s = m.int(1, 6), m.int(1, 5), m.int(1, 20), m.int(1, 4)
            p = m.int(0, max(0, min(2, ((t - 1) * s + k - 1) // 2)))
            m.add(
                f"{kind} [{k * oc}, {t}] {s} {oc} {p}",
                lambda g, kind=kind, ne=(k * oc, t), s=s, oc=oc, p=p: g.col2im_1d(g.t(ne, kind), s, oc, p),
                nmse(bound),
            )


@op("CONV_2D")
def conv_2d(m: Maker) -> None:
    for kernel, bound in KERNELS.items():
        for layout in ("plain", "padded", "outer", "turned"):
            for _ in range(6):
                k, s, p, d, size = axes(m, 2)
                ic, oc, n = m.int(1, 5), m.int(1, 6), m.int(1, 2)
                m.add(
                    f"{kernel} {k} {s} {p} {d} {size} {ic} {oc} {n} {layout}",
                    lambda g, f=kernel, k=k, x=(*s, *p, *d), z=size, c=(ic, oc, n), la=layout: g.conv_2d_direct(
                        g.t((*k, c[0], c[1]), f), g.t((*z, c[0], c[2]), layout=la), *x
                    ),
                    nmse(bound),
                )


@op("CONV_2D_DW")
def conv_2d_dw(m: Maker) -> None:
    for kernel, bound in KERNELS.items():
        for channels_last in (False, True):
            for _ in range(7):
                k, s, p, d, size = axes(m, 2)
                c, n = m.int(2, 9), m.int(1, 2)
                size = [max(x, 2) for x in size]

                def build(g, f=kernel, k=k, x=(*s, *p, *d), z=size, c=c, n=n, first=channels_last):
                    if not first:
                        return g.conv_2d_dw_direct(g.t((*k, 1, c), f), g.t((*z, c, n)), *x)
                    image = g.permute(g.t((c, *z, n)), 2, 0, 1, 3)
                    weights = g.permute(g.t((1, c, *k), f), 2, 3, 0, 1)
                    return g.conv_2d_dw_direct(weights, image, *x)

                m.add(f"{kernel} {k} {s} {p} {d} {size} {c} {n} {channels_last=}", build, nmse(bound))


@op("CONV_3D")
def conv_3d(m: Maker) -> None:
    for kernel, bound in KERNELS.items():
        for _ in range(10):
            k, s, p, d, size = axes(m, 3)
            ic, oc, n = m.int(1, 3), m.int(1, 3), m.int(1, 2)
            m.add(
                f"{kernel} {k} {s} {p} {d} {size} {ic} {oc} {n}",
                lambda g, f=kernel, k=k, x=(*s, *p, *d), z=size, c=(ic, oc, n): g.conv_3d_direct(
                    g.t((*k, c[0] * c[1]), f), g.t((*z, c[0] * c[2])), *x, c[0], c[2], c[1]
                ),
                nmse(bound),
            )


@op("CONV_TRANSPOSE_1D")
def conv_transpose_1d(m: Maker) -> None:
    for kernel, bound in KERNELS.items():
        for _ in range(8):
            k, oc, ic, length, s = m.int(1, 6), m.int(1, 5), m.int(1, 5), m.int(1, 20), m.int(1, 4)
            m.add(
                f"{kernel} [{k}, {oc}, {ic}] [{length}, {ic}] {s}",
                lambda g, f=kernel, a=(k, oc, ic), b=(length, ic), s=s: g.conv_transpose_1d(g.t(a, f), g.t(b), s, 0, 1),
                nmse(bound),
            )


@op("CONV_TRANSPOSE_2D")
def conv_transpose_2d(m: Maker) -> None:
    for _ in range(16):
        k, oc, ic, w, h, n, s = (m.int(1, 4), m.int(1, 4)), m.int(1, 5), m.int(1, 5), m.int(1, 9), m.int(1, 9), m.int(1, 2), m.int(1, 3)
        m.add(
            f"f16 {k} [{w}, {h}, {ic}, {n}] to {oc} {s}",
            lambda g, a=(*k, oc, ic), b=(w, h, ic, n), s=s: g.conv_transpose_2d_p0(g.t(a, "f16"), g.t(b), s),
            nmse(1e-6),
        )


@op("POOL_1D")
def pool_1d(m: Maker) -> None:
    for kind in ("f32", "f16"):
        for number in (0, 1):
            for _ in range(6):
                k, s, p = m.int(1, 5), m.int(1, 4), m.int(0, 2)
                p = min(p, k - 1)
                ne = (m.int(k, 40), m.int(1, 5), m.int(1, 3), m.int(1, 2))
                m.add(
                    f"{kind} {ne} {number} {k} {s} {p}",
                    lambda g, kind=kind, ne=ne, x=(number, k, s, p): g.pool_1d(g.t(ne, kind), *x),
                    nmse(1e-10) if number else EXACT,
                )


@op("POOL_2D")
def pool_2d(m: Maker) -> None:
    for kind in ("f32", "f16"):
        for number in (0, 1):
            for _ in range(9):
                k, s = (m.int(1, 4), m.int(1, 4)), (m.int(1, 3), m.int(1, 3))
                p = tuple(m.int(0, min(2, x - 1)) for x in k)
                ne = (m.int(4, 20), m.int(4, 20), m.int(1, 4), m.int(1, 3))
                m.add(
                    f"{kind} {ne} {number} {k} {s} {p}",
                    lambda g, kind=kind, ne=ne, x=(number, *k, *s, *p): g.pool_2d(g.t(ne, kind), *x),
                    nmse(1e-10) if number else EXACT,
                )


def max_pool_back(ne, out, k, s, p):
    """An oracle: each gradient is added at the first maximum of its window. The memories: a guard, gradients, image."""

    def values(memories: list[Memory]) -> np.ndarray:
        gradients = decode(memories[1].kind, memories[1].raw).reshape(-1, out[1], out[0])
        image = decode(memories[2].kind, memories[2].raw).astype(np.float32).reshape(-1, ne[1], ne[0])
        result = np.zeros(image.shape, np.float32)
        for y in range(out[1]):
            for x in range(out[0]):
                top, left = max(y * s[1] - p[1], 0), max(x * s[0] - p[0], 0)
                window = image[:, top : y * s[1] - p[1] + k[1], left : x * s[0] - p[0] + k[0]]
                flat = window.reshape(len(image), -1)
                if flat.shape[1]:
                    rows, columns = np.divmod(flat.argmax(axis=1), window.shape[2])
                    np.add.at(result, (np.arange(len(image)), top + rows, left + columns), gradients[:, y, x])
        return result.reshape(-1)

    return values


@op("POOL_2D_BACK")
def pool_2d_back(m: Maker) -> None:
    for kind in ("f32", "f16"):
        for number in (0, 1):
            for _ in range(5):
                k, s = (m.int(1, 4), m.int(1, 4)), (m.int(1, 3), m.int(1, 3))
                p = tuple(m.int(0, min(2, x - 1)) for x in k)
                ne = (m.int(4, 15), m.int(4, 15), m.int(1, 4), m.int(1, 3))
                out = tuple((n + 2 * pp - kk) // ss + 1 for n, pp, kk, ss in zip(ne, p, k, s))
                rule = nmse(1e-10)
                if kind == "f16" and number == 0:
                    rule = Rule(1e-10, max_pool_back(ne, out, k, s, p), "ggml reads an f16 image as if it were f32")
                m.add(
                    f"{kind} {ne} {number} {k} {s} {p}",
                    lambda g, kind=kind, ne=ne, out=out, x=(number, *k, *s, *p): g.pool_2d_back(
                        g.t((*out, *ne[2:])), g.t(ne, kind), *x
                    ),
                    rule,
                )


@op("UPSCALE")
def upscale(m: Maker) -> None:
    modes = {"nearest": 0, "bilinear": 1, "bicubic": 2, "bilinear corners": 0x101, "bicubic corners": 0x102, "bilinear antialias": 0x201}
    for name, mode in modes.items():
        for layout in ("plain", "padded", "outer", "turned"):
            for _ in range(3):
                ne = (m.int(2, 15), m.int(2, 15), m.int(1, 4), m.int(1, 2))
                to = (m.int(1, 30), m.int(1, 30), ne[2] * m.int(1, 2), ne[3] * m.int(1, 2))
                if "corners" in name:
                    to = tuple(max(x, 2) for x in to[:2]) + to[2:]
                m.add(
                    f"{name} {ne} to {to} {layout}",
                    lambda g, ne=ne, to=to, mode=mode, la=layout: g.interpolate(g.t(ne, layout=la), *to, mode),
                    EXACT if name == "nearest" else nmse(1e-9),
                )
    m.add("factor 2", lambda g: g.upscale(g.t((5, 7, 3)), 2, 0))
