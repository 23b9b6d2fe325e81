"""What tests ask of the machine code of a kernel."""

from __future__ import annotations

import re
import subprocess
import tempfile
from functools import cache
from pathlib import Path

__all__ = ["atomics", "contracted", "stack", "target"]


def target(ptx: str) -> str:
    """As the assembler names it: sm_90a."""
    (found,) = re.findall(r"^\.target (\w+)", ptx, re.MULTILINE)
    return found


def atomics(ptx: str) -> int:
    """Instructions that change memory in whatever order programs come."""
    return len(re.findall(r"^\s*(?:@\S+ )?(?:atom|red)\.", ptx, re.MULTILINE))


def contracted(ptx: str) -> int:
    """Products that are not rounded before they are added to something."""
    return len(re.findall(r"\bfma\.rn\S*\.f(?:32|64)", ptx))


@cache
def stack(cubin: bytes) -> int:
    """Bytes of every thread that did not fit into its registers."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    return sum(map(int, re.findall(r"\b(?:STACK|LOCAL):(\d+)", told.stdout)))
