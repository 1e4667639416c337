#!/usr/bin/env python3
"""A real llama.cpp client: loads a GGUF model, evaluates a fixed prompt, decodes greedily, reports as JSON.

    llama_client.py MODEL.gguf                          # local CPU
    llama_client.py MODEL.gguf --rpc HOST:PORT,...      # every layer on the servers' devices
    llama_client.py MODEL.gguf --rpc ... --compare      # both; exits 1 if the NMSE of the logits is too large

The last line of stdout is one JSON object: load_s, prompt_tok_s, gen_tok_s, tokens, and with --compare nmse
and same_tokens; with --times also gen_at: the times at which decoding began and each token was computed, in seconds of
the monotonic clock, which all processes of the machine share. With --barrier the client prints `ready` once the model
is loaded, waits for a line on stdin, and prints `token N` after each decoded token, so that a test can run several
clients concurrently.
"""

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time

import llama_cpp
import numpy as np

KV_TYPES = {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q4_0": 2}  # ggml type numbers


def library(name: str) -> ctypes.CDLL:
    """One of the client's libraries. libllama links against the .so.0 names; the plain .so files are copies that would load
    twice.
    """
    return ctypes.CDLL(os.path.join(os.path.dirname(llama_cpp.__file__), "lib", f"lib{name}.so.0"))


def add_servers(endpoints: list[str]) -> list[int]:
    """Register every device of `endpoints` with ggml, so that the next model can use them. Returns the devices."""
    ggml, base, rpc = library("ggml"), library("ggml-base"), library("ggml-rpc")
    rpc.ggml_backend_rpc_add_server.restype = ctypes.c_void_p
    rpc.ggml_backend_rpc_add_server.argtypes = [ctypes.c_char_p]
    ggml.ggml_backend_register.argtypes = [ctypes.c_void_p]
    base.ggml_backend_reg_dev_count.restype = ctypes.c_size_t
    base.ggml_backend_reg_dev_count.argtypes = [ctypes.c_void_p]
    base.ggml_backend_reg_dev_get.restype = ctypes.c_void_p
    base.ggml_backend_reg_dev_get.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    devices = []
    for endpoint in endpoints:
        registry = rpc.ggml_backend_rpc_add_server(endpoint.encode())
        if not registry:
            sys.exit(f"no RPC server at {endpoint}")
        ggml.ggml_backend_register(registry)
        devices += [base.ggml_backend_reg_dev_get(registry, i) for i in range(base.ggml_backend_reg_dev_count(registry))]
    return devices


def measure(model: str, devices: list[int]) -> None:
    """Load a model without memory and free it again, as llama.cpp's programs do before they load it (`-fit`, on by default).

    Their `common_fit_params` is not in the package. This opens the same connections in the same order, and sends the same
    commands, as `common_fit_params` if the model fits and no parameter changes.
    """
    memory = library("ggml-base").ggml_backend_dev_memory
    memory.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)]
    params = llama_cpp.llama_model_default_params()
    params.no_alloc = True
    params.load_mode = llama_cpp.LLAMA_LOAD_MODE_NONE
    loaded = llama_cpp.llama_model_load_from_file(model.encode(), params)
    context = llama_cpp.llama_init_from_model(loaded, llama_cpp.llama_context_default_params())
    if not context:
        sys.exit(f"{model}: llama.cpp cannot measure it")
    for device in devices * 2:  # once for the decision and once for a table in the log
        memory(device, ctypes.byref(ctypes.c_size_t()), ctypes.byref(ctypes.c_size_t()))
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(loaded)


def run(args: argparse.Namespace, endpoints: list[str]) -> tuple[dict, np.ndarray]:
    """Returns the report and the prompt's logits, f64 [tokens, vocab]."""
    devices = add_servers(endpoints) if endpoints else []
    if args.fit:
        measure(args.model, devices)
    start = time.perf_counter()
    model = llama_cpp.Llama(
        args.model,
        n_gpu_layers=999 if endpoints else 0,
        n_ctx=args.context,
        n_batch=args.batch,
        n_ubatch=args.ubatch,
        n_threads=args.threads,
        n_threads_batch=args.threads,
        flash_attn=args.flash_attn,
        offload_kqv=not args.kv_on_host,
        type_k=KV_TYPES[args.kv_type],
        type_v=KV_TYPES[args.kv_type],
        logits_all=True,
        yarn_beta_fast=-1.0,  # the bounds of the file
        yarn_beta_slow=-1.0,
        verbose=args.verbose,
    )
    load_s = time.perf_counter() - start
    if args.barrier:
        print("ready", flush=True)
        sys.stdin.readline()
    vocab = model.n_vocab()
    words = vocab - 259  # number of tokens behind the control and byte tokens
    prompt = [1] + [(7919 * (i + args.seed) + 13) % words + 259 for i in range(args.prompt - 1)]
    start = time.perf_counter()
    model.eval(prompt)
    prompt_s = time.perf_counter() - start
    logits = np.array(model.scores[: len(prompt)], dtype=np.float64)
    tokens: list[int] = []
    times = [time.monotonic()]
    for n in range(args.generate):
        token = int(np.argmax(model.scores[model.n_tokens - 1]))
        tokens.append(token)
        model.eval([token])
        times.append(time.monotonic())
        if args.barrier and not args.times:
            print(f"token {n}", flush=True)
    report = {
        "load_s": round(load_s, 3),
        "prompt_tok_s": round(len(prompt) / prompt_s, 2),
        "gen_tok_s": round(args.generate / (times[-1] - times[0]), 2),
        "tokens": tokens,
    }
    if args.times:
        report["gen_at"] = times
    return report, logits


def nmse(got: np.ndarray, want: np.ndarray) -> float:
    return float(((got - want) ** 2).sum() / (want**2).sum())


def local_reference(out: str) -> None:
    """Run the model of this command line on the local CPU and save the results to `out`.

    It needs a separate process, because this process has registered the RPC devices.
    """
    argv = [a for a in sys.argv[1:] if a not in ("--compare", "--barrier")]
    subprocess.run([sys.executable, sys.argv[0], *argv, "--rpc", "", "--save", out], check=True, stdout=sys.stderr)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model")
    p.add_argument("--rpc", default="", help="comma-separated HOST:PORT list")
    p.add_argument("--compare", action="store_true", help="also run on the local CPU and compare")
    p.add_argument("--reference", help="compare with this file, written by --save of a local run")
    p.add_argument("--save", help="write logits and tokens to this .npz file")
    p.add_argument("--max-nmse", type=float, default=1e-3)
    p.add_argument("--fit", action="store_true", help="first measure the memory that the model needs, as llama-server does")
    p.add_argument("--prompt", type=int, default=64, help="prompt length in tokens")
    p.add_argument("--seed", type=int, default=0, help="seed of the prompt")
    p.add_argument("--generate", type=int, default=16, help="tokens to decode")
    p.add_argument("--context", type=int, default=1024)
    p.add_argument("--batch", type=int, default=512)
    p.add_argument("--ubatch", type=int, default=512)
    p.add_argument("--threads", type=int, default=os.cpu_count())
    p.add_argument("--flash-attn", action="store_true")
    p.add_argument("--kv-type", choices=KV_TYPES, default="f16", help="quantised ones need --flash-attn")
    p.add_argument("--kv-on-host", action="store_true", help="keep the KV cache in host memory: many splits per token")
    p.add_argument("--barrier", action="store_true", help="wait before the prompt, report each token")
    p.add_argument("--times", action="store_true", help="report the time of each token instead of printing it")
    p.add_argument("--verbose", action="store_true")
    args = p.parse_args()
    report, logits = run(args, [e for e in args.rpc.split(",") if e])
    if args.save:
        np.savez(args.save, logits=logits, tokens=report["tokens"])
    if args.compare or args.reference:
        with tempfile.TemporaryDirectory() as scratch:
            reference = args.reference or os.path.join(scratch, "reference.npz")
            if not args.reference:
                local_reference(reference)
            with np.load(reference) as want:
                report["nmse"] = nmse(logits, want["logits"])
                report["same_tokens"] = want["tokens"].tolist() == report["tokens"]
    print(json.dumps(report))
    if not report.get("nmse", 0.0) <= args.max_nmse:
        sys.exit(1)


if __name__ == "__main__":
    main()
