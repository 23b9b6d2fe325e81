"""``locant golden``."""

from __future__ import annotations

from pathlib import Path

import click

from locant.cli.options import output

__all__ = ["verb"]


@click.command("golden")
@output("The file of safetensors.", default="golden.safetensors")
def verb(output: Path) -> None:
    """Write golden vectors, which a port of rotary positions to another language has to agree with.

    Seven scalings at two bases, at positions from 0 to 2^31 - 1: frequencies, exact and float32 cosines and sines,
    and vectors rotated in both layouts.
    """
    from locant.engines.golden import write_golden

    number = write_golden(output)
    click.echo(f"{output}: {number} tensors, {output.stat().st_size:,} bytes")
