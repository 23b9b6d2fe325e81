"""``locant plot``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from locant.cli.options import SEED, as_json, encoding_options, only_given, output, require_taken
from locant.figures import MAX_LENGTH, TRAINED

__all__ = ["verb"]


@click.command("plot")
@click.argument("encoding")
@output("The picture; its suffix (.png, .svg, .pdf) is the format. Default: ENCODING.png.")
@click.option(
    "--length", type=click.IntRange(2, MAX_LENGTH), help="Positions to draw. Default: enough to see the pattern."
)
@encoding_options
@click.option("--scaling", metavar="NAME[:FACTOR]", help="Of rotary, such as yarn:8; a wrong name lists all.")
@click.option(
    "--trained", type=click.IntRange(min=1), default=TRAINED, help="The trained length, which --scaling stretches."
)
@click.option("--theme", type=click.Choice(["light", "dark"]), default="light", show_default=True, help="The paper.")
@click.option("--seed", type=SEED, default=0, show_default=True, help="Of the random weights of learned tables.")
@as_json
def verb(
    encoding: str, output: Path | None, length: int | None, trained: int, theme: str, seed: int, as_json: bool,
    **options: Any,
) -> None:  # fmt: skip
    """Draw a picture of an encoding.

    \b
    what embeds        the table, and how alike its positions are
    what rotates       the angle of every pair, its cosine, and what is left of a product by distance
    what biases        what each head adds to the scores
    rotary --scaling   the wavelength of every pair, before and after

    ENCODING is a name from `locant list`. Learned tables are drawn as they are before training.
    """  # noqa: D301
    from locant.figures.canvas import THEMES, require_figure, save
    from locant.figures.plot import default_length, draw, encoding_to_draw
    from locant.report.console import print_json
    from locant.report.listing import numbers

    path = output or Path(f"{encoding}.png")
    require_figure(path)
    given = only_given(options)
    require_taken(encoding, given, "plot")
    built = encoding_to_draw(encoding, length=length, seed=seed, trained=trained, **given)
    save(draw(built, length=length, theme=THEMES[theme], trained=trained), path)
    if as_json:
        length = default_length(built) if length is None else length
        facts = {"encoding": encoding, "built": repr(built), "length": length, "seed": seed, "figure": str(path)}
        print_json({**facts, "numbers": numbers(built)})
    else:
        click.echo(path)
