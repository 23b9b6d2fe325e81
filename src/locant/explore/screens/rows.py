"""The screen Rows: documents, padding, a cache, a window and ranks, the attention mask, and the backend to run."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from locant.arguments import MAX_INT32, short_repr, whole
from locant.attention.choice import choose_backend
from locant.attention.inputs import AttentionInputs
from locant.attention.mask import AttentionMask
from locant.errors import LocantError, RangeError
from locant.explore.screens import Screen, call_with_code
from locant.explore.session import Session, State
from locant.figures import SIZES
from locant.figures.plot import encoding_to_draw
from locant.positions import PositionEncoding, Positions, generalizing
from locant.positions.fields import TokenFeatures
from locant.positions.registry import encodings

MAX_TOKENS = 192
"""The largest number of tokens in a row or cache, which are all drawn."""
NONE = "none"
BOTH, CAUSAL = "both directions", "causal"


COUNTED = "counted"
INDICES = {
    COUNTED: COUNTED, "randomized": "random, in order", "coupled": "coupled by significance",
    "abacus": "within numbers (abacus)",
}  # fmt: skip
SUM = "653+49=207"
"""A sum with the units of the numbers last, and the units of the result first."""


class Row(NamedTuple):
    """The tokens of one row, and the Python that makes them."""

    queries: Positions
    keys: Positions | None
    python: str

    @classmethod
    def of(cls, function: Callable[..., Positions], *arguments: Any, **options: Any) -> Row:
        """Return the row that this function makes, without a cache."""
        positions, python = call_with_code(function, *arguments, **options)
        return cls(positions, None, f"positions = {python}\n")


class RowSettings(NamedTuple):
    """The settings of a row, with its cache, its ranks, and a function that makes it at a multiple of its length."""

    row: Callable[[int], Row]
    cached: int = 0
    world: int = 1
    zigzag: bool = False
    parts: int = 1
    """The number of equal parts of every document and of the padding."""
    characters: str = ""
    """The characters of its tokens."""


def numbers(state: State, session: Session) -> Mapping[str, Any]:
    """Return the place of every token, and for every query and key whether the query attends to the key."""
    indices = state.one_of("indices", COUNTED, list(INDICES), INDICES)
    settings = _read_sum(state, indices) if indices in ("coupled", "abacus") else _read_documents(state, indices)
    causal = state.one_of("direction", CAUSAL, [CAUSAL, BOTH]) == CAUSAL
    window = state.whole("window", 0, 0, MAX_TOKENS) or None
    name = state.one_of("encoding", "rotary", [NONE, *encodings()])
    times = 1 if settings.characters else state.whole("times", 1, 1, 512, log=True)
    row, longer = settings.row(1), settings.row(times)
    at = state.whole("at", int((row.queries.document >= 0).sum()) - 1, 0, MAX_TOKENS + 64)

    keys = row.queries if row.keys is None else row.keys
    allowed = row.queries.mask(row.keys, causal=causal, window=window)[0, 0].numpy()
    distance = (row.queries.order[0][:, None] - keys.order[0]).numpy().astype(np.float64)
    distance[~allowed] = np.nan
    ranks = np.zeros(row.queries.seq_len, np.int64)
    for rank in range(settings.world):
        ranks[row.queries.shard_slots(rank, settings.world, settings.zigzag).numpy()] = rank
    options = ["k_positions"] * (row.keys is not None) + ["causal=False"] * (not causal)
    options += [] if window is None else [f"window={window}"]
    imports = "from locant.positions import generalizing\n" if "generalizing." in row.python else ""
    python = f"from locant import Positions\n{imports}\n{row.python}"
    variable = "positions" if row.keys is None else "k_positions"
    mask = f"mask = positions.mask({', '.join(options)})\n"
    mask += f"distance = positions.order[0][:, None] - {variable}.order[0]\n"
    mask += 'distance = distance.double().where(mask[0, 0], float("nan"))\n'
    if settings.world > 1:
        python += f"shard = positions.shard(rank, {settings.world}, zigzag={settings.zigzag})  # on each rank\n"
    return {
        "queries": _tokens(row.queries) | {"rank": ranks},
        "keys": _tokens(keys),
        "cached": 0 if row.keys is None else settings.cached,
        "pairs": distance,
        "seen": allowed.sum(1),
        "work": [int(allowed[ranks == rank].sum()) for rank in range(settings.world)],
        "at": min(at, row.queries.seq_len - 1),
        "backend": _backend(longer, name, causal, None if window is None else window * times),
        "parts": settings.parts,
        "characters": settings.characters,
        "python": {"row": python, "mask": python + mask},
    }


def _read_documents(state: State, indices: str) -> RowSettings:
    """Read the settings of documents, padding, and a cache before the first document."""
    lengths = _lengths(state.text("documents", "5, 3, 8", longest=400))
    padding = state.whole("padding", 2, 0, 64)
    counted = indices == COUNTED
    side = state.one_of("side", "right", ["right", "left"]) if counted else "right"
    cached = state.whole("cache", 0, 0, MAX_TOKENS) if counted else 0
    world = state.whole("ranks", 1, 1, 8)
    zigzag = world > 1 and state.one_of("split", "zigzag", ["zigzag", "contiguous"]) == "zigzag"
    parts = world * (1 + zigzag) if world > 1 else 1
    *lengths, padding = (-(-each // parts) * parts for each in (*lengths, padding))  # the next multiple of parts
    below = 0 if counted else state.whole("below", 2048, max(lengths), MAX_INT32, log=True, follows=True)
    seed = 0 if counted else state.whole("seed", 0, 0, 99)

    def row(times: int) -> Row:
        longer = [each * times for each in lengths]
        if counted:
            return _row(longer, padding * times, side, cached * times)
        largest = max(below, *longer)  # a row for the backend may be too long for this limit
        return Row.of(generalizing.randomized, [longer], largest, seed=seed, length=sum(longer) + padding * times)

    return RowSettings(row, cached, world, zigzag, parts)


def _read_sum(state: State, indices: str) -> RowSettings:
    """Read the settings of an equation, whose digits have positions by their places."""
    text = state.text("sum", SUM, longest=MAX_TOKENS)
    numbers = [len(digits) for digits in re.findall(r"[0-9]+", text)]
    if indices == "coupled" and not re.fullmatch(r"[0-9]+([^0-9][0-9]+)+", text):
        raise RangeError(f"got {short_repr(text)} for sum, expected numbers with one sign between two", f"sum={SUM}")
    if indices == "coupled":
        row = Row.of(generalizing.coupled, numbers)
    elif numbers:
        positions = generalizing.abacus([*map(ord, text)], [*map(ord, "0123456789")])
        python = f"ids, digits = [*map(ord, {text!r})], [*map(ord, '0123456789')]\n"
        row = Row(positions, None, f"{python}positions = generalizing.abacus(ids, digits)\n")
    else:
        raise RangeError(f"got {short_repr(text)} for sum, expected a text with numbers", f"sum={SUM}")
    return RowSettings(lambda _: row, characters=text)


def _lengths(text: str) -> list[int]:
    words = text.replace(",", " ").split()
    remedy = "documents=5, 3, 8"
    numbers = [int(word) if word.isdecimal() and len(word) < 9 else word for word in words]
    lengths = [whole("documents", number, 1, MAX_TOKENS, remedy=remedy) for number in numbers]
    if not 1 <= sum(lengths) <= MAX_TOKENS:
        got = f"got documents of {sum(lengths)} tokens in all" if lengths else f"got {short_repr(text)} for documents"
        raise RangeError(f"{got}, expected 1 to {MAX_TOKENS}", remedy)
    return lengths


def _row(lengths: list[int], padding: int, side: str, cached: int) -> Row:
    """Return a row, with the shortest Python code. Cached tokens precede the first document and belong to it."""
    total = sum(lengths)
    if cached and len(lengths) == 1 and not padding:
        keys, python = call_with_code(Positions.arange, cached + total)
        row = Row.of(Positions.after, cached, total)
        return Row(row.queries, keys, f"{row.python}k_positions = {python}\n")
    if not cached and not padding and len(lengths) == 1:
        return Row.of(Positions.arange, total)
    if not cached and (side == "right" or not padding):
        return Row.of(Positions.packed, lengths, **({"length": total + padding} if padding else {}))
    index = [np.arange(length) + (cached if number == 0 else 0) for number, length in enumerate(lengths)]
    document = [np.full(length, number) for number, length in enumerate(lengths)]
    blank, no_document = np.zeros(padding, np.int64), np.full(padding, -1)
    if side == "right" or cached:
        index, document = [*index, blank], [*document, no_document]
    else:
        index, document = [blank, *index], [no_document, *document]
    indices, documents = np.concatenate(index).tolist(), np.concatenate(document).tolist()
    positions = Positions.of(indices, documents)
    python = f"positions = Positions.of({indices},\n                         document={documents})\n"
    if not cached:
        return Row(positions, None, python)
    keys = Positions.of([*range(cached), *indices], [0] * cached + documents)
    python += f"cached = Positions.arange({cached})\nk_positions = Positions.cat([cached, positions])\n"
    return Row(positions, keys, python)


def _tokens(positions: Positions) -> dict[str, np.ndarray]:
    return {name: getattr(positions, name)[0].numpy() for name in ("index", "document", "order")}


def _backend(row: Row, name: str, causal: bool, window: int | None) -> dict[str, Any]:
    """Return the backend that `attend` would choose on a CPU, and the reason. The tensors for this take no memory."""
    mask = AttentionMask(row.queries, row.keys, causal, window)
    number = torch.zeros(())
    q, k = (number.expand(1, SIZES["num_heads"], side.seq_len, SIZES["head_dim"]) for side in (mask.queries, mask.keys))
    try:
        encoding = PositionEncoding() if name == NONE else encoding_to_draw(name, length=row.queries.seq_len)
        with torch.no_grad():
            read = encoding.read(torch.zeros(1, 1, SIZES["d_model"]), Positions.arange(1)).read
            if any(x is not None for x in read):
                mask = AttentionMask(_with_read(mask.queries, read), _with_read(mask.keys, read), causal, window)
            choice = choose_backend("auto", AttentionInputs(q, k, k, mask, encoding))
        backend, reason = choice.name, choice.reason
    except LocantError as error:  # the row is still shown
        backend, reason = NONE, error.cause
    sizes = {"queries": mask.queries.seq_len, "keys": mask.keys.seq_len, "heads": SIZES["num_heads"]}
    return {"name": backend, "reason": reason, **sizes}


def _with_read(positions: Positions, read: TokenFeatures) -> Positions:
    """Give every token the features of one token, without using memory."""
    expanded = (None if x is None else x.expand(1, positions.seq_len, *x.shape[2:]) for x in read)
    return replace(positions, read=TokenFeatures(*expanded))


ABOUT = "Documents, padding, a cache, a window and ranks: the position of each token, and the tokens it attends to."
SCREENS = {"rows": Screen("Rows", 5, ABOUT, numbers)}
