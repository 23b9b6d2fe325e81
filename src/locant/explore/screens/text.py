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
from locant.explore.screens import Screen
from locant.explore.session import Session, State
from locant.figures.plot import seeded
from locant.positions import PositionEncoding, Positions
from locant.positions.registry import encodings, find
from locant.text import Tokenizer, Windows, sample_text
from locant.text.reading import read_texts

SAMPLE, BYTES, TRAINED = "sample text", "bytes", "trained on this text"
MOST_CHARACTERS = 200_000
"""Of a text: more would make the tokenizer wait, and the page shows a few hundred tokens."""
MOST_TOKENS = 160
WIDTH = 64
"""Of untrained embeddings; of a model's, so many dimensions are drawn."""
NO_MODEL, NONE = "untrained", "none"
NEIGHBOURS = 8
SIZES = {"d_model": WIDTH, "max_seq_len": MOST_TOKENS, "height": 1, "width": MOST_TOKENS}
"""Of an encoding; to one of grids, the text is its only row."""


def numbers(state: State, session: Session) -> Mapping[str, Any]:
    """The tokens from a place on, the windows over them, and their vectors with and without position."""
    typed = state.text("typed", "", longest=4000)
    name, opened, text = _chosen(state, session)
    text = typed or text
    models = session.models
    model = state.one_of("model", next(iter(models)), [*models, NO_MODEL]) if models else NO_MODEL
    folder = "" if model == NO_MODEL else str(models[model])
    kind = folder or state.one_of("tokenizer", TRAINED, [TRAINED, BYTES])
    vocab_size = state.whole("vocabulary", 512, 257, 8192, log=True) if kind == TRAINED else 257
    tokenizer = _tokenizer(kind, vocab_size, text)
    ids = _encoded(kind, vocab_size, text)
    start = state.whole("start", 0, 0, max(len(ids) - 1, 0), log=True, follows=True)
    count = state.whole("count", 48, 4, MOST_TOKENS)
    length = state.whole("length", 8, 2, 64)
    stride = state.whole("stride", 4, 1, 64)
    part = ids[start : start + count]
    at = min(state.whole("at", 0, 0, MOST_TOKENS), len(part) - 1)
    if model == NO_MODEL:
        kinds = {each: kind for each, kind in encodings().items() if {*kind.sizes()} <= SIZES.keys()}
        embedders = [NONE, *(each for each, kind in kinds.items() if "embed" in kind.doors())]
        added = state.one_of("encoding", "sinusoidal", embedders)
        scale = state.one_of("scale", "sqrt_d_model", [NONE, "sqrt_d_model"])
        embedding, built = _embedding(tokenizer.vocab_size, added, scale), _code_of_untrained(added, scale)
    else:
        embedding, built = _pretrained(folder), _code_of_pretrained(session.written(model), at)
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
        "neighbours": _neighbours(folder, int(part[at])) if folder else [],
        "python": _code(
            repr(typed) if typed else f"{opened}[:{MOST_CHARACTERS}]",
            session.written(model) if folder else kind,
            vocab_size,
            f"{start}:{start + count}",
            f"length={length}, stride={stride}",
        )
        + built,
    }


def _chosen(state: State, session: Session) -> tuple[str, str, str]:
    """A file of the command line, one that was dropped, or the sample text: its name, how Python reads it, its text."""
    files = session.texts
    dropped = session.dropped_files(state.text("file"))
    titles = {key: file.name for key, file in dropped.items()}
    name = state.one_of("file", next(iter(files), SAMPLE), [*files, SAMPLE, *titles], titles)
    if name == SAMPLE:
        return name, "locant.text.sample_text()", sample_text()[:MOST_CHARACTERS]
    if name in files:
        return name, _opening(session.written(name)), read_texts(files[name])[0][:MOST_CHARACTERS]
    try:
        text = dropped[name].content.decode()
    except UnicodeDecodeError as error:
        cause = f"got {titles[name]!r}, which is not text in UTF-8: byte {error.start}"
        raise InputError(cause, "a text file") from None
    if not text:
        raise InputError(f"got {titles[name]!r}, which is empty", "a file with text in it")
    return titles[name], _opening(titles[name]), text[:MOST_CHARACTERS]


def _opening(name: str) -> str:
    return f"open({name!r}, encoding='utf-8').read()"


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
    with seeded(0):
        encoding = PositionEncoding() if added == NONE else find(added)(**_sizes(added))
        options: dict[str, Any] = {} if scale == NONE else {"scale": scale}
        return InputEmbedding(vocab_size, WIDTH, encoding=encoding, **options).eval()


def _sizes(added: str) -> dict[str, int]:
    """What the constructor of this encoding requires."""
    return {size: SIZES[size] for size in find(added).sizes()}


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
    targets = batch["targets"]
    rows = {
        side: [[tokenizer.token(each) if each >= 0 else "" for each in row] for row in ids.tolist()]
        for side, ids in (("inputs", batch["ids"].where(targets >= 0, -1)), ("targets", targets))
    }
    return {**rows, "starts": [number * stride for number in range(len(windows))]}


def _alike(vectors: np.ndarray) -> np.ndarray:
    """The cosine between each two; 0 for vectors of nothing."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit = np.divide(vectors, lengths, out=np.zeros_like(vectors), where=lengths > 0)
    return unit @ unit.T


def _code(text: str, kind: str, vocab_size: int, part: str, windows: str) -> str:
    makers = {BYTES: "locant.Tokenizer.bytes()", TRAINED: f"locant.Tokenizer.train(text, {vocab_size})"}
    made = makers.get(kind, f"locant.Tokenizer.load({kind!r})")
    return (
        f"import torch\n\nimport locant\n\ntext = {text}\ntokenizer = {made}\n"
        f"ids = tokenizer.encode(text)[{part}]\n"
        "print([tokenizer.token(each) for each in ids])\n"
        f"windows = locant.Windows(ids, {windows}) if len(ids) > 1 else []\n"
    )


def _code_of_untrained(added: str, scale: str) -> str:
    encoding = ""
    if added != NONE:
        sizes = ", ".join(f"{size}={value}" for size, value in _sizes(added).items())
        encoding = f", encoding=locant.encoding({added!r}, {sizes})"
    scaled = "" if scale == NONE else f", scale={scale!r}"
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


ABOUT = "From characters to vectors: tokens, their ids and bytes, sliding windows, embeddings with position added."
SCREENS = {"text": Screen("Your text", 7, ABOUT, numbers)}
