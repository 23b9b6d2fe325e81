"""``locant embed``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from locant.cli.options import Factor, as_json, files, only_given, output, tokenizer_options

__all__ = ["verb"]


@click.command("embed")
@files
@tokenizer_options
@click.option("--encoding", help="A name from `locant list`. Default: learned.")
@click.option("--d-model", type=click.IntRange(min=1), help="Width of the embeddings. Default: 256.")
@click.option("--num-heads", type=click.IntRange(min=1), help="Heads, for encodings that act on them. Default: 4.")
@click.option("--context", type=click.IntRange(min=1, max=2**31 - 1), help="Tokens per window. Default: 4.")
@click.option(
    "--stride",
    type=click.IntRange(min=1, max=2**31 - 1),
    help="From one window's start to the next. Default: the context.",
)
@click.option(
    "--batch",
    type=click.IntRange(min=1),
    help="How many windows, from the first on, are embedded and written. Default: 8.",
)
@click.option(
    "--all", "everything", is_flag=True, help="Embed and write all windows instead: 4 bytes times tokens times d_model."
)
@click.option("--seed", type=click.IntRange(min=0, max=2**63 - 1), help="Of the random tables. Default: 0.")
@click.option(
    "--scale", type=Factor(), help="Factor on the token rows: a number, sqrt_d_model or sqrt_d_model_rounded."
)
@output("A .safetensors file for ids, targets, positions and embeddings.")
@as_json
def verb(
    files: tuple[str, ...],
    tokenizer: str | None,
    vocab_size: int | None,
    download: bool,
    output: Path | None,
    everything: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Turn text into ids, windows and embeddings, and show what flowed.

    Without a FILE the text is the documentation that ships inside Python; - is standard input.
    The tables are random, as before training.
    """
    from locant.report.embedding.run import embed_files

    embed_files(
        files, {**only_given(options), **({"batch": None} if everything else {})},
        tokenizer=tokenizer, vocab_size=vocab_size, download=download, path=output, as_json=as_json,
    )  # fmt: skip
