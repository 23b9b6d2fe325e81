"""`locant convert`: a line about what changed."""

from __future__ import annotations

from dataclasses import asdict

from locant.checkpoints.layout_folder import Conversion
from locant.report.console import counted, out, print_json, talk

__all__ = ["print_conversion"]


def print_conversion(conversion: Conversion, *, as_json: bool = False) -> None:
    """What was converted on stdout, and what was left out on stderr."""
    if conversion.left_out:
        talk(f"left out: {', '.join(conversion.left_out)}")
    if as_json:
        print_json(asdict(conversion))
        return
    moved = f"{conversion.converted} of {conversion.tensors} tensors converted"
    size = f"{counted(conversion.bytes, 'byte')} in {counted(len(conversion.files), 'file')}"
    out().print(f"{conversion.output}: {conversion.source} -> {conversion.to}, {moved}, {size}", soft_wrap=True)
