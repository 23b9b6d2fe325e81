"""Compiling the C sources of this folder into one library, which lies beside them.

It needs a C compiler and nothing else: `hatch_build.py` runs this file by itself, before locant is installed. The name
of the library is made from the sources and from how they are compiled: one that is not theirs is not found.
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
"""No product is fused with a sum: results have the bits of torch's separate operations."""
VARIANTS = {"avx512": "-march=x86-64-v4", "avx2": "-march=x86-64-v3", "baseline": "-march=x86-64"}
"""Instruction sets of x86-64, the fastest first; each source is compiled for all of them."""
COMPILERS = {"linux": ("gcc", "clang"), "darwin": ("clang",)}
"""By system, what is looked for where ``CC`` names no compiler; results have the same bits from each."""
LINKING = {"linux": ("-s", "-lm"), "darwin": ("-Wl,-undefined,dynamic_lookup",)}


class BuildError(Exception):
    """Why there is no library."""


def variants() -> tuple[str, ...]:
    """What the library holds each function for, the fastest first."""
    return tuple(VARIANTS) if platform.machine().lower() in ("x86_64", "amd64") else ("baseline",)


def library_path() -> Path:
    """Where the library of these sources is, if it is built."""
    key = hashlib.sha256(repr((FLAGS, VARIANTS, platform.machine())).encode())
    for source in [*_sources(), *sorted(HERE.glob("*.h"))]:
        key.update(source.read_bytes())
    return HERE / f"locant-{key.hexdigest()[:16]}.so"


def build() -> Path:
    """Compile, some seconds; raises `BuildError` with the reason where that is not possible."""
    if sys.platform not in COMPILERS:
        raise BuildError(f"native kernels are built on Linux and macOS, this is {sys.platform}")
    known = COMPILERS[sys.platform]
    compiler = shlex.split(os.environ.get("CC", "")) or [next(filter(shutil.which, known), known[0])]
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
        # Not linked with OpenMP: its functions are found in the library that torch has loaded, so there is one pool.
        _run([*compiler, "-shared", *objects, *LINKING[sys.platform], "-o", str(linked)])
        for old in HERE.glob("locant-*.so"):  # of these and of earlier sources; who has one loaded keeps it
            old.unlink()
        linked.replace(target)
    return target


def _sources() -> list[Path]:
    return sorted(HERE.glob("*.c"))


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 -- the compiler, by name
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise BuildError(f"{command[0]} ended with code {done.returncode}: {said[0] if said else 'it says nothing'}")
