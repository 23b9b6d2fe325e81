"""``locant tune``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from locant.cli.options import SEED, as_json, device, files, only_given, output

__all__ = ["verb"]

AT_LEAST_ONE = click.IntRange(min=1)
POSITIVE = click.FloatRange(min=0, min_open=True)


@click.command("tune")
@click.argument("model")
@files
@click.option(
    "--with",
    "way",
    required=True,
    metavar="NAME",
    help="The positions it gets: yarn:8, ntk:8, linear:8, dynamic:8, longrope:8 or llama3:8 stretch its own; drope "
    "(or nope) drops them; alibi and others of `locant list` take their place; own stays.",
)
@click.option("--train", type=click.Choice(("all", "new", "lora")), help="All weights, those of a new encoding alone, "
              "or low-rank adapters (needs peft). Default: all.")  # fmt: skip
@click.option(
    "--length",
    type=click.IntRange(min=2),
    help="Tokens per window. Default: the length that the model states; with a scaling, the trained one times the "
    "factor.",
)
@click.option("--steps", "num_steps", type=AT_LEAST_ONE, help="Training steps. Default: 400.")
@click.option("--minutes", type=POSITIVE, help="Instead of --steps: as many as fit in these, timed before the first.")
@click.option("--batch", "batch_size", type=AT_LEAST_ONE, help="Windows per step. Default: 8.")
@click.option(
    "--learning-rate", type=POSITIVE, help="Default: 2e-5 for all weights, 2e-4 for adapters, 1e-3 for a new encoding."
)
@click.option("--rank", type=AT_LEAST_ONE, help="Of the adapters. Default: 16.")
@click.option("--adapter", is_flag=True, default=None, help="Write the adapters alone, not merged into the weights.")
@click.option("--seed", type=SEED, help="Of the order of the text and of what is new. Default: 0.")
@device
@output("The folder to write. Default: MODEL-NAME, such as model-yarn-8.")
@click.option("--force", is_flag=True, help="Replace the folder of a model that is there; forget another run.")
@as_json
def verb(model: str, files: tuple[str, ...], output: Path | None, force: bool, as_json: bool, **options: Any) -> None:
    """Train a model on a text, so that it gets used to other positions.

    MODEL is a folder of this machine, with safetensors and a tokenizer.json; it stays as it is.
    Without a FILE the text is the documentation that ships inside Python; - is standard input. Its last tenth is held
    out. Killed at any moment, the same command goes on where it was, to the same bits.

    YaRN's recipe: --with yarn:8, some hundred steps. DroPE's: --with drope, at the trained length.
    """
    from locant.lab.tuning import TuneSettings, tune
    from locant.report.console import print_json, progress_bar
    from locant.report.evaluation import print_tuning

    settings = TuneSettings(**only_given(options))
    place = output or Path(f"{Path(model).name}-{settings.way.replace(':', '-').lower()}")
    with progress_bar("step") as progress:
        record = tune(model, files, settings, output=place, force=force, on_step=progress)
    if as_json:
        print_json({**record, "output": str(place)})
    else:
        print_tuning(record, place)
