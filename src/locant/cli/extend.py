"""``locant extend``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from locant.cli.options import Place, as_json, output

__all__ = ["verb"]

METHODS = ("yarn", "linear", "ntk", "dynamic", "longrope", "llama3")


@click.command("extend")
@click.argument("config")
@click.option("--to", type=click.IntRange(min=1), required=True, metavar="TOKENS", help="The new length.")
@click.option("--method", type=click.Choice(METHODS), default=METHODS[0], show_default=True, help="How to stretch.")
@output("The new configuration. Default: NAME-METHOD-TOKENS.json.")
@click.option("--figure", type=Place(), help="Also draw a picture (.png, .svg, .pdf).")
@as_json
def verb(config: str, to: int, method: str, output: Path | None, figure: Path | None, as_json: bool) -> None:
    """Write the configuration of a model for a longer context.

    CONFIG is a config.json, the folder of a model, or the name of a preset. Only what has to change changes. Whether
    the model then reads that far is for a measurement, and often for some training.
    """
    from locant.checkpoints.extension import write_extension
    from locant.figures.canvas import require_figure, save
    from locant.figures.plot import draw_extension
    from locant.report.explain import print_extension

    def draw(extension: Any) -> None:
        if figure is not None:
            save(draw_extension(extension, config), figure)

    require_figure(figure)
    extension, written = write_extension(config, to=to, method=method, output=output, beside=draw)
    print_extension(extension, config, written, figure, as_json=as_json)
