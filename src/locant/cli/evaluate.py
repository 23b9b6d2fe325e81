"""``locant evaluate``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from locant.cli.options import as_json, device, listed, only_given, output

__all__ = ["verb"]


@click.command("evaluate")
@click.argument("model")
@click.argument("files", nargs=-1, type=str, metavar="[FILE]...")
@click.option("--lengths", type=listed(int), metavar="NUMBERS,...", help="Tokens per window. Default: 1024,2048,4096.")
@click.option(
    "--with",
    "ways",
    type=listed(str),
    metavar="NAMES,...",
    help="own, exact (its own in exact angles), nope, linear:4, ntk:4, yarn:4, longrope:4, dynamic, self-extend:8 "
    "(groups of 8), rerope, dual-chunk. Default: own,exact,yarn:4.",
)
@click.option(
    "--windows", type=click.IntRange(min=1), help="At most so many windows of the longest length. Default: 16."
)
@click.option(
    "--minutes",
    type=click.FloatRange(min=0, min_open=True),
    help="Only as many windows as fit in these, timed before the first; one at least.",
)
@click.option(
    "--keys",
    type=click.IntRange(min=0),
    help="Pass keys, and keys with values, asked for at each of five depths; 0 for none. Default: 2.",
)
@device
@click.option(
    "--dtype",
    type=click.Choice(("auto", "float32", "bfloat16", "float16")),
    help="What the model is read in. Default: auto, as it was saved.",
)
@output("The folder of the report.", default="report")
@click.option("--force", is_flag=True, help="Write into a folder that holds other things; they stay as they are.")
@as_json
def verb(model: str, files: tuple[str, ...], output: Path, force: bool, as_json: bool, **options: Any) -> None:
    """Measure other position encodings in a trained model.

    Nothing is trained.
    MODEL is a folder of this machine, with safetensors and a tokenizer.json.
    Without a FILE the text is the documentation that ships inside Python; - is standard input.
    The first encoding is the one that the others are held against. What an earlier call with the same model, text and
    settings has finished is taken from its folder.
    """
    from locant.figures.canvas import require_matplotlib
    from locant.lab.evaluation import EvaluationSettings, evaluate_model
    from locant.report.console import print_json, progress_bar
    from locant.report.evaluation import print_evaluation, write_evaluation

    require_matplotlib()
    settings = EvaluationSettings(**only_given(options))
    with progress_bar("part") as progress:
        results = evaluate_model(model, files, settings, output=output, force=force, on_step=progress)
    page = write_evaluation(results, output)
    if as_json:
        print_json({**results, "report": str(page)})
    else:
        print_evaluation(results)
        sys.stdout.write(f"\nThe report: {page}\n")
