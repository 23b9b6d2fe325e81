"""``locant explain``."""

from __future__ import annotations

from pathlib import Path

import click

from locant.cli.options import as_json, output
from locant.errors import InputError

__all__ = ["verb"]


@click.command("explain")
@click.argument("config")
@click.option("--against", metavar="CONFIG", help="Of a GGUF file: what it was made from, to be compared with it.")
@click.option("--n-ctx", type=click.IntRange(min=1), help="Of a GGUF file: the context allocated, llama.cpp's -c.")
@output("Also draw a picture; its suffix (.png, .svg, .pdf) is the format.")
@as_json
def verb(config: str, against: str | None, n_ctx: int | None, output: Path | None, as_json: bool) -> None:
    """Show how a model encodes positions, in words and numbers.

    CONFIG is a config.json, the folder of a model, or the name of a preset such as llama-3.1-8b; a wrong name lists
    them all. It may also be a GGUF file: then what llama.cpp does with it is told, and with --against where that
    differs from a configuration; beside the safetensors of a folder, also whether q and k are in the right order.
    Exit code 1: they differ.
    """
    if config.endswith(".gguf"):
        _explain_gguf(config, against, n_ctx, output, as_json=as_json)
        return
    if against is not None or n_ctx is not None:
        raise InputError(f"got --against or --n-ctx for {config}, which is no GGUF file", "FILE.gguf --against CONFIG")
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


def _explain_gguf(file: str, against: str | None, n_ctx: int | None, output: Path | None, *, as_json: bool) -> None:
    from locant.checkpoints.config_source import read_source
    from locant.engines.gguf import compare_gguf, read_gguf
    from locant.figures.canvas import require_figure, save
    from locant.figures.plot import plot
    from locant.report.gguf import print_gguf

    require_figure(output)
    if against is None:
        model, comparison = read_gguf(file, n_ctx), None
    else:
        folder = Path(against) if any(Path(against).glob("*.safetensors*")) else None
        comparison = compare_gguf(file, read_source(against), n_ctx=n_ctx, folder=folder)
        model = comparison.model
    if output is not None:
        save(plot(model.encoding), output)
    print_gguf(model, comparison, file, as_json=as_json)
    if comparison is not None and not comparison.agrees:
        raise click.exceptions.Exit(1)
