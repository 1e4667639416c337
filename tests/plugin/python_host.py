"""A host in Python: prints the devices, and greedy tokens of llama-cpp-python on them.

    python_host.py PLUGIN MODEL
"""

import ctypes
import sys

import llama_cpp
from llama_cpp.llama_cpp import _lib as llama

plugin, model = sys.argv[1:]
# Any library of the package finds ggml's functions, which it is linked to.
llama.ggml_backend_load.restype = ctypes.c_void_p
llama.ggml_backend_load.argtypes = [ctypes.c_char_p]
if not llama.ggml_backend_load(plugin.encode()):
    sys.exit("the plug-in was not loaded")
host = llama_cpp.Llama(model, n_gpu_layers=-1, n_ctx=256, n_threads=1, seed=1)
host.eval(range(300, 332))
tokens = []
for _ in range(16):
    tokens.append(host.sample(temp=0.0))
    host.eval(tokens[-1:])
print(*tokens)
