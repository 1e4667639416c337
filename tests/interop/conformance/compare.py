"""Rules for the comparison of a result with ggml's."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .data import decode
from .graph import Memory


@dataclass(frozen=True)
class Rule:
    """`nmse` is the largest normalised mean squared error; 0 demands equal bits. `oracle` replaces ggml's result where ggml is
    wrong, for the `reason`: a function of the memories of ggml's run that returns the values of the last one. `check` replaces
    the comparison.
    """

    nmse: float = 0.0
    oracle: Callable[[list[Memory]], np.ndarray] | None = None
    reason: str = ""
    check: Callable[[Memory, Memory], str] | None = None


EXACT = Rule()


def nmse(bound: float) -> Rule:
    return Rule(nmse=bound)


def error(got: np.ndarray, want: np.ndarray) -> tuple[float, str]:
    """The NMSE of `got`, and how its NaNs and infinities differ from those of `want`."""
    got, want = got.astype(np.float64), want.astype(np.float64)
    if not np.array_equal(np.isnan(got), np.isnan(want)):
        return np.inf, f"NaN at other places ({np.isnan(got).sum()} instead of {np.isnan(want).sum()})"
    infinite = np.isinf(want) | np.isinf(got)
    if not np.array_equal(got[infinite], want[infinite]):
        return np.inf, "other infinities"
    finite = np.isfinite(want)
    square = float(((got[finite] - want[finite]) ** 2).sum())
    norm = float((want[finite] ** 2).sum())
    return (square / norm if norm else (0.0 if square == 0.0 else np.inf)), ""


def compare(rule: Rule, got: list[Memory], want: list[Memory]) -> tuple[float, str]:
    """The largest NMSE of the results, and what is wrong, or an empty string."""
    worst, wrong = 0.0, ""
    for index, (g, w) in enumerate(zip(got, want, strict=True)):
        if not w.written:
            if not np.array_equal(g.raw, w.raw):
                return np.inf, f"{w.name} was changed"
            continue
        if rule.check:
            wrong = wrong or rule.check(g, w)
            continue
        want_values = decode(w.kind, w.raw)
        last = index == len(want) - 2  # the last one is a guard
        if rule.oracle and last:
            want_values = rule.oracle(want)
        elif np.array_equal(g.raw, w.raw):
            continue
        got_values = decode(g.kind, g.raw)
        value, text = error(got_values, want_values)
        worst = max(worst, value)
        if text:
            wrong = wrong or f"{w.name}: {text}"
        elif rule.nmse == 0.0 and not same(got_values, want_values):
            wrong = wrong or f"{w.name}: {differences(got_values, want_values)}"
        elif value > rule.nmse and rule.nmse:
            wrong = wrong or f"{w.name}: NMSE {value:.1e} > {rule.nmse:.0e}"
    return worst, wrong


def same(got: np.ndarray, want: np.ndarray) -> bool:
    """Equal values, and NaNs at the same places; the sign of zero counts."""
    equal = (got == want) & (np.signbit(got) == np.signbit(want)) if got.dtype.kind == "f" else got == want
    if got.dtype.kind == "f":
        equal |= np.isnan(got) & np.isnan(want)
    return bool(np.all(equal))


def differences(got: np.ndarray, want: np.ndarray) -> str:
    different = np.flatnonzero(~((got == want) | (np.isnan(got) & np.isnan(want)) if got.dtype.kind == "f" else got == want))
    if not len(different):
        return "signs of zeros differ"
    i = int(different[0])
    return f"{len(different)} of {got.size} values differ, first [{i}]: {got[i]} instead of {want[i]}"
