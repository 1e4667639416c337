"""The figures of a row of the static roofline (scripts/roofline.py): of a case, a kernel that it launches, and a target."""

import math
import re

import build_ptx
import roofline_model as model
import roofline_sass as sass

# The case that is a layer of a model.
LAYER = "LLAMA_LAYER"
# What a kernel works on, by its entry; the first match counts. Kernels that use tensor cores count per mma, but those of products with
# few columns per weight.
UNITS = (
    (r"mul_mat_(widen|halves|quantize|pack$|packed_rows)", "element"),
    (r"mul_mat_", "weight"),
    (r"flash_attn_(?!merge|halves)", "multiply-add"),
    (r"", "element"),
)


def decode_lines(text):
    """Inverse of roofline.encode_lines."""
    lines = {}
    for run in text.split():
        span, count = run.split(":")
        first, _, last = span.partition("-")
        lines.update((line, int(count)) for line in range(int(first), int(last or first) + 1))
    return lines


def columns(case):
    found = re.search(r" by (\d+)$", case)
    return int(found[1]) if found else 1


def work(case, counted, entry, kernel, facts):
    """The unit of a kernel's work, and the number of units of all launches."""
    tensor = sum(facts["body_tensor"].values())
    if tensor and not re.match(r"mul_mat_(half|mma)", entry):
        return "mma", 32 * tensor
    # A layer has several products of different sizes.
    unit = "element" if case.startswith(LAYER) else next(unit for pattern, unit in UNITS if re.match(pattern, entry))
    products = counted["ops"] / 2 * kernel["launches"]
    if unit == "weight":
        return unit, products / columns(case)
    if unit == "multiply-add":
        return unit, products
    return unit, kernel["output_elements"]


def figures(case, counted, entry, kernel, compiled, target):
    """All figures of a row."""
    function, used = compiled
    gpu = model.GPUS[target]
    facts = sass.facts(function, decode_lines(kernel["lines"]))
    if facts["unknown"]:
        unknown = ", ".join(facts["unknown"])
        raise build_ptx.Failure(f"{entry} for sm_{target}: add {unknown} to a pipe in scripts/roofline_sass.py")
    unit, units = work(case, counted, entry, kernel, facts)
    each = lambda count: round(32 * count / units, 4)
    held = model.occupancy(gpu, kernel, used)
    threads = kernel["threads"] // kernel["blocks"]
    traffic = {side: kernel.get(side, {}) for side in ("global_read", "global_written")}
    both = lambda field: sum(side.get(field, 0) for side in traffic.values())
    requests, sectors, moved = both("requests"), both("sectors"), both("bytes")
    distinct = kernel.get("global_read_distinct_bytes", 0) + kernel.get("global_written_distinct_bytes", 0)
    time, bound = model.seconds(target, kernel, facts, held)
    return {
        "unit": unit,
        "main": "loop" if facts["loop"] else "body",
        "instructions_per_unit": each(facts["executed"]),
        "pipes_per_unit": {pipe: each(count) for pipe, count in facts["pipes"].items()},
        "all_instructions_per_unit": each(facts["body_executed"]),
        "per_pass": facts["per_pass"],
        "loads_per_pass": facts["loads"],
        "bytes_in_flight_per_sm": round(facts["load_bytes_at_a_time"] * threads * held["blocks_per_sm"]),
        "registers": used.registers,
        "spill_bytes": used.spill_bytes,
        "shared_bytes": used.shared_bytes,
        **held,
        "emulator": {
            "launches": kernel["launches"],
            "blocks": kernel["blocks"],
            "threads_per_block": threads,
            "warp_instructions": kernel["warp_instructions"],
            "sectors_per_request": round(sectors / max(requests, 1), 3),
            "moved_per_distinct_byte": round(moved / max(distinct, 1), 3),
            "distinct_bytes": distinct,
            "shared_passes_per_unit": each(kernel.get("shared_passes", 0)),
            "bank_conflicts": kernel.get("bank_conflicts", 0),
            "l2_bytes_per_unit": round(model.l2_bytes(kernel) / units * (32 if unit == "mma" else 1), 3),
            "barriers_per_warp": round(kernel["barriers"] / (kernel["blocks"] * math.ceil(threads / 32)), 3),
        },
        "model": {"us": round(time * 1e6, 2), "bound": bound, "l2_share": round(model.l2_share(target, kernel, time), 3)},
    }
