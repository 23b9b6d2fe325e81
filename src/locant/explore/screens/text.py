"""Your text: its tokens with their ids and bytes, the windows that a model trains on, and embeddings with position."""

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


def numbers(state: State, session: Session) -> Mapping[str, Any]:
    """The tokens from a place on, the windows over them, and their vectors with and without position."""
    typed = state.text("typed", "", longest=4000)
    name, text = _chosen(state, session)
    text = typed or text
    kind = state.one_of("tokenizer", TRAINED, [TRAINED, BYTES])
    vocab_size = state.whole("vocabulary", 512, 257, 8192, log=True) if kind == TRAINED else 257
    tokenizer = _tokenizer(kind, vocab_size, text)
    ids = _encoded(kind, vocab_size, text)
    start = state.whole("start", 0, 0, max(len(ids) - 1, 0), log=True)
    count = state.whole("count", 48, 4, MOST_TOKENS)
    length = state.whole("length", 8, 2, 64)
    stride = state.whole("stride", 4, 1, 64)
    embedders = ["none", *(each for each, kind in encodings().items() if "embed" in kind.doors())]
    added = state.one_of("encoding", "sinusoidal", embedders)
    scale = state.one_of("scale", "sqrt_d_model", ["none", "sqrt_d_model"])
    part = ids[start : start + count]
    at = state.whole("at", 0, 0, MOST_TOKENS)
    embedding = _embedding(tokenizer.vocab_size, added, scale)
    with torch.no_grad():
        tokens = torch.from_numpy(part).long()[None]
        vectors = embedding(tokens)[0].numpy()
        alone = embedding.token(tokens)[0].numpy()
        places = embedding.encoding.embed(torch.zeros(1, len(part), WIDTH), Positions.arange(len(part)))[0].numpy()
    return {
        "name": "what you typed" if typed else name,
        "characters": len(text),
        "tokens": len(ids),
        "vocab_size": tokenizer.vocab_size,
        "at": min(at, len(part) - 1),
        "ids": part,
        "pieces": [tokenizer.token(int(each)) for each in part],
        "bytes": [tokenizer.decode_bytes([int(each)]).hex(" ") for each in part],
        "windows": _windows(part, length, stride, tokenizer),
        "vectors": vectors,
        "alone": alone,
        "places": _alike(places),
        "nearest": _alike(vectors),
        "python": _code(typed, name, kind, vocab_size, start, count, length, stride, added, scale),
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
    return Tokenizer.bytes() if kind == BYTES else Tokenizer.train(text, vocab_size)


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


def _code(
    typed: str, name: str, kind: str, vocab_size: int, start: int, count: int, length: int, stride: int, added: str,
    scale: str,
) -> str:  # fmt: skip
    """Of a dropped file only the name is known, so that is what is opened."""
    read = f"open({name!r}, encoding='utf-8').read()"
    text = repr(typed) if typed else f"{'locant.text.sample_text()' if name == SAMPLE else read}[:{MOST_CHARACTERS}]"
    made = "locant.Tokenizer.bytes()" if kind == BYTES else f"locant.Tokenizer.train(text, {vocab_size})"
    sizes = f"d_model={WIDTH}" + (f", max_seq_len={MOST_TOKENS}" if added == "learned" else "")
    encoding = "" if added == "none" else f", encoding=locant.encoding({added!r}, {sizes})"
    scaled = "" if scale == "none" else f", scale={scale!r}"
    return (
        f"import torch\n\nimport locant\n\ntext = {text}\ntokenizer = {made}\n"
        f"ids = tokenizer.encode(text)[{start}:{start + count}]\n"
        "print([tokenizer.token(each) for each in ids])\n"
        f"windows = locant.Windows(ids, length={length}, stride={stride}) if len(ids) > 1 else []\n"
        "torch.manual_seed(0)\n"
        f"embedding = locant.InputEmbedding(tokenizer.vocab_size, {WIDTH}{encoding}{scaled})\n"
        "x = embedding(torch.from_numpy(ids).long()[None])\n"
    )


SCREEN = Screen(
    title="Your text",
    place=6,
    about="From characters to vectors: tokens, their ids and bytes, sliding windows, embeddings with position added.",
    numbers=numbers,
)
