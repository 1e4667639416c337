"""Implementation of scripts/gpu.sh run. Needs only Python 3.9 with its standard library, and a kit created by scripts/gpu.sh pack."""

import argparse
import datetime
import importlib.util
import json
import lzma
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nvidia_smi

# The parts in their order, what a machine may not have time for last, with the time limit of each in seconds: each is below nine
# minutes, all together below 27.
LIMITS = {"token": 150, "sweep": 300, "ops": 120, "bench": 270, "probes": 100, "sanitizer": 520, "models": 140}
# compute-sanitizer slows kernels down a hundredfold, so it gets a share of the cases of each family. The sweep itself ends after
# SOFT seconds, because a killed sanitizer reports nothing; HARD is the limit if it does not.
FAMILIES = ("flash_attn", "mul_mat", "rows", "sort", "norm")
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
SOFT, HARD, EVERY = 22, 60, 4
MODEL_TYPES = ("f32", "f16", "q4_0", "q4_k_m")


def run_to_file(command, log, seconds, environment):
    """The exit status, or what went wrong. The program gets a process group of its own: compute-sanitizer starts others, which
    would use the GPU during the next measurement if they outlived it."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        pass
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(10)
        return f"killed after {seconds:.0f} s"
    except subprocess.TimeoutExpired:
        # It waits in the driver, which SIGKILL does not interrupt.
        return f"killed after {seconds:.0f} s, but it does not end"


def left_out(name, why):
    print(f"{name}: left out, {why}", flush=True)
    return {"name": name, "status": "left out", "seconds": 0, "why": why}


def unpack(kit, folder):
    """Unpacks the programs of a kit. They are compressed because all of them together are too large for some transfers."""
    for packed in (kit / "bin").iterdir():
        program = folder / packed.name.removesuffix(".xz")
        with lzma.open(packed) if packed.suffix == ".xz" else packed.open("rb") as source, program.open("wb") as target:
            shutil.copyfileobj(source, target)
        program.chmod(0o755)
    return folder


class Run:
    """The machine and the options that all parts use."""

    def __init__(self, kit, programs, arguments):
        device = str(arguments.device)
        self.kit, self.programs, self.device, self.arguments = kit, programs, device, arguments
        arguments.out.mkdir(parents=True, exist_ok=True)
        self.unfinished = Path(tempfile.mkdtemp(prefix="unfinished-", dir=arguments.out))
        listed = self.run("list devices", [programs / "rpc-server", "--list-devices"], 60)["output"]
        name = re.compile(rf"\s*CUDA{re.escape(device)}\b")
        gpu = next((line for line in listed.splitlines() if name.match(line)), None)
        if gpu is None:
            shutil.rmtree(self.unfinished)
            sys.exit(f"gpu.py: the server lists no GPU {device}:\n{listed}")
        self.gpu = gpu.split(":", 1)[1].strip()
        capability = re.search(r"capability (\d+)\.(\d)", self.gpu)
        self.capability = int(capability[1] + capability[2]) if capability else 0
        pci = re.search(r"PCI (\S+?),", self.gpu)
        self.pci = pci[1] if pci else None
        # The tests use the first GPU that is visible. Numbers count the GPUs that are visible to this script.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        first = visible.split(",")[arguments.device] if visible else device
        self.real = {"FANOUT_TEST_GPU": "1", "CUDA_VISIBLE_DEVICES": first}

    def run(self, name, command, seconds, environment=None):
        """Runs a program; returns its row in the report, with the whole output as `output`.

        Until the report is complete, the folder `unfinished` has the output, and the row once the program has ended: what was
        measured is kept if this script is killed.
        """
        command = list(map(str, command))
        began = time.monotonic()
        with (self.unfinished / f"{re.sub('[^A-Za-z0-9]+', '-', name)}.log").open("w+b") as log:
            try:
                status = run_to_file(command, log, max(1, seconds), {**os.environ, **(environment or {})})
            except OSError as error:
                status = f"not started: {error}"
            log.seek(0)
            output = log.read().decode(errors="replace")
        seconds = round(time.monotonic() - began, 1)
        row = {"name": name, "command": " ".join(command), "status": status, "seconds": seconds}
        with (self.unfinished / "rows.json").open("a") as rows:
            print(json.dumps(row), file=rows)
        print(f"{name}: {'ok' if status == 0 else f'FAILED ({status})'} in {seconds:.0f} s", flush=True)
        if status != 0:
            print("\n".join(output.splitlines()[-30:]), flush=True)
        return {**row, "tail": output.splitlines()[-12 if status == 0 else -200 :], "output": output}


def ops(r):
    """The op tests: every op against its formula."""
    return {"rows": [r.run("op tests", [r.programs / "ops"], LIMITS["ops"], r.real)]}


def json_lines(output, key):
    """The objects in lines of JSON that have a key; all objects without one."""
    found = []
    for line in output.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and (not key or key in row):
            found.append(row)
    return found


def sweep_row(row):
    """A row of a sweep with the lines of its families. A sweep that compared nothing, because a test was renamed, has failed."""
    families = json_lines(row["output"], "family")
    if row["status"] == 0 and not any(family["compared"] for family in families):
        row = {**row, "status": "compared nothing"}
    return {**row, "families": families}


def sweep(r):
    """Every variant of every kernel, for each PTX target, against the CPU."""
    command = [r.programs / "cuda", "sweep", "--nocapture", "--test-threads", "1"]
    return {"rows": [sweep_row(r.run("sweep", command, LIMITS["sweep"], r.real))]}


def refusal_of(r, program):
    """Why compute-sanitizer does not work here, if so: some machines forbid debuggers of the GPU."""
    probe = r.run("sanitizer probe", [program, "--error-exitcode", "9", r.programs / "rpc-server", "--list-devices"], HARD)
    if probe["status"] == 0:
        return None
    errors = [line.strip("= ") for line in probe["output"].splitlines() if "rror" in line]
    return f"compute-sanitizer does not work here: {(errors or probe['tail'] or [probe['status']])[0]}"


def sanitizer(r):
    """compute-sanitizer, one tool and one family at a time."""
    program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if program is None:
        return {"rows": [left_out("sanitizer", "compute-sanitizer is not installed")]}
    refused = refusal_of(r, program)
    if refused:
        return {"rows": [left_out("sanitizer", refused)]}
    # The kernels of the newest target: those of older targets are used where it has none.
    target = "8_0" if r.capability >= 80 else "7_5"
    rows, until = [], time.monotonic() + LIMITS["sanitizer"]
    for tool in r.arguments.tools:
        for family in r.arguments.families:
            left = until - time.monotonic()
            if left < SOFT + 8:
                rows.append({**left_out(f"{tool} {family}", "no time left"), "tool": tool, "family": family})
                continue
            limits = {"FANOUT_TEST_FAMILY": family, "FANOUT_TEST_EVERY": str(EVERY), "FANOUT_TEST_SECONDS": str(SOFT)}
            test = [r.programs / "cuda", f"sweep::every_variant_on_capability_{target}", "--exact", "--nocapture"]
            command = [program, "--tool", tool, "--error-exitcode", "9", *test]
            row = sweep_row(r.run(f"{tool} {family}", command, min(HARD, left), {**r.real, **limits}))
            summary = [line.strip("= ") for line in row["output"].splitlines() if "SUMMARY" in line]
            rows.append({**row, "tool": tool, "family": family, "summary": summary})
    return {"rows": rows}


def kernel_bench(r, name, options):
    """The row of a run of kernel-bench, and the lines of its JSON."""
    file = r.unfinished / f"{name}.json"
    row = r.run(name, [r.programs / "kernel-bench", "--device", r.device, "--json", file, *options], LIMITS[name])
    return row, json_lines(file.read_text(), "") if file.exists() else []


def token(r):
    """All layers of models: steps of decoding and prompts, with programmatic launch and without it."""
    row, lines = kernel_bench(r, "token", ["--models", "--seconds", "0.5"])
    steps = [line for line in lines if "tokens" in line]
    if row["status"] == 0 and not steps:
        row["status"] = "measured nothing"
    return {"rows": [row], "steps": steps}


def bench(r):
    """kernel-bench: the time of each kernel, and its share of the roofline."""
    table = r.unfinished / "bench.md"
    row, lines = kernel_bench(r, "bench", ["--filter", r.arguments.bench, "--markdown", table])
    # kernel-bench writes the table when it ends; until then, it prints the rows.
    table = table.read_text() if table.exists() else f"```text\n{row['output']}\n```\n"
    return {"rows": [row], "kernels": lines, "table": table}


def probes(r):
    """gpu-probes, with an empty cache of compiled kernels; then once more the probe of modules, with the cache filled."""
    program, rows, answers = r.programs / "gpu-probes", [], []
    with tempfile.TemporaryDirectory() as cache:
        for name, options, share in (("probes", (), 0.8), ("probes, warm cache", ("--probes", "modules"), 0.2)):
            command = [program, "--device", r.device, *options]
            row = r.run(name, command, share * LIMITS["probes"], {"CUDA_CACHE_PATH": cache})
            rows.append(row)
            for line in json_lines(row["output"], "probe"):
                answers.append({**line, "probe": line["probe"] + name.removeprefix("probes")})
    return {"rows": rows, "answers": answers}


def models(r):
    """A model of each type on the GPU and on the client's CPU: NMSE of the logits, tokens, speed."""
    if not all(importlib.util.find_spec(module) for module in ("llama_cpp", "numpy", "gguf")):
        return {"rows": [left_out("models", "llama-cpp-python with numpy and gguf is not installed")]}
    rows, until = [], time.monotonic() + LIMITS["models"]
    with tempfile.TemporaryDirectory() as folder:
        for size in filter(None, r.arguments.models.split(",")):
            for kind in MODEL_TYPES if size == "tiny" else ("q4_k_m",):
                name = f"model {size} {kind}"
                if time.monotonic() > until - 10:
                    rows.append(left_out(name, "no time left"))
                    continue
                model = Path(folder) / f"{size}-{kind}.gguf"
                make = [sys.executable, r.kit / "interop/make_model.py", model, "--size", size, "--type", kind]
                made = r.run(f"make {name}", make, until - time.monotonic())
                rows.append(serve_and_ask(r, model, name, until) if made["status"] == 0 else made)
                model.unlink(missing_ok=True)
    return {"rows": rows}


def serve_and_ask(r, model, name, until):
    """Measures a server on the GPU. The server writes its output to a file, because an unread pipe would block it."""
    log = model.with_suffix(".log")
    with log.open("wb") as said:
        server = subprocess.Popen(
            [r.programs / "rpc-server", "--device", r.device, "--listen", "0=7"], stdout=said, stderr=said
        )
        try:
            at = None
            while at is None:
                if server.poll() is not None or time.monotonic() > until:
                    tail = log.read_text(errors="replace").splitlines()[-12:]
                    return {"name": name, "status": "the server did not start", "seconds": 0, "tail": tail}
                time.sleep(0.05)
                at = re.search(r"^listening on (\S+)\s", log.read_text(errors="replace"), re.MULTILINE)
            ask = [sys.executable, r.kit / "interop/llama_client.py", model, "--rpc", at[1], "--compare"]
            row = r.run(name, ask, until - time.monotonic())
            lines = [line for line in row["output"].splitlines() if line.startswith("{")]
            return {**row, "result": json.loads(lines[-1]) if lines else None}
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(timeout=30)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


PARTS = {
    "token": token,
    "sweep": sweep,
    "ops": ops,
    "bench": bench,
    "probes": probes,
    "sanitizer": sanitizer,
    "models": models,
}


def state_cell(part):
    """Clock, temperature and causes of low clocks before and after a part, for the table."""

    def one(state):
        reasons = state["clocks lowered by"]
        reasons = ", ".join(reasons) or "nothing" if isinstance(reasons, list) else reasons
        return f"{state['sm clock']}, {state['temperature']}, lowered by {reasons}"

    return f"{one(part['before'])} → {one(part['after'])}"


def cell(text):
    """A text within one cell of a table."""
    return re.sub(r"\s+", " ", str(text).replace("|", "/")).strip()


def markdown(report):
    """The report for people."""
    lines = [f"# {report['gpu']}", "", f"{report['date']}, `{report['command']}`", ""]
    lines += ["| part | result | seconds |", "|---|---|---|"]
    for part in report["parts"].values():
        for row in part["rows"]:
            result = "ok" if row["status"] == 0 else row["status"]
            notes = row.get("summary") or ([row["why"]] if "why" in row else [])
            if "tool" in row and "families" in row:
                early = any(family.get("ended_early") for family in row["families"])
                notes = [*notes, f"{sum(family['compared'] for family in row['families'])} compared"]
                notes += ["ended early by its time limit"] if early else []
            if row.get("result"):
                notes = [json.dumps({key: value for key, value in row["result"].items() if key != "tokens"})]
            lines.append(f"| {row['name']} | {cell('; '.join([str(result), *notes]))} | {row['seconds']:.0f} |")
    lines += ["", "| part | SM clock, temperature and causes of low clocks, before → after |", "|---|---|"]
    lines += [f"| {name} | {state_cell(part)} |" for name, part in report["parts"].items()]
    lines += ["", "## Machine", "", "| property | value |", "|---|---|"]
    for name, value in report["facts"].items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {text}" for key, text in value.items() if text not in ("0", "N/A")) or "none"
        lines.append(f"| {name} | {cell('; '.join(value) if isinstance(value, list) else value)} |")
    families = [family for row in report["parts"].get("sweep", {"rows": []})["rows"] for family in row["families"]]
    if families:
        lines += ["", "## Sweep", "", "| target | family | compared | failed | left out | worst NMSE | its bound | case |"]
        lines += ["|---|---|---|---|---|---|---|---|"]
        for row in families:
            worst = row["worst"] or {"nmse": "", "bound": "", "case": ""}
            counts = f"{row['compared']} | {row['failed']} | {row['left_out']}"
            worst = f"{worst['nmse']} | {worst['bound']} | {cell(worst['case'])}"
            lines.append(f"| {row['capability']} | {row['family']} | {counts} | {worst} |")
            lines += [f"| | | | | | | | FAILED: {cell(failure)} |" for failure in row["first_failures"]]
    if "token" in report["parts"]:
        lines += ["", "## Models", "", "| type | tokens | layers | us | us without programmatic launch | floor, us | tok/s | same bytes |"]
        lines += ["|---|---|---|---|---|---|---|---|"]
        for row in report["parts"]["token"]["steps"]:
            times = f"{row['programmatic_us']:.0f} | {row['plain_us']:.0f} | {row['floor_us'] or 0:.0f}"
            of = f"{row['model']}, {row['shape'].split(', ')[-1]} | {row['tokens']} | {row['layers']}"
            lines.append(f"| {of} | {times} | {row['tokens_per_s']:.0f} | {'yes' if row['same_bytes'] else 'NO'} |")
    if "probes" in report["parts"]:
        lines += ["", "## Probes", "", "| probe | answer |", "|---|---|"]
        for line in report["parts"]["probes"]["answers"]:
            lines.append(f"| {line['probe']} | {cell(json.dumps(line.get('answer', line.get('error'))))} |")
    if "bench" in report["parts"]:
        lines += ["", "## Kernels", "", report["parts"]["bench"]["table"]]
    return "\n".join(lines) + "\n"


def listed(allowed):
    """The parser of a comma-separated list of words."""

    def parse(text):
        words = text.split(",")
        unknown = [word for word in words if word not in allowed]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(allowed)}")
        return words

    return parse


def main():
    limits = ", ".join(f"{name} {seconds} s" for name, seconds in LIMITS.items())
    p = argparse.ArgumentParser(prog="gpu.sh run", epilog=f"Time limits: {limits}.")
    p.add_argument("--kit", type=Path, required=True, help=argparse.SUPPRESS)
    p.add_argument("--device", type=int, default=0, help="number of the GPU, as the driver counts")
    p.add_argument(
        "--parts", type=listed(PARTS), default=list(PARTS), metavar="LIST", help=f"of {','.join(PARTS)} (default: all)"
    )
    p.add_argument("--tools", type=listed(TOOLS), default=TOOLS, metavar="LIST", help="tools of compute-sanitizer")
    p.add_argument(
        "--families", type=listed(FAMILIES), default=FAMILIES, metavar="LIST", help="op families under compute-sanitizer"
    )
    p.add_argument("--models", default="tiny,1b", help="sizes of models, comma-separated")
    p.add_argument("--bench", default="", help="only kernels whose `op type shape` contains this")
    p.add_argument("--out", type=Path, default=Path("bench/results"), help="folder of the results")
    a = p.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(Run(a.kit.resolve(), unpack(a.kit.resolve(), Path(folder)), a))


def measure(r):
    """Runs the parts and writes the report; exits with status 1 if anything failed."""
    a = r.arguments
    date = datetime.date.today().isoformat()
    report = {
        "date": date,
        "gpu": r.gpu,
        "command": "scripts/gpu.sh run " + " ".join(sys.argv[3:]),
        "facts": nvidia_smi.facts(r.pci),
        "parts": {},
    }
    print(f"{r.gpu}; driver {report['facts']['driver']}", flush=True)
    stem = f"{date}-{re.sub(r'[^A-Za-z0-9]+', '-', r.gpu.split(',')[0]).strip('-')}"
    # A run of some parts has a name of its own, so that it does not replace another run of the day.
    stem += "".join(f"-{name}" for name in a.parts) if a.parts != list(PARTS) else ""
    failed = []
    for name in a.parts:
        before = nvidia_smi.state(r.pci)
        part = {**PARTS[name](r), "before": before, "after": nvidia_smi.state(r.pci)}
        for row in part["rows"]:
            row.pop("output", None)
        failed += [row["name"] for row in part["rows"] if row["status"] not in (0, "left out")]
        report["parts"][name] = part
        # After each part: what has been measured is kept if the machine goes away.
        (a.out / f"{stem}.json").write_text(json.dumps(report, indent=1) + "\n")
        (a.out / f"{stem}.md").write_text(markdown(report))
    shutil.rmtree(r.unfinished)
    print(f"wrote {a.out / stem}.json and .md")
    if failed:
        sys.exit(f"gpu.py: failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
