"""The static roofline of the CUDA kernels: what limits each kernel, counted without a GPU; the work behind scripts/roofline.sh.

The canonical cases are in bench/cases/canonical.rs: products with 1 to 512 columns of a 4096 x 4096 matrix for each type, the
other kernels of a decoder, and a layer of a llama model. A row of the table is a case, a kernel that it launches, and a target.

  machine code  of the committed PTX, by a pinned ptxas and nvdisasm (scripts/roofline_sass.py), for sm_80, 86, 89, 90 and 120
  counts        of the emulated GPU, an H200 (bench/roofline-counts.rs): executions of each PTX line, sectors, passes over
                shared memory, blocks; recorded in bench/roofline/counts.json, because they change only with the PTX, the grids
                and the cases
  time          modelled from both (scripts/roofline_model.py), as information; it is not compared

The PTX line of each machine instruction gives its number of executions. The main loop is the shortest loop that executes at
least a quarter of the kernel's machine instructions; without one, the whole body counts. Grids are those chosen for 132
multiprocessors. For a target that another PTX file of the kernel serves than the counted one, a row has no figures.
"""

import argparse
import collections
import concurrent.futures
import functools
import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys

import build_ptx
import roofline_figures
import roofline_model as model
import roofline_sass as sass

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDER = ROOT / "bench/roofline"
PTX = ROOT / "kernels/ptx"
TOLERANCE = 0.02
# The emulated GPU of the counts.
CAPABILITY, MULTIPROCESSORS = "9.0", 132
# Layers of the 8B model whose layer is a canonical case.
LAYERS = 32
LAYER = roofline_figures.LAYER
# Columns of the table; docs/cuda.md explains them.
COLUMNS = (
    "case", "kernel", "unit", "main", "instr", "ggml", "all", "alu", "fma", "heavy", "lsu", "xu", "tensor", "stalls", "waits",
    "loads", "in flight KB", "regs", "spills", "smem", "warps", "waves", "sectors", "moved", "L2 bytes", "passes", "conflicts",
    "barriers", "us", "bound", "L2 share",
)
Failure = build_ptx.Failure


# ---- the emulator's counts


def encode_lines(lines):
    """Shortens {line: count} to runs of neighbouring lines with the same count: "68-79:512 80:4"."""
    runs = []
    for line, count in sorted((int(line), count) for line, count in lines.items()):
        if runs and runs[-1][1] == line - 1 and runs[-1][2] == count:
            runs[-1][1] = line
        else:
            runs.append([line, line, count])
    return " ".join(f"{a}:{count}" if a == b else f"{a}-{b}:{count}" for a, b, count in runs)


@functools.lru_cache(None)
def files_of_entries():
    """{entry: {target: PTX file}}"""
    found = collections.defaultdict(dict)
    for path in sorted(PTX.glob("*.ptx")):
        target = int(path.suffixes[-2].removeprefix(".sm_"))
        for entry in re.findall(r"^\.visible \.entry (\w+)\(", path.read_text(), re.M):
            found[entry][target] = path
    return found


def file_for(entry, target):
    """The PTX file from which a GPU with this target gets an entry: that of the highest target that it executes."""
    files = {t: path for t, path in files_of_entries().get(entry, {}).items() if t <= target}
    return files[max(files)] if files else None


@functools.lru_cache(None)
def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def count_on_emulator(only=()):
    """Runs the canonical cases on the emulated GPU, or those whose name contains one of the given texts."""
    built = os.environ.get("FANOUT_BUILT")
    emulate = [ROOT / "scripts/emulate.sh", "-c", CAPABILITY, *([] if built else ["--debug"])]
    program = pathlib.Path(built or "").absolute() / "roofline-counts"
    if not (built and program.is_file()):
        command = ["cargo", "build", "--locked", "-p", "fanout-bench", "--bin", "roofline-counts"]
        if subprocess.run(command, cwd=ROOT).returncode != 0:
            raise Failure("cargo could not build roofline-counts, which runs the kernels on the emulated GPU")
        program = ROOT / os.environ.get("CARGO_TARGET_DIR", "target") / "debug/roofline-counts"
    environment = os.environ | {"CUDAEMU_COUNTS": "on", "CUDAEMU_SMS": str(MULTIPROCESSORS)}
    print("roofline: running the canonical cases on the emulated GPU (minutes)", file=sys.stderr)
    done = subprocess.run([*emulate, program, *only], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise Failure(f"roofline-counts failed with status {done.returncode}; its message is above")
    cases = json.loads(done.stdout)
    for case in cases.values():
        for entry, kernel in case["kernels"].items():
            path = file_for(entry, int(float(CAPABILITY) * 10))
            lines = kernel.pop("warp_instructions_by_line")
            kernel.pop("classes", None)
            kernel |= {"ptx": path.name, "sha256": digest(path), "barriers": barriers(path, lines), "lines": encode_lines(lines)}
    return cases


def barriers(path, lines):
    """Executions of block barriers by warps."""
    text = path.read_text().splitlines()
    return sum(count for line, count in lines.items() if re.search(r"\bbar(rier)?\.(?!warp)", text[int(line) - 1]))


def recorded_counts():
    path = FOLDER / "counts.json"
    if not path.is_file():
        raise Failure(f"{path} does not exist: run scripts/roofline.sh --write")
    return json.loads(path.read_text())


def stale(cases):
    """Entries whose PTX has changed since they were counted."""
    return sorted({
        entry
        for case in cases.values()
        for entry, kernel in case["kernels"].items()
        if not (PTX / kernel["ptx"]).is_file() or digest(PTX / kernel["ptx"]) != kernel["sha256"]
    })


# ---- rows


@functools.lru_cache(None)
def tools():
    """Digest of the scripts that compute figures, of the table of rates, and of the versions of the tools."""
    scripts = [*(pathlib.Path(module.__file__) for module in (roofline_figures, sass, model)), model.RATES]
    return "".join([*map(digest, scripts), build_ptx.NVRTC, sass.NVDISASM])


def key_of(row, kernel, path, target):
    """Digest of a row's figures and of all that they depend on."""
    figures = {name: value for name, value in row.items() if name != "key"}
    text = json.dumps([figures, kernel, digest(path), target, tools()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def rows_of(cases, target, wanted, known):
    """{case | entry: figures} for a target. Rows of `known` are taken if what they depend on has not changed."""
    rows, jobs, seen = {}, [], set()
    for case, counted in cases.items():
        for entry, kernel in counted["kernels"].items():
            # mul_mat_quantize does the same in the products of each type: one row is enough.
            same = (entry, kernel["lines"], kernel["blocks"])
            if not wanted.search(f"{case} | {entry}") or (same in seen and not case.startswith(LAYER)):
                continue
            seen.add(same)
            path, row = file_for(entry, int(target)), known.get(f"{case} | {entry}")
            if path and row and row.get("key") == key_of(row, kernel, path, target):
                rows[f"{case} | {entry}"] = row
            else:
                jobs.append((case, counted, entry, kernel, path))
    entries = collections.defaultdict(set)
    for *_, entry, _, path in jobs:
        if path:
            entries[path].add(entry)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        compile_file = lambda pair: sass.compile_entries(pair[0], target, sorted(pair[1]))
        compiled = dict(zip(entries, pool.map(compile_file, entries.items())))
    for case, counted, entry, kernel, path in jobs:
        if path is None or path.name != kernel["ptx"]:
            reason = f"comes from another file than the counted {kernel['ptx']}"
            print(f"roofline: no figures of {entry} for sm_{target}: it {reason}", file=sys.stderr)
            continue
        row = roofline_figures.figures(case, counted, entry, kernel, compiled[path][entry], target)
        rows[f"{case} | {entry}"] = row | {"key": key_of(row, kernel, path, target)}
    return dict(sorted(rows.items()))


# ---- output


def table(target, rows, ggml):
    gpu = model.GPUS[target]
    text = [f"## sm_{target} ({gpu.name})\n"]
    text += ["| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
    for key, row in rows.items():
        if key.startswith(LAYER):
            continue
        case, entry = key.split(" | ")
        pipe = lambda name: f"{row['pipes_per_unit'].get(name, 0):.3g}"
        emulator = row["emulator"]
        loads = " ".join(f"{count:g}x{name}" for name, count in row["loads_per_pass"].items())
        cells = [
            case, entry, row["unit"], row["main"], f"{row['instructions_per_unit']:.3g}", str(ggml.get(entry.replace("_packed_", "_"), {}).get(target, "")),
            f"{row['all_instructions_per_unit']:.3g}", *map(pipe, ("alu", "fma", "fma_heavy", "lsu", "xu", "tensor")),
            f"{row['per_pass']['stall_cycles']:g}", f"{row['per_pass']['scoreboard_waits']:g}", loads,
            f"{row['bytes_in_flight_per_sm'] / 1024:.1f}",
            row["registers"], row["spill_bytes"], row["shared_bytes"], row["warps_per_sm"], f"{row['waves']:.2f}",
            f"{emulator['sectors_per_request']:.2f}", f"{emulator['moved_per_distinct_byte']:.2f}",
            f"{emulator['l2_bytes_per_unit']:.3g}", f"{emulator['shared_passes_per_unit']:.3g}", emulator["bank_conflicts"],
            f"{emulator['barriers_per_warp']:g}", f"{row['model']['us']:.1f}", row["model"]["bound"], f"{row['model']['l2_share']:.2f}",
        ]
        text.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(text) + "\n" + "".join(layers(target, rows))


def layers(target, rows):
    """Launches and modelled time of the layers."""
    gpu, found = model.GPUS[target], collections.defaultdict(list)
    for key, row in rows.items():
        if key.startswith(LAYER):
            found[key.split(" | ")[0]].append((key.split(" | ")[1], row))
    for case, kernels in found.items():
        launches = sum(row["emulator"]["launches"] for _, row in kernels)
        time = sum(row["model"]["us"] for _, row in kernels)
        # Each distinct byte crosses the memory bus once at least.
        roof = sum(row["emulator"]["distinct_bytes"] for _, row in kernels) / gpu.bytes_per_second * 1e6
        yield f"\n{case}: {launches} launches, {time:.1f} us by the model, {100 * roof / time:.0f} % of the memory roof; "
        if gpu.dependent_launch:
            dependent = time - launches * (model.LAUNCH_SECONDS - model.DEPENDENT_LAUNCH_SECONDS) * 1e6
            yield f"with programmatic dependent launch {dependent:.1f} us, {100 * roof / dependent:.0f} %; "
        yield f"{LAYERS} layers {LAYERS * launches} launches, {LAYERS * time / 1e3:.2f} ms.\n\n"
        yield "| kernel | launches | model us | bound |\n| --- | --- | --- | --- |\n"
        for entry, row in sorted(kernels, key=lambda pair: -pair[1]["model"]["us"]):
            yield f"| {entry} | {row['emulator']['launches']} | {row['model']['us']:.1f} | {row['model']['bound']} |\n"


def ggml_figures():
    """{our entry: {target: instructions per weight of ggml-cuda's kernel}}"""
    path = FOLDER / "ggml.json"
    return json.loads(path.read_text())["kernels"] if path.is_file() else {}


def flat(value, name=""):
    """The compared figures of a row by name: all but the model, which is information."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if name or key not in ("model", "key"):
                yield from flat(inner, f"{name}.{key}" if name else key)
    else:
        yield name, value


def differs(old, new):
    numbers = isinstance(old, (int, float)) and isinstance(new, (int, float))
    return abs(new - old) > TOLERANCE * abs(old) + 1e-9 if numbers else old != new


def compare(target, old, new, whole):
    """Lines that name each difference between recorded and new figures."""
    for key in [*new, *(key for key in old if whole and key not in new)]:
        if key not in old or key not in new:
            yield f"sm_{target}: {key}: " + ("not recorded" if key not in old else "recorded, but no longer found")
            continue
        before, after = dict(flat(old[key])), dict(flat(new[key]))
        for name in sorted({*before, *after}):
            a, b = before.get(name, 0), after.get(name, 0)
            if differs(a, b):
                yield f"sm_{target}: {key}: {name}: recorded {a}, now {b}"


def recorded(target):
    path = FOLDER / f"sm_{target}.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def dump(value):
    """JSON with a row per line, so that a difference shows the kernel."""
    return "{\n" + ",\n".join(f"{json.dumps(key)}: {json.dumps(row)}" for key, row in value.items()) + "\n}\n"


def fail_if(differences, what):
    if differences:
        shown = differences[:40] + ([f"... {len(differences) - 40} more"] if len(differences) > 40 else [])
        advice = "If that is intended, run scripts/roofline.sh --write, and explain worse figures in the commit message"
        raise Failure("\n".join(shown) + f"\n{len(differences)} {what}. {advice}")


def arguments():
    parser = argparse.ArgumentParser(
        prog="roofline.sh",
        description="Prints the static roofline of the CUDA kernels.",
        epilog=__doc__.split("\n\n", 1)[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--write", action="store_true", help="count again on the emulated GPU, and renew bench/roofline")
    group.add_argument("--write-static", action="store_true", help="renew all of bench/roofline but the emulator's counts")
    group.add_argument("--check", action="store_true", help="fail if a figure differs from the recorded one by more than 2 %%")
    group.add_argument("--check-counts", action="store_true", help="fail if the emulator's counts differ from the recorded ones")
    group.add_argument("--compare", nargs=2, metavar=("OLD", "NEW"), help="only compare two files as --check does")
    parser.add_argument("--cases", metavar="TEXT", action="append", default=[], help="with --write: count only these cases")
    parser.add_argument("--filter", metavar="REGEX", default="", help="only rows whose `case | kernel` matches")
    parser.add_argument("--target", choices=model.GPUS, action="append", help="only this target (default: all)")
    parser.add_argument("--all", action="store_true", help="compile all kernels, also those whose recorded row is up to date")
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")
    options = parser.parse_args()
    if (options.write or options.write_static) and (options.filter or options.target):
        parser.error("--write renews all rows: leave out --filter and --target")
    if options.cases and not options.write:
        parser.error("--cases goes with --write")
    return options


def main():
    options = arguments()
    if options.compare:
        old, new = (json.loads(pathlib.Path(path).read_text()) for path in options.compare)
        fail_if(list(compare("?", old, new, True)), "figures differ by more than 2 %")
        return
    if options.check_counts:
        new, old = count_on_emulator(), recorded_counts()
        names = sorted(case for case in {*old, *new} if old.get(case) != new.get(case))
        fail_if([f"{case}: the counts differ from bench/roofline/counts.json" for case in names], "cases differ")
        return
    if options.write:
        cases = count_on_emulator(options.cases)
        if options.cases:
            cases = dict(sorted((recorded_counts() | cases).items()))
        FOLDER.mkdir(parents=True, exist_ok=True)
        (FOLDER / "counts.json").write_text(dump(cases))
    cases = recorded_counts()
    if changed := stale(cases):
        raise Failure(f"the PTX of {', '.join(changed)} has changed since it was counted: run scripts/roofline.sh --write")
    wanted = re.compile(options.filter)
    known = lambda target: {} if options.all else recorded(target)
    rows = {target: rows_of(cases, target, wanted, known(target)) for target in options.target or model.GPUS}
    if not any(rows.values()):
        raise Failure(f"no row matches `{options.filter}`: scripts/roofline.sh without --filter prints all rows")
    if options.check:
        pairs = [(target, recorded(target), new) for target, new in rows.items()]
        fail_if([line for pair in pairs for line in compare(*pair, not options.filter)], "figures differ by more than 2 %")
        print(f"roofline: {sum(map(len, rows.values()))} rows equal the recorded ones")
        return
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    text = "\n".join(table(target, found, ggml_figures()) for target, found in rows.items())
    if options.write or options.write_static:
        for target, found in rows.items():
            (FOLDER / f"sm_{target}.json").write_text(dump(found))
        head = "# Static roofline\n\nMade by `scripts/roofline.sh --write`; docs/cuda.md explains the columns.\n\n"
        (FOLDER / "README.md").write_text(head + text)
        print(f"roofline: wrote {FOLDER}")
        return
    print(text)


if __name__ == "__main__":
    try:
        main()
    except Failure as failure:
        print(f"roofline: {failure}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:  # `roofline.sh | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
