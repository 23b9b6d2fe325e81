"""``locant compare``, ``evaluate`` and ``tune``: what encodings are worth, in small models and in trained ones."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from locant.cli.options import (
    SEED,
    as_json,
    count,
    device,
    files,
    listed,
    only_given,
    output,
    positive,
    report_options,
    text_of,
    tokenizer_options,
)  # fmt: skip
from locant.lab.settings import (
    MAX_EPOCHS,
    MAX_STEPS,
    SIZES,
    SUITES,
    TASK_BATCH,
    TASK_LAYERS,
    TASK_STEPS,
    TEXT,
    TEXT_BATCH,
    TEXT_LAYERS,
    Settings,
)  # fmt: skip
from locant.lab.tasks import OWN


def _default(name: str) -> str:
    value = getattr(Settings, name)
    return f"Default: {','.join(map(str, value)) if isinstance(value, tuple) else value}."


@click.command("compare")
@files
@click.option(
    "--encodings", type=listed(str), metavar="NAMES,...",
    help="Names from `locant list`; rotary+yarn, +ntk, +linear, +longrope or +llama3 is rotary, scaled beyond "
    "the training length without more training; rotary@randomized, @abacus or @coupled is trained at such positions; "
    "mine.py:Mine is a class in a file. "
    f"{_default('encodings')}",
)  # fmt: skip
@click.option(
    "--tasks", type=listed(str), metavar="NAMES,...",
    help=f"What is learned: {TEXT} (of FILE), or rows that are generated: {', '.join(OWN)}. {_default('tasks')}",
)  # fmt: skip
@click.option(
    "--suite", type=click.Choice([*SUITES]),
    help="Tasks, lengths, steps and seeds that are always the same; the report has the recorded encodings, too.",
)  # fmt: skip
@count("--train-length", help=f"Tokens per window in training. {_default('train_length')}")
@count("--task-length", help=f"Items of the longest row of a task in training. {_default('task_length')}")
@click.option(
    "--multiples", type=listed(int), metavar="NUMBERS,...",
    help=f"Lengths to measure at, in training lengths. {_default('multiples')}",
)  # fmt: skip
@click.option("--seeds", type=listed(int), metavar="NUMBERS,...", help=f"One training for each. {_default('seeds')}")
@count(
    "--steps", "num_steps",
    help=f"Training steps of each model. Default: {MAX_STEPS}, fewer where that is more than {MAX_EPOCHS} epochs. For "
    f"a task {TASK_STEPS}, fewer where it is learned before.",
)  # fmt: skip
@positive("--minutes", help="Instead of --steps: as many as fit in these minutes, all models together.")
@count("--batch", "batch_size", help=f"Windows, or rows, per step. Default: {TEXT_BATCH}, or {TASK_BATCH} for a task.")
@positive("--learning-rate", help=_default("learning_rate"))
@click.option(
    "--rates", type=listed(float), metavar="NUMBERS,...",
    help="Factors of the learning rates; of several, the best is found for each encoding. Default: 1.",
)  # fmt: skip
@click.option(
    "--size", type=click.Choice([*SIZES]), help="Of the model. Default: tiny; the next three say it in numbers."
)
@count("--d-model", help=f"Width of the model. {_default('d_model')}")
@count("--num-layers", help=f"Default: {TEXT_LAYERS}, or {TASK_LAYERS} for a task.")
@count("--num-heads", help=_default("num_heads"))
@click.option("--device", metavar="NAME", help="cpu, cuda, cuda:1, ...; in bfloat16 on CUDA. Default: cpu.")
@click.option("--ray", metavar="ADDRESS|local", help="Train on a Ray cluster, or on one of processes of this machine.")
@tokenizer_options
@report_options
@as_json
def compare(files: tuple[str, ...], output: Path, force: bool, as_json: bool, **options: Any) -> None:
    """Train every encoding at a short length, and measure it at longer ones.

    Without a FILE the text is the documentation that ships inside Python; - is standard input.
    The last tenth of the text is held out, and the loss is measured there.
    With --tasks, rows are generated, and what counts is how many are right.
    A comparison that was killed goes on with the same command; with more encodings, tasks or seeds, only those are
    trained. A report of something else is replaced once the first result is in.
    """
    from locant.figures.canvas import require_matplotlib
    from locant.lab.comparison import compare_files
    from locant.lab.results import PAGE
    from locant.report.comparison import Screen, print_comparison

    require_matplotlib()
    text, ray, size = text_of(options), options.pop("ray"), options.pop("size")
    chosen = {**SIZES.get(size, {}), **only_given(options)}
    results = compare_files(files, chosen, folder=output, force=force, watcher=Screen(), ray=ray, **text)
    _show(results, output / PAGE, print_comparison, as_json=as_json)


def _show(results: dict[str, Any], page: Path, print_results: Callable[[Any], None], *, as_json: bool) -> None:
    from locant.report.console import print_json

    if as_json:
        print_json({**results, "report": str(page)})
    else:
        print_results(results)
        sys.stdout.write(f"\nThe report: {page}\n")


@click.command("evaluate")
@click.argument("model")
@files
@click.option("--lengths", type=listed(int), metavar="NUMBERS,...", help="Tokens per window. Default: 1024,2048,4096.")
@click.option(
    "--with", "ways", type=listed(str), metavar="NAMES,...",
    help="own, exact (its own in exact angles), nope, linear:4, ntk:4, yarn:4, longrope:4, dynamic, self-extend:8 "
    "(groups of 8), rerope, dual-chunk. Default: own,exact,yarn:4.",
)  # fmt: skip
@count("--windows", help="At most so many windows of the longest length. Default: 16.")
@positive("--minutes", help="Only as many windows as fit in these, timed before the first; one at least.")
@count(
    "--keys", low=0, help="Pass keys, and keys with values, asked for at each of five depths; 0 for none. Default: 2."
)
@click.option(
    "--far", is_flag=True, default=None,
    help="Also read tokens with their full context, and with the trained length of it: who uses what is far?",
)  # fmt: skip
@device
@click.option(
    "--dtype", type=click.Choice(("auto", "float32", "bfloat16", "float16")),
    help="What the model is read in. Default: auto, as it was saved.",
)  # fmt: skip
@report_options
@as_json
def evaluate(model: str, files: tuple[str, ...], output: Path, force: bool, as_json: bool, **options: Any) -> None:
    """Measure other position encodings in a trained model.

    Nothing is trained.
    MODEL is a folder of this machine, with safetensors and a tokenizer.json.
    Without a FILE the text is the documentation that ships inside Python; - is standard input.
    The first encoding is the one that the others are held against. What an earlier call with the same model, text and
    settings has finished is taken from its folder.
    """
    from locant.figures.canvas import require_matplotlib
    from locant.lab.evaluation import EvaluationSettings, evaluate_model
    from locant.report.console import progress_bar
    from locant.report.evaluation import print_evaluation, write_evaluation

    require_matplotlib()
    settings = EvaluationSettings(**only_given(options))
    with progress_bar("part") as progress:
        results = evaluate_model(model, files, settings, output=output, force=force, on_step=progress)
    _show(results, write_evaluation(results, output), print_evaluation, as_json=as_json)


@click.command("tune")
@click.argument("model")
@files
@click.option(
    "--with", "way", required=True, metavar="NAME",
    help="The positions it gets: yarn:8, ntk:8, linear:8, dynamic:8, longrope:8 or llama3:8 stretch its own; drope "
    "(or nope) drops them; alibi and others of `locant list` take their place; own stays.",
)  # fmt: skip
@click.option("--train", type=click.Choice(("all", "new", "lora")), help="All weights, those of a new encoding alone, "
              "or low-rank adapters (needs peft). Default: all.")  # fmt: skip
@count(
    "--length", low=2,
    help="Tokens per window. Default: the length that the model states; with a scaling, the trained one times the "
    "factor.",
)  # fmt: skip
@count("--steps", "num_steps", help="Training steps. Default: 400.")
@positive("--minutes", help="Instead of --steps: as many as fit in these, timed before the first.")
@count("--batch", "batch_size", help="Windows per step. Default: 8.")
@positive("--learning-rate", help="Default: 2e-5 for all weights, 2e-4 for adapters, 1e-3 for a new encoding.")
@count("--rank", help="Of the adapters. Default: 16.")
@click.option("--adapter", is_flag=True, default=None, help="Write the adapters alone, not merged into the weights.")
@click.option("--seed", type=SEED, help="Of the order of the text and of what is new. Default: 0.")
@device
@output("The folder to write. Default: MODEL-NAME, such as model-yarn-8.")
@click.option("--force", is_flag=True, help="Replace the folder of a model that is there; forget another run.")
@as_json
def tune(model: str, files: tuple[str, ...], output: Path | None, force: bool, as_json: bool, **options: Any) -> None:
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
