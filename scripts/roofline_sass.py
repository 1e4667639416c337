#!/usr/bin/env python3
"""Machine code for the static roofline (scripts/roofline.py): compiles PTX with ptxas, disassembles it, and counts instructions.

Execution counts come from PTX. `ptxas -lineinfo` records the PTX line of each machine instruction, and does not change the
code. The emulator counts how often warps execute each PTX line. A basic block of machine code gets the median of its
instructions' counts, because ptxas moves single instructions between blocks (loop invariants). If ptxas has unrolled or
duplicated a block, several instructions with the same opcode come from one line; the count of the line is then divided
among them. In a block with instructions of tensor cores, only these determine its count.

    roofline_sass.py LISTING COUNTS    # prints the facts of a listing of `nvdisasm -hex -gp -c` as JSON; COUNTS: {"line": count}
"""

import collections
import dataclasses
import json
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

import build_ptx

# The release of CUDA 13, because PyPI has nvdisasm of no 12.x by itself. It warns that it lists cubins of 12.x without a
# dataflow analysis, whose only use would be fewer labels.
NVDISASM = "nvidia-cuda-nvdisasm==13.5.37"

# The pipe of each opcode on 8.6 to 10.0. `fma_heavy` is the half of the FMA pipe that multiplies integers.
PIPES = {
    "alu": "BMSK CS2R F2FP FADD3 FCHK FMNMX FMNMX3 FSEL FSET FSETP I2FP IABS IADD IADD3 IMNMX ISETP LEA LEPC LOP LOP3 MOV P2R "
    "PLOP3 PRMT R2P SEL SGXT SHF SHL SHR VABSDIFF VABSDIFF4 VIADD VIADDMNMX VIMNMX VIMNMX3 VOTE HMNMX2 HSET2 HSETP2",
    "fma_heavy": "IMAD IDP",
    "fma": "FADD FADD2 FFMA FFMA2 FMUL FMUL2 HADD2 HFMA2 HMUL2",
    "fp64": "DADD DFMA DMUL DSETP",
    "xu": "BREV F2F F2I FLO FRND I2F MUFU POPC",
    "lsu": "ATOM ATOMG ATOMS LD LDC LDG LDGSTS LDL LDS LDSM MATCH QSPC RED REDG REDUX SHFL ST STG STL STS STSM",
    "tensor": "DMMA HMMA IMMA QMMA",
    "uniform": "LDCU R2UR S2UR ULDC VOTEU",
    "control": "ACQBULK ARRIVES B2R BAR BMOV BPT BRA BREAK BRX BRXU BSSY BSYNC CALL CCTL CGAERRBAR DEPBAR ELECT ENDCOLLECTIVE "
    "ERRBAR EXIT KILL LDGDEPBAR MEMBAR NANOSLEEP NOP PREEXIT RET S2R SYNCS WARPSYNC YIELD",
}
PIPE = {opcode: pipe for pipe, opcodes in PIPES.items() for opcode in opcodes.split()}
LOADS = ("LDG", "LDS", "LDSM", "LDL", "LDGSTS", "LD")
# The main loop executes at least this share of the kernel's instructions.
MAIN_SHARE = 1 / 4


@dataclasses.dataclass
class Instruction:
    """A machine instruction."""

    opcode: str  # with its modifiers: LDG.E.128
    text: str
    line: int  # of the PTX text; 0 if unknown
    stall: int  # cycles until the next instruction of the warp may issue
    waits: bool  # whether it waits for a scoreboard: the result of a load, or of another instruction of variable latency

    @property
    def head(self):
        return self.opcode.split(".")[0]

    @property
    def pipe(self):
        if self.head in PIPE:
            return PIPE[self.head]
        return "uniform" if self.head.startswith("U") else "other"

    @property
    def bytes(self):
        """Bytes that a load moves for each thread."""
        sizes = (("128", 16), ("256", 32), ("64", 8), ("U16", 2), ("S16", 2), ("U8", 1), ("S8", 1))
        modifiers = self.opcode.split(".")[1:]
        if self.head == "LDSM":
            return 4 * next((int(m) for m in modifiers if m in ("2", "4")), 1)
        return next((size for name, size in sizes if name in modifiers), 4)


@dataclasses.dataclass
class Function:
    """The machine code of an entry, with the functions that it calls."""

    code: list
    labels: dict  # name: index of the instruction behind it


@dataclasses.dataclass
class Resources:
    """What ptxas reports about an entry."""

    registers: int = 0
    spill_bytes: int = 0
    shared_bytes: int = 0


# ---- compilation


def nvdisasm():
    return build_ptx.one(build_ptx.install("nvdisasm", (NVDISASM,)), "nvidia/cu13/bin/nvdisasm")


def ptxas():
    return build_ptx.one(build_ptx.install(f"nvrtc-{build_ptx.NVRTC}", build_ptx.PACKAGES), "nvidia/cuda_nvcc/bin/ptxas")


def run(command):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode != 0:
        raise build_ptx.Failure(f"{' '.join(map(str, command))} failed with status {done.returncode}:\n{done.stderr.strip()}")
    return done


def compile_entries(ptx, target, entries=()):
    """Returns {entry: (Function, Resources)} of a PTX file for sm_`target`: of the named entries, or of all."""
    only = ["-e", ",".join(entries)] if entries else []
    with tempfile.TemporaryDirectory() as folder:
        cubin = pathlib.Path(folder, "cubin")
        log = run([ptxas(), "-v", "-lineinfo", *only, f"-arch=sm_{target}", ptx, "-o", cubin])
        listing = run([nvdisasm(), "-hex", "-gp", "-c", cubin]).stdout
    used = resources(log.stdout + log.stderr)
    return {name: (function, used.get(name, Resources())) for name, function in parse(listing).items()}


def resources(log):
    """Returns {entry: Resources} from the output of `ptxas -v`. Spills of called functions count for the entry."""
    found, entry = {}, None
    for line in log.splitlines():
        if match := re.search(r"Compiling entry function '([^']+)'", line):
            entry = found.setdefault(match[1], Resources())
        elif entry and (match := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line)):
            entry.spill_bytes += int(match[1]) + int(match[2])
        elif entry and (match := re.search(r"Used (\d+) registers", line)):
            entry.registers = int(match[1])
            shared = re.search(r"(\d+) bytes smem", line)
            entry.shared_bytes = int(shared[1]) if shared else 0
    return found


# ---- the listing


def parse(listing):
    """Returns {entry: Function} from a listing by `nvdisasm -hex -gp -c`."""
    functions, function, line, text = {}, None, 0, None
    for row in listing.splitlines():
        if match := re.match(r"\.text\.(\S+):", row):
            function, line = functions.setdefault(match[1], Function([], {})), 0
        elif function is None:
            continue
        elif match := re.match(r"([.$][\w$.]+):", row):
            function.labels[match[1]] = len(function.code)
        elif match := re.search(r'//## File ".nv_debug_ptx_txt", line (\d+)', row):
            line = int(match[1])
        elif match := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;\s+/\* 0x[0-9a-f]{16} \*/", row):
            text = match[1]
        elif text and (match := re.match(r"\s+/\* 0x([0-9a-f]{16}) \*/", row)):
            function.code.append(instruction(text, line, int(match[1], 16)))
            text = None
    return functions


def instruction(text, line, high):
    """Decodes an instruction. Control bits of its upper half: 41 to 44 stall cycles, 52 to 57 the scoreboards to wait for."""
    opcode = re.sub(r"^@!?U?P\w+\s+", "", text).split()[0]
    return Instruction(opcode, text, line, max(1, high >> 41 & 15), bool(high >> 52 & 63))


def block_starts(function):
    """Indices at which basic blocks start."""
    starts = {0, *(index for index in function.labels.values() if index < len(function.code))}
    ends = ("BRA", "BRX", "BRXU", "EXIT", "RET", "CALL")
    starts.update(i + 1 for i, each in enumerate(function.code[:-1]) if each.head in ends)
    return sorted(starts)


def target_of(function, i):
    """Index of the target of a branch; None for other instructions."""
    found = re.search(r"`\(([^)]+)\)", function.code[i].text) if function.code[i].head == "BRA" else None
    return function.labels.get(found[1]) if found else None


def execution_counts(function, lines):
    """Executions of each instruction by warps, from the executions of each PTX line."""
    code = function.code
    copies = collections.Counter((each.line, each.opcode) for each in code)
    starts = block_starts(function)
    counts = []
    for start, end in zip(starts, [*starts[1:], len(code)]):
        # One PTX line may become several instructions with the same opcode, which look like copies; one mma never does. Where a loop
        # converts each element, most counts would be too small by factors of two to four.
        sure = [each for each in code[start:end] if each.pipe == "tensor"] or code[start:end]
        estimates = [lines.get(each.line, 0) / copies[each.line, each.opcode] for each in sure]
        if target_of(function, start) == start:
            estimates = [0]  # padding behind the end of the code: a branch to itself, and no-ops
        counts += [statistics.median(estimates)] * (end - start)
    return counts


def loops(function):
    """Loops as ranges of instructions, from the target of a backward branch to the last branch to it."""
    ends = {}
    for i in range(len(function.code)):
        target = target_of(function, i)
        if target is not None and target < i:
            ends[target] = i
    return sorted(ends.items())


def main_loop(function, counts):
    """The shortest loop that executes at least a quarter of the kernel's instructions, or the whole body."""
    total = sum(counts)
    main = [(end - start, start, end) for start, end in loops(function) if sum(counts[start : end + 1]) >= MAIN_SHARE * total]
    if total and main:
        _, start, end = min(main)
        return start, end, True
    return 0, len(function.code) - 1, False


def facts(function, lines):
    """Counts of an entry: of a pass through the main loop (or the body), and executions in the loop and in the whole kernel.

    Instructions that warps execute in a part of the passes, or several times in a pass, count accordingly. `executed`, and
    `pipes` are warp instructions of all passes; `body_…` those of the whole kernel. `load_bytes_at_a_time` are of a thread.
    """
    counts = execution_counts(function, lines)
    start, end, is_loop = main_loop(function, counts)
    code, main = function.code[start : end + 1], counts[start : end + 1]
    passes = main[0] or max(main)
    shares = [count / passes if passes else 0.0 for count in main]
    per_pass = lambda value: round(sum(share * value(each) for share, each in zip(shares, code)), 2)
    global_bytes = lambda each: each.bytes if each.head in ("LDG", "LDGSTS") else 0
    # Bytes that a thread loads at a time: in a pass of the loop. If that runs once, its loads overlap with those before it; those behind it
    # count, too, which makes this an upper bound.
    warps = counts[0] if counts else 0
    at_a_time = per_pass(global_bytes)
    if warps and passes <= warps:
        at_a_time = round(sum(count * global_bytes(each) for count, each in zip(counts, function.code)) / warps, 2)
    return {
        "loop": is_loop,
        "passes": passes,
        "per_pass": {
            "instructions": per_pass(lambda each: 1),
            "stall_cycles": per_pass(lambda each: each.stall),
            "scoreboard_waits": per_pass(lambda each: each.waits),
            "global_load_bytes": per_pass(global_bytes),
        },
        "loads": by(code, shares, lambda each: f"{each.head}.{8 * each.bytes}" if each.head in LOADS else None),
        "load_bytes_at_a_time": at_a_time,
        "executed": sum(main),
        "pipes": by(code, main, lambda each: each.pipe),
        "body_executed": sum(counts),
        "body_pipes": by(function.code, counts, lambda each: each.pipe),
        "body_tensor": by(function.code, counts, lambda each: tensor_shape(each)),
        "unknown": sorted({each.head for each in function.code if each.pipe == "other"}),
    }


def by(code, weights, name):
    """Sums of weights by name, in the order of names."""
    sums = collections.Counter()
    for each, weight in zip(code, weights):
        if (key := name(each)) and weight:
            sums[key] += weight
    return {key: round(sums[key], 2) for key in sorted(sums)}


def tensor_shape(each):
    """Opcode, shape and input type of a tensor-core instruction: HMMA.1688.TF32."""
    if each.pipe != "tensor":
        return None
    return ".".join(word for word in each.opcode.split(".") if word == each.head or word[0].isdigit() or word in ("TF32", "BF16"))


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    lines = {int(line): count for line, count in json.loads(pathlib.Path(sys.argv[2]).read_text()).items()}
    functions = parse(pathlib.Path(sys.argv[1]).read_text())
    print(json.dumps({name: facts(function, lines) for name, function in functions.items()}, indent=1))


if __name__ == "__main__":
    main()
