"""``locant golden`` and ``check-batch``: for the programs beside this one that place tokens, too."""

from __future__ import annotations

from pathlib import Path

import click

from locant.cli.options import as_json, count, output


@click.command("golden")
@output("The file of safetensors.", default="golden.safetensors")
@as_json
def golden(output: Path, as_json: bool) -> None:
    """Write golden vectors, to check a port of rotary positions.

    A port to another language is right where it agrees with them: seven scalings at two bases, at positions from 0 to
    2^31 - 1, with frequencies, exact and float32 cosines and sines, and vectors rotated in both layouts.
    """
    from locant.engines.golden import write_golden
    from locant.report.console import print_result

    facts = {"file": str(output), "tensors": write_golden(output), "bytes": output.stat().st_size}
    print_result(facts, f"{output}: {facts['tensors']} tensors, {facts['bytes']:,} bytes", as_json=as_json)


@click.command("check-batch")
@click.argument("file")
@count("--axes", default=1, show_default=True, help="3 for models with positions in time, rows and columns.")
@as_json
def check_batch(file: str, axes: int, as_json: bool) -> None:
    """Find mistakes in the positions of a training batch.

    FILE is a batch as a model of transformers is called with, saved as .safetensors, .npz or .json: input_ids,
    position_ids, attention_mask, labels, cu_seq_lens_q and _k, max_length_q and _k, as far as it has them. Told are
    documents that see each other, positions that do not restart, targets across documents, ids of images that were
    flattened, and lengths of another batch. Exit code 1: something is wrong.
    """
    from locant.engines import batches
    from locant.report.console import print_json

    findings = batches.check_batch(batches.read_batch(file), axes=axes)
    if as_json:
        print_json({"file": file, "findings": findings})
    else:
        click.echo("\n".join(findings) or "positions and documents agree")
    if findings:
        raise click.exceptions.Exit(1)
