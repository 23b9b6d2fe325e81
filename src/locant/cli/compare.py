"""``locant compare``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from locant.cli.options import Listed, as_json, files, only_given, output, tokenizer_options
from locant.lab import Settings

__all__ = ["verb"]


def _usual(name: str) -> str:
    value = getattr(Settings, name)
    return f"Default: {','.join(map(str, value)) if isinstance(value, tuple) else value}."


@click.command("compare")
@files
@click.option("--encodings", type=Listed(str), help=f"Names from `locant list`. {_usual('encodings')}")
@click.option(
    "--train-length", type=click.IntRange(min=1), help=f"Tokens per window in training. {_usual('train_length')}"
)
@click.option(
    "--multiples", type=Listed(int), help=f"The lengths to measure at, in training lengths. {_usual('multiples')}"
)
@click.option("--seeds", type=Listed(int), help=f"One training for each. {_usual('seeds')}")
@click.option(
    "--steps", "num_steps", type=click.IntRange(min=1), help=f"Training steps of each run. {_usual('num_steps')}"
)
@click.option(
    "--minutes",
    type=click.FloatRange(min=0, min_open=True),
    help="Instead of --steps: as many as fit in these minutes, all runs together.",
)
@click.option("--batch", "batch_size", type=click.IntRange(min=1), help=f"Windows per step. {_usual('batch_size')}")
@click.option("--learning-rate", type=click.FloatRange(min=0, min_open=True), help=_usual("learning_rate"))
@click.option("--d-model", type=click.IntRange(min=1), help=f"Width of the model. {_usual('d_model')}")
@click.option("--num-layers", type=click.IntRange(min=1), help=_usual("num_layers"))
@click.option("--num-heads", type=click.IntRange(min=1), help=_usual("num_heads"))
@tokenizer_options
@output("The folder of the report.", default="report")
@click.option("--force", is_flag=True, help="Write into a folder that holds other things; they stay as they are.")
@as_json
def verb(
    files: tuple[str, ...],
    tokenizer: str | None,
    vocab_size: int | None,
    download: bool,
    output: Path,
    force: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Train every encoding at a short length, and read at longer ones.

    Without a FILE the text is the documentation that ships inside Python; - is standard input.
    The last tenth of the text is held out, and the loss is measured there.
    A report that is already in the folder is replaced once the first result is in.
    """
    from locant.report.comparison.run import compare_files

    compare_files(
        files, only_given(options),
        tokenizer=tokenizer, vocab_size=vocab_size, download=download, folder=output, force=force, as_json=as_json,
    )  # fmt: skip
