"""``locant probe``."""

from __future__ import annotations

from pathlib import Path

import click

from locant.cli.options import as_json, output

__all__ = ["verb"]


@click.command("probe")
@click.argument("model")
@click.option("--layer-type", help="Which layers, where they differ. Default: the first kind.")
@output("Also draw a picture; its suffix (.png, .svg, .pdf) is the format.")
@as_json
def verb(model: str, layer_type: str | None, output: Path | None, as_json: bool) -> None:
    """Measure what the rotary positions of a model do, without reading its code.

    MODEL is a config.json, the folder of a model, the name of a preset such as llama-3.1-8b, or a model_type or class
    that the installed transformers knows, such as qwen3 or Qwen3ForCausalLM. Its rotary module is built from the
    configuration and run: no weights, no code of the folder and no network.
    """
    from locant.checkpoints.config_source import read_source
    from locant.figures.canvas import require_figure, save
    from locant.figures.plot import plot
    from locant.probing.probe import config_by_name, probe
    from locant.report.console import print_json

    require_figure(output)
    known = None if Path(model).exists() else config_by_name(model)
    report = probe(read_source(model) if known is None else known, layer_type=layer_type)
    if output is not None:
        save(plot(report), output)
    if as_json:
        print_json({"model": model, **report.to_dict(), "figure": None if output is None else str(output)})
        return
    click.echo(str(report))
    if output is not None:
        click.echo(output)
