"""Decode, prompt and load of models in the process itself, without a server: examples/generate beside llama.cpp's library.

A pair is a measurement of the memory's read bandwidth, then one run of each side; the order of the sides alternates. A pair's
roof is that bandwidth divided by the bytes of weights that a token reads.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from common import Bound, Interval, prompt_tokens

from clients import ClientError, tail  # isort: skip

SIDES = ("ours", "llama.cpp")
MEASURES = {"prompt": "prompt_tok_s", "decode": "gen_tok_s", "load": "load_s"}
RUN_S = 1800.0
LLAMA = Path(__file__).with_name("llama_in_process.py")
# The decode bound: ours / min(ROOF_SHARE * roof, llama.cpp's) is at least LEAST_DECODE.
ROOF_SHARE, LEAST_DECODE = 0.85, 0.97
# A run is void if the upper quartile of its bandwidths is more than this times the lower one.
MOST_QUARTILES = 1.1
LEAST_QUANTISED_PROMPT = 1.3

Values = dict[str, float]


def has_bf16_products() -> bool:
    """Whether this processor has AVX512-BF16."""
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and "avx512_bf16" in cpuinfo.read_text()


def least_prompt(dtype: str) -> float | None:
    """The least ratio of our prompts to llama.cpp's; None without a bound."""
    floats = {"f32": None, "f16": 1.1, "bf16": 1.3 if has_bf16_products() else None}
    return floats.get(dtype, LEAST_QUANTISED_PROMPT)


def run(argv: list[object]) -> str:
    """Run a program and return its standard output."""
    words = [str(word) for word in argv]
    try:
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=RUN_S)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise ClientError(f"{words[0]}: {e}") from None
    if done.returncode != 0:
        raise ClientError(f"{' '.join(words[:3])} ended with status {done.returncode}:\n{tail(done.stderr)}")
    return done.stdout


def run_side(side: str, model: Path, a: argparse.Namespace) -> Values:
    """Run one side. Both compute the logits of the prompt's last token, and of each of `a.generate` tokens behind it."""
    flash = ["--flash-attn"] if a.flash_attn else []
    if side == "ours":
        argv = [a.generate_program, model, "--tokens", ",".join(map(str, prompt_tokens(a.prompt)))]
        # The first generated token comes from the prompt's logits and is not decoded.
        argv += ["-n", a.generate + 1, "--ignore-eos", "--warm-up", "--json", "--device", "CPU", "--threads", a.threads]
    else:
        argv = [sys.executable, LLAMA, model, "--prompt", a.prompt, "--generate", a.generate, "--threads", a.threads]
    report = json.loads(run([*argv, *flash]).splitlines()[-1])
    return {measure: report[key] for measure, key in MEASURES.items()}


def bandwidth(a: argparse.Namespace) -> float:
    """The memory's read bandwidth in bytes per second, with the threads of the sides (roof `memory read` of bench/ops)."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "roofs.json"
        argv = [a.ops_program, "--bench", "--roofs", "--threads", a.threads, "--json", path]
        run([*argv, *(["--smoke"] if a.smoke else [])])
        roofs = json.loads(path.read_text())["roofs"]
    return next(roof["rate"] * 1e9 for roof in roofs if roof["name"] == "memory read")


@dataclass
class Pair:
    """A read bandwidth in bytes per second, and the measurements of both sides after it."""

    bandwidth: float
    sides: dict[str, Values]

    def ratio(self, measure: str) -> float:
        return self.sides["ours"][measure] / self.sides["llama.cpp"][measure]


@dataclass
class Pairs:
    """The pairs of one model."""

    dtype: str
    weights: int
    """Bytes of weights that a decoded token reads."""
    pairs: list[Pair]

    @staticmethod
    def of(dtype: str, model: Path) -> "Pairs":
        """No pairs yet, of a model with weights of this type."""
        import floors  # needs the package gguf, which --help must not

        return Pairs(dtype, floors.work(model).read, [])

    def measure(self, model: Path, sides: tuple[str, ...], a: argparse.Namespace) -> Pair:
        """Measure one more pair, with the sides in this order."""
        rate = bandwidth(a)
        self.pairs.append(Pair(rate, {side: run_side(side, model, a) for side in sides}))
        return self.pairs[-1]

    def median(self, side: str, measure: str) -> float:
        return statistics.median(pair.sides[side][measure] for pair in self.pairs)

    def ratio(self, measure: str) -> Interval:
        return Interval.of([pair.ratio(measure) for pair in self.pairs])

    def roof(self, pair: Pair) -> float:
        """Tokens per second at the pair's bandwidth, if a token did nothing but read its weights."""
        return pair.bandwidth / self.weights

    @cached_property
    def of_roof(self) -> Interval:
        """Share of the roof that our decoding reaches."""
        return Interval.of([pair.sides["ours"]["decode"] / self.roof(pair) for pair in self.pairs])

    @cached_property
    def decode_score(self) -> Interval:
        """Our decoding divided by the target: llama.cpp's, or a share of the roof if that is less."""
        return Interval.of(
            [
                pair.sides["ours"]["decode"] / min(ROOF_SHARE * self.roof(pair), pair.sides["llama.cpp"]["decode"])
                for pair in self.pairs
            ]
        )

    @cached_property
    def quartiles(self) -> float:
        """Upper quartile of the bandwidths / lower one."""
        rates = [pair.bandwidth for pair in self.pairs]
        if len(rates) < 2:
            return 1.0
        low, _, high = statistics.quantiles(rates, n=4, method="inclusive")
        return high / low

    def bounds(self) -> list[Bound]:
        apart = 100 * (self.quartiles - 1)
        void = f"quartiles of the bandwidth {apart:.0f} % apart" if self.quartiles > MOST_QUARTILES else None
        what = f"{self.dtype} in process, decode / min({ROOF_SHARE} of the roof, llama.cpp)"
        out = [Bound(what, self.decode_score.median, least=LEAST_DECODE, void=void)]
        if least := least_prompt(self.dtype):
            out.append(Bound(f"{self.dtype} in process, prompt / llama.cpp", self.ratio("prompt").median, least=least))
        return out

    def summary(self) -> dict:
        """For the JSON; rates in tokens per second and bytes per second, load in seconds."""
        medians = {measure: {side: self.median(side, measure) for side in SIDES} for measure in MEASURES}
        out: dict = {measure: medians[measure] | {"ratio": self.ratio(measure)} for measure in MEASURES}
        out["decode"] |= {"of the roof": self.of_roof, "score": self.decode_score}
        out["bandwidth"] = statistics.median(pair.bandwidth for pair in self.pairs)
        return out | {"bandwidth quartiles": self.quartiles, "weights": self.weights}


def table(results: list[Pairs]) -> str:
    lines = [f"{'model':10} {'':8} {'ours':>8} {'llama.cpp':>10}  ours / llama.cpp"]
    for r in results:
        for measure in MEASURES:
            ours, theirs = (r.median(side, measure) for side in SIDES)
            lines.append(f"{r.dtype:10} {measure:8} {ours:8.2f} {theirs:10.2f}  {r.ratio(measure)}")
        rate = statistics.median(pair.bandwidth for pair in r.pairs)
        lines.append(
            f"{r.dtype:10} {'roof':8} {rate / r.weights:8.2f} {'':10}  {rate / 1e9:.1f} GB/s, quartiles "
            f"{100 * (r.quartiles - 1):.1f} % apart; {r.weights / 1e6:.1f} MB a token; ours reaches {r.of_roof}"
        )
    return "\n".join(lines)
