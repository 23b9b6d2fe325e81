"""``locant audit``, ``convert`` and ``neighbours``: verbs that read or change the weights of a model."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from locant.cli.answers import Answer, answers, draw_into
from locant.cli.options import OneOf, PathOption, Picture, count, device, dtype, model, only_given, output
from locant.errors import InputError
from locant.lab.settings import ENOUGH_WINDOWS
from locant.shell import shell_path

LAYOUT = OneOf(("half", "interleaved"))


@click.command("audit")
@model()
@click.option(
    "--text", "files", multiple=True, metavar="FILE", help="The text. Default: documentation that ships with Python."
)
@count("--length", low=2, help="Tokens per window. Default: 512, or the model's stated length if it is smaller.")
@count("--windows", low=ENOUGH_WINDOWS, help=f"Maximum number of windows, at least {ENOUGH_WINDOWS}. Default: 16.")
@device
@dtype
@answers
def audit(model: str, files: tuple[str, ...], **options: Any) -> Answer:
    """Find the positions that weights were trained with, and check the configuration against them.

    The loss on a text is measured under each plausible hypothesis: the other layout, the other direction, other
    bases, scalings and shares of the head. For ALiBi these are other signs and orders of its slopes. A hypothesis
    that is clearly worse after a few windows is dropped. MODEL is a local folder with safetensors and a tokenizer.json,
    or a .gguf file.
    Exit code 1 means that another hypothesis fits better, or that none explains the weights.
    """
    from locant.lab.audit import audit
    from locant.report.console import progress_bar
    from locant.report.evaluation import print_audit

    with progress_bar("window") as progress:
        facts = audit(model, files, on_step=progress, **only_given(options))
    is_wrong = facts["verdict"] in ("another fits", "not explained")
    return Answer({"model": model, **facts}, lambda: print_audit(facts), code=int(is_wrong))


@click.command("convert")
@click.argument("folder", type=PathOption())
@click.option("--to", type=LAYOUT, required=True, help="The new layout of the weights.")
@click.option("--from", "source", type=LAYOUT, help="Their present layout. Default: from the configuration.")
@output("A new or empty folder.", required=True)
@click.option("--config", type=PathOption(), help="A config.json of another folder, for adapters without one.")
@answers
def convert(folder: Path, to: Any, source: Any, output: Path, config: Path | None) -> Answer:
    """Convert the weights of a checkpoint to the other rotary layout.

    \b
    half         i with i + d/2, as in Llama, Qwen, Gemma and GPT-NeoX
    interleaved  2i with 2i + 1, as in the paper, GPT-J and DeepSeek

    A layout is the choice of dimensions that rotary positions pair. FOLDER holds config.json and model.safetensors, or
    its shards with their index. Rows of queries and keys are moved, everything else is copied byte for byte. FOLDER is
    not changed.
    """  # noqa: D301
    from locant.checkpoints.layout_folder import convert_folder
    from locant.report.console import log_line, progress_bar

    with progress_bar() as progress:
        conversion = convert_folder(folder, output, to=to, source=source, config=config, progress=progress)
    if conversion.left_out:
        log_line(f"left out: {', '.join(conversion.left_out)}")
    return Answer(asdict(conversion), str(conversion))


@click.command("neighbours")
@model("table")
@click.argument("words", nargs=-1, metavar="[WORD]...")
@count("-k", "--count", default=10, show_default=True, help="Number of tokens.")
@click.option("--figure", type=Picture(), help="Draw a heat map of the similarity of the words (.png, .svg, .pdf).")
@click.option("--map", "flat_map", type=Picture(), help="Draw the words in two dimensions (.png, .svg, .pdf).")
@click.option("--layout", type=OneOf(("pca", "umap")), default="pca", show_default=True, help="Layout of the map.")
@click.option("--positions", type=Picture(), help="Draw the model's position table and the similarity of its rows.")
@answers
def neighbours(
    model: str, words: tuple[str, ...], count: int, figure: Path | None, flat_map: Path | None, layout: str,
    positions: Path | None,
) -> Answer:  # fmt: skip
    """Show the tokens of a model that are nearest to a word.

    \b
    king                   the tokens nearest to the word
    king - man + woman     the tokens nearest to the sum
    cat dog refrigerator   the similarity of every two words

    MODEL is a folder with config.json, tokenizer.json and safetensors, or a .gguf file. Only the embedding tables are
    read.
    """  # noqa: D301
    from locant.embedding.input import InputEmbedding
    from locant.embedding.words import Words, terms_of
    from locant.figures.embed import draw_flat_map, draw_similarity
    from locant.figures.plot import draw
    from locant.report.embedding import nearest_facts, print_neighbours, similarity_facts

    words = tuple(" ".join(words).split())
    if not (words or positions):
        raise InputError("got no word", f"locant neighbours {shell_path(model)} king")
    terms = terms_of(words) if words else None
    if (figure or flat_map) and (not words or terms):
        raise InputError(
            "got a picture for a list of words, but no list", f"locant neighbours {shell_path(model)} cat dog house"
        )
    facts: dict[str, Any] = {}
    if words:
        table = Words.from_pretrained(model)
        facts = nearest_facts(table, terms, count) if terms else similarity_facts(table, words)
        draw_into(figure, lambda: draw_similarity(words, table.similarity(words)))
        draw_into(flat_map, lambda: draw_flat_map(words, table.flat_map(words, layout)))
    if positions:
        encoding = InputEmbedding.from_pretrained(model).encoding
        if "embed" not in encoding.methods():
            raise InputError(f"got {model}, which has no table of positions", f"locant explain {shell_path(model)}")
        draw_into(positions, lambda: draw(encoding, length=getattr(encoding, "max_seq_len", None)))
    figures = [path for path in (figure, flat_map, positions) if path]
    facts = {"model": model, **facts, "figures": [*map(str, figures)]}
    return Answer(facts, lambda: print_neighbours(facts), files=figures)
