#!/usr/bin/env python3
"""Counts the instructions of the inner loops of matrix products, and compares them with the recorded ones.

Times on shared machines differ by tens of percent; counts repeat. The table (tests/loop_counts/x86_64.txt) has one line per
kernel and type, and for each register tile the instructions per 64 products of a weight and a value: 64 codes are one vector of
AVX-512, or two of AVX2. There are two ways to count:

  executed  The AVX2 kernels run under callgrind. Valgrind does not know AVX-512 and shows the program an Intel processor with
            AVX2, so the counts are the same on each machine. The CPU device's calibration runs out of time there, and keeps its
            defaults. A tile is a number of columns.
  loops     The loops of the AVX-512 and AVX-VNNI kernels are found in the disassembled program: a pass through the longest path,
            without no-ops. Inlined functions in the debug information name the type and the tile: panels x columns for
            micro-kernels, columns for row dot products.

The check fails if a count differs from the recorded one by more than 8 %. It fails in both directions, so that a faster loop
is recorded too. Needs valgrind and binutils.
"""

import argparse
import json
import platform
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tests/loop_counts/x86_64.txt"
# One tile of Q3_K moves by 7 % when code that it does not use changes: the compiler divides the crate into units by size.
TOLERANCE = 0.08

# The program with the products. It does not run the emulated GPU, which cargo compiles with it.
BUILD = ["cargo", "test", "--release", "--locked", "-p", "fanout", "--config",
         "profile.release.package.cudaemu.opt-level=0", "--bench", "loop_counts", "--no-run"]

# Kernels, without the hash at the end of the symbol: `fanout::cpu::simd::x86::avx2_quants::micro_kernel`.
KERNEL = re.compile(r"fanout::cpu::simd::x86::(\w+::(?:micro_kernel|\w*dot))\b")


def fail(message):
    sys.exit(f"loop_counts.py: {message}")


def output(command, **options):
    """The standard output of a command, which must succeed."""
    try:
        result = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, **options)
    except FileNotFoundError:
        fail(f"{command[0]} is not installed (Debian: apt-get install valgrind binutils)")
    if result.returncode != 0:
        fail(f"{' '.join(map(str, command))} failed with status {result.returncode}")
    return result.stdout


def build():
    """Builds the program; returns its path."""
    messages = map(json.loads, output(BUILD + ["--message-format=json-render-diagnostics"]).splitlines())
    targets = [m for m in messages if m.get("target", {}).get("name") == "loop_counts"]
    return next((m["executable"] for m in targets if m.get("executable")), None) or fail("cargo named no executable")


# ---- executed instructions, by callgrind


def self_costs(profile):
    """Instructions of each function without its callees, from a callgrind profile without compressed names and positions."""
    costs, function, of_callee = Counter(), None, False
    for line in profile.splitlines():
        if line.startswith("fn="):
            function = line[3:]
        elif line.startswith("calls="):
            of_callee = True  # the next line is the cost of the call
        elif line[:1].isdigit():
            if not of_callee:
                costs[function] += int(line.split()[1])
            of_callee = False
    return costs


def executed(program):
    """Counts of the AVX2 kernels: {(kernel, type, tile): instructions per 64 products}."""
    with tempfile.TemporaryDirectory() as folder:
        profiles = Path(folder, "profile")
        text = output(
            ["valgrind", "--quiet", "--tool=callgrind", f"--callgrind-out-file={profiles}", "--compress-strings=no",
             "--compress-pos=no", "--dump-before=*loop_counts*profile_boundary*", program])
        shape, *products = text.splitlines()
        rows, row_elements = map(int, shape.split())
        counts = {}
        for i, product in enumerate(products):
            dtype, layout, columns = product.split()
            # A product lies between two boundaries: every other profile is that of a preparation.
            kernels = Counter()
            for name, cost in self_costs(Path(f"{profiles}.{2 * i + 2}").read_text()).items():
                if match := KERNEL.search(name):
                    kernels[match[1]] += cost
            expected = "micro_kernel" if layout == "panels" else "dot"
            if [kernel.split("::")[1] for kernel in kernels] != [expected]:
                fail(f"the product `{product}` should run one {expected}, but ran {dict(kernels) or 'no kernel'}")
            [(kernel, cost)] = kernels.items()
            counts[kernel, dtype, columns] = 64 * cost / (rows * row_elements * int(columns))
        return counts


# ---- loops, by a disassembler

# Kernels whose loops are counted, and their dot-product instructions.
CODES, FLOATS = re.compile(r"vpdpbusd\s"), re.compile(r"(?:vfmadd\d+ps|vdpbf16ps)\s")
LOOPS = {
    "avx512_quants::micro_kernel": CODES,
    "vnni_quants::micro_kernel": CODES,
    "vnni_vl::dot": CODES,
    "vnni::dot": CODES,
    "avx512_floats::micro_kernel": FLOATS,
    "avx512_bf16::micro_kernel": FLOATS,
    "float_row_dot::avx512_dot": FLOATS,
    "float_row_dot::bf16_dot": FLOATS,
}
# The inlined functions whose generic arguments name type and register tile.
TILE = re.compile(r"^(?:micro_kernel|dot_blocks|avx512_columns)<(.*)>$")
# A line of the disassembly: address and instruction.
INSTRUCTION = re.compile(r"\s*([0-9a-f]+):\t(?:\{vex\} )?(.+?)\s*$")
# Functions that do not return.
PANICS = re.compile(r" [tT] core::.*(?:panic|fail)")
PANEL_ROWS, SUPERBLOCK = 16, 256


@dataclass
class Instruction:
    address: int
    text: str
    panics: bool

    @property
    def name(self):
        return self.text.split()[0]

    @property
    def target(self):
        """The address of a direct jump."""
        match = re.match(r"j\w+\s+([0-9a-f]+)\b", self.text)
        return int(match[1], 16) if match else None

    def falls_through(self):
        """Whether the next instruction can be executed after this one."""
        return self.name not in ("jmp", "ret", "ud2") and not self.panics

    def ends_block(self):
        return self.name.startswith("j") or not self.falls_through()

    def is_counted(self):
        return "nop" not in self.text and not self.text.startswith("xchg   %ax,%ax")


def products_of(dot):
    """The products of a dot-product instruction: its vector has 64 or 32 bytes of codes, or of floats."""
    width = 64 if re.search(r"%zmm\d+$", dot.text) else 32
    return {"vpdpbusd": width, "vdpbf16ps": width // 2}.get(dot.name, width // 4)


def panic_calls(program):
    """Matches the calls of functions that do not return: direct ones, and those through the global offset table."""
    lines = output(["nm", "-C", program]).splitlines()
    addresses = {line.split()[0] for line in lines if PANICS.search(line)}
    relocation = re.compile(r"^0*([0-9a-f]+) R_X86_64_RELATIVE +\*ABS\*\+0x([0-9a-f]+)", re.M)
    slots = [slot for slot, address in relocation.findall(output(["objdump", "-R", program])) if address in addresses]
    direct = "|".join(address.lstrip("0") for address in addresses)
    return re.compile(rf"call\s+(?:(?:{direct}) |.*# (?:{'|'.join(slots)}) )")


def functions(program):
    """The kernels in LOOPS, disassembled."""
    found, current, panics = [], None, panic_calls(program)
    for line in output(["objdump", "-dC", "--no-show-raw-insn", program]).splitlines():
        if line.endswith(">:"):
            match = KERNEL.search(line)
            current = None
            if match and match[1] in LOOPS:
                current = []
                found.append((match[1], current))
        elif current is not None and (match := INSTRUCTION.match(line)):
            current.append(Instruction(int(match[1], 16), match[2], bool(panics.match(match[2]))))
    return [Function(kernel, code) for kernel, code in found]


@dataclass
class Loop:
    header: int
    blocks: set

    def __lt__(self, other):
        """Whether the loop lies in another one."""
        return self.blocks < other.blocks


class Function:
    """A kernel as basic blocks, by the index of their first instruction, and its natural loops, the smallest first."""

    def __init__(self, kernel, code):
        self.kernel = kernel
        at = {instruction.address: i for i, instruction in enumerate(code)}
        leaders = {0} | {at[i.target] for i in code if i.target in at}
        leaders |= {n + 1 for n, i in enumerate(code) if i.ends_block() and n + 1 < len(code)}
        starts = sorted(leaders)
        self.blocks = {start: code[start:end] for start, end in zip(starts, starts[1:] + [len(code)])}
        self.successors = {}
        for start, block in self.blocks.items():
            last, end = block[-1], start + len(block)
            after = [end] if end < len(code) and last.falls_through() else []
            self.successors[start] = after + ([at[last.target]] if last.target in at else [])
        order = post_order(self.successors)
        predecessors = {start: [] for start in self.blocks}
        for start in order:
            for after in self.successors[start]:
                predecessors[after].append(start)
        dominator = dominators(order, predecessors)
        self.back_edges = set()
        loops = {}
        for jump, header in [(start, after) for start in order for after in self.successors[start]]:
            if dominates(header, jump, dominator):
                # A loop: the target of a jump back that dominates the jump, and all blocks that reach the jump without
                # passing the target. Loops with the same target are one.
                self.back_edges.add((jump, header))
                body, work = loops.setdefault(header, {header}), [jump]
                while work:
                    block = work.pop()
                    if block not in body:
                        body.add(block)
                        work += predecessors[block]
        self.loops = sorted((Loop(header, body) for header, body in loops.items()), key=lambda loop: len(loop.blocks))

    def dots(self, start):
        return [i for i in self.blocks[start] if LOOPS[self.kernel].match(i.text)]

    def innermost(self):
        """The loops with dot-product instructions and no such loop inside."""
        found = []
        for loop in self.loops:
            if any(map(self.dots, loop.blocks)) and not any(inner < loop for inner in found):
                found.append(loop)
        return found

    def paths(self, loop, inner=()):
        """The passes through a loop: {products: most instructions of a pass with that many}. `inner` are loops in it whose
        passes together are known: (loop, products, instructions). Other loops in it are passed once."""
        best = {}
        collapsed = {block: (within, counts) for within, *counts in inner for block in within.blocks}

        def from_block(block):
            if block not in best:
                if block in collapsed:
                    within, (products, length) = collapsed[block]
                else:
                    within, products = Loop(block, {block}), sum(map(products_of, self.dots(block)))
                    length = sum(i.is_counted() for i in self.blocks[block])
                after = {(b, a) for b in within.blocks for a in self.successors[b] if a not in within.blocks}
                rest = [from_block(a) for b, a in after - self.back_edges if a in loop.blocks] or [{0: 0}]
                best[block] = {}
                for n, steps in (path for paths in rest for path in paths.items()):
                    best[block][products + n] = max(length + steps, best[block].get(products + n, 0))
            return best[block]

        return from_block(loop.header)


def post_order(successors):
    """The blocks that block 0 reaches, each after its successors (but for loops)."""
    order, seen, work = [], {0}, [(0, iter(successors[0]))]
    while work:
        block, after = work[-1]
        following = next((n for n in after if n not in seen), None)
        if following is None:
            order.append(block)
            work.pop()
        else:
            seen.add(following)
            work.append((following, iter(successors[following])))
    return order


def dominators(order, predecessors):
    """The immediate dominator of each block, by the algorithm of Cooper, Harvey and Kennedy."""
    number, dominator, changed = {block: n for n, block in enumerate(order)}, {0: 0}, True
    while changed:
        changed = False
        for block in reversed(order[:-1]):
            common, *others = [p for p in predecessors[block] if p in dominator]
            for other in others:
                while common != other:
                    if number[common] < number[other]:
                        common = dominator[common]
                    else:
                        other = dominator[other]
            if dominator.get(block) != common:
                dominator[block], changed = common, True
    return dominator


def dominates(block, other, dominator):
    while other not in (0, block):
        other = dominator[other]
    return other == block


def inlined(program, addresses):
    """The functions inlined at each address, innermost first."""
    text = output(["addr2line", "-C", "-f", "-i", "-a", "-e", program], input="\n".join(map(hex, addresses)))
    frames = {}
    for line in text.splitlines():
        if re.match(r"0x[0-9a-f]+$", line):
            lines = frames.setdefault(int(line, 16), [])
        else:
            lines.append(line)
    return {address: lines[::2] for address, lines in frames.items()}


def loops(program):
    """Counts of the loops: {(kernel, type, tile): instructions per 64 products}."""
    found = [(function, loop) for function in functions(program) for loop in function.innermost()]
    dots = [[dot.address for block in loop.blocks for dot in function.dots(block)] for function, loop in found]
    frames = inlined(program, sum(dots, []))
    counts = {}
    for (function, loop), addresses in zip(found, dots):
        names = [name for address in addresses for name in frames[address]]
        tile = next((match[1] for name in names if (match := TILE.match(name))), None)
        if tile is None:
            fail(f"{function.kernel}: no register tile at {addresses[0]:#x}: {names}")
        arguments = tile.split(", ")
        sizes = [a for a in arguments if a.isdigit()]
        types = [a.rsplit("::", 1)[-1] for a in arguments if not a.isdigit()]
        # Micro-kernels name the instruction set first, row dot products last, if at all.
        panels = function.kernel.endswith("micro_kernel")
        dtype = (types[-1] if panels else types[0]).replace("Bf16Pairs", "BF16").replace("Bf16", "BF16")
        paths = function.paths(loop)
        products = max(paths)
        if panels and dtype.endswith("_K"):
            block = PANEL_ROWS * SUPERBLOCK * int(sizes[0]) * int(sizes[1])
            if block not in paths:
                # The loop over chunks, in the loop over superblocks.
                around = next((outer for outer in function.loops if loop < outer), None)
                passes, rest = divmod(block, products)
                if rest or around is None:
                    fail(f"{function.kernel}<{dtype}> {sizes}: {products} products in its loop, {block} in a superblock")
                paths = function.paths(around, [(loop, block, passes * paths[products])])
            products = block
        count = 64 * paths[products] / products
        # The compiler may make two loops of one, such as with and without prefetching: the longer one counts.
        key = (function.kernel, dtype, "x".join(sizes))
        counts[key] = max(count, counts.get(key, 0))
    return counts


# ---- the table


def parse(text):
    """The counts of a table."""
    lines = (line.split() for line in text.splitlines() if line and not line.startswith("#"))
    tiles = (((kernel, dtype, *tile.split("=")) for tile in tiles) for kernel, dtype, *tiles in lines)
    return {(kernel, dtype, tile): float(count) for line in tiles for kernel, dtype, tile, count in line}


def table(counts):
    """The counts as a table, without a header."""
    lines = {}
    for (kernel, dtype, tile), count in sorted(counts.items()):
        lines.setdefault((kernel, dtype), []).append(f"{tile}={count:.2f}")
    return "".join(f"{kernel:28} {dtype:10} {' '.join(tiles)}\n" for (kernel, dtype), tiles in lines.items())


def differences(recorded, measured):
    """A line for each loop whose count differs by more than the tolerance, or which only one of the tables has."""
    lines = []
    for key in sorted(recorded.keys() | measured.keys()):
        name, old, new = "{} of {}, tile {}".format(*key), recorded.get(key), measured.get(key)
        if old is None or new is None:
            lines.append(f"{name}: {'not in the table' if old is None else 'in the table, but not found'}")
        elif abs(new - old) > TOLERANCE * old:
            change = f"{100 * (new / old - 1):+.0f} %"
            lines.append(f"{name}: {old:.2f} instructions per 64 products are recorded, {new:.2f} counted ({change})")
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--renew", action="store_true", help="record the counts")
    parser.add_argument("--program", help="count the kernels of this build of the program, instead of building it")
    parser.add_argument("--compare", nargs=2, metavar=("RECORDED", "COUNTED"), help="only compare two tables")
    arguments = parser.parse_args()
    if arguments.compare:
        old, new = (Path(path).read_text() for path in arguments.compare)
        recorded, measured = parse(old), parse(new)
    else:
        if platform.machine() != "x86_64":
            print("loops NOT COUNTED: this is no x86-64 machine", file=sys.stderr)
            return
        program = arguments.program or build()
        measured = executed(program) | loops(program)
        compiler = output(["rustc", "--version"]).split(" (")[0]
        if arguments.renew:
            TABLE.write_text(
                f"# Instructions per 64 products (a weight times a value) in the kernels of matrix products, by register tile.\n"
                f"# Written by scripts/loop_counts.py --renew, with {compiler}. The script describes the columns.\n\n"
                + table(measured))
            return
        old = TABLE.read_text()
        recorded = parse(old)
    lines = differences(recorded, measured)
    for line in lines:
        print(line, file=sys.stderr)
    if lines and not arguments.compare and compiler not in old:
        print(f"loops NOT COMPARED: the table was written with another compiler than {compiler}", file=sys.stderr)
        return
    if lines:
        by = re.search(r"rustc \S+?(?=\.$|\.? )", old, re.M)
        fail(f"{len(lines)} counts differ from the recorded ones (of {by[0] if by else 'an unknown compiler'}). If that is "
             "intended, run scripts/loop_counts.py --renew and commit tests/loop_counts/x86_64.txt")
    print(f"{len(measured)} counts are within {TOLERANCE:.0%} of the recorded ones")


if __name__ == "__main__":
    main()
