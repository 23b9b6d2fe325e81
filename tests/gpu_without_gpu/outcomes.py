"""What came out of compiling a kernel: one that is as it was is not compiled again.

A kernel costs Triton and the assembler seconds, and there are hundreds. Their machine code depends on the kernel in
Triton's first language (TTIR), on options, on the device and on the version of Triton, and on nothing else. So tests
write the kernels of the code as it is, and take from `RECORD` what such a kernel came to; what is not in there is
compiled. `make kernels` compiles all anew and writes them down. Of the slow run this saves minutes: `test_launches.py`,
which `test_triton_versions.py` repeats for each Triton, takes 8 CPU seconds instead of 48.
"""

from __future__ import annotations

import csv
import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["ANEW", "RECORD", "Outcome", "of", "remember"]

RECORD = Path(__file__).parent / "outcomes.csv"
"""A line for each kernel, sorted: its `COLUMNS`, the last of which is a digest of all that machine code depends on."""

COLUMNS = ("name", "target", "shared", "tmem_size", "registers", "stack", "atomics", "ptx", "key")
NUMBERS = ("shared", "tmem_size", "registers", "stack", "atomics")

WITHOUT_SCRATCH = {
    "tensordesc_meta": [], "global_scratch_size": 0, "global_scratch_align": 1, "profile_scratch_size": 0,
    "profile_scratch_align": 1,
}  # fmt: skip
"""What Triton says besides of every kernel here; one of which it says anything else is compiled each time."""

ANEW = "LOCANT_KERNELS_ANEW"
"""In the environment of `make kernels`: every kernel that is compiled is written down."""

Stage = Callable[[Any, dict[str, Any]], Any]


@dataclass(frozen=True)
class Outcome:
    """What tests ask of the machine code of a kernel."""

    target: str
    """As the assembler names it: sm_90a."""
    ptx: str
    """A digest of its text."""
    atomics: int
    """Instructions that change memory in whatever order programs come."""
    registers: int
    stack: int
    """Bytes of every thread that did not fit into its registers."""


def of(kernel: Any) -> Outcome:
    """The outcome of a kernel of Triton's that was compiled, or not, after `remember`."""
    return Outcome(**kernel.metadata.outcome)


def remember(record: Path | None = RECORD) -> None:
    """Let Triton take from `record` what it would compile, for as long as this process lives."""
    import triton
    from triton.backends.nvidia.compiler import CUDABackend

    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # or machine code tells where this folder is
    add_stages, known = CUDABackend.add_stages, _read(record)

    def add_fewer_stages(self: Any, stages: dict[str, Stage], options: Any, *rest: Any) -> None:
        add_stages(self, stages, options, *rest)
        compile_ = dict(stages)
        told_before = dict[str, Any]()

        def first(source: Any, metadata: dict[str, Any]) -> Any:
            module = compile_["ttir"](source, metadata)
            text = re.sub(r" loc\(.*?\)$|^#loc.*$", "", str(module), flags=re.MULTILINE)
            told_before.update(metadata, key=_digest(triton.__version__, self.target, _anywhere(options), text))
            if (found := known.get(told_before["key"])) is None:
                return module
            metadata.update(found)
            return _Known()

        def after(name: str) -> Stage:
            return lambda source, metadata: source if isinstance(source, _Known) else compile_[name](source, metadata)

        def ptx(source: Any, metadata: dict[str, Any]) -> Any:
            made = after("ptx")(source, metadata)
            if not isinstance(source, _Known):
                told_before["text"] = made
            return made

        def last(source: Any, metadata: dict[str, Any]) -> bytes:
            if isinstance(source, _Known):
                return b""
            made = compile_["cubin"](source, metadata)
            metadata["outcome"] = asdict(_outcome(told_before.pop("text"), made))
            key = told_before["key"]
            known[key] = {name: value for name, value in metadata.items() if told_before.get(name) != value}
            if record is not None and ANEW in os.environ:
                _write(record, key, **known[key])
            return made

        stages |= {name: after(name) for name in stages} | {"ttir": first, "ptx": ptx, "cubin": last}

    CUDABackend.add_stages = add_fewer_stages


class _Known:
    """Stands for every form of a kernel that is not compiled."""

    def __str__(self) -> str:
        return ""


def _anywhere(options: Any) -> Any:
    """These options with the libraries of Triton by what they hold: where they lie differs between machines."""
    return replace(options, extern_libs=tuple((name, _held(path)) for name, path in options.extern_libs))


@cache
def _held(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _digest(*parts: object) -> str:
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:16]


def _outcome(ptx: str, cubin: bytes) -> Outcome:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    registers, stack, local = (int(n) for n in re.findall(r"\b(?:REG|STACK|LOCAL):(\d+)", told.stdout))
    (target,) = re.findall(r"^\.target (\w+)", ptx, re.MULTILINE)
    atomics = len(re.findall(r"^\s*(?:@\S+ )?(?:atom|red)\.", ptx, re.MULTILINE))
    return Outcome(target, _digest(ptx), atomics, registers, stack + local)


def _read(record: Path | None) -> dict[str, dict[str, Any]]:
    if record is None or not record.exists():
        return {}
    known = {}
    with record.open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file, COLUMNS):
            told = line | {name: int(line[name]) for name in NUMBERS}
            outcome = {field.name: told.pop(field.name) for field in fields(Outcome)}
            known[told.pop("key")] = {**WITHOUT_SCRATCH, **told, "outcome": outcome}
    return known


def _write(record: Path, key: str, outcome: dict[str, Any], **told: Any) -> None:
    line = {**told, **outcome, "key": key}
    if {name: value for name, value in line.items() if name not in COLUMNS} == WITHOUT_SCRATCH:
        with record.open("a", encoding="utf-8") as file:  # a short line: those of two processes do not mix
            file.write(",".join(str(line[name]) for name in COLUMNS) + "\n")
