"""Implementation of scripts/gpu.sh run. Needs only Python 3.9 with its standard library, and a kit created by scripts/gpu.sh pack."""

import argparse
import datetime
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# Time limits in seconds: for each part, and for each tool of the sanitizer. Less than nine minutes in total.
OPS, SANITIZER, BENCH, MODELS = 120, 40, 150, 140
TOOLS = ("memcheck", "racecheck", "synccheck")
# The op tests that run under the sanitizer, which slows kernels down a hundredfold.
SAMPLE = "norm"
MODEL_TYPES = ("f32", "f16", "q4_0", "q4_k_m")


class Part:
    """Result of one part: its command, exit status, and output."""

    def __init__(self, name, command, seconds, environment=None):
        self.name, self.command = name, " ".join(map(str, command))
        began = time.monotonic()
        try:
            done = subprocess.run(
                list(map(str, command)),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=seconds,
                env={**os.environ, **(environment or {})},
            )
            self.status, self.output = done.returncode, done.stdout
        except subprocess.TimeoutExpired as late:
            self.status, self.output = "timeout", (late.stdout or b"").decode(errors="replace")
        self.seconds = time.monotonic() - began
        print(f"{name}: {'ok' if self.ok() else f'FAILED ({self.status})'} in {self.seconds:.0f} s", flush=True)
        if not self.ok():
            print("\n".join(self.output.splitlines()[-30:]), flush=True)

    def ok(self):
        return self.status == 0

    def json(self):
        tail = self.output.splitlines()[-12:]
        return {"part": self.name, "command": self.command, "status": self.status, "seconds": round(self.seconds, 1), "tail": tail}


def device_facts(kit, device):
    """Returns the GPU as the server lists it, and the driver's version if nvidia-smi reports it."""
    listed = subprocess.run([kit / "bin/rpc-server", "--list-devices"], capture_output=True, text=True)
    name = re.compile(rf"\s*CUDA{re.escape(device)}\b")
    gpu = next((line for line in listed.stdout.splitlines() if name.match(line)), None)
    if gpu is None:
        sys.exit(f"gpu.py: the server lists no GPU {device}:\n{listed.stdout}{listed.stderr}")
    driver = "unknown"
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True).stdout.strip().splitlines()[:1]
        driver = driver[0] if driver else "unknown"
    return gpu.split(":", 1)[1].strip(), driver


def end_to_end(kit, device, a):
    """Runs a model of each type on the GPU and on the client's CPU: NMSE of the logits, tokens, speed."""
    rows, left = [], time.monotonic() + MODELS
    with tempfile.TemporaryDirectory() as folder:
        for size in a.models.split(","):
            for kind in MODEL_TYPES if size == "tiny" else ("q4_k_m",):
                if time.monotonic() > left - 10:
                    rows.append({"model": f"{size} {kind}", "skipped": "no time left"})
                    continue
                model = Path(folder) / f"{size}-{kind}.gguf"
                made = Part(f"make {size} {kind}", [sys.executable, kit / "interop/make_model.py", model, "--size", size, "--type", kind], left - time.monotonic())
                if made.ok():
                    rows.append(serve_and_ask(kit, device, model, f"{size} {kind}", left))
                else:
                    rows.append({"model": f"{size} {kind}", "ok": False, "error": "it was not made"})
                model.unlink(missing_ok=True)
    return rows


def serve_and_ask(kit, device, model, name, left):
    """Measures a server on the GPU until `left`. The server writes its output to a file, because an unread pipe would block it."""
    log = model.with_suffix(".log")
    with log.open("wb") as said:
        server = subprocess.Popen([kit / "bin/rpc-server", "--device", device, "--listen", "0=7"], stdout=said, stderr=said)
        try:
            at = None
            while at is None:
                if server.poll() is not None or time.monotonic() > left:
                    text = log.read_text(errors="replace")[-2000:]
                    return {"model": name, "ok": False, "error": "the server did not start", "said": text}
                time.sleep(0.05)
                at = re.search(r"^listening on (\S+)\s", log.read_text(errors="replace"), re.MULTILINE)
            ask = [sys.executable, kit / "interop/llama_client.py", model, "--rpc", at[1], "--compare"]
            done = Part(f"model {name}", ask, max(1, left - time.monotonic()))
            lines = [line for line in done.output.splitlines() if line.startswith("{")]
            return {"model": name, **(json.loads(lines[-1]) if lines else {}), "ok": done.ok()}
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(timeout=30)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def main():
    p = argparse.ArgumentParser(prog="gpu.sh run")
    p.add_argument("--kit", type=Path, required=True, help=argparse.SUPPRESS)
    p.add_argument("--device", default="0", help="number of the GPU, as the driver counts")
    p.add_argument("--models", default="tiny,1b", help="sizes of models, comma-separated; may be empty")
    p.add_argument("--bench", default="", help="only kernels whose `op type shape` contains this")
    p.add_argument("--out", type=Path, default=Path("bench/results"), help="folder of the results")
    a = p.parse_args()
    kit = a.kit.resolve()
    gpu, driver = device_facts(kit, a.device)
    print(f"{gpu}; driver {driver}", flush=True)
    real = {"FANOUT_TEST_GPU": "1", "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", a.device)}
    parts = [Part("op tests", [kit / "bin/ops"], OPS, real)]
    sanitizer = shutil.which("compute-sanitizer")
    for tool in TOOLS if sanitizer else ():
        command = [sanitizer, "--tool", tool, "--error-exitcode", "9", kit / "bin/ops", SAMPLE]
        parts.append(Part(tool, command, SANITIZER, real))
    if not sanitizer:
        print("compute-sanitizer: not installed on this machine", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("bench.json", "bench.md")]
        bench = [kit / "bin/kernel-bench", "--device", a.device, "--filter", a.bench, "--json", files[0], "--markdown", files[1]]
        parts.append(Part("kernel-bench", bench, BENCH))
        kernels = json.loads(files[0].read_text()) if files[0].exists() else None
        table = files[1].read_text() if files[1].exists() else "kernel-bench wrote nothing\n"
    models = []
    if a.models and all(importlib.util.find_spec(m) for m in ("llama_cpp", "numpy", "gguf")):
        models = end_to_end(kit, a.device, a)
    elif a.models:
        print("models: llama-cpp-python with numpy and gguf is not installed on this machine", flush=True)
    date = datetime.date.today().isoformat()
    everything = {
        "date": date,
        "gpu": gpu,
        "driver": driver,
        "command": "scripts/gpu.sh run " + " ".join(sys.argv[3:]),
        "parts": [part.json() for part in parts],
        "sanitizer": bool(sanitizer),
        "kernels": kernels,
        "models": models,
    }
    a.out.mkdir(parents=True, exist_ok=True)
    stem = a.out / f"{date}-{re.sub(r'[^A-Za-z0-9]+', '-', gpu.split(',')[0]).strip('-')}"
    stem.with_suffix(".json").write_text(json.dumps(everything, indent=1) + "\n")
    lines = [f"# {gpu}", "", f"{date}, driver {driver}, `{everything['command']}`", "", "| part | result | seconds |", "|---|---|---|"]
    lines += [f"| {part.name} | {'ok' if part.ok() else part.status} | {part.seconds:.0f} |" for part in parts]
    for row in models:
        lines.append(f"| model {row['model']} | {json.dumps({k: v for k, v in row.items() if k not in ('model', 'tokens')})} | |")
    stem.with_suffix(".md").write_text("\n".join(lines) + "\n\n## Kernels\n\n" + table)
    print(f"wrote {stem}.json and .md")
    failed = [part.name for part in parts if not part.ok()] + [row["model"] for row in models if not row.get("ok", True)]
    if failed:
        sys.exit(f"gpu.py: failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
