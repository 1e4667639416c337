"""Losses, gradients and optimiser steps."""

from ..compare import nmse
from ..table import Maker, op


@op("SILU_BACK")
def silu_back(m: Maker) -> None:
    for kind, bound in (("f32", 1e-9), ("f16", 1e-6)):
        for _ in range(7):
            ne = m.shape(kind)
            m.add(f"{kind} {ne}", lambda g, k=kind, ne=ne: g.silu_back(g.t(ne, k), g.t(ne, k, lo=-8, hi=8)), nmse(bound))


def distribution(g, ne) -> int:
    return g.soft_max(g.t(ne, lo=-2, hi=2))


@op("CROSS_ENTROPY_LOSS")
def loss(m: Maker) -> None:
    for _ in range(12):
        ne = m.shape()
        m.add(f"{ne}", lambda g, ne=ne: g.cross_entropy_loss(g.t(ne, lo=-4, hi=4), distribution(g, ne)), nmse(1e-9))


@op("CROSS_ENTROPY_LOSS_BACK")
def loss_back(m: Maker) -> None:
    for _ in range(12):
        ne = m.shape()
        m.add(
            f"{ne}",
            lambda g, ne=ne: g.cross_entropy_loss_back(g.t((1,)), g.t(ne, lo=-4, hi=4), distribution(g, ne)),
            nmse(1e-9),
        )


@op("OPT_STEP_ADAMW")
def adamw(m: Maker) -> None:
    for _ in range(8):
        ne = m.shape()

        def build(g, ne=ne):
            w = g.t(ne)
            g.at(w).flags |= 4  # GGML_TENSOR_FLAG_PARAM, which the builder asserts
            numbers = g.t((7,), values=[1e-3, 0.9, 0.999, 1e-8, 0.01, 1.3, 1.1])
            return g.opt_step_adamw(w, g.t(ne), g.t(ne), g.t(ne, lo=0, hi=1), numbers)

        m.add(f"{ne}", build, nmse(1e-10))


@op("OPT_STEP_SGD")
def sgd(m: Maker) -> None:
    for _ in range(8):
        ne = m.shape()

        def build(g, ne=ne):
            w = g.t(ne)
            g.at(w).flags |= 4
            return g.opt_step_sgd(w, g.t(ne), g.t((2,), values=[1e-2, 0.1]))

        m.add(f"{ne}", build, nmse(1e-10))
