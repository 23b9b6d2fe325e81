"""``locant golden``, ``check-batch`` and ``serve-args``: verbs for other programs that assign positions to tokens."""

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
@output("The .safetensors file.", default="golden.safetensors")
@answers
def golden(output: Path) -> Answer:
    """Write golden vectors to check a port of rotary positions.

    A port to another language is right if it agrees with these vectors. They cover seven scalings at two bases, at
    positions from 0 to 2^31 - 1, with frequencies, exact and float32 cosines and sines, and vectors rotated in both
    layouts.
    """
    from locant.engines.golden import write_golden

    facts = {"file": str(output), "tensors": write_golden(output), "bytes": output.stat().st_size}
    return Answer(facts, f"{output}: {facts['tensors']} tensors, {facts['bytes']:,} bytes")


@click.command("check-batch")
@click.argument("file")
@click.option("--model", help="The model of the batch: a config.json, a folder, a preset, or a name such as qwen2_vl.")
@click.option("--axes", type=Whole(1, 4), help="3 for positions in time, rows and columns. Default: as in the model.")
@answers
def check_batch(file: str, model: str | None, axes: int | None) -> Answer:
    """Find mistakes in the positions of a training batch.

    FILE holds the arguments of a transformers model, saved as .safetensors, .npz or .json. It can have input_ids,
    position_ids, attention_mask, labels, token_type_ids, cu_seq_lens_q and _k, max_length_q and _k, seq_idx, and for
    images image_grid_thw, video_grid_thw, second_per_grid_ts and mm_token_type_ids.

    \b
    It finds
    - documents that attend to each other, and targets in another document
    - position ids that do not restart, that fall or jump, or that exceed the model's maximum
    - masks with other values than the model accepts
    - position ids of images and videos that do not match their grids
    - with --model: position ids that count padding, if the model has absolute positions

    The report also lists the checks that could not run. Most of them need --model. Exit code 1 means that there is a
    mistake.
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
@click.option("--for", "engine", required=True, type=OneOf(SERVERS), help="The server that loads the model.")
@click.option("--scaling", type=METHOD, default=METHODS[0], show_default=True, help="The scaling to use.")
@click.option("--text", multiple=True, metavar="FILE", help="Measure the loss on this text before and after.")
@count("--windows", help="Maximum number of windows of TOKENS from the text. Default: 4.")
@device
@answers
def serve_args(model: str, to: int, engine: str, scaling: str, text: tuple[str, ...], **options: Any) -> Answer:
    """Print the flags that extend a model's context in a server.

    MODEL is the folder of a model, a config.json, or the name of a preset. --text needs a folder with weights and
    tokenizer. The output also lists the settings that the server ignores. For transformers, and for llama.cpp before
    conversion, `locant extend` writes the same settings into a configuration.
    """
    from locant.checkpoints.config_source import read_source
    from locant.engines.serve_args import serve_arguments
    from locant.report.console import progress_bar
    from locant.report.engines import print_serving, serving_facts

    measurement, losses = only_given(options), {}
    if measurement and not text:
        raise InputError(f"got {flag_of(next(iter(measurement)))} without a text", "add --text my.txt")
    served = serve_arguments(read_source(model), to=to, engine=engine, scaling=scaling)
    if text and served.extension.layer_type is not None:
        got = f"got --text for {model}, but only its {served.extension.layer_type} layers are extended"
        raise InputError(f"{got}: losses can be measured only if all layers are", "omit --text")
    if text:
        from locant.lab.evaluation import losses_of_extension

        with progress_bar("part") as progress:
            losses = losses_of_extension(model, text, served.extension, on_step=progress, **measurement)
    return Answer(serving_facts(served, model, losses), lambda: print_serving(served, losses))
