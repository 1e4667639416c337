"""ggml's libraries of the Python environment, through ctypes.

The signatures are read from the headers that llama-cpp-python installs beside its libraries, so that no function is declared
here by hand.
"""

import ctypes
import re
from functools import cache
from pathlib import Path

import llama_cpp

HEADERS = ("ggml.h", "ggml-alloc.h", "ggml-backend.h", "ggml-cpu.h", "ggml-rpc.h")
LIBRARIES = ("ggml-base", "ggml-cpu", "ggml", "ggml-rpc")
MAX_DIMS, MAX_SRC, MAX_OP_PARAMS, MAX_NAME = 4, 10, 64, 64

SCALARS = {
    "void": None,
    "bool": ctypes.c_bool,
    "int": ctypes.c_int,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "size_t": ctypes.c_size_t,
    "int32_t": ctypes.c_int32,
    "uint32_t": ctypes.c_uint32,
    "int64_t": ctypes.c_int64,
    "uint8_t": ctypes.c_uint8,
}


class Tensor(ctypes.Structure):
    """struct ggml_tensor."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * MAX_DIMS),
        ("nb", ctypes.c_size_t * MAX_DIMS),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * (MAX_OP_PARAMS // 4)),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * MAX_SRC),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * MAX_NAME),
        ("extra", ctypes.c_void_p),
        ("padding", ctypes.c_char * 8),
    ]


class InitParams(ctypes.Structure):
    """struct ggml_init_params."""

    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


class TypeTraits(ctypes.Structure):
    """struct ggml_type_traits."""

    _fields_ = [
        ("type_name", ctypes.c_char_p),
        ("blck_size", ctypes.c_int64),
        ("blck_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.c_void_p),
        ("from_float_ref", ctypes.c_void_p),
    ]


class CpuTypeTraits(ctypes.Structure):
    """struct ggml_type_traits_cpu."""

    _fields_ = [
        ("from_float", ctypes.c_void_p),
        ("vec_dot", ctypes.c_void_p),
        ("vec_dot_type", ctypes.c_int),
        ("nrows", ctypes.c_int64),
    ]


def _op_count() -> int:
    """GGML_OP_COUNT, by the assertion in ggml-rpc.h that ties it to the version of the protocol."""
    header = (Path(llama_cpp.__file__).parent.parent / "include" / "ggml-rpc.h").read_text()
    return int(re.search(r"GGML_OP_COUNT == (\d+)", header)[1])


OP_COUNT = _op_count()
CONVERT = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


def ctype(text: str):
    """The ctypes type of a C type or parameter. Pointers are integers, except strings."""
    text = re.sub(r"\b(const|struct|enum)\b", " ", text).strip()
    if "*" in text or "[" in text:
        return ctypes.c_char_p if re.match(r"char\s*\*", text) else ctypes.c_void_p
    word = text.split()[0]
    if word == "ggml_init_params":
        return InitParams
    if word in SCALARS:
        return SCALARS[word]
    # Opaque handles of ggml-backend.h end in `_t`; what is left are enumerations.
    return ctypes.c_void_p if word.endswith("_t") else ctypes.c_int


def declarations(text: str) -> dict[str, tuple]:
    """The result type and parameter types of each function that a header declares."""
    text = re.sub(r"/\*.*?\*/", " ", re.sub(r"//[^\n]*", " ", text), flags=re.S)
    found = {}
    for m in re.finditer(r"GGML_(?:BACKEND_)?API\s+([\w\s*]+?)\b(ggml_\w+)\s*\(([^()]*)\)", text):
        result, name, params = m.groups()
        types = [] if params.strip() in ("", "void") else [ctype(p) for p in params.split(",")]
        if "..." not in params:
            found[name] = (ctype(result + ("*" if "*" in result else "")), types)
    return found


class Ggml:
    """The functions of ggml's libraries as attributes: `lib.ggml_add`."""

    def __init__(self) -> None:
        package = Path(llama_cpp.__file__).parent
        self._libraries = [
            ctypes.CDLL(str(package / "lib" / f"lib{name}.so.0"), mode=ctypes.RTLD_GLOBAL) for name in LIBRARIES
        ]
        self._declared: dict[str, tuple] = {}
        for header in HEADERS:
            self._declared |= declarations((package.parent / "include" / header).read_text())

    def __getattr__(self, name: str):
        result, parameters = self._declared[name]
        for library in self._libraries:
            try:
                function = getattr(library, name)
            except AttributeError:
                continue
            function.restype, function.argtypes = result, parameters
            setattr(self, name, function)
            return function
        raise AttributeError(name)

    @cache
    def types(self) -> dict[str, int]:
        """The number of each type by its name in lower case."""
        names = {}
        for number in range(self._type_count()):
            if self.ggml_type_size(number):
                names[self.ggml_type_name(number).decode().lower()] = number
        return names

    def _type_count(self) -> int:
        """GGML_TYPE_COUNT: ggml's tables of types are not checked against larger numbers."""
        header = (Path(llama_cpp.__file__).parent.parent / "include" / "ggml.h").read_text()
        return int(re.search(r"GGML_TYPE_COUNT\s*=\s*(\d+)", header)[1])

    @cache
    def traits(self, number: int) -> TypeTraits:
        return TypeTraits.from_address(self.ggml_get_type_traits(number))

    @cache
    def cpu_traits(self, number: int) -> CpuTypeTraits:
        return CpuTypeTraits.from_address(self.ggml_get_type_traits_cpu(number))


@cache
def load() -> Ggml:
    return Ggml()
