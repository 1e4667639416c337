#!/usr/bin/env python3
"""Proves that the tests of the CUDA kernels can fail: breaks kernels in one line of PTX at a time, and expects the sweep of the op's
family to notice.

    tests/cuda/mutants.py [--count N] [--seed N] [--only REGEX] [--jobs N] [--program PATH]

A mutant changes an operand, a comparison or a constant, or removes a barrier or a predicate, in an entry that capability 8.0 runs.
Families, entries, kinds and lines are chosen by the seed, each with the same probability, so that kernels with much code do not take
all mutants. The emulator replaces the line when it loads the module (CUDAEMU_PTX_LINE), so nothing is compiled. A mutant that survives
is run again with `trap` in its place, which tells lines that no case executes. Prints each survivor as the emulator's setting, and
exits 1 if a mutant of an executed line survived. A mutant that the change does not affect (equivalent) must be told by reading it.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import os
import pathlib
import random
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PTX = ROOT / "kernels/ptx"
TEST = "sweep::every_variant_on_capability_8_0"
# The family of an entry's file: the first match. Other files are named after their family.
FAMILIES = (("conv", "conv"), ("copy", "copy"), ("flash_attn", "flash_attn"), (("mul_mat", "moe"), "mul_mat"), (("gated_", "wkv"), "linear_attn"))
# Warp instructions of one block, after which a kernel counts as endless.
MAX_INSTRUCTIONS = "64M"
# A run that takes so many times as long as one without a mutant, and these seconds, is endless too.
SLOWER, GRACE_S = 8, 30
OTHER = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt", "eq": "ne", "ne": "eq", "lo": "ls", "ls": "lo", "hi": "hs", "hs": "hi"}
OTHER |= {"ltu": "leu", "leu": "ltu", "gtu": "geu", "geu": "gtu", "equ": "neu", "neu": "equ"}


def operand(line):
    """An operand that is read becomes the one beside it, if both are registers of one class."""
    pairs = list(re.finditer(rf"(?<=,)(%[a-z]+)(\d+),\1(\d+)(?=[,;])", line))
    return [line[: m.start()] + f"{m[1]}{m[2]},{m[1]}{m[2]}" + line[m.end() :] for m in pairs if m[2] != m[3]]


def comparison(line):
    found = re.match(r"((?:@!?%p\d+ )?setp?\.)([a-z]+)(\..*)", line)
    return [found[1] + OTHER[found[2]] + found[3]] if found and found[2] in OTHER else []


def constant(line):
    """A whole number among the operands, or the distance of an address, is one higher; of an address, 4."""
    if re.match(r"(@!?%p\d+ )?(bar|barrier|cp\.async|call|bra|ld\.param|mma|shfl|vote)", line):
        return []
    plain = [line[: m.start()] + str(int(m[0]) + 1) + line[m.end() :] for m in re.finditer(r"(?<=,)-?\d+(?=[,;])", line)]
    return plain + [line[: m.start()] + str(int(m[0]) + 4) + line[m.end() :] for m in re.finditer(r"(?<=\+)\d+(?=\])", line)]


def barrier(line):
    return [""] if re.match(r"(@!?%p\d+ )?(bar\.|barrier\.|cp\.async\.wait)", line) else []


def predicate(line):
    found = re.match(r"@!?%p\d+ (.*)", line)
    return [found[1]] if found else []


KINDS = {kind.__name__: kind for kind in (operand, comparison, constant, barrier, predicate)}


@dataclasses.dataclass(frozen=True)
class Mutant:
    family: str
    entry: str
    kind: str
    line: int
    old: str
    new: str

    def __str__(self):
        return f"{self.family} {self.kind}: CUDAEMU_PTX_LINE='{self.entry}:{self.line}:{self.new}' (was {self.old})"


def entries():
    """{family: {entry: its lines}} of what capability 8.0 runs."""
    found = {}
    for path in sorted(PTX.glob("*.sm_75.ptx")) + sorted(PTX.glob("*.sm_80.ptx")):
        stem = path.name.split(".")[0]
        family = next((family for names, family in FAMILIES if stem.startswith(names)), stem)
        for text in path.read_text().split(".visible .entry ")[1:]:
            lines = text.split("\n}")[0].split("\n")
            found.setdefault(family, {})[lines[0].rstrip("(")] = lines
    return found


def mutants(count, seed, only):
    rng = random.Random(seed)
    families = {family: found for family, found in entries().items() if re.search(only, family)}
    if not families:
        sys.exit(f"mutants.py: no family is named {only}")
    chosen = {}
    for _ in range(10 * count):
        if len(chosen) == count:
            break
        family = rng.choice(sorted(families))
        entry = rng.choice(sorted(families[family]))
        kind = rng.choice(sorted(KINDS))
        changes = [(i, line, new) for i, line in enumerate(families[family][entry]) for new in KINDS[kind](line)]
        if changes:
            i, old, new = rng.choice(changes)
            chosen[entry, i, new] = Mutant(family, entry, kind, i, old, new)
    return list(chosen.values())


class Runner:
    def __init__(self, program):
        self.program = program
        self.limits = {}

    def run(self, family, setting=None, limit=None):
        """The status and the output of the sweep of a family; status `None`: the time was up."""
        env = {**os.environ, "FANOUT_TEST_FAMILY": family, "CUDAEMU_MAX_INSTRUCTIONS": MAX_INSTRUCTIONS}
        if setting:
            env["CUDAEMU_PTX_LINE"] = setting
        argv = [self.program, "--exact", TEST]
        try:
            done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, errors="replace", timeout=limit)
        except subprocess.TimeoutExpired:
            return None, ""
        return done.returncode, done.stdout + done.stderr

    def measure(self, family):
        """The time that the family takes without a mutant sets the limit of its mutants."""
        start = os.times().elapsed
        status, output = self.run(family)
        if status != 0 or "1 passed" not in output:
            sys.exit(f"mutants.py: the sweep of {family} fails without a mutant:\n{output}")
        self.limits[family] = SLOWER * (os.times().elapsed - start) + GRACE_S

    def verdict(self, mutant):
        setting = f"{mutant.entry}:{mutant.line}:"
        status, output = self.run(mutant.family, setting + mutant.new, self.limits[mutant.family])
        if "INVALID_PTX" in output:
            return "invalid"
        if status != 0:
            return "killed"
        status, _ = self.run(mutant.family, setting + "trap;", self.limits[mutant.family])
        return "not executed" if status == 0 else "survived"


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--count", type=int, default=200)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--only", default="", metavar="REGEX", help="families whose names contain a match")
    p.add_argument("--jobs", type=int, default=1)
    p.add_argument("--program", help="the compiled test (default: compile it)")
    a = p.parse_args()
    program = a.program
    if not program:
        argv = ["cargo", "test", "--locked", "--workspace", "--test", "cuda", "--no-run", "--message-format=json"]
        built = subprocess.run(argv, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        program = re.findall(r'"executable":"([^"]*/cuda-[^"]*)"', built)[-1]
    chosen = mutants(a.count, a.seed, a.only)
    runner = Runner(program)
    counts = collections.Counter()
    with concurrent.futures.ThreadPoolExecutor(a.jobs) as pool:
        list(pool.map(runner.measure, sorted({mutant.family for mutant in chosen})))
        for mutant, verdict in zip(chosen, pool.map(runner.verdict, chosen)):
            counts[verdict] += 1
            if verdict in ("survived", "not executed"):
                print(f"{verdict:12} {mutant}", flush=True)
    print(f"seed {a.seed}: " + ", ".join(f"{n} {verdict}" for verdict, n in sorted(counts.items())))
    sys.exit(counts["survived"] > 0)


if __name__ == "__main__":
    main()
