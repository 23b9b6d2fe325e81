"""``locant extend``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from locant.cli.options import SEED, Place, as_json, device, only_given, output
from locant.errors import InputError

__all__ = ["verb"]

METHODS = ("yarn", "linear", "ntk", "dynamic", "longrope", "llama3")


@click.command("extend")
@click.argument("config")
@click.option("--to", type=click.IntRange(min=1), required=True, metavar="TOKENS", help="The new length.")
@click.option("--method", type=click.Choice(METHODS), default=METHODS[0], show_default=True, help="How to stretch.")
@click.option("--search", metavar="TEXT", help="With longrope: search its factors on this text, with the model itself.")
@click.option("--generations", type=click.IntRange(min=0), help="Of the search, 12 forward passes each. Default: 8.")
@click.option("--windows", type=click.IntRange(min=1), help="At most so many of TOKENS from TEXT. Default: 4.")
@click.option("--seed", type=SEED, help="Of the search. Default: 0.")
@device
@output("The new configuration. Default: NAME-METHOD-TOKENS.json.")
@click.option("--figure", type=Place(), help="Also draw a picture (.png, .svg, .pdf).")
@as_json
def verb(
    config: str,
    to: int,
    method: str,
    search: str | None,
    output: Path | None,
    figure: Path | None,
    as_json: bool,
    **of_search: Any,
) -> None:
    """Write the configuration of a model for a longer context.

    CONFIG is a config.json, the folder of a model, or the name of a preset. Only what has to change changes. Whether
    the model then reads that far is for a measurement, and often for some training.
    A search needs the folder, with weights and tokenizer. What it measures is kept beside the new configuration, in
    NAME.search.json, and a second call goes on from there.
    """
    from locant.checkpoints.extension import write_extension
    from locant.figures.canvas import require_figure, save
    from locant.figures.plot import draw_extension
    from locant.report.explain import print_extension

    def draw(extension: Any) -> None:
        if figure is not None:
            save(draw_extension(extension, config), figure)

    require_figure(figure)
    factors = None
    given = only_given(of_search)
    if search is not None:
        factors = _searched(config, search, to, method, output, given)
    elif given:
        raise InputError(f"got --{next(iter(given))} without a search", "--method longrope --search my.txt")
    extension, written = write_extension(config, to=to, method=method, output=output, factors=factors, beside=draw)
    print_extension(extension, config, written, figure, as_json=as_json)


def _searched(config: str, text: str, to: int, method: str, output: Path | None, given: dict[str, Any]) -> Any:
    from locant.checkpoints.config_source import read_source
    from locant.checkpoints.extension import extend, extension_path
    from locant.files import require_file
    from locant.report.console import progress_bar

    if method != "longrope":
        raise InputError(f"got --search for {method}, which has no factors to search", "--method longrope")
    path = extension_path(config, to=to, method=method, output=output)
    require_file(path)  # a search can take hours
    extension = extend(read_source(config), to=to, method=method)
    from locant.lab.factor_search import search_factors

    with progress_bar("set") as progress:
        record = path.with_name(f"{path.name.removesuffix('.json')}.search.json")
        return search_factors(config, [text], extension, record=record, on_step=progress, **given)
