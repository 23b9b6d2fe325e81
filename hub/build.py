"""``python hub/build.py FOLDER``: the rotary kernel of locant, in the layout that the Hub's `kernels` library loads.

A kernel of the Hub is a folder that is imported under a name of its own, so it may import nothing but torch and itself,
and its operators need names that no other version has. What the files of `hub/rotary` import of locant is copied with
that changed: imports become relative, shapes in signatures are for type checkers alone. One folder for each variant:

    build/torch-cuda/                              Triton
    build/torch-cpu/                               torch's own operators
    build/torch-stable-abi29-cpu-x86_64-linux/     C, where a compiler is found; it needs nothing of torch's ABI
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import platform
import re
import shutil
import sys
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["build"]

HUB = Path(__file__).parent
LOCANT = HUB.parent / "src" / "locant"
NATIVE = LOCANT / "kernels" / "native"
PROGRAMS = ("rotary.c", "norm_rotary.c")
"""The C programs of this kernel. The headers that they include are found."""
TYPES_ALONE = "TYPE_CHECKING = False  # as type checkers know it without an import\nif TYPE_CHECKING:\n    \\1"
BLANK = ("positions/__init__.py",)
"""Packages whose names are all of locant: here only their folder is wanted."""


def build(out: Path, kernel: str = "rotary") -> list[Path]:
    """Write the variants of a kernel into a folder that has none yet; the folders that were written."""
    if (out / "build").exists():
        raise FileExistsError(f"{out / 'build'} is there already; try: another folder, or remove it")
    native = f"torch-stable-abi29-cpu-{platform.machine()}-{sys.platform}"
    variants = {"torch-cuda": "cuda", "torch-cpu": "cpu", native: "cpu"}
    written = [_write(out / "build" / name, kernel, backend) for name, backend in variants.items()]
    if not _compile(written[-1]):
        shutil.rmtree(written.pop())
    shutil.copy(HUB / kernel / "README.md", out)
    return written


def _write(folder: Path, kernel: str, backend: str) -> Path:
    texts = _sources(kernel)
    digest = hashlib.sha256(repr((folder.name, sorted(texts.items()))).encode()).hexdigest()[:7]
    identity = f"_locant_{kernel}_{backend}_{digest}"
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_standing_alone(text, name, identity), encoding="utf-8")
    facts = {
        "name": f"locant-{kernel}",
        "id": identity,
        "version": 1,
        "license": "apache-2.0",
        "python-depends": [],
        "backend": {"type": backend},
    }
    (folder / "metadata.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    return folder


def _sources(kernel: str) -> dict[str, str]:
    """What the kernel consists of, by its place: its own files, and what they import of locant, directly or not."""
    found = {path.name: _read(path) for path in (HUB / kernel).glob("*.py")}
    waiting = [*found.values()]
    while waiting:
        for name in _imported(waiting.pop()) - found.keys():
            found[name] = "" if name in BLANK else _read(LOCANT / name)
            waiting.append(found[name])
    return found


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _imported(text: str) -> set[str]:
    """The files of locant that are read when this one is."""
    files: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "locant":
            parts = (node.module or "").split(".")[1:]
            for module in (parts, *([*parts, alias.name] for alias in node.names)):
                files.update("/".join([*module[:end], "__init__.py"]) for end in range(1, len(module) + 1))
                files.add("/".join(module) + ".py")
    return {name for name in files if (LOCANT / name).is_file()}


def _standing_alone(text: str, name: str, identity: str) -> str:
    """The same code, which imports torch and itself, with operators of its own."""
    dots = "." * len(Path(name).parts)
    text = re.sub(r"^( *)from locant\.", rf"\1from {dots}", text, flags=re.MULTILINE)
    text = re.sub(r"^from hub\.\w+ import", "from . import", text, flags=re.MULTILINE)
    text = re.sub(r"^(from jaxtyping import .*)$", TYPES_ALONE, text, flags=re.MULTILINE)
    return text.replace('"locant::', f'"{identity}::')


def _compile(folder: Path) -> bool:
    """Compile the C sources in their place; whether that was possible."""
    place = folder / "kernels" / "native"
    for source in _with_headers(PROGRAMS):
        shutil.copy(NATIVE / source, place)
    module = _load(place / "build.py")
    try:
        module.build()
    except module.BuildError as error:
        sys.stderr.write(f"without C code: {error}\n")
        return False
    return True


def _with_headers(names: Iterable[str]) -> set[str]:
    """Return the names of C files and of all headers that they include, directly or not."""
    found, waiting = set[str](), [*names]
    while waiting:
        name = waiting.pop()
        found.add(name)
        waiting += {*re.findall(r'^#include "(.+)"', _read(NATIVE / name), flags=re.MULTILINE)} - found
    return found


def _load(path: Path) -> Any:
    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    exec(compile(_read(path), path, "exec"), module.__dict__)  # noqa: S102 -- our own file, as it lies in the kernel
    return module


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The rotary kernel of locant, in the layout of the Hub's `kernels`.")
    parser.add_argument("folder", type=Path, help="where its folder build is written")
    try:
        for variant in build(parser.parse_args().folder):
            sys.stdout.write(f"{variant}\n")
    except OSError as error:
        parser.error(str(error))
