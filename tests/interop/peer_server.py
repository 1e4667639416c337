#!/usr/bin/env python3
"""llama.cpp's own RPC server with its CPU device: the reference for benchmarks and for recorded sessions.

Usage: peer_server.py [--host 127.0.0.1] [--port 50053] [--threads N]     (stops with Ctrl-C)
"""

import argparse
import ctypes
import importlib.util
import os


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--host", default="127.0.0.1")
    p.add_argument("--port", type=int, default=50053)
    p.add_argument("--threads", type=int, default=os.cpu_count())
    p.add_argument("--cache", help="directory of the tensor cache (default: no cache)")
    a = p.parse_args()
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("llama_cpp is not installed: run scripts/venv.sh")
    lib = os.path.join(spec.submodule_search_locations[0], "lib")
    ggml = ctypes.CDLL(os.path.join(lib, "libggml.so.0"), mode=ctypes.RTLD_GLOBAL)
    rpc = ctypes.CDLL(os.path.join(lib, "libggml-rpc.so.0"))
    ggml.ggml_backend_dev_by_type.restype = ctypes.c_void_p
    ggml.ggml_backend_dev_by_type.argtypes = [ctypes.c_int]
    cpu = ggml.ggml_backend_dev_by_type(0)  # GGML_BACKEND_DEVICE_TYPE_CPU
    devices = (ctypes.c_void_p * 1)(cpu)
    rpc.ggml_backend_rpc_start_server.restype = None
    rpc.ggml_backend_rpc_start_server.argtypes = [
        ctypes.c_char_p,  # endpoint
        ctypes.c_char_p,  # cache directory
        ctypes.c_size_t,  # threads
        ctypes.c_size_t,  # number of devices
        ctypes.POINTER(ctypes.c_void_p),
    ]
    cache = a.cache.encode() if a.cache else None
    rpc.ggml_backend_rpc_start_server(f"{a.host}:{a.port}".encode(), cache, a.threads, 1, devices)


if __name__ == "__main__":
    main()
