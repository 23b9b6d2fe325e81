"""``locant extend``."""

from __future__ import annotations

from pathlib import Path

import click

from locant.cli.options import Place, as_json, output

__all__ = ["verb"]

METHODS = ("yarn", "linear", "ntk", "dynamic", "longrope", "llama3")


@click.command("extend")
@click.argument("config")
@click.option("--to", type=click.IntRange(min=1), required=True, metavar="TOKENS", help="The new length.")
@click.option("--method", type=click.Choice(METHODS), default="yarn", show_default=True, help="How to stretch.")
@output("The new configuration. Default: NAME-METHOD-TOKENS.json.")
@click.option("--figure", type=Place(), help="Also draw a picture (.png, .svg, .pdf).")
@as_json
def verb(config: str, to: int, method: str, output: Path | None, figure: Path | None, as_json: bool) -> None:
    """Write the configuration of a model for a longer context.

    CONFIG is a config.json, the folder of a model, or the name of a preset. Only what has to change changes. Whether
    the model then reads that far is for a measurement, and often for some training.
    """
    from locant.report.extend import extend_source

    extend_source(config, to=to, method=method, output=output, figure=figure, as_json=as_json)
