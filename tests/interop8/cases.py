"""The rows of the table: which model on which servers, and what is particular about each run."""

from dataclasses import dataclass

TYPES = ("f32", "f16", "q8_0", "q4_0", "q4_k_m")
LAYER = ("--split", "layer")
TENSOR = ("--split", "tensor")
# By free memory, both layers of the small models would go to the first server, and only the output matrix to the second.
TWO_BY_LAYER = (*LAYER, "--tensor-split", "1,2")
KV_ON_HOST = "--no-kv-offload"
NO_FLASH = ("--flash-attn", "off")
NO_COLLECTIVES = (("GGML_RPC_NO_COMM", "1"),)


@dataclass(frozen=True)
class Case:
    """A client of protocol 8.0 on servers. The options of the placement are the client's, not the reference's."""

    name: str
    dtype: str
    servers: int = 1
    placement: tuple[str, ...] = LAYER
    arch: str = "llama"
    devices: str = "CPU"  # of each server, as for rpc-server --device
    options: tuple[str, ...] = ()  # of the client and of the reference
    generate: int = 16
    env: tuple[tuple[str, str], ...] = ()  # of the client
    mixed: bool = False  # one server is llama.cpp's
    ours_first: bool = False  # of mixed servers
    collectives: bool = False  # the servers add tensors between themselves

    @property
    def places(self) -> int:
        """Devices that must hold weights."""
        return self.servers * len(self.devices.split(","))

    @property
    def ours_only(self) -> bool:
        """Whether llama.cpp's server, of which this crate starts only the CPU device, cannot run the row."""
        return self.devices != "CPU" or self.mixed or self.collectives


def cases() -> list[Case]:
    rows = []
    for dtype in TYPES:
        rows.append(Case(f"{dtype}, one server", dtype))
        rows.append(Case(f"{dtype}, two servers, split layer", dtype, 2, TWO_BY_LAYER))
        rows.append(Case(f"{dtype}, two servers, split tensor", dtype, 2, TENSOR))
    for dtype in ("f32", "q8_0"):
        rows.append(Case(f"{dtype}, KV off the device", dtype, placement=(*LAYER, KV_ON_HOST)))
        rows.append(Case(f"{dtype}, KV off two devices", dtype, 2, (*TWO_BY_LAYER, KV_ON_HOST)))
        rows.append(Case(f"{dtype}, without flash attention", dtype, options=NO_FLASH))
    rows += [
        Case("f16, 400 tokens", "f16", generate=400),
        Case("f16, 400 tokens, split layer", "f16", 2, TWO_BY_LAYER, generate=400),
        Case("f16, 400 tokens, split tensor", "f16", 2, TENSOR, generate=400),
        Case("f16, one server, split tensor", "f16", placement=TENSOR),
        Case("f16, split tensor, all on the first", "f16", 2, (*TENSOR, "--tensor-split", "1,0")),
        Case("f16, split tensor 3 to 1", "f16", 2, (*TENSOR, "--tensor-split", "3,1")),
        Case("f16, split tensor, no collectives", "f16", 2, TENSOR, env=NO_COLLECTIVES),
        Case("f16, three servers, split tensor", "f16", 3, TENSOR),
        Case("f16, CPU,CPU, split layer", "f16", placement=TWO_BY_LAYER, devices="CPU,CPU"),
        Case("f16, CPU,CPU, split tensor", "f16", placement=TENSOR, devices="CPU,CPU"),
        Case("f16, beside llama.cpp's, split layer", "f16", 2, TWO_BY_LAYER, mixed=True),
        Case("f16, beside llama.cpp's, split tensor", "f16", 2, TENSOR, env=NO_COLLECTIVES, mixed=True),
        Case("f16, collectives", "f16", 2, TENSOR, collectives=True),
        Case("f16, collectives, 400 tokens", "f16", 2, TENSOR, generate=400, collectives=True),
        Case("f16, collectives, split tensor 3 to 1", "f16", 2, (*TENSOR, "--tensor-split", "3,1"), collectives=True),
        Case("q4_k_m, collectives", "q4_k_m", 2, TENSOR, collectives=True),
        Case("f16, collectives, llama.cpp's as rank 0", "f16", 2, TENSOR, mixed=True, collectives=True),
        Case("f16, collectives, llama.cpp's as rank 1", "f16", 2, TENSOR, mixed=True, ours_first=True, collectives=True),
        # Its prompt has 64 rows of 512 elements, from which on the servers exchange BF16.
        Case("q4_k_m, collectives, llama.cpp's as rank 0", "q4_k_m", 2, TENSOR, mixed=True, collectives=True),
        Case("q4_k_m, collectives, llama.cpp's as rank 1", "q4_k_m", 2, TENSOR, mixed=True, ours_first=True, collectives=True),
        Case("qwen3moe f16, one server", "f16", arch="qwen3moe"),
        Case("qwen3moe f16, two servers, split layer", "f16", 2, TWO_BY_LAYER, arch="qwen3moe"),
        Case("qwen3moe f16, two servers, split tensor", "f16", 2, TENSOR, arch="qwen3moe"),
    ]
    return rows
