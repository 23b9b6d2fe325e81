"""``locant compare``, ``train``, ``generate``, ``evaluate`` and ``tune``: train small models and use trained ones."""

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
    Number,
    OneOf,
    count,
    device,
    dtype,
    files,
    model,
    only_given,
    output,
    positive,
    text_of,
    tokenizer_options,
)
from locant.lab import settings
from locant.lab.settings import SIZES, Settings
from locant.lab.tasks import OWN
from locant.shell import shell_path
from locant.spelling import AmbiguousNumberError, numbers, real_number, whole_number

report_folder = output("The folder of the report.", default="report")
force_option = click.option(
    "--force", is_flag=True, help="Write into a folder that holds other files, without changing them."
)
qk_norm = click.option(
    "--qk-norm", is_flag=True, default=None, help="Norm each head of queries and keys before the rotation, as Qwen3."
)
STEPS = f"Default: {settings.MAX_STEPS}, but at most {settings.MAX_EPOCHS} epochs."


def list_option(*names: str, kind: Callable[[str], int | float | str] = str, **more: Any) -> Callable[..., Any]:
    """Return an option for names or numbers separated by commas, such as ``0,1,2``. Numbers are read by `kind`."""

    def read(text: str) -> tuple[int | float | str, ...]:
        if kind is str:
            return tuple(part.strip() for part in text.split(",") if part.strip())
        try:
            return numbers(text, kind)
        except AmbiguousNumberError as error:
            raise click.BadParameter(str(error)) from None
        except ValueError:
            raise click.BadParameter(f"{text!r} is not a list of numbers such as 0,1,2") from None

    return click.option(*names, type=read, metavar="NAMES,..." if kind is str else "NUMBERS,...", **more)


def _default(name: str) -> str:
    value = getattr(Settings, name)
    return f"Default: {','.join(map(str, value)) if isinstance(value, tuple) else value}."


@click.command("compare")
@files
@list_option(
    "--encodings",
    help="Names from `locant list`. rotary+yarn, +ntk, +linear, +longrope or +llama3 is rotary with a scaling beyond "
    "the training length, without more training. rotary@randomized, @abacus or @coupled is trained at such positions. "
    f"mine.py:Mine is a class in a file. {_default('encodings')}",
)  # fmt: skip
@list_option(
    "--tasks",
    help=f"Tasks to learn: {settings.TEXT} (of FILE), or generated rows: {', '.join(OWN)}. {_default('tasks')}",
)  # fmt: skip
@click.option(
    "--suite", type=OneOf(settings.SUITES),
    help="Fixed tasks, lengths, steps and seeds. The report also contains the recorded encodings.",
)  # fmt: skip
@count("--train-length", help=f"Tokens per window in training. {_default('train_length')}")
@count("--task-length", help=f"Items in the longest training row of a task. {_default('task_length')}")
@list_option(
    "--multiples",
    kind=whole_number,
    help=f"Lengths to measure at, in multiples of the training length. {_default('multiples')}",
)
@list_option("--seeds", kind=whole_number, help=f"Train one model per seed. {_default('seeds')}")
@count(
    "--steps", "num_steps",
    help=f"Training steps of each model. {STEPS} For a task {settings.TASK_STEPS}, or fewer if it is learned earlier.",
)  # fmt: skip
@positive("--minutes", help="Instead of --steps: train all models within this many minutes.")
@count(
    "--batch", "batch_size",
    help=f"Windows, or rows, per step. Default: {settings.TEXT_BATCH}, or {settings.TASK_BATCH} for a task.",
)  # fmt: skip
@positive("--learning-rate", help=_default("learning_rate"))
@list_option(
    "--rates", kind=real_number,
    help="Factors on the learning rate. With several, each encoding gets the best one. Default: 1.",
)  # fmt: skip
@click.option(
    "--size", type=OneOf(SIZES), help="Model size. Default: tiny. Or set --d-model, --num-layers and --num-heads."
)
@count("--d-model", help=f"Width of the model. {_default('d_model')}")
@count("--num-layers", help=f"Layers. Default: {settings.TEXT_LAYERS}, or {settings.TASK_LAYERS} for a task.")
@count("--num-heads", help=f"Heads. {_default('num_heads')}")
@qk_norm
@click.option("--device", metavar="NAME", help="cpu, cuda, cuda:1, ... CUDA trains in bfloat16. Default: cpu.")
@click.option("--ray", metavar="ADDRESS|local", help="Train on a Ray cluster, or in local Ray processes.")
@tokenizer_options
@report_folder
@force_option
@answers
def compare(files: tuple[str, ...], output: Path, force: bool, **options: Any) -> Answer:
    """Train every encoding at a short length, and measure it at longer ones.

    Without a FILE the text is the documentation that ships with Python. - is standard input.
    The last tenth of the text is held out, and the loss is measured there.
    With --tasks, rows are generated, and the result is the share of correct rows.
    To resume a killed comparison, run the same command. With more encodings, tasks or seeds, only the new ones are
    trained. If OUTPUT holds a report of another comparison, it is overwritten when the first result is ready.
    """
    from locant.lab.comparison import compare_files
    from locant.lab.results import PAGE
    from locant.report.comparison import Screen, print_comparison

    text, ray, size = text_of(options), options.pop("ray"), options.pop("size")
    chosen = {**SIZES.get(size, {}), **only_given(options)}
    with redirect_stdout(sys.stderr):  # for prints of other packages
        results = compare_files(files, chosen, folder=output, force=force, watcher=Screen(), ray=ray, **text)
    return _with_report(results, output / PAGE, print_comparison)


def _with_report(results: dict[str, Any], page: Path, print_results: Callable[[Any], None]) -> Answer:
    def words() -> None:
        print_results(results)
        click.echo(f"\nReport: {page}")

    return Answer({**results, "report": str(page)}, words)


@click.command("train")
@files
@click.option("--encoding", default="rotary", show_default=True, help="A name from `locant list`.")
@count("--train-length", help=f"Tokens per window. {_default('train_length')}")
@count("--steps", "num_steps", help=f"Training steps. {STEPS}")
@positive("--minutes", help="Instead of --steps: train for this many minutes.")
@click.option("--size", type=OneOf(SIZES), default="tiny", show_default=True, help="Model size.")
@qk_norm
@click.option("--seed", type=SEED, help="Random seed of the weights and of the order of the text. Default: 0.")
@tokenizer_options
@output("The folder to write.", default="model", show_default=True)
@click.option("--force", is_flag=True, help="Overwrite an existing model folder.")
@answers
def train(files: tuple[str, ...], encoding: str, size: str, output: Path, force: bool, **options: Any) -> Answer:
    """Train a small decoder on a text, and save it for `locant generate`.

    Without a FILE the text is the documentation that ships with Python. - is standard input. The folder holds
    model.safetensors, config.json and tokenizer.json. explain, neighbours, probe, audit, evaluate and embed also accept
    it.
    """
    from locant.lab.candidate import parse_without_scaling
    from locant.lab.generation import train_files
    from locant.report.console import progress_bar

    text, chosen = text_of(options), {**SIZES[size], **only_given(options)}
    encoding = parse_without_scaling(encoding).name
    with progress_bar("step") as progress:
        facts = train_files(files, encoding, chosen, folder=output, force=force, on_step=progress, **text)
    steps = f"{len(facts['losses']):,} steps, loss {facts['losses'][-1]:.3f}"
    line = f"{output}: {encoding}, {steps}. Next: locant generate {shell_path(output)} 'To be'"
    return Answer({"encoding": encoding, **facts, "output": str(output)}, line)


@click.command("generate")
@model()
@click.argument("prompt")
@count("--tokens", "num_tokens", default=100, show_default=True, help="Maximum number of tokens to write.")
@click.option(
    "--temperature", type=Number(min=0), default=1.0, show_default=True,
    help="Values below 1 prefer probable tokens. 0 always takes the most probable token.",
)  # fmt: skip
@count("--top-k", help="Draw only among this many of the most probable tokens. Default: all.")
@click.option("--seed", type=SEED, default=0, show_default=True, help="Random seed of the draws.")
@click.option(
    "--with", "way", default="own", show_default=True, metavar="NAME",
    help="The position encoding to read with, a name that `locant evaluate --with` accepts.",
)  # fmt: skip
@device
@answers
def generate(model: str, prompt: str, **options: Any) -> Answer:
    """Continue a text.

    MODEL is a folder that `locant train` wrote, or a causal language model of transformers: a folder with safetensors
    and tokenizer, or a .gguf file. PROMPT is the text, or - for standard input.
    """
    from locant.lab.generation import continue_text
    from locant.text.reading import STDIN, read_texts

    facts = continue_text(model, read_texts(STDIN)[0] if prompt == STDIN else prompt, **only_given(options))
    return Answer({"model": model, **facts}, f"{facts['prompt']}{facts['continuation']}")


@click.command("evaluate")
@model()
@files
@list_option("--lengths", kind=whole_number, help="Tokens per window. Default: 1024,2048,4096.")
@list_option(
    "--with", "ways",
    help="own, exact (its own with exact angles), nope, linear:4, ntk:4, yarn:4, longrope:4, dynamic, self-extend:8 "
    "(groups of 8), rerope, dual-chunk. Default: own,exact,yarn:4. Layers with a sliding window keep "
    "their encoding if it is another one than that of layers with full attention.",
)  # fmt: skip
@count("--windows", help="Maximum number of windows of the longest length. Default: 16.")
@positive("--minutes", help="Use only as many windows as fit in this time (estimated before the first), at least one.")
@count(
    "--keys",
    low=0,
    help="Number of retrieval rows at each of five depths: a pass key in filler text, and the value of one key among "
    "many (RULER's niah_single_1 and niah_multikey_2). 0 for none. Default: 2.",
)
@list_option(
    "--tasks", help="Tasks of RULER: niah_single_1, niah_multikey_2, niah_multikey_3, vt, cwe, fwe. Default: none."
)
@count("--rows", help="Rows per task and length. Default: 8.")
@click.option(
    "--far", is_flag=True, default=None,
    help="Also measure the loss with full context and with only the trained length, to see which encodings use "
    "distant tokens.",
)  # fmt: skip
@device
@dtype
@report_folder
@force_option
@answers
def evaluate(model: str, files: tuple[str, ...], output: Path, force: bool, **options: Any) -> Answer:
    """Measure other position encodings in a trained model, without training.

    MODEL is a local folder with safetensors and a tokenizer.json, or a .gguf file. For a model of `locant train`, the
    default lengths are 1/2, 1, 2 and 4 times its trained length, the default encodings are own and yarn:4, or nope if
    the model is not rotary, and --keys is 0.
    Without a FILE the text is the documentation that ships with Python. - is standard input.
    The other encodings are compared with the first one. Finished results of an earlier call with the same model, text
    and settings are reused from its folder.
    """
    from locant.lab.evaluation import evaluate_model, usual_settings
    from locant.report.console import progress_bar
    from locant.report.evaluation import print_evaluation, write_evaluation

    evaluation = usual_settings(model, **only_given(options))
    with progress_bar("part") as progress:
        results = evaluate_model(model, files, evaluation, output=output, force=force, on_step=progress)
    return _with_report(results, write_evaluation(results, output), print_evaluation)


@click.command("tune")
@model()
@files
@click.option(
    "--with", "way", required=True, metavar="NAME",
    help="The new position encoding: yarn:8, ntk:8, linear:8, dynamic:8, longrope:8 or llama3:8 scales the model's "
    "own, drope (or nope) removes it, alibi and others of `locant list` replace it, own keeps it.",
)  # fmt: skip
@click.option("--train", type=OneOf(("all", "new", "lora")), help="Train all weights, only the weights of a "
              "new encoding, or low-rank adapters (needs peft). Default: all.")  # fmt: skip
@count(
    "--length", low=2,
    help="Tokens per window. Default: the length in the model's configuration, or with a scaling the trained length "
    "times the factor.",
)  # fmt: skip
@count("--steps", "num_steps", help="Training steps. Default: 400.")
@positive("--minutes", help="Instead of --steps: as many as fit in this time (estimated before the first).")
@count("--batch", "batch_size", help="Windows per step. Default: 8.")
@positive(
    "--learning-rate", help="Learning rate. Default: 2e-5 for all weights, 2e-4 for adapters, 1e-3 for a new encoding."
)
@count("--rank", help="Rank of the adapters. Default: 16.")
@click.option("--adapter", is_flag=True, default=None, help="Write only the adapters, without merging them.")
@click.option("--seed", type=SEED, help="Random seed of the order of the text and of new weights. Default: 0.")
@device
@output("The folder to write. Default: MODEL-NAME, such as model-yarn-8.")
@click.option("--force", is_flag=True, help="Overwrite an existing model folder or an unfinished run.")
@answers
def tune(model: str, files: tuple[str, ...], output: Path | None, force: bool, **options: Any) -> Answer:
    """Fine-tune a model on a text, to adapt it to other positions.

    MODEL is a local folder with safetensors and a tokenizer.json, or a .gguf file. It is not changed, and the output is
    always a folder with safetensors.
    Without a FILE the text is the documentation that ships with Python. - is standard input. The last tenth is held
    out. To resume a killed run, run the same command: the result is the same, bit for bit.

    To train on several devices: `torchrun --nproc-per-node 4 -m locant tune ...`, or `accelerate launch -m locant tune
    ...`. They share the windows of each step.

    YaRN's recipe: --with yarn:8 and a few hundred steps. DroPE's recipe: --with drope, at the trained length.
    """
    from locant.lab.processes import join_process_group
    from locant.lab.tuning import TuneSettings, tune
    from locant.report.console import progress_bar
    from locant.report.evaluation import print_tuning

    own_device = click.get_current_context().with_resource(join_process_group(options.pop("device") or "auto"))
    tuning = TuneSettings(**only_given(options), device=own_device)
    folder = output or Path(f"{Path(model).name.removesuffix('.gguf')}-{tuning.way.replace(':', '-').lower()}")
    with progress_bar("step") as progress:
        record = tune(model, files, tuning, output=folder, force=force, on_step=progress)
    return Answer({**record, "output": str(folder)}, lambda: print_tuning(record, folder))
