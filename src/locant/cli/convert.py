"""``locant convert``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from locant.cli.options import Place, as_json

__all__ = ["verb"]

LAYOUT = click.Choice(["half", "interleaved"])


@click.command("convert")
@click.argument("folder", type=Place())
@click.option("--to", type=LAYOUT, required=True, help="The layout that the weights shall have.")
@click.option("--from", "source", type=LAYOUT, help="The layout that they have. Default: by the configuration.")
@click.option("-o", "--output", type=Place(), required=True, help="A folder that is not there yet, or empty.")
@click.option("--config", type=Place(), help="A config.json elsewhere, for adapters, which have none.")
@as_json
def verb(folder: Path, to: Any, source: Any, output: Path, config: Path | None, as_json: bool) -> None:
    """Change which dimensions rotary positions pair, in the weights of a checkpoint.

    \b
    half         i with i + d/2, as in Llama, Qwen, Gemma and GPT-NeoX
    interleaved  2i with 2i + 1, as in the paper, GPT-J and DeepSeek

    FOLDER holds config.json and model.safetensors, or its shards with their index. Rows of queries and keys are moved,
    everything else is copied byte for byte, and FOLDER stays as it is.
    """  # noqa: D301
    from locant.checkpoints.layout_folder import convert_folder
    from locant.report.console import counted, print_result, progress_bar, talk

    with progress_bar() as progress:
        conversion = convert_folder(folder, output, to=to, source=source, config=config, progress=progress)
    if conversion.left_out:
        talk(f"left out: {', '.join(conversion.left_out)}")
    moved = f"{conversion.converted} of {conversion.tensors} tensors converted"
    size = f"{counted(conversion.bytes, 'byte')} in {counted(len(conversion.files), 'file')}"
    line = f"{conversion.output}: {conversion.source} -> {conversion.to}, {moved}, {size}"
    print_result(asdict(conversion), line, as_json=as_json)
