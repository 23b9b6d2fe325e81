"""``locant compare``, ``train``, ``generate``, ``evaluate`` and ``tune``: small models, and what trained ones do."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import click

from locant.cli.answers import Answer, answers
from locant.cli.options import (
    SEED,
    OneOf,
    count,
    device,
    dtype,
    files,
    only_given,
    output,
    positive,
    text_of,
    tokenizer_options,
)
from locant.lab import settings
from locant.lab.settings import SIZES, Settings
from locant.lab.tasks import OWN
from locant.spelling import whole_number

report_folder = output("The folder of the report.", default="report")
beside_others = click.option(
    "--force", is_flag=True, help="Write into a folder that holds other things; they stay as they are."
)
STEPS = f"Default: {settings.MAX_STEPS}, but at most {settings.MAX_EPOCHS} epochs."


def listed(*names: str, kind: Callable[[str], int | float | str] = str, **more: Any) -> Callable[..., Any]:
    """An option that is values between commas, such as ``0,1,2``."""

    def read(text: str) -> tuple[int | float | str, ...]:
        try:
            return tuple(kind(part.strip()) for part in text.split(",") if part.strip())
        except ValueError:
            raise click.BadParameter(f"{text!r} is not a list of numbers such as 0,1,2") from None

    return click.option(*names, type=read, metavar="NAMES,..." if kind is str else "NUMBERS,...", **more)


def _default(name: str) -> str:
    value = getattr(Settings, name)
    return f"Default: {','.join(map(str, value)) if isinstance(value, tuple) else value}."


@click.command("compare")
@files
@listed(
    "--encodings",
    help="Names from `locant list`; rotary+yarn, +ntk, +linear, +longrope or +llama3 is rotary, scaled beyond "
    "the training length without more training; rotary@randomized, @abacus or @coupled is trained at such positions; "
    f"mine.py:Mine is a class in a file. {_default('encodings')}",
)  # fmt: skip
@listed(
    "--tasks",
    help=f"What is learned: {settings.TEXT} (of FILE), or generated rows: {', '.join(OWN)}. {_default('tasks')}",
)  # fmt: skip
@click.option(
    "--suite", type=OneOf(settings.SUITES),
    help="Tasks, lengths, steps and seeds that are always the same; the report has the recorded encodings, too.",
)  # fmt: skip
@count("--train-length", help=f"Tokens per window in training. {_default('train_length')}")
@count("--task-length", help=f"Items of the longest row of a task in training. {_default('task_length')}")
@listed("--multiples", kind=whole_number, help=f"Lengths to measure at, in training lengths. {_default('multiples')}")
@listed("--seeds", kind=whole_number, help=f"One training for each. {_default('seeds')}")
@count(
    "--steps", "num_steps",
    help=f"Training steps of each model. {STEPS} For a task {settings.TASK_STEPS}, fewer where it is learned before.",
)  # fmt: skip
@positive("--minutes", help="Instead of --steps: as many as fit in these minutes, all models together.")
@count(
    "--batch", "batch_size",
    help=f"Windows, or rows, per step. Default: {settings.TEXT_BATCH}, or {settings.TASK_BATCH} for a task.",
)  # fmt: skip
@positive("--learning-rate", help=_default("learning_rate"))
@listed(
    "--rates", kind=float,
    help="Factors of the learning rates; of several, the best is found for each encoding. Default: 1.",
)  # fmt: skip
@click.option("--size", type=OneOf(SIZES), help="Of the model. Default: tiny; the next three say it in numbers.")
@count("--d-model", help=f"Width of the model. {_default('d_model')}")
@count("--num-layers", help=f"Default: {settings.TEXT_LAYERS}, or {settings.TASK_LAYERS} for a task.")
@count("--num-heads", help=_default("num_heads"))
@click.option("--device", metavar="NAME", help="cpu, cuda, cuda:1, ...; in bfloat16 on CUDA. Default: cpu.")
@click.option("--ray", metavar="ADDRESS|local", help="Train on a Ray cluster, or on one of processes of this machine.")
@tokenizer_options
@report_folder
@beside_others
@answers
def compare(files: tuple[str, ...], output: Path, force: bool, **options: Any) -> Answer:
    """Train every encoding at a short length, and measure it at longer ones.

    Without a FILE the text is the documentation that ships inside Python; - is standard input.
    The last tenth of the text is held out, and the loss is measured there.
    With --tasks, rows are generated, and what counts is how many are right.
    A comparison that was killed goes on with the same command; with more encodings, tasks or seeds, only those are
    trained. A report of something else is replaced once the first result is in.
    """
    from locant.lab.comparison import compare_files
    from locant.lab.results import PAGE
    from locant.report.comparison import Screen, print_comparison

    text, ray, size = text_of(options), options.pop("ray"), options.pop("size")
    chosen = {**SIZES.get(size, {}), **only_given(options)}
    with redirect_stdout(sys.stderr):  # what the code of others prints
        results = compare_files(files, chosen, folder=output, force=force, watcher=Screen(), ray=ray, **text)
    return _with_report(results, output / PAGE, print_comparison)


def _with_report(results: dict[str, Any], page: Path, print_results: Callable[[Any], None]) -> Answer:
    def words() -> None:
        print_results(results)
        click.echo(f"\nThe report: {page}")

    return Answer({**results, "report": str(page)}, words)


@click.command("train")
@files
@click.option("--encoding", default="rotary", show_default=True, help="A name from `locant list`.")
@count("--train-length", help=f"Tokens per window. {_default('train_length')}")
@count("--steps", "num_steps", help=f"Training steps. {STEPS}")
@positive("--minutes", help="Instead of --steps: as many as fit in these.")
@click.option("--size", type=OneOf(SIZES), default="tiny", show_default=True, help="Of the model.")
@click.option("--seed", type=SEED, help="Of the weights and of the order of the text. Default: 0.")
@tokenizer_options
@output("The folder to write.", default="model", show_default=True)
@click.option("--force", is_flag=True, help="Replace the folder of a model that is there.")
@answers
def train(files: tuple[str, ...], encoding: str, size: str, output: Path, force: bool, **options: Any) -> Answer:
    """Train a small decoder on a text, and keep it for `locant generate`.

    Without a FILE the text is the documentation that ships inside Python; - is standard input. The folder holds
    model.safetensors, config.json and tokenizer.json; explain, neighbours, probe, audit, evaluate, embed and vocabulary
    take it, too.
    """
    from locant.lab.candidate import unscaled
    from locant.lab.generation import train_files
    from locant.report.console import progress_bar

    text, chosen = text_of(options), {**SIZES[size], **only_given(options)}
    encoding = unscaled(encoding).name
    with progress_bar("step") as progress:
        facts = train_files(files, encoding, chosen, folder=output, force=force, on_step=progress, **text)
    steps = f"{len(facts['losses']):,} steps, loss {facts['losses'][-1]:.3f}"
    line = f"{output}: {encoding}, {steps}; now: locant generate {output} 'To be'"
    return Answer({"encoding": encoding, **facts, "output": str(output)}, line)


@click.command("generate")
@click.argument("model")
@click.argument("prompt")
@count("--tokens", "num_tokens", default=100, show_default=True, help="How many to write, at the most.")
@click.option(
    "--temperature", type=click.FloatRange(min=0), default=1.0, show_default=True,
    help="Below 1 prefers what is probable; 0 takes the most probable token.",
)  # fmt: skip
@count("--top-k", help="Draw among this many most probable tokens. Default: all.")
@click.option("--seed", type=SEED, default=0, show_default=True, help="Of the draws.")
@click.option(
    "--with", "way", default="own", show_default=True, metavar="NAME",
    help="The positions that it reads with, one of those of `locant evaluate`.",
)  # fmt: skip
@device
@answers
def generate(model: str, prompt: str, **options: Any) -> Answer:
    """Write on after a text.

    MODEL is a folder that `locant train` wrote, or that of a causal language model of transformers, with safetensors
    and its tokenizer. PROMPT is the text, or - for standard input.
    """
    from locant.lab.generation import continue_text
    from locant.text.reading import STDIN, read_texts

    facts = continue_text(model, read_texts(STDIN)[0] if prompt == STDIN else prompt, **only_given(options))
    return Answer({"model": model, **facts}, f"{facts['prompt']}{facts['continuation']}")


@click.command("evaluate")
@click.argument("model")
@files
@listed("--lengths", kind=whole_number, help="Tokens per window. Default: 1024,2048,4096.")
@listed(
    "--with", "ways",
    help="own, exact (its own in exact angles), nope, linear:4, ntk:4, yarn:4, longrope:4, dynamic, self-extend:8 "
    "(groups of 8), rerope, dual-chunk. Default: own,exact,yarn:4.",
)  # fmt: skip
@count("--windows", help="Windows of the longest length, at the most. Default: 16.")
@positive("--minutes", help="Only as many windows as fit in these, timed before the first; one at least.")
@count(
    "--keys",
    low=0,
    help="Pass keys in filler, and values of one of many keys, asked for at each of five depths; 0 for none. They are "
    "RULER's niah_single_1 and niah_multikey_2. Default: 2.",
)
@listed("--tasks", help="Of RULER: niah_single_1, niah_multikey_2, niah_multikey_3, vt, cwe, fwe. Default: none.")
@count("--rows", help="Rows of each of these tasks and lengths. Default: 8.")
@click.option(
    "--far", is_flag=True, default=None,
    help="Also read tokens with their full context, and with the trained length of it: who uses what is far?",
)  # fmt: skip
@device
@dtype
@report_folder
@beside_others
@answers
def evaluate(model: str, files: tuple[str, ...], output: Path, force: bool, **options: Any) -> Answer:
    """Measure other position encodings in a trained model.

    Nothing is trained.
    MODEL is a folder of this machine, with safetensors and a tokenizer.json. For a model of `locant train`, the
    default lengths are half its trained length, that length, twice and four times that, the default encodings are own
    and yarn:4, or nope if it is not rotary, and --keys is 0.
    Without a FILE the text is the documentation that ships inside Python; - is standard input.
    The first encoding is the one that the others are held against. What an earlier call with the same model, text and
    settings has finished is taken from its folder.
    """
    from locant.lab.evaluation import evaluate_model, usual_settings
    from locant.report.console import progress_bar
    from locant.report.evaluation import print_evaluation, write_evaluation

    asked = usual_settings(model, **only_given(options))
    with progress_bar("part") as progress:
        results = evaluate_model(model, files, asked, output=output, force=force, on_step=progress)
    return _with_report(results, write_evaluation(results, output), print_evaluation)


@click.command("tune")
@click.argument("model")
@files
@click.option(
    "--with", "way", required=True, metavar="NAME",
    help="The positions it gets: yarn:8, ntk:8, linear:8, dynamic:8, longrope:8 or llama3:8 stretch its own; drope "
    "(or nope) drops them; alibi and others of `locant list` take their place; own stays.",
)  # fmt: skip
@click.option("--train", type=OneOf(("all", "new", "lora")), help="All weights, those of a new encoding alone, "
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
@answers
def tune(model: str, files: tuple[str, ...], output: Path | None, force: bool, **options: Any) -> Answer:
    """Train a model on a text, so that it gets used to other positions.

    MODEL is a folder of this machine, with safetensors and a tokenizer.json; it stays as it is.
    Without a FILE the text is the documentation that ships inside Python; - is standard input. Its last tenth is held
    out. Killed at any moment, the same command goes on where it was, to the same bits.

    YaRN's recipe: --with yarn:8, some hundred steps. DroPE's: --with drope, at the trained length.
    """
    from locant.lab.tuning import TuneSettings, tune
    from locant.report.console import progress_bar
    from locant.report.evaluation import print_tuning

    asked = TuneSettings(**only_given(options))
    place = output or Path(f"{Path(model).name}-{asked.way.replace(':', '-').lower()}")
    with progress_bar("step") as progress:
        record = tune(model, files, asked, output=place, force=force, on_step=progress)
    return Answer({**record, "output": str(place)}, lambda: print_tuning(record, place))
