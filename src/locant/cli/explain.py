"""``locant explain``."""

from __future__ import annotations

from pathlib import Path

import click

from locant.cli.options import as_json, output

__all__ = ["verb"]


@click.command("explain")
@click.argument("config")
@output("Also draw a picture; its suffix (.png, .svg, .pdf) is the format.")
@as_json
def verb(config: str, output: Path | None, as_json: bool) -> None:
    """Show how a model encodes positions, in words and numbers.

    CONFIG is a config.json, the folder of a model, or the name of a preset such as llama-3.1-8b; a wrong name lists
    them all.
    """
    from locant.checkpoints.config_source import read_source
    from locant.checkpoints.explanation import explain
    from locant.figures.canvas import require_figure, save
    from locant.figures.plot import draw_explanation
    from locant.report.explain import print_explanation

    require_figure(output)
    read = read_source(config)
    explanation = explain(read)
    if output is not None:
        save(draw_explanation(explanation, read, config), output)
    print_explanation(explanation, config, output, as_json=as_json)
