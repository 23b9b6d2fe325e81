"""``locant embed``: from a text to embeddings, step by step."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import click

from locant.cli.answers import Answer, answers
from locant.cli.options import SEED, count, files, output, require_taken, text_of, tokenizer_options, typed
from locant.errors import InputError

SHORT, USUAL = 64, 4
"""Tokens of a text that is one window, and of a window of a longer one."""
VOCAB_SIZE = 4_096
"""Of the tokenizer that is trained on the text, where neither is given."""
OF_THE_MODEL = ("tokenizer", "encoding", "d_model", "num_heads", "seed", "scale", "vocab_size")


def _number_or_rule(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


@click.command("embed", context_settings={"show_default": True})
@files
@tokenizer_options
@click.option("--model", metavar="FOLDER", help="A published model: its tokenizer, its tables, its positions.")
@click.option("--encoding", default="learned", help="A name from `locant list`.")
@count("--d-model", default=256, help="Width of the embeddings.")
@count("--num-heads", default=4, help="Heads, for encodings that act on them.")
@count("--context", show_default=f"all of a text of up to {SHORT}, {USUAL} of a longer one", help="Tokens per window.")
@count("--stride", show_default="the context", help="From one window's start to the next.")
@count("--batch", default=8, help="How many windows, from the first on, are embedded and written.")
@click.option(
    "--all", "everything", is_flag=True, help="Embed and write all windows instead: 4 bytes times tokens times d_model."
)
@click.option("--seed", type=SEED, default=0, help="Of the random tables.")
@click.option(
    "--scale", type=_number_or_rule, metavar="NUMBER|RULE",
    help="Factor on the token rows: a number, sqrt_d_model or sqrt_d_model_rounded.",
)  # fmt: skip
@output("A .safetensors file for ids, targets, positions and embeddings.")
@answers
def embed(
    files: tuple[str, ...], output: Path | None, batch: int, everything: bool, model: str | None, **options: Any
) -> Answer:
    """Turn text into ids, windows and embeddings, and show each step.

    Without a FILE the text is the documentation that ships inside Python; - is standard input.
    All of a text is embedded; the last window is padded. The tables are random, as before training, unless a --model is
    given.

    In the file, the target of a text's last token is -100; in padding, targets are -100, positions -1 and ids 0.
    """
    from locant.embedding.flow import Plan, embed, require_vectors_place, save_vectors
    from locant.report.console import counted, talk
    from locant.report.embedding import print_flow
    from locant.text.corpus import read_corpus

    if model is None:
        require_taken(options["encoding"], {}, "embed")
    elif names := ", ".join(typed(*OF_THE_MODEL)):
        raise InputError(f"got {names} beside --model, which decides it", f"--model without {names}")
    text = text_of(options)
    text["tokenizer"] = text["tokenizer"] or model
    if output is not None:
        require_vectors_place(output, model)
    corpus = read_corpus(files, usual_vocab_size=VOCAB_SIZE, **text)
    if options["context"] is None:
        longest = max(end - begin for begin, end in pairwise(corpus.documents))
        options["context"] = longest if longest <= SHORT else USUAL
    embedded = embed(corpus, Plan(batch=None if everything else batch, model=model, **options))
    if output is not None:
        save_vectors(embedded, output)
        windows = counted(embedded.flow.embedded_windows, "window")
        talk(f"wrote {output}: ids, targets, positions and embeddings of {windows}")
    facts = {**embedded.flow.to_dict(), "file": None if output is None else str(output)}
    return Answer(facts, lambda: print_flow(embedded.flow))
