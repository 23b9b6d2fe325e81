"""``locant check-batch``."""

from __future__ import annotations

import click

from locant.cli.options import as_json

__all__ = ["verb"]


@click.command("check-batch")
@click.argument("file")
@click.option(
    "--axes", type=click.IntRange(1, 3), default=1, show_default=True, help="3 for models such as Qwen2-VL, whose "
    "positions have time, rows and columns.",
)  # fmt: skip
@as_json
def verb(file: str, axes: int, as_json: bool) -> None:
    """Look for mistakes in the positions and documents of a training batch.

    FILE is a batch as a model of transformers is called with, saved as .safetensors, .npz or .json: input_ids,
    position_ids, attention_mask, labels, cu_seq_lens_q and _k, max_length_q and _k, as far as it has them. Told are
    documents that see each other, positions that do not restart, targets across documents, ids of images that were
    flattened, and lengths of another batch. Exit code 1: something is wrong.
    """
    from locant.engines.batches import check_batch, read_batch
    from locant.report.console import print_json

    findings = check_batch(read_batch(file), axes=axes)
    if as_json:
        print_json({"file": file, "findings": findings})
    else:
        click.echo("\n".join(findings) or "positions and documents agree")
    if findings:
        raise click.exceptions.Exit(1)
