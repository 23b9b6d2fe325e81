"""The names on the doors. A change here is a change that users feel: it belongs in the changelog."""

from __future__ import annotations

from pathlib import Path

import click

import locant
from locant.cli import main

NAMES = {
    "Tokenizer", "TokenStore", "prepare", "Windows",
    "TokenEmbedding", "SegmentEmbedding", "InputEmbedding",
    "Positions", "PositionEncoding", "DistanceBias", "Sinusoidal", "Learned", "Rotary", "ALiBi", "T5Bias", "encoding",
    "LearnedGrid", "Convolutional", "register_encoding", "scaling", "encoding_from_config", "register_architecture",
    "XPos", "Kerple", "Fire", "Fox", "Inkling", "Sandwich", "Cope", "Shaw", "TransformerXL", "Deberta",
    "SelfExtend", "ReRoPE", "DualChunk", "GridBias", "ContinuousGridBias", "DecomposedBias",
    "attend", "KVCache", "plot", "probe", "swap",
    "LocantError", "ShapeError", "RangeError", "InputError",
}  # fmt: skip
VERBS = {
    "embed", "compare", "explain", "extend", "convert", "evaluate", "tune", "neighbours", "vocabulary", "prepare",
    "export", "plot", "probe", "explore", "bench", "list",
}  # fmt: skip


def test_the_public_names_are_these() -> None:
    assert set(locant.__all__) == NAMES
    assert len(locant.__all__) == len(NAMES), "a name is listed twice"


def test_every_public_name_is_there_and_says_what_it_is() -> None:
    for name in locant.__all__:
        assert (getattr(locant, name).__doc__ or "").strip(), f"locant.{name} has no docstring"


def test_the_door_is_under_seventy_lines() -> None:
    assert len(Path(locant.__file__).read_text(encoding="utf-8").splitlines()) < 70


def test_the_verbs_of_the_command_line_are_these() -> None:
    assert set(main.list_commands(click.Context(main))) == VERBS
