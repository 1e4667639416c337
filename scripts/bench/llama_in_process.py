#!/usr/bin/env python3
"""llama-bench's figures of a model with llama.cpp's library (PyPI's llama-cpp-python) in this process.

A prompt is one llama_decode that computes the logits of the last token only; then single tokens are decoded behind it. The
time is that of llama_decode and llama_synchronize alone. A prompt and a token run once before they are timed, as in
llama-bench, whose other settings are used too: batches of 2048 and micro-batches of 512 tokens, a KV cache of f16, flash
attention where llama.cpp chooses it. By default, llama-bench decodes from an empty context; here, tokens follow the prompt,
as with its option --n-depth.

Prints one JSON object: load_s (model and context), prompt_tok_s, gen_tok_s.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

import llama_cpp
from common import prompt_tokens


class Session:
    """A model and a context with an empty KV cache."""

    def __init__(self, path: Path, context: int, threads: int, flash_attn: bool):
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_default_params()
        model.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), model)
        if not self._model:
            sys.exit(f"llama.cpp cannot load {path}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = context
        params.n_batch, params.n_ubatch = 2048, 512
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash_attn else llama_cpp.LLAMA_FLASH_ATTN_TYPE_AUTO
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            sys.exit(f"llama.cpp cannot create a context of {context} tokens")

    def decode(self, tokens: list[int]) -> float:
        """Append tokens, and return the seconds until the logits of the last one are computed."""
        array = (llama_cpp.llama_token * len(tokens))(*tokens)
        batch = llama_cpp.llama_batch_get_one(array, len(tokens))
        start = time.perf_counter()
        status = llama_cpp.llama_decode(self._context, batch)
        llama_cpp.llama_synchronize(self._context)
        seconds = time.perf_counter() - start
        if status != 0:
            sys.exit(f"llama_decode failed with {status}")
        return seconds

    def clear(self) -> None:
        """Empty the KV cache."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), False)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", type=Path)
    p.add_argument("--threads", type=int, default=os.cpu_count())
    p.add_argument("--prompt", type=int, default=128, help="tokens of the prompt, at most 2048")
    p.add_argument("--generate", type=int, default=32, help="tokens to decode")
    p.add_argument("--flash-attn", action="store_true", help="always use flash attention")
    a = p.parse_args()
    prompt, decoded = prompt_tokens(a.prompt), prompt_tokens(a.generate)
    start = time.perf_counter()
    session = Session(a.model, a.prompt + a.generate + 1, a.threads, a.flash_attn)
    load = time.perf_counter() - start
    session.decode(prompt)
    session.decode(decoded[:1])
    session.clear()
    prompt_s = session.decode(prompt)
    generate_s = sum(session.decode([token]) for token in decoded)
    report = {"load_s": load, "prompt_tok_s": a.prompt / prompt_s, "gen_tok_s": a.generate / generate_s}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
