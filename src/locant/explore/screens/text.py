"""The screen Your text: its tokens, the windows for training, its embeddings, rotated keys and attention weights.

They are computed in the small model of this package, in a random model, or in a model from a folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from locant.embedding import InputEmbedding
from locant.errors import InputError, LocantError
from locant.explore import models
from locant.explore.models import FOLDER, Layer
from locant.explore.screens import Screen, encodings_of_text
from locant.explore.session import Session, State
from locant.text import Tokenizer, Windows, sample_text
from locant.text.reading import read_texts

SENTENCE = "The function returns a list of strings. If the list is empty, the function returns None."
EXAMPLE, SAMPLE, BYTES, TRAINED = "a sentence", "sample text", "bytes", "trained on this text"
MOST_CHARACTERS = 50_000
"""The largest number of characters. A longer text would delay the page, which shows only a few hundred tokens."""
PARTS = ("weights", "keys", "rotated", "added")
"""The parts of a layer that are drawn."""
WIDTH = 64
"""The number of embedding dimensions that are drawn."""
SMALL, UNTRAINED = "small, trained", "untrained"
TITLES = {"nope": "none (NoPE)", "own": "the model's own"}
SWAPPED = "The model's attention with other positions ({}) than in its training."
NEIGHBOURS = 8
NEAR = """near = embedding.token.nearest(int(ids[{at}]), 8)
print([tokenizer.token(each) for each in near.ids])
"""
FAR = """distance = (torch.arange(len(ids))[:, None] - torch.arange(len(ids))).abs()
far = torch.stack([(layer.weights * distance).sum(-1).mean(-1) for layer in layers])
"""
READ, UNREAD = "read the model", "tables alone"
MOST_BYTES = 2**30
"""The largest size of weights that are read by default."""
DESCRIPTIONS = {
    SMALL: "Trained: a decoder of 2 layers, trained on the Python documentation with each of these encodings in turn.",
    UNTRAINED: "Untrained: the weights are random, so only the effect of positions has a meaning.",
}


def numbers(state: State, session: Session) -> Mapping[str, Any]:
    """Return the tokens that begin at a place, the windows over them, their vectors and their attention weights."""
    typed = state.text("typed", "", longest=4000)
    name, opened, text = _read_text(state, session)
    text = typed or text
    model = state.one_of("model", next(iter(session.models), SMALL), [*session.models, SMALL, UNTRAINED])
    folder = "" if model in DESCRIPTIONS else str(session.models[model])
    kind = folder or (str(FOLDER) if model == SMALL else state.one_of("tokenizer", TRAINED, [TRAINED, BYTES]))
    vocab_size = state.whole("vocabulary", 512, 257, 8192, log=True) if kind == TRAINED else 257
    tokenizer, ids = _tokenizer(kind, vocab_size, text), _encode(kind, vocab_size, text)
    start = state.whole("start", 0, 0, max(len(ids) - 1, 0), log=True, follows=True)
    count = state.whole("count", 48, 4, models.LENGTH)
    length, stride = state.whole("length", 8, 2, 64), state.whole("stride", 4, 1, 64)
    part = ids[start : start + count]
    at = state.whole("at", min(11, len(part) - 1), 0, len(part) - 1, follows=True)
    names = models.OVERRIDES if folder else models.ENCODINGS if model == SMALL else encodings_of_text()
    encoding = state.one_of("encoding", "own" if folder else "rotary", names, TITLES)
    if folder:
        embedding = _load_pretrained(folder)
        layers, description = _in_folder(state, folder, encoding, tuple(map(int, part)))
    else:
        size = () if model == SMALL else (tokenizer.vocab_size,)
        decoder = (models.small_model if model == SMALL else models.untrained_model)(encoding, *size)
        embedding, layers = decoder.embedding, models.layers_of(decoder, part.tolist())
        description = DESCRIPTIONS[model]
    with torch.no_grad():
        tokens = torch.from_numpy(part).long()[None]
        alone, vectors = (each(tokens)[0].float().numpy() for each in (embedding.token, embedding))
    attention = _attention(state, layers) if layers else {}
    written = session.path_in_code(model) if folder else kind
    return {
        "name": "your input" if typed else name,
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
        "neighbours": _neighbours(folder, int(part[at])) if folder else [],
        "told": description,
        "encoding": encoding,
        "attention": attention,
        "python": _codes(
            _code_of_tokens(repr(typed) if typed else opened, written, vocab_size, f"{start}:{start + count}")
            + f"windows = locant.Windows(ids, length={length}, stride={stride}) if len(ids) > 1 else []\n",
            written if folder else "", model, encoding, attention, at,
        ),
    }  # fmt: skip


def _read_text(state: State, session: Session) -> tuple[str, str, str]:
    """Return the name, the Python code and the text of a command-line file, a dropped file or a built-in text."""
    files = session.texts
    name, dropped = session.choose(state, "file", next(iter(files), EXAMPLE), [*files, EXAMPLE, SAMPLE])
    if name == EXAMPLE:
        return name, repr(SENTENCE), SENTENCE
    if name == SAMPLE:
        return name, f"locant.text.sample_text()[:{MOST_CHARACTERS}]", sample_text()[:MOST_CHARACTERS]
    if dropped is None:
        return name, _code_of_opening(session.path_in_code(name)), read_texts(files[name])[0][:MOST_CHARACTERS]
    try:
        text = dropped.content.decode()
    except UnicodeDecodeError as error:
        cause = f"got {dropped.name!r}, which is not text in UTF-8: byte {error.start}"
        raise InputError(cause, "use a text file in UTF-8") from None
    if not text:
        raise InputError(f"got {dropped.name!r}, which is empty", "use a file that contains text")
    return dropped.name, _code_of_opening(dropped.name), text[:MOST_CHARACTERS]


def _code_of_opening(name: str) -> str:
    return f"open({name!r}, encoding='utf-8').read()[:{MOST_CHARACTERS}]"


@lru_cache(maxsize=8)
def _tokenizer(kind: str, vocab_size: int, text: str) -> Tokenizer:
    if kind in (BYTES, TRAINED):
        return Tokenizer.bytes() if kind == BYTES else Tokenizer.train(text, vocab_size)
    return Tokenizer.load(kind)


@lru_cache(maxsize=8)
def _encode(kind: str, vocab_size: int, text: str) -> np.ndarray:
    return np.asarray(_tokenizer(kind, vocab_size, text).encode(text))


@lru_cache(maxsize=2)
def _load_pretrained(folder: str) -> InputEmbedding:
    return InputEmbedding.from_pretrained(folder)


@lru_cache(maxsize=256)
def _neighbours(folder: str, token: int) -> list[list[Any]]:
    """Return the spelling, id and cosine of each token whose row is nearest to the row of this token."""
    tokenizer, nearest = _tokenizer(folder, 257, ""), _load_pretrained(folder).token.nearest(token, NEIGHBOURS)
    pairs = zip(nearest.ids.tolist(), nearest.scores.tolist(), strict=True)
    return [[tokenizer.token(each) if each < tokenizer.vocab_size else "", each, score] for each, score in pairs]


def _windows(ids: np.ndarray, length: int, stride: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the windows over the tokens shown, or none if there are too few for a target."""
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


@lru_cache(maxsize=8)
def _layers(folder: str, ids: tuple[int, ...], way: str) -> list[Layer]:
    return models.layers_in_folder(folder, ids, way)


def _in_folder(state: State, folder: str, way: str, ids: tuple[int, ...]) -> tuple[list[Layer], str]:
    """Return the layers of a model and a sentence about them.

    Return no layers if the model is not read or hides them.
    """
    size = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
    if state.one_of("attention", READ if size <= MOST_BYTES else UNREAD, [READ, UNREAD]) == UNREAD:
        return [], f"Only the tables of this model are read, because its weights are {size / 1e9:.1f} GB."
    try:
        layers = _layers(folder, ids, way)
    except (LocantError, OSError, ValueError, RuntimeError) as error:
        cause = error.cause if isinstance(error, LocantError) else str(error).partition("\n")[0]
        return [], f"There is no attention to show: {cause}."
    if not layers:
        return [], "There is no attention to show: this model does not return its attention weights."
    return layers, "The model's own attention." if way == "own" else SWAPPED.format(TITLES.get(way, way))


def _attention(state: State, layers: Sequence[Layer]) -> dict[str, Any]:
    """Return one head of one layer, and the mean attention distance of each head of each layer."""
    at = state.whole("layer", 0, 0, len(layers) - 1, follows=True)
    layer = layers[at]
    head = state.whole("head", 0, 0, len(layer.weights) - 1, follows=True)
    keys, rotated, added = (
        None if each is None else each[head % len(each)].numpy() for each in (layer.keys, layer.rotated, layer.added)
    )
    order = torch.arange(layer.weights.shape[-1])
    distance = (order[:, None] - order).abs()
    later = np.where(order[:, None] < order, np.nan, 0)
    return {
        "layer": at,
        "head": head,
        "weights": np.where(layer.weights[head].triu(1).any(), 0, later) + layer.weights[head].numpy(),
        "keys": keys,
        "rotated": rotated if keys is None or rotated is None or not np.array_equal(keys, rotated) else None,
        "added": None if added is None else added + later,
        "far": torch.stack([(each.weights * distance).sum(-1).mean(-1) for each in layers]).numpy(),
    }


def _code_of_tokens(text: str, kind: str, vocab_size: int, part: str) -> str:
    makers = {BYTES: "locant.Tokenizer.bytes()", TRAINED: f"locant.Tokenizer.train(text, {vocab_size})",
              str(FOLDER): "locant.Tokenizer.load(FOLDER)"}  # fmt: skip
    imported = "from locant.explore.models import FOLDER\n" if kind == str(FOLDER) else ""
    return (
        f"import torch\n\nimport locant\n{imported}\ntext = {text}\n"
        f"tokenizer = {makers.get(kind, f'locant.Tokenizer.load({kind!r})')}\n"
        f"ids = tokenizer.encode(text)[{part}]\nprint([tokenizer.token(each) for each in ids])\n"
    )


def _codes(
    tokens: str, folder: str, model: str, encoding: str, attention: Mapping[str, Any], at: int
) -> dict[str, str]:
    """Return the code of each picture. It begins with the code of the tokens."""
    vectors = "x = embedding(torch.from_numpy(ids).long()[None])\n"
    if folder:
        used, called = "layers_in_folder", f"layers_in_folder({folder!r}, ids, {encoding!r})"
        vectors = f"embedding = locant.InputEmbedding.from_pretrained({folder!r})\n{vectors}{NEAR.format(at=at)}"
    else:
        maker = "small_model" if model == SMALL else "untrained_model"
        arguments = f"{encoding!r}" if model == SMALL else f"{encoding!r}, tokenizer.vocab_size"
        used, called = f"layers_of, {maker}", f"layers_of({maker}({arguments}), ids)"
        vectors = f"from locant.explore.models import {maker}\n\nembedding = {maker}({arguments}).embedding\n{vectors}"
    codes = {"tokens": tokens, "vectors": tokens + vectors}
    if attention:
        layers = f"{tokens}from locant.explore.models import {used}\n\nlayers = {called}\n"
        chosen = "{part} = layers[{layer}].{part}[{head}]\n"
        parts = {name: chosen.format(part=name, **attention) for name in PARTS if attention[name] is not None}
        codes |= {name: layers + code for name, code in parts.items()}
        codes |= {"attended": f"{codes['weights']}print(weights[{at}])\n", "far": layers + FAR}
    return codes


ABOUT = "From characters to attention: tokens, windows, embeddings, rotation and attention weights."
SCREENS = {"text": Screen("Your text", 7, ABOUT, numbers)}
