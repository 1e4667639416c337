#!/usr/bin/env python3
"""Count the lines of Rust in folders, without tests, comments and blank lines included.

    scripts/count_lines.py [--files] [FOLDER ...]

The folders are those whose size is limited (see LIMITS) unless some are named. Tests are the items
behind `#[cfg(test)]` and the files of modules declared behind it. The code is formatted by rustfmt, so
that an item ends at the first line with its own indentation that closes it. The exit status is 1 when
a folder is above its limit.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMITS = {"src": 89_000, "src/rpc": 29_500, "crates/cudaemu/src": 24_000}
TEST_ATTRIBUTES = ("#[cfg(test)]", "#[cfg(all(test,")


def item_end(lines, start):
    """The index behind the item whose attributes begin at `start`."""
    indent = len(lines[start]) - len(lines[start].lstrip())
    at = start
    while lines[at].lstrip().startswith(("#[", "//")):
        at += 1
    for end in range(at, len(lines)):
        line = lines[end]
        if len(line) - len(line.lstrip()) == indent and line.rstrip().endswith((";", "}", "},")):
            return at, end + 1
    return at, len(lines)


def split(path):
    """Lines of `path` that are no test, and the modules that it declares for tests only."""
    lines = path.read_text().splitlines()
    kept, modules, at = 0, [], 0
    while at < len(lines):
        if lines[at].lstrip().startswith(TEST_ATTRIBUTES):
            head, end = item_end(lines, at)
            words = lines[head].split()
            if "mod" in words and lines[head].endswith(";"):
                modules.append(words[-1].rstrip(";"))
            at = end
        elif lines[at].startswith("#![cfg(test)]"):
            return 0, []
        else:
            kept, at = kept + 1, at + 1
    return kept, modules


def count(folder):
    """Lines that are no test of each file below `folder`."""
    counts, tests = {}, set()
    for path in sorted(folder.rglob("*.rs")):
        counts[path], modules = split(path)
        home = path.parent if path.name in ("mod.rs", "lib.rs", "main.rs") else path.with_suffix("")
        for module in modules:
            tests |= {home / f"{module}.rs", home / module}
    return {path: n for path, n in counts.items() if not tests & {path, *path.parents}}


def main():
    arguments = sys.argv[1:]
    each = "--files" in arguments
    folders = [name.rstrip("/") for name in arguments if name != "--files"] or list(LIMITS)
    above = False
    for name in folders:
        counts = count(ROOT / name)
        if each:
            for path, lines in counts.items():
                print(f"{lines:7} {path.relative_to(ROOT)}")
        total, limit = sum(counts.values()), LIMITS.get(name)
        above |= limit is not None and total > limit
        print(f"{total:7} {name}" + (f" (limit {limit})" if limit else ""))
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main())
