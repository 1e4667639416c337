"""Shared by the benchmarks: the import path of the interop modules, medians with spreads, and bounds to check."""

import json
import math
import os
import statistics
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

VOID = 3  # exit status of a run that must be repeated
ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "tests" / "interop"), str(ROOT / "scripts")]


@dataclass(frozen=True)
class Spread:
    """Median, minimum and maximum of repeated measurements."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Iterable[float]) -> "Spread":
        values = list(values)
        return Spread(statistics.median(values), min(values), max(values))


def ratio(mine: list[float], theirs: list[float]) -> Spread:
    """Ratio of two medians, with the lowest and highest ratio of a single round."""
    each = [m / t for m, t in zip(mine, theirs, strict=True)]
    return Spread(statistics.median(mine) / statistics.median(theirs), min(each), max(each))


@dataclass(frozen=True)
class Bound:
    """A bound that a measured value must satisfy."""

    what: str
    value: float
    least: float | None = None
    most: float | None = None
    void: str | None = None
    """Why the run cannot tell whether the bound holds, for example because the machine was not steady."""

    def holds(self) -> bool:
        return (self.least is None or self.value >= self.least) and (self.most is None or self.value <= self.most)

    def __str__(self) -> str:
        wanted = f">= {self.least:g}" if self.most is None else f"<= {self.most:g}"
        if self.void:
            return f"VOID {self.what}: {self.value:.3g} ({wanted}; {self.void})"
        return f"{'ok  ' if self.holds() else 'FAIL'} {self.what}: {self.value:.3g} ({wanted})"


def finish(bounds: list[Bound], check: bool, path: Path | None, measured: Mapping) -> None:
    """Write the JSON and print the bounds. With `check`, exit with status 1 if a bound is violated, else VOID if one is void."""
    if path:
        whole = {**measured, "bounds": [asdict(b) | {"holds": b.holds()} for b in bounds]}
        path.write_text(json.dumps(whole, indent=2, default=lambda s: asdict(s)) + "\n")
    print("\n".join(str(b) for b in bounds))
    if check and not all(b.void or b.holds() for b in bounds):
        sys.exit(1)
    if check and any(b.void for b in bounds):
        sys.exit(VOID)


@dataclass(frozen=True)
class Interval:
    """The median of ratios, and its 95 % confidence interval (None with too few rounds)."""

    median: float
    low: float | None
    high: float | None

    @staticmethod
    def of(ratios: list[float]) -> "Interval":
        ordered, n = sorted(ratios), len(ratios)
        # The true median lies outside of the k-th values from both ends with twice the probability of fewer than k heads in n tosses.
        outside, low, high = 0.0, None, None
        for k in range(n // 2):
            outside += 2 * math.comb(n, k) / 2**n
            if outside > 0.05:
                break
            low, high = ordered[k], ordered[n - 1 - k]
        return Interval(statistics.median(ordered), low, high)

    def __str__(self) -> str:
        return f"{self.median:.3f}" + ("" if self.low is None else f" [{self.low:.3f}-{self.high:.3f}]")


def rotated(sides: tuple[str, ...], n: int) -> tuple[str, ...]:
    """Rotate the order of the sides in each round, because the first side may find the machine in another state."""
    return sides[n % len(sides) :] + sides[: n % len(sides)]


def prompt_tokens(n: int) -> list[int]:
    """Token ids for any model of make_model.py: what a token costs does not depend on its id."""
    return [1 + i % 100 for i in range(n)]


def warn_if_busy() -> None:
    """Warn if the machine is busy: threads that wait for each other between tokens then lose a time slice each."""
    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"the machine is busy (load average {load:.2f}): ratios will not be meaningful", file=sys.stderr)
