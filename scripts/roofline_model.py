"""The time model of the static roofline (scripts/roofline.py): GPUs, occupancy, and the modelled time of a launch.

The constants are set once and change only from the report of a GPU (scripts/gpu.sh run). Until one has confirmed them, times
are information: compare two kernels by their counts.
"""

import dataclasses
import math
import pathlib
import re

# Shares of the peak rates that kernels reach.
ISSUE_SHARE, SHARED_SHARE, TENSOR_SHARE, MEMORY_SHARE = 0.45, 0.45, 0.65, 0.9
# Seconds between the end of a kernel and the start of the next one in a CUDA graph; and with programmatic dependent launch. The latter is
# assumed: 0.5 us less for each launch is the lower end of the 8 % to 13 % that are expected for decoding.
LAUNCH_SECONDS, DEPENDENT_LAUNCH_SECONDS = 1.3e-6, 0.8e-6
# A multiprocessor has 4 schedulers; each issues one warp instruction per cycle.
SCHEDULERS = 4
# Cycles for which a warp instruction occupies its pipe, per scheduler. `lsu` is shared by the 4 schedulers.
PIPE_CYCLES = {"alu": 2, "fma_heavy": 2, "xu": 8, "lsu": 4, "uniform": 2}
REGISTERS, REGISTER_UNIT, RESERVED_SHARED = 65536, 256, 1024
SECTOR = 32
# The rates of tensor cores.
RATES = pathlib.Path(__file__).resolve().parent.parent / "src/cuda/gpu_rates.rs"


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A product that represents its architecture."""

    name: str
    multiprocessors: int
    hertz: float
    bytes_per_second: float
    latency: float  # seconds of a load from memory under load
    warps: int  # limit per multiprocessor
    blocks: int  # limit per multiprocessor
    shared: int  # bytes of shared memory per multiprocessor
    l2_bytes_per_second: float
    fma_cycles: int  # of a warp instruction in FP32, per scheduler
    fp64_cycles: int  # the same in FP64
    dependent_launch: bool  # whether it has programmatic dependent launch


# Rates of L2 caches, of which the table shows the share that a kernel uses:
#   A100, H200  5120 bytes per clock, as the A100 whitepaper says; H100's of 1.755 GHz is given as 8986 GB/s (PMC10448217, table 3)
#   RTX 4090    4.9 TB/s, measured with cp.async (github.com/smallscientist1/cuda_microbenchmark; A100 measured: 5.4 TB/s)
#   RTX 3090    assumed: a sector of 32 bytes per clock from each of 48 slices, as many as the RTX 4090 has
#   RTX 5090    the 8.7 TB/s that chipsandcheese.com measured on an RTX PRO 6000 (the same chip), by the number of multiprocessors
GPUS = {
    "80": Gpu("A100-SXM4-80GB", 108, 1.41e9, 2.039e12, 0.6e-6, 64, 32, 164 << 10, 5120 * 1.41e9, 2, 4, False),
    "86": Gpu("GeForce RTX 3090", 82, 1.695e9, 936e9, 0.6e-6, 48, 16, 100 << 10, 1536 * 1.695e9, 1, 64, False),
    "89": Gpu("GeForce RTX 4090", 128, 2.52e9, 1.008e12, 0.6e-6, 48, 24, 100 << 10, 4.9e12, 1, 64, False),
    "90": Gpu("H200", 132, 1.98e9, 4.8e12, 0.7e-6, 64, 32, 228 << 10, 5120 * 1.98e9, 1, 2, True),
    "120": Gpu("GeForce RTX 5090", 170, 2.407e9, 1.792e12, 0.7e-6, 48, 24, 100 << 10, 8.7e12 * 170 / 188, 1, 64, True),
}


def tensor_rates(target):
    """Multiply-adds per cycle and multiprocessor by type. GeForce boards execute products with f32 sums at half the rate."""
    row = rf"row\({target}, \d+, \[(\d+), (\d+), (\d+)\], (true|false)\)"
    f16, tf32, int8, halved = re.search(row, RATES.read_text()).groups()
    divisor = 2 if halved == "true" and "GeForce" in GPUS[target].name else 1
    return {"f16": int(f16) // divisor, "tf32": int(tf32) // divisor, "int8": int(int8)}


TENSOR = {target: tensor_rates(target) for target in GPUS}


def blocks_per_multiprocessor(gpu, threads, registers, shared):
    """Blocks that a multiprocessor holds at once."""
    warps = math.ceil(threads / 32)
    per_warp = math.ceil(max(registers, 1) * 32 / REGISTER_UNIT) * REGISTER_UNIT
    limits = [
        gpu.blocks,
        gpu.warps // warps,
        REGISTERS // per_warp // warps,
        gpu.shared // (shared + RESERVED_SHARED),
    ]
    return max(0, min(limits))


def tensor_seconds(target, instructions):
    """Time of tensor-core instructions on one multiprocessor at its peak rate. Names are as of roofline_sass.tensor_shape."""
    cycles = 0.0
    for name, count in instructions.items():
        words = name.split(".")
        # 16816 is m16n8k16; 16832 m16n8k32; 1688 m16n8k8; 884 and 8816 are smaller shapes.
        shape = {"884": (8, 8, 4), "8816": (8, 8, 16), "1684": (16, 8, 4), "1688": (16, 8, 8)}
        m, n, k = shape.get(words[1]) or (16, 8, int(words[1][3:]))
        kind = "int8" if words[0] == "IMMA" else "tf32" if "TF32" in words else "f16"
        cycles += count * m * n * k / TENSOR[target][kind]
    return cycles / GPUS[target].hertz


def occupancy(gpu, launch, used):
    """Occupancy and waves of a launch: {"blocks_per_sm", "warps_per_sm", "occupancy", "waves", "tail"}.

    `tail` is the share of the last wave that has blocks.
    """
    threads = launch["threads"] // launch["blocks"]
    resident = blocks_per_multiprocessor(gpu, threads, used.registers, used.shared_bytes)
    if resident == 0:
        return {"blocks_per_sm": 0, "warps_per_sm": 0, "occupancy": 0.0, "waves": 0.0, "tail": 0.0}
    warps = resident * math.ceil(threads / 32)
    waves = launch["blocks"] / launch["launches"] / (resident * gpu.multiprocessors)
    return {
        "blocks_per_sm": resident,
        "warps_per_sm": warps,
        "occupancy": round(warps / gpu.warps, 3),
        "waves": round(waves, 3),
        "tail": round(waves - math.ceil(waves) + 1, 3),
    }


def seconds(target, launch, facts, held):
    """Modelled time of the launches of a kernel, and the name of its bound.

    t = max(issue, busiest pipe, shared memory, tensor cores, memory), each divided by the share that kernels reach, plus the
    launches. Shared memory serves a pass of at most 128 bytes per cycle. A grid with fewer blocks than multiprocessors uses as
    many of them.
    """
    gpu = GPUS[target]
    blocks = launch["blocks"] / launch["launches"]
    busy = min(gpu.multiprocessors, blocks)
    lanes = busy * SCHEDULERS * gpu.hertz
    cycles = PIPE_CYCLES | {"fma": gpu.fma_cycles, "fp64": gpu.fp64_cycles}
    pipes = {pipe: facts["body_pipes"].get(pipe, 0) * cost / lanes for pipe, cost in cycles.items()}
    # Both kinds of multiplication use the FMA pipe.
    pipes["fma"] += facts["body_pipes"].get("fma_heavy", 0) * gpu.fma_cycles / lanes
    shared = launch.get("shared_passes", 0)
    bytes_moved = launch.get("global_read_distinct_bytes", 0) + launch.get("global_written_distinct_bytes", 0)
    resident = min(held["blocks_per_sm"], math.ceil(blocks / gpu.multiprocessors))
    threads = launch["threads"] / launch["blocks"]
    in_flight = facts["load_bytes_at_a_time"] * threads * resident * busy
    rate = min(gpu.bytes_per_second, in_flight / gpu.latency) if in_flight else gpu.bytes_per_second
    bounds = {
        "issue": facts["body_executed"] / lanes / ISSUE_SHARE,
        **{pipe: time / ISSUE_SHARE for pipe, time in pipes.items()},
        "shared": shared / (busy * gpu.hertz) / SHARED_SHARE,
        "tensor": tensor_seconds(target, facts["body_tensor"]) / busy / TENSOR_SHARE,
        "bandwidth" if rate == gpu.bytes_per_second else "latency": bytes_moved / (MEMORY_SHARE * rate),
    }
    bound = max(bounds, key=bounds.get)
    return bounds[bound] + launch["launches"] * LAUNCH_SECONDS, bound


def l2_share(target, launch, seconds):
    """Share of the rate of L2 that the kernel needs if blocks share nothing, and a block loads each sector once."""
    return l2_bytes(launch) / GPUS[target].l2_bytes_per_second / seconds if seconds else 0.0


def l2_bytes(launch):
    """Bytes between L2 and the multiprocessors: the sectors that each block reads, and those that warps write."""
    return SECTOR * (launch.get("block_sectors", 0) + launch.get("global_written", {}).get("sectors", 0))
