"""Your text: its tokens with their ids and bytes, the windows that a model trains on, and embeddings with position.

Embeddings are untrained, or those of a model whose folder was given; then tokens have neighbours that mean something.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from locant.embedding import InputEmbedding
from locant.errors import InputError
from locant.explore.screen import Screen
from locant.explore.session import Session
from locant.explore.state import State
from locant.figures.plot import seeded
from locant.positions import PositionEncoding, Positions
from locant.positions.registry import encodings, find
from locant.text import Tokenizer, Windows, sample_text
from locant.text.reading import read_texts

__all__ = ["SCREEN"]

SAMPLE, BYTES, TRAINED = "sample text", "bytes", "trained on this text"
MOST_CHARACTERS = 200_000
"""Of a text: more would make the tokenizer wait, and the page shows a few hundred tokens."""
MOST_TOKENS = 160
WIDTH = 64
"""Of untrained embeddings; of a model's, so many dimensions are drawn."""
NO_MODEL = "untrained"
NEIGHBOURS = 8


def numbers(state: State, session: Session) -> Mapping[str, Any]:
    """The tokens from a place on, the windows over them, and their vectors with and without position."""
    typed = state.text("typed", "", longest=4000)
    name, text = _chosen(state, session)
    text = typed or text
    model = state.one_of("model", session.models[0], [*session.models, NO_MODEL]) if session.models else NO_MODEL
    kind = state.one_of("tokenizer", TRAINED, [TRAINED, BYTES]) if model == NO_MODEL else model
    vocab_size = state.whole("vocabulary", 512, 257, 8192, log=True) if kind == TRAINED else 257
    tokenizer = _tokenizer(kind, vocab_size, text)
    ids = _encoded(kind, vocab_size, text)
    start = state.whole("start", 0, 0, max(len(ids) - 1, 0), log=True)
    count = state.whole("count", 48, 4, MOST_TOKENS)
    length = state.whole("length", 8, 2, 64)
    stride = state.whole("stride", 4, 1, 64)
    part = ids[start : start + count]
    at = min(state.whole("at", 0, 0, MOST_TOKENS), len(part) - 1)
    if model == NO_MODEL:
        embedders = ["none", *(each for each, kind in encodings().items() if "embed" in kind.doors())]
        added = state.one_of("encoding", "sinusoidal", embedders)
        scale = state.one_of("scale", "sqrt_d_model", ["none", "sqrt_d_model"])
        embedding, built = _embedding(tokenizer.vocab_size, added, scale), _code_of_untrained(added, scale)
    else:
        embedding, built = _pretrained(model), _code_of_pretrained(model, at)
    with torch.no_grad():
        tokens = torch.from_numpy(part).long()[None]
        alone = embedding.token(tokens)
        nothing, positions = torch.zeros_like(alone), Positions.arange(len(part))
        vectors, places = embedding(tokens), embedding.encoding.embed(nothing, positions)
    vectors, alone, places = (each[0].float().numpy() for each in (vectors, alone, places))
    return {
        "name": "what you typed" if typed else name,
        "characters": len(text),
        "tokens": len(ids),
        "vocab_size": tokenizer.vocab_size,
        "at": at,
        "ids": part,
        "pieces": [tokenizer.token(int(each)) for each in part],
        "bytes": [tokenizer.decode_bytes([int(each)]).hex(" ") for each in part],
        "windows": _windows(part, length, stride, tokenizer),
        "width": vectors.shape[1],
        "vectors": vectors[:, :WIDTH],
        "alone": alone[:, :WIDTH],
        "places": _alike(places),
        "nearest": _alike(vectors),
        "neighbours": [] if model == NO_MODEL else _neighbours(model, int(part[at])),
        "python": _code(typed, name, kind, vocab_size, start, count, length, stride) + built,
    }


def _chosen(state: State, session: Session) -> tuple[str, str]:
    """A file of the command line, one that was dropped, or the sample text."""
    files = {str(file): file for file in session.files if file.is_file()}
    asked = state.text("file")
    dropped = session.dropped_files(asked)
    titles = {key: file.name for key, file in dropped.items()}
    first = next(iter(files), SAMPLE)
    name = state.one_of("file", first, [*files, SAMPLE, *titles], titles)
    if name == SAMPLE:
        return name, sample_text()[:MOST_CHARACTERS]
    if name in files:
        return name, read_texts(files[name])[0][:MOST_CHARACTERS]
    try:
        text = dropped[name].content.decode()
    except UnicodeDecodeError as error:
        cause = f"got {titles[name]!r}, which is not text in UTF-8: byte {error.start}"
        raise InputError(cause, "a text file") from None
    if not text:
        raise InputError(f"got {titles[name]!r}, which is empty", "a file with text in it")
    return titles[name], text[:MOST_CHARACTERS]


@lru_cache(maxsize=8)
def _tokenizer(kind: str, vocab_size: int, text: str) -> Tokenizer:
    if kind in (BYTES, TRAINED):
        return Tokenizer.bytes() if kind == BYTES else Tokenizer.train(text, vocab_size)
    return Tokenizer.load(kind)


@lru_cache(maxsize=8)
def _encoded(kind: str, vocab_size: int, text: str) -> np.ndarray:
    return np.asarray(_tokenizer(kind, vocab_size, text).encode(text))


@lru_cache(maxsize=8)
def _embedding(vocab_size: int, added: str, scale: str) -> InputEmbedding:
    """Untrained, from the same random numbers each time."""
    sizes = {"d_model": WIDTH} | ({"max_seq_len": MOST_TOKENS} if added == "learned" else {})
    with seeded(0):
        encoding = PositionEncoding() if added == "none" else find(added)(**sizes)
        options: dict[str, Any] = {} if scale == "none" else {"scale": scale}
        return InputEmbedding(vocab_size, WIDTH, encoding=encoding, **options).eval()


@lru_cache(maxsize=2)
def _pretrained(folder: str) -> InputEmbedding:
    return InputEmbedding.from_pretrained(folder)


@lru_cache(maxsize=256)
def _neighbours(folder: str, token: int) -> list[list[Any]]:
    """The tokens whose rows are nearest to this one's: spelling, id and cosine."""
    tokenizer, found = _tokenizer(folder, 257, ""), _pretrained(folder).token.nearest(token, NEIGHBOURS)
    near = zip(found.ids.tolist(), found.scores.tolist(), strict=True)
    return [[tokenizer.token(each) if each < tokenizer.vocab_size else "", each, score] for each, score in near]


def _windows(ids: np.ndarray, length: int, stride: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """Of the shown tokens; where there are too few for a target there is none."""
    if len(ids) < 2:
        return {"inputs": [], "targets": [], "starts": []}
    windows = Windows(ids, length, stride)
    batch = windows.collate([windows[number] for number in range(len(windows))])
    rows = {
        side: [[tokenizer.token(each) if each >= 0 else "" for each in row] for row in batch[key].tolist()]
        for side, key in (("inputs", "ids"), ("targets", "targets"))
    }
    padded = (batch["targets"] < 0).tolist()
    rows["inputs"] = [
        ["" if no_target else piece for piece, no_target in zip(row, none, strict=True)]
        for row, none in zip(rows["inputs"], padded, strict=True)
    ]
    return {**rows, "starts": [number * stride for number in range(len(windows))]}


def _alike(vectors: np.ndarray) -> np.ndarray:
    """The cosine between each two; 0 for vectors of nothing."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit = np.divide(vectors, lengths, out=np.zeros_like(vectors), where=lengths > 0)
    return unit @ unit.T


def _code(typed: str, name: str, kind: str, vocab_size: int, start: int, count: int, length: int, stride: int) -> str:
    """Of a dropped file only the name is known, so that is what is opened."""
    read = f"open({name!r}, encoding='utf-8').read()"
    text = repr(typed) if typed else f"{'locant.text.sample_text()' if name == SAMPLE else read}[:{MOST_CHARACTERS}]"
    makers = {BYTES: "locant.Tokenizer.bytes()", TRAINED: f"locant.Tokenizer.train(text, {vocab_size})"}
    made = makers.get(kind, f"locant.Tokenizer.load({kind!r})")
    return (
        f"import torch\n\nimport locant\n\ntext = {text}\ntokenizer = {made}\n"
        f"ids = tokenizer.encode(text)[{start}:{start + count}]\n"
        "print([tokenizer.token(each) for each in ids])\n"
        f"windows = locant.Windows(ids, length={length}, stride={stride}) if len(ids) > 1 else []\n"
    )


def _code_of_untrained(added: str, scale: str) -> str:
    sizes = f"d_model={WIDTH}" + (f", max_seq_len={MOST_TOKENS}" if added == "learned" else "")
    encoding = "" if added == "none" else f", encoding=locant.encoding({added!r}, {sizes})"
    scaled = "" if scale == "none" else f", scale={scale!r}"
    return (
        "torch.manual_seed(0)\n"
        f"embedding = locant.InputEmbedding(tokenizer.vocab_size, {WIDTH}{encoding}{scaled})\n"
        "x = embedding(torch.from_numpy(ids).long()[None])\n"
    )


def _code_of_pretrained(folder: str, at: int) -> str:
    return (
        f"embedding = locant.InputEmbedding.from_pretrained({folder!r})\n"
        "x = embedding(torch.from_numpy(ids).long()[None])\n"
        f"near = embedding.token.nearest(int(ids[{at}]), {NEIGHBOURS})\n"
        "print([tokenizer.token(each) for each in near.ids])\n"
    )


SCREEN = Screen(
    title="Your text",
    place=7,
    about="From characters to vectors: tokens, their ids and bytes, sliding windows, embeddings with position added.",
    numbers=numbers,
)
