#!/usr/bin/env python3
"""A real client of llama.cpp's libmtmd: encodes an image of random squares with a vision encoder, and reports as JSON.

    vision_client.py MODEL.gguf MMPROJ.gguf --save want.npz                                # local CPU
    vision_client.py MODEL.gguf MMPROJ.gguf --rpc HOST:PORT --reference want.npz           # on the server's device

MODEL is the language model, of which only the vocabulary is used. The last line of stdout is one JSON object: tokens (the
number of the image's embeddings), and with --reference nmse.
"""

import argparse
import ctypes
import json
import os
import sys

import llama_cpp
import numpy as np
from llama_client import add_servers, nmse
from llama_cpp import mtmd_cpp as mtmd

SQUARES = (6, 8)  # rows and columns
SIDE = 14  # pixels


def encode(a: argparse.Namespace) -> np.ndarray:
    """The embeddings of the image, f32 [tokens, width]."""
    if a.rpc:
        add_servers([a.rpc])
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = 0
    model = llama_cpp.llama_model_load_from_file(a.model.encode(), params)
    options = mtmd.mtmd_context_params_default()
    options.use_gpu = bool(a.rpc)  # an RPC device is a GPU to llama.cpp
    options.n_threads = a.threads
    options.warmup = False
    kind = "ENABLED" if a.flash_attn else "DISABLED"
    options.flash_attn_type = getattr(llama_cpp, f"LLAMA_FLASH_ATTN_TYPE_{kind}")
    context = model and mtmd.mtmd_init_from_file(a.mmproj.encode(), model, options)
    if not context:
        sys.exit("libmtmd does not load the models")

    colours = np.random.default_rng(1).integers(0, 256, (*SQUARES, 3), np.uint8)
    pixels = colours.repeat(SIDE, axis=0).repeat(SIDE, axis=1)
    rows, columns, _ = pixels.shape
    bitmap = mtmd.mtmd_bitmap_init(columns, rows, (ctypes.c_uint8 * pixels.nbytes).from_buffer(pixels))
    prompt = mtmd.mtmd_default_marker()
    text = mtmd.mtmd_input_text(prompt, len(prompt), True, True)
    chunks = mtmd.mtmd_input_chunks_init()
    bitmaps = (mtmd.mtmd_bitmap_p_ctypes * 1)(bitmap)
    if mtmd.mtmd_tokenize(context, chunks, ctypes.byref(text), bitmaps, 1) != 0:
        sys.exit("mtmd_tokenize failed")
    width = llama_cpp.llama_model_n_embd(model)
    parts = []
    for i in range(mtmd.mtmd_input_chunks_size(chunks)):
        chunk = mtmd.mtmd_input_chunks_get(chunks, i)
        if mtmd.mtmd_input_chunk_get_type(chunk) != mtmd.MTMD_INPUT_CHUNK_TYPE_IMAGE:
            continue
        if mtmd.mtmd_encode_chunk(context, chunk) != 0:
            sys.exit("mtmd_encode_chunk failed")
        tokens = mtmd.mtmd_input_chunk_get_n_tokens(chunk)
        parts.append(np.ctypeslib.as_array(mtmd.mtmd_get_output_embd(context), (tokens, width)).copy())
    return np.concatenate(parts)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model")
    p.add_argument("mmproj")
    p.add_argument("--rpc", default="", help="HOST:PORT of a server with one device")
    p.add_argument("--reference", help="compare with this file, written by --save of a local run")
    p.add_argument("--save", help="write the embeddings to this .npz file")
    p.add_argument("--threads", type=int, default=os.cpu_count())
    p.add_argument("--flash-attn", action="store_true")
    p.add_argument("--verbose", action="store_true", help="for the common options of clients; libmtmd always logs")
    a = p.parse_args()
    found = encode(a)
    report = {"tokens": len(found)}
    if a.save:
        np.savez(a.save, embeddings=found)
    if a.reference:
        with np.load(a.reference) as want:
            report["nmse"] = nmse(found.astype(np.float64), want["embeddings"].astype(np.float64))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
