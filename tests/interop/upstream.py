"""Tests of llama.cpp's own sources, compiled against the libraries of the Python environment.

The source archive of llama-cpp-python is fetched from PyPI by pip, and kept in the folder of the programs; nothing of it is
committed. The libraries of the environment are linked, so that a program speaks the protocol of the other interop tests.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

import llama_cpp

from servers import HERE, ROOT

# Folders of the archive's vendor/llama.cpp that the tests use, and what the build of its programs needs beside them.
SOURCES = ("tests", "common", "src", "include", "ggml/include", "ggml/src", "vendor", "models")
BUILD = ("tools", "cmake", "scripts", "ggml/cmake", "CMakeLists.txt", "LICENSE", "licenses", "ggml/CMakeLists.txt", "ggml/ggml.pc.in")
LIBRARIES = ("llama", "ggml", "ggml-base", "ggml-cpu", "ggml-rpc")
# Further sources of a program, beside upstream/NAME.cpp.
EXTRA = {
    "backend_ops": (),
    "archs": ("common/common.cpp", "common/log.cpp", "common/json.cpp"),
}


def archive(folder: Path) -> Path:
    """The unpacked sources of the installed release: the path of llama.cpp's root."""
    release = version("llama-cpp-python")
    root = folder / f"llama_cpp_python-{release}" / "vendor" / "llama.cpp"
    if all((root / name).exists() for name in SOURCES + BUILD):
        return root
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        argv = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet", "--no-deps"]
        # Only this package as source: the tools that read its metadata come as wheels, instead of being compiled.
        argv += ["--no-binary", "llama-cpp-python", "--dest", scratch, f"llama-cpp-python=={release}"]
        subprocess.run(argv, check=True)
        (packed,) = Path(scratch).glob("*.tar.gz")
        wanted = tuple(f"/vendor/llama.cpp/{name}/" for name in SOURCES + BUILD)
        with tarfile.open(packed) as tar:
            members = [m for m in tar.getmembers() if any(name in m.name + "/" for name in wanted)]
            tar.extractall(scratch, members, filter="data")
        shutil.rmtree(folder / f"llama_cpp_python-{release}", ignore_errors=True)
        (Path(scratch) / f"llama_cpp_python-{release}").rename(folder / f"llama_cpp_python-{release}")
    return root


def build(name: str, folder: Path) -> Path:
    """The path of the program upstream/NAME.cpp; compiled unless it is newer than its source."""
    root = archive(folder)
    source, program = HERE / "upstream" / f"{name}.cpp", folder / name
    lib = Path(llama_cpp.__file__).parent / "lib"
    if program.exists() and program.stat().st_mtime > max(source.stat().st_mtime, lib.stat().st_mtime):
        return program
    # Without unused functions: common.cpp refers to much that the tests do not need.
    argv = ["c++", "-std=c++17", "-O1", "-pthread", "-w", "-ffunction-sections", "-fdata-sections", "-Wl,--gc-sections"]
    for include in ("tests", "common", "src", "include", "ggml/include", "ggml/src", "vendor"):
        argv += ["-I", str(root / include)]
    argv += [str(source), *(str(root / extra) for extra in EXTRA[name]), "-o", str(program)]
    argv += [f"-L{lib}", f"-Wl,-rpath,{lib}", *(f"-l:lib{library}.so.0" for library in LIBRARIES)]
    print(f"compiling {name} (about a minute)", file=sys.stderr)
    subprocess.run(argv, check=True)
    return program


def load_plugin(library: Path) -> str:
    """Makes the programs load fanout's plug-in. Returns the name of the device to test: the first of FANOUT_DEVICES."""
    os.environ["GGML_BACKEND_PATH"] = str(library.resolve())
    os.environ.setdefault("FANOUT_DEVICES", "CPU")
    return "Fanout0"


def run_unit_test(name: str, **variables: str) -> int:
    """The exit status of a unit test of the workspace that cargo skips otherwise, with these variables of the environment."""
    argv = ["cargo", "test", "--locked", "--workspace", "--lib", name, "--", "--ignored", "--nocapture"]
    return subprocess.run(argv, cwd=ROOT, env={**os.environ, "FANOUT_PYTHON": sys.executable, **variables}).returncode
