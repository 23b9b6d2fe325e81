"""``locant compare``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from locant.cli.options import as_json, files, listed, only_given, output, tokenizer_options
from locant.lab.settings import MAX_EPOCHS, MAX_STEPS, Settings

__all__ = ["verb"]


def _default(name: str) -> str:
    value = getattr(Settings, name)
    return f"Default: {','.join(map(str, value)) if isinstance(value, tuple) else value}."


AT_LEAST_ONE = click.IntRange(min=1)
POSITIVE = click.FloatRange(min=0, min_open=True)


@click.command("compare")
@files
@click.option(
    "--encodings",
    type=listed(str),
    metavar="NAMES,...",
    help="Names from `locant list`; rotary+yarn, +ntk, +linear, +longrope or +llama3 is rotary, scaled beyond "
    f"the training length without more training. {_default('encodings')}",
)
@click.option("--train-length", type=AT_LEAST_ONE, help=f"Tokens per window in training. {_default('train_length')}")
@click.option(
    "--multiples",
    type=listed(int),
    metavar="NUMBERS,...",
    help=f"Lengths to measure at, in training lengths. {_default('multiples')}",
)
@click.option("--seeds", type=listed(int), metavar="NUMBERS,...", help=f"One training for each. {_default('seeds')}")
@click.option(
    "--steps",
    "num_steps",
    type=AT_LEAST_ONE,
    help=f"Training steps of each model. Default: {MAX_STEPS}, fewer where that is more than {MAX_EPOCHS} epochs.",
)
@click.option(
    "--minutes", type=POSITIVE, help="Instead of --steps: as many as fit in these minutes, all models together."
)
@click.option("--batch", "batch_size", type=AT_LEAST_ONE, help=f"Windows per step. {_default('batch_size')}")
@click.option("--learning-rate", type=POSITIVE, help=_default("learning_rate"))
@click.option("--d-model", type=AT_LEAST_ONE, help=f"Width of the model. {_default('d_model')}")
@click.option("--num-layers", type=AT_LEAST_ONE, help=_default("num_layers"))
@click.option("--num-heads", type=AT_LEAST_ONE, help=_default("num_heads"))
@tokenizer_options
@output("The folder of the report.", default="report")
@click.option("--force", is_flag=True, help="Write into a folder that holds other things; they stay as they are.")
@as_json
def verb(files: tuple[str, ...], output: Path, force: bool, as_json: bool, **options: Any) -> None:
    """Train every encoding at a short length, and measure it at longer ones.

    Without a FILE the text is the documentation that ships inside Python; - is standard input.
    The last tenth of the text is held out, and the loss is measured there.
    A report that is already in the folder is replaced once the first result is in.
    """
    from locant.figures.canvas import require_matplotlib
    from locant.lab.comparison import compare_files
    from locant.lab.results import PAGE
    from locant.report.comparison import Screen, print_losses
    from locant.report.console import print_json

    require_matplotlib()
    text = {name: options.pop(name) for name in ("tokenizer", "vocab_size", "download")}
    results = compare_files(files, only_given(options), folder=output, force=force, watcher=Screen(), **text)
    if as_json:
        print_json({**results, "report": str(output / PAGE)})
    else:
        print_losses(results)
        sys.stdout.write(f"\nThe report: {output / PAGE}\n")
