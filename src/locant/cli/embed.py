"""``locant embed``: from a text to embeddings, step by step."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import click

from locant.cli.answers import Answer, answers
from locant.cli.options import (
    SEED,
    count,
    files,
    flags_on_command_line,
    output,
    require_taken,
    text_of,
    tokenizer_options,
)
from locant.errors import InputError
from locant.spelling import real_number

SHORT, USUAL = 64, 4
"""The length in tokens of the longest text in one window, and the window length for longer texts."""
VOCAB_SIZE = 4_096
"""The vocabulary size of the tokenizer trained on the text, if neither a tokenizer nor a size is given."""
FIXED_BY_MODEL = ("tokenizer", "encoding", "d_model", "num_heads", "seed", "scale", "vocab_size")


def _number_or_rule(text: str) -> float | str:
    try:
        return real_number(text)
    except ValueError:
        return text


@click.command("embed", context_settings={"show_default": True})
@files
@tokenizer_options
@click.option("--model", metavar="FOLDER", help="Use the tokenizer, tables and positions of a published model.")
@click.option("--encoding", default="learned", help="A name from `locant list`.")
@count("--d-model", default=256, help="Width of the embeddings.")
@count("--num-heads", default=4, help="Heads, for encodings that act on them.")
@count("--context", show_default=f"the whole text up to {SHORT} tokens, else {USUAL}", help="Tokens per window.")
@count("--stride", show_default="the context", help="Tokens between the starts of consecutive windows.")
@count("--batch", default=8, help="Number of windows to embed and write, from the first one.")
@click.option("--all", "everything", is_flag=True, help="Embed and write all windows (4 bytes x tokens x d_model).")
@click.option("--seed", type=SEED, default=0, help="Random seed of the tables.")
@click.option(
    "--scale", type=_number_or_rule, metavar="NUMBER|RULE",
    help="Factor on the token embeddings: a number, sqrt_d_model or sqrt_d_model_rounded.",
)  # fmt: skip
@output("Write ids, targets, positions and embeddings to this .safetensors file.")
@answers
def embed(
    files: tuple[str, ...], output: Path | None, batch: int, everything: bool, model: str | None, **options: Any
) -> Answer:
    """Turn text into ids, windows and embeddings, and show each step.

    Without a FILE the text is the documentation that ships with Python. - is standard input.
    Every token of a text is embedded, and the last window is padded. The tables are random, as before training, unless
    --model is given.

    In the output file, the target of a text's last token is -100. In padding, targets are -100, positions -1 and ids 0.
    """
    from locant.embedding.flow import Plan, embed, require_vectors_place, save_vectors
    from locant.report.console import log_line, pluralize
    from locant.report.embedding import print_flow
    from locant.text.corpus import read_corpus

    if model is None:
        require_taken(options["encoding"], {}, "embed")
    elif names := ", ".join(flags_on_command_line(*FIXED_BY_MODEL)):
        raise InputError(f"got {names} with --model, which decides it", f"use --model without {names}")
    text = text_of(options)
    text["tokenizer"] = text["tokenizer"] or model
    if output is not None:
        require_vectors_place(output, model)
    corpus = read_corpus(files, default_vocab_size=VOCAB_SIZE, **text)
    if options["context"] is None:
        longest = max(end - begin for begin, end in pairwise(corpus.documents))
        options["context"] = longest if longest <= SHORT else USUAL
    embedded = embed(corpus, Plan(batch=None if everything else batch, model=model, **options))
    if output is not None:
        save_vectors(embedded, output)
        windows = pluralize(embedded.flow.embedded_windows, "window")
        log_line(f"wrote {output}: ids, targets, positions and embeddings of {windows}")
    facts = {**embedded.flow.to_dict(), "file": None if output is None else str(output)}
    return Answer(facts, lambda: print_flow(embedded.flow))
