"""``locant golden``, ``check-batch`` and ``serve-args``: for the programs beside this one that place tokens, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from locant.cli.answers import Answer, answers
from locant.cli.configs import METHOD, METHODS
from locant.cli.options import OneOf, Whole, count, device, flag_of, only_given, output
from locant.errors import InputError

SERVERS = ("vllm", "sglang", "llama.cpp", "transformers")


@click.command("golden")
@output("The file of safetensors.", default="golden.safetensors")
@answers
def golden(output: Path) -> Answer:
    """Write golden vectors, to check a port of rotary positions.

    A port to another language is right where it agrees with them: seven scalings at two bases, at positions from 0 to
    2^31 - 1, with frequencies, exact and float32 cosines and sines, and vectors rotated in both layouts.
    """
    from locant.engines.golden import write_golden

    facts = {"file": str(output), "tensors": write_golden(output), "bytes": output.stat().st_size}
    return Answer(facts, f"{output}: {facts['tensors']} tensors, {facts['bytes']:,} bytes")


@click.command("check-batch")
@click.argument("file")
@click.option("--model", help="Whose batch it is: a config.json, a folder, a preset, or a name such as qwen2_vl.")
@click.option("--axes", type=Whole(1, 4), help="3 for positions in time, rows and columns. Default: the model's.")
@answers
def check_batch(file: str, model: str | None, axes: int | None) -> Answer:
    """Find mistakes in the positions of a training batch.

    FILE is a batch as a model of transformers is called with, saved as .safetensors, .npz or .json: input_ids,
    position_ids, attention_mask, labels, token_type_ids, cu_seq_lens_q and _k, max_length_q and _k, seq_idx, and for
    images image_grid_thw, video_grid_thw, second_per_grid_ts and mm_token_type_ids, as far as it has them.

    \b
    It finds documents that see each other, and targets across documents;
    ids that do not begin again, that fall, jump, or lie past the last one;
    masks of other numbers than a model takes;
    ids of images and videos that are not those of their grids;
    with --model, ids that count padding where the model has absolute positions.

    What could not be checked is listed, too: most of it needs --model. Exit code 1: something is wrong.
    """  # noqa: D301
    from locant.checkpoints.config_source import find_source
    from locant.engines import batches

    config = model if model is None or Path(model).exists() else find_source(model).config
    findings = batches.check_batch(batches.read_batch(file), axes=axes, model=config)
    facts = {"file": file, "findings": [one.to_dict() for one in findings], "unchecked": findings.unchecked}
    return Answer(facts, str(findings), code=1 if findings else 0)


@click.command("serve-args")
@click.argument("model")
@count("--to", required=True, metavar="TOKENS", help="The new length.")
@click.option("--for", "engine", required=True, type=OneOf(SERVERS), help="What serves the model.")
@click.option("--scaling", type=METHOD, default=METHODS[0], show_default=True, help="How to stretch.")
@click.option("--text", multiple=True, metavar="FILE", help="Measure the loss on it before and after, in this process.")
@count("--windows", help="Windows of TOKENS from the text, at the most. Default: 4.")
@device
@answers
def serve_args(model: str, to: int, engine: str, scaling: str, text: tuple[str, ...], **options: Any) -> Answer:
    """Print the flags that stretch a model's context in a server.

    MODEL is the folder of a model, a config.json, or the name of a preset; for --text it is a folder with weights and
    tokenizer. Also told is what the server ignores. For transformers, and for llama.cpp before a model is converted,
    `locant extend` writes the same into a configuration.
    """
    from locant.checkpoints.config_source import read_source
    from locant.engines.serve_args import serve_arguments
    from locant.report.console import progress_bar
    from locant.report.engines import print_serving, serving_facts

    given, losses = only_given(options), {}
    if given and not text:
        raise InputError(f"got {flag_of(next(iter(given)))} without a text", "--text my.txt")
    served = serve_arguments(read_source(model), to=to, engine=engine, scaling=scaling)
    if text and served.extension.layer_type is not None:
        got = f"got --text for {model}, of which only {served.extension.layer_type} layers are stretched"
        raise InputError(f"{got}: losses are measured where all layers are", "the same without --text")
    if text:
        from locant.lab.evaluation import losses_of_extension

        with progress_bar("part") as progress:
            losses = losses_of_extension(model, text, served.extension, on_step=progress, **given)
    return Answer(serving_facts(served, model, losses), lambda: print_serving(served, losses))
