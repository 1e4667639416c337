"""Compiles CUDA C++ kernels to PTX with a pinned NVRTC; the work behind scripts/build-ptx.sh.

A folder of kernels contains a file MANIFEST with lines of the form `FILE TARGET... [OPTION...]`, for example

    reduction.cu 75 80 90
    formats.cu   89    as=formats_fast version=8.1 --use_fast_math

FILE is relative to the folder, or `*.cu` for every file of the folder that no other line lists. Each TARGET produces
ptx/<stem>.sm_<target>.ptx. `as=` sets another stem, so that one file can be compiled in several ways; `version=` raises the PTX
version for kernels that use newer features than their target requires; `compact` leaves out comments, indentation and spaces; options
that start with a dash are passed to NVRTC.

`each=CAPABILITY` expands a line to one line per element type with that capability (scripts/type_table.py: cuda, cache,
block-cuda ...). In its options, `{name}` is the type's name in lower case and `{TYPE}` its struct on the device. Kernels include
the same list as "block_types.inc": EACH_BLOCK_TYPE(X) expands to X(number on the wire, struct) for each block type with CUDA kernels.
The grids of the i-quants are "grids.inc", from src/tensor/quant/grids.rs.
"""

import argparse
import collections
import concurrent.futures
import ctypes
import dataclasses
import difflib
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile

import type_table

NVRTC = "12.9.86"
PACKAGES = (
    f"nvidia-cuda-nvrtc-cu12=={NVRTC}",
    f"nvidia-cuda-nvcc-cu12=={NVRTC}",  # ptxas, and the headers under crt/
    "nvidia-cuda-runtime-cu12==12.9.79",
    "nvidia-cuda-cccl-cu12==12.9.27",  # <nv/target>, which cuda_fp16.h includes
)
# Old releases of ptxas represent old drivers: both contain the same compiler, and a driver's compiler is not available
# separately.
OTHER_PTXAS = (
    ("11.8.89", "nvidia-cuda-nvcc-cu11==11.8.89"),
    ("12.0.140", "nvidia-cuda-nvcc-cu12==12.0.140"),
    ("13.0.88", "nvidia-cuda-nvcc==13.0.88"),
)
# Lowest PTX version that supports the target. A driver must support this version to load the file.
LEAST_VERSION = {
    "75": "6.3",
    "80": "7.0",
    "86": "7.1",
    "89": "7.8",
    "90": "7.8",
    "90a": "8.0",
    "100": "8.6",
    "120": "8.7",
}
COMMON_OPTIONS = ("--std=c++17",)
ROOT = pathlib.Path(__file__).resolve().parent.parent
DEFAULT_FOLDER = ROOT / "crates/cudaemu/kernels"


class Failure(Exception):
    """An error that the caller can fix; the text explains how."""


@dataclasses.dataclass(frozen=True)
class Unit:
    """One PTX file to build."""

    folder: pathlib.Path
    source: str
    stem: str
    target: str
    version: str
    options: tuple
    compact: bool = False

    @property
    def output(self):
        return f"{self.stem}.sm_{self.target}.ptx"


# ---- the toolchain


def toolchain_root():
    named = os.environ.get("FANOUT_CUDA_TOOLCHAIN")
    if named:
        return pathlib.Path(named).absolute()
    return ROOT / os.environ.get("CARGO_TARGET_DIR", "target") / "cuda-toolchain"


def install(name, packages):
    """Returns the folder with `packages`, which are fetched on first use."""
    place = toolchain_root() / name
    stamp = place / "stamp"
    wanted = "\n".join(packages) + "\n"
    if stamp.is_file() and stamp.read_text() == wanted:
        return place
    if platform.system() != "Linux":
        raise Failure(f"the compiler packages are for Linux, but this is {platform.system()}: run it in a Linux container")
    if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode != 0:
        raise Failure(f"{sys.executable} has no pip: install it (python3-pip), or set PYTHON to another interpreter")
    print(f"build-ptx: fetching {' '.join(packages)} into {place}", file=sys.stderr)
    place.parent.mkdir(parents=True, exist_ok=True)
    # Installed into a temporary folder and renamed, so that an interrupted or concurrent run leaves no incomplete folder.
    with tempfile.TemporaryDirectory(dir=place.parent) as aside:
        made = pathlib.Path(aside) / "made"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--only-binary", ":all:", "--root-user-action", "ignore", "--target", str(made), *packages]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise Failure(
                "pip could not install the compiler. It needs the network (or PIP_INDEX_URL of a mirror) on the first run.\n"
                + done.stderr.strip()
            )
        (made / "stamp").write_text(wanted)
        shutil.rmtree(place, ignore_errors=True)
        made.rename(place)
    return place


def one(place, pattern):
    found = sorted(place.glob(pattern))
    if not found:
        raise Failure(f"{place} contains no {pattern}: remove the folder and run again")
    return found[0]


class Nvrtc:
    """The compiler library, called through its C API."""

    def __init__(self):
        place = install(f"nvrtc-{NVRTC}", PACKAGES)
        # NVRTC loads its built-ins library by bare name; loading it first by path makes it found in any folder.
        ctypes.CDLL(str(one(place, "nvidia/cuda_nvrtc/lib/libnvrtc-builtins.so.12*")), mode=ctypes.RTLD_GLOBAL)
        self.library = ctypes.CDLL(str(one(place, "nvidia/cuda_nvrtc/lib/libnvrtc.so.12")))
        self.library.nvrtcGetErrorString.restype = ctypes.c_char_p
        parts = ("cuda_runtime", "cuda_nvcc", "cuda_cccl")
        self.includes = [f"--include-path={place / 'nvidia' / part / 'include'}" for part in parts]

    def _call(self, name, *arguments):
        code = getattr(self.library, name)(*arguments)
        if code != 0:
            raise Failure(f"{name}: {self.library.nvrtcGetErrorString(code).decode()}")

    def _text(self, program, what):
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(max(size.value, 1))
        self._call(f"nvrtcGet{what}", program, buffer)
        return buffer.value.decode()

    def compile(self, unit):
        path = unit.folder / unit.source
        program = ctypes.c_void_p()
        # This name appears in messages and line tables; it is relative, so that the PTX does not depend on the folder.
        source, name = path.read_bytes(), unit.source.encode()
        generated = {"block_types.inc": block_types(), "grids.inc": type_table.grids()}
        texts = (ctypes.c_char_p * len(generated))(*(text.encode() for text in generated.values()))
        names = (ctypes.c_char_p * len(generated))(*(header.encode() for header in generated))
        self._call("nvrtcCreateProgram", ctypes.byref(program), source, name, len(generated), texts, names)
        try:
            options = [f"--gpu-architecture=compute_{unit.target}", *COMMON_OPTIONS, *unit.options, *self.includes]
            options.append(f"--include-path={path.parent}")
            encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            code = self.library.nvrtcCompileProgram(program, len(options), encoded)
            log = self._text(program, "ProgramLog").strip()
            if code != 0:
                reason = self.library.nvrtcGetErrorString(code).decode()
                raise Failure(f"{path} does not compile for {unit.target} ({reason}):\n{log}")
            if log:
                print(f"{unit.source} ({unit.target}):\n{log}", file=sys.stderr)
            return self._text(program, "PTX")
        finally:
            self.library.nvrtcDestroyProgram(ctypes.byref(program))


# ---- the manifest


def folder_of(path):
    """Returns the folder of kernels of a file: the nearest parent with a MANIFEST."""
    for parent in path.parents:
        if (parent / "MANIFEST").is_file():
            return parent
    raise Failure(f"no folder above {path} has a MANIFEST")


def block_types():
    """Returns the text of block_types.inc, in the order of the type numbers on the wire."""
    types = sorted(type_table.that_can("block-cuda"), key=lambda row: row.number)
    return "#define EACH_BLOCK_TYPE(X) " + " ".join(f"X({row.number}, {row.on_device()})" for row in types) + "\n"


def expand(line):
    """Expands a line of a manifest, which may contain each=, to lines of words."""
    words = line.split("#", 1)[0].split()
    capability = [word[5:] for word in words if word.startswith("each=")]
    if not capability:
        return [words] if words else []
    plain = [word for word in words if not word.startswith("each=")]
    replaced = []
    for row in type_table.that_can(capability[0]):
        names = {"{name}": row.name.lower(), "{TYPE}": row.on_device()}
        replaced.append([re.sub(r"\{\w+\}", lambda found: names.get(found[0], found[0]), word) for word in plain])
    return replaced


def lines_of(folder, manifest):
    """Returns number and words of each line of a manifest, with each= and *.cu expanded."""
    found = []
    for number, line in enumerate(manifest.read_text().splitlines(), 1):
        try:
            found += [(number, words) for words in expand(line)]
        except (ValueError, KeyError) as error:
            raise Failure(f"{manifest}:{number}: {error}") from error
    named = {words[0] for _, words in found}
    rest = sorted(path.name for path in folder.glob("*.cu") if path.name not in named)
    lines = []
    for number, words in found:
        sources = rest if words[0] == "*.cu" else [words[0]]
        lines += [(number, [source, *words[1:]]) for source in sources]
    return lines


def parse_manifest(folder):
    manifest = folder / "MANIFEST"
    if not manifest.is_file():
        raise Failure(f"{folder} has no MANIFEST (lines of `FILE TARGET... [OPTION...]`)")
    units = []
    for number, words in lines_of(folder, manifest):
        where = f"{manifest}:{number}"
        source, targets, stem, version, options, compact = words[0], [], None, None, [], False
        if not (folder / source).is_file():
            raise Failure(f"{where}: {folder} has no file {source}")
        for word in words[1:]:
            if word.startswith("-"):
                options.append(word)
            elif word.startswith("as="):
                stem = word[3:]
            elif re.fullmatch(r"version=\d+\.\d", word):
                version = word[8:]
            elif word == "compact":
                compact = True
            elif word in LEAST_VERSION:
                targets.append(word)
            else:
                known = " ".join(LEAST_VERSION)
                raise Failure(f"{where}: '{word}' is not a target ({known}), as=STEM, version=N.N, each=CAPABILITY, compact or -option")
        if not targets:
            raise Failure(f"{where}: {source} names no target")
        stem = stem or pathlib.PurePath(source).stem
        for target in targets:
            least = LEAST_VERSION[target]
            units.append(Unit(folder, source, stem, target, max((least, version or least), key=version_key), tuple(options), compact))
    counts = collections.Counter(unit.output for unit in units)
    twice = sorted(name for name, count in counts.items() if count > 1)
    if twice:
        raise Failure(f"{manifest}: two lines produce {', '.join(twice)}; give one of them another stem with as=")
    named = {unit.source for unit in units}
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*.cu")}
    if found - named:
        raise Failure(f"{manifest} does not list {', '.join(sorted(found - named))}")
    return units


def version_key(version):
    return tuple(int(part) for part in version.split("."))


def select(paths):
    """Returns the units to build, and the folders that are built completely."""
    units, whole = [], []
    for path in paths:
        path = pathlib.Path(path).resolve()
        if path.is_dir():
            units += parse_manifest(path)
            whole.append(path)
        elif path.is_file() and path.suffix == ".cu":
            folder = folder_of(path)
            units += [unit for unit in parse_manifest(folder) if folder / unit.source == path]
        else:
            raise Failure(f"{path} is neither a folder of kernels nor a .cu file")
    return list(dict.fromkeys(units)), whole


# ---- PTX


def finish(unit, ptx):
    """Returns the compiler's output with our header and the lowest PTX version."""
    text = re.sub(r"\A(?:\s*//[^\n]*\n)+", "", ptx).lstrip("\n")
    text, count = re.subn(r"^\.version \d+\.\d+$", f".version {unit.version}", text, count=1, flags=re.M)
    if count != 1:
        raise Failure(f"{unit.source}: the compiler's output has no .version line")
    if version_key(unit.version) < (8, 3):
        # Only a hint (it marks bytes of a load that are not padding), which needs a newer PTX version: drop it.
        text = re.sub(r'^\s*\.pragma "used_bytes_mask [^"]*";\n', "", text, flags=re.M)
    if unit.compact:
        # A quarter of the text: comments (two around each statement of inline assembly), indentation, empty lines, spaces behind commas,
        # long names, and the constants of the sources, to which no instruction refers.
        text = re.sub(r"^\s*//[^\n]*\n", "", text, flags=re.M)
        text = text.replace(", ", ",")
        text = re.sub(r"^[ \t]+|\n(?=\n)", "", text, flags=re.M)
        text = re.sub(r"[ \t]*\t[ \t]*", " ", text)
        # Labels and parameters belong to their function, so that names need not contain its name or number.
        text = re.sub(r"\$L__BB\d+_(?=\d)", "$", text)
        text = re.sub(r"\b\w+_param_(?=\d)", "p", text)
        used = collections.Counter(re.findall(r"[\w$]+", text))
        text = re.sub(r"^\.global \.align \d+ \.[us]\d+ (\w+)(?: = \d+)?;\n", lambda m: m[0] * (used[m[1]] > 1), text, flags=re.M)
    options = " ".join(("", *unit.options)) if unit.options else ""
    header = f"// {unit.source} for sm_{unit.target}{options}, by NVRTC {NVRTC}. Made by scripts/build-ptx.sh: do not edit.\n"
    return header + "\n" + text.strip("\n") + "\n"


def make(units):
    """Compiles all units. Returns PTX by output path. Collects the errors of all compilations before it fails."""
    nvrtc = Nvrtc()
    os.chdir("/")  # the compiler writes the working folder into line tables and debug information
    made, failures = {}, []
    for unit in units:
        try:
            made[unit.folder / "ptx" / unit.output] = finish(unit, nvrtc.compile(unit))
        except Failure as failure:
            failures.append(str(failure))
    if failures:
        raise Failure("\n\n".join(failures))
    return made


def stale(made, whole):
    return [path for folder in whole for path in sorted((folder / "ptx").glob("*.ptx")) if path not in made]


def check(made, whole):
    differences = []
    for path, text in made.items():
        committed = path.read_text() if path.is_file() else ""
        if committed != text:
            lines = difflib.unified_diff(committed.splitlines(), text.splitlines(), str(path), "regenerated", lineterm="", n=2)
            shown = list(lines)
            rest = [f"... {len(shown) - 60} more lines"] if len(shown) > 60 else []
            differences.append("\n".join(shown[:60] + rest))
    differences += [f"{path}: no line of the MANIFEST makes it" for path in stale(made, whole)]
    if differences:
        raise Failure("\n".join(differences) + "\nthe committed PTX does not match its sources: run scripts/build-ptx.sh and commit the result")
    print(f"{len(made)} PTX files match their sources")


def write(made, whole):
    changed = 0
    for path, text in made.items():
        path.parent.mkdir(exist_ok=True)
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)
            changed += 1
    for path in stale(made, whole):
        print(f"removed {path}: no line of the MANIFEST produces it")
        path.unlink()
    size = sum(len(text) for text in made.values())
    print(f"{len(made)} PTX files, {size // 1024} KiB, {changed} of them changed")


# ---- ptxas

# GPUs for which drivers compile PTX of lower targets: Ada, Hopper, Blackwell of data centres (B200, B300) and of GeForce.
LATER_TARGETS = (89, 90, 100, 103, 120)
# Bytes of a thread's stack frame that are accepted on any target. All other kernels have none.
STACK_FRAMES = {
    # The scales of the sub-blocks of K types, which loops index that are not unrolled.
    "copy_to_q2_k": 136, "copy_to_q3_k": 72, "copy_to_q4_k": 72, "copy_to_q5_k": 72, "copy_to_q6_k": 72,
    # The bytes of a group of rows.
    "mul_mat_pack": 64,
    # Sine and cosine of large arguments.
    "timestep_f32": 32, "unary_any": 32, "unary_packed": 32,
    # One spilled register, on sm_120.
    "binary_f16_f32_f32": 8, "binary_bf16_f32_f32": 8,
    # Spilled registers, on sm_103 and sm_120.
    "mul_mat_mma4_q3_k": 112, "mul_mat_mma4_q6_k": 104, "mul_mat_mma4_iq4_nl": 8, "mul_mat_mma4_mxfp4": 16,
    # So that two blocks fit a multiprocessor; those of the GEMM on sm_80 and sm_89, outside of its loop over k.
    "mul_mat_mma4_q5_0": 16, "mul_mat_gemm128_f16": 16, "mul_mat_gemm128_bf16": 16,
}  # fmt: skip


def ptxas_releases(every):
    main = [(NVRTC, one(install(f"nvrtc-{NVRTC}", PACKAGES), "nvidia/cuda_nvcc/bin/ptxas"))]
    others = OTHER_PTXAS if every else ()
    return main + [(name, one(install(f"ptxas-{name}", (package,)), "nvidia/**/bin/ptxas")) for name, package in others]


def refusal(log):
    """Returns why this release is too old for the file, or None if the file itself is wrong."""
    if "not defined for option 'gpu-name'" in log:
        return "does not know the target"
    newer = re.search(r"Unsupported \.version|PTX \.version", log)
    return "is older than the PTX version" if newer else None


def architectures(text, name):
    """Returns the targets for which a file is assembled: its own and, with the main release, later ones, for which drivers also compile it."""
    target = re.search(r"^\.target (sm_\w+)", text, re.M)[1]
    is_portable = name == NVRTC and re.fullmatch(r"sm_\d+", target)
    return [target] + [f"sm_{later}" for later in LATER_TARGETS if is_portable and later > int(target[3:])]


def assemble_one(ptxas, path, text, architecture):
    with tempfile.TemporaryDirectory() as aside:
        source = pathlib.Path(aside) / path.name
        source.write_text(text)
        command = [str(ptxas), "-v", f"-arch={architecture}", "-o", str(pathlib.Path(aside) / "out"), str(source)]
        done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def assemble(made, every, no_spills):
    """Runs ptxas on each file and prints registers and spills. A release that is too old for a file only gives a note."""
    failures = []
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for name, ptxas in ptxas_releases(every):
            print(f"\nptxas {name}\n{'file':44} {'for':6} {'kernel':40} regs  stack  spills(st/ld)  smem")
            jobs = [(path, arch, text) for path, text in made.items() for arch in architectures(text, name)]
            done = pool.map(lambda job: assemble_one(ptxas, job[0], job[2], job[1]), jobs)
            for (path, arch, _), (status, log) in zip(jobs, done):
                if status != 0:
                    note = refusal(log)
                    if note and name != NVRTC:
                        print(f"{path.name:44} -- this release {note}")
                    else:
                        failures.append(f"ptxas {name} rejects {path} for {arch}:\n{log.strip()}")
                    continue
                for row in resources(log):
                    print(f"{path.name:44} {arch:6} {row}")
                    kernel, _, frame = row.split()[:3]
                    if no_spills and name == NVRTC and int(frame) > STACK_FRAMES.get(kernel, 0):
                        failures.append(f"{path.name} for {arch} has a larger stack frame than STACK_FRAMES accepts: {row}")
    if failures:
        raise Failure("\n\n".join(failures))


def resources(log):
    """Yields one row per kernel from the output of `ptxas -v`."""
    kernel, frame = None, None
    for line in log.splitlines():
        if found := re.search(r"Compiling entry function '([^']+)'", line):
            kernel, frame = found[1], None
        elif found := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            frame = frame or found.groups()
        elif found := re.search(r"Used (\d+) registers(.*)", line):
            stack, stores, loads = frame or ("0", "0", "0")
            shared = re.search(r"(\d+) bytes smem", found[2])
            yield f"{kernel:40} {found[1]:>4} {stack:>6} {stores + '/' + loads:>14} {shared[1] if shared else 0:>5}"
            frame = None


# ---- the histogram


def statements(text):
    """Returns the first word of each PTX statement, and the text without comments and strings."""
    text = re.sub(r'"(?:[^"\\]|\\.)*"', '""', text)
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)
    body = re.sub(r"^\s*\.(version|target|address_size|file|loc)\b[^\n]*", "", text, flags=re.M)
    body = re.sub(r"^\s*\.section[^{]*\{.*?^\s*\}", "", body, flags=re.M | re.S)
    body = re.sub(r"(?:\.visible\s+|\.weak\s+|\.extern\s+)*\.(?:entry|func)\b[^{;]*", "", body)
    words = []
    for statement in body.split(";"):
        rest = re.sub(r"\A(?:\s+|[{}]|[\w$]+\s*:(?!:))*", "", statement)
        rest = re.sub(r"\A@!?[%\w$]+\s+", "", rest)
        if found := re.match(r"[a-z][\w.:]*", rest):
            words.append(found[0])
    return words, text


def histogram(paths):
    targets = sorted({path.suffixes[-2] for path in paths})
    forms = collections.defaultdict(collections.Counter)
    directives, registers = collections.Counter(), collections.Counter()
    for path in paths:
        words, text = statements(path.read_text())
        for word in words:
            forms[word][path.suffixes[-2]] += 1
        directives.update(re.findall(r"(?:^|(?<=[\s(]))\.[a-z_]+\b", text, re.M))
        registers.update(re.findall(r"%(?:[a-z_0-9]*(?:tid|ctaid|lane|warp|clock|timer|smid|gridid|smem|mask|cluster)[\w.]*|pm\d|envreg\d+)", text))
    bases = collections.Counter(word.split(".")[0] for word in forms)
    print(f"# Every opcode form in {len(paths)} PTX files: {len(bases)} opcodes, {len(forms)} forms. Made by scripts/build-ptx.sh --histogram.")
    print("# total " + " ".join(f"{target[1:]:>6}" for target in targets) + "  form")
    for word in sorted(forms):
        counts = forms[word]
        print(f"{sum(counts.values()):7} " + " ".join(f"{counts[target]:6}" for target in targets) + f"  {word}")
    print("\n# Directives and types in declarations")
    print("\n".join(f"{count:7}  {word}" for word, count in sorted(directives.items())))
    print("\n# Special registers")
    print("\n".join(f"{count:7}  {word}" for word, count in sorted(registers.items())))


def arguments():
    parser = argparse.ArgumentParser(
        prog="build-ptx.sh",
        description="Compiles the kernels that a folder's MANIFEST names to PTX, in that folder's ptx/.",
        epilog=__doc__.split("\n\n", 1)[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", nargs="*", metavar="FILE.cu|FOLDER", help="default: crates/cudaemu/kernels")
    parser.add_argument("--check", action="store_true", help="write nothing; fail and print the difference if the committed PTX differs")
    parser.add_argument("--assemble", action="store_true", help=f"then run ptxas {NVRTC} on each file and print registers and spills")
    parser.add_argument("--all-ptxas", action="store_true", help="also with ptxas " + ", ".join(name for name, _ in OTHER_PTXAS))
    parser.add_argument("--no-spills", action="store_true", help=f"with --assemble or --all-ptxas, fail if ptxas {NVRTC} makes stack frames, which hold spilled registers")
    parser.add_argument("--histogram", action="store_true", help="compile nothing; print every opcode form of the PTX in the folders")
    options = parser.parse_args()
    if options.no_spills and not (options.assemble or options.all_ptxas):
        parser.error("--no-spills goes with --assemble or --all-ptxas")
    if options.histogram and (options.check or options.assemble or options.all_ptxas):
        parser.error("--histogram stands alone")
    return options


def main():
    options = arguments()
    paths = options.paths or [DEFAULT_FOLDER]
    if options.histogram:
        units, _ = select(paths)
        files = [unit.folder / "ptx" / unit.output for unit in units]
        missing = [str(path) for path in files if not path.is_file()]
        if missing:
            raise Failure(f"not built yet: {', '.join(missing)}")
        histogram(files)
        return
    units, whole = select(paths)
    made = make(units)
    if options.check:
        check(made, whole)
    else:
        write(made, whole)
    if options.assemble or options.all_ptxas:
        assemble(made, options.all_ptxas, options.no_spills)


if __name__ == "__main__":
    try:
        main()
    except Failure as failure:
        print(f"build-ptx: {failure}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:  # `build-ptx.sh --histogram | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
