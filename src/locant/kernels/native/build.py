"""Compile the C sources of this folder into one library in the same folder.

This needs only a C compiler. `hatch_build.py` runs this file alone, before locant is installed. The name of the library
depends on the sources and the compiler options, so that a library of other sources is not found.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-fopenmp-simd", "-ffp-contract=off", "-fno-trapping-math", "-Wall")
"""These flags do not fuse products with sums, so that results have the bits of torch's separate operations."""
VARIANTS = {"avx512": "-march=x86-64-v4", "avx2": "-march=x86-64-v3", "baseline": "-march=x86-64"}
"""Instruction sets of x86-64, the fastest first. Each source is compiled for all of them."""
COMPILERS = {"linux": ("gcc", "clang"), "darwin": ("clang",)}
"""The compilers to look for on each system if ``CC`` is not set. All compilers give the same bits."""
LINKING = {"linux": ("-s", "-lm"), "darwin": ("-Wl,-undefined,dynamic_lookup",)}


class BuildError(Exception):
    """The reason why the library cannot be built."""


def variants() -> tuple[str, ...]:
    """Return the instruction sets for which the library contains each function, the fastest first."""
    return tuple(VARIANTS) if platform.machine().lower() in ("x86_64", "amd64") else ("baseline",)


def library_path() -> Path:
    """Return the path of the library of these sources, which may not exist yet."""
    key = hashlib.sha256(repr((FLAGS, VARIANTS, platform.machine())).encode())
    for source in [*_sources(), *sorted(HERE.glob("*.h"))]:
        key.update(source.read_bytes())
    return HERE / f"locant-{key.hexdigest()[:16]}.so"


def build() -> Path:
    """Compile the library in some seconds. Raise `BuildError` with the reason if this is not possible."""
    if sys.platform not in COMPILERS:
        raise BuildError(f"native kernels are built on Linux and macOS, this is {sys.platform}")
    names = COMPILERS[sys.platform]
    compiler = shlex.split(os.environ.get("CC", "")) or [next(filter(shutil.which, names), names[0])]
    if shutil.which(compiler[0]) is None:
        raise BuildError(f"found no C compiler {compiler[0]!r}")
    target = library_path()
    with tempfile.TemporaryDirectory(dir=HERE) as folder:
        objects: list[str] = []
        for source in _sources():
            for variant in variants():
                machine = [VARIANTS[variant]] if len(variants()) > 1 else []
                objects.append(f"{folder}/{source.stem}-{variant}.o")
                _run([*compiler, *FLAGS, *machine, f"-DVARIANT={variant}", "-c", str(source), "-o", objects[-1]])
        linked = Path(folder) / target.name
        # OpenMP is not linked. Its functions come from the library that torch has loaded, so that there is one pool.
        _run([*compiler, "-shared", *objects, *LINKING[sys.platform], "-o", str(linked)])
        for old in HERE.glob("locant-*.so"):  # remove all older libraries. Processes that have loaded one keep it
            if old != target:  # of these sources, which another process may build at the same time
                old.unlink(missing_ok=True)
        linked.replace(target)
    return target


def _sources() -> list[Path]:
    return sorted(HERE.glob("*.c"))


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 -- only the compiler
    if result.returncode:
        lines = (result.stderr or result.stdout).strip().splitlines()
        raise BuildError(f"{command[0]} ended with code {result.returncode}: {lines[0] if lines else 'no output'}")
