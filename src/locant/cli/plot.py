"""``locant plot``."""

from __future__ import annotations

from pathlib import Path

import click

from locant.cli.options import as_json, output

__all__ = ["verb"]


@click.command("plot")
@click.argument("encoding")
@output("The picture; its suffix (.png, .svg, .pdf) says which kind. Default: ENCODING.png.")
@click.option(
    "--length", type=click.IntRange(2, 4096), help="Positions to draw. Default: 128; for t5 past its max_distance."
)
@click.option(
    "--d-model", type=click.IntRange(min=1), help="Width of the embeddings (sinusoidal, learned). Default: 128."
)
@click.option("--head-dim", type=click.IntRange(min=1), help="Width of a head (rotary). Default: 64.")
@click.option("--num-heads", type=click.IntRange(min=1), help="Heads (alibi, t5). Default: 8.")
@click.option(
    "--base",
    type=click.FloatRange(min=0, min_open=True),
    help="Base of the frequencies (sinusoidal, rotary). Default: 10000.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the random weights of learned tables.")
@as_json
def verb(
    encoding: str, output: Path | None, length: int | None, seed: int, as_json: bool, **options: int | float | None
) -> None:
    """Draw a picture of an encoding.

    \b
    sinusoidal  every dimension of every position, and a few as curves
    rotary      the angle of every pair, its cosine, and a few as curves
    alibi, t5   what each head adds to the scores
    learned     the table, and how alike its positions are

    Tables of learned and t5 are drawn as they are before training.
    """  # noqa: D301
    from locant.report.console import print_json
    from locant.report.drawing import draw_to_file

    facts = draw_to_file(encoding, output, length=length, seed=seed, **options)
    if as_json:
        print_json(facts)
    else:
        click.echo(facts["figure"])
