#!/usr/bin/env python3
"""The table of element types, src/tensor/table.rs, for scripts: lists the types and their capabilities.

    type_table.py                   # all rows
    type_table.py --list cuda       # names of the types with a capability, one per line:
                                    # decode, convert, simd, cuda_read, cuda or cache

`block` in front of a capability (`--list block-cuda`) leaves the plain types out, and `plain` the block types. `read_only` lists the
types with `cuda_read` in place of `cuda`.
"""

import argparse
import dataclasses
import pathlib
import re

HERE = pathlib.Path(__file__).resolve().parent
# A kit for another machine (scripts/gpu.sh) contains a copy of the table in the folder of this file.
BESIDE = HERE / "table.rs"
SOURCE = BESIDE if BESIDE.is_file() else HERE.parent / "src/tensor/table.rs"
ROW = re.compile(r" +(\w+) += +(\d+), +(\d+) elements in +(\d+) bytes, aligned (\d+)((?:, \w+ [^,;]+)*);")
CAPABILITIES = ("decode", "convert", "simd", "cuda_read", "cuda", "cache")


@dataclasses.dataclass(frozen=True)
class Type:
    """A row of the table."""

    name: str
    number: int
    block_len: int
    block_bytes: int
    alignment: int
    declared: dict  # capabilities: first word, and the words behind it

    def on_device(self):
        """The struct of kernels/common."""
        return self.declared.get("cuda") or self.declared["cuda_read"]

    def can(self, what):
        """Whether the type has a capability, as `DType::can` defines it."""
        if what.startswith("block-"):
            return self.block_len > 1 and self.can(what.removeprefix("block-"))
        if what.startswith("plain-"):
            return self.block_len == 1 and self.can(what.removeprefix("plain-"))
        if what == "read_only":
            return self.can("cuda_read") and not self.can("cuda")
        if what not in CAPABILITIES:
            raise ValueError(f"'{what}' is no capability ({', '.join(CAPABILITIES)}, or block- or plain- and one of these)")
        names = {
            "decode": ("float", "codec", "decoder"),
            "convert": ("float", "codec"),
            "simd": ("float", "simd", "expanded"),
            "cuda_read": ("cuda_read", "cuda"),
        }.get(what, (what,))
        return any(name in self.declared for name in names)


def rows():
    """Returns all rows of the table, in order."""
    found = []
    for line in SOURCE.read_text().splitlines():
        if row := ROW.fullmatch(line):
            name, *numbers, rest = row.groups()
            declared = dict(word.split(" ", 1) for word in rest.split(", ")[1:])
            found.append(Type(name, *map(int, numbers), declared))
    if not found:
        raise ValueError(f"{SOURCE} has no rows of types")
    return found


def that_can(what):
    """Returns the types with a capability."""
    return [row for row in rows() if row.can(what)]


def selectors(name, code):
    """Returns an entry of a grid in the form that kernels/common/quants_i.cuh describes: its elements' indices in four nibbles."""
    if name.startswith("3"):
        return sum((code >> 3 * n & 7) << 4 * n for n in range(4))
    return sum((code >> 2 * n & 3 | (code >> 2 * n + 8 & 3) << 2) << 4 * n for n in range(4))


def grids():
    """Returns the grids of the i-quants, src/tensor/quant/grids.rs, as functions in CUDA C++ from an index to an entry."""
    source = HERE.parent / "src/tensor/quant/grids.rs"
    found = re.findall(r"const CODES_(\w+): \[u16; (\d+)\] = \[(.*?)\];", source.read_text(), re.DOTALL)
    if not found:
        raise ValueError(f"{source} has no grids")
    text = ""
    for name, n, numbers in found:
        codes = [int(number, 0) for number in numbers.replace(",", " ").split()]
        if len(codes) != int(n):
            raise ValueError(f"{source}: CODES_{name} has {len(codes)} entries, not {n}")
        entries = ", ".join(str(selectors(name, code)) for code in codes)
        # The tables are local to templates, so that PTX that does not use them does not contain them.
        text += (
            f"template <int> __device__ __forceinline__ unsigned grid_{name.lower()}(unsigned i) {{\n"
            f"static __device__ const unsigned short entries[{n}] = {{{entries}}};\nreturn entries[i];\n}}\n"
        )
    return text


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", metavar="CAPABILITY", help="names of the types with this capability")
    options = parser.parse_args()
    if options.list:
        try:
            print("\n".join(row.name for row in that_can(options.list)))
        except ValueError as error:
            parser.error(str(error))
        return
    for row in rows():
        able = " ".join(what for what in CAPABILITIES if row.can(what))
        print(f"{row.name} {row.number} {row.block_len} {row.block_bytes} {row.alignment} {able}".rstrip())


if __name__ == "__main__":
    main()
